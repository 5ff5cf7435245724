"""Attention whose keys are spread over a mesh axis: they go round the devices, and every query meets all of them.

Source: Ring Attention, arXiv 2310.01889; the parts are put together by their log sums, as FlashAttention's blocks are
(arXiv 2307.08691).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zoo.kernels.attention.dispatch import BACKENDS
from zoo.kernels.attention.problem import Gradients, Operands, Settings
from zoo.kernels.attention.vjp import Runner

HERE = Runner()


def ring_forward(operands: Operands, settings: Settings, axis: str) -> tuple[Array, Array]:
    """Output and log sums of this device's queries, in a shard_map over `axis`; every device has its part of the keys.

    Raises:
        ValueError: dropout or a bias is asked for, of which a device sees only its own part.
    """
    settings = _moving(operands, settings)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        out, lse, keys = carry
        part, part_lse = HERE.forward(_with_keys(operands, keys), settings)
        total = jnp.logaddexp(lse, part_lse)
        seen = total > -jnp.inf
        share = lambda x: jnp.where(seen, jnp.exp(x - jnp.where(seen, total, 0)), 0).mT[..., None]  # noqa: E731
        return (out * share(lse) + part * share(part_lse), total, _next(keys, axis)), None

    dtype = jnp.promote_types(operands.v.dtype, jnp.float32)
    B, T, H = operands.q.shape[:3]
    start = (jnp.zeros((B, T, H, operands.v.shape[3]), dtype), jnp.full((B, H, T), -jnp.inf, dtype))
    (out, lse, _), _ = jax.lax.scan(step, (*start, _keys(operands)), length=jax.lax.axis_size(axis))
    return out.astype(operands.v.dtype), lse


def ring_backward(operands: Operands, settings: Settings, axis: str, *results: Array) -> Gradients:
    """The gradients; those of keys and values go round with them until they are home again."""
    settings = _moving(operands, settings)
    wide = lambda x: None if x is None else jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731

    def step(carry: Any, _: None) -> tuple[Any, None]:
        own, (keys, dk, dv) = carry
        found = HERE.backward(_with_keys(operands, keys), settings, *results)
        own = jax.tree.map(jnp.add, own, (found.q, found.slopes))
        return (own, _next((keys, dk + found.k, dv + found.v), axis)), None

    own = (wide(operands.q), wide(operands.slopes))
    start = (own, (_keys(operands), wide(operands.k), wide(operands.v)))
    ((dq, d_slopes), (_, dk, dv)), _ = jax.lax.scan(step, start, length=jax.lax.axis_size(axis))
    return Gradients(
        dq.astype(operands.q.dtype),
        dk.astype(operands.k.dtype),
        dv.astype(operands.v.dtype),
        # Every device has those of its own queries.
        None if d_slopes is None else jax.lax.psum(d_slopes, axis).astype(operands.slopes.dtype),
    )


def _keys(operands: Operands) -> tuple[Array, ...]:
    """What belongs to the keys, and goes round."""
    places = operands.places
    return operands.k, operands.v, places.kv_positions, places.kv_segment_ids


def _with_keys(operands: Operands, keys: tuple[Array, ...]) -> Operands:
    k, v, positions, segment_ids = keys
    places = operands.places._replace(kv_positions=positions, kv_segment_ids=segment_ids)
    return operands._replace(k=k, v=v, places=places)


def _next(keys: Any, axis: str) -> Any:
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(keys, axis, [(i, (i + 1) % n) for i in range(n)])


def _moving(operands: Operands, settings: Settings) -> Settings:
    """The settings of a part: its positions are data, and its gradient is that of a part of a row."""
    if operands.seeds is not None or operands.bias is not None:
        raise ValueError("attention: dropout and bias cannot be spread over mesh.context; set mesh.context=1")
    partial = BACKENDS[settings.backward].partial
    return replace(settings, offset=None, backward=settings.backward if partial else "chunked")
