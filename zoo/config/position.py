"""Rotary frequencies for contexts longer than those that a model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zoo.config.section import Section


@dataclass(frozen=True)
class RopeScalingConfig(Section):
    """What the scaling rules share.

    Attributes:
        factor: how many times longer the context becomes.
    """

    factor: float = 1.0

    section: ClassVar[str] = "model.rope_scaling"
    kind: ClassVar[str]

    def __post_init__(self):
        super().__post_init__()
        self.require(self.factor >= 1, "factor", "must be at least 1")


@dataclass(frozen=True)
class LinearScaling(RopeScalingConfig):
    """Every frequency divided by `factor` (position interpolation, arXiv 2306.15595)."""

    kind: ClassVar[str] = "linear"


@dataclass(frozen=True)
class OriginalContext(RopeScalingConfig):
    """What the rules share that know the trained context.

    Attributes:
        original_context: tokens of the context that the model was trained on.
    """

    original_context: int = 4096

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "original_context")


@dataclass(frozen=True)
class DynamicNTKScaling(OriginalContext):
    """A larger base where the model's context_length passes the trained one; nothing where it does not.

    The base follows the static `context_length`, not the length of an input, so that no token's numbers
    depend on how many come after it.
    """

    kind: ClassVar[str] = "dynamic"


@dataclass(frozen=True)
class YarnScaling(OriginalContext):
    """High frequencies kept, low ones divided by `factor`, a ramp between (YaRN, arXiv 2309.00071).

    Attributes:
        beta_fast: rotations over the trained context from which a frequency is kept.
        beta_slow: rotations up to which a frequency is divided.
        truncate: round the ends of the ramp outwards to whole frequencies.
        attention_factor: multiplies cosine and sine; None means 0.1 ln(factor) + 1.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    kind: ClassVar[str] = "yarn"

    def __post_init__(self):
        super().__post_init__()
        self.require(self.beta_slow > 0, "beta_slow", "must be positive")
        factor = self.attention_factor
        self.require(factor is None or factor > 0, "attention_factor", "must be positive, or None")
        self.require(self.beta_fast > self.beta_slow, "beta_fast", f"must be more than {self.named('beta_slow')}")


@dataclass(frozen=True)
class Llama3Scaling(OriginalContext):
    """Short wavelengths kept, long ones stretched by `factor`, a blend between (arXiv 2407.21783, LLaMA 3.1).

    Attributes:
        low_freq_factor: wavelengths above original_context / low_freq_factor are stretched.
        high_freq_factor: wavelengths below original_context / high_freq_factor are kept.
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    kind: ClassVar[str] = "llama3"

    def __post_init__(self):
        super().__post_init__()
        self.require(self.low_freq_factor > 0, "low_freq_factor", "must be positive")
        self.require(
            self.high_freq_factor > self.low_freq_factor,
            "high_freq_factor",
            f"must be more than {self.named('low_freq_factor')}",
        )


@dataclass(frozen=True)
class LongRopeScaling(OriginalContext):
    """A divisor for every frequency, one list within the trained context and one beyond (LongRoPE, arXiv 2402.13753).

    The list follows the static `context_length`. Cosine and sine are multiplied by
    sqrt(1 + ln(factor) / ln(original_context)) with either list, as in the published code of Phi-3.

    Attributes:
        short_factors: divisors for contexts up to original_context, one per rotated pair.
        long_factors: divisors for longer ones.
    """

    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    kind: ClassVar[str] = "longrope"

    def __post_init__(self):
        super().__post_init__()
        for name in ("short_factors", "long_factors"):
            self.require(all(factor > 0 for factor in getattr(self, name)), name, "must all be positive")
        self.require(self.original_context > 1, "original_context", "must be more than 1")


RopeScaling = LinearScaling | DynamicNTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling
ROPE_SCALINGS: dict[str, type[RopeScalingConfig]] = {
    c.kind: c for c in (LinearScaling, DynamicNTKScaling, YarnScaling, Llama3Scaling, LongRopeScaling)
}
