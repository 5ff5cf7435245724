"""A zoo of large language models: pure functions of arrays, and the Flax modules that hold their parameters."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zoo.config import (
    Block,
    ConfigError,
    DataConfig,
    DenseConfig,
    Experiment,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    SoftConfig,
    SparseConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from zoo.describe.compare import compare
    from zoo.describe.report import describe
    from zoo.infer.generate import generate
    from zoo.laws import check
    from zoo.models.decoder import build
    from zoo.models.presets import preset, recipe
    from zoo.rundir import load
    from zoo.trace.record import trace
    from zoo.train.loop import train

# These import JAX; the command line answers wrong input without it.
_LAZY = {
    "build": "zoo.models.decoder",
    "check": "zoo.laws",
    "compare": "zoo.describe.compare",
    "describe": "zoo.describe.report",
    "generate": "zoo.infer.generate",
    "load": "zoo.rundir",
    "preset": "zoo.models.presets",
    "recipe": "zoo.models.presets",
    "trace": "zoo.trace.record",
    "train": "zoo.train.loop",
}

__all__ = [
    "Block",
    "ConfigError",
    "DataConfig",
    "DenseConfig",
    "Experiment",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "SoftConfig",
    "SparseConfig",
    "TrainConfig",
    "build",
    "check",
    "compare",
    "describe",
    "generate",
    "load",
    "preset",
    "recipe",
    "trace",
    "train",
]


class _Room(ModuleType):
    """A room that has the name of its function and can be called: zoo.train(...) is zoo.train.loop.train(...)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function(self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Zoo(ModuleType):
    """The package: whoever imports a room of such a name, and when, `zoo.NAME` can be called."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LAZY and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Zoo


def _function(name: str) -> Any:
    return getattr(importlib.import_module(_LAZY[name]), name)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    return _function(name)


def __dir__() -> list[str]:
    return __all__
