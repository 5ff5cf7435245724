"""Norms against NumPy float64 versions written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import ModelConfig
from zoo.layers.logical import abstract_params
from zoo.layers.norm import build_norm, build_qk_norm, layer_norm, rms_norm

RNG = np.random.default_rng(0)
EPS = 1e-3


def root_mean_square(x, scale, bias=0.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale + bias


def standardized(x, scale, bias=0.0):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS) * scale + bias


FORMULAS = {"rmsnorm": root_mean_square, "layernorm": standardized}
KINDS = pytest.mark.parametrize("kind", list(FORMULAS))


def as32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize(("norm", "formula"), [(rms_norm, root_mean_square), (layer_norm, standardized)])
def test_norm(norm, formula):
    x, scale, bias = 3 * RNG.normal(size=(2, 5, 8)) + 1, RNG.normal(size=8), RNG.normal(size=8)
    near = {"rtol": 2e-5, "atol": 1e-6}
    np.testing.assert_allclose(norm(*as32(x, scale), EPS), formula(x, scale), **near)
    np.testing.assert_allclose(norm(*as32(x, scale), EPS, *as32(bias)), formula(x, scale, bias), **near)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_bfloat16_is_normed_in_float32(norm):
    x = jnp.tile(jnp.array([3.0, -3.0], jnp.bfloat16), 256)
    out = norm(x, jnp.ones(512), 0.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.tile([1.0, -1.0], 256))


def test_an_offset_of_float32_vectors_does_not_cancel():
    """The variance is of centred numbers; the mean square less the squared mean would lose it here."""
    x = 1000 + RNG.normal(size=64)
    np.testing.assert_allclose(layer_norm(*as32(x, np.ones(64)), EPS), standardized(np.float32(x), 1), atol=2e-3)


@KINDS
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_norm_of_a_config(kind, offset, biased):
    config = ModelConfig(d_model=8, norm=kind, norm_eps=EPS, norm_unit_offset=offset, norm_bias=biased)
    x, layer = RNG.normal(size=(3, 8)), build_norm(config)
    start = layer.init(jax.random.key(0), *as32(x))["params"]
    assert start.keys() == ({"scale", "bias"} if biased else {"scale"})
    np.testing.assert_array_equal(start["scale"].value, 0 if offset else 1)
    params = {name: RNG.normal(size=8) for name in start}
    found = layer.apply({"params": {name: jnp.float32(p) for name, p in params.items()}}, *as32(x))
    expected = FORMULAS[kind](x, params["scale"] + offset, params.get("bias", 0))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)


def test_one_plus_a_small_scale_survives_bfloat16():
    config = ModelConfig(d_model=512, norm_unit_offset=True, param_dtype="bfloat16", norm_eps=1e-6)
    scale, x = jnp.full(512, 1e-3, jnp.bfloat16), jnp.ones((1, 512))
    found = build_norm(config).apply({"params": {"scale": scale}}, x)
    np.testing.assert_allclose(found, 1 + float(scale[0]), rtol=1e-5)  # 1 + 1e-3 is 1 in bfloat16


@KINDS
@pytest.mark.parametrize("over", ["head", "full"])
def test_norm_of_queries(kind, over):
    config = ModelConfig(
        d_model=12, n_heads=3, norm=kind, norm_eps=EPS, norm_bias=True, norm_unit_offset=True, qk_norm=over
    )
    layer = build_qk_norm(config.expand()[0].blocks[0], "heads", "q_norm")
    x = RNG.normal(size=(2, 5, 3, 4))
    shape, axes = ((4,), ("head_dim",)) if over == "head" else ((3, 4), ("heads", "head_dim"))
    specs = abstract_params(lambda: layer.init(jax.random.key(0), jnp.zeros(x.shape)))["params"]
    assert specs.keys() == {"scale"}
    assert (specs["scale"].shape, specs["scale"].axes, specs["scale"].role) == (shape, axes, "scale")
    scale = RNG.normal(size=shape)
    width = 4 if over == "head" else 12
    expected = FORMULAS[kind](x.reshape(2, 5, -1, width), 1 + scale.reshape(-1)).reshape(x.shape)
    found = layer.apply({"params": {"scale": jnp.float32(scale)}}, *as32(x))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_norm_may_have_no_parameters(kind):
    plain, scaled = (build_norm(ModelConfig(norm=kind, norm_scale=scale)) for scale in (False, True))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 8)), jnp.float32)
    assert not plain.init(jax.random.key(0), x)
    np.testing.assert_array_equal(plain.apply({}, x), scaled.apply({"params": {"scale": jnp.ones(8)}}, x))
