"""Attention by blocks of queries and keys in plain JAX: memory linear in length, and no work on dead blocks.

It is the fast path on CPUs and the one that works everywhere. A row of the batch at a time, so that the scores of a
block stay in the cache; all of its heads share one batched product.

Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.kernels.attention.problem import (
    LOWEST,
    Gradients,
    Operands,
    Settings,
    kept,
    map_of,
    product_gradient,
    row_delta,
    scores_of,
    visible,
)
from zoo.kernels.attention.tables import block_sizes
from zoo.kernels.block_map import Lists


class Row(NamedTuple):
    """A row of the batch, cut into blocks: n of t queries, m of s keys; K key heads with G query heads each.

    Attributes:
        q: [n, K, G t, h]; the queries of a key head's G heads are rows of one product.
        k, v: [m, K, s, h] and [m, K, s, d].
        q_at, q_ids, k_at, k_ids: [n, t] and [m, s] positions and segment ids, 0 behind the end.
        slopes, seeds: [K, G, 1, 1], or None.
        bias: [K or 1, G or 1, n t or 1, m s or 1], or None.
    """

    q: Array
    k: Array
    v: Array
    q_at: Array
    q_ids: Array
    k_at: Array
    k_ids: Array
    slopes: Any
    seeds: Any
    bias: Any


class Tile(NamedTuple):
    """A query block and a key block: products, scores, which pairs count (None for all) and dropout's factors.

    All [K, G, t, s] or of shapes that broadcast to it; `distance` is None without slopes.
    """

    products: Array
    scores: Array
    distance: Any
    seen: Any
    keep: Any


def forward(operands: Operands, settings: Settings) -> tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """As `dense.forward`, without the scores in memory."""
    sizes = block_sizes("cpu", operands, settings)

    def row(own: Row, lists: Lists, _: Any) -> tuple[Array, Array]:
        return jax.lax.map(partial(_attend_block, own, lists, settings), jnp.arange(len(own.q)))

    lists = map_of(operands, settings, *sizes).by_query
    out, lse = _over_rows(row, operands, lists, sizes)
    T = operands.q.shape[1]
    return _joined(out, sizes[0], T).astype(operands.v.dtype), _joined(lse[..., None], sizes[0], T)[..., 0].mT


def backward(
    operands: Operands,
    settings: Settings,
    out: Float[Array, "B T H d"],
    lse: Float[Array, "B H T"],
    d_out: Float[Array, "B T H d"],
    d_lse: Float[Array, "B H T"],
) -> Gradients:
    """As `dense.backward`, in one pass over the key blocks."""
    sizes = block_sizes("cpu", operands, settings)
    rows = jnp.stack([lse.mT, row_delta(out, d_out, d_lse).mT], -1)  # [B, T, H, 2]
    lists = map_of(operands, settings, *sizes).by_key
    dq, dk, dv, d_slopes, d_bias = _over_rows(
        partial(_gradients_of_row, settings), operands, lists, sizes, (d_out, rows)
    )
    T, S = operands.q.shape[1], operands.k.shape[1]
    return Gradients(
        _joined(dq, sizes[0], T).astype(operands.q.dtype),
        _joined(dk, sizes[1], S).astype(operands.k.dtype),
        _joined(dv, sizes[1], S).astype(operands.v.dtype),
        None if d_slopes is None else d_slopes.reshape(operands.slopes.shape).astype(operands.slopes.dtype),
        None if d_bias is None else _own_bias(d_bias, operands.bias),
    )


# --------------------------------------------------------------------------------------- blocks


def _attend_block(own: Row, lists: Lists, settings: Settings, i: Array) -> tuple[Array, Array]:
    """The output [K, G t, d] of a query block, and its rows' log sums [K, G t]."""
    shape, dtype = own.q.shape[1:3], _wide(own.q)

    def step(masked: bool, n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        j = lists.index[i, n]
        tile = _tile(masked, own, settings, i, j)
        new = jnp.maximum(top, _masked(tile.scores, tile, LOWEST).reshape(*shape, -1).max(-1))
        weights = jnp.exp(tile.scores - _by_head(new, own))
        weights = _masked(weights, tile, 0)
        fade = jnp.exp(top - new)
        total = total * fade + weights.reshape(*shape, -1).sum(-1)
        weights = weights if tile.keep is None else weights * tile.keep
        weights = weights.reshape(*shape, -1).astype(own.v.dtype)
        added = jnp.einsum("Krs,Ksd->Krd", weights, own.v[j], preferred_element_type=dtype)
        return new, total, acc * fade[..., None] + added

    start = (jnp.full(shape, LOWEST, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, own.v.shape[-1]), dtype))
    top, total, acc = _over_list(step, lists, i, start)
    some = total > 0
    safe = jnp.where(some, total, 1)
    return acc / safe[..., None], jnp.where(some, top + jnp.log(safe), -jnp.inf)


def _gradients_of_row(settings: Settings, own: Row, lists: Lists, extra: Any) -> tuple:
    """dq [n, K, G t, h], dk and dv [m, K, s, .], and of slopes and bias in the shapes that `own` has them in."""
    d_out, rows = extra
    K, dtype = own.q.shape[1], _wide(own.q)
    sums = (jnp.zeros(own.q.shape, dtype), _zeros(own.slopes), _zeros(own.bias))

    def key_block(sums: Any, j: Array) -> tuple[Any, tuple[Array, Array]]:
        def step(masked: bool, n: Array, carry: Any) -> Any:
            (dq, d_slopes, d_bias), dk, dv = carry
            i = lists.index[j, n]
            tile = _tile(masked, own, settings, i, j)
            lse, delta = (_by_head(rows[i, ..., c], own) for c in range(2))
            weights = _masked(jnp.exp(tile.scores - lse), tile, 0)
            d_weights = jnp.einsum("Krd,Ksd->Krs", d_out[i], own.v[j], preferred_element_type=dtype)
            d_weights = d_weights.reshape(weights.shape)
            used = weights
            if tile.keep is not None:
                used, d_weights = weights * tile.keep, d_weights * tile.keep
            d_scores = weights * (d_weights - delta)
            flat = lambda x, like: x.reshape(K, -1, x.shape[-1]).astype(like.dtype)  # noqa: E731
            dv += jnp.einsum("Krs,Krd->Ksd", flat(used, d_out), d_out[i], preferred_element_type=dtype)
            d_products = flat(product_gradient(d_scores, tile.products, settings), own.q)
            dk += jnp.einsum("Krs,Krh->Ksh", d_products, own.q[i], preferred_element_type=dtype)
            new = dq[i] + jnp.einsum("Krs,Ksh->Krh", d_products, own.k[j], preferred_element_type=dtype)
            if d_slopes is not None:
                d_slopes -= (d_scores * tile.distance).sum((-2, -1), keepdims=True)
            if d_bias is not None:
                d_bias = _add_bias(d_bias, d_scores, i, j)
            return (dq.at[i].set(new), d_slopes, d_bias), dk, dv

        zeros = (jnp.zeros(own.k.shape[1:], dtype), jnp.zeros(own.v.shape[1:], dtype))
        sums, dk, dv = _over_list(step, lists, j, (sums, *zeros))
        return sums, (dk, dv)

    (dq, d_slopes, d_bias), (dk, dv) = jax.lax.scan(key_block, sums, jnp.arange(len(own.k)))
    return dq, dk, dv, d_slopes, d_bias


def _over_list(step: Callable[..., Any], lists: Lists, i: Array, carry: Any) -> Any:
    """step(masked, n, carry) for the n-th block that block i meets: first those of which every pair counts."""
    carry = jax.lax.fori_loop(0, lists.full[i], partial(step, False), carry)
    return jax.lax.fori_loop(lists.full[i], lists.live[i], partial(step, True), carry)


def _tile(masked: bool, own: Row, settings: Settings, i: Array, j: Array) -> Tile:
    """The tile of query block i and key block j."""
    t, s = own.q_at.shape[1], own.k_at.shape[1]
    K, rows = own.q.shape[1:3]
    products = jnp.einsum("Krh,Ksh->Krs", own.q[i], own.k[j], preferred_element_type=_wide(own.q))
    products = products.reshape(K, rows // t, t, s)
    q_at, k_at = own.q_at[i][:, None], own.k_at[j][None, :]
    distance = None if own.slopes is None else q_at - k_at
    bias = None if own.bias is None else _bias_of(own.bias, i * t, j * s, (t, s))
    seen, keep = None, None
    if masked:
        seen = visible(settings.mask, q_at, k_at, own.q_ids[i][:, None], own.k_ids[j][None, :])
    if own.seeds is not None:
        row, column = i * t + jnp.arange(t)[:, None], j * s + jnp.arange(s)[None, :]
        keep = kept(own.seeds, row, column, settings.dropout_rate)
    return Tile(products, scores_of(products, distance, own.slopes, bias, settings), distance, seen, keep)


def _masked(x: Array, tile: Tile, other: float) -> Array:
    return x if tile.seen is None else jnp.where(tile.seen, x, other)


def _by_head(rows: Array, own: Row) -> Array:
    """[K, G t] as [K, G, t, 1]."""
    return rows.reshape(len(rows), -1, own.q_at.shape[1], 1)


def _bias_of(bias: Array, row: Array, column: Array, sizes: tuple[int, int]) -> Array:
    """The part of a bias that belongs to a tile; dimensions of 1 stay."""
    for axis, start, size in ((2, row, sizes[0]), (3, column, sizes[1])):
        if bias.shape[axis] > 1:
            bias = jax.lax.dynamic_slice_in_dim(bias, start, size, axis)
    return bias


def _add_bias(d_bias: Array, d_scores: Array, i: Array, j: Array) -> Array:
    """The gradient of a bias with that of a tile's scores added to its part."""
    t, s = d_scores.shape[2:]
    ones = [axis for axis, size in enumerate(d_bias.shape) if size == 1]
    starts = (0, 0, 0 if d_bias.shape[2] == 1 else i * t, 0 if d_bias.shape[3] == 1 else j * s)
    at = [jnp.asarray(x, jnp.int32) for x in starts]
    new = d_scores.sum(ones, keepdims=True)
    new += jax.lax.dynamic_slice(d_bias, at, new.shape)
    return jax.lax.dynamic_update_slice(d_bias, new, at)


# ----------------------------------------------------------------------------------------- rows


def _over_rows(
    run: Callable[..., Any], operands: Operands, lists: Lists, sizes: tuple[int, int], extra: Any = ()
) -> Any:
    """run(row, its lists, its blocks of what is in extra, [B, T, H, .]) for all rows of the batch."""
    operands, shared_bias = _apart(operands, operands.bias is not None and len(operands.bias) == 1)
    shared_lists = Lists(*(jnp.asarray(x)[0] for x in lists)) if len(lists.index) == 1 else None

    def row(parts: Any) -> Any:
        own, own_lists, extra = parts
        own = own if shared_bias is None else own._replace(bias=shared_bias)
        blocks = [_cut(x, sizes[0], operands.k.shape[2]) for x in extra]
        return run(_row(own, sizes), own_lists if shared_lists is None else shared_lists, blocks)

    return jax.lax.map(row, (operands, None if shared_lists else lists, extra))


def _apart(operands: Operands, shared: bool) -> tuple[Operands, Array | None]:
    """The operands without a bias that all rows share, and that bias."""
    return (operands._replace(bias=None), operands.bias[0]) if shared else (operands, None)


def _row(operands: Operands, sizes: tuple[int, int]) -> Row:
    """A row of the batch, whose operands have no leading axis, cut into blocks."""
    H, K, places = operands.q.shape[1], operands.k.shape[1], operands.places
    by_head = lambda x: None if x is None else x.reshape(K, H // K, 1, 1)  # noqa: E731
    return Row(
        _cut(operands.q, sizes[0], K),
        _cut(operands.k, sizes[1], K),
        _cut(operands.v, sizes[1], K),
        *(_padded(x, sizes[0]).reshape(-1, sizes[0]) for x in (places.q_positions, places.q_segment_ids)),
        *(_padded(x, sizes[1]).reshape(-1, sizes[1]) for x in (places.kv_positions, places.kv_segment_ids)),
        by_head(operands.slopes),
        by_head(operands.seeds),
        None if operands.bias is None else _cut_bias(operands.bias, K, sizes),
    )


def _cut(x: Array, size: int, K: int) -> Array:
    """[T, H, w] as blocks [n, K, G size, w], with zeros behind the end."""
    H, width = x.shape[1:]
    blocks = _padded(x, size).reshape(-1, size, K, H // K, width)
    return blocks.transpose(0, 2, 3, 1, 4).reshape(len(blocks), K, -1, width)


def _joined(blocks: Array, size: int, length: int) -> Array:
    """[B, n, K, G size, w] as [B, T, H, w]: the reverse of `_cut`."""
    B, n, K, _, width = blocks.shape
    x = blocks.reshape(B, n, K, -1, size, width).transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(B, n * size, -1, width)[:, :length]


def _cut_bias(bias: Array, K: int, sizes: tuple[int, int]) -> Array:
    """[H or 1, T or 1, S or 1] as [K or 1, G or 1, ., .], with zeros behind the end."""
    pads = [(0, -n % size if n > 1 else 0) for n, size in zip(bias.shape[1:], sizes, strict=True)]
    bias = jnp.pad(bias, [(0, 0), *pads])
    return bias.reshape(K if len(bias) > 1 else 1, -1, *bias.shape[1:])


def _own_bias(d_bias: Array, bias: Array) -> Array:
    """The gradient of a bias from those of all rows, [B, K or 1, G or 1, ., .]."""
    d_bias = d_bias.reshape(len(d_bias), *(-1, *d_bias.shape[3:]))
    d_bias = d_bias if len(bias) > 1 else d_bias.sum(0, keepdims=True)
    return d_bias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


def _padded(x: Array, size: int) -> Array:
    return jnp.pad(x, [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1))


def _zeros(x: Array | None) -> Array | None:
    return None if x is None else jnp.zeros_like(x, dtype=_wide(x))


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
