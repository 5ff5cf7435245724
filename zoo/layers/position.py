"""Positions: rotary and its scalings, ALiBi, sinusoidal, learned.

Tables of constants are made in float64 on the host, once per compilation.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from zoo.config import (
    BlockConfig,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
)

Frequencies = Float[np.ndarray, "half"]


def rotary(
    x: Float[Array, "B T N h"],
    positions: Int[Array, "B T"],
    frequencies: Frequencies,
    interleaved: bool = False,
    factor: float = 1.0,
) -> Float[Array, "B T N h"]:
    """Rotates pairs of the first components of every head by the angle position * frequency; the rest stay.

    Angles and rotation are float32; the result has x's dtype. Dot products of rotated queries and keys
    depend on the difference of their positions only.

    Args:
        frequencies: radians per position, one for each pair.
        interleaved: pairs are neighbours (x_2i, x_2i+1) as in the paper; else (x_i, x_i+half) of the turning
            components, as in GPT-NeoX's and LLaMA's published checkpoints.
        factor: multiplies cosine and sine.

    Source: RoPE, arXiv 2104.09864, equation 15.
    """
    half = len(frequencies)
    angles = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequencies, jnp.float32)
    cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)
    turning, rest = jnp.split(x.astype(jnp.float32), [2 * half], axis=-1)
    pairs = turning.reshape(*turning.shape[:-1], half, 2) if interleaved else None
    first, second = (pairs[..., 0], pairs[..., 1]) if interleaved else jnp.split(turning, 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    turned = jnp.stack(rotated, axis=-1).reshape(turning.shape) if interleaved else jnp.concatenate(rotated, axis=-1)
    return jnp.concatenate([turned, rest], axis=-1).astype(x.dtype)


def rope_frequencies(block: BlockConfig) -> tuple[Frequencies, float]:
    """Radians per position of a block's pairs, and the factor of cosine and sine, with its scaling applied.

    Source: theta^(-2i/n) for n turning components, RoPE, arXiv 2104.09864, equation 15.
    """
    n, scaling = block.rotary_dim, block.rope_scaling
    plain = block.rope_theta ** (-np.arange(0, n, 2) / n)
    match scaling:
        case LinearScaling():
            return plain / scaling.factor, 1.0
        case DynamicNTKScaling():
            return _dynamic(n, block.rope_theta, scaling, block.context_length), 1.0
        case YarnScaling():
            factor = scaling.attention_factor
            factor = 0.1 * math.log(scaling.factor) + 1 if factor is None else factor
            return _yarn(plain, block.rope_theta, scaling), factor
        case Llama3Scaling():
            return _llama3(plain, scaling), 1.0
        case LongRopeScaling():
            factor = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))
            return _longrope(plain, scaling, block.context_length), factor
    return plain, 1.0


def _dynamic(n: int, theta: float, scaling: DynamicNTKScaling, context_length: int) -> Frequencies:
    """The base grows with the context: theta (f L / L0 - (f - 1))^(n / (n - 2)); inert up to L0 tokens."""
    length = max(context_length, scaling.original_context)
    growth = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    # One pair alone turns at 1 radian per position whatever the base.
    base = theta * growth ** (n / (n - 2)) if n > 2 else theta
    return base ** (-np.arange(0, n, 2) / n)


def _yarn(plain: Frequencies, theta: float, scaling: YarnScaling) -> Frequencies:
    """Frequencies between two ends of a ramp are blended (YaRN, arXiv 2309.00071, equations 17 to 20)."""
    n = 2 * len(plain)

    def pair(rotations: float) -> float:
        """The pair, as a fraction, that turns so often within the trained context."""
        return n * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    divided = np.clip((np.arange(n // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - divided) + plain / scaling.factor * divided


def _llama3(plain: Frequencies, scaling: Llama3Scaling) -> Frequencies:
    """By wavelength: short ones stay, long ones are stretched, a linear blend in 1 / wavelength between."""
    rotations = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _longrope(plain: Frequencies, scaling: LongRopeScaling, context_length: int) -> Frequencies:
    """Each frequency divided by its own number, from the list that the context asks for."""
    short = context_length <= scaling.original_context
    return plain / np.array(scaling.short_factors if short else scaling.long_factors)


def alibi_slopes(n_heads: int) -> Float[np.ndarray, "H"]:
    """How much of its score a key loses per position of distance, for each head.

    2^(-8 i / H) for i = 1 to H where H is a power of two; else those of the next smaller power, and then every
    other one of the next larger.

    Source: ALiBi, arXiv 2108.12409, section 3, and its published code for other numbers of heads.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * (n_heads - power), 2) / power)
    return np.concatenate([slopes, between])


def sinusoidal(positions: Int[Array, "B T"], d_model: int) -> Float[Array, "B T D"]:
    """sin(p / 10000^(2i/D)) in component 2i, the cosine in 2i + 1; float32.

    Source: arXiv 1706.03762, section 3.5.
    """
    components = np.arange(d_model)
    frequencies = 10_000.0 ** (-2 * (components // 2) / d_model)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.where(components % 2 == 0, jnp.sin(angles), jnp.cos(angles))


def learned(table: Float[Array, "rows D"], positions: Int[Array, "B T"], offset: int = 0) -> Float[Array, "B T D"]:
    """Row position + offset of the table; NaN for a position that has none, never another's row."""
    rows = jnp.where(positions < 0, len(table), positions + offset)
    return jnp.take(table, rows, axis=0, mode="fill", fill_value=jnp.nan)
