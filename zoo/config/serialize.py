"""Configs as plain dicts, and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from zoo.config.mixture import MIXTURES
from zoo.config.position import ROPE_SCALINGS
from zoo.config.section import ConfigError, nearest


def to_dict(config: Any) -> Any:
    """A config as plain dicts, lists and values; one of several alternatives carries its `kind`."""
    if isinstance(config, tuple):
        return [to_dict(item) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    kind = {"kind": config.kind} if hasattr(config, "kind") else {}
    return kind | {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}


def flat(values: Any, name: str = "") -> dict[str, Any]:
    """{"part.field": value, ...} of what `to_dict` gives, each name behind `name`; a list stays one value."""
    if not isinstance(values, dict):
        return {name: values}
    return {key: v for k, value in values.items() for key, v in flat(value, f"{name}.{k}".strip(".")).items()}


def from_dict(cls: type, values: Mapping[str, Any], path: str = "") -> Any:
    """The inverse of to_dict.

    Raises:
        ConfigError: for a field that `cls` does not have (names the nearest), one that is missing, or values that
            cannot work.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for name in values:
        if name not in known:
            raise ConfigError(f"{path}{name} is not a field of {cls.__name__}{nearest(name, known)}")
    for field in dataclasses.fields(cls):
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}{field.name} is missing; {cls.__name__} needs it")
    return cls(**{name: _from_value(hints[name], value, f"{path}{name}") for name, value in values.items()})


def _from_value(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, Mapping) and "kind" in value:
        kind = value["kind"]
        kinds = _kinds(hint)
        if kind not in list(kinds):
            raise ConfigError(f"{path}.kind={kind!r} is not one of {', '.join(kinds)}{nearest(kind, kinds)}")
        return from_dict(kinds[kind], {k: v for k, v in value.items() if k != "kind"}, f"{path}.")
    if isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
        return from_dict(hint, value, f"{path}.")
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_from_value(typing.get_args(hint)[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    return value


def _kinds(hint: Any) -> dict[str, type]:
    """kind -> class, of the alternatives that a field may hold."""
    alternatives = typing.get_args(hint)
    return {kind: cls for kind, cls in (MIXTURES | ROPE_SCALINGS).items() if cls in alternatives}
