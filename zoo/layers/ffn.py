"""Feed-forward networks: plain, and gated linear units."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.config import Activation, BlockConfig
from zoo.kernels.glu import glu
from zoo.kernels.linear import linear
from zoo.layers.initializers import matrix_init
from zoo.layers.logical import Constrain, declare, unconstrained

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def ffn(
    x: Float[Array, "*N D"],
    w_gate: Float[Array, "D F"] | None,
    w_up: Float[Array, "D F"],
    w_down: Float[Array, "F D"],
    activation: Activation,
    constrain: Callable[[Array], Array] = lambda hidden: hidden,
) -> Float[Array, "*N D"]:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where `w_gate` is None.

    Source: GLU variants, arXiv 2002.05202, equations 5 and 6 ("silu" with a gate is SwiGLU).
    """
    gate = None if w_gate is None else linear(x, w_gate)
    hidden = glu(ACTIVATIONS[activation], gate, linear(x, w_up))
    return linear(constrain(hidden), w_down)


class FFN(nn.Module):
    """Holds the weights of `ffn`.

    Attributes:
        block: activation, gating, initializers and dtypes.
        d_ff: F, the hidden width.
        constrain: pins activations to the mesh.
    """

    block: BlockConfig
    d_ff: int
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        block, dtype = self.block, jnp.dtype(self.block.compute_dtype)
        shape, axes = (x.shape[-1], self.d_ff), ("embed", "mlp")
        init = matrix_init(block, *shape, "deep")

        def weight(name, init, shape, axes):
            w = declare(self, name, init, shape, axes, "matrix", block.param_dtype, axes[:1], axes[1:])
            return w.astype(dtype)

        w_gate = weight("w_gate", init, shape, axes) if block.glu else None
        w_up = weight("w_up", init, shape, axes)
        w_down = weight("w_down", matrix_init(block, *shape[::-1], "out"), shape[::-1], axes[::-1])
        pin = lambda hidden: self.constrain(hidden, ("batch", "length", "mlp"))  # noqa: E731
        return ffn(x.astype(dtype), w_gate, w_up, w_down, block.activation, pin)
