"""Scaled dot-product attention with grouped key and value heads."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.kernels.masks import Mask

# The signature of `attention`: what Attention calls, and what parallel/ or describe/ may replace.
Attend = Callable[..., Array]


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K d"],
    *,
    mask: Mask,
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    q_segment_ids: Int[Array, "B T"],
    kv_segment_ids: Int[Array, "B S"],
    scale: float,
    softcap: float | None = None,
    alibi_slopes: Float[Array, "H"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "B T H d"]:
    """softmax(scale q k^T) v over the keys that the mask allows within the query's own segment.

    Query head i reads key and value head i // (H / K). A query of segment 0 (padding), or one that sees no
    key, gives 0. Scores and softmax are float32 (float64 for float64 inputs); the result has v's dtype.
    In this order: scale, softcap, ALiBi, mask, softmax, dropout.

    Args:
        q_positions, kv_positions: positions inside a document, which `mask` compares.
        q_segment_ids, kv_segment_ids: documents; 0 is padding or an empty slot of a cache.
        softcap: c, scores become c tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).
        alibi_slopes: slope times the distance of a key is taken off its score (arXiv 2108.12409, section 3).
        sinks: a score per query head that is in the softmax's sum and has no value (gpt-oss, arXiv 2508.10925).
        dropout_rate: share of the weights that are dropped, the others divided by what is left; needs a key.

    Raises:
        ValueError: H is not a multiple of K, or there is a rate of dropout without a key.

    Source: arXiv 1706.03762, equation 1; grouped heads, arXiv 2305.13245.
    """
    weights = attention_weights(
        q,
        k,
        mask=mask,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    return _weighted(_dropped(weights, dropout_rate, dropout_key), v)


def attention_weights(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    *,
    mask: Mask,
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    q_segment_ids: Int[Array, "B T"],
    kv_segment_ids: Int[Array, "B S"],
    scale: float,
    softcap: float | None = None,
    alibi_slopes: Float[Array, "H"] | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B H T S"]:
    """The weights that `attention`, whose arguments these are, gives the values: each row adds to 1, or to less
    with a sink, or to 0 where nothing is visible."""
    scores = attention_scores(q, k, q_positions, kv_positions, scale, softcap, alibi_slopes)
    visible = mask.allows(q_positions[:, :, None], kv_positions[:, None, :])
    visible &= (q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]) & (q_segment_ids > 0)[:, :, None]
    sink = None if sinks is None else sinks.astype(scores.dtype)[:, None, None]
    return _softmax(scores, visible[:, None], sink)


def attention_scores(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    scale: float,
    softcap: float | None = None,
    alibi_slopes: Float[Array, "H"] | None = None,
) -> Float[Array, "B H T S"]:
    """What `attention`, whose arguments these are, takes the softmax of, before the mask."""
    (B, T, H, h), (S, K) = q.shape, k.shape[1:3]
    if H % K:
        raise ValueError(f"attention: {H} query heads are not a multiple of {K} key and value heads")
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # One batched product per key head, with the G query heads of a group as more rows of it.
    q_rows = q.reshape(B, T, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, h)
    scores = jnp.einsum("BKRh,BSKh->BKRS", q_rows, k, preferred_element_type=dtype) * scale
    scores = scores.reshape(B, H, T, S)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (q_positions[:, None, :, None] - kv_positions[:, None, None, :]).astype(dtype)
        scores -= alibi_slopes.astype(dtype)[:, None, None] * distance
    return scores


def _softmax(scores: Array, visible: Array, sink: Array | None) -> Array:
    """Softmax over the visible scores of a row and the sink; a row without any is 0 and has gradient 0."""
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    top = scores.max(axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - top)
    return weights / jnp.where(total == 0, 1, total)


def _dropped(weights: Array, rate: float, key: Array | None) -> Array:
    """Each weight 0 with probability `rate`, else divided by 1 - rate."""
    if rate == 0:
        return weights
    if key is None:
        raise ValueError(f"attention: dropout_rate={rate} needs a dropout_key")
    return jnp.where(jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0)


def _weighted(weights: Float[Array, "B H T S"], v: Float[Array, "B S K d"]) -> Float[Array, "B T H d"]:
    """Sums of values, each head with its weights."""
    (B, H, T, S), K = weights.shape, v.shape[2]
    rows = weights.astype(v.dtype).reshape(B, K, H // K * T, S)
    out = jnp.einsum("BKRS,BSKd->BKRd", rows, v)
    return out.reshape(B, K, H // K, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, H, -1)
