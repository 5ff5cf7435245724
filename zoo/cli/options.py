"""Command-line options over the values of a config: every field of every section is one, by its path.

tyro reads the values and writes the help. Before that the options are looked at here, so that a mistake is
answered in one sentence that names the option, the value and the nearest thing that would do.
"""

import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from zoo.config import MIXTURES, ConfigError, Experiment, nearest

Command = TypeVar("Command")


class OptionError(ValueError):
    """An option that there is not, or a value that it cannot take."""


class _Refused(Exception):
    """Carries a ConfigError out through tyro, which frames ValueErrors in a box of its own."""


def parse(default: Command, args: Sequence[str], prog: str) -> Command:
    """`default` with the values that `args` give; prints the help and exits where they ask for it.

    Raises:
        OptionError: an unknown option, a missing value or one of another type.
        ConfigError: values that cannot work together.
    """
    registry = ConstructorRegistry()
    registry.struct_rule(_struct)
    wants_help = not {"-h", "--help"}.isdisjoint(args)
    checked = ["--help"] if wants_help else list(_checked(args, options(default)))
    try:
        return tyro.cli(
            type(default),
            default=default,
            args=checked,
            prog=prog,
            description=_heading(default),
            registry=registry,
            config=(tyro.conf.FlagConversionOff,),
        )
    except _Refused as refused:
        raise refused.args[0] from None


def options(value: Any, hint: Any = None, path: str = "") -> dict[str, Any]:
    """`--path.of.field` -> its type hint, for every field below `value`; None where no option can set it."""
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(value):
        for name, field_hint, item in _fields(value):
            # An experiment's options stand beside those of the command, without a prefix.
            below = path if isinstance(item, Experiment) else f"{path}.{name}".removeprefix(".")
            found |= options(item, field_hint, below)
    elif _is_configs(value):
        for i, item in enumerate(value):
            found |= options(item, None, f"{path}.{i}")
    else:
        found[_option(path)] = None if _holds_configs(hint) else hint
    return found


def attribute_texts(cls: type) -> dict[str, str]:
    """Field -> its meaning, from the "Attributes:" sections of the docstrings of `cls` and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, section = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")
        for name, text in re.findall(r"^    (\w+): (.+(?:\n     +.+)*)", section, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


def _fields(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type hint and value of each field."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        yield field.name, hints[field.name], getattr(config, field.name)


def _is_configs(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and dataclasses.is_dataclass(value[0])


def _holds_configs(hint: Any) -> bool:
    """Whether values of this type are configs or tuples of them, which no single option can give."""
    return dataclasses.is_dataclass(hint) or any(map(_holds_configs, typing.get_args(hint)))


def _struct(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Tells tyro of a config: its fields with their texts, and how to construct it."""
    if not dataclasses.is_dataclass(info.type):
        return None
    texts = attribute_texts(info.type)
    fields = tuple(
        StructFieldSpec(name, _for_tyro(hint, value), value, _heading(value) or texts.get(name))
        for name, hint, value in _fields(info.default)
    )
    return StructConstructorSpec(functools.partial(_construct, info.type), fields)


def _construct(cls: type, **values: Any) -> Any:
    try:
        return cls(**values)
    except ConfigError as error:
        raise _Refused(error) from None


def _heading(config: Any) -> str | None:
    """What heads the options of a config: the first paragraph of its docstring; None for a single value."""
    if not dataclasses.is_dataclass(config):
        return None
    return " ".join(inspect.cleandoc(type(config).__doc__).split("\n\n")[0].split())


def _for_tyro(hint: Any, value: Any) -> Any:
    """The type as tyro shall see it: the section that is there instead of a union, one option per list item."""
    if isinstance(value, Experiment):
        return Annotated[Experiment, tyro.conf.arg(name="")]
    if dataclasses.is_dataclass(value):
        return type(value)
    if _holds_configs(hint) and not _is_configs(value):
        return Annotated[Any, tyro.conf.Fixed]
    if typing.get_origin(hint) is tuple and not _is_configs(value):
        return Annotated[hint, tyro.conf.UseAppendAction]
    return hint


def _checked(args: Sequence[str], known: dict[str, Any]) -> Iterator[str]:
    """The arguments as `--option=value`, each one looked at."""
    rest = list(args)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise OptionError(f"{name!r} is no option; options are written --name value, and --help lists them")
        name = name.replace("_", "-")
        if name not in known:
            raise OptionError(_unknown(name, known))
        if known[name] is None:
            raise OptionError(f"{name} cannot be written as an option; set it in the config file")
        follows = rest[0] if rest and not rest[0].startswith("--") else None
        if not equals:
            if follows is not None:
                value = rest.pop(0)
            elif bool in _alternatives(known[name]):
                value = "True"
            else:
                raise OptionError(f"{name} needs a value; one that begins with dashes is written {name}=VALUE")
        if not _fits(known[name], value):
            raise OptionError(f"{name} {value!r} is not {_expected(known[name], value)}")
        yield f"{name}={value}"


def _option(path: str) -> str:
    return "--" + path.replace("_", "-")


def _unknown(name: str, names: dict[str, Any]) -> str:
    """Why there is no such option, with the nearest one."""
    positive = re.sub(r"([.-])no-([^.]+)$", r"\1\2", name)
    if positive in names and bool in _alternatives(names[positive]):
        return f"there is no option {name}; did you mean {positive} False?"
    field = name.removeprefix("--model.moe.").replace("-", "_")
    kinds = [kind for kind, cls in MIXTURES.items() if field in {f.name for f in dataclasses.fields(cls)}]
    if name.startswith("--model.moe.") and kinds and _option(f"model.moe.{field}") not in names:
        return f"{name} is an option of a mixture that this model does not have; give --mixture {' or '.join(kinds)}"
    leaves = [known for known in names if known.removeprefix("--").split(".")[-1] == name.removeprefix("--")]
    found = leaves[:1] or difflib.get_close_matches(name, names, n=1)
    return f"there is no option {name}" + (f"; did you mean {found[0]}?" if found else "; --help lists them")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(hint: Any, text: str) -> bool:
    """Whether `text` can be read as the type `hint`."""
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            if text in map(str, typing.get_args(kind)):
                return True
        elif typing.get_origin(kind) is tuple:
            # Given once for every item.
            if _fits(typing.get_args(kind)[0], text):
                return True
        elif kind is type(None):
            if text == "None":
                return True
        elif kind is bool:
            if text in ("True", "False"):
                return True
        elif kind in (int, float):
            try:
                kind(text)
            except ValueError:
                continue
            return True
        else:
            return True
    return False


def _expected(hint: Any, text: str) -> str:
    """What `hint` admits, in words; names the nearest choice."""
    parts = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            choices = list(map(str, typing.get_args(kind)))
            parts.append(f"one of {', '.join(choices)}{nearest(text, choices)}")
        elif typing.get_origin(kind) is tuple:
            parts.append(_expected(typing.get_args(kind)[0], text) + ", and given again for each further one")
        else:
            words = {int: "a whole number", float: "a number", bool: f"True or False{nearest(text, ('True', 'False'))}"}
            parts.append((words | {type(None): "None"})[kind])
    return " or ".join(parts)
