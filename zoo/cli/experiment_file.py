"""Experiments from files: Python that defines `config = Experiment(...)`."""

import os
import pathlib
import runpy
import sys
import traceback

from zoo.config import ConfigError, Experiment, nearest


def load_experiment(path: str) -> Experiment:
    """The `config` that the file `path` defines.

    The file runs as `python FILE` would run it, so it can import its neighbours by name.

    Raises:
        ConfigError: the file cannot be read or fails (names the line), or defines no such `config`.
    """
    file = pathlib.Path(path)
    if file.is_dir():
        raise ConfigError(f"--config {path} is a folder; give a Python file that defines config = Experiment(...)")
    if not file.is_file():
        others = [str(other) for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(f"--config {path}: there is no such file{nearest(path, others)}")
    names = _run(file)
    if "config" not in names:
        raise ConfigError(f"--config {path}: the file defines no `config`; end it with config = Experiment(...)")
    if not isinstance(names["config"], Experiment):
        found = type(names["config"]).__name__
        raise ConfigError(f"--config {path}: its `config` is of type {found}; it must be a zoo.Experiment")
    return names["config"]


def _run(file: pathlib.Path) -> dict[str, object]:
    folder = str(file.resolve().parent)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        return runpy.run_path(str(file))
    except Exception as error:
        raise ConfigError(f"--config {file}{_place(error, file)}: {_words(error)}") from error
    finally:
        sys.path.remove(folder)
        # Another folder may have neighbours of the same names. What lies deeper is not one: an environment, or zoo.
        for name in set(sys.modules) - before:
            place = getattr(sys.modules[name], "__file__", None)
            if place is not None and os.path.dirname(place) == folder:
                del sys.modules[name]


def _place(error: Exception, file: pathlib.Path) -> str:
    """`, line N`: where in the file it failed, or called what failed."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""


def _words(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"
