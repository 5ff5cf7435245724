"""What a preset is."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.config import ModelConfig, OptimizerConfig


@dataclass(frozen=True)
class Recipe:
    """How a published model was trained.

    Attributes:
        learning_rate: the peak.
        batch_tokens: tokens per update.
        tokens: tokens in all.
    """

    learning_rate: float
    batch_tokens: float
    tokens: float


@dataclass(frozen=True)
class Preset:
    """A published architecture.

    Attributes:
        model: the architecture.
        source: where it is published.
        recipe: how it was trained, where describe makes use of it.
        note: what is not as published, or not published.
        optimizer: the published update rule and schedule with the recipe's peak, where the zoo has all of it.
    """

    model: ModelConfig
    source: str
    recipe: Recipe | None = None
    note: str = ""
    optimizer: OptimizerConfig | None = None
