"""Norms against NumPy float64 versions written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import ModelConfig
from zoo.layers.norm import build_norm, build_qk_norm, layer_norm, rms_norm

RNG = np.random.default_rng(0)
X, SCALE, BIAS = 3 * RNG.normal(size=(2, 5, 8)) + 1, RNG.normal(size=8), RNG.normal(size=8)


def as32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def rms(x, axes=-1):
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + 1e-3)


def centred(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)


@pytest.mark.parametrize(("norm", "formula"), [(rms_norm, rms), (layer_norm, centred)])
@pytest.mark.parametrize("biased", [False, True])
def test_is_the_formula(norm, formula, biased):
    x, scale, bias = as32(X, SCALE, BIAS)
    expected = formula(X) * SCALE + (BIAS if biased else 0)
    np.testing.assert_allclose(norm(x, scale, 1e-3, bias if biased else None), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_bfloat16_is_computed_in_float32(norm):
    x = jnp.asarray(np.tile([3.0, -3.0], 256)[None], jnp.bfloat16)
    out = norm(x, jnp.ones(512), 0.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.tile([1.0, -1.0], 256)[None])


def apply(module, x, **params):
    return module.apply({"params": {name: jnp.asarray(p, jnp.float32) for name, p in params.items()}}, *as32(x))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_a_config_decides(kind, biased, offset):
    config = ModelConfig(norm=kind, norm_eps=1e-3, norm_bias=biased, norm_unit_offset=offset)
    module = build_norm(config)
    fresh = module.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    assert set(fresh) == {"scale", "bias"} if biased else {"scale"}
    assert float(fresh["scale"].value[0]) == (0 if offset else 1)
    params = {"scale": SCALE} | ({"bias": BIAS} if biased else {})
    expected = {"rmsnorm": rms, "layernorm": centred}[kind](X) * (SCALE + offset) + (BIAS if biased else 0)
    np.testing.assert_allclose(apply(module, X, **params), expected, rtol=2e-5, atol=2e-6)


def test_one_plus_a_small_scale_keeps_it_in_bfloat16():
    module = build_norm(ModelConfig(norm_unit_offset=True, param_dtype="bfloat16", norm_eps=1e-9))
    small = jnp.full(8, 2**-10, jnp.bfloat16)
    found = module.apply({"params": {"scale": small}}, jnp.ones((1, 8)))
    np.testing.assert_allclose(found, 1 + 2**-10, rtol=1e-6)


@pytest.mark.parametrize(("kind", "shape", "axes"), [("head", (4,), -1), ("full", (2, 4), (-2, -1))])
def test_queries_and_keys(kind, shape, axes):
    block = ModelConfig(qk_norm=kind, norm_eps=1e-3, norm_bias=True).expand()[0].blocks[0]
    x, scale = RNG.normal(size=(2, 3, 2, 4)), RNG.normal(size=shape)
    found = apply(build_qk_norm(block, "heads", "q_norm"), x, scale=scale)
    np.testing.assert_allclose(found, rms(x, axes) * scale, rtol=2e-5, atol=2e-6)
