"""Positions against NumPy float64 versions of the formulas, and against published code's numbers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    YarnScaling,
)
from zoo.layers.position import alibi_slopes, learned, rope_frequencies, rotary, sinusoidal

RNG = np.random.default_rng(0)
X, POSITIONS, THETA = RNG.normal(size=(2, 7, 3, 8)), RNG.integers(0, 1000, (2, 7)), 500.0


def frequencies(n):
    return THETA ** (-2 * np.arange(n // 2) / n)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_its_pairs_and_leaves_the_rest(interleaved, n):
    angle = POSITIONS[..., None, None] * frequencies(n)
    expected = X.copy()
    first, second = (slice(0, n, 2), slice(1, n, 2)) if interleaved else (slice(0, n // 2), slice(n // 2, n))
    turned = 1.5 * (X[..., first] + 1j * X[..., second]) * np.exp(1j * angle)
    expected[..., first], expected[..., second] = turned.real, turned.imag
    found = rotary(jnp.asarray(X, jnp.float32), jnp.asarray(POSITIONS), frequencies(n), interleaved, 1.5)
    np.testing.assert_allclose(found, expected, atol=5e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_products_depend_on_the_distance_only(interleaved):
    q, k = (jnp.asarray(RNG.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(m, n):
        turned = (rotary(x, jnp.array([[p]]), frequencies(16), interleaved) for x, p in ((q, m), (k, n)))
        return jnp.vdot(*turned)

    np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
    assert abs(product(7, 3) - product(7, 4)) > 1e-3


# Computed with transformers 5.24, modeling_rope_utils, for 16 components and theta 10,000, in float32.
PUBLISHED = [
    (LinearScaling(4.0), 4096, [0.25, 0.079056941, 0.025, 0.0079056947, 0.0025, 0.00079056947, 0.00025, 7.9056947e-05]),
    (
        DynamicNTKScaling(2.0, 2048),
        8192,
        [1.0, 0.239481375, 0.057351321, 0.0137345716, 0.00328917382, 0.00078769587, 0.000188638471, 4.51753949e-05],
    ),
    (
        YarnScaling(32.0, 4096, truncate=False),
        131072,
        [1.0, 0.316227764, 0.1, 0.0277359355, 0.00555275427, 0.000738276867, 3.12500015e-05, 9.88211832e-06],
    ),
    (
        YarnScaling(4.0, 4096),
        16384,
        [1.0, 0.316227764, 0.1, 0.025693506, 0.00624999963, 0.00138349656, 0.00025, 7.9056947e-05],
    ),
    (
        Llama3Scaling(8.0, 8192),
        131072,
        [1.0, 0.316227764, 0.1, 0.0316227786, 0.01, 0.00316227786, 0.000213607578, 3.95284733e-05],
    ),
    (
        LongRopeScaling(32.0, 4096, (1.0,) * 8, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)),
        131072,
        [1.0, 0.210818499, 0.05, 0.010540925, 0.0025, 0.000632455572, 0.000166666665, 4.51753949e-05],
    ),
]
# ln 32 / ln 4096 = 5 / 12
FACTORS = {"yarn": lambda s: 0.1 * np.log(s.factor) + 1, "longrope": lambda s: np.sqrt(1 + 5 / 12)}


def block(scaling=None, context_length=256, **fields):
    model = ModelConfig(head_dim=16, context_length=context_length, rope_scaling=scaling, **fields)
    return model.expand()[0].blocks[0]


@pytest.mark.parametrize(("scaling", "context_length", "expected"), PUBLISHED)
def test_scaled_frequencies_are_the_published_ones(scaling, context_length, expected):
    found, factor = rope_frequencies(block(scaling, context_length))
    np.testing.assert_allclose(found, expected, rtol=4e-7)
    np.testing.assert_allclose(factor, FACTORS.get(scaling.kind, lambda s: 1.0)(scaling), rtol=1e-12)


def test_scalings_are_inert_where_they_have_nothing_to_do():
    plain, _ = rope_frequencies(block())
    np.testing.assert_allclose(plain, 10_000.0 ** (-2 * np.arange(8) / 16), rtol=1e-12)
    inert = [LinearScaling(), DynamicNTKScaling(4.0, 256), YarnScaling(1.0), Llama3Scaling(1.0)]
    inert += [LongRopeScaling(1.0, 256, (1.0,) * 8, (9.0,) * 8)]
    for scaling in inert:
        found, factor = rope_frequencies(block(scaling, 256))
        np.testing.assert_allclose(found, plain, rtol=1e-12)
        assert factor == 1.0


def test_factors_of_cosine_and_sine():
    """An explicit one replaces YaRN's; LongRoPE's does not depend on the list."""
    explicit = YarnScaling(32.0, 4096, attention_factor=1.25)
    assert rope_frequencies(block(explicit, 131072))[1] == 1.25
    short, factor = rope_frequencies(block(LongRopeScaling(32.0, 4096, (2.0,) * 8, (9.0,) * 8), 4096))
    np.testing.assert_allclose(short, 10_000.0 ** (-2 * np.arange(8) / 16) / 2, rtol=1e-12)
    np.testing.assert_allclose(factor, 1.1902380714238083, rtol=1e-12)  # transformers 5.24


def test_one_pair_and_a_fraction_of_the_head():
    assert rope_frequencies(block(DynamicNTKScaling(4.0, 16), rope_fraction=0.125))[0].tolist() == [1.0]
    some = dataclasses.replace(block(rope_fraction=0.5), rope_theta=100.0)
    np.testing.assert_allclose(rope_frequencies(some)[0], 100.0 ** (-2 * np.arange(4) / 8), rtol=1e-12)


@pytest.mark.parametrize("n_heads", [1, 2, 8, 16])
def test_alibi_of_a_power_of_two(n_heads):
    np.testing.assert_allclose(alibi_slopes(n_heads), [2 ** (-8 * i / n_heads) for i in range(1, n_heads + 1)])


def test_alibi_of_other_numbers_of_heads():
    twelve = [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), twelve)
    falcon = [2 ** (-i / 8) for i in range(1, 65)] + [2 ** (-i / 16) for i in range(1, 15, 2)]
    np.testing.assert_allclose(alibi_slopes(71), falcon)
    for n_heads in (3, 5, 71, 112):
        slopes = alibi_slopes(n_heads)
        assert len(slopes) == n_heads == len(set(slopes)) and np.all((slopes > 0) & (slopes < 1))


@pytest.mark.parametrize("d_model", [8, 7])
def test_sinusoidal(d_model):
    expected = np.zeros((2, 7, d_model))
    for i in range(d_model):
        angle = POSITIONS / 10_000 ** (2 * (i // 2) / d_model)
        expected[..., i] = np.cos(angle) if i % 2 else np.sin(angle)
    np.testing.assert_allclose(sinusoidal(jnp.asarray(POSITIONS), d_model), expected, atol=1e-4)


def test_learned_rows_and_positions_without_one():
    table = jnp.arange(12.0).reshape(6, 2)
    found = learned(table, jnp.array([[0, 3, 4, -1, -2]]), offset=2)
    np.testing.assert_array_equal(found[0, :2], table[jnp.array([2, 5])])
    assert np.isnan(found[0, 2:]).all()
