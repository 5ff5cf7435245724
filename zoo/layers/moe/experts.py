"""The experts: the computation that sends each row to its own feed-forward network."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams, collect, grouped_ffn, spread

# (x [N, D], indices [N, k], weights [N, k], params, hidden) -> y [N, D]: what SparseMoE calls, and what
# parallel/ replaces by a version that exchanges tokens between devices. Indices outside [0, E) add nothing; those of a
# token inside differ from each other.
Experts = Callable[[Array, Array, Array, FFNParams, HiddenUnits], Array]


def sorted_experts(
    x: Float[Array, "N D"],
    indices: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    params: FFNParams,
    hidden: HiddenUnits,
    first_expert: Int[Array, ""] | int = 0,
) -> Float[Array, "N D"]:
    """y_n = sum_k weights_nk FFN_{indices_nk}(x_n), dropless: assignments sorted by expert, a grouped FFN, and back.

    `params` may hold a slice of the experts: those from `first_expert` on. Assignments to any others add
    nothing and cost nothing, so that devices with different slices can add their results: a token has as many rows
    as experts of this slice that it can be sent to, min(k, experts in `params`).
    Products are in x's dtype; weights enter and sums over k are taken in float32.
    """
    n_local, (n_tokens, top_k) = params.w_up.shape[0], indices.shape
    local = indices.reshape(-1) - first_expert
    group = jnp.where((local >= 0) & (local < n_local), local, n_local)
    order = jnp.argsort(group, stable=True)
    counts = jnp.sum(group[:, None] == jnp.arange(n_local), axis=0, dtype=jnp.int32)
    row_of = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    row_of = row_of.reshape(n_tokens, top_k)
    # What goes elsewhere comes last.
    order = order[: n_tokens * min(top_k, n_local)]
    rows = spread(x, order // top_k, row_of)
    scale = spread(weights.reshape(-1, 1), order, row_of.reshape(-1, 1))
    y = grouped_ffn(rows, scale, params, counts, hidden)
    return collect(y, order // top_k, row_of)
