"""Published architectures as data: one small file a family."""

import dataclasses
from typing import Any

from zoo.config import ConfigError, Experiment, ModelConfig, TrainConfig, nearest
from zoo.models.presets import (
    bloom,
    deepseek,
    falcon,
    gemma,
    gpt,
    gpt_oss,
    llama,
    mistral,
    olmoe,
    openmoe,
    opt,
    palm,
    pythia,
    qwen,
    switch,
)
from zoo.models.presets.preset import Preset, Recipe

__all__ = ["Preset", "Recipe", "find_preset", "preset", "preset_names", "recipe"]

_FAMILIES = (
    gpt,
    opt,
    bloom,
    llama,
    mistral,
    qwen,
    olmoe,
    deepseek,
    gpt_oss,
    gemma,
    falcon,
    pythia,
    palm,
    openmoe,
    switch,
)
_PRESETS: dict[str, Preset] = {name: found for family in _FAMILIES for name, found in family.PRESETS.items()}


def preset_names() -> tuple[str, ...]:
    """The names of all presets, family by family."""
    return tuple(_PRESETS)


def find_preset(name: str) -> Preset:
    """A preset with its source, recipe and note.

    Raises:
        ConfigError: there is no such preset; names the nearest.
    """
    if name not in preset_names():
        hint = nearest(str(name).lower(), _PRESETS) or f"; there are {', '.join(_PRESETS)}"
        raise ConfigError(f"preset={name!r} is not the name of a preset{hint}")
    return _PRESETS[name]


def preset(name: str, **overrides: Any) -> ModelConfig:
    """A published architecture, with any fields of ModelConfig replaced: `preset("mixtral-8x7b", n_layers=2)`.

    Fewer layers are the first ones; where the mixture comes only after them, it is refused, and `moe=None` is a way.

    What an override leaves without effect goes back to its default: `position="alibi"` drops the rope_theta.

    Computation is in bfloat16 and parameters are float32, the usual way to train; both can be replaced.

    Raises:
        ConfigError: there is no such preset (names the nearest), no such field, or values that cannot work.
    """
    model = find_preset(name).model
    fields = {field.name for field in dataclasses.fields(model)}
    for field in overrides:
        if field not in fields:
            raise ConfigError(f"preset: {field} is not a field of ModelConfig{nearest(field, fields)}")
    return model.changed(**overrides)


def recipe(name: str) -> Experiment:
    """A published architecture with the optimizer, batch and steps of its authors: `recipe("llama-7b")`.

    A batch holds the published number of tokens in rows of the model's context, rounded to whole rows, and there are
    as many steps as bring the published tokens in all. Data and mesh are the defaults, and not those of the authors.

    Raises:
        ConfigError: there is no such preset (names the nearest), or the zoo lacks a part of its recipe.
    """
    found = find_preset(name)
    if found.recipe is None or found.optimizer is None:
        whole = ", ".join(other for other, p in _PRESETS.items() if p.recipe and p.optimizer)
        raise ConfigError(f"preset={name!r} comes without a recipe that the zoo can follow; there are those of {whole}")
    length = found.model.context_length
    batch_size = round(found.recipe.batch_tokens / length)
    train = TrainConfig(steps=round(found.recipe.tokens / (batch_size * length)), batch_size=batch_size)
    return Experiment(name, found.model, optimizer=found.optimizer, train=train)
