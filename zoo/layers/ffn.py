"""Feed-forward networks: plain, and gated linear units."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.config import BlockConfig
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.kernels.linear import affine
from zoo.layers.initializers import Use, matrix_init
from zoo.layers.logical import Axes, Constrain, declare, unconstrained


def hidden_units(block: BlockConfig) -> HiddenUnits:
    """The hidden units of a block's feed-forward networks."""
    return HiddenUnits(block.activation, block.swish_beta, block.glu_clamp)


def ffn(
    x: Float[Array, "*N D"],
    params: FFNParams,
    hidden: HiddenUnits,
    constrain: Callable[[Array], Array] = lambda units: units,
) -> Float[Array, "*N D"]:
    """down(hidden(gate(x), up(x))), each product with its bias where there is one.

    Args:
        params: of one network: w_gate (or None) and w_up [D, F], w_down [F, D], b_gate, b_up [F], b_down [D], beta [].

    Source: GLU variants, arXiv 2002.05202, equations 5 and 6 ("silu" with a gate is SwiGLU).
    """
    gate, up = affine(x, params.w_gate, params.b_gate), affine(x, params.w_up, params.b_up)
    return affine(constrain(hidden(gate, up, params.beta)), params.w_down, params.b_down)


def declare_ffn(module: nn.Module, block: BlockConfig, d_ff: int, experts: int | None = None) -> FFNParams:
    """The parameters of one feed-forward network, or of several with a leading [E], in the parameter dtype."""
    lead, lead_axes = ((), ()) if experts is None else ((experts,), ("expert",))
    D, F = (block.d_model, "embed"), (d_ff, "mlp")

    def weight(name: str, inputs: tuple[int, str], outputs: tuple[int, str], use: Use) -> Array:
        init, shape = matrix_init(block, inputs[0], outputs[0], use), (*lead, inputs[0], outputs[0])
        axes: Axes = (*lead_axes, inputs[1], outputs[1])
        return declare(module, name, init, shape, axes, "matrix", block.param_dtype, (inputs[1],), (outputs[1],))

    def bias(name: str, size: tuple[int, str]) -> Array | None:
        if not block.ffn_bias:
            return None
        shape, axes = (*lead, size[0]), (*lead_axes, size[1])
        return declare(module, name, nn.initializers.zeros, shape, axes, "bias", block.param_dtype)

    beta = None
    if block.activation == "swish_learned":
        start = nn.initializers.constant(block.swish_beta)
        beta = declare(module, "beta", start, lead, lead_axes, "scale", block.param_dtype)
    return FFNParams(
        w_gate=weight("w_gate", D, F, "deep") if block.glu else None,
        w_up=weight("w_up", D, F, "deep"),
        w_down=weight("w_down", F, D, "out"),
        b_gate=bias("b_gate", F) if block.glu else None,
        b_up=bias("b_up", F),
        b_down=bias("b_down", D),
        beta=beta,
    )


def declared_ffn(
    module: nn.Module, x: Float[Array, "B T D"], block: BlockConfig, d_ff: int, constrain: Constrain
) -> Float[Array, "B T D"]:
    """`ffn` in the compute dtype, of parameters that `module` declares."""
    dtype = jnp.dtype(block.compute_dtype)
    params = declare_ffn(module, block, d_ff).astype(dtype)
    pin = lambda units: constrain(units, ("batch", "length", "mlp"))  # noqa: E731
    return ffn(x.astype(dtype), params, hidden_units(block), pin)


class FFN(nn.Module):
    """Holds the parameters of `ffn`.

    Attributes:
        block: activation, gating, biases, initializers and dtypes.
        d_ff: F, the hidden width.
        constrain: pins activations to the mesh.
    """

    block: BlockConfig
    d_ff: int
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return declared_ffn(self, x, self.block, self.d_ff, self.constrain)
