"""Scaled dot-product attention with grouped key and value heads."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.kernels.masks import Causal


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    *,
    mask: Causal,
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    q_segment_ids: Int[Array, "B T"],
    kv_segment_ids: Int[Array, "B S"],
) -> Float[Array, "B T H h"]:
    """softmax(q k^T / sqrt(h)) v over the keys that the mask allows within the query's own segment.

    Query head i reads key and value head i // (H / K). A query of segment 0 (padding), or one that sees no
    key, gives 0. Scores and softmax are float32 (float64 for float64 inputs); the result has v's dtype.

    Args:
        q_positions, kv_positions: positions inside a document, which `mask` compares.
        q_segment_ids, kv_segment_ids: documents; 0 is padding or an empty slot of a cache.

    Raises:
        ValueError: H is not a multiple of K.

    Source: arXiv 1706.03762, equation 1; grouped heads, arXiv 2305.13245.
    """
    (B, T, H, h), (S, K) = q.shape, k.shape[1:3]
    if H % K:
        raise ValueError(f"attention: {H} query heads are not a multiple of {K} key and value heads")
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # One batched product per key head, with the G query heads of a group as more rows of it.
    q_rows = q.reshape(B, T, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, h)
    scores = jnp.einsum("BKRh,BSKh->BKRS", q_rows, k, preferred_element_type=dtype) * h**-0.5
    visible = mask.allows(q_positions[:, :, None], kv_positions[:, None, :])
    visible &= (q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]) & (q_segment_ids > 0)[:, :, None]
    weights = _softmax(scores.reshape(B, K, H // K, T, S), visible[:, None, None]).astype(v.dtype)
    out = jnp.einsum("BKRS,BSKh->BKRh", weights.reshape(B, K, H // K * T, S), v)
    return out.reshape(B, K, H // K, T, h).transpose(0, 3, 1, 2, 4).reshape(B, T, H, h)


def _softmax(scores: Array, visible: Array) -> Array:
    """Softmax over the visible scores of a row; a row without any is 0 and has gradient 0."""
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)
