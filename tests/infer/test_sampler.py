"""The sampler against plain NumPy, written from the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.infer.sampler import keep_top_k, keep_top_p, row_keys, sample

V = 8
# Few distinct values, so that there are ties; -inf is a token that may not be drawn.
rows = st.lists(st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 0.5, 2.0, 9.0]), min_size=V, max_size=V).filter(
    lambda row: np.isfinite(row).any()
)


def by_rank(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


@settings(deadline=None, max_examples=40)
@given(rows, st.integers(1, V + 2))
def test_top_k_keeps_the_largest_and_the_lower_id_of_equal_ones(row, top_k):
    row = np.array(row, np.float32)
    kept = set(by_rank(row)[:top_k])
    expected = [value if token in kept else -np.inf for token, value in enumerate(row)]
    np.testing.assert_array_equal(keep_top_k(jnp.array([row]), jnp.int32(top_k))[0], np.array(expected, np.float32))


@settings(deadline=None, max_examples=40)
@given(rows, st.sampled_from([1e-6, 0.1, 0.3, 0.45, 0.7, 0.9, 0.99]))
def test_top_p_keeps_the_smallest_set_with_that_mass(row, top_p):
    row = np.array(row, np.float32)
    probabilities, kept, mass = softmax(row), set(), 0.0
    for token in by_rank(row):
        kept.add(token)
        mass += probabilities[token]
        if mass >= top_p:
            break
    expected = [value if token in kept else -np.inf for token, value in enumerate(row)]
    np.testing.assert_array_equal(keep_top_p(jnp.array([row]), jnp.float32(top_p))[0], np.array(expected, np.float32))


def test_top_p_keeps_one_token_and_rows_apart():
    logits = jnp.array([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 5.0, 2.0]])
    kept = np.isfinite(keep_top_p(logits, 1e-9))
    np.testing.assert_array_equal(kept, [[True, False, False, False], [False, False, True, False]])


def test_a_mass_of_1_keeps_every_token():
    # The likeliest token's probability rounds to 1 in float32.
    logits = jnp.array([[20.0, 0.0, -30.0, -jnp.inf], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(keep_top_p(logits, 1.0), logits)
    np.testing.assert_array_equal(jax.jit(keep_top_p)(logits, jnp.float32(1)), logits)
    assert not np.isfinite(keep_top_p(logits, 0.999)[0, 1])


def draws(logits: list[float], n: int = 4000, **settings) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), n)
    tokens = sample(jnp.broadcast_to(jnp.array(logits), (n, len(logits))), keys, **settings)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / n


def test_frequencies_follow_the_temperature():
    logits = [1.0, 0.0, -1.0, 2.0]
    for temperature in (0.5, 1.0, 3.0):
        expected = softmax(np.array(logits) / temperature)
        np.testing.assert_allclose(draws(logits, temperature=temperature), expected, atol=0.03)


def test_top_p_comes_after_temperature_and_top_k():
    # At temperature 1 the masses are 0.64, 0.24, 0.09, 0.03: p = 0.6 would keep one token. At temperature 4
    # they are 0.37, 0.28, 0.22, 0.13, of which the top three carry 0.42, 0.33, 0.25: p = 0.6 keeps two.
    found = draws([3.0, 2.0, 1.0, 0.0], temperature=4.0, top_k=3, top_p=0.6)
    expected = softmax(np.array([3.0, 2.0]) / 4)
    np.testing.assert_allclose(found, [*expected, 0, 0], atol=0.03)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 1e-4])
def test_a_low_temperature_is_greedy(temperature):
    logits = jnp.array([[0.0, 4.0, 3.9, -1.0], [50.0, -jnp.inf, 49.0, 0.0]])
    for seed in range(5):
        keys = jax.random.split(jax.random.key(seed), 2)
        np.testing.assert_array_equal(sample(logits, keys, temperature), [1, 0])


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = jnp.array([[0.0, 7.0, 7.0, 7.0]])
    assert int(sample(logits, jax.random.split(jax.random.key(3), 1), 0.0)[0]) == 1


def test_a_row_depends_on_its_key_and_the_count_alone():
    keys = jax.vmap(jax.random.key)(jnp.array([5, 6, 7], jnp.uint32))
    logits = jax.random.normal(jax.random.key(1), (3, 50))
    for n in range(4):
        together = sample(logits, row_keys(keys, n), 1.0, 20, 0.9)
        for row in range(3):
            key = jax.random.fold_in(jax.random.key(5 + row), n)
            assert int(together[row]) == int(sample(logits[row : row + 1], key[None], 1.0, 20, 0.9)[0])
