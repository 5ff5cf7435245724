"""The experts: the computation that sends each row to its own feed-forward network."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams, collect, grouped_ffn, spread


class Share(NamedTuple):
    """A capacity: of every `tokens` rows, a sequence, any expert gets `places` at most."""

    tokens: int
    places: int

    def most(self, n_tokens: int, n_experts: int) -> int:
        """Assignments to `n_experts` experts at most, of `n_tokens` rows that follow a multiple of `n_tokens`."""
        whole = n_tokens % self.tokens == 0 or self.tokens % n_tokens == 0
        sequences = max(1, n_tokens // self.tokens) if whole else (n_tokens - 2) // self.tokens + 2
        return sequences * self.places * n_experts


# (x [N, D], indices [N, k], weights [N, k], params, hidden, share) -> y [N, D]: what SparseMoE calls, and what
# parallel/ replaces by a version that exchanges tokens between devices. Indices outside [0, E) add nothing; those of a
# token inside differ from each other. A share, where there is one, holds of the indices, and bounds the memory.
Experts = Callable[[Array, Array, Array, FFNParams, HiddenUnits, Share | None], Array]


def sorted_experts(
    x: Float[Array, "N D"],
    indices: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    params: FFNParams,
    hidden: HiddenUnits,
    share: Share | None = None,
) -> Float[Array, "N D"]:
    """y_n = sum_k weights_nk FFN_{indices_nk}(x_n), dropless: assignments sorted by expert, a grouped FFN, and back.

    Products are in x's dtype; weights enter and sums over k are taken in float32.
    """
    n_rows = most_rows(*indices.shape, params.w_up.shape[0], share)
    return some_experts(x, indices, weights, params, hidden, 0, n_rows)


def most_rows(n_tokens: int, top_k: int, n_experts: int, share: Share | None) -> int:
    """Assignments of `n_tokens` rows to `n_experts` experts at most."""
    rows = n_tokens * min(top_k, n_experts)
    return rows if share is None else min(rows, share.most(n_tokens, n_experts))


def some_experts(
    x: Float[Array, "N D"],
    indices: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    params: FFNParams,
    hidden: HiddenUnits,
    first_expert: Int[Array, ""] | int,
    n_rows: int,
) -> Float[Array, "N D"]:
    """`sorted_experts` with a slice of the experts: those of `params`, from `first_expert` on.

    Assignments to any others add nothing and cost nothing, so that devices with different slices can add their
    results.

    Args:
        n_rows: assignments to this slice at most.
    """
    n_local, (n_tokens, top_k) = params.w_up.shape[0], indices.shape
    local = indices.reshape(-1) - first_expert
    group = jnp.where((local >= 0) & (local < n_local), local, n_local)
    order = jnp.argsort(group, stable=True)
    counts = jnp.sum(group[:, None] == jnp.arange(n_local), axis=0, dtype=jnp.int32)
    row_of = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    row_of = row_of.reshape(n_tokens, top_k)
    order = order[:n_rows]  # what goes elsewhere comes last
    rows = spread(x, order // top_k, row_of)
    scale = spread(weights.reshape(-1, 1), order, row_of.reshape(-1, 1))
    y = grouped_ffn(rows, scale, params, counts, hidden)
    return collect(y, order // top_k, row_of)
