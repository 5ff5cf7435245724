"""What every part of an experiment can do: check its fields and name them in messages."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any, ClassVar, Literal


class ConfigError(ValueError):
    """A setting that cannot work; the message names the field, its value and what was expected."""


class Section:
    """A part of an experiment; its messages name fields by their full path, as the command line spells them."""

    section: ClassVar[str]

    def named(self, name: str) -> str:
        """`section.field=value`, for messages."""
        return f"{self.section}.{name}={getattr(self, name)!r}"

    def require(self, ok: bool, name: str, expected: str) -> None:
        """Raises ConfigError unless `ok`: the field `name` is not what was `expected`."""
        if not ok:
            raise ConfigError(f"{self.named(name)} {expected}")

    def require_at_least(self, low: float, *names: str) -> None:
        """Raises ConfigError where a field that is set lies below `low`."""
        for name in names:
            value = getattr(self, name)
            self.require(value is None or value >= low, name, f"must be at least {low}")

    def require_between(self, low: float, high: float, *names: str) -> None:
        """Raises ConfigError where a field lies outside [low, high]."""
        for name in names:
            self.require(low <= getattr(self, name) <= high, name, f"must lie between {low} and {high}")

    def require_choices(self) -> None:
        """Raises ConfigError where a field of Literal type holds another value; names the nearest one."""
        for name, hint in typing.get_type_hints(type(self)).items():
            choices = _literals(hint)
            value = getattr(self, name)
            if choices and value not in choices and not (value is None and type(None) in typing.get_args(hint)):
                self.require(False, name, f"is not one of {', '.join(map(str, choices))}{nearest(value, choices)}")


def _literals(hint: Any) -> tuple[Any, ...]:
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(c for p in parts if typing.get_origin(p) is Literal for c in typing.get_args(p))


def nearest(word: Any, choices: Iterable[Any]) -> str:
    """`; did you mean X?` for the choice spelled most like `word`, or nothing."""
    found = difflib.get_close_matches(str(word), [str(c) for c in choices], n=1)
    return f"; did you mean {found[0]}?" if found else ""
