import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.kernels.linear import linear, product, turned

DTYPES = {"float32": 1e-6, "bfloat16": 4e-3}  # half a unit in the last place, relative to the largest number


def draw(seed, *shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_rounded_once(got, want):
    assert np.abs(np.float64(got) - want).max() <= DTYPES[got.dtype.name] * np.abs(want).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_and_its_gradients_are_rounded_once(dtype):
    x, w, g = draw(0, 300, 70, dtype=dtype), draw(1, 70, 50, dtype=dtype), draw(2, 300, 50, dtype=dtype)
    y, pull = jax.vjp(product, x, w)
    exact = [np.float64(a) for a in (x, w, g)]
    for got, want in zip((y, *jax.jit(pull)(g)), _by_hand(*exact), strict=True):
        assert got.dtype == dtype
        assert_rounded_once(got, want)


def _by_hand(x, w, g):
    return x @ w, g @ w.T, x.T @ g


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_inputs_are_one(dtype):
    """Batched too, as the merged experts of a soft mixture are."""
    x, w = draw(3, 4, 2, 5, 3, 6, dtype=dtype), draw(4, 4, 3, 6, 2, 7, dtype=dtype)
    run = lambda x, w: jax.value_and_grad(lambda x, w: jnp.sum(linear(x, w, n_inputs=2).astype(jnp.float32)))(x, w)  # noqa: E731
    total, dx = jax.vmap(run)(x, w)
    exact_x, exact_w = np.float64(x), np.float64(w)
    np.testing.assert_allclose(total, np.einsum("nbtij,nijhk->n", exact_x, exact_w), rtol=2e-2)
    assert_rounded_once(dx, np.broadcast_to(exact_w.sum((3, 4))[:, None, None], x.shape))


def test_turned_is_the_transpose():
    for dtype in DTYPES:
        x = draw(5, 3, 4, 6, dtype=dtype)
        assert np.asarray(turned(x)).tobytes() == np.asarray(x).swapaxes(1, 2).tobytes()
        assert np.asarray(jax.jit(turned)(x)).tobytes() == np.asarray(x).swapaxes(1, 2).tobytes()
