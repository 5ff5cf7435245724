"""Attention on NVIDIA GPUs: Triton kernels that visit live blocks only, first those that need no mask.

The gradients of keys and values come from a kernel that owns a block of keys and sums over the query heads that read
it, those of queries from one that owns a block of queries: no atomics, so the same bits every time.

Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from zoo.kernels.attention import triton
from zoo.kernels.attention.problem import (
    LOWEST,
    Gradients,
    Operands,
    Settings,
    kept,
    map_of,
    product_gradient,
    row_delta,
    visible,
)
from zoo.kernels.attention.tables import GpuBlocks, GpuSizes, gpu_blocks, too_large
from zoo.kernels.attention.triton import columns_of, dot, padded_width
from zoo.kernels.block_map import Lists
from zoo.kernels.target import Target, target


class Plan(NamedTuple):
    """What a kernel knows before its arrays.

    Attributes:
        blocks: its sizes.
        settings: of the problem.
        widths: h and d, of keys and of values.
        heads: query heads that it visits.
        unit: of its scores.
    """

    blocks: GpuBlocks
    settings: Settings
    widths: tuple[int, int]
    heads: int
    unit: float


class Tile(NamedTuple):
    """Scores of a block in the kernel's unit, which of them count (None for all), factors of dropout, and distances."""

    scores: Array
    seen: Any
    keep: Any
    distance: Any


def refuses(operands: Operands, settings: Settings, device: Target, way: str) -> str | None:
    """Why this problem cannot run here, or None."""
    reason = triton.missing((operands.q.dtype, operands.k.dtype, operands.v.dtype), device)
    if reason:
        return reason
    if way == "backward" and operands.bias is not None:
        return "its kernels have no gradient of a bias"
    if settings.blocks and any(n < triton.LEAST or n & (n - 1) for n in settings.blocks):
        return f"blocks={settings.blocks} have to be powers of two from {triton.LEAST} on"
    for kernel in ("forward",) if way == "forward" else ("dkv", "dq"):
        reason = too_large(device.kind, _sizes(operands), kernel, _blocks(device, operands, settings, kernel))
        if reason:
            return reason
    return None


def _sizes(operands: Operands) -> GpuSizes:
    q, k, v = operands.q, operands.k, operands.v
    return GpuSizes(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], q.dtype.itemsize)


def _blocks(device: Target, operands: Operands, settings: Settings, kernel: str) -> GpuBlocks:
    return gpu_blocks(device.kind, _sizes(operands), kernel, settings.blocks)


def forward(operands: Operands, settings: Settings) -> tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """As `dense.forward`."""
    plan = _plan(operands, settings, "forward")
    (B, T, H, _), d = operands.q.shape, operands.v.shape[-1]
    lists = map_of(operands, settings, plan.blocks.q, plan.blocks.kv).by_query
    padded = _padded(operands, plan.blocks)
    rows = padded.q.shape[1]
    outs = {"out": ((B, rows, H, d), operands.v.dtype), "lse": ((B, H, rows), jnp.float32)}
    found = _call(_forward_kernel, plan, padded, lists, {}, outs)
    return found["out"][:, :T], found["lse"][:, :, :T]


def backward(
    operands: Operands,
    settings: Settings,
    out: Float[Array, "B T H d"],
    lse: Float[Array, "B H T"],
    d_out: Float[Array, "B T H d"],
    d_lse: Float[Array, "B H T"],
) -> Gradients:
    """As `dense.backward`, but for a bias."""
    # A row that sees nothing has no weights, whatever its scores are: exp(score - inf) is 0.
    rows = {
        "lse": jnp.where(lse > -jnp.inf, lse * triton.unit_of(operands.q.dtype), jnp.inf),
        "delta": row_delta(out, d_out, d_lse),
        "d_out": d_out.astype(operands.v.dtype),
    }
    dq, d_slopes = _gradient_of_queries(operands, settings, rows)
    dk, dv = _gradient_of_keys(operands, settings, rows)
    return Gradients(dq, dk, dv, d_slopes)


def _gradient_of_queries(operands: Operands, settings: Settings, rows: dict[str, Array]) -> tuple[Array, Array | None]:
    """The gradients of the queries and of the slopes."""
    plan = _plan(operands, settings, "dq")
    B, T, H, h = operands.q.shape
    lists = map_of(operands, settings, plan.blocks.q, plan.blocks.kv).by_query
    padded = _padded(operands, plan.blocks)
    length = padded.q.shape[1]
    outs = {"dq": ((B, length, H, h), operands.q.dtype)}
    if operands.slopes is not None:
        outs["d_slopes"] = ((B, H, length), jnp.float32)
    found = _call(_dq_kernel, plan, padded, lists, _padded_rows(rows, length), outs)
    d_slopes = None if operands.slopes is None else -found["d_slopes"].sum(-1)
    return found["dq"][:, :T], d_slopes


def _gradient_of_keys(operands: Operands, settings: Settings, rows: dict[str, Array]) -> tuple[Array, Array]:
    """The gradients of keys and values."""
    plan = _plan(operands, settings, "dkv")
    (B, S, K, h), d = operands.k.shape, operands.v.shape[-1]
    plan = plan._replace(heads=operands.q.shape[2] // K)
    lists = map_of(operands, settings, plan.blocks.q, plan.blocks.kv).by_key
    padded = _padded(operands, plan.blocks)
    rows = _padded_rows(rows, padded.q.shape[1])
    length = padded.k.shape[1]
    outs = {"dk": ((B, length, K, h), operands.k.dtype), "dv": ((B, length, K, d), operands.v.dtype)}
    found = _call(_dkv_kernel, plan, padded, lists, rows, outs)
    return found["dk"][:, :S], found["dv"][:, :S]


# -------------------------------------------------------------------------------------- kernels


def _forward_kernel(plan: Plan, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    """The output and the log sums of a block of queries of one head."""
    i, (h, d) = _block(refs), plan.widths
    row, n = i * plan.blocks.q, plan.blocks.q
    q = triton.load(refs["q"], row, n, 0, h)

    def step(masked: bool, j: Array, carry: Any) -> Any:
        top, total, acc = carry
        column = j * plan.blocks.kv
        k, v = (triton.load(refs[x], column, plan.blocks.kv, 0, w) for x, w in (("k", h), ("v", d)))
        tile = _tile(plan, refs, triton.sum_of_dots(q, k, (1, 1)), row, column, masked)
        new = jnp.maximum(top, _masked(tile.scores, tile, LOWEST).max(1))
        weights = _masked(triton.power(tile.scores - new[:, None], plan.unit), tile, 0.0)
        fade = triton.power(top - new, plan.unit)
        total = total * fade + weights.sum(1)
        weights = weights if tile.keep is None else weights * tile.keep
        weights = weights.astype(v[0].dtype)
        return new, total, [a * fade[:, None] + dot(weights, part, (1, 0)) for a, part in zip(acc, v, strict=True)]

    start = (jnp.full(n, LOWEST, jnp.float32), jnp.zeros(n, jnp.float32), _zeros(n, d))
    top, total, acc = _over_list(step, refs, start)
    safe = jnp.where(total > 0, total, 1.0)
    triton.store(outs["out"], row, [a / safe[:, None] for a in acc], d)
    lse = jnp.where(total > 0, top / plan.unit + jnp.log(safe), -jnp.inf)
    outs["lse"][0, pl.ds(row, n)] = lse


def _dq_kernel(plan: Plan, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    """The gradients of a block of queries of one head, and each row's part of that of the head's slope."""
    i, (h, d) = _block(refs), plan.widths
    row, n = i * plan.blocks.q, plan.blocks.q
    q, d_out = triton.load(refs["q"], row, n, 0, h), triton.load(refs["d_out"], row, n, 0, d)
    lse, delta = (refs[x][0, pl.ds(row, n)][:, None] for x in ("lse", "delta"))

    def step(masked: bool, j: Array, carry: Any) -> Any:
        dq, d_slopes = carry
        column = j * plan.blocks.kv
        k, v = (triton.load(refs[x], column, plan.blocks.kv, 0, w) for x, w in (("k", h), ("v", d)))
        products = triton.sum_of_dots(q, k, (1, 1))
        tile = _tile(plan, refs, products, row, column, masked)
        weights = _masked(triton.power(tile.scores - lse, plan.unit), tile, 0.0)
        d_weights = triton.sum_of_dots(d_out, v, (1, 1))
        d_weights = d_weights if tile.keep is None else d_weights * tile.keep
        d_scores = weights * (d_weights - delta)
        d_products = product_gradient(d_scores, products, plan.settings).astype(k[0].dtype)
        if "d_slopes" in outs:
            d_slopes = d_slopes + (d_scores * tile.distance.astype(jnp.float32)).sum(1)
        return [a + dot(d_products, part, (1, 0)) for a, part in zip(dq, k, strict=True)], d_slopes

    dq, d_slopes = _over_list(step, refs, (_zeros(n, h), jnp.zeros(n, jnp.float32)))
    triton.store(outs["dq"], row, dq, h)
    if "d_slopes" in outs:
        outs["d_slopes"][0, pl.ds(row, n)] = d_slopes


def _dkv_kernel(plan: Plan, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    """The gradients of a block of keys and values, summed over the query heads that read them.

    Its tiles are [keys, queries], so that no product needs one turned.
    """
    j, (h, d) = _block(refs), plan.widths
    column, n = j * plan.blocks.kv, plan.blocks.kv
    k, v = triton.load(refs["k"], column, n, 0, h), triton.load(refs["v"], column, n, 0, d)

    def step(head: Any, masked: bool, i: Array, carry: Any) -> Any:
        dk, dv = carry
        row, m = i * plan.blocks.q, plan.blocks.q
        q, d_out = triton.load(refs["q"], row, m, head, h), triton.load(refs["d_out"], row, m, head, d)
        lse, delta = (refs[x][head, pl.ds(row, m)][None, :] for x in ("lse", "delta"))
        products = triton.sum_of_dots(k, q, (1, 1))
        tile = _tile(plan, refs, products, row, column, masked, head, by_key=True)
        weights = _masked(triton.power(tile.scores - lse, plan.unit), tile, 0.0)
        d_weights = triton.sum_of_dots(v, d_out, (1, 1))
        used = weights
        if tile.keep is not None:
            used, d_weights = weights * tile.keep, d_weights * tile.keep
        used = used.astype(d_out[0].dtype)
        dv = [a + dot(used, part, (1, 0)) for a, part in zip(dv, d_out, strict=True)]
        d_products = product_gradient(weights * (d_weights - delta), products, plan.settings).astype(q[0].dtype)
        return [a + dot(d_products, part, (1, 0)) for a, part in zip(dk, q, strict=True)], dv

    def one_head(head: Array, carry: Any) -> Any:
        return _over_list(partial(step, head), refs, carry)

    dk, dv = jax.lax.fori_loop(jnp.int32(0), jnp.int32(plan.heads), one_head, (_zeros(n, h), _zeros(n, d)))
    triton.store(outs["dk"], column, dk, h)
    triton.store(outs["dv"], column, dv, d)


def _tile(
    plan: Plan, refs: Any, products: Array, row: Any, column: Any, masked: bool, head: Any = 0, by_key: bool = False
) -> Tile:
    """The tile of the queries from `row` on and the keys from `column` on: [queries, keys], or turned."""
    of_queries, of_keys = (lambda x: x[:, None]), (lambda x: x[None, :])
    if by_key:
        of_queries, of_keys = of_keys, of_queries
    queries, keys, settings = pl.ds(row, plan.blocks.q), pl.ds(column, plan.blocks.kv), plan.settings
    seen = keep = distance = slope = bias = None
    if masked or "slopes" in refs:
        q_at, k_at = of_queries(refs["q_at"][queries]), of_keys(refs["k_at"][keys])
    if "slopes" in refs:
        distance, slope = q_at - k_at, refs["slopes"][0, head]
    if masked:
        ids = of_queries(refs["q_ids"][queries]), of_keys(refs["k_ids"][keys])
        seen = visible(settings.mask, q_at, k_at, *ids)
    if "seeds" in refs:
        rows, columns = row + jnp.arange(plan.blocks.q), column + jnp.arange(plan.blocks.kv)
        keep = kept(refs["seeds"][0, head], of_queries(rows), of_keys(columns), settings.dropout_rate)
    if "bias" in refs:
        bias = _bias(refs["bias"], queries, keys)
    return Tile(triton.scaled_scores(products, distance, slope, bias, settings, plan.unit), seen, keep, distance)


def _bias(ref: Any, queries: Any, keys: Any) -> Array:
    """A tile of a bias; axes of one row or column stay."""
    rows, columns = ref.shape
    if rows > 1 and columns > 1:
        return ref[queries, keys]
    if rows > 1:
        return ref[queries, 0][:, None]
    return ref[0, keys][None, :] if columns > 1 else jnp.full((1, 1), ref[0, 0])


def _over_list(step: Callable[..., Any], refs: dict[str, Any], carry: Any) -> Any:
    """step(masked, j, carry) for every block that the kernel's own one meets: first those that need no mask."""

    def run(masked: bool, n: Array, carry: Any) -> Any:
        return step(masked, refs["index"][n], carry)

    full, live = refs["counts"][0], refs["counts"][1]
    carry = jax.lax.fori_loop(jnp.int32(0), full, partial(run, False), carry)
    return jax.lax.fori_loop(full, live, partial(run, True), carry)


def _block(refs: dict[str, Any]) -> Any:
    """The block that a kernel owns: the last ones first, which have most to do under a causal mask."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _masked(x: Array, tile: Tile, other: float) -> Array:
    return x if tile.seen is None else jnp.where(tile.seen, x, other)


def _zeros(n: int, width: int) -> list[Array]:
    return [jnp.zeros((n, columns.size), jnp.float32) for columns in columns_of(width)]


# ---------------------------------------------------------------------------------------- calls


def _call(
    kernel: Callable[..., None], plan: Plan, operands: Operands, lists: Lists, rows: dict[str, Array], outs: dict
) -> dict[str, Array]:
    """Runs a kernel on every block of the lists, head and row of the batch.

    Args:
        operands: padded to whole blocks.
        rows: lse, delta [B, H, T] and d_out [B, T, H, d] for a backward kernel.
        outs: name -> shape and dtype, [B, length, heads, width] or [B, heads, length].
    """
    arrays = _arrays(operands, lists) | rows
    n_heads, readers = operands.q.shape[2] // plan.heads, operands.q.shape[2] // operands.k.shape[2]
    grid = (lists.index.shape[1], n_heads, len(operands.q))
    shared = {name: grid[0] for name in ("index", "counts")}
    specs = {name: _spec(name, x.shape, plan, readers, shared.get(name)) for name, x in arrays.items()}
    out_specs = {name: _spec(name, shape, plan, readers, None) for name, (shape, _) in outs.items()}
    call = pl.pallas_call(
        partial(kernel, plan),
        out_shape={name: jax.ShapeDtypeStruct(*out) for name, out in outs.items()},
        grid=grid,
        in_specs=(specs,),
        out_specs=out_specs,
        compiler_params=triton.plgpu.CompilerParams(num_warps=plan.blocks.warps, num_stages=plan.blocks.stages),
        interpret=target().interpret,
        name=kernel.__name__.strip("_"),
    )
    return call(arrays)


def _arrays(operands: Operands, lists: Lists) -> dict[str, Array]:
    places = operands.places
    counts = jnp.stack([jnp.asarray(lists.full), jnp.asarray(lists.live)], -1)
    found = {
        "index": jnp.asarray(lists.index),
        "counts": counts,
        "q": operands.q,
        "k": operands.k,
        "v": operands.v,
        "q_at": places.q_positions,
        "k_at": places.kv_positions,
        "q_ids": places.q_segment_ids,
        "k_ids": places.kv_segment_ids,
        "slopes": operands.slopes,
        "bias": operands.bias,
        "seeds": operands.seeds,
    }
    return {name: x for name, x in found.items() if x is not None}


def _spec(name: str, shape: tuple[int, ...], plan: Plan, readers: int, n_blocks: int | None) -> pl.BlockSpec:
    """Which part of an array the kernel (block, head, row of the batch) sees: whole sequences of its heads."""
    heads = plan.heads
    of_keys = 1 if heads > 1 else readers  # a kernel's number counts key heads, or query heads, `readers` for a key's
    if name in ("index", "counts"):
        own = min(shape[0] - 1, 1)
        return pl.BlockSpec((None, None, shape[2]), lambda i, h, b: (b * own, n_blocks - 1 - i, 0))
    if name in ("k", "v", "dk", "dv"):
        return pl.BlockSpec((None, shape[1], 1, padded_width(shape[3])), lambda i, h, b: (b, 0, h // of_keys, 0))
    if name in ("q", "d_out", "out", "dq"):
        return pl.BlockSpec((None, shape[1], heads, padded_width(shape[3])), lambda i, h, b: (b, 0, h, 0))
    if name in ("lse", "delta", "d_slopes"):
        return pl.BlockSpec((None, heads, shape[2]), lambda i, h, b: (b, h, 0))
    if name in ("slopes", "seeds"):
        return pl.BlockSpec((1, heads), lambda i, h, b: (b, h))
    if name == "bias":
        batch, head = (min(n - 1, 1) for n in shape[:2])
        return pl.BlockSpec((None, None, *shape[2:]), lambda i, h, b: (b * batch, h * head, 0, 0))
    return pl.BlockSpec((None, shape[1]), lambda i, h, b: (b, 0))


def _plan(operands: Operands, settings: Settings, kernel: str) -> Plan:
    blocks = _blocks(target(), operands, settings, kernel)
    return Plan(blocks, settings, (operands.q.shape[-1], operands.v.shape[-1]), 1, triton.unit_of(operands.q.dtype))


def _padded(operands: Operands, blocks: GpuBlocks) -> Operands:
    """The operands with whole blocks of queries and keys; what is added is in no segment."""
    rows, columns = (-n % size for n, size in zip((operands.q.shape[1], operands.k.shape[1]), blocks[:2], strict=True))
    queries, keys = (partial(_longer, axis=1, by=n) for n in (rows, columns))
    bias = operands.bias
    if bias is not None:
        bias = _longer(bias, 2, rows if bias.shape[2] > 1 else 0)
        bias = _longer(bias, 3, columns if bias.shape[3] > 1 else 0)
    at, k_at, ids, k_ids = operands.places
    places = type(operands.places)(queries(at), keys(k_at), queries(ids), keys(k_ids))
    return operands._replace(q=queries(operands.q), k=keys(operands.k), v=keys(operands.v), places=places, bias=bias)


def _padded_rows(rows: dict[str, Array], length: int) -> dict[str, Array]:
    axis = {"d_out": 1}
    return {x: _longer(a, axis.get(x, 2), length - a.shape[axis.get(x, 2)]) for x, a in rows.items()}


def _longer(x: Array, axis: int, by: int) -> Array:
    """x with zeros behind its end along an axis."""
    return jnp.pad(x, [(0, by if a == axis else 0) for a in range(x.ndim)]) if by else x
