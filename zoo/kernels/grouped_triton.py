"""Grouped products as Pallas kernels in Triton's lowering, for NVIDIA GPUs from Ampere on.

Each program makes a tile of the result. Rows are visited in blocks that start where their group starts; Triton
has no scalar prefetch, so the blocks come as an ordinary input, [3, blocks] of group, first row and end. A block that
would pass the last row is moved back, and a mask keeps the rows that are its own; so nothing is padded, save widths
that are no multiple of 16, the least that a tensor core takes.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from zoo.kernels.grouped_products import Products

LEAST = 16
# Side of a tile of the result, and bytes of the inner side that a step of its sum takes: three steps at a time, as
# `num_stages` asks for, fit the 99 KB of shared memory that the smallest GPUs have.
SIDE, DEPTH_BYTES = 128, 128


def triton_products(interpret: bool) -> Products:
    """The products; `interpret` runs the kernels as plain JAX, on any platform."""
    return Products(
        rows=partial(_rows, transposed=False, interpret=interpret),
        back=partial(_rows, transposed=True, interpret=interpret),
        outer=partial(_outer, interpret=interpret),
    )


@partial(jax.jit, static_argnames=("transposed", "interpret"))
def _rows(
    x: Float[Array, "N K"], w: Float[Array, "E A B"], counts: Int[Array, "E"], *, transposed: bool, interpret: bool
) -> Float[Array, "N M"]:
    """x[n] @ w[e], or x[n] @ w[e].T where `transposed`."""
    n_rows, n_groups, width = x.shape[0], w.shape[0], w.shape[1 if transposed else 2]
    size = block_rows(n_rows, n_groups)
    x, w = _padded(x, (size, LEAST)), _padded(w, (1, LEAST, LEAST))
    inner, outer = x.shape[1], w.shape[1 if transposed else 2]
    depth, side = math.gcd(inner, DEPTH_BYTES // x.dtype.itemsize), math.gcd(outer, SIDE)
    blocks = block_list(counts, x.shape[0], size)
    kernel = partial(_rows_kernel, size=size, depth=depth, side=side, transposed=transposed)
    y = _call(kernel, (blocks.shape[1], outer // side), _like(x, (x.shape[0], outer), x.dtype), interpret)(x, w, blocks)
    return y[:n_rows, :width]


def _rows_kernel(
    x_ref: Any, w_ref: Any, blocks_ref: Any, y_ref: Any, *, size: int, depth: int, side: int, transposed: bool
) -> None:
    n_groups, columns = w_ref.shape[0], pl.ds(pl.program_id(1) * side, side)
    group, first, end = (blocks_ref[i, pl.program_id(0)] for i in range(3))
    rows, mask = _window(first, end, size, x_ref.shape[0])

    def step(i: Array, total: Array) -> Array:
        inner = pl.ds(i * depth, depth)
        x = triton.load(x_ref.at[rows, inner], mask=mask, other=0)
        w = w_ref[group, columns, inner] if transposed else w_ref[group, inner, columns]
        return total + triton.dot(x, w, trans_b=transposed)

    # The rows beyond all groups are a block of no group: they take no step.
    n_steps = jnp.minimum(n_groups - group, 1) * (x_ref.shape[1] // depth)
    total = jax.lax.fori_loop(0, n_steps, step, jnp.zeros((size, side), jnp.float32))
    triton.store(y_ref.at[rows, columns], total.astype(y_ref.dtype), mask=mask)


@partial(jax.jit, static_argnames="interpret")
def _outer(
    x: Float[Array, "N D"], g: Float[Array, "N F"], counts: Int[Array, "E"], *, interpret: bool
) -> Float[Array, "E D F"]:
    """sum_n x[n].T @ g[n] of each group."""
    n_groups, d, f = counts.shape[0], x.shape[1], g.shape[1]
    size = min(DEPTH_BYTES // x.dtype.itemsize, block_rows(x.shape[0], n_groups))
    x, g = _padded(x, (size, LEAST)), _padded(g, (size, LEAST))
    sides = math.gcd(x.shape[1], SIDE), math.gcd(g.shape[1], SIDE)
    grid = (n_groups, x.shape[1] // sides[0], g.shape[1] // sides[1])
    ends = jnp.cumsum(counts)
    bounds = jnp.stack([ends - counts, ends])
    out = _like(x, (n_groups, x.shape[1], g.shape[1]), jnp.float32)
    sums = _call(partial(_outer_kernel, size=size, sides=sides), grid, out, interpret)(x, g, bounds)
    return sums[:, :d, :f]


def _outer_kernel(x_ref: Any, g_ref: Any, bounds_ref: Any, sums_ref: Any, *, size: int, sides: tuple[int, int]) -> None:
    group = pl.program_id(0)
    start, end = bounds_ref[0, group], bounds_ref[1, group]
    left, right = (pl.ds(pl.program_id(i + 1) * side, side) for i, side in enumerate(sides))

    def step(i: Array, total: Array) -> Array:
        rows, mask = _window(start + i * size, end, size, x_ref.shape[0])
        x = triton.load(x_ref.at[rows, left], mask=mask, other=0)
        g = triton.load(g_ref.at[rows, right], mask=mask, other=0)
        return total + triton.dot(x, g, trans_a=True)

    n_steps = (end - start + size - 1) // size
    sums_ref[group, left, right] = jax.lax.fori_loop(0, n_steps, step, jnp.zeros(sides, jnp.float32))


def _window(first: Array, end: Array, size: int, n_rows: int) -> tuple[Any, Array]:
    """`size` rows that hold those from `first` on, and a mask of them, before `end` and `size` rows on at most."""
    at = jnp.minimum(first, n_rows - size)
    rows = at + jnp.arange(size)
    return pl.ds(at, size), ((rows >= first) & (rows < end))[:, None]


def _call(kernel: Any, grid: tuple[int, ...], out: Any, interpret: bool) -> Any:
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole] * 3,
        out_specs=whole,
        out_shape=out,
        # Named, since the default differs between versions of JAX.
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name=kernel.func.__name__.strip("_"),
    )


def _like(x: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array that varies over the devices of a shard_map as x does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).mat)


def _padded(x: Array, multiples: tuple[int, ...]) -> Array:
    """x with zeros behind, at least one multiple of each; rows only where they are fewer than a block."""
    pads = [max(m, n) - n if i == 0 else -n % m for i, (n, m) in enumerate(zip(x.shape, multiples, strict=True))]
    return x if not any(pads) else jnp.pad(x, [(0, pad) for pad in pads])


def block_rows(n_rows: int, n_groups: int) -> int:
    """Rows of a block: a power of two, half of a group's mean at most, within 16 and 128."""
    half = max(1, n_rows // (2 * n_groups))
    return min(SIDE, max(LEAST, 1 << (half.bit_length() - 1)))


def block_list(counts: Int[Array, "E"], n_rows: int, size: int) -> Int[Array, "3 blocks"]:
    """Group, first row and end of the group of each block; the rows beyond all groups are a last group E.

    As many as any counts need; those left over hold no rows.
    """
    n_groups = counts.shape[0]
    counts = jnp.append(counts, n_rows - jnp.sum(counts)).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    blocks = jnp.cumsum((counts + size - 1) // size)
    number = jnp.arange(pl.cdiv(n_rows, size) + n_groups + 1, dtype=jnp.int32)
    group = jnp.searchsorted(blocks, number, side="right").astype(jnp.int32)
    own = jnp.minimum(group, n_groups)
    within = number - jnp.where(own > 0, blocks[own - 1], 0)
    first = ends[own] - counts[own] + within * size
    return jnp.stack([own, jnp.where(group > n_groups, n_rows, first), ends[own]])
