"""Grouped matrix products: rows sorted by group, each group with its own matrix."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul_reference(
    x: Float[Array, "N D"], w: Float[Array, "E D F"], counts: Int[Array, "E"]
) -> Float[Array, "N F"]:
    """The plain form: every row times every matrix, and a mask that keeps its own; any float dtype.

    Rows from sum(counts) on belong to no group and give 0.
    """
    ends = jnp.cumsum(counts)
    rows = jnp.arange(x.shape[0])[:, None]
    mask = (rows >= ends - counts) & (rows < ends)
    return jnp.einsum("nd,edf,ne->nf", x, w, mask.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)


grouped_matmul = grouped_matmul_reference


def grouped_ffn_reference(
    x: Float[Array, "N D"],
    scale: Float[Array, "N 1"],
    w_gate: Float[Array, "E D F"] | None,
    w_up: Float[Array, "E D F"],
    w_down: Float[Array, "E F D"],
    counts: Int[Array, "E"],
    activation: Callable[[Array], Array],
) -> Float[Array, "N D"]:
    """scale * down(act(gate(x)) * up(x)), each row by the matrices of its group; see `ffn` for no gate."""
    up = grouped_matmul_reference(x, w_up, counts)
    hidden = activation(up) if w_gate is None else activation(grouped_matmul_reference(x, w_gate, counts)) * up
    return grouped_matmul_reference((hidden * scale).astype(x.dtype), w_down, counts)


grouped_ffn = grouped_ffn_reference


@jax.custom_vjp
def spread(x: Float[Array, "N D"], token: Int[Array, "M"], row: Int[Array, "N k"]) -> Float[Array, "M D"]:
    """x[token]: a row for each of a token's k places, where token[row[n, j]] == n.

    Both directions of the map are given, so that the gradient is a gather too: scatters are slow on CPUs
    and order-dependent on accelerators. A place outside [0, M), or a token outside [0, N), gives 0.
    """
    del row
    return jnp.take(x, token, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def collect(y: Float[Array, "M D"], token: Int[Array, "M"], row: Int[Array, "N k"]) -> Float[Array, "N D"]:
    """sum_j y[row[n, j]], in float32 and returned in y's dtype: the transpose of `spread`."""
    del token
    rows = jnp.take(y, row, axis=0, mode="fill", fill_value=0)
    return jnp.sum(rows.astype(jnp.float32), axis=1).astype(y.dtype)


spread.defvjp(
    lambda x, token, row: (spread(x, token, row), (token, row)),
    lambda res, g: (collect(g, *res), None, None),
)
collect.defvjp(
    lambda y, token, row: (collect(y, token, row), (token, row)),
    lambda res, g: (spread(g, *res), None, None),
)
