"""A zoo of large language models: pure functions of arrays, and the Flax modules that hold their parameters."""

import importlib
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
    from zoo.infer.generate import generate
    from zoo.laws import check
    from zoo.models.decoder import build
    from zoo.rundir import load
    from zoo.train.loop import train

# These import JAX; the command line answers wrong input without it.
_LAZY = {
    "build": "zoo.models.decoder",
    "check": "zoo.laws",
    "generate": "zoo.infer.generate",
    "load": "zoo.rundir",
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
    "generate",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
