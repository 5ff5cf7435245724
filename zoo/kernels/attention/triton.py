"""What the Triton kernels of attention share: columns in powers of two, loads, products, and where Triton is.

JAX reaches Triton through Pallas, deprecated since JAX 0.11; where a later JAX has dropped it, these backends step
aside. Its successor there is Pallas' Mosaic GPU, whose kernels are written otherwise.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from zoo.kernels.attention.problem import Settings, scores_of
from zoo.kernels.target import Target, target

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # a JAX without it
    plgpu = None

LOG2E = math.log2(math.e)
# The fewest rows or columns of a product on tensor cores.
LEAST = 16
DTYPES = ("float32", "bfloat16", "float16")


class Columns(NamedTuple):
    """Some columns of a matrix: a power of two from `start` on, of which `real` exist."""

    start: int
    size: int
    real: int


def columns_of(width: int) -> tuple[Columns, ...]:
    """A width as one power of two, or as two where that takes less: 192 is 128 + 64, and 80 is 64 + 16."""
    whole = max(LEAST, pl.next_power_of_2(width))
    rest = width - whole // 2
    tail = max(LEAST, pl.next_power_of_2(rest)) if rest > 0 else whole
    if whole == width or whole // 2 + tail >= whole:
        return (Columns(0, whole, width),)
    return Columns(0, whole // 2, whole // 2), Columns(whole // 2, tail, rest)


def padded_width(width: int) -> int:
    """Columns that a kernel sees of a matrix of this width."""
    return sum(columns.size for columns in columns_of(width))


def load(ref: Any, row: Any, n: int, head: Any, width: int) -> list[Array]:
    """Rows `row` to `row` + n of a head, [n, width], of a ref [rows, heads, padded width]; 0 behind the width."""
    found = []
    for start, size, real in columns_of(width):
        part = ref.at[pl.ds(row, n), jnp.int32(head), pl.ds(start, size)]
        inside = None if real == size else (jnp.arange(size) < real)[None, :]
        found.append(plgpu.load(part, mask=inside, other=None if inside is None else 0.0))
    return found


def store(ref: Any, row: Any, parts: list[Array], width: int) -> None:
    """The reverse of `load`, for head 0."""
    for (start, size, real), part in zip(columns_of(width), parts, strict=True):
        inside = None if real == size else jnp.broadcast_to((jnp.arange(size) < real)[None, :], part.shape)
        plgpu.store(
            ref.at[pl.ds(row, len(part)), jnp.int32(0), pl.ds(start, size)], part.astype(ref.dtype), mask=inside
        )


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "m n"]:
    """A product over axis contract[0] of a and contract[1] of b, in float32."""
    precision = None
    if a.dtype == jnp.float32:
        # Three passes of tensor cores have float32's precision; without them a block takes minutes to compile.
        exact, passes = jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        precision = exact if target().interpret else passes
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def sum_of_dots(a: list[Array], b: list[Array], contract: tuple[int, int]) -> Float[Array, "m n"]:
    """The product of two matrices whose common axis comes in parts."""
    total = dot(a[0], b[0], contract)
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + dot(x, y, contract)
    return total


def unit_of(dtype: Any) -> float:
    """What kernels multiply scores by: log2(e), folded into their scale, for exp2 to come; 1 in float32.

    A score of 100 loses float32's last digits by it, which two bytes do not have.
    """
    return 1.0 if dtype == jnp.float32 else LOG2E


def scaled_scores(products: Array, distance: Any, slope: Any, bias: Any, settings: Settings, unit: float) -> Array:
    """The scores times a unit; one product where they need nothing but their scale."""
    if settings.softcap is None and slope is None and bias is None:
        return products * (settings.scale * unit)
    return scores_of(products, distance, slope, bias, settings) * unit


def power(x: Array, unit: float) -> Array:
    """e to x / unit."""
    return jnp.exp2(x if unit == LOG2E else x * (LOG2E / unit))


def missing(dtypes: tuple[Any, ...], device: Target) -> str | None:
    """Why a kernel for Triton cannot run on a device with arrays of these dtypes, or None."""
    names = {jnp.dtype(dtype).name for dtype in dtypes}
    if plgpu is None:
        return "this JAX has no Triton"
    if not device.has_triton:
        hint = "; zoo.kernels.target.interpreting runs it on a CPU, slowly" if device.platform == "cpu" else ""
        return f"Triton needs an NVIDIA GPU of compute capability 8.0, and the program is for {device.kind!r}{hint}"
    if len(names) > 1 or not names <= set(DTYPES):
        return f"q, k and v have dtypes {', '.join(sorted(names))}; it takes one of {', '.join(DTYPES)} for all"
    return None
