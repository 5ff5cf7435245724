"""Auxiliary losses of the router, from summed statistics: one value per mixture layer.

f * P is not additive over batches, the statistics are; so sum them first and call these once.
Leading axes of the statistics (layers) stay leading axes of the result.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.layers.moe.router import RoutingStats


def balance_loss(stats: RoutingStats, top_k: int = 1) -> Float[Array, "..."]:
    """E / k sum_e f_e P_e: 1 at perfect balance for any E and k, E / k when k experts take everything.

    f_e = counts / tokens is a constant; the gradient flows through the mean probabilities P_e alone.
    Dense and soft mixtures share one token among all experts, so their k is 1. Without tokens it is 0.

    Source: Switch, arXiv 2101.03961, equation 4; with k as in DeepSeekMoE, arXiv 2401.06066, equation 12.
    """
    tokens = jnp.maximum(stats.tokens, 1)[..., None]
    f = jax.lax.stop_gradient(stats.counts) / tokens
    return stats.counts.shape[-1] / top_k * jnp.sum(f * stats.prob_sum / tokens, axis=-1)


def to_huggingface(loss: Float[Array, "..."], top_k: int) -> Float[Array, "..."]:
    """The same loss on the scale of Hugging Face transformers, MaxText and flaxformer: k at balance."""
    return loss * top_k


def z_loss(stats: RoutingStats) -> Float[Array, "..."]:
    """Mean squared logsumexp of the router logits; 0 without tokens.

    Source: ST-MoE, arXiv 2202.08906, equation 5.
    """
    return stats.z_sum / jnp.maximum(stats.tokens, 1)


def importance_cv2(stats: RoutingStats) -> Float[Array, "..."]:
    """Squared coefficient of variation of the weights that each expert received; 0 where none did.

    Source: Shazeer et al., arXiv 1701.06538, equation 7, with the population variance.
    """
    mean = jnp.mean(stats.gate_sum, axis=-1)
    return jnp.var(stats.gate_sum, axis=-1) / jnp.where(mean == 0, 1, jnp.square(mean))
