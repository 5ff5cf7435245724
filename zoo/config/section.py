"""What every part of an experiment can do: check its fields and name them in messages."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
import types
import typing
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

# Field -> another field, and the values of that one with which the first has an effect.
Needs = dict[str, tuple[str, tuple[Any, ...]]]
# Any value but None, 0 and False.
SET = ("a value",)


# The smallest normal number and the largest; this room does without NumPy.
FLOAT32 = (2.0**-126, (2 - 2.0**-23) * 2.0**127)


class ConfigError(ValueError):
    """A setting that cannot work; the message names the field, its value and what was expected."""


class Section:
    """A part of an experiment; its messages name fields by their full path, as the command line spells them.

    Attributes:
        needs: which fields have an effect only beside certain values of others.
    """

    section: ClassVar[str]
    needs: ClassVar[Needs] = {}

    def __post_init__(self):
        self.require_types()
        self.require_choices()
        self.require_finite()
        self.require_effect()

    def changed(self, **fields: Any) -> Self:
        """`dataclasses.replace`, where a field that has no effect any more goes back to its default."""
        needs = {name: need for name, need in self.needs.items() if name not in fields and need[0] in fields}
        idle = [name for name, (other, values) in needs.items() if not _among(fields[other], values)]
        return dataclasses.replace(self, **{name: _default(self, name) for name in idle}, **fields)

    def named(self, name: str) -> str:
        """`section.field=value`, for messages."""
        return f"{self.section}.{name}={getattr(self, name)!r}"

    def require(self, ok: bool, name: str, expected: str) -> None:
        """Raises ConfigError unless `ok`: the field `name` is not what was `expected`."""
        if not ok:
            raise ConfigError(f"{self.named(name)} {expected}")

    def require_at_least(self, low: float, *names: str) -> None:
        """Raises ConfigError where a field that is set lies below `low`, or is a size or count beyond int32."""
        for name in names:
            value = getattr(self, name)
            self.require(value is None or value >= low, name, f"must be at least {low}")
            self.require(not isinstance(value, int) or value < 2**31, name, "must be less than 2^31")

    def require_between(self, low: float, high: float, *names: str) -> None:
        """Raises ConfigError where a field lies outside [low, high]."""
        for name in names:
            self.require(low <= getattr(self, name) <= high, name, f"must lie between {low} and {high}")

    def require_effect(self) -> None:
        """Raises ConfigError where a field is set that has no effect beside the others, by `needs`."""
        for name, (other, values) in self.needs.items():
            default, wanted = _default(self, name), f"{self.section}.{other}"
            if values is not SET:
                wanted += "=" + " or ".join(map(repr, values))
            self.require(
                getattr(self, name) == default or _among(getattr(self, other), values),
                name,
                f"needs {wanted}, not {self.named(other)}; leave it at {default!r}",
            )

    def require_types(self) -> None:
        """Raises ConfigError where a field holds a value of another type than it declares.

        A whole number where a float is declared becomes one, so that 1 and 1.0 are the same experiment.
        """
        for name, hint in _hints(type(self)).items():
            value, parts = getattr(self, name), _alternatives(hint)
            if float in parts and int not in parts and type(value) is int and abs(value) <= sys.float_info.max:
                object.__setattr__(self, name, float(value))
            elif not any(_is_a(value, part) for part in parts) and not _literals(hint):
                self.require(False, name, f"must be {' or '.join(map(_in_words, parts))}, not {_in_words(type(value))}")

    def require_choices(self) -> None:
        """Raises ConfigError where a field of Literal type holds another value; names the nearest one."""
        for name, hint in _hints(type(self)).items():
            choices, value = _literals(hint), getattr(self, name)
            if choices and not any(_is_a(value, part) for part in _alternatives(hint)):
                self.require(False, name, f"is not one of {', '.join(map(str, choices))}{nearest(value, choices)}")

    def require_finite(self) -> None:
        """Raises ConfigError where a number is infinite, NaN, or so large or small that float32 has none like it."""
        for name in _hints(type(self)):
            value = getattr(self, name)
            numbers = [abs(x) for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, float)]
            finite = all(x <= sys.float_info.max for x in numbers)
            self.require(finite, name, f"must be {'finite numbers' if isinstance(value, tuple) else 'a finite number'}")
            held = all(x == 0 or FLOAT32[0] <= x <= FLOAT32[1] for x in numbers)
            self.require(held, name, "is beyond float32; a number is 0, or from 1.2e-38 to 3.4e38 in size")


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    return bool(value) if values is SET else value in values


def _default(section: Section, name: str) -> Any:
    return type(section).__dataclass_fields__[name].default


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Field -> its type."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _literals(hint: Any) -> tuple[Any, ...]:
    return tuple(c for p in _alternatives(hint) if typing.get_origin(p) is Literal for c in typing.get_args(p))


def _is_a(value: Any, kind: Any) -> bool:
    """Whether `value` is of the type `kind`; True is not the number 1."""
    if typing.get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(item, typing.get_args(kind)[0]) for item in value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _in_words(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        choices = ", ".join(map(repr, typing.get_args(item)))
        return f"a tuple of {choices or item.__name__}"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
    return words.get(kind, f"a {kind.__name__}")


def nearest(word: Any, choices: Iterable[Any]) -> str:
    """`; did you mean X?` for the choice spelled most like `word`, or nothing."""
    found = difflib.get_close_matches(str(word), [str(c) for c in choices], n=1)
    return f"; did you mean {found[0]}?" if found else ""
