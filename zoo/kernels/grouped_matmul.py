"""Grouped matrix products: rows sorted by group, each group with its own matrices.

`spread` and `collect` bring tokens into that order and back. Every function here is exact and dropless, takes
any counts that fit, and gives exact zeros for rows beyond sum(counts) and for the gradients of empty groups.

The backend visits each group's rows in blocks, with plain matrix products. Blocks start where their group
starts, so nothing is padded between groups, and what a short last block writes behind its group is written
again by the next one. `lax.ragged_dot` would multiply every row by every matrix on a CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.kernels.glu import glu


def grouped_matmul_reference(
    x: Float[Array, "N D"], w: Float[Array, "E D F"], counts: Int[Array, "E"]
) -> Float[Array, "N F"]:
    """The plain form of `grouped_matmul`: every row times every matrix, and a mask that keeps its own."""
    ends = jnp.cumsum(counts)
    rows = jnp.arange(x.shape[0])[:, None]
    mask = (rows >= ends - counts) & (rows < ends)
    return jnp.einsum("ND,EDF,NE->NF", x, w, mask.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)


def grouped_ffn_reference(
    x: Float[Array, "N D"],
    scale: Float[Array, "N 1"],
    w_gate: Float[Array, "E D F"] | None,
    w_up: Float[Array, "E D F"],
    w_down: Float[Array, "E F D"],
    counts: Int[Array, "E"],
    activation: Callable[[Array], Array],
) -> Float[Array, "N D"]:
    """The plain form of `grouped_ffn`."""
    up = grouped_matmul_reference(x, w_up, counts)
    gate = None if w_gate is None else grouped_matmul_reference(x, w_gate, counts)
    hidden = glu(activation, gate, up)
    return grouped_matmul_reference((hidden * scale).astype(x.dtype), w_down, counts)


@jax.custom_vjp
def grouped_matmul(x: Float[Array, "N D"], w: Float[Array, "E D F"], counts: Int[Array, "E"]) -> Float[Array, "N F"]:
    """x[n] @ w[e] for the counts[0] first rows with e = 0, the next counts[1] with e = 1, and so on.

    Rows from sum(counts) on give 0. The result has x's dtype; the gradient of w is summed in float32.
    """
    out = _like(x, w.shape[2:])
    return _sweep(lambda w, x: (x @ w, None), counts, w, x, out, None)[0]


def _grouped_matmul_backward(residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, None]:
    x, w, counts = residuals

    def block(w: Array, rows: tuple[Array, Array]) -> tuple[Array, Array]:
        x, g = rows
        return g @ w.T, _outer(x, g)

    dx, dw = _sweep(block, counts, w, (x, g), _like(x, x.shape[1:]), _sums(w))
    return dx, dw.astype(w.dtype), None


grouped_matmul.defvjp(lambda x, w, counts: (grouped_matmul(x, w, counts), (x, w, counts)), _grouped_matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def grouped_ffn(
    x: Float[Array, "N D"],
    scale: Float[Array, "N 1"],
    w_gate: Float[Array, "E D F"] | None,
    w_up: Float[Array, "E D F"],
    w_down: Float[Array, "E F D"],
    counts: Int[Array, "E"],
    activation: Callable[[Array], Array],
) -> Float[Array, "N D"]:
    """scale * down(act(gate(x)) * up(x)) with the matrices of each row's group; down(act(up(x))) without w_gate.

    The same as three grouped products, but a block of rows goes through all three while it is in the cache.
    `scale`, float32, multiplies the hidden units, so that its gradient needs no stored output. The result
    has x's dtype; the gradients of the matrices are summed in float32.
    """
    return _grouped_ffn_forward(x, scale, w_gate, w_up, w_down, counts, activation)[0]


def _grouped_ffn_forward(
    x: Array, scale: Array, w_gate: Array | None, w_up: Array, w_down: Array, counts: Array, activation: Callable
) -> tuple[Array, tuple]:
    weights = (w_gate, w_up, w_down)

    def block(weights: tuple, rows: tuple[Array, Array]) -> tuple[tuple, None]:
        (w_gate, w_up, w_down), (x, scale) = weights, rows
        up = x @ w_up
        gate = None if w_gate is None else x @ w_gate
        hidden = (glu(activation, gate, up) * scale).astype(x.dtype)
        return (hidden @ w_down, gate, up), None

    inner = _like(x, w_up.shape[2:])
    outs = (_like(x, x.shape[1:]), None if w_gate is None else inner, inner)
    (y, gate, up), _ = _sweep(block, counts, weights, (x, scale), outs, None)
    return y, (x, scale, gate, up, weights, counts)


def _grouped_ffn_backward(activation: Callable, residuals: tuple, g: Array) -> tuple:
    x, scale, gate, up, weights, counts = residuals

    def block(weights: tuple, rows: tuple) -> tuple[tuple, tuple]:
        (w_gate, w_up, w_down), (x, scale, gate, up, g) = weights, rows
        hidden, pull = jax.vjp(partial(glu, activation), gate, up)
        d_scaled = g @ w_down.T
        d_scale = jnp.sum(d_scaled.astype(scale.dtype) * hidden.astype(scale.dtype), axis=1, keepdims=True)
        d_gate, d_up = pull((d_scaled * scale).astype(hidden.dtype))
        dx = d_up @ w_up.T if gate is None else d_up @ w_up.T + d_gate @ w_gate.T
        d_w_gate = None if gate is None else _outer(x, d_gate)
        return (dx, d_scale), (d_w_gate, _outer(x, d_up), _outer((hidden * scale).astype(x.dtype), g))

    outs = (_like(x, x.shape[1:]), _like(scale, scale.shape[1:]))
    sums = jax.tree.map(_sums, weights)
    (dx, d_scale), sums = _sweep(block, counts, weights, (x, scale, gate, up, g), outs, sums)
    return dx, d_scale, *jax.tree.map(lambda d, w: d.astype(w.dtype), sums, weights), None


grouped_ffn.defvjp(_grouped_ffn_forward, _grouped_ffn_backward)


def _outer(x: Array, g: Array) -> Array:
    return jnp.matmul(x.T, g, preferred_element_type=_wide(x.dtype))


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _like(x: Array, shape: tuple[int, ...]) -> Array:
    """Zeros with x's rows and dtype (and, in a shard_map, varying over the same devices)."""
    return jnp.zeros_like(x, shape=(x.shape[0], *shape))


def _sums(w: Array) -> Array:
    return jnp.zeros_like(w, dtype=_wide(w.dtype))


def block_rows(n_rows: int, n_groups: int) -> int:
    """Rows of a block: a quarter of a group's mean, so that short last blocks waste an eighth, within 32 and 256.

    Measured by benchmarks/grouped_matmul.py: below 32 the products are too thin, above 256 nothing is gained.
    """
    quarter = max(1, n_rows // (4 * n_groups))
    return min(256, max(32, 1 << (quarter - 1).bit_length()), max(1, n_rows))


def _sweep(block: Callable, counts: Array, weights: Any, rows: Any, outs: Any, sums: Any) -> tuple[Any, Any]:
    """For each group e and each block of its rows: block(weights[e], rows) -> (outs of the rows, added to sums[e]).

    Rows of other groups reach `block` as zeros, and it must turn zeros into zeros; then what it writes
    behind its group does no harm, since groups are visited in order. Each sum is carried for one group at a
    time, so a block costs its own products and never a pass over the matrices of all groups.
    """
    n_rows, n_groups = jax.tree.leaves(rows)[0].shape[0], counts.shape[0]
    size = block_rows(n_rows, n_groups)
    rows, outs = jax.tree.map(lambda a: jnp.pad(a, ((0, size), (0, 0))), (rows, outs))
    starts = jnp.cumsum(counts) - counts

    def group(e: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        outs, sums = carry
        own = jax.tree.map(lambda w: w[e], weights)

        def step(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            outs, sums = carry
            mine = i * size + jnp.arange(size)[:, None] < counts[e]
            read = lambda a: jnp.where(mine, jax.lax.dynamic_slice_in_dim(a, starts[e] + i * size, size), 0)  # noqa: E731
            new, added = block(own, jax.tree.map(read, rows))
            write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=starts[e] + i * size, axis=0)
            return jax.tree.map(write, outs, new), jax.tree.map(jnp.add, sums, added)

        empty = jax.tree.map(lambda s: jnp.zeros_like(s[0]), sums)
        outs, added = jax.lax.fori_loop(0, (counts[e] + size - 1) // size, step, (outs, empty))
        return outs, jax.tree.map(lambda s, a: s.at[e].set(a), sums, added)

    outs, sums = jax.lax.fori_loop(0, n_groups, group, (outs, sums))
    return jax.tree.map(lambda a: a[:n_rows], outs), sums


@jax.custom_vjp
def spread(x: Float[Array, "N D"], token: Int[Array, "M"], row: Int[Array, "N k"]) -> Float[Array, "M D"]:
    """x[token]: one row for each of a token's k places, where token[row[n, j]] == n.

    Both directions of the map are given, so that the gradient is a gather too: scatters are slow on CPUs
    and order-dependent on accelerators. A place of M or more, or a token of N or more, gives 0.
    """
    del row
    return jnp.take(x, token, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def collect(y: Float[Array, "M D"], token: Int[Array, "M"], row: Int[Array, "N k"]) -> Float[Array, "N D"]:
    """sum_j y[row[n, j]], in float32 and returned in y's dtype: the transpose of `spread`."""
    del token
    rows = jnp.take(y, row, axis=0, mode="fill", fill_value=0)
    return jnp.sum(rows.astype(_wide(y.dtype)), axis=1).astype(y.dtype)


spread.defvjp(
    lambda x, token, row: (spread(x, token, row), (token, row)),
    lambda maps, g: (collect(g, *maps), None, None),
)
collect.defvjp(
    lambda y, token, row: (collect(y, token, row), (token, row)),
    lambda maps, g: (spread(g, *maps), None, None),
)
