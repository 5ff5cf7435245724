"""The router: which experts serve a token, with which weights, and what to report about it."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import BlockConfig
from zoo.layers.initializers import table_init
from zoo.layers.logical import declare


class RoutingStats(NamedTuple):
    """What one mixture reports, in float32: sums over real tokens, so that batches and devices add.

    Attributes:
        counts: [E] assignments per expert before any is dropped; in a dense or soft mixture the sum of
            the weights. No gradient.
        prob_sum: [E] sum of the probabilities of the full softmax; carries the gradient.
        gate_sum: [E] sum of the weights that experts' outputs got, 0 where dropped. No gradient.
        tokens: [] real tokens.
        z_sum: [] sum of the squared logsumexp of the raw logits; carries the gradient.
        entropy_sum: [] sum of the entropy of the full softmax, in nats. No gradient.
        dropped: [] assignments dropped for lack of capacity.
    """

    counts: Array
    prob_sum: Array
    gate_sum: Array
    tokens: Array
    z_sum: Array
    entropy_sum: Array
    dropped: Array


def router_logits(x: Float[Array, "*T D"], w: Float[Array, "D E"], noise: Array | None = None) -> Float[Array, "*T E"]:
    """Raw logits x W, in float32 from the input on, whatever the dtype of x.

    `noise` multiplies the router's own copy of x, so experts never see it (Switch, arXiv 2101.03961, 2.2).
    Full precision is asked for, since accelerators would else round the factors of the product to bfloat16.
    """
    x = x.astype(jnp.float32)
    x = x if noise is None else x * noise
    return jnp.matmul(x, w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def route(
    logits: Float[Array, "*T E"], top_k: int, renormalize: bool
) -> tuple[Float[Array, "*T k"], Int[Array, "*T k"], Float[Array, "*T E"]]:
    """Weights and indices of the k likeliest experts, likeliest first, and the full softmax.

    Ties go to the lower index. With `renormalize` the k weights are divided by their sum, as in Mixtral
    (arXiv 2401.04088, equation 1, where it is written as a softmax over the k logits).
    """
    probs = jax.nn.softmax(logits)
    weights, indices = jax.lax.top_k(probs, top_k)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, indices, probs


def routing_stats(
    logits: Float[Array, "*T E"],
    tokens: Float[Array, "*T"],
    assignments: Float[Array, "*T E"],
    gates: Float[Array, "*T E"],
    dropped: Float[Array, ""] | float = 0.0,
) -> RoutingStats:
    """Sums what the router did.

    Args:
        logits: raw logits of each token, or of each group of tokens that share a routing.
        tokens: how many real tokens each stands for; 0 for padding.
        assignments: share of each token that went to each expert.
        gates: weight that each expert's output got.
        dropped: assignments dropped for lack of capacity.
    """
    log_probs = jax.nn.log_softmax(logits)
    probs = jnp.exp(log_probs)
    stop = jax.lax.stop_gradient
    total = lambda values: jnp.einsum("...e,...->e", values, tokens, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    return RoutingStats(
        counts=stop(total(assignments)),
        prob_sum=total(probs),
        gate_sum=stop(total(gates)),
        tokens=jnp.sum(tokens),
        z_sum=jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * tokens),
        entropy_sum=stop(-jnp.sum(jnp.sum(probs * log_probs, axis=-1) * tokens)),
        dropped=jnp.asarray(dropped, jnp.float32),
    )


class Router(nn.Module):
    """Holds the weight of `router_logits`; float32 whatever the model's dtypes.

    Attributes:
        block: of the initializer.
        n_experts: E.
        jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter); needs the rng
            stream "router" then, and only then.
    """

    block: BlockConfig
    n_experts: int
    jitter: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "*T D"], deterministic: bool = True) -> Float[Array, "*T E"]:
        shape, axes = (x.shape[-1], self.n_experts), ("embed", "expert")
        w = declare(self, "w", table_init(self.block), shape, axes, "router", "float32", axes[:1], axes[1:])
        if deterministic or self.jitter == 0:
            return router_logits(x, w)
        low, high = 1 - self.jitter, 1 + self.jitter
        noise = jax.random.uniform(self.make_rng("router"), x.shape, jnp.float32, low, high)
        return router_logits(x, w, noise)
