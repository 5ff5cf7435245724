"""Attention on TPUs: kernels that fetch and visit live blocks only, with a mask where a block is not full.

The lists of live blocks are in the memory for scalars before a kernel starts, so it knows what to fetch next; behind
the end of a list the last block is named again, and nothing is fetched. The gradients of keys and values come from a
kernel that owns a block of keys and sums over the query heads that read it, those of queries from one that owns a
block of queries.

Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from zoo.kernels.attention.mosaic import (
    LANES,
    Plan,
    Step,
    as_column,
    as_row,
    call,
    dot,
    lanes,
    longer,
    over_parts,
    step_of,
)
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
from zoo.kernels.attention.tpu_blocks import KINDS, TpuBlocks, lists_too_long, too_large, tpu_blocks
from zoo.kernels.block_map import BlockMap, Lists
from zoo.kernels.target import Target, target

DTYPES = ("float32", "bfloat16")


class Side(NamedTuple):
    """Some queries or keys: indices, positions and segment ids, all as a column or as a row."""

    index: Int[Array, "..."]
    at: Int[Array, "..."]
    ids: Int[Array, "..."]


class Tile(NamedTuple):
    """Scores [own, other], which of them count (None for all), factors of dropout or None, and distances."""

    scores: Array
    seen: Any
    keep: Any
    distance: Array


def refuses(operands: Operands, settings: Settings, device: Target, way: str) -> str | None:
    """Why this problem cannot run here, or None."""
    reason = missing((operands.q.dtype, operands.k.dtype, operands.v.dtype), device)
    if reason:
        return reason
    if way == "backward" and operands.bias is not None:
        return "its kernels have no gradient of a bias"
    if settings.blocks and any(n % LANES for n in settings.blocks):
        return f"blocks={settings.blocks} have to be multiples of {LANES}"
    for kernel in ("forward",) if way == "forward" else ("dq", "dkv"):
        blocks = tpu_blocks(device.kind, operands, settings, kernel)
        reason = too_large(device.kind, operands, blocks, kernel)
        reason = reason or lists_too_long(_list_size(operands, settings, blocks, kernel))
        if reason:
            return reason
    return None


def missing(dtypes: tuple[Any, ...], device: Target) -> str | None:
    """Why a kernel for TPUs cannot run on a device with arrays of these dtypes, or None."""
    names = {jnp.dtype(dtype).name for dtype in dtypes}
    if device.platform != "tpu":
        return (
            f"it is for TPUs, and the program is for {device.kind!r}"
            " (zoo.kernels.target.interpreting runs it elsewhere, slowly)"
        )
    if device.kind not in KINDS:
        return f"it knows {', '.join(KINDS)}, and the program is for {device.kind!r}"
    if len(names) > 1 or not names <= set(DTYPES):
        return f"q, k and v have dtypes {', '.join(sorted(names))}; it takes one of {', '.join(DTYPES)} for all"
    return None


def forward(operands: Operands, settings: Settings) -> tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """As `dense.forward`."""
    plan, lists = _plan(operands, settings, "forward")
    (_, T, _, _), d = operands.q.shape, operands.v.shape[-1]
    padded = _padded(operands, plan.blocks)
    B, H, rows = padded.q.shape[:3]
    outs = {
        "out": jax.ShapeDtypeStruct((B, H, rows, d), operands.v.dtype),
        "lse": jax.ShapeDtypeStruct((B, H, 1, rows), jnp.float32),
    }
    n = plan.blocks.q
    scratch = {"top": lanes(n), "total": lanes(n), "acc": pltpu.VMEM((n, d), jnp.float32)}
    found = call(_forward_kernel, plan, padded, lists, {}, outs, scratch | _own_scratch(plan))
    return found["out"][:, :, :T].swapaxes(1, 2), found["lse"][:, :, 0, :T]


def backward(
    operands: Operands,
    settings: Settings,
    out: Float[Array, "B T H d"],
    lse: Float[Array, "B H T"],
    d_out: Float[Array, "B T H d"],
    d_lse: Float[Array, "B H T"],
) -> Gradients:
    """As `dense.backward`, but for a bias."""
    sums = jnp.stack([lse, row_delta(out, d_out, d_lse)], 2).astype(jnp.float32)
    rows = {"d_out": d_out.astype(operands.v.dtype).swapaxes(1, 2), "sums": sums}
    dq, d_slopes = _gradient_of_queries(operands, settings, rows)
    dk, dv = _gradient_of_keys(operands, settings, rows)
    return Gradients(dq, dk, dv, d_slopes)


def _gradient_of_queries(operands: Operands, settings: Settings, rows: dict[str, Array]) -> tuple[Array, Array | None]:
    """The gradients of the queries and of the slopes."""
    plan, lists = _plan(operands, settings, "dq")
    T, h, n = operands.q.shape[1], operands.q.shape[-1], plan.blocks.q
    padded = _padded(operands, plan.blocks)
    outs = {"dq": jax.ShapeDtypeStruct(padded.q.shape, operands.q.dtype)}
    scratch = {"lse": lanes(n), "delta": lanes(n), "dq": pltpu.VMEM((n, h), jnp.float32)} | _own_scratch(plan)
    if operands.slopes is not None:
        B, H, length = padded.q.shape[:3]
        outs["d_slopes"] = jax.ShapeDtypeStruct((B, H, 1, length), jnp.float32)
        scratch["d_slopes"] = lanes(n)
    found = call(_dq_kernel, plan, padded, lists, _padded_rows(rows, n), outs, scratch)
    d_slopes = None if operands.slopes is None else -found["d_slopes"].sum((2, 3)).astype(operands.slopes.dtype)
    return found["dq"][:, :, :T].swapaxes(1, 2), d_slopes


def _gradient_of_keys(operands: Operands, settings: Settings, rows: dict[str, Array]) -> tuple[Array, Array]:
    """The gradients of keys and values."""
    plan, lists = _plan(operands, settings, "dkv")
    S = operands.k.shape[1]
    padded = _padded(operands, plan.blocks)
    outs = {f"d{name}": jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in (("k", padded.k), ("v", padded.v))}
    scratch = {name: pltpu.VMEM((plan.own, x.shape[-1]), jnp.float32) for name, x in outs.items()} | _own_scratch(plan)
    found = call(_dkv_kernel, plan, padded, lists, _padded_rows(rows, plan.blocks.q), outs, scratch)
    return found["dk"][:, :, :S].swapaxes(1, 2), found["dv"][:, :, :S].swapaxes(1, 2)


# -------------------------------------------------------------------------------------- kernels


def _forward_kernel(plan: Plan, scalars: Any, refs: Any, outs: Any, scratch: Any) -> None:
    """The output and the log sums of a block of queries of one head."""
    step = step_of(plan, scalars)

    @pl.when(step.first)
    def start() -> None:
        scratch["top"][...] = jnp.full_like(scratch["top"], LOWEST)
        scratch["total"][...] = jnp.zeros_like(scratch["total"])
        scratch["acc"][...] = jnp.zeros_like(scratch["acc"])
        _turn_places(plan, refs, scratch)

    def visit(masked: bool, begin: Any, size: int) -> None:
        k, v = (refs[x][pl.ds(begin, size)] for x in "kv")
        products = dot(refs["q"][...], k, (1, 1))
        tile = _tile(plan, scalars, refs, scratch, step, products, begin, masked)
        top, total = scratch["top"][:, :1], scratch["total"][:, :1]
        new = jnp.maximum(top, _masked(tile.scores, tile, LOWEST).max(1, keepdims=True))
        weights = _masked(jnp.exp(tile.scores - new), tile, 0.0)
        fade = jnp.exp(top - new)
        total = total * fade + weights.sum(1, keepdims=True)
        weights = weights if tile.keep is None else weights * tile.keep
        scratch["acc"][...] = scratch["acc"][...] * fade + dot(weights.astype(v.dtype), v, (1, 0))
        scratch["top"][...] = jnp.broadcast_to(new, scratch["top"].shape)
        scratch["total"][...] = jnp.broadcast_to(total, scratch["total"].shape)

    _visit(plan, step, visit)

    @pl.when(step.last)
    def finish() -> None:
        top, total = scratch["top"][:, :1], scratch["total"][:, :1]
        safe = jnp.where(total > 0, total, 1.0)
        outs["out"][...] = (scratch["acc"][...] / safe).astype(outs["out"].dtype)
        outs["lse"][...] = as_row(jnp.where(total > 0, top + jnp.log(safe), -jnp.inf))


def _dq_kernel(plan: Plan, scalars: Any, refs: Any, outs: Any, scratch: Any) -> None:
    """The gradients of a block of queries of one head, and each row's part of that of the head's slope."""
    step = step_of(plan, scalars)

    @pl.when(step.first)
    def start() -> None:
        for name in outs:
            scratch[name][...] = jnp.zeros_like(scratch[name])
        for row, name in enumerate(("lse", "delta")):
            scratch[name][...] = as_column(refs["sums"][row : row + 1])
        _turn_places(plan, refs, scratch)

    def visit(masked: bool, begin: Any, size: int) -> None:
        lse, delta = scratch["lse"][:, :1], scratch["delta"][:, :1]
        k, v = (refs[x][pl.ds(begin, size)] for x in "kv")
        products = dot(refs["q"][...], k, (1, 1))
        tile = _tile(plan, scalars, refs, scratch, step, products, begin, masked)
        weights = _masked(jnp.exp(tile.scores - lse), tile, 0.0)
        d_weights = dot(refs["d_out"][...], v, (1, 1))
        d_weights = d_weights if tile.keep is None else d_weights * tile.keep
        d_scores = weights * (d_weights - delta)
        d_products = product_gradient(d_scores, products, plan.settings).astype(k.dtype)
        scratch["dq"][...] += dot(d_products, k, (1, 0))
        if "d_slopes" in outs:
            d_slopes = (d_scores * tile.distance.astype(jnp.float32)).sum(1, keepdims=True)
            scratch["d_slopes"][...] += jnp.broadcast_to(d_slopes, scratch["d_slopes"].shape)

    _visit(plan, step, visit)

    @pl.when(step.last)
    def finish() -> None:
        outs["dq"][...] = scratch["dq"][...].astype(outs["dq"].dtype)
        if "d_slopes" in outs:
            outs["d_slopes"][...] = as_row(scratch["d_slopes"][:, :1])


def _dkv_kernel(plan: Plan, scalars: Any, refs: Any, outs: Any, scratch: Any) -> None:
    """The gradients of a block of keys and values, summed over the query heads that read them."""
    step = step_of(plan, scalars)

    @pl.when(step.first)
    def start() -> None:
        for name in outs:
            scratch[name][...] = jnp.zeros_like(scratch[name])
        _turn_places(plan, refs, scratch)

    def visit(masked: bool, begin: Any, size: int) -> None:
        k, v, part = refs["k"][...], refs["v"][...], pl.ds(begin, size)
        q, d_out, lse, delta = refs["q"][part], refs["d_out"][part], refs["sums"][:1, part], refs["sums"][1:, part]
        products = dot(k, q, (1, 1))
        tile = _tile(plan, scalars, refs, scratch, step, products, begin, masked)
        weights = _masked(jnp.exp(tile.scores - lse), tile, 0.0)
        d_weights = dot(v, d_out, (1, 1))
        used = weights
        if tile.keep is not None:
            used, d_weights = weights * tile.keep, d_weights * tile.keep
        scratch["dv"][...] += dot(used.astype(d_out.dtype), d_out, (1, 0))
        d_products = product_gradient(weights * (d_weights - delta), products, plan.settings).astype(q.dtype)
        scratch["dk"][...] += dot(d_products, q, (1, 0))

    _visit(plan, step, visit)

    @pl.when(step.last)
    def finish() -> None:
        for name in outs:
            outs[name][...] = scratch[name][...].astype(outs[name].dtype)


def _visit(plan: Plan, step: Step, visit: Callable[[bool, Any, int], None]) -> None:
    """visit(masked, start, size) for all pieces of the other block, where the step has something to do."""
    pl.when(step.full)(lambda: over_parts(plan, partial(visit, False)))
    pl.when(step.partial)(lambda: over_parts(plan, partial(visit, True)))


def _tile(
    plan: Plan, scalars: Any, refs: Any, scratch: Any, step: Step, products: Array, begin: Any, masked: bool
) -> Tile:
    """The tile of the kernel's own block and of the other one from `begin` on."""
    settings, size, at = plan.settings, products.shape[1], step.at
    queries, keys = _own(plan, scratch, step), _other(plan, refs, step, begin, size)
    if plan.by_key:
        queries, keys = keys, queries
    head = at.row * (pl.num_programs(1) * plan.heads) + at.q_head
    distance = queries.at - keys.at
    slope = scalars["slopes"][head] if "slopes" in scalars else None
    seen = keep = bias = None
    if masked:
        seen = visible(settings.mask, queries.at, keys.at, queries.ids, keys.ids)
    if "seeds" in scalars:
        keep = kept(scalars["seeds"][head], queries.index, keys.index, settings.dropout_rate)
    if "bias" in refs:
        columns = pl.ds(begin, size) if refs["bias"].shape[1] > 1 else slice(None)
        bias = refs["bias"][:, columns]
    return Tile(scores_of(products, distance, slope, bias, settings), seen, keep, distance)


def _own(plan: Plan, scratch: Any, step: Step) -> Side:
    """What a kernel owns, as columns."""
    block = step.at.kv_block if plan.by_key else step.at.q_block
    index = block * plan.own + jax.lax.broadcasted_iota(jnp.int32, (plan.own, 1), 0)
    if "own_at" in scratch:
        return Side(index, scratch["own_at"][:, :1], scratch["own_ids"][:, :1])
    return _in_order(plan, index, plan.by_key)


def _other(plan: Plan, refs: Any, step: Step, begin: Any, size: int) -> Side:
    """What a kernel goes through, from `begin` of a block on, as rows."""
    start = step.at.q_block * plan.blocks.q if plan.by_key else step.at.kv_block * plan.blocks.kv
    index = start + begin + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    places = refs.get("q_places" if plan.by_key else "k_places")
    if places is None:
        return _in_order(plan, index, not plan.by_key)
    return Side(index, places[:1, pl.ds(begin, size)], places[1:, pl.ds(begin, size)])


def _in_order(plan: Plan, index: Array, keys: bool) -> Side:
    """Queries or keys of one document in order; those that padding has added are in none."""
    at = index if keys else index + plan.settings.offset
    # 1, and 0 behind the end: no bools, which Mosaic cannot compare.
    return Side(index, at, jnp.clip(plan.lengths[int(keys)] - index, 0, 1))


def _turn_places(plan: Plan, refs: Any, scratch: Any) -> None:
    """Fills the columns of positions and segment ids, if there are any."""
    if "own_at" in scratch:
        places = refs["k_places" if plan.by_key else "q_places"]
        scratch["own_at"][...] = as_column(places[:1])
        scratch["own_ids"][...] = as_column(places[1:])


def _masked(x: Array, tile: Tile, other: float) -> Array:
    return x if tile.seen is None else jnp.where(tile.seen, x, other)


# ---------------------------------------------------------------------------------------- plans


def _plan(operands: Operands, settings: Settings, kernel: str) -> tuple[Plan, Lists]:
    """The plan of a kernel, and the lists that it follows."""
    blocks = tpu_blocks(target().kind, operands, settings, kernel)
    lists = _lists(map_of(operands, settings, blocks.q, blocks.kv), kernel)
    (_, T, H, _), (S, K) = operands.q.shape, operands.k.shape[1:3]
    return Plan(kernel, blocks, settings, (T, S), H // K, lists.index.shape), lists


def _lists(blocks: BlockMap, kernel: str) -> Lists:
    return blocks.by_key if kernel == "dkv" else blocks.by_query


def _list_size(operands: Operands, settings: Settings, blocks: TpuBlocks, kernel: str) -> int:
    """Numbers in the lists of a kernel."""
    if settings.offset is None or settings.segmented:
        n, m = (-(-x.shape[1] // size) for x, size in zip((operands.q, operands.k), blocks[:2], strict=True))
        return len(operands.q) * (n * m + 2 * (m if kernel == "dkv" else n))
    return sum(x.size for x in _lists(map_of(operands, settings, blocks.q, blocks.kv), kernel))


def _own_scratch(plan: Plan) -> dict[str, Any]:
    """Columns of positions and segment ids, where these are data."""
    if plan.settings.offset is not None and not plan.settings.segmented:
        return {}
    return {name: lanes(plan.own, jnp.int32) for name in ("own_at", "own_ids")}


def _padded(operands: Operands, blocks: TpuBlocks) -> Operands:
    """The operands with heads before lengths and whole blocks; what is added is in no segment."""
    at, k_at, ids, k_ids = operands.places
    places = operands.places._replace(
        q_positions=longer(at, 1, blocks.q),
        kv_positions=longer(k_at, 1, blocks.kv),
        q_segment_ids=longer(ids, 1, blocks.q),
        kv_segment_ids=longer(k_ids, 1, blocks.kv),
    )
    bias = operands.bias
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else longer(bias, 2, blocks.q)
        bias = bias if bias.shape[3] == 1 else longer(bias, 3, blocks.kv)
    q, k, v = (
        longer(x.swapaxes(1, 2), 2, size)
        for x, size in ((operands.q, blocks.q), (operands.k, blocks.kv), (operands.v, blocks.kv))
    )
    return operands._replace(q=q, k=k, v=v, places=places, bias=bias)


def _padded_rows(rows: dict[str, Array], size: int) -> dict[str, Array]:
    return {"d_out": longer(rows["d_out"], 2, size), "sums": longer(rows["sums"], 3, size)}
