"""Normalization."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.layers.logical import declare


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32; the result has x's dtype.

    Source: RMSNorm, arXiv 1910.07467, equation 4.
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nn.Module):
    """Holds the scale of `rms_norm`.

    Attributes:
        eps: added to the mean square.
        axis: logical axis of the normalized dimension.
        param_dtype: of the scale.
    """

    eps: float
    axis: str = "embed"
    param_dtype: Any = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        width = x.shape[-1:]
        scale = declare(self, "scale", nn.initializers.ones, width, (self.axis,), "scale", self.param_dtype)
        return rms_norm(x, scale, self.eps)
