"""Generation with a cache against full forward passes without one, and everything around it."""

import dataclasses
import functools
import inspect
import string
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import Block, DataConfig, DenseConfig, Experiment, ModelConfig, SoftConfig, SparseConfig
from zoo.data.tokenizer import ByteTokenizer, CharacterTokenizer
from zoo.infer.generate import PromptError, _encode, _seeds, generate
from zoo.infer.sampler import sample
from zoo.layers.embedding import HeadWeights
from zoo.models.decoder import Cache, Hidden, Output, build

TOKENIZER = CharacterTokenizer(string.ascii_letters + " .,\n")
PROMPTS = ["To be, or", "", "abc"]
LENGTH = 24

VARIANTS = {
    "none": ModelConfig(d_ff=32, n_kv_heads=1, pattern=(Block(window=5), Block())),
    "sparse": ModelConfig(moe=SparseConfig(n_experts=4, d_ff=16, n_shared_experts=1)),
    "dense": ModelConfig(moe=DenseConfig(n_experts=4, d_ff=16)),
    "soft": ModelConfig(moe=SoftConfig(n_experts=4, d_ff=16, segment_length=4)),
}


@pytest.fixture(scope="module", params=VARIANTS)
def run(request) -> Any:
    """A random model; its large initial values make texts that differ."""
    sizes = dict(vocab_size=TOKENIZER.vocab_size, context_length=LENGTH, d_model=16, n_layers=2, n_heads=2)
    model = build(dataclasses.replace(VARIANTS[request.param], init_std=0.4, **sizes))
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 1), jnp.int32))["params"]
    return types.SimpleNamespace(model=model, params=params, tokenizer=TOKENIZER, config=Experiment("x"))


@functools.partial(jax.jit, static_argnums=0)
def forward(model: Any, params: Any, tokens: Any) -> Any:
    return model.apply({"params": params}, tokens, segment_ids=(tokens != TOKENIZER.pad_id).astype(int)).logits


def one_by_one(run: Any, prompt: str, max_tokens: int, seed: int, temperature: float) -> str:
    """The same text from the definition: one row, no cache, a full forward pass per token."""

    ids = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]
    written: list[int] = []
    for n in range(max_tokens):
        padded = np.full((1, LENGTH), TOKENIZER.pad_id, np.int32)
        padded[0, : len(ids + written)] = ids + written
        logits = np.array(forward(run.model, run.params, padded)[:, len(ids + written) - 1])
        logits[:, [TOKENIZER.pad_id, TOKENIZER.bos_id]] = -np.inf
        key = jax.random.fold_in(jax.random.key(seed), n)[None]
        token = int(sample(jnp.array(logits), key, temperature)[0])
        if token == TOKENIZER.eos_id:
            break
        written.append(token)
    return TOKENIZER.decode(written)


def test_a_batch_with_a_cache_equals_one_row_without(run):
    expected = [one_by_one(run, prompt, 12, seed, 1.0) for seed, prompt in enumerate(PROMPTS, 7)]
    assert generate(run, PROMPTS, max_tokens=12, temperature=1.0, seed=7) == expected
    assert len(set(expected)) == 3
    shuffled = [PROMPTS[2], PROMPTS[0], PROMPTS[0]]
    found = generate(run, shuffled, max_tokens=12, temperature=1.0, seed=[9, 1, 7])
    assert (found[0], found[2]) == (expected[2], expected[0])


def test_greedy_takes_the_largest_logit(run):
    expected = [one_by_one(run, prompt, 8, 0, 0.0) for prompt in PROMPTS]
    for seed in (0, 5):
        assert generate(run, PROMPTS, max_tokens=8, temperature=0, seed=seed) == expected


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A model that writes `script`, by position, whatever it is given."""

    script: tuple[int, ...]
    config: ModelConfig

    def init_cache(self, batch_size: int, length: int) -> Cache:
        return Cache(jnp.zeros(batch_size, jnp.int32), ())

    def head_weights(self, params: Any) -> HeadWeights:
        return HeadWeights(jnp.eye(self.config.vocab_size), None)

    def apply(self, variables, tokens, segment_ids=None, cache=None, method=None):
        real = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        position = cache.length[:, None] + jnp.cumsum(real, axis=1) - 1
        likeliest = jnp.take(jnp.array(self.script), position, mode="clip")
        # Padding and BOS come out on top, were they not ruled out.
        specials = jax.nn.one_hot(jnp.array([256, 257]), self.config.vocab_size).sum(0)
        logits = jax.nn.one_hot(likeliest, self.config.vocab_size) * 9 + specials * 10
        cache = Cache(cache.length + real.sum(axis=1), ())
        return Hidden(logits, (), cache) if method == "hidden" else Output(logits, (), cache)


def scripted(text: str | bytes, end: bool = True, context_length: int = 64, add_bos: bool = True) -> Any:
    """A run whose continuation of the empty prompt is `text`, then EOS (or its last byte for ever)."""
    tokenizer = ByteTokenizer()
    script = tuple(text.encode() if isinstance(text, str) else text) + ((tokenizer.eos_id,) if end else ())
    config = ModelConfig(vocab_size=tokenizer.vocab_size + 5, context_length=context_length)
    experiment = Experiment("x", data=DataConfig(add_bos=add_bos))
    return types.SimpleNamespace(model=Scripted(script, config), params={}, tokenizer=tokenizer, config=experiment)


def test_specials_are_never_drawn_and_eos_ends_a_row():
    assert generate(scripted("hello"), "", max_tokens=20, temperature=0) == ["hello"]
    assert generate(scripted("hello"), "", max_tokens=20, temperature=0.1) == ["hello"]


def test_max_tokens_ends_a_row():
    assert generate(scripted("hello"), ["", "x"], max_tokens=2, temperature=0) == ["he", "el"]
    assert generate(scripted("hello"), "", max_tokens=1, temperature=0) == ["h"]


def test_stop_strings_end_a_row_before_them():
    run = scripted("one two three")
    assert generate(run, ["", "o", "xxxx"], max_tokens=20, temperature=0, stop=" t") == ["one", "ne", "two"]
    assert generate(run, "", max_tokens=20, temperature=0, stop=["three!", "wo"]) == ["one t"]
    assert generate(run, "", max_tokens=20, temperature=0, stop=["three!"]) == ["one two three"]


@pytest.mark.parametrize("text", ["naïve 😀 text", "日本語", b"bad \xff byte", b"half \xe6\x97"])
def test_streamed_pieces_add_up(text):
    pieces: dict[int, list[str]] = {0: [], 1: []}
    found = generate(
        scripted(text), ["", ""], max_tokens=30, temperature=0, stop=["xt"], on_text=lambda i, p: pieces[i].append(p)
    )
    whole = text if isinstance(text, str) else text.decode(errors="replace")
    assert found == [whole.split("xt")[0]] * 2
    for row in (0, 1):
        assert "".join(pieces[row]) == found[row]
        assert all(pieces[row]) and len(pieces[row]) >= 3


def test_rows_stop_on_their_own():
    found = generate(scripted("abcdef"), ["xxxx", "", "xx"], max_tokens=30, temperature=0)
    assert found == ["ef", "abcdef", "cdef"]


def test_the_whole_context_can_be_used():
    run = scripted("a", end=False, context_length=16)
    assert generate(run, "123456", max_tokens=9, temperature=0) == ["a" * 9]


def test_by_default_a_row_fills_the_context_up_to_200_tokens():
    run = scripted("a", end=False, context_length=16)
    assert generate(run, ["123456", "", "123"], temperature=0) == ["a" * 9, "a" * 15, "a" * 12]
    run = scripted("a", end=False, context_length=256)
    assert generate(run, "", temperature=0) == ["a" * 200]


def test_by_default_no_row_depends_on_the_length_of_another(run):
    prompts = ["abc" * 6, "To be", "a" * 22]
    together = generate(run, prompts, temperature=1.0, seed=[3, 4, 5])
    expected = [one_by_one(run, prompt, LENGTH - 1 - len(prompt), seed, 1.0) for seed, prompt in enumerate(prompts, 3)]
    assert together == expected


def test_a_row_begins_with_bos_where_its_training_did():
    # The script is by position: what follows "xy" is its third character, or the fourth after BOS.
    assert generate(scripted("0123456", end=False), "xy", max_tokens=1, temperature=0) == ["2"]
    assert generate(scripted("0123456", end=False, add_bos=False), "xy", max_tokens=1, temperature=0) == ["1"]


def test_the_ids_of_a_prompt_without_bos(run):
    data = dataclasses.replace(run.config.data, add_bos=False)
    bare = types.SimpleNamespace(**vars(run) | {"config": dataclasses.replace(run.config, data=data)})
    assert _encode(run, "abc", 0) == [TOKENIZER.bos_id, *TOKENIZER.encode("abc")]
    assert _encode(bare, "abc", 0) == TOKENIZER.encode("abc")


@pytest.mark.parametrize("seed", [np.int64(7), jnp.int32(7), np.array([7, 8]), (7, 8)])
def test_seeds_of_any_integer_type(seed):
    assert _seeds(seed, 2) == [7, 8]


def test_the_seed_after_the_last_is_0():
    assert _seeds(2**32 - 1, 2) == [2**32 - 1, 0]


def test_no_prompts_give_no_texts():
    assert generate(scripted("a"), [], max_tokens=3) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be a whole number of at least 1, or None for what the context leaves"),
        (
            {"max_tokens": 2.5},
            "max_tokens=2.5 must be a whole number of at least 1, or None for what the context leaves",
        ),
        ({"temperature": "1"}, "temperature='1' must lie between 0, which is greedy, and 1e+30"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number of at least 1, or None for all tokens"),
        ({"top_p": "all"}, "top_p='all' must lie in (0, 1], or be None for all tokens"),
        ({"seed": -1}, "seed=-1 must be at least 0 and less than 2^32"),
        ({"seed": 2**32}, "seed=4294967296 must be at least 0 and less than 2^32"),
        ({"seed": [2**32]}, "seed=4294967296 must be at least 0 and less than 2^32"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number, or one per prompt"),
        ({"seed": "3"}, "seed='3' must be a whole number, or one per prompt"),
        ({"prompts": ["a", 3]}, "prompt 1 is of type int; give a text"),
        ({"prompts": "ab\udcff"}, "prompt 0 holds no valid character at 2; write it in UTF-8"),
        ({"temperature": -0.5}, "temperature=-0.5 must lie between 0, which is greedy, and 1e+30"),
        ({"temperature": float("nan")}, "temperature=nan must lie between 0, which is greedy, and 1e+30"),
        ({"temperature": float("inf")}, "temperature=inf must lie between 0, which is greedy, and 1e+30"),
        ({"top_k": 0}, "top_k=0 must be a whole number of at least 1, or None for all tokens"),
        ({"top_p": 0.0}, "top_p=0.0 must lie in (0, 1], or be None for all tokens"),
        ({"top_p": 1.5}, "top_p=1.5 must lie in (0, 1], or be None for all tokens"),
        ({"stop": ["x", ""]}, "stop=['x', ''] must be texts; an empty one would end every row before it begins"),
        ({"seed": [1, 2]}, "seed holds 2 numbers for 1 prompts; give one number, or one per prompt"),
        (
            {"prompts": ["a", "b" * 15]},
            "prompt 1 is 16 tokens long, which leaves no room in model.context_length=16; shorten it",
        ),
        (
            {"prompts": "b" * 9},
            "prompt 0 of 10 tokens and max_tokens=8 pass model.context_length=16 by 2; "
            "set max_tokens to at most 6, or shorten the prompt",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(settings, message):
    run = scripted("abc", context_length=16)
    run.params = None
    arguments = {"prompts": "", "max_tokens": 8} | settings
    with pytest.raises(PromptError) as error:
        # Without the type checks that the tests add.
        inspect.unwrap(generate)(run, **arguments)
    assert str(error.value) == message


def test_an_empty_prompt_needs_a_bos_token():
    run = scripted("abc", add_bos=False)
    message = r"^prompt 0 is empty, and the model was trained without .* \(data.add_bos=False\); give some text$"
    with pytest.raises(PromptError, match=message):
        generate(run, "", max_tokens=3)
    assert len(generate(run, "x", max_tokens=2)) == 1
