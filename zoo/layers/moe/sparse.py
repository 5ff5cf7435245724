"""Sparse mixture: each token goes to its top-k experts."""

import math
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.config import BlockConfig, SparseConfig
from zoo.layers.ffn import declare_ffn, hidden_units
from zoo.layers.logical import Constrain, unconstrained
from zoo.layers.moe.experts import Experts, sorted_experts
from zoo.layers.moe.router import Router, RoutingStats, route, routing_stats
from zoo.layers.moe.shared import add_shared, build_shared


def capacity(capacity_factor: float, top_k: int, length: int, n_experts: int) -> int:
    """C = max(1, ceil(cf k T / E)): assignments that an expert takes of a sequence of `length` tokens.

    The factor counts as the decimal number that was written, so that 1.1 * 40 / 4 is 11 and not 12.

    Source: GShard, arXiv 2006.16668, section 2.2; never rounded down, so that no expert is shut off.
    """
    return max(1, math.ceil(Fraction(repr(float(capacity_factor))) * top_k * length / n_experts))


def within_capacity(
    indices: Int[Array, "B T k"], token_mask: Bool[Array, "B T"], n_experts: int, limit: int
) -> Bool[Array, "B T k"]:
    """Which assignments find a place: the first `limit` of each expert in each sequence.

    Order is by token, and within a token by choice, so no token's place depends on a later one; padding
    takes no place.
    """
    batch, length, top_k = indices.shape
    chosen = jax.nn.one_hot(indices, n_experts, dtype=jnp.int32) * token_mask[..., None, None]
    places = jnp.cumsum(chosen.reshape(batch, length * top_k, n_experts), axis=1)
    place = jnp.sum(places.reshape(chosen.shape) * chosen, axis=-1)
    return (place >= 1) & (place <= limit)


class SparseMoE(nn.Module):
    """y = sum over a token's top-k experts of weight * FFN_e(x), plus the shared experts' FFN(x).

    Dropless, or with a capacity per expert and sequence in training: an assignment that finds no place
    adds nothing, and its weight goes to no other. Causal: no token's output depends on a later one.
    The weights enter in float32; products are in the compute dtype, and so is the result.

    Attributes:
        config: sizes and routing rule.
        block: the block's sizes, activation, initializers and dtypes.
        constrain: pins activations to the mesh.
        experts: runs the experts; see `zoo.layers.moe.experts.Experts`.
    """

    config: SparseConfig
    block: BlockConfig
    constrain: Constrain = unconstrained
    experts: Experts = sorted_experts

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        token_mask: Bool[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        cache: None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], RoutingStats, None]:
        """Returns the output, the routing statistics and no cache."""
        del positions, segment_ids
        config = self.config
        logits = Router(self.block, config.n_experts, config.router_jitter, name="router")(x, deterministic)
        weights, indices, _ = route(logits, config.top_k, config.renormalizes)
        kept = self._kept(indices, token_mask, deterministic)
        y = self._run(x, jnp.where(kept, indices, config.n_experts), weights)
        return y, _stats(logits, weights, indices, kept, token_mask), cache

    def _kept(self, indices: Array, token_mask: Array, deterministic: bool) -> Bool[Array, "B T k"]:
        config = self.config
        if deterministic or config.capacity_factor is None:
            return jnp.broadcast_to(token_mask[..., None], indices.shape)
        limit = capacity(config.capacity_factor, config.top_k, indices.shape[1], config.n_experts)
        return within_capacity(indices, token_mask, config.n_experts, limit)

    def _run(self, x: Array, indices: Array, weights: Array) -> Float[Array, "B T D"]:
        config, dtype = self.config, self.block.compute_dtype
        params = declare_ffn(self, self.block, config.d_ff, config.n_experts).astype(dtype)
        flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
        y = self.experts(flat(x.astype(dtype)), flat(indices), flat(weights), params, hidden_units(self.block))
        y = self.constrain(y.reshape(x.shape), ("batch", "length", "embed"))
        return add_shared(y, x, build_shared(config, self.block, self.constrain, name="shared"))


def _stats(logits: Array, weights: Array, indices: Array, kept: Array, token_mask: Array) -> RoutingStats:
    chosen = jax.nn.one_hot(indices, logits.shape[-1])
    gates = jnp.sum(chosen * jnp.where(kept, weights, 0)[..., None], axis=-2)
    dropped = jnp.sum(token_mask[..., None] & ~kept, dtype=jnp.float32)
    return routing_stats(logits, token_mask.astype(jnp.float32), jnp.sum(chosen, axis=-2), gates, dropped)
