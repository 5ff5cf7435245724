"""One sentence through a model: the trace is the model's own pass, and what it shows of it is right."""

import base64
import dataclasses
import functools
import html.parser
import io
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from zoo import Block, DataConfig, DenseConfig, Experiment, ModelConfig, SoftConfig, SparseConfig
from zoo.cli import main
from zoo.data.tokenizer import ByteTokenizer
from zoo.laws.case import noisy
from zoo.models.decoder import build
from zoo.trace import TraceError, record, trace

TEXT = "A <cat> é"
BASE = ModelConfig(vocab_size=259, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, context_length=16)
SIZES = {"n_experts": 4, "d_ff": 8}
# Every placement of norms, mixture, position and head that the steps tell apart.
MODELS = {
    "sparse": {
        "n_layers": 3,
        "moe": SparseConfig(**SIZES, n_shared_experts=1, shared_gate=True),
        "pattern": (Block(window=3), Block(mixture=False)),
        "attention_sinks": True,
    },
    "routed": {
        "moe": SparseConfig(**SIZES, score="sigmoid", n_null_experts=2, selection_bias=True, routed_scale=2.5),
        "norm_placement": "deepnorm",
        "position": "learned",
        "tie_embeddings": False,
        "head_bias": True,
    },
    "dense": {
        "moe": DenseConfig(**SIZES),
        "norm_placement": "sandwich",
        "attention_softcap": 5.0,
        "logit_softcap": 9.0,
    },
    "soft": {"moe": SoftConfig(**SIZES, segment_length=4), "parallel": "two_norms", "qk_norm": "head"},
    "parallel": {"parallel": "one_norm", "position": "alibi", "norm": "layernorm", "glu": False, "remat": "full"},
    "post": {"norm_placement": "post", "position": "sinusoidal", "embedding_norm": True, "glu_clamp": 7.0},
}


@functools.cache
def make(name: str) -> tuple:
    """A small model, and parameters that hide nothing."""
    model = build(dataclasses.replace(BASE, **MODELS[name]))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return model, noisy(params, 0, 0.3)


@pytest.fixture(scope="module", params=MODELS)
def traced(request):
    """The trace of a model, and what the model itself gives."""
    model, params = make(request.param)
    found = trace(model, params, TEXT, ByteTokenizer(), note="a note")
    return found, jax.jit(model.apply)({"params": params}, found.tokens[None])


@pytest.fixture(scope="module")
def sparse():
    return trace(*make("sparse"), TEXT, ByteTokenizer(), note="a note")


def named(layer, name: str) -> np.ndarray:
    (step,) = (step for step in layer.steps if step.name == name)
    return step.value


def test_the_trace_is_the_models_own_pass(traced):
    found, output = traced
    np.testing.assert_allclose(found.logits, output.logits[0], rtol=0, atol=1e-5)
    assert len(found.layers) == found.config.n_layers


def test_the_experts_are_those_that_the_model_counts(traced):
    found, output = traced
    repeats = [stats and jax.tree.map(np.asarray, stats.counts) for stage in output.routing for stats in stage]
    blocks = [len(stage) for stage in output.routing]
    assert sum(counts is None for counts in repeats) == sum(
        all(layer.experts is None for layer in group) for group in _positions(found, blocks)
    )
    for counts, group in zip(repeats, _positions(found, blocks), strict=True):
        for i, layer in enumerate(group if counts is not None else []):
            served = layer.experts.chosen if layer.experts.kind == "sparse" else layer.experts.weights
            np.testing.assert_allclose(served.sum(0), counts[i], atol=1e-5)


def _positions(found, blocks: list[int]) -> list[list]:
    """The layers by [stage, block], in the order of `output.routing`."""
    groups, layers = [], list(found.layers)
    for stage, n in zip(found.config.expand(), blocks, strict=True):
        here, layers = layers[: stage.repeat * n], layers[stage.repeat * n :]
        groups += [here[i::n] for i in range(n)]
    return groups


def test_every_array_has_the_shape_that_it_names(traced):
    found, _ = traced
    sizes = {"T": len(found.tokens), "V": 259, "D": 16, "H": 4, "K": 2, "h": 4, "F": 24}
    if found.config.moe is not None:
        sizes |= {"E": 4 + getattr(found.config.moe, "n_null_experts", 0), "k": found.config.moe.k}
    for step in [*found.first, *(step for layer in found.layers for step in layer.steps), *found.last]:
        assert step.value.shape == tuple(sizes[letter] for letter in step.axes), step.name
        assert np.all(np.isfinite(step.value)), step.name


def test_each_step_follows_from_those_before(traced):
    found, _ = traced
    stream = found.first[-1].value
    for layer in found.layers:
        weights = named(layer, "attention weights")
        assert not weights[:, ~layer.looks.visible].any()
        scores = np.where(layer.looks.visible, named(layer, "scores"), -np.inf)
        shares = jax.nn.softmax(scores, axis=-1)
        kept = weights.sum(-1, keepdims=True)  # less than 1 with a sink
        np.testing.assert_allclose(weights, shares * kept, atol=1e-5)
        assert layer.block.attention_sinks == bool(np.any(kept < 0.99))
        values = np.repeat(named(layer, "values"), 2, axis=1)
        np.testing.assert_allclose(named(layer, "heads"), np.einsum("hts,shd->thd", weights, values), atol=1e-5)
        stream = _added(layer, stream)
    np.testing.assert_allclose(found.last[-1].value, jax.nn.softmax(found.logits, axis=-1), atol=1e-6)
    assert found.guesses[0].token == found.logits[-1].argmax() and len(found.guesses) == 10


def _added(layer, stream: np.ndarray) -> np.ndarray:
    """The stream after a layer, where it is a plain sum of what the trace shows; checks it."""
    output = "output" if layer.experts is None else "mixture output"
    after = layer.steps[-1].value
    if layer.block.parallel:
        total = stream + named(layer, "attention output") + named(layer, output)
    elif layer.block.norm_placement == "pre":
        total = named(layer, "stream after attention")
        np.testing.assert_allclose(total, stream + named(layer, "attention output"), atol=1e-5)
        total = total + named(layer, output)
    elif layer.block.norm_placement == "sandwich":
        total = (
            stream + named(layer, "normed output of attention") + named(layer, "normed output of the feed-forward part")
        )
    else:
        return after
    np.testing.assert_allclose(after, total, atol=2e-5)
    return after


def test_the_text_names_all_steps_and_is_narrow(traced):
    found, _ = traced
    text = str(found)
    assert all(len(line) <= 100 for line in text.splitlines())
    for step in {step for layer in found.layers for step in (s.name for s in layer.steps)}:
        assert f"\n{step} " in text
    assert "a note" in text and "A' ' ' '<' 'c'" in text


def test_a_long_text_is_cut_between_its_pieces():
    model, params = make("parallel")
    model = model.clone(config=dataclasses.replace(model.config, context_length=80))
    text = trace(model, params, "ab " * 26, ByteTokenizer()).text()
    assert "' '\n'a' 'b'" in text and all(len(line) <= 100 for line in text.splitlines())
    assert text.count("(the last 64 tokens)") == 1 and " 13 'b' " not in text and " 14 ' ' #." in text


def test_the_text_shows_who_looks_where_and_who_is_served(sparse):
    text = sparse.text()
    assert re.search(r"  4 'a' +\.\.###\.{5}\n", text) and re.search(
        r"  4 'a' +#####\.{5}\n", text
    )  # a window, and none
    assert text.count("The mask:") == 2
    (token, weight), (second, _), *_ = sparse.layers[0].looks.strongest(1, 9)
    assert re.search(rf"head 1 +{weight:.0%} {token} {re.escape(repr(sparse.pieces[token]))} ", text)
    assert weight == sparse.layers[0].looks.weights[1, 9].max() and token != second
    expert, share = sparse.layers[0].experts.of(4)[0]
    assert re.search(rf"4 'a' +{share:.0%} expert {expert} ", text)
    assert "sink" in text and f"{sparse.guesses[0].probability:.2%} {sparse.guesses[0].piece!r}" in text


def test_layers_can_be_left_out(sparse):
    assert "(2 more layers are not shown.)" in sparse.text(1) and "--- layer 1 of" not in sparse.text(1)
    assert "2 more layers are not shown." in sparse.html(1) and 'id="layer-1"' not in sparse.html(1)
    assert sparse.text(3) == sparse.text() and sparse.html(3) == sparse.html()


class Page(html.parser.HTMLParser):
    """Checks that elements are closed in order, and gathers what a browser would load."""

    EMPTY = ("meta", "img")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.loads, self.images = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.loads += [attrs[name] for name in ("src", "href", "srcset", "action") if name in attrs]
        self.images += [attrs] if tag == "img" else []
        self.open += [] if tag in self.EMPTY else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(traced):
    found, _ = traced
    text = found.html()
    page = Page(text)
    assert all(source.startswith(("#", "data:image/png;base64,")) for source in page.loads)
    assert not re.search(r"https?:|url\(|@import|<link|fetch\(", text)
    assert all(image["alt"] for image in page.images) and "&lt;</button>" in text
    assert text.count('aria-pressed="true"') == 1


def test_the_pictures_hold_the_weights(sparse):
    pictures = [image for image in Page(sparse.html()).images if image["alt"].startswith("head 2:")]
    for image, layer in zip(pictures, sparse.layers, strict=True):
        pixels = imread(io.BytesIO(base64.b64decode(image["src"].partition(",")[2])))
        np.testing.assert_allclose(pixels[..., 3] ** 2, layer.looks.weights[2], atol=0.005)


def test_a_notebook_shows_the_page_in_a_frame(sparse):
    class Frame(Page):
        def handle_starttag(self, tag, attrs):
            super().handle_starttag(tag, attrs)
            self.inner = dict(attrs)["srcdoc"]

    assert Frame(sparse._repr_html_()).inner == sparse.html()


def test_tokens_need_no_tokenizer_and_parts_of_characters_have_names(sparse):
    assert sparse.pieces[-2:] == ("<0xC3>", "<0xA9>")
    model, params = make("parallel")
    assert trace(model, params, [3, 258]).pieces == ("3", "258")
    assert trace(model, params, [65, 258], ByteTokenizer()).pieces == ("A", "<eos>")


@pytest.mark.parametrize(
    ("text", "tokenizer", "message"),
    [
        ("a", None, "a text needs a tokenizer; give tokenizer=..., or token ids instead of the text"),
        ("", ByteTokenizer(), "the text is empty; give at least one token"),
        ("a" * 17, ByteTokenizer(), "the text is 17 tokens long, more than model.context_length=16; shorten it"),
        ([1, 259], None, "token 259 is outside of model.vocab_size=259; use the model's tokenizer"),
        ([2**40], None, f"token {2**40} is outside of model.vocab_size=259; use the model's tokenizer"),
        ([-1], None, "token -1 is outside of model.vocab_size=259; use the model's tokenizer"),
    ],
)
def test_what_cannot_be_traced_is_said_in_a_sentence(text, tokenizer, message):
    with pytest.raises(TraceError, match=re.escape(f"trace: {message}")):
        trace(build(BASE), {}, text, tokenizer)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2.5], "token 1.0 is of type float64; ids are whole numbers"),
        (["a"], "token a is of type <U1; ids are whole numbers"),
        ([[1, 2], [3, 4]], "the tokens are not one row; give the ids of one text, a list of whole numbers"),
        ([[1, 2], [3]], "the tokens are not one row; give the ids of one text, a list of whole numbers"),
        (7, "the tokens are not one row; give the ids of one text, a list of whole numbers"),
    ],
)
def test_what_is_no_row_of_ids_is_said_in_a_sentence(ids, message):
    """Behind the type checker of the tests, which users do not have."""
    with pytest.raises(TraceError, match=re.escape(f"trace: {message}")):
        record._tokens(BASE, ids, None)


def test_more_than_a_page_shows_is_refused():
    with pytest.raises(TraceError, match="257 tokens long, more than the 256 that a page can show; shorten it"):
        trace(build(dataclasses.replace(BASE, context_length=999)), {}, [1] * 257)


def test_zoo_trace_can_be_called_whoever_imported_its_room():
    import zoo.trace.record

    assert isinstance(zoo.trace, types.ModuleType)
    with pytest.raises(TraceError, match="the text is empty"):
        zoo.trace(build(BASE), {}, [])


# --------------------------------------------------------------------------------------------- the command line


def test_a_preset_is_made_small(tmp_path, capsys):
    page = tmp_path / "trace.html"
    args = ["trace", "--preset", "mixtral-8x7b", "--text", "The cat", "--layers", "1", "--html", str(page)]
    assert main(args) == 0
    assert capsys.readouterr().out == f"{page}: open it in a browser\n"
    text = page.read_text(encoding="utf-8")
    assert "mixtral-8x7b made small: D is 32 instead of 4,096" in text and "random" in text and "bytes" in text
    assert 'id="layer-0"' in text and 'id="layer-1"' not in text
    assert main([*args[:-1], str(page), "--seed", "1"]) == 0 and page.read_text(encoding="utf-8") != text


def test_a_config_is_made_small(tmp_path, capsys):
    (tmp_path / "c.py").write_text(
        "from zoo import *\nconfig = Experiment('c', ModelConfig(d_model=512, n_layers=9, init_std=0.001))\n"
    )
    assert main(["trace", "--config", str(tmp_path / "c.py"), "--text", "ab"]) == 0
    out = capsys.readouterr().out
    assert "2 layers instead of 9" in out and "2 tokens: 'a' 'b'" in out


def test_a_run_begins_as_its_documents_did(monkeypatch, capsys):
    model, params = make("parallel")
    for add_bos, first in ((True, "'<bos>' 'a'"), (False, "'a'")):
        config = Experiment("x", data=DataConfig(add_bos=add_bos))
        run = types.SimpleNamespace(model=model, params=params, tokenizer=ByteTokenizer(), config=config)
        monkeypatch.setattr("zoo.rundir.load", lambda directory, run=run: run)
        assert main(["trace", "--model", "runs/x", "--text", "a"]) == 0
        out = capsys.readouterr().out
        assert f"tokens: {first}\n" in out and out.startswith("The trained model of runs/x.")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--text", "a"], "zoo trace needs one of --preset NAME, --model RUN_DIR and --config FILE"),
        (["--preset", "gpt2", "--model", "x", "--text", "a"], "zoo trace needs one of --preset NAME"),
        (["--preset", "gpt2"], 'zoo trace needs --text "...", the sentence'),
        (["--preset", "gtp2", "--text", "a"], "preset='gtp2' is not the name of a preset; did you mean gpt2?"),
        (["--preset", "gpt2", "--text", "a", "--layers", "0"], "--layers 0 must be at least 1"),
        (["--preset", "gpt2", "--text", "a", "--seed", "-1"], "--seed -1 must be at least 0 and less than 2^32"),
        (["--preset", "gpt2", "--text", "a", "--html", "no/such/page.html"], "there is no folder no/such; make it"),
        (
            ["--preset", "gpt2", "--text", "a", "--html", "docs"],
            "--html docs is a folder; give the name of a file in it",
        ),
        (["--model", "x", "--text", "a", "--seed", "3"], "--seed 3 is of random weights, and those of --model x are"),
        (["--preset", "gpt2", "--text", "a", "--html", "README.md"], "--html README.md exists and is no page of zoo"),
        (["--preset", "gpt2", "--text", "a", "--txet", "b"], "there is no option --txet; did you mean --text?"),
        (["--model", "no/such/run", "--text", "a"], "there is no run directory no/such/run"),
    ],
)
def test_wrong_options_are_answered_in_a_sentence(args, message, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(["trace", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
