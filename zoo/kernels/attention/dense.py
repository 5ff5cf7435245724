"""Attention in its plain form, with every score in memory: the specification of all other backends."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.kernels.attention.problem import Gradients, Operands, Settings, kept, scores_of, visible


def forward(operands: Operands, settings: Settings) -> tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """The output, and the log of each row's sum of exponentials: -inf for a row that sees nothing, whose output is 0.

    Scores and softmax are float32 (float64 for float64 inputs); the output has v's dtype.
    """
    weights, lse = weights_of(operands, settings)
    if settings.dropout_rate > 0:
        T, S = weights.shape[-2:]
        rows, columns = jnp.arange(T)[:, None], jnp.arange(S)[None, :]
        weights *= kept(operands.seeds[:, :, None, None], rows, columns, settings.dropout_rate)
    return _weighted(weights, operands.v), lse


def backward(
    operands: Operands,
    settings: Settings,
    out: Float[Array, "B T H d"],
    lse: Float[Array, "B H T"],
    d_out: Float[Array, "B T H d"],
    d_lse: Float[Array, "B H T"],
) -> Gradients:
    """The gradients, from those of both outputs."""
    del out, lse

    def run(parts: Gradients) -> tuple[Array, Array]:
        return forward(operands._replace(**parts._asdict()), settings)

    given = Gradients(operands.q, operands.k, operands.v, operands.slopes, operands.bias)
    return jax.vjp(run, given)[1]((d_out, d_lse))[0]


def weights_of(operands: Operands, settings: Settings) -> tuple[Float[Array, "B H T S"], Float[Array, "B H T"]]:
    """The weight of every key, before dropout, and the log of each row's sum."""
    return _softmax(scores(operands, settings), pairs(operands, settings))


def scores(operands: Operands, settings: Settings) -> Float[Array, "B H T S"]:
    """What the softmax is taken of, before the mask."""
    q, k, places = operands.q, operands.k, operands.places
    (B, T, H, h), (S, K) = q.shape, k.shape[1:3]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # One batched product per key head, with the G query heads of a group as more rows of it.
    rows = q.reshape(B, T, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, h)
    products = jnp.einsum("BKRh,BSKh->BKRS", rows, k, preferred_element_type=dtype).reshape(B, H, T, S)
    distance = places.q_positions[:, None, :, None] - places.kv_positions[:, None, None, :]
    slopes = None if operands.slopes is None else operands.slopes.astype(dtype)[:, :, None, None]
    return scores_of(products, distance, slopes, operands.bias, settings)


def pairs(operands: Operands, settings: Settings) -> Bool[Array, "B 1 T S"]:
    """Which pairs see each other."""
    places = operands.places
    q_at, q_ids = places.q_positions[:, None, :, None], places.q_segment_ids[:, None, :, None]
    k_at, k_ids = places.kv_positions[:, None, None, :], places.kv_segment_ids[:, None, None, :]
    return visible(settings.mask, q_at, k_at, q_ids, k_ids)


def _softmax(scores: Array, seen: Array) -> tuple[Array, Array]:
    """Softmax over what is seen, and the log of its sum; a row that sees nothing is 0 and has gradient 0."""
    scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    some = total > 0
    safe = jnp.where(some, total, 1)
    return weights / safe, jnp.where(some, top + jnp.log(safe), -jnp.inf)[..., 0]


def _weighted(weights: Float[Array, "B H T S"], v: Float[Array, "B S K d"]) -> Float[Array, "B T H d"]:
    """Sums of values, each head with its weights."""
    (B, H, T, S), K = weights.shape, v.shape[2]
    rows = weights.astype(v.dtype).reshape(B, K, H // K * T, S)
    out = jnp.einsum("BKRS,BSKd->BKRd", rows, v)
    return out.reshape(B, K, H // K, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, H, -1)
