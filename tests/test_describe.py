import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import pytest
from jax.interpreters import partial_eval

from zoo import objectives
from zoo.cli import main
from zoo.config import (
    Block,
    ConfigError,
    DataConfig,
    DenseConfig,
    Experiment,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    SoftConfig,
    SparseConfig,
    TrainConfig,
)
from zoo.describe import (
    Question,
    compare,
    count_parameters,
    count_parts,
    describe,
    expert_share,
    find_device,
    flops,
    flops_per_token,
    peak_flops,
    preset_table,
    question_of,
)
from zoo.describe.flops import decoding_flops, forward_flops, live_share, merging_flops, recomputed_flops
from zoo.describe.memory import TrainingState, activation_bytes_per_token, logit_bytes, training_state
from zoo.kernels.masks import Causal, Full
from zoo.layers.logical import is_spec
from zoo.models.decoder import build
from zoo.models.presets import preset
from zoo.parallel.mesh import make_mesh
from zoo.parallel.rules import device_bytes
from zoo.train.optimizer import make_optimizer
from zoo.train.state import abstract_state, make_layout

D, F, H, K, h, V, E, L = 8, 12, 2, 1, 4, 32, 4, 3
SIZES = {"vocab_size": V, "d_model": D, "n_layers": L, "n_heads": H, "n_kv_heads": K, "d_ff": F, "context_length": 16}


def count(**settings):
    config = ModelConfig(**SIZES | settings)
    specs = build(config).abstract_params()
    return config, specs, count_parameters(config, specs)


def test_a_plain_decoder_by_hand():
    config, specs, got = count()
    attention = D * H * h + 2 * D * K * h + H * h * D
    layer = attention + 3 * D * F
    norms = (2 * L + 1) * D
    assert got.total == got.active == L * layer + V * D + norms
    assert got.products == L * layer + V * D  # the table is the head too
    assert got.total == sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))
    seen = (16 + 1) / 2
    assert flops_per_token(config, specs, 16) == 6 * got.products + L * 12 * H * h * seen


def test_a_separate_head_replaces_the_table_in_the_products():
    tied, untied = count()[2], count(tie_embeddings=False)[2]
    assert untied.total == tied.total + V * D
    assert untied.products == tied.products


@pytest.mark.parametrize("moe, share", [(SparseConfig(n_experts=E, d_ff=F, top_k=2), 1 / 2), (DenseConfig(E, F), 1)])
def test_only_the_experts_that_a_token_uses_are_active(moe, share):
    plain, (_, _, got) = count()[2], count(moe=moe)
    router = L * D * E
    assert got.total - plain.total == L * (E - 1) * 3 * D * F + router
    assert got.active - plain.active == L * (share * E - 1) * 3 * D * F + router
    assert got.products - plain.products == got.active - plain.active


def test_a_soft_mixture_multiplies_by_one_expert_and_merges_all_now_and_then():
    assert expert_share(SoftConfig(n_experts=4, segment_length=64)) == 1 / 4 + 1 / 64
    assert expert_share(SoftConfig(n_experts=4, segment_length=1)) == 1
    assert expert_share(None) == 1


def test_a_window_limits_what_a_token_sees():
    config, specs, got = count(pattern=(Block(window=4),))
    seen = sum(min(t + 1, 4) for t in range(16)) / 16
    assert flops_per_token(config, specs, 16) == pytest.approx(6 * got.products + L * 12 * H * h * seen)


def test_peaks_are_those_of_known_devices_only():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("TPU v5 lite") == 197e12 and peak_flops("TPU v5p") == 459e12
    assert peak_flops("cpu") is None


# ------------------------------------------------------------------------------------------ the traced operations


def by_hand(feed_forward, seen):
    """2 per multiplication: projections, scores and their use, the feed-forward part, the head."""
    attention = 2 * (D * H * h + 2 * D * K * h + H * h * D)
    return L * (attention + 4 * H * h * seen + feed_forward) + 2 * D * V


@pytest.mark.parametrize("unroll", [False, True])
def test_traced_operations_by_hand(unroll):
    assert forward_flops(ModelConfig(**SIZES, unroll=unroll), 16) == by_hand(6 * D * F, 17 / 2)


def test_traced_windows_and_experts():
    seen = sum(min(t + 1, 4) for t in range(16)) / 16
    assert forward_flops(ModelConfig(**SIZES, pattern=(Block(window=4),)), 16) == by_hand(6 * D * F, seen)
    sizes, router = {"n_experts": E, "d_ff": F}, 2 * D * E
    for moe, feed_forward in (
        (SparseConfig(**sizes, top_k=2), 2 * 6 * D * F + router),
        (SparseConfig(**sizes, top_k=2, n_shared_experts=1), 3 * 6 * D * F + router),
        (SparseConfig(**sizes, top_k=3, n_null_experts=4), 3 / 2 * 6 * D * F + 2 * router),
        (DenseConfig(**sizes), E * 6 * D * F + router),
    ):
        assert forward_flops(ModelConfig(**SIZES, moe=moe), 16) == by_hand(feed_forward, 17 / 2), moe


def test_traced_soft_mixtures_pay_for_their_slots_and_merges():
    moe = SoftConfig(n_experts=E, d_ff=F, segment_length=4, max_documents=1)
    slots = 16 // 4
    feed_forward = 6 * D * F + slots * (2 * E * 3 * D * F + 2 * D * E) / 16
    assert forward_flops(ModelConfig(**SIZES, moe=moe), 16) == pytest.approx(by_hand(feed_forward, 17 / 2))


def test_merging_is_what_more_experts_add():
    few, many = (ModelConfig(**SIZES, moe=SoftConfig(n_experts=n, d_ff=F, segment_length=4)) for n in (E, 2 * E))
    added = forward_flops(many, 16) - forward_flops(few, 16)
    router = L * E * 2 * D * 7 / 16  # 4 segments, and 3 more documents may begin
    assert merging_flops(few, 16) == pytest.approx(added - router)
    assert merging_flops(ModelConfig(**SIZES), 16) == 0


def gradient_flops(config, length):
    """Operations per token of a traced gradient."""
    model = build(config).clone(attend=flops._attend, experts=flops._Experts(config.moe))
    params = specs_as_arrays(model.abstract_params())
    tokens = jax.ShapeDtypeStruct((1, length), jax.numpy.int32)
    loss = lambda params, tokens: (model.apply({"params": params}, tokens).logits ** 2).sum()  # noqa: E731
    program = jax.make_jaxpr(jax.grad(loss))(params, tokens)
    needed, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    return float(flops._count(needed)) / length


@pytest.mark.parametrize("moe", [None, SparseConfig(n_experts=E, d_ff=F), SoftConfig(n_experts=E, d_ff=F)])
def test_training_is_three_forward_passes(moe):
    config = ModelConfig(**SIZES, moe=moe)
    assert gradient_flops(config, 16) == pytest.approx(3 * forward_flops(config, 16))


@pytest.mark.parametrize("remat", ["full", "dots", "dots_no_batch"])
def test_remat_computes_no_more_again_than_described(remat):
    config = ModelConfig(**SIZES, remat=remat)
    forward = forward_flops(config, 16)
    again = gradient_flops(config, 16) - 3 * forward
    parts = count_parts(config, build(config).abstract_params())
    unneeded = L * 2 * F * D if remat == "full" else 0  # the last product of a block has no use in its gradient
    # "dots" keeps the products of attention where it sees them, as in this plain form, but not inside of kernels.
    inside = L * 4 * H * h * 17 / 2 if remat == "dots" else 0
    assert recomputed_flops(config, parts, forward, 16) == pytest.approx(again + unneeded + inside)


def test_the_last_token_sees_all_before_it():
    plain, narrow = ModelConfig(**SIZES), ModelConfig(**SIZES, pattern=(Block(window=4),))
    assert decoding_flops(plain, by_hand(6 * D * F, 17 / 2), 16) == by_hand(6 * D * F, 16)
    assert decoding_flops(narrow, by_hand(6 * D * F, 3.625), 16) == by_hand(6 * D * F, 4)


@pytest.mark.parametrize("mask", [Causal(), Causal(3), Causal(40), Full()])
def test_live_shares_are_those_of_the_mask(mask):
    at = jax.numpy.arange(10)
    assert float(live_share(mask, 10, 10)) == pytest.approx(float(mask.allows(at[:, None], at[None, :]).mean()))


# ---------------------------------------------------------------------------------------------------- whole models

# Published, or 2 K h L x 2 bytes of published shapes.
KV_BYTES = {
    "llama2-7b": 524_288,
    "llama3-8b": 131_072,
    "mixtral-8x7b": 131_072,
    "llama3-70b": 327_680,
    "llama2-70b": 327_680,
}


@pytest.mark.parametrize("name", KV_BYTES)
def test_cache_of_published_models(name):
    found = describe(preset(name), name, Question(2048)).values
    assert found["kv_cache_bytes_per_token"] == KV_BYTES[name]
    assert found["kv_cache_bytes_per_sequence"] == 2048 * KV_BYTES[name]


def test_a_window_bounds_the_cache_of_a_sequence():
    found = describe(preset("gemma3-270m"), "gemma3-270m", Question(32768)).values
    assert found["kv_cache_bytes_per_sequence"] == 2 * 256 * 2 * (15 * 512 + 3 * 32768)


def test_gpt3_took_3640_petaflop_days():
    question = Question(2048, n_devices=1000, tokens=300e9, device=find_device("a100"), mfu=0.5)
    found = describe(preset("gpt3-175b"), "gpt3-175b", question).values["training"]
    assert found["flops_6nd"] == pytest.approx(3.14e23, rel=0.002)
    assert found["pf_days_6nd"] == pytest.approx(3640, rel=0.002)
    assert found["days_6nd"] == pytest.approx(23.3, abs=0.1)
    assert 1 < found["flops"] / found["flops_6nd"] < 1.02  # attention's scores come on top


def test_zero_splits_the_state():
    """As in figure 1 of arXiv 1910.02054, 7.5 B parameters on 64 devices, with 4 + 4 + 8 bytes a parameter."""
    state = TrainingState(weights=4 * 7.5e9, gradients=4 * 7.5e9, optimizer=8 * 7.5e9)
    total = [state.split(zero, 64).total / 1e9 for zero in range(4)]
    assert total == pytest.approx([120, 60 + 60 / 64, 30 + 90 / 64, 120 / 64])


def test_the_state_of_a_model_by_hand():
    _, specs, got = count()
    matrices = got.total - V * D - (2 * L + 1) * D
    assert training_state(specs, "adamw") == (4 * got.total, 4 * got.total, 8 * got.total)
    assert training_state(specs, "lion", ema=True).optimizer == (4 + 4) * got.total
    assert training_state(specs, "muon").optimizer == 4 * matrices + 8 * (got.total - matrices)
    _, halves, _ = count(param_dtype="bfloat16")
    assert training_state(halves, "lion") == (2 * got.total, 4 * got.total, 4 * got.total)


# Matrices of less than 128 rows or columns, whose squares Adafactor keeps whole; of more; and of both kinds.
STATES = {
    "narrow": ModelConfig(**SIZES, moe=SparseConfig(n_experts=E, d_ff=F, score="sigmoid", selection_bias=True)),
    "wide": ModelConfig(vocab_size=300, d_model=128, n_layers=3, n_heads=2, d_ff=256, tie_embeddings=False),
    "mixed": ModelConfig(
        vocab_size=100,
        d_model=256,
        n_heads=4,
        n_kv_heads=1,
        ffn_bias=True,
        position="learned",
        activation="swish_learned",
        moe=SparseConfig(n_experts=E, d_ff=160, n_shared_experts=1),
    ),
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "adafactor"])
@pytest.mark.parametrize("name", STATES)
def test_moments_are_as_large_as_the_optimizers(name, optimizer):
    specs = build(STATES[name]).abstract_params()
    made = make_optimizer(OptimizerConfig(name=optimizer), specs)
    state = jax.eval_shape(made.init, specs_as_arrays(specs))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert training_state(specs, optimizer).optimizer == 4 * numbers > 0


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_a_mesh_holds_what_the_layout_of_training_does(optimizer, zero):
    specs = build(STATES["mixed"]).abstract_params()
    config = MeshConfig(data=1, fsdp=2, tensor=2, expert=2, zero=zero)
    made = make_optimizer(OptimizerConfig(name=optimizer), specs)
    layout = make_layout(specs, made, make_mesh(config, jax.devices()[:8]), zero, ema=True)
    shapes = abstract_state(specs, made, ema=True)
    arrays = [(leaf, at) for leaf, at in zip(*map(jax.tree.leaves, (shapes, layout.state)), strict=True) if leaf.ndim]
    got = training_state(specs, optimizer, ema=True, mesh=config)
    assert got.weights + got.optimizer == sum(device_bytes([leaf], [at]) for leaf, at in arrays)
    wide = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32"), specs_as_arrays(specs))
    assert got.gradients == device_bytes(wide, layout.grads)


def test_a_chunk_of_logits_is_that_of_the_objective():
    for rows, length in ((2, 16), (3, 200), (64, 16)):
        config = ModelConfig(vocab_size=50_000, context_length=256)
        (chunks, _) = jax.eval_shape(
            lambda x, y: objectives._chunked(x, y, 50_000),
            jax.ShapeDtypeStruct((rows, length, 4), "float32"),
            jax.ShapeDtypeStruct((rows, length), "int32"),
        )
        at_once = chunks.shape[1] * chunks.shape[2]
        assert logit_bytes(config, rows, length) == (4 * rows * length * 50_000, 4 * at_once * 50_000)
        # The chunk is that of all rows, of which a device has its part.
        assert logit_bytes(config, rows, length, 4)[1] * 4 == logit_bytes(config, 4 * rows, length)[1]
    assert logit_bytes(config, 64, 16)[1] == 64 * 50_000 * 4


def specs_as_arrays(specs):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs, is_leaf=is_spec)


def test_activations_by_hand():
    log_sums = 4 * H
    block = 4 * (4 * D + 2 * H * h + 2 * K * h + 3 * F)
    assert activation_bytes_per_token(ModelConfig(**SIZES), 16) == L * (block + log_sums)
    full = activation_bytes_per_token(ModelConfig(**SIZES, remat="full"), 16)
    assert full == L * 4 * D + block + log_sums
    kept = 4 * (3 * D + H * h + 2 * K * h + 2 * F)
    assert activation_bytes_per_token(ModelConfig(**SIZES, remat="dots"), 16) == L * kept + block + log_sums


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt-oss-20b", "qwen1.5-moe-a2.7b", "gpt2", "bloom-560m"])
def test_parts_add_up(name):
    config = preset(name)
    specs = build(config).abstract_params()
    parts, whole = count_parts(config, specs).values(), count_parameters(config, specs)
    assert sum(p.total for p in parts) == whole.total
    assert sum(p.active for p in parts) == pytest.approx(whole.active, abs=2)


def test_biases_of_experts_are_as_active_as_experts_and_routers_whole():
    config = preset("gpt-oss-20b")
    parts = count_parts(config, build(config).abstract_params())
    assert parts["experts"].active == parts["experts"].total * 4 // 32
    assert parts["router"].active == parts["router"].total == 24 * (2880 + 1) * 32


def test_comparison():
    one, other = (("llama2-7b", preset("llama2-7b")), ("llama2-70b", preset("llama2-70b")))
    found = compare(one, other)
    assert found.differences["n_kv_heads"] == (None, 8) and "vocab_size" not in found.differences
    assert found.costs["KV cache, bytes per token"] == (524_288, 327_680)
    assert "x 0.625" in str(found)
    assert "no field differs" in str(compare(one, one))


def test_comparison_of_experiments_is_of_all_settings_and_of_their_own_training():
    model = ModelConfig(**SIZES | {"context_length": 32})
    one = Experiment("one", model, optimizer=OptimizerConfig(name="lion"), mesh=MeshConfig(data=2, fsdp=2))
    longer = dataclasses.replace(model, context_length=64)
    train = TrainConfig(steps=200, batch_size=24, micro_batches=2)
    other = Experiment("other", longer, data=DataConfig(split="tail"), optimizer=OptimizerConfig("adamw"), train=train)
    found = compare(("a.py", one), ("b.py", other))
    assert found.differences == {
        "model.context_length": (32, 64),
        "data.split": ("auto", "tail"),
        "optimizer.name": ("lion", "adamw"),
        "train.steps": (1000, 200),
        "train.batch_size": (16, 24),
        "train.micro_batches": (1, 2),
        "mesh.data": (2, -1),
        "mesh.fsdp": (2, 1),
    }
    n = count()[2].total
    costs = found.costs
    assert costs["training state, bytes, ZeRO 0"] == ((4 + 4 + 4) * n, (4 + 4 + 8) * n)
    assert costs["training state, bytes on a device"] == (12 * n // 2, 16 * n)
    assert costs["devices of the mesh"] == (4, 1) and costs["sequences on a device"] == (4, 12)
    assert costs["activations, bytes on a device"] == (
        4 * 32 * activation_bytes_per_token(model, 32),
        12 * 64 * activation_bytes_per_token(longer, 64),
    )
    assert costs["tokens of training"] == (1000 * 16 * 32, 200 * 24 * 64)
    assert set(compare(("a", model), ("b", other)).differences) == {"context_length"}


def test_an_experiment_asks_for_its_own_batch_and_mesh():
    mesh = MeshConfig(data=2, fsdp=-1, expert=4, zero=2)
    experiment = Experiment("x", train=TrainConfig(batch_size=100, micro_batches=2, steps=200), mesh=mesh)
    assert question_of(experiment) == Question(
        length=256,
        batch_size=7,
        n_devices=8,
        mesh=MeshConfig(data=2, fsdp=1, expert=4, zero=2),
        tokens=200 * 100 * 256,
    )
    wider = question_of(experiment, 24)
    assert (wider.mesh.fsdp, wider.batch_size, wider.n_devices) == (3, 3, 24)  # 50 rows among 24, rounded up
    with pytest.raises(
        ConfigError, match=r"mesh.data=2 x mesh.fsdp=-1 .* needs a multiple of 8 devices, but there are 9"
    ):
        question_of(experiment, 9)


def test_the_table_of_presets_is_up_to_date():
    assert (Path(__file__).parents[1] / "docs/presets.md").read_text() == preset_table()


# ------------------------------------------------------------------------------------------------ the command line


def test_json(capsys):
    assert main(["describe", "--preset", "mixtral-8x7b", "--json", "--tokens", "1e12", "--device", "h100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["total"] == 46_702_792_704 and found["parameters"]["active"] == 12_879_925_248
    assert found["parameters"]["active_without_embedding"] == 12_879_925_248 - 32_000 * 4096
    assert found["flops_per_token"]["training"] == 3 * found["flops_per_token"]["forward"]
    assert found["kv_cache_bytes_per_token"] == 131_072 and found["training"]["days"] > 0
    assert found["published"]["recipe"] is None
    assert main(["describe", "--preset", "llama-65b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["published"]["recipe"] == {"learning_rate": 1.5e-4, "batch_tokens": 4e6, "tokens": 1.4e12}
    assert found["training"]["tokens"] == 1.4e12 and "days" not in found["training"]
    assert main(["compare", "llama2-7b", "mistral-7b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"]["d_ff"] == [11008, 14336]
    quickstart = str(Path(__file__).parents[1] / "configs/quickstart.py")
    assert main(["describe", "--config", quickstart, "--json", "--devices", "4", "--length", "64"]) == 0
    found = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert found["logits_whole"] == 4 * 2048 * 16 // 4 * 64 and found["mesh"] == found["zero_0"]
    assert main(["compare", quickstart, str(Path(quickstart).with_name("moe_sparse.py")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"]["train.steps"] == [180, 120]


def test_screen(capsys):
    assert main(["describe", "--preset", "llama-7b"]) == 0
    shown = capsys.readouterr().out
    assert "6,738,415,616" in shown and "learning rate 0.0003, 4 M tokens a batch, 1 T tokens" in shown
    assert main(["describe", "--preset", "palm-540b"]) == 0
    assert "Note: The exact count" in capsys.readouterr().out
    assert main(["describe", "--config", str(Path(__file__).parents[1] / "configs/quickstart.py")]) == 0
    shown = capsys.readouterr().out
    assert "2 K h L x 4 bytes" in shown and "on this mesh, ZeRO 3" in shown and "4,096 tokens x" in shown
    assert main(["describe", "--preset", "gpt2"]) == 0
    shown = capsys.readouterr().out
    assert "ZeRO 0, state of 1 of 8" in shown and "1,024 tokens x" in shown and "on this mesh" not in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("describe", "zoo describe needs one of --preset NAME, --config FILE and --all"),
        ("describe --preset gtp2", r"preset='gtp2' is not the name of a preset; did you mean gpt2\?"),
        ("describe --preset gpt2 --device h10", "device='h10' is not one of v6e, .*; did you mean h100"),
        ("describe --preset gpt2 --length 2000", "length=2000 is more than model.context_length=1024"),
        ("describe --preset gpt2 --mfu 2", "--mfu 2.0 must lie between 1e-6 and 1"),
        ("describe --preset gpt2 --tokens=-1", "--tokens -1.0 must be a positive number, at most 1e30"),
        ("describe --preset=", "preset='' is not the name of a preset"),
        ("describe --preset gpt2 --tokens 1e308", "--tokens 1e[+]308 must be a positive number, at most 1e30"),
        ("describe --all --length 5", "--all is a table in Markdown and has no --length; ask for one --preset"),
        ("describe --preset gpt2 --mfu 0.5", "--mfu 0.5 is a share of a device's peak; it needs --device"),
        ("describe --all --json", "--all is a table in Markdown and has no --json"),
        ("compare gpt2", "zoo compare needs two presets or config files before any option; 1 are given"),
        ("compare gpt2 gpt3", "preset='gpt3' is not the name of a preset"),
    ],
)
def test_wrong_input(args, message, capsys):
    assert main(args.split()) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_vocabulary_that_a_file_leaves_open_is_its_tokenizers(tmp_path, capsys):
    text = "from zoo import *\nconfig = Experiment('x', data=DataConfig(tokenizer={!r}))\n"
    for name in ("bytes", "characters"):
        (tmp_path / f"{name}.py").write_text(text.format(name))
    assert main(["describe", "--config", str(tmp_path / "bytes.py"), "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parameters"]["parts"]
    assert parts["token embedding"]["total"] == 259 * ModelConfig().d_model
    assert main(["describe", "--config", str(tmp_path / "characters.py")]) == 2
    assert "set model.vocab_size in the config" in capsys.readouterr().err
