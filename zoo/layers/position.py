"""Positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary(x: Float[Array, "B T N h"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T N h"]:
    """Rotates the pairs (x_i, x_{i + h/2}) of every head by the angle position * theta^(-2i/h).

    Angles and rotation are float32; the result has x's dtype. Dot products of rotated queries and keys
    depend on the difference of their positions only.

    Source: RoPE, arXiv 2104.09864, equation 15, with the halves of a head paired as in GPT-NeoX and LLaMA's
    published checkpoints.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
