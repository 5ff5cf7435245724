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


class Plan(NamedTuple):
    """Which rows go where, of n tokens and P devices; every number is this device's own.

    Attributes:
        place: [n, P] of each token among the rows for each device; R where that does not want it.
        sent, got: [P] rows to and from each device.
    """

    place: Array
    sent: Array
    got: Array


def make_plan(wanted: Bool[Array, "n P"], axis: str, most: int) -> Plan:
    """The plan that sends each token to the devices that want it; no more than `most` (R) to any."""
    place = jnp.where(wanted, jnp.cumsum(wanted, axis=0) - 1, most).astype(jnp.int32)
    sent = jnp.sum(wanted, axis=0, dtype=jnp.int32)
    return Plan(place, sent, _turned(sent, axis))


def _turned(x: Array, axis: str) -> Array:
    """Of x [P * m, ...], the P parts exchanged: part i of device j for part j of device i."""
    return jax.lax.all_to_all(x, axis, 0, 0, tiled=True)


class _Packing(NamedTuple):
    """Where tokens lie in what is sent, of M rows: `token` [M] and `row` [n, P] as of `spread`, `start` [P]."""

    token: Array
    row: Array
    start: Array


def _pack(plan: Plan, start: Array, most: int, size: int) -> _Packing:
    row = jnp.where(plan.place < most, start + plan.place, size)
    n_tokens = row.shape[0]
    token = jnp.full_like(plan.place, n_tokens, shape=(size,))
    token = token.at[row].set(jnp.arange(n_tokens, dtype=token.dtype)[:, None], mode="drop")
    return _Packing(token, row, start)


def _in_regions(plan: Plan, most: int) -> _Packing:
    n_parts = plan.sent.shape[0]
    return _pack(plan, jnp.arange(n_parts) * most, most, n_parts * most)


def _closely(plan: Plan, most: int, copies: int) -> _Packing:
    n_tokens, n_parts = plan.place.shape
    start = jnp.cumsum(plan.sent) - plan.sent
    return _pack(plan, start, most, min(n_parts * most, n_tokens * copies))


def send_dense(x: Float[Array, "n D"], plan: Plan, axis: str, most: int) -> Float[Array, "M D"]:
    """Whole regions by all_to_all: what `send` does, on every platform."""
    packing = _in_regions(plan, most)
    return _turned(spread(x, packing.token, packing.row), axis)


def _return_dense(y: Array, plan: Plan, axis: str, most: int) -> Array:
    packing = _in_regions(plan, most)
    return collect(_turned(y, axis), packing.token, packing.row)


def _send_ragged(x: Array, plan: Plan, axis: str, most: int, copies: int) -> Array:
    packing, n_parts = _closely(plan, most, copies), plan.sent.shape[0]
    regions = jnp.zeros_like(x, shape=(n_parts * most, x.shape[1]))
    # On every receiver the rows of a sender start at the sender's region.
    there = jnp.full_like(plan.sent, jax.lax.axis_index(axis) * most)
    rows = spread(x, packing.token, packing.row)
    return jax.lax.ragged_all_to_all(rows, regions, packing.start, plan.sent, there, plan.got, axis_name=axis)


def _return_ragged(y: Array, plan: Plan, axis: str, most: int, copies: int) -> Array:
    packing = _closely(plan, most, copies)
    rows = jnp.zeros_like(y, shape=(packing.token.shape[0], y.shape[1]))
    regions = jnp.arange(plan.got.shape[0], dtype=jnp.int32) * most
    there = _turned(packing.start, axis)
    back = jax.lax.ragged_all_to_all(y, rows, regions, plan.got, there, plan.sent, axis_name=axis)
    return collect(back, packing.token, packing.row)


# Transposes of each other, stated so, since the transpose of a choice by platform would keep what each branch needs.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def send(x: Float[Array, "n D"], plan: Plan, axis: str, most: int, copies: int) -> Float[Array, "M D"]:
    """Each device's tokens to those that want them: what arrives here, M = P `most` rows in P regions.

    Args:
        axis: of the mesh; this runs under shard_map.
        most: R, rows that any device sends to another at most.
        copies: devices that want a token at most.
    """
    ragged = partial(_send_ragged, axis=axis, most=most, copies=copies)
    dense = partial(send_dense, axis=axis, most=most)
    return jax.lax.platform_dependent(x, plan, tpu=ragged, cuda=ragged, default=dense)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def send_back(y: Float[Array, "M D"], plan: Plan, axis: str, most: int, copies: int) -> Float[Array, "n D"]:
    """The transpose of `send`: rows back to where they came from, those of a token added, in float32."""
    ragged = partial(_return_ragged, axis=axis, most=most, copies=copies)
    dense = partial(_return_dense, axis=axis, most=most)
    return jax.lax.platform_dependent(y, plan, tpu=ragged, cuda=ragged, default=dense)


send.defvjp(
    lambda x, plan, *how: (send(x, plan, *how), plan),
    lambda axis, most, copies, plan, g: (send_back(g, plan, axis, most, copies), None),
)
send_back.defvjp(
    lambda y, plan, *how: (send_back(y, plan, *how), plan),
    lambda axis, most, copies, plan, g: (send(g, plan, axis, most, copies), None),
)
