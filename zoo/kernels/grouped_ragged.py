"""Grouped products by `jax.lax.ragged_dot`, which XLA compiles for TPUs to a kernel of its own.

Elsewhere XLA multiplies every row by every group's matrix: right, and slow. Of the two that JAX has for TPUs this
is chosen over megablox, whose rows must be a multiple of its tile, whose tiles have to be tuned for each shape, and
which leaves rows beyond sum(counts) as it finds them.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int

from zoo.kernels.grouped_products import Products

# g [N, F] and w [E, D, F], over F; x [N, D] and g [N, F], over the rows of each group.
_BACK = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
_OUTER = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])


def _live(x: Array, counts: Array) -> Array:
    """x with zeros beyond sum(counts): what is there may be no number, and backends differ in what they make of it."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(counts))[:, None], x, 0)


# JAX has no rule for ragged products of which only some arguments are batched.
@sequential_vmap
def _rows(x: Float[Array, "N D"], w: Float[Array, "E D F"], counts: Int[Array, "E"]) -> Float[Array, "N F"]:
    return _live(jax.lax.ragged_dot(x, w, counts), counts)


@sequential_vmap
def _back(g: Float[Array, "N F"], w: Float[Array, "E D F"], counts: Int[Array, "E"]) -> Float[Array, "N D"]:
    return _live(jax.lax.ragged_dot_general(g, w, counts, _BACK), counts)


@sequential_vmap
def _outer(x: Float[Array, "N D"], g: Float[Array, "N F"], counts: Int[Array, "E"]) -> Float[Array, "E D F"]:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    sums = jax.lax.ragged_dot_general(_live(x, counts), _live(g, counts), counts, _OUTER, preferred_element_type=wide)
    return jnp.where((counts > 0)[:, None, None], sums, 0)


RAGGED = Products(_rows, _back, _outer)
