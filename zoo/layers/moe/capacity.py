"""Capacity: which tokens an expert serves where it may serve only so many of a sequence."""

import math
from fractions import Fraction
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Priority = Literal["token", "choice", "probability"]


def capacity(capacity_factor: float, top_k: int, length: int, n_experts: int) -> int:
    """C = max(1, ceil(cf k T / E)): assignments that an expert takes of a sequence of `length` tokens.

    The factor counts as the decimal number that was written, so that 1.1 * 40 / 4 is 11 and not 12.

    Source: GShard, arXiv 2006.16668, section 2.2; never rounded down, so that no expert is shut off.
    """
    return max(1, math.ceil(Fraction(repr(float(capacity_factor))) * top_k * length / n_experts))


def within_capacity(
    indices: Int[Array, "B T k"],
    token_mask: Bool[Array, "B T"],
    n_experts: int,
    limit: int,
    priority: Priority = "token",
    likelihood: Float[Array, "B T"] | None = None,
) -> Bool[Array, "B T k"]:
    """Which assignments find a place: the first `limit` of each expert in each sequence.

    Null experts, with numbers from `n_experts` on, have room for all; padding takes no place.

    Args:
        priority: the order: by "token", and within a token by choice, so that no token's place depends on a later
            one; by "choice", all first choices before all second ones, and then by token; or, "probability", by
            choice and then by `likelihood`, which is batch prioritized routing (V-MoE, arXiv 2106.05974,
            algorithm 2). The latter two are not causal.
        likelihood: of each token, for "probability": its highest score.
    """
    if priority == "probability":
        order = jnp.argsort(-likelihood, axis=1)
        sort = lambda a, order: jnp.take_along_axis(a, order.reshape(*order.shape, *(1,) * (a.ndim - 2)), 1)  # noqa: E731
        kept = within_capacity(sort(indices, order), sort(token_mask, order), n_experts, limit, "choice")
        return sort(kept, jnp.argsort(order, axis=1))
    chosen = jax.nn.one_hot(indices, n_experts, dtype=jnp.int32) * token_mask[..., None, None]
    queue = chosen if priority == "token" else chosen.swapaxes(1, 2)
    places = jnp.cumsum(queue.reshape(len(queue), -1, n_experts), axis=1).reshape(queue.shape)
    places = places if priority == "token" else places.swapaxes(1, 2)
    place = jnp.sum(places * chosen, axis=-1)
    null = token_mask[..., None] & (indices >= n_experts)
    return null | (place >= 1) & (place <= limit)


def reroute(
    ranking: Float[Array, "B T E"], token_mask: Bool[Array, "B T"], top_k: int, n_experts: int, limit: int
) -> tuple[Int[Array, "B T k"], Bool[Array, "B T k"]]:
    """Each token's best experts among those that still have room, by token, so that no token depends on a later one.

    Null experts, from `n_experts` on, have room for all; padding takes none.

    Args:
        ranking: of experts and null experts; those at -inf are never taken.

    Returns:
        The experts, best first, and which of them there are: a token to which fewer than k are left has fewer. What
        is no expert has the number E.
    """
    n_choices = ranking.shape[-1]
    room = jnp.where(jnp.arange(n_choices) < n_experts, limit, top_k * ranking.shape[1])

    def step(room: Array, token: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        ranks, real = token
        best, indices = jax.lax.top_k(jnp.where(room > 0, ranks, -jnp.inf), top_k)
        placed = real[:, None] & (best > -jnp.inf)
        indices = jnp.where(placed, indices, n_choices)
        return room - jnp.sum(jax.nn.one_hot(indices, n_choices, dtype=jnp.int32), axis=1), (indices, placed)

    rooms = jnp.broadcast_to(room, (ranking.shape[0], n_choices))
    _, found = jax.lax.scan(step, rooms, (ranking.swapaxes(0, 1), token_mask.T))
    return tuple(a.swapaxes(0, 1) for a in found)


def expert_choice(
    scores: Float[Array, "B T E"], token_mask: Bool[Array, "B T"], limit: int
) -> tuple[Int[Array, "B E C"], Float[Array, "B E C"]]:
    """The `limit` tokens of each sequence that each expert takes, best first, and their scores as weights.

    An expert to which fewer real tokens are left takes padding with weight 0 and the number T.
    Not causal: whether a token is taken depends on the others of its sequence.

    Source: Zhou et al., arXiv 2202.09368, section 3.2.
    """
    length = scores.shape[1]
    real = jnp.where(token_mask[..., None], scores, -jnp.inf).swapaxes(1, 2)
    weights, tokens = jax.lax.top_k(real, min(limit, length))
    taken = weights > -jnp.inf
    return jnp.where(taken, tokens, length), jnp.where(taken, weights, 0)
