"""What the TPU kernels of attention share: how arrays lie in memory, and the call that goes along lists of blocks.

A kernel owns a block of queries or of keys, its own side, and goes through the blocks of the other side that are in
its list. Its tiles are [own, other], so what belongs to its own side is a column, to the other a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from zoo.kernels.attention.problem import Operands, Settings
from zoo.kernels.attention.tpu_blocks import LANES, TpuBlocks, vmem_limit
from zoo.kernels.block_map import Lists
from zoo.kernels.target import target


class Plan(NamedTuple):
    """What a kernel knows before its arrays.

    Attributes:
        kernel: its name, "forward", "dq" or "dkv".
        blocks: its sizes.
        settings: of the problem.
        lengths: T and S, without padding.
        readers: query heads of a key head.
        shape: of the lists, [b, n, m].
    """

    kernel: str
    blocks: TpuBlocks
    settings: Settings
    lengths: tuple[int, int]
    readers: int
    shape: tuple[int, int, int]

    @property
    def by_key(self) -> bool:
        """Whether its own side is that of the keys."""
        return self.kernel == "dkv"

    @property
    def own(self) -> int:
        """Length of a block of its own side."""
        return self.blocks.kv if self.by_key else self.blocks.q

    @property
    def other(self) -> int:
        """Length of a block of the other side."""
        return self.blocks.q if self.by_key else self.blocks.kv

    @property
    def heads(self) -> int:
        """Query heads that a block of its own side meets, one after another."""
        return self.readers if self.by_key else 1


class At(NamedTuple):
    """Where a step of the grid is: row of the batch, query head, key head, and blocks of queries and of keys."""

    row: Any
    q_head: Any
    kv_head: Any
    q_block: Any
    kv_block: Any


class Step(NamedTuple):
    """What a step of the grid has to do.

    Attributes:
        at: where it is.
        first, last: whether it is the first or the last of its own block.
        full, partial: whether every pair of its two blocks counts, or some; neither, where there is nothing to do.
    """

    at: At
    first: Any
    last: Any
    full: Any
    partial: Any


def step_of(plan: Plan, scalars: dict[str, Any]) -> Step:
    """The step that the kernel is in."""
    ids = [pl.program_id(axis) for axis in range(5)]
    b, _, i, head, n = ids
    line = _line(plan, b, i)
    full, live = scalars["full"][line], scalars["live"][line]
    first, last = (head == 0) & (n == 0), (head == plan.heads - 1) & (n == plan.shape[2] - 1)
    return Step(_at(plan, *ids, scalars["index"]), first, last, n < full, (n >= full) & (n < live))


def _line(plan: Plan, b: Any, i: Any) -> Any:
    """Where in the lists, which have one axis, block i of row b of the batch is."""
    return i if plan.shape[0] == 1 else b * plan.shape[1] + i


def _at(plan: Plan, b: Any, own_head: Any, i: Any, head: Any, n: Any, index: Any) -> At:
    other = index[_line(plan, b, i) * plan.shape[2] + n]
    if plan.by_key:
        return At(b, own_head * plan.readers + head, own_head, other, i)
    return At(b, own_head, jax.lax.div(own_head, jnp.int32(plan.readers)), i, other)


def call(
    kernel: Callable[..., None],
    plan: Plan,
    operands: Operands,
    lists: Lists,
    rows: dict[str, Array],
    outs: dict[str, jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
) -> dict[str, Array]:
    """Runs kernel(plan, scalars, refs, outs, scratch) at every step of the lists, for all heads and rows of the batch.

    Args:
        operands: padded to whole blocks, heads before lengths.
        rows: more arrays of a kernel's refs.
        outs: its results; blocks of their own side.
    """
    places = operands.places
    scalars = {"index": lists.index, "full": lists.full, "live": lists.live}
    scalars["slopes"] = None if operands.slopes is None else operands.slopes.astype(jnp.float32)
    scalars["seeds"] = None if operands.seeds is None else jax.lax.bitcast_convert_type(operands.seeds, jnp.int32)
    scalars = {name: jnp.asarray(x).reshape(-1) for name, x in scalars.items() if x is not None}
    arrays = {"q": operands.q, "k": operands.k, "v": operands.v, "bias": operands.bias} | rows
    if plan.settings.offset is None or plan.settings.segmented:
        arrays["q_places"] = jnp.stack([places.q_positions, places.q_segment_ids], 1)
        arrays["k_places"] = jnp.stack([places.kv_positions, places.kv_segment_ids], 1)
    arrays = {name: x for name, x in arrays.items() if x is not None}
    (B, H), K = operands.q.shape[:2], operands.k.shape[1]
    grid = (B, K if plan.by_key else H, plan.shape[1], plan.heads, plan.shape[2])

    def run(scalars: Any, *rest: Any) -> None:
        kernel(plan, scalars, *rest)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=grid,
        in_specs=({name: _spec(plan, name, x) for name, x in arrays.items()},),
        out_specs={name: _spec(plan, name, x) for name, x in outs.items()},
        scratch_shapes=[scratch],
    )
    params = pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=vmem_limit(operands, plan.blocks, plan.kernel),
    )
    name = f"attention_{plan.kernel}"
    found = pl.pallas_call(
        run, out_shape=outs, grid_spec=spec, compiler_params=params, interpret=target().interpret, name=name
    )
    with jax.enable_x64(False):  # Mosaic has no numbers of 64 bits, not even as indices
        return found(scalars, arrays)


def _spec(plan: Plan, name: str, x: Any) -> pl.BlockSpec:
    """The block of an array that a step sees."""
    q, kv = plan.blocks.q, plan.blocks.kv
    width = x.shape[-1]

    def spec(block: tuple[int | None, ...], where: Callable[[At], tuple[Any, ...]]) -> pl.BlockSpec:
        return pl.BlockSpec(block, lambda *ids: where(_at(plan, *ids[:5], ids[5]["index"])))

    if name in ("q", "d_out", "out", "dq"):
        return spec((None, None, q, width), lambda at: (at.row, at.q_head, at.q_block, 0))
    if name in ("k", "v", "dk", "dv"):
        return spec((None, None, kv, width), lambda at: (at.row, at.kv_head, at.kv_block, 0))
    if name == "q_places":
        return spec((None, 2, q), lambda at: (at.row, 0, at.q_block))
    if name == "k_places":
        return spec((None, 2, kv), lambda at: (at.row, 0, at.kv_block))
    if name == "bias":
        rows, columns = (1 if n == 1 else size for n, size in zip(x.shape[2:], (q, kv), strict=True))
        own = lambda axis, i: 0 if x.shape[axis] == 1 else i  # noqa: E731
        return spec(
            (None, None, rows, columns),
            lambda at: (own(0, at.row), own(1, at.q_head), own(2, at.q_block), own(3, at.kv_block)),
        )
    return spec((None, None, x.shape[2], q), lambda at: (at.row, at.q_head, 0, at.q_block))


def over_parts(plan: Plan, step: Callable[[Any, int], None]) -> None:
    """step(start, size) for the pieces of a block of the other side, in a loop that the compiler does not unroll."""
    part = min(plan.blocks.part, plan.other)
    whole, rest = divmod(plan.other, part)
    if whole == 1:
        step(0, part)
    else:
        pl.loop(0, whole)(lambda n: step(pl.multiple_of(n * part, part), part))
    if rest:
        step(whole * part, rest)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "m n"]:
    """A product over axis contract[0] of a and contract[1] of b, in float32; of float32 inputs it is exact float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def as_column(row: Array) -> Array:
    """A row [1, n] as a column in every lane, [n, 128]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def as_row(column: Array) -> Array:
    """A column [n, 1] as a row [1, n]."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def lanes(n: int, dtype: Any = jnp.float32) -> Any:
    """Scratch for a column, which all lanes hold."""
    return pltpu.VMEM((n, LANES), dtype)


def longer(x: Array, axis: int, size: int) -> Array:
    """x with zeros behind its end along an axis, up to a multiple of size."""
    rest = -x.shape[axis] % size
    return jnp.pad(x, [(0, rest if a == axis % x.ndim else 0) for a in range(x.ndim)]) if rest else x
