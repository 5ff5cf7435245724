"""Products of activations with one matrix."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from zoo.kernels.target import target


def linear(x: Float[Array, "..."], w: Float[Array, "..."], n_inputs: int = 1) -> Float[Array, "..."]:
    """x contracted over its last `n_inputs` dimensions with the first ones of w: [*N, *D] and [*D, *F] give [*N, *F].

    As one product of two flat matrices: with more dimensions, XLA's CPU backend takes nearly twice as long for the
    gradients (benchmarks/linear.py).
    """
    rows, width = x.shape[: x.ndim - n_inputs], math.prod(w.shape[:n_inputs])
    return product(x.reshape(-1, width), w.reshape(width, -1)).reshape(*rows, *w.shape[n_inputs:])


def affine(
    x: Float[Array, "*N D"], w: Float[Array, "D F"] | None, b: Float[Array, "F"] | None
) -> Float[Array, "*N F"] | None:
    """x w + b, or x w without a bias; None without a matrix, as the gate of a network that has none."""
    if w is None:
        return None
    return linear(x, w) if b is None else linear(x, w) + b


def product(x: Float[Array, "N D"], w: Float[Array, "D F"]) -> Float[Array, "N F"]:
    """x w, summed in float32 at least and rounded once; so are the gradients, each of its factor's dtype."""
    if jnp.result_type(x, w).itemsize == 2 and target().platform == "cpu":
        return _narrow_product(x, w)
    return x @ w


@jax.custom_vjp
def _narrow_product(x: Array, w: Array) -> Array:
    return _rounded(x, w)


def _rounded(x: Array, w: Array) -> Array:
    return wide_product(x, w).astype(jnp.result_type(x, w))


def _product_backward(factors: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = factors
    return wide_product(g, turned(w)).astype(x.dtype), wide_product(turned(x), g).astype(w.dtype)


# The forward rule has the product itself, where a policy of rematerialisation sees it.
_narrow_product.defvjp(lambda x, w: (_rounded(x, w), (x, w)), _product_backward)


def wide(dtype: Any) -> Any:
    """The dtype that sums of products are taken in: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def wide_product(x: Float[Array, "N D"], w: Float[Array, "D F"]) -> Float[Array, "N F"]:
    """x w in the dtype that it is summed in."""
    return jnp.matmul(x, w, preferred_element_type=wide(jnp.result_type(x, w)))


def turned(x: Float[Array, "*E N D"]) -> Float[Array, "*E D N"]:
    """x^T as a factor of a product.

    XLA's CPU backend has no fast product of 16-bit numbers that lie by columns; it is four times as fast to turn them
    first (benchmarks/linear.py).
    """
    if x.dtype.itemsize != 2:
        return x.mT
    return jax.lax.platform_dependent(x, cpu=lambda x: by_rows(x.mT), default=lambda x: x.mT)


def by_rows(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x, copied to where its last dimension is next to itself if it is not so already."""
    return jax.lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
