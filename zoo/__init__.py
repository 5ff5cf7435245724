"""A zoo of large language models: pure functions of arrays, and the Flax modules that hold their parameters."""

from zoo.config import (
    Block,
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
from zoo.models.decoder import build

__all__ = [
    "Block",
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
]
