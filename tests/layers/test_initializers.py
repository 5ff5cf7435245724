"""How parameters start: the deviations of the formulas, measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.config import ModelConfig, SparseConfig
from zoo.layers.initializers import matrix_init, table_init

L, SHAPE = 8, (200, 300)


def block(**fields):
    return ModelConfig(n_layers=L, init_std=0.05, **fields).expand()[0].blocks[0]


def draw(init):
    return np.asarray(init(jax.random.key(0), SHAPE, jnp.float32), np.float64)


def deviation(use, **fields):
    return draw(matrix_init(block(**fields), *SHAPE, use)).std()


@pytest.mark.parametrize("use", ["inner", "deep", "out"])
def test_normal_and_scaled_normal(use):
    assert deviation(use) == pytest.approx(0.05, rel=0.01)
    assert deviation(use, init="scaled_normal") == pytest.approx(200**-0.5, rel=0.01)


def test_truncated_normal_ends_at_two_deviations():
    values = draw(matrix_init(block(init="truncated_normal"), *SHAPE))
    assert 0.099 < np.abs(values).max() <= 0.1
    assert np.abs(draw(table_init(block(init="truncated_normal")))).max() <= 0.1
    assert np.abs(draw(table_init(block()))).max() > 0.15


def test_gpt2_shrinks_what_writes_to_the_residual_stream():
    assert deviation("out", out_init="gpt2") == pytest.approx(0.05 / np.sqrt(2 * L), rel=0.01)
    assert deviation("deep", out_init="gpt2") == pytest.approx(0.05, rel=0.01)
    both = {"init": "scaled_normal", "out_init": "gpt2"}
    assert deviation("out", **both) == pytest.approx((200 * 2 * L) ** -0.5, rel=0.01)


def test_deepnorm_has_its_gain_on_value_output_and_ffn_alone():
    fields = {"init": "deepnorm", "norm_placement": "deepnorm"}
    xavier = np.sqrt(2 / sum(SHAPE))
    assert deviation("inner", **fields) == pytest.approx(xavier, rel=0.01)
    for use in ("deep", "out"):
        assert deviation(use, **fields) == pytest.approx(xavier * (8 * L) ** -0.25, rel=0.01)
    model = ModelConfig(vocab_size=8, d_model=64, n_layers=L, n_heads=2, moe=SparseConfig(d_ff=64), **fields)
    specs = zoo.build(model).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]["stage_0"]["block_0"]
    flat = specs["attention"] | {name: w for name, w in specs["moe"].items() if name.startswith("w_")}
    gain, plain = (8 * L) ** -0.25, np.sqrt(1 / 64)
    for name, w in flat.items():
        assert float(w.std()) == pytest.approx(plain * (1 if name in ("w_q", "w_k") else gain), rel=0.05), name


def test_zero_outputs():
    assert deviation("out", out_init="zero") == 0
    assert deviation("deep", out_init="zero") > 0
