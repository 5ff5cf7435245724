"""How far parameters spread at the start, measured, and which of them the rules scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.config import Block, ModelConfig, SparseConfig
from zoo.layers.initializers import matrix_init, table_init

N_LAYERS, STD = 8, 0.03
IN, OUT = 300, 500
# Standard deviation of a standard normal cut at two deviations, from its formula.
CUT = np.sqrt(1 - 4 * np.exp(-2) / np.sqrt(2 * np.pi) / 0.9544997361036416)
XAVIER = np.sqrt(2 / (IN + OUT))


def deviation(x):
    return float(jnp.std(x.astype(jnp.float32)))


def draw(use, **fields):
    placement = "deepnorm" if fields.get("init") == "deepnorm" else "pre"
    config = ModelConfig(d_model=16, n_layers=N_LAYERS, init_std=STD, norm_placement=placement, **fields)
    init = matrix_init(config.expand()[0].blocks[0], IN, OUT, use)
    return init(jax.random.key(0), (IN, OUT), jnp.float32)


@pytest.mark.parametrize(
    ("init", "inner", "deep"),
    [
        ("normal", STD, STD),
        ("truncated_normal", CUT * STD, CUT * STD),
        ("scaled_normal", IN**-0.5, IN**-0.5),
        ("deepnorm", XAVIER, XAVIER * (8 * N_LAYERS) ** -0.25),
    ],
)
def test_deviations(init, inner, deep):
    for use, expected in (("inner", inner), ("deep", deep), ("out", deep)):
        assert deviation(draw(use, init=init)) == pytest.approx(expected, rel=0.01), use


@pytest.mark.parametrize("init", ["normal", "truncated_normal", "scaled_normal"])
def test_residual_scaling_is_on_outputs_only(init):
    for use in ("inner", "deep"):
        np.testing.assert_array_equal(draw(use, init=init, out_init="gpt2"), draw(use, init=init))
    scaled, plain = draw("out", init=init, out_init="gpt2"), draw("out", init=init)
    np.testing.assert_allclose(scaled, plain / np.sqrt(2 * N_LAYERS), rtol=1e-5)


@pytest.mark.parametrize("init", ["normal", "truncated_normal", "scaled_normal", "deepnorm"])
def test_outputs_at_zero(init):
    assert not draw("out", init=init, out_init="zero").any()
    assert draw("deep", init=init, out_init="zero").any()


def test_truncated_normals_end_at_two_deviations():
    x = draw("inner", init="truncated_normal")
    assert 1.9 * STD < float(jnp.abs(x).max()) <= 2 * STD
    config = ModelConfig(d_model=16, init="truncated_normal", init_std=STD)
    table = table_init(config)(jax.random.key(0), (100, 100), jnp.float32)
    assert float(jnp.abs(table).max()) <= 2 * STD


SPARSE = SparseConfig(n_experts=4, d_ff=32, n_shared_experts=1)
SHAPE = {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "prefix": (Block(mixture=False),)}


def spread(**fields):
    """Path -> standard deviation of every matrix and table of a model with a plain FFN, experts and a shared one."""
    model = zoo.build(ModelConfig(**SHAPE, moe=SPARSE, tie_embeddings=False, **fields))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): deviation(x) for path, x in leaves if x.ndim > 1}


def test_deepnorm_scales_values_outputs_and_feed_forward_weights_only():
    found = spread(norm_placement="deepnorm", init="deepnorm")
    gain = (8 * 2) ** -0.25
    square = np.sqrt(1 / 32)  # Xavier's deviation of 32 inputs and 32 outputs
    for path, value in found.items():
        name = path.split("/")[-1]
        if name in ("table", "w"):  # embedding, head, router
            expected = 0.02
        elif name in ("w_q", "w_k"):
            expected = square
        elif "/ffn/" in path:
            expected = gain * np.sqrt(2 / (32 + 96))
        elif name.startswith("w_"):
            expected = gain * square
        else:  # scales of norms
            expected = 0
        assert value == pytest.approx(expected, rel=0.15), path
    assert {path.split("/")[-1] for path in found} >= {"w_q", "w_v", "w_o", "w_up", "w_down", "table", "w"}


def test_what_writes_to_the_residual_stream_starts_at_zero():
    at_zero = {path for path, value in spread(out_init="zero").items() if value == 0 and "norm" not in path}
    blocks, experts = ("stage_0/block_0", "stage_1/block_0"), ("moe", "moe/shared")
    expected = {f"{block}/attention/w_o" for block in blocks}
    expected |= {f"{blocks[0]}/ffn/w_down", *(f"{blocks[1]}/{name}/w_down" for name in experts)}
    assert at_zero == expected
