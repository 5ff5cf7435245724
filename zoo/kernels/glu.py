"""The hidden units of a feed-forward network."""

from collections.abc import Callable

from jaxtyping import Array, Float


def glu(
    activation: Callable[[Array], Array], gate: Float[Array, "*N F"] | None, up: Float[Array, "*N F"]
) -> Float[Array, "*N F"]:
    """activation(gate) * up, or activation(up) without a gate (GLU variants, arXiv 2002.05202, equation 5)."""
    return activation(up) if gate is None else activation(gate) * up
