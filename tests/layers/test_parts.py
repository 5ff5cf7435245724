"""Norm, positions and feed-forward networks against NumPy float64 versions written from the formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers.ffn import ACTIVATIONS, ffn
from zoo.layers.norm import rms_norm
from zoo.layers.position import rotary

RNG = np.random.default_rng(0)

FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def as32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def test_rms_norm():
    x, scale = 3 * RNG.normal(size=(2, 5, 8)), RNG.normal(size=8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(rms_norm(*as32(x, scale), 1e-3), expected, rtol=2e-5, atol=1e-6)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.full((1, 512), 3.0, jnp.bfloat16)
    out = rms_norm(x, jnp.ones(512), 0.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 1.0)


def test_rotary_rotates_pairs_of_halves():
    x, positions, theta = RNG.normal(size=(2, 7, 3, 8)), RNG.integers(0, 1000, (2, 7)), 500.0
    angle = positions[..., None, None] * theta ** (-2 * np.arange(4) / 8)
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(rotary(*as32(x), jnp.asarray(positions), theta), expected, atol=3e-4)


def test_rotated_products_depend_on_the_distance_only():
    q, k = as32(RNG.normal(size=(1, 1, 1, 16)), RNG.normal(size=(1, 1, 1, 16)))

    def product(m, n):
        return jnp.vdot(rotary(q, jnp.array([[m]]), 1e4), rotary(k, jnp.array([[n]]), 1e4))

    np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
    assert abs(product(7, 3) - product(7, 4)) > 1e-3


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("glu", [True, False])
def test_ffn(name, glu):
    x, gate, up, down = (RNG.normal(size=shape) for shape in ((2, 3, 4), (4, 6), (4, 6), (6, 4)))
    act = FORMULAS[name]
    expected = (act(x @ gate) * (x @ up) if glu else act(x @ up)) @ down
    x, gate, up, down = as32(x, gate, up, down)
    np.testing.assert_allclose(ffn(x, gate if glu else None, up, down, name), expected, rtol=1e-4, atol=1e-4)
