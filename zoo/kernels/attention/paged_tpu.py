"""Decoding from pages on TPUs: a kernel that fetches a row's live pages, several at a step.

All query heads are multiplied by all keys of a page, and those of other key heads than their own are masked: decoding
waits for memory, not for products, and pages need no other order than they have.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from zoo.kernels.attention.mosaic import dot, lanes
from zoo.kernels.attention.pallas_tpu import missing
from zoo.kernels.attention.problem import LOWEST, PagedOperands, Settings, scores_of
from zoo.kernels.attention.tpu_blocks import LANES, TpuPages, lists_too_long, pages_at_once
from zoo.kernels.target import Target, target


class Plan(NamedTuple):
    """What the kernel knows before its arrays.

    Attributes:
        settings: of the problem; its mask is a Causal.
        page: slots of a page.
        heads: H and K.
        pages: of a row.
        at_once: pages of a step.
    """

    settings: Settings
    page: int
    heads: tuple[int, int]
    pages: int
    at_once: int


def refuses(operands: PagedOperands, settings: Settings, device: Target) -> str | None:
    """Why this problem cannot run here, or None."""
    reason = missing((operands.q.dtype, operands.k_pages.dtype, operands.v_pages.dtype), device)
    if reason:
        return reason
    h, d = operands.q.shape[-1], operands.v_pages.shape[-1]
    if (h % LANES or d % LANES) and not device.interpret:
        return (
            f"widths {h} and {d} are not multiples of {LANES}, so every step would copy the whole cache to another"
            " layout; make them so, with zeros"
        )
    n = operands.page_table.size + operands.lengths.size
    return lists_too_long(n) or _pages(operands, device).too_large


def _pages(operands: PagedOperands, device: Target) -> TpuPages:
    return pages_at_once(device.kind, operands)


def decode(operands: PagedOperands, settings: Settings) -> tuple[Float[Array, "B H d"], Float[Array, "B H"]]:
    """As `paged.gathered`."""
    (B, H, h), (P, page, K, d) = operands.q.shape, operands.v_pages.shape
    pages = _pages(operands, target())
    plan = Plan(settings, page, (H, K), operands.page_table.shape[1], pages.at_once)
    # A line for each key head of each slot.
    k, v = operands.k_pages.reshape(P, page * K, h), operands.v_pages.reshape(P, page * K, d)
    whole = lambda b, step, table, lengths: (b, 0, 0)  # noqa: E731
    specs = {"q": pl.BlockSpec((None, H, h), whole)}
    arrays = {"q": operands.q}
    for i in range(plan.at_once):
        specs |= {f"{name}{i}": _page_spec(plan, i, x.shape[1:]) for name, x in (("k", k), ("v", v))}
        arrays |= {f"k{i}": k, f"v{i}": v}
    if operands.slopes is not None:
        specs["slopes"] = pl.BlockSpec((H, LANES), lambda b, step, table, lengths: (0, 0))
        arrays["slopes"] = jnp.broadcast_to(operands.slopes[:, None], (H, LANES))
    run = pl.pallas_call(
        partial(_kernel, plan),
        out_shape=[
            jax.ShapeDtypeStruct((B, H, d), operands.v_pages.dtype),
            jax.ShapeDtypeStruct((B, H, LANES), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, -(-plan.pages // plan.at_once)),
            in_specs=(specs,),
            out_specs=[pl.BlockSpec((None, H, d), whole), pl.BlockSpec((None, H, LANES), whole)],
            scratch_shapes=[lanes(H), lanes(H), pltpu.VMEM((H, d), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=pages.vmem_limit
        ),
        interpret=target().interpret,
        name="paged_decode",
    )
    with jax.enable_x64(False):  # Mosaic has no numbers of 64 bits, not even as indices
        out, lse = run(operands.page_table.reshape(-1), operands.lengths, arrays)
    return out, lse[..., 0]


def _page_spec(plan: Plan, i: int, shape: tuple[int, int]) -> pl.BlockSpec:
    """The i-th page of a step; where that is not a live one, the nearest that is, so that nothing new is fetched."""

    def where(b: Any, step: Any, table: Any, lengths: Any) -> tuple[Any, int, int]:
        first, last = _live(plan, lengths[b])
        return table[b * plan.pages + jnp.clip(step * plan.at_once + i, first, last)], 0, 0

    return pl.BlockSpec((None, *shape), where)


def _live(plan: Plan, length: Any) -> tuple[Any, Any]:
    """The first and the last page that a row of so many tokens looks into."""
    window, last = plan.settings.mask.window, jnp.maximum(length - 1, 0)
    first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    return jax.lax.div(first, jnp.int32(plan.page)), jax.lax.div(last, jnp.int32(plan.page))


def _kernel(
    plan: Plan, table: Any, lengths: Any, refs: Any, out: Any, lse: Any, top_ref: Any, total_ref: Any, acc: Any
) -> None:
    """All heads of one row of the batch, and some of its pages."""
    step, length = pl.program_id(1), lengths[pl.program_id(0)]
    first, last = _live(plan, length)

    @pl.when(step == 0)
    def start() -> None:
        top_ref[...] = jnp.full_like(top_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc[...] = jnp.zeros_like(acc)

    begin = step * plan.at_once

    @pl.when((begin <= last) & (begin + plan.at_once > first) & (length > 0))
    def visit() -> None:
        tiles = [_tile(plan, refs, i, begin + i, length) for i in range(plan.at_once)]
        top, total = top_ref[:, :1], total_ref[:, :1]
        new = top
        for scores, seen, _ in tiles:
            new = jnp.maximum(new, jnp.where(seen, scores, LOWEST).max(1, keepdims=True))
        fade = jnp.exp(top - new)
        total, added = total * fade, acc[...] * fade
        for scores, seen, v in tiles:
            weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
            total = total + weights.sum(1, keepdims=True)
            added = added + dot(weights.astype(v.dtype), v, (1, 0))
        acc[...] = added
        top_ref[...] = jnp.broadcast_to(new, top_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)

    @pl.when(step == pl.num_programs(1) - 1)
    def finish() -> None:
        total = total_ref[...]
        safe = jnp.where(total > 0, total, 1.0)
        out[...] = (acc[...] / safe[:, :1]).astype(out.dtype)
        lse[...] = jnp.where(total > 0, top_ref[...] + jnp.log(safe), -jnp.inf)


def _tile(plan: Plan, refs: Any, i: int, page: Any, length: Any) -> tuple[Array, Array, Array]:
    """Scores [H, lines] of a page, which of them count, and its values with 0 where nothing was written."""
    (H, K), lines = plan.heads, refs[f"k{i}"].shape[0]
    line = jax.lax.broadcasted_iota(jnp.int32, (1, lines), 1)
    slot = page * plan.page + jax.lax.div(line, jnp.int32(K))
    head = jax.lax.broadcasted_iota(jnp.int32, (H, 1), 0)
    own = jax.lax.rem(line, jnp.int32(K)) == jax.lax.div(head, jnp.int32(H // K))
    seen = own & (slot < length) & plan.settings.mask.allows(length - 1, slot)
    products = dot(refs["q"][...], refs[f"k{i}"][...], (1, 1))
    slopes = refs["slopes"][:, :1] if "slopes" in refs else None
    v = refs[f"v{i}"][...]
    # Lines that have been written; a page before the first live one is not that page.
    real = jnp.where(page < _live(plan, length)[0], 0, (length - page * plan.page) * K)
    written = jax.lax.broadcasted_iota(jnp.int32, (lines, 1), 0) < real
    return scores_of(products, length - 1 - slot, slopes, None, plan.settings), seen, jnp.where(written, v, 0)
