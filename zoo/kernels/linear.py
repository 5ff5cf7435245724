"""Products of activations with one matrix."""

import math

from jaxtyping import Array, Float


def linear(x: Float[Array, "..."], w: Float[Array, "..."], n_inputs: int = 1) -> Float[Array, "..."]:
    """x contracted over its last `n_inputs` dimensions with the first ones of w: [*N, *D] and [*D, *F] give [*N, *F].

    As one product of two flat matrices: with more dimensions, XLA's CPU backend takes nearly twice as long for the
    gradients (benchmarks/linear.py).
    """
    rows, width = x.shape[: x.ndim - n_inputs], math.prod(w.shape[:n_inputs])
    return (x.reshape(-1, width) @ w.reshape(width, -1)).reshape(*rows, *w.shape[n_inputs:])


def affine(
    x: Float[Array, "*N D"], w: Float[Array, "D F"] | None, b: Float[Array, "F"] | None
) -> Float[Array, "*N F"] | None:
    """x w + b, or x w without a bias; None without a matrix, as the gate of a network that has none."""
    if w is None:
        return None
    return linear(x, w) if b is None else linear(x, w) + b
