"""Normalization."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.config import BlockConfig, Dtype, ModelConfig
from zoo.config import Norm as Kind
from zoo.layers.logical import declare


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float, bias: Float[Array, "D"] | None = None
) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) * scale (+ bias) over the last axis, in float32; the result has x's dtype.

    Source: RMSNorm, arXiv 1910.07467, equation 4.
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return _affine(x32 * inverse, scale, bias).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float, bias: Float[Array, "D"] | None = None
) -> Float[Array, "... D"]:
    """(x - mean) / sqrt(var + eps) * scale (+ bias) over the last axis, in float32; the result has x's dtype.

    Source: layer normalization, arXiv 1607.06450, equation 3, with the population variance.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return _affine(centred * inverse, scale, bias).astype(x.dtype)


def _affine(x: Array, scale: Array, bias: Array | None) -> Array:
    y = x * scale.astype(jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


NORMS = {"rmsnorm": rms_norm, "layernorm": layer_norm}


class Norm(nn.Module):
    """Holds the scale and the bias, as far as it has them, of a norm over the last dimensions.

    Attributes:
        kind: which norm.
        eps: added to the mean square or variance.
        unit_offset: multiply by 1 + scale, which then starts at 0 (Gemma, arXiv 2403.08295).
        bias: add a bias.
        param_dtype: of the parameters.
        axes: logical axes of the dimensions that are normed together.
        scaled: multiply by a learned scale.
    """

    kind: Kind
    eps: float
    unit_offset: bool
    bias: bool
    param_dtype: Dtype
    axes: tuple[str, ...] = ("embed",)
    scaled: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        shape = x.shape[-len(self.axes) :]
        flat = x.reshape(*x.shape[: x.ndim - len(shape)], -1)
        scale, bias = jnp.ones(flat.shape[-1:], jnp.float32), None
        if self.scaled:
            start = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
            scale = declare(self, "scale", start, shape, self.axes, "scale", self.param_dtype).reshape(-1)
        # In float32: 1 + scale loses a small scale in bfloat16.
        scale = scale.astype(jnp.float32) + 1 if self.unit_offset else scale
        if self.bias:
            bias = declare(self, "bias", nn.initializers.zeros, shape, self.axes, "bias", self.param_dtype).reshape(-1)
        return NORMS[self.kind](flat, scale, self.eps, bias).reshape(x.shape)


def build_norm(config: ModelConfig | BlockConfig, name: str | None = None) -> Norm:
    """The norm of the residual stream that a config describes."""
    parts = (config.norm_unit_offset, config.norm_bias, config.param_dtype)
    return Norm(config.norm, config.norm_eps, *parts, scaled=config.norm_scale, name=name)


def build_qk_norm(block: BlockConfig, axis: str, name: str) -> Norm:
    """The norm of queries or keys [B, T, N, h]: of each head, or over all heads; never with a bias.

    Args:
        axis: logical axis of the heads.
    """
    axes = ("head_dim",) if block.qk_norm == "head" else (axis, "head_dim")
    parts = (block.norm_unit_offset, False, block.param_dtype, axes)
    return Norm(block.norm, block.norm_eps, *parts, scaled=block.norm_scale, name=name)
