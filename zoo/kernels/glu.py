"""The hidden units of a feed-forward network: activations, gates, and gpt-oss's clamped form."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Those without a beta; Swish has one.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def swish(x: Float[Array, "*N"], beta: Float[Array, "..."] | float) -> Float[Array, "*N"]:
    """x sigmoid(beta x); source: arXiv 1710.05941, section 2."""
    return x * jax.nn.sigmoid(beta * x)


@dataclass(frozen=True)
class HiddenUnits:
    """A function of the two products of a feed-forward network; equal for equal choices, so that kernels may hold it.

    Attributes:
        activation: a name in ACTIVATIONS, "swish" or "swish_learned".
        swish_beta: of "swish".
        glu_clamp: c, clamps a gated unit; None for the plain form.
    """

    activation: str
    swish_beta: float = 1.0
    glu_clamp: float | None = None

    def __call__(
        self, gate: Float[Array, "*N F"] | None, up: Float[Array, "*N F"], beta: Float[Array, "..."] | None = None
    ) -> Float[Array, "*N F"]:
        """act(gate) * up, or act(up) without a gate; with a clamp act(min(gate, c)) * (clip(up, -c, c) + 1).

        Args:
            beta: of "swish_learned"; its shape broadcasts.

        Sources: GLU variants, arXiv 2002.05202, equation 5; the clamp, gpt-oss, arXiv 2508.10925.
        """
        if gate is None:
            return self._activate(up, beta)
        if self.glu_clamp is None:
            return self._activate(gate, beta) * up
        gate = jnp.minimum(gate, self.glu_clamp)
        return self._activate(gate, beta) * (jnp.clip(up, -self.glu_clamp, self.glu_clamp) + 1)

    def _activate(self, x: Array, beta: Array | None) -> Array:
        if self.activation == "swish":
            return swish(x, self.swish_beta)
        if self.activation == "swish_learned":
            return swish(x, beta.astype(x.dtype))
        return ACTIVATIONS[self.activation](x)
