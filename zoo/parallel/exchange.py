"""Exchange of tokens between the devices along one axis of a mesh, for the experts that lie there.

Each device has n tokens, and each of the P devices along the axis may want any of them; a token goes once to a device
however many of its experts are there. What arrives lies in P regions of R rows, one for each sender, R being what
any sends at most, so that nothing is ever dropped; behind the rows that came, a region is 0.

Two ways: `jax.lax.ragged_all_to_all`, which moves the rows that are sent and no others, on TPUs and GPUs; and on
CPUs, which have no such collective, an all_to_all of whole regions. Either holds P R D numbers of what arrives, and
the latter as many of what is sent: at worst, with R = n, the memory and traffic of gathering all tokens of the axis.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.kernels.grouped_matmul import collect, spread


class Way(NamedTuple):
    """How an exchange is made.

    Attributes:
        axis: of the mesh; everything here runs under shard_map.
        most: R, tokens that any device sends to another at most.
        copies: devices that want a token at most.
        ragged: by ragged_all_to_all.
    """

    axis: str
    most: int
    copies: int
    ragged: bool


class Plan(NamedTuple):
    """Which rows go where, of n tokens and P devices; every number is this device's own.

    Attributes:
        place: [n, P] of each token among the rows for each device; R where that does not want it.
        sent, got: [P] rows to and from each device.
    """

    place: Array
    sent: Array
    got: Array


def make_plan(wanted: Bool[Array, "n P"], way: Way) -> Plan:
    """The plan that sends each token to the devices that want it."""
    place = jnp.where(wanted, jnp.cumsum(wanted, axis=0) - 1, way.most).astype(jnp.int32)
    sent = jnp.sum(wanted, axis=0, dtype=jnp.int32)
    return Plan(place, sent, _turned(sent, way))


def _turned(x: Array, way: Way) -> Array:
    """Of x [P * m, ...], the P parts exchanged: part i of device j for part j of device i."""
    return jax.lax.all_to_all(x, way.axis, 0, 0, tiled=True)


class _Packing(NamedTuple):
    """Where tokens lie in what is sent, of M rows: `token` [M] and `row` [n, P] as of `spread`, `start` [P]."""

    token: Array
    row: Array
    start: Array


def _pack(plan: Plan, way: Way) -> _Packing:
    """In regions as they arrive, or, where the exchange is ragged, one behind the other."""
    n_tokens, n_parts = plan.place.shape
    start, size = jnp.arange(n_parts, dtype=jnp.int32) * way.most, n_parts * way.most
    if way.ragged:
        start, size = jnp.cumsum(plan.sent) - plan.sent, min(size, n_tokens * way.copies)
    row = jnp.where(plan.place < way.most, start + plan.place, size)
    token = jnp.full_like(row, n_tokens, shape=(size,))
    token = token.at[row].set(jnp.arange(n_tokens, dtype=row.dtype)[:, None], mode="drop")
    return _Packing(token, row, start)


# The two are transposes of each other, and stated so: what a token's rows give back is added in float32.
@partial(jax.custom_vjp, nondiff_argnums=(2,))
def send(x: Float[Array, "n D"], plan: Plan, way: Way) -> Float[Array, "M D"]:
    """Each device's tokens to those that want them: what arrives here, M = P R rows in P regions."""
    packing, n_parts = _pack(plan, way), plan.sent.shape[0]
    rows = spread(x, packing.token, packing.row)
    if not way.ragged:
        return _turned(rows, way)
    regions = jnp.zeros_like(x, shape=(n_parts * way.most, x.shape[1]))
    # On every receiver the rows of a sender start at the sender's region.
    there = jnp.full_like(plan.sent, jax.lax.axis_index(way.axis) * way.most)
    return jax.lax.ragged_all_to_all(rows, regions, packing.start, plan.sent, there, plan.got, axis_name=way.axis)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def send_back(y: Float[Array, "M D"], plan: Plan, way: Way) -> Float[Array, "n D"]:
    """The transpose of `send`: rows back to where they came from, those of a token added, in float32."""
    packing = _pack(plan, way)
    if not way.ragged:
        return collect(_turned(y, way), packing.token, packing.row)
    rows = jnp.zeros_like(y, shape=(packing.token.shape[0], y.shape[1]))
    regions = jnp.arange(plan.got.shape[0], dtype=jnp.int32) * way.most
    there = _turned(packing.start, way)
    back = jax.lax.ragged_all_to_all(y, rows, regions, plan.got, there, plan.sent, axis_name=way.axis)
    return collect(back, packing.token, packing.row)


send.defvjp(
    lambda x, plan, way: (send(x, plan, way), plan),
    lambda way, plan, g: (send_back(g, plan, way), None),
)
send_back.defvjp(
    lambda y, plan, way: (send_back(y, plan, way), plan),
    lambda way, plan, g: (send(g, plan, way), None),
)
