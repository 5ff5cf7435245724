"""Auxiliary losses of the router, from summed statistics: one value per mixture layer.

f * P is not additive over batches, the statistics are; so sum them first and call these once.
Leading axes of the statistics (layers) stay leading axes of the result. No tokens give 0.
Expert numbers run over the E experts and then over the null ones; N is how many both are.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.config import MixtureConfig, SparseConfig
from zoo.layers.moe.router import RoutingStats


def losses(stats: RoutingStats, config: MixtureConfig) -> dict[str, Float[Array, "..."]]:
    """Unweighted losses of the mixtures with these statistics: "balance", "z", and any other that has a weight."""
    found = {"balance": balance_loss(stats, config.k, config.n_experts), "z": z_loss(stats)}
    if not isinstance(config, SparseConfig):
        return found
    if config.balance_scope == "sequence":
        found["balance"] = sequence_loss(stats)
    top_groups = config.n_groups if config.top_groups is None else config.top_groups
    others = {
        "importance": lambda: importance_cv2(stats, config.n_experts),
        "load": lambda: load_cv2(stats, config.n_experts),
        "device": lambda: device_loss(stats, config.k, config.n_groups),
        "communication": lambda: communication_loss(stats, top_groups),
    }
    weights = loss_weights(config)
    return found | {name: loss() for name, loss in others.items() if weights[name] > 0}


def loss_weights(config: MixtureConfig) -> dict[str, float]:
    """The weight of each loss that such a mixture may have."""
    names = ("balance", "z", "importance", "load", "device", "communication")
    return {name: getattr(config, f"{name}_weight") for name in names if hasattr(config, f"{name}_weight")}


# ---------------------------------------------------------------------------- shares and probabilities


def even_null(load: Float[Array, "*L N"], n_experts: int) -> Float[Array, "*L N"]:
    """The load with that of the null experts evened out among them: which of them a token chose is of no account.

    Source: AdaMoE, arXiv 2406.13233, and its code: null experts enter its balance loss with their mean load.
    """
    if load.shape[-1] == n_experts:
        return load
    null = load[..., n_experts:]
    return load.at[..., n_experts:].set(jnp.mean(null, axis=-1, keepdims=True))


def balance(
    counts: Float[Array, "*L N"],
    prob_sum: Float[Array, "*L N"],
    tokens: Float[Array, "*L"],
    top_k: int,
    n_experts: int,
) -> Float[Array, "*L"]:
    """N / k sum_e f_e P_e: 1 at perfect balance for any N and k, N / k when k experts take everything.

    f_e = counts / tokens is a constant; the gradient flows through the mean probabilities P_e alone.

    Source: Switch, arXiv 2101.03961, equation 4; with k as in DeepSeekMoE, arXiv 2401.06066, equation 12.
    """
    tokens = jnp.maximum(tokens, 1)[..., None]
    f = even_null(jax.lax.stop_gradient(counts), n_experts) / tokens
    return counts.shape[-1] / top_k * jnp.sum(f * prob_sum / tokens, axis=-1)


def balance_loss(stats: RoutingStats, top_k: int = 1, n_experts: int | None = None) -> Float[Array, "..."]:
    """`balance` of the whole batch. Dense and soft mixtures share one token among all experts, so their k is 1.

    Args:
        n_experts: E, of the experts that are not null; None where all are.
    """
    n_experts = stats.counts.shape[-1] if n_experts is None else n_experts
    return balance(stats.counts, stats.prob_sum, stats.tokens, top_k, n_experts)


def sequence_loss(stats: RoutingStats) -> Float[Array, "..."]:
    """The mean of `balance` over the sequences.

    Source: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
    """
    return stats.sequence_sum / jnp.maximum(stats.sequences, 1)


def device_loss(stats: RoutingStats, top_k: int, n_groups: int) -> Float[Array, "..."]:
    """sum_i f'_i P'_i over groups of experts: the mean of their E / k f_e, and the sum of their P_e. 1 at balance.

    Source: DeepSeekMoE, arXiv 2401.06066, equations 15 to 17.
    """
    tokens = jnp.maximum(stats.tokens, 1)[..., None]
    f = stats.counts.shape[-1] / top_k * jax.lax.stop_gradient(stats.counts) / tokens
    return jnp.sum(_grouped(f, n_groups).mean(-1) * _grouped(stats.prob_sum / tokens, n_groups).sum(-1), axis=-1)


def communication_loss(stats: RoutingStats, top_groups: int) -> Float[Array, "..."]:
    """sum_i f''_i P''_i over D groups: D / M times the share of tokens sent to the group, and the sum of its P_e.

    1 where every token is sent to M groups = `top_groups`, all equally often.

    Source: DeepSeek-V2, arXiv 2405.04434, equations 29 to 31.
    """
    tokens = jnp.maximum(stats.tokens, 1)[..., None]
    n_groups = stats.group_tokens.shape[-1]
    f = n_groups / top_groups * jax.lax.stop_gradient(stats.group_tokens) / tokens
    return jnp.sum(f * _grouped(stats.prob_sum / tokens, n_groups).sum(-1), axis=-1)


def _grouped(values: Float[Array, "*L N"], n_groups: int) -> Array:
    return values.reshape(*values.shape[:-1], n_groups, -1)


# ----------------------------------------------------------------------------------- other losses


def z_loss(stats: RoutingStats) -> Float[Array, "..."]:
    """Mean squared logsumexp of the router logits.

    Source: ST-MoE, arXiv 2202.08906, equation 5.
    """
    return stats.z_sum / jnp.maximum(stats.tokens, 1)


def importance_cv2(stats: RoutingStats, n_experts: int | None = None) -> Float[Array, "..."]:
    """`cv2` of the weights that each expert received; null experts receive none and are left out.

    Source: Shazeer et al., arXiv 1701.06538, equation 7.
    """
    return cv2(stats.gate_sum[..., :n_experts])


def load_cv2(stats: RoutingStats, n_experts: int) -> Float[Array, "..."]:
    """`cv2` of the smooth estimate of each expert's load, that of the null experts evened out.

    Source: Shazeer et al., arXiv 1701.06538, equations 10 and 11.
    """
    return cv2(even_null(stats.load_sum, n_experts))


def cv2(values: Float[Array, "*L E"]) -> Float[Array, "*L"]:
    """The squared coefficient of variation, with the population variance; 0 where the mean is."""
    mean = jnp.mean(values, axis=-1)
    return jnp.var(values, axis=-1) / jnp.where(mean == 0, 1, jnp.square(mean))


# ------------------------------------------------------------------------------ publishers' scales
# MegaBlocks, Megatron, DeepSeek and Switch (k = 1) have the scale of `balance`.


def to_huggingface(loss: Float[Array, "..."], top_k: int) -> Float[Array, "..."]:
    """`balance` on the scale of Hugging Face transformers, MaxText, flaxformer and OpenMoE: k at balance."""
    return loss * top_k


def to_unbiased(squared: Float[Array, "..."], n_experts: int) -> Float[Array, "..."]:
    """A `cv2` on the scale of fastmoe and Tutel, whose variance is the unbiased one; needs two experts."""
    return squared * n_experts / (n_experts - 1)


# ------------------------------------------------------------------------- balance without a loss


def moved_bias(
    bias: Float[Array, "*L N"], counts: Float[Array, "*L N"], rate: float, n_experts: int
) -> Float[Array, "*L N"]:
    """The selection bias after a step: `rate` higher for an expert with less than the mean load, lower with more.

    Args:
        counts: assignments of the whole batch, before any was dropped.

    Source: Wang et al., arXiv 2408.15664, algorithm 1.
    """
    load = even_null(counts, n_experts)
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
