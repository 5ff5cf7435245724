"""Decoding from pages on NVIDIA GPUs: the keys of a row are split over programs, and their results joined.

Source: the split over keys is Flash-Decoding's (T. Dao et al., 2023, "Flash-Decoding for long-context inference").
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from zoo.kernels.attention import triton
from zoo.kernels.attention.problem import LOWEST, PagedOperands, Settings
from zoo.kernels.attention.tables import GpuBlocks, GpuSizes, gpu_blocks, too_large
from zoo.kernels.attention.triton import columns_of, dot, padded_width
from zoo.kernels.target import Target, target

# Programs that keep an H200's 132 multiprocessors busy; unmeasured.
_PROGRAMS = 264


class Plan(NamedTuple):
    """What the kernel knows before its arrays.

    Attributes:
        blocks: its sizes; `q` are query heads of one key head.
        settings: of the problem.
        widths: h and d, of keys and of values.
        page: slots of a page.
        split: blocks of keys of a program.
    """

    blocks: GpuBlocks
    settings: Settings
    widths: tuple[int, int]
    page: int
    split: int


def refuses(operands: PagedOperands, settings: Settings, device: Target) -> str | None:
    """Why this problem cannot run here, or None."""
    dtypes = (operands.q.dtype, operands.k_pages.dtype, operands.v_pages.dtype)
    reason = triton.missing(dtypes, device)
    if reason:
        return reason
    sizes = _sizes(operands)
    return too_large(device.kind, sizes, "decode", gpu_blocks(device.kind, sizes, "decode"))


def decode(operands: PagedOperands, settings: Settings) -> tuple[Float[Array, "B H d"], Float[Array, "B H"]]:
    """As `paged.gathered`."""
    (B, H, h), (P, page, K, d) = operands.q.shape, operands.v_pages.shape
    blocks = gpu_blocks(target().kind, _sizes(operands), "decode")
    n_rows = -(-H // K // blocks.q)  # blocks of query heads of a key head
    n_blocks = -(-operands.page_table.shape[1] * page // blocks.kv)
    splits = min(n_blocks, -(-_PROGRAMS // (B * K * n_rows)))
    plan = Plan(blocks, settings, (h, d), page, -(-n_blocks // splits))
    rows = n_rows * blocks.q
    arrays = {
        "q": _grouped(operands.q, K, rows),
        "k": operands.k_pages.reshape(P * page, K, h),
        "v": operands.v_pages.reshape(P * page, K, d),
        "table": operands.page_table,
        "lengths": operands.lengths,
    }
    if operands.slopes is not None:
        arrays["slopes"] = _grouped(operands.slopes[None, :, None], K, rows)[0, ..., 0]
    out, lse = _call(plan, arrays, splits)
    out, lse = _joined(out, lse)
    return out[:, :, : H // K].reshape(B, H, d).astype(operands.v_pages.dtype), lse[:, :, : H // K].reshape(B, H)


def _kernel(plan: Plan, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    """Some query heads of one key head, and one split of its keys."""
    (h, d), (n, size) = plan.widths, plan.blocks[:2]
    at = refs["lengths"][pl.program_id(2)] - 1
    q = triton.load(refs["q"], 0, n, 0, h)
    unit = triton.unit_of(refs["k"].dtype)
    slopes = refs["slopes"][...][:, None] if "slopes" in refs else None

    def step(block: Any, carry: Any) -> Any:
        top, total, acc = carry
        slots = block * size + jnp.arange(size)
        real = slots <= at
        page = triton.plgpu.load(refs["table"].at[jax.lax.div(slots, plan.page)], mask=real, other=0)
        lines = page * plan.page + jax.lax.rem(slots, plan.page)
        k, v = (_gather(refs[x], lines, real, w) for x, w in (("k", h), ("v", d)))
        distance = (at - slots)[None, :]
        scores = triton.scaled_scores(triton.sum_of_dots(q, k, (1, 1)), distance, slopes, None, plan.settings, unit)
        seen = (real & plan.settings.mask.allows(at, slots))[None, :]
        new = jnp.maximum(top, jnp.where(seen, scores, LOWEST).max(1))
        weights = jnp.where(seen, triton.power(scores - new[:, None], unit), 0.0)
        fade = triton.power(top - new, unit)
        total = total * fade + weights.sum(1)
        weights = weights.astype(v[0].dtype)
        return new, total, [a * fade[:, None] + dot(weights, part, (1, 0)) for a, part in zip(acc, v, strict=True)]

    acc = [jnp.zeros((n, columns.size), jnp.float32) for columns in columns_of(d)]
    start = (jnp.full(n, LOWEST, jnp.float32), jnp.zeros(n, jnp.float32), acc)
    top, total, acc = jax.lax.fori_loop(*_span(plan, at), step, start)
    safe = jnp.where(total > 0, total, 1.0)
    triton.store(outs["out"], 0, [a / safe[:, None] for a in acc], d)
    outs["lse"][...] = jnp.where(total > 0, top / unit + jnp.log(safe), -jnp.inf)


def _span(plan: Plan, at: Any) -> tuple[Any, Any]:
    """The first block of this program's keys, and the one behind the last, of those that position `at` sees."""
    size, first = plan.blocks.kv, pl.program_id(0) * plan.split
    last = jnp.minimum(first + plan.split, jax.lax.div(at + size, size))
    window = plan.settings.mask.window
    if window is not None:
        first = jnp.maximum(first, jax.lax.div(jnp.maximum(at - window + 1, 0), size))
    return first, last


def _gather(ref: Any, lines: Array, real: Array, width: int) -> list[Array]:
    """Rows of a ref [rows, padded width] wherever they lie; 0 for those that are not real and behind the width."""
    found = []
    for start, size, existing in columns_of(width):
        columns = jnp.arange(size)
        inside = real[:, None] & (columns < existing)[None, :]
        part = ref.at[lines[:, None], start + columns[None, :]]
        found.append(triton.plgpu.load(part, mask=inside, other=0.0))
    return found


def _call(plan: Plan, arrays: dict[str, Array], splits: int) -> tuple[Array, Array]:
    """Each split's output [splits, B, K, rows, d] and log sums [splits, B, K, rows]."""
    (B, K, rows, _), (h, d), n = arrays["q"].shape, plan.widths, plan.blocks.q
    per = rows // n  # programs of a key head
    slots = arrays["k"].shape[0]
    width = arrays["table"].shape[1]
    specs = {
        "q": pl.BlockSpec((None, None, n, 1, padded_width(h)), lambda s, r, b: (b, r // per, r % per, 0, 0)),
        "k": pl.BlockSpec((slots, None, padded_width(h)), lambda s, r, b: (0, r // per, 0)),
        "v": pl.BlockSpec((slots, None, padded_width(d)), lambda s, r, b: (0, r // per, 0)),
        "table": pl.BlockSpec((None, width), lambda s, r, b: (b, 0)),
        "lengths": pl.BlockSpec((B,), lambda s, r, b: (0,)),
        "slopes": pl.BlockSpec((None, n), lambda s, r, b: (r // per, r % per)),
    }
    outs = {
        "out": pl.BlockSpec((None, None, None, n, 1, padded_width(d)), lambda s, r, b: (s, b, r // per, r % per, 0, 0)),
        "lse": pl.BlockSpec((None, None, None, n), lambda s, r, b: (s, b, r // per, r % per)),
    }
    arrays["q"] = arrays["q"][..., None, :]
    call = pl.pallas_call(
        partial(_kernel, plan),
        out_shape={
            "out": jax.ShapeDtypeStruct((splits, B, K, rows, 1, d), jnp.float32),
            "lse": jax.ShapeDtypeStruct((splits, B, K, rows), jnp.float32),
        },
        grid=(splits, K * per, B),
        in_specs=({name: specs[name] for name in arrays},),
        out_specs=outs,
        compiler_params=triton.plgpu.CompilerParams(num_warps=plan.blocks.warps, num_stages=plan.blocks.stages),
        interpret=target().interpret,
        name="paged_decode",
    )
    found = call(arrays)
    return found["out"][..., 0, :], found["lse"]


def _joined(out: Float[Array, "n B K R d"], lse: Float[Array, "n B K R"]) -> tuple[Array, Array]:
    """The output and the log sums of all splits together."""
    top = lse.max(0)
    safe = jnp.where(top > -jnp.inf, top, 0)
    shares = jnp.exp(lse - safe)
    total = shares.sum(0)
    out = (out * shares[..., None]).sum(0) / jnp.where(total > 0, total, 1)[..., None]
    return out, jnp.where(total > 0, safe + jnp.log(total), -jnp.inf)


def _grouped(x: Float[Array, "B H w"], K: int, rows: int) -> Float[Array, "B K R w"]:
    """Query heads by the key head that they read, with zeros behind the last."""
    B, H, width = x.shape
    return jnp.pad(x.reshape(B, K, H // K, width), ((0, 0), (0, 0), (0, rows - H // K), (0, 0)))


def _sizes(operands: PagedOperands) -> GpuSizes:
    (_, H, h), (_, page, K, d) = operands.q.shape, operands.v_pages.shape
    return GpuSizes(H // K, operands.page_table.shape[1] * page, h, d, operands.q.dtype.itemsize)
