"""The experts: their parameters, and the computation that sends each row to its own expert."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import Activation, BlockConfig
from zoo.kernels.grouped_matmul import collect, grouped_ffn, spread
from zoo.layers.ffn import ACTIVATIONS
from zoo.layers.initializers import matrix_init
from zoo.layers.logical import declare


class ExpertParams(NamedTuple):
    """The weights of all experts; `w_gate` is None without a GLU.

    Attributes:
        w_gate, w_up: [E, D, F].
        w_down: [E, F, D].
    """

    w_gate: Any
    w_up: Any
    w_down: Any

    def astype(self, dtype: Any) -> "ExpertParams":
        """The same weights in another dtype."""
        return jax.tree.map(lambda w: w.astype(dtype), self)


# (x [N, D], indices [N, k], weights [N, k], params, activation) -> y [N, D]: what SparseMoE calls, and what
# parallel/ replaces by a version that exchanges tokens between devices. Indices outside [0, E) add nothing.
Experts = Callable[[Array, Array, Array, ExpertParams, Activation], Array]


def declare_experts(module: nn.Module, block: BlockConfig, n_experts: int, d_ff: int) -> ExpertParams:
    """The parameters w_gate (with a GLU), w_up and w_down of `module`, in the parameter dtype."""
    shape, axes = (n_experts, block.d_model, d_ff), ("expert", "embed", "mlp")
    init, out_init = matrix_init(block, *shape[1:], "deep"), matrix_init(block, *shape[:0:-1], "out")

    def weight(name: str, init: Any, order: tuple[int, int, int]) -> Array:
        dims, names = tuple(shape[i] for i in order), tuple(axes[i] for i in order)
        return declare(module, name, init, dims, names, "matrix", block.param_dtype, names[1:2], names[2:])

    w_gate = weight("w_gate", init, (0, 1, 2)) if block.glu else None
    return ExpertParams(w_gate, weight("w_up", init, (0, 1, 2)), weight("w_down", out_init, (0, 2, 1)))


def sorted_experts(
    x: Float[Array, "N D"],
    indices: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    params: ExpertParams,
    activation: Activation,
    first_expert: Int[Array, ""] | int = 0,
) -> Float[Array, "N D"]:
    """y_n = sum_k weights_nk FFN_{indices_nk}(x_n), dropless: assignments sorted by expert, a grouped FFN, and back.

    `params` may hold a slice of the experts: those from `first_expert` on. Assignments to any others add
    nothing and cost nothing, so that devices with different slices can add their results.
    Products are in x's dtype; weights enter and sums over k are taken in float32.
    """
    n_local, (n_tokens, top_k) = params.w_up.shape[0], indices.shape
    local = indices.reshape(-1) - first_expert
    group = jnp.where((local >= 0) & (local < n_local), local, n_local)
    order = jnp.argsort(group, stable=True)
    counts = jnp.sum(group[:, None] == jnp.arange(n_local), axis=0, dtype=jnp.int32)
    row_of = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    row_of = row_of.reshape(n_tokens, top_k)
    rows = spread(x, order // top_k, row_of)
    scale = spread(weights.reshape(-1, 1), order, row_of.reshape(-1, 1))
    y = grouped_ffn(rows, scale, params.w_gate, params.w_up, params.w_down, counts, ACTIVATIONS[activation])
    return collect(y, order // top_k, row_of)
