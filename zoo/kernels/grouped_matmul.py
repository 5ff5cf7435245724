"""Grouped matrix products: rows sorted by group, each group with its own matrices.

`spread` and `collect` bring tokens into that order and back. Every function here is exact and dropless, takes
any counts that fit, and gives exact zeros for rows beyond sum(counts) and for the gradients of empty groups.

grouped_backends.py says which backend computes where. The one of this file, the sweep for CPUs, visits each group's
rows in blocks, with plain matrix products. Blocks start where their group starts, so nothing is padded between
groups, and what a short last block writes behind its group is written again by the next one. `lax.ragged_dot` would
multiply every row by every matrix on a CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.kernels import grouped_products
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_backends import Backend, check_ffn, check_matmul, choose
from zoo.kernels.linear import affine, product, turned, wide, wide_product


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
    params: "FFNParams",
    counts: Int[Array, "E"],
    hidden: HiddenUnits,
) -> Float[Array, "N D"]:
    """The plain form of `grouped_ffn`."""
    ends = jnp.cumsum(counts)
    rows = jnp.arange(x.shape[0])
    group = jnp.searchsorted(ends, rows, side="right")
    own = lambda a: None if a is None else jnp.take(a, group, axis=0, mode="fill", fill_value=0)  # noqa: E731

    def layer(x: Array, w: Array | None, b: Array | None) -> Array | None:
        if w is None:
            return None
        y = grouped_matmul_reference(x, w, counts)
        return y if b is None else y + own(b)

    gate, up = layer(x, params.w_gate, params.b_gate), layer(x, params.w_up, params.b_up)
    beta = None if params.beta is None else own(params.beta)[:, None]
    y = layer(hidden(gate, up, beta), params.w_down, params.b_down)
    return jnp.where((rows < ends[-1])[:, None], y * scale, 0).astype(x.dtype)


def grouped_matmul(
    x: Float[Array, "N D"], w: Float[Array, "E D F"], counts: Int[Array, "E"], backend: Backend = "auto"
) -> Float[Array, "N F"]:
    """x[n] @ w[e] for the counts[0] first rows with e = 0, the next counts[1] with e = 1, and so on.

    Rows from sum(counts) on give 0. The result has x's dtype; the gradient of w is summed in float32.

    Raises:
        ValueError: sizes do not fit, or `backend`, of grouped_backends.py, is none or cannot compute this here.
    """
    check_matmul(x, w, counts)
    return _matmul(x, w, counts, backend)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _matmul(x: Array, w: Array, counts: Array, backend: Backend) -> Array:
    return choose(backend, x, w, _sweep_matmul, grouped_products.matmul)(x, w, counts)


def _matmul_backward(backend: Backend, residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, None]:
    x, w, _ = residuals
    run = choose(backend, x, w, _sweep_matmul_gradients, grouped_products.matmul_gradients)
    return *run(*residuals, g), None


_matmul.defvjp(lambda x, w, counts, backend: (_matmul(x, w, counts, backend), (x, w, counts)), _matmul_backward)


def _sweep_matmul(x: Array, w: Array, counts: Array) -> Array:
    out = _like(x, w.shape[2:])
    return _sweep(lambda w, x: (product(x, w), None), counts, w, x, out, None)[0]


def _sweep_matmul_gradients(x: Array, w: Array, counts: Array, g: Array) -> tuple[Array, Array]:
    def block(w: Array, rows: tuple[Array, Array]) -> tuple[Array, Array]:
        x, g = rows
        return product(g, _transposed(w)), _outer(x, g)

    dx, dw = _sweep(block, counts, _turned_ahead(w), (x, g), _like(x, x.shape[1:]), _sums(w))
    return dx, dw.astype(w.dtype)


class FFNParams(NamedTuple):
    """The parameters of E feed-forward networks; None for those that they do not have.

    Attributes:
        w_gate, w_up: [E, D, F].
        w_down: [E, F, D].
        b_gate, b_up: [E, F].
        b_down: [E, D].
        beta: [E], of a learned Swish.
    """

    w_gate: Any
    w_up: Any
    w_down: Any
    b_gate: Any = None
    b_up: Any = None
    b_down: Any = None
    beta: Any = None

    def astype(self, dtype: Any) -> "FFNParams":
        """The same parameters in another dtype."""
        return jax.tree.map(lambda p: p.astype(dtype), self)


def grouped_ffn(
    x: Float[Array, "N D"],
    scale: Float[Array, "N 1"],
    params: FFNParams,
    counts: Int[Array, "E"],
    hidden: HiddenUnits,
    backend: Backend = "auto",
) -> Float[Array, "N D"]:
    """scale * down(hidden(gate(x), up(x))) with the parameters of each row's group; biases where there are any.

    The same as three grouped products, but in the sweep a block of rows goes through all three while it is in the
    cache. `scale`, float32, multiplies the hidden units, so that its gradient needs no stored output. The result
    has x's dtype; the gradients of the parameters are summed in float32.

    Raises:
        ValueError: sizes do not fit, or `backend`, of grouped_backends.py, is none or cannot compute this here.
    """
    check_ffn(x, params, counts)
    return _ffn(x, scale, params, counts, hidden, backend)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ffn(x: Array, scale: Array, params: FFNParams, counts: Array, hidden: HiddenUnits, backend: Backend) -> Array:
    return _ffn_forward(x, scale, params, counts, hidden, backend)[0]


def _ffn_forward(
    x: Array, scale: Array, params: FFNParams, counts: Array, hidden: HiddenUnits, backend: Backend
) -> tuple[Array, tuple]:
    sweep, by_products = (partial(f, hidden=hidden) for f in (_sweep_ffn, grouped_products.ffn))
    y, gate, up = choose(backend, x, params, sweep, by_products)(x, scale, params, counts)
    return y, (x, scale, gate, up, params, counts)


def _ffn_backward(hidden: HiddenUnits, backend: Backend, residuals: tuple, g: Array) -> tuple:
    sweep, by_products = (partial(f, hidden=hidden) for f in (_sweep_ffn_gradients, grouped_products.ffn_gradients))
    x, _, _, _, params, _ = residuals
    return *choose(backend, x, params, sweep, by_products)(*residuals, g), None


_ffn.defvjp(_ffn_forward, _ffn_backward)


def _sweep_ffn(
    x: Array, scale: Array, params: FFNParams, counts: Array, hidden: HiddenUnits
) -> tuple[Array, Array | None, Array]:
    def block(params: FFNParams, rows: tuple[Array, Array]) -> tuple[tuple, None]:
        x, scale = rows
        gate, up = affine(x, params.w_gate, params.b_gate), affine(x, params.w_up, params.b_up)
        # A row of another group comes with scale 0, so it gives 0 whatever the biases are.
        y = product((hidden(gate, up, params.beta) * scale).astype(x.dtype), params.w_down)
        y = y if params.b_down is None else y + (params.b_down * scale).astype(x.dtype)
        return (y, gate, up), None

    inner = _like(x, params.w_up.shape[2:])
    outs = (_like(x, x.shape[1:]), None if params.w_gate is None else inner, inner)
    return _sweep(block, counts, params, (x, scale), outs, None)[0]


def _sweep_ffn_gradients(
    x: Array,
    scale: Array,
    gate: Array | None,
    up: Array,
    params: FFNParams,
    counts: Array,
    g: Array,
    hidden: HiddenUnits,
) -> tuple[Array, Array, FFNParams]:
    def block(params: FFNParams, rows: tuple) -> tuple[tuple, FFNParams]:
        x, scale, gate, up, g = rows
        # A beta for each unit, so that the gradient of the one they share is summed in float32.
        beta = None if params.beta is None else jnp.broadcast_to(params.beta, up.shape)
        units, pull = jax.vjp(hidden, gate, up, beta)
        d_scaled = product(g, _transposed(params.w_down))
        d_scale = _row_dot(d_scaled, units, scale.dtype)
        if params.b_down is not None:
            d_scale += _row_dot(g, jnp.broadcast_to(params.b_down, g.shape), scale.dtype)
        d_gate, d_up, d_beta = pull((d_scaled * scale).astype(units.dtype))
        dx = product(d_up, _transposed(params.w_up))
        dx = dx if gate is None else dx + product(d_gate, _transposed(params.w_gate))
        sums = FFNParams(
            w_gate=None if gate is None else _outer(x, d_gate),
            w_up=_outer(x, d_up),
            w_down=_outer((units * scale).astype(x.dtype), g),
            b_gate=None if params.b_gate is None else _total(d_gate),
            b_up=None if params.b_up is None else _total(d_up),
            b_down=None if params.b_down is None else _total(g * scale),
            beta=None if beta is None else jnp.sum(_total(d_beta)),
        )
        return (dx, d_scale), sums

    outs = (_like(x, x.shape[1:]), _like(scale, scale.shape[1:]))
    sums = jax.tree.map(_sums, params)
    (dx, d_scale), sums = _sweep(block, counts, _turned_ahead(params), (x, scale, gate, up, g), outs, sums)
    return dx, d_scale, jax.tree.map(lambda d, p: d.astype(p.dtype), sums, params)


def _turned_ahead(params: Any) -> Any:
    """16-bit matrices of `params` [E, D, F] turned, once for all blocks; what has no more dimensions stays."""
    return jax.tree.map(lambda p: turned(p) if p.ndim == 3 and p.dtype.itemsize == 2 else p, params)


def _transposed(w: Array) -> Array:
    """The transpose of a group's matrix, which `_turned_ahead` may have made already."""
    return w if w.dtype.itemsize == 2 else w.T


def _row_dot(a: Array, b: Array, dtype: Any) -> Array:
    return jnp.sum(a.astype(dtype) * b.astype(dtype), axis=1, keepdims=True)


def _total(rows: Array) -> Array:
    return jnp.sum(rows.astype(wide(rows.dtype)), axis=0)


def _outer(x: Array, g: Array) -> Array:
    return wide_product(turned(x), g)


def _like(x: Array, shape: tuple[int, ...]) -> Array:
    """Zeros with x's rows and dtype (and, in a shard_map, varying over the same devices)."""
    return jnp.zeros_like(x, shape=(x.shape[0], *shape))


def _sums(w: Array) -> Array:
    return jnp.zeros_like(w, dtype=wide(w.dtype))


def block_rows(n_rows: int, n_groups: int) -> int:
    """Rows of a block: a quarter of a group's mean, so that short last blocks waste an eighth, within 32 and 256.

    Measured by benchmarks/grouped_matmul.py: below 32 the products are too thin, above 256 nothing is gained.
    """
    quarter = max(1, n_rows // (4 * n_groups))
    return min(256, max(32, 1 << (quarter - 1).bit_length()), max(1, n_rows))


def _sweep(block: Callable, counts: Array, weights: Any, rows: Any, outs: Any, sums: Any) -> tuple[Any, Any]:
    """For each group e and each block of its rows: block(weights[e], rows) -> (outs of the rows, added to sums[e]).

    Rows of other groups reach `block` as zeros. What it writes for them behind its group does no harm, since groups
    are visited in order; behind the last one it stays, so the first of the outs must be zero
    for zero rows. Each sum is carried for one group at a time, so a block costs its own products and never a pass over
    the matrices of all groups.
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
    return jnp.sum(rows.astype(wide(y.dtype)), axis=1).astype(y.dtype)


spread.defvjp(
    lambda x, token, row: (spread(x, token, row), (token, row)),
    lambda maps, g: (collect(g, *maps), None, None),
)
collect.defvjp(
    lambda y, token, row: (collect(y, token, row), (token, row)),
    lambda maps, g: (spread(g, *maps), None, None),
)
