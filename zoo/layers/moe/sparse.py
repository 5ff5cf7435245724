"""Sparse mixture: each token goes to its top-k experts, or each expert takes its best tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.config import BlockConfig, SparseConfig
from zoo.layers.ffn import declare_ffn, hidden_units
from zoo.layers.logical import Constrain, unconstrained
from zoo.layers.moe.balance import balance
from zoo.layers.moe.capacity import capacity, expert_choice, reroute, within_capacity
from zoo.layers.moe.experts import Experts, Share, sorted_experts
from zoo.layers.moe.router import (
    Logits,
    Routing,
    RoutingStats,
    SparseRouter,
    log_probabilities,
    route,
    routing_stats,
    score,
    smooth_load,
    weigh,
)
from zoo.layers.moe.shared import add_shared, build_shared


class SparseMoE(nn.Module):
    """y = sum over a token's experts of weight * FFN_e(x), plus the shared experts' output.

    Where tokens choose: dropless, or with a capacity per expert and sequence in training, when an assignment that
    finds no place adds nothing, and its weight goes to no other; or is sent to another expert. Causal in token
    order: no token's output depends on a later one.
    Where experts choose, they take their best tokens of each sequence, in training and at evaluation; not causal.
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
        logits, selection_bias = SparseRouter(self.config, self.block, name="router")(x, deterministic)
        if self.config.choice == "expert":
            y, stats = self._experts_choose(x, logits, token_mask)
        else:
            y, stats = self._tokens_choose(x, logits, selection_bias, token_mask, deterministic)
        y = self.constrain(y, ("batch", "length", "embed"))
        return add_shared(y, x, build_shared(self.config, self.block, self.constrain, name="shared")), stats, cache

    def _tokens_choose(
        self, x: Array, logits: Logits, selection_bias: Array | None, token_mask: Array, deterministic: bool
    ) -> tuple[Float[Array, "B T D"], RoutingStats]:
        config, n_choices = self.config, logits.raw.shape[-1]
        routing = route(logits.noisy, config, selection_bias)
        free = deterministic or config.capacity_factor is None
        limit = None if free else self._limit(x.shape[1], config.capacity_factor)
        indices, weights, kept = find_places(routing, logits.noisy, token_mask, limit, config)
        flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
        share = None if limit is None else Share(x.shape[1], limit)
        y = self._run(flat(x), flat(jnp.where(kept, indices, n_choices)), flat(weights), share).reshape(x.shape)
        assignments = jax.nn.one_hot(routing.indices, n_choices).sum(axis=-2)
        gates = jnp.sum(jax.nn.one_hot(indices, n_choices) * jnp.where(kept, weights, 0)[..., None], axis=-2)
        dropped = jnp.sum(token_mask[..., None] & ~kept, dtype=jnp.float32)
        return y, sparse_stats(logits, token_mask, assignments, gates, dropped, config)

    def _experts_choose(
        self, x: Array, logits: Logits, token_mask: Array
    ) -> tuple[Float[Array, "B T D"], RoutingStats]:
        config, length = self.config, x.shape[1]
        limit = self._limit(length, config.capacity_factor or 1.0)
        tokens, weights = expert_choice(score(logits.raw, config.score), token_mask, limit)
        weights = config.routed_scale * weights
        indices = jnp.where(tokens < length, jnp.arange(config.n_experts)[:, None], config.n_experts)
        # An assignment for each place of each expert: far fewer rows than E for every token.
        share = Share(indices[0].size, indices.shape[-1])
        y = self._run(take_tokens(x, tokens), indices.reshape(-1, 1), weights.reshape(-1, 1), share)
        assignments, gates = (by_token(tokens, a, length) for a in (jnp.ones_like(weights), weights))
        return add_tokens(y, tokens, length), sparse_stats(logits, token_mask, assignments, gates, 0.0, config)

    def _limit(self, length: int, factor: float) -> int:
        return capacity(factor, self.config.k, length, self.config.n_experts)

    def _run(
        self, x: Float[Array, "N D"], indices: Int[Array, "N k"], weights: Float[Array, "N k"], share: Share | None
    ) -> Array:
        config, dtype = self.config, self.block.compute_dtype
        params = declare_ffn(self, self.block, config.d_ff, config.n_experts).astype(dtype)
        return self.experts(x.astype(dtype), indices, weights, params, hidden_units(self.block), share)


def find_places(
    routing: Routing,
    logits: Float[Array, "B T E"],
    token_mask: Bool[Array, "B T"],
    limit: int | None,
    config: SparseConfig,
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"], Bool[Array, "B T k"]]:
    """Where each assignment goes if experts take `limit` of a sequence, with which weight, and if it goes at all."""
    indices, weights, ranking = routing
    if limit is None:
        return indices, weights, jnp.broadcast_to(token_mask[..., None], indices.shape)
    if config.overflow == "reroute":
        indices, kept = reroute(ranking, token_mask, config.k, config.n_experts, limit)
        return indices, weigh(logits, indices, config), kept
    likelihood = jnp.max(score(logits, config.score), axis=-1)
    kept = within_capacity(indices, token_mask, config.n_experts, limit, config.priority, likelihood)
    return indices, weights, kept


def take_tokens(x: Float[Array, "B T D"], tokens: Int[Array, "B E C"]) -> Float[Array, "N D"]:
    """The chosen tokens of each sequence, N = B E C; 0 for the number T."""
    rows = jax.vmap(lambda x, at: x.at[at].get(mode="fill", fill_value=0))(x, tokens)
    return rows.reshape(-1, x.shape[-1])


def add_tokens(y: Float[Array, "N D"], tokens: Int[Array, "B E C"], length: int) -> Float[Array, "B T D"]:
    """The sum over the experts that chose a token, in float32; the result has y's dtype."""
    rows = y.astype(jnp.float32).reshape(*tokens.shape, -1)
    zeros = jnp.zeros((length, y.shape[-1]), jnp.float32)
    return jax.vmap(lambda at, y: zeros.at[at].add(y, mode="drop"))(tokens, rows).astype(y.dtype)


def by_token(tokens: Int[Array, "B E C"], values: Float[Array, "B E C"], length: int) -> Float[Array, "B T E"]:
    """What each expert has for each token; 0 for those that it did not choose."""
    put = lambda at, value: jnp.zeros(length, value.dtype).at[at].set(value, mode="drop")  # noqa: E731
    return jax.vmap(jax.vmap(put))(tokens, values).swapaxes(1, 2)


def sparse_stats(
    logits: Logits,
    token_mask: Bool[Array, "B T"],
    assignments: Float[Array, "B T E"],
    gates: Float[Array, "B T E"],
    dropped: Float[Array, ""] | float,
    config: SparseConfig,
) -> RoutingStats:
    """`routing_stats`, and beside what the config's losses need."""
    tokens = token_mask.astype(jnp.float32)
    stats = routing_stats(logits.raw, tokens, assignments, gates, dropped, config.score, config.n_groups)
    if config.load_weight > 0 and logits.deviation is not None:
        load = smooth_load(*logits, config.k)
        stats = stats._replace(load_sum=jnp.sum(load * tokens[..., None], axis=(0, 1)))
    if config.balance_scope == "sequence":
        probs = jnp.exp(log_probabilities(logits.raw, config.score))
        counts, prob_sum = (jnp.sum(a * tokens[..., None], axis=1) for a in (assignments, probs))
        losses = balance(counts, prob_sum, tokens.sum(1), config.k, config.n_experts)
        sequences = jnp.sum(token_mask.any(1), dtype=jnp.float32)
        stats = stats._replace(sequence_sum=losses.sum(), sequences=sequences)
    return stats
