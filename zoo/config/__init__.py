"""What an experiment is: frozen dataclasses, validated on construction.

Field names are the words of the field (`d_model, n_heads, top_k, ...`). A value of None means "derived
from the others", so that overriding one field never leaves a stale copy in another; `ModelConfig.expand`
resolves every derived value, once, into the stages of blocks that the layers read.
"""

from zoo.config.block import Activation, Block, BlockConfig, Dtype, Norm, Stage
from zoo.config.experiment import DataConfig, Experiment, MeshConfig, OptimizerConfig, Source, TrainConfig
from zoo.config.mixture import MIXTURES, DenseConfig, Mixture, MixtureConfig, SoftConfig, SparseConfig, as_mixture
from zoo.config.model import ModelConfig, Remat
from zoo.config.position import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from zoo.config.section import ConfigError, nearest
from zoo.config.serialize import flat, from_dict, to_dict

__all__ = [
    "MIXTURES",
    "Activation",
    "Block",
    "BlockConfig",
    "ConfigError",
    "DataConfig",
    "DenseConfig",
    "Dtype",
    "DynamicNTKScaling",
    "Experiment",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MeshConfig",
    "Mixture",
    "MixtureConfig",
    "ModelConfig",
    "Norm",
    "OptimizerConfig",
    "Remat",
    "RopeScaling",
    "SoftConfig",
    "Source",
    "SparseConfig",
    "Stage",
    "TrainConfig",
    "YarnScaling",
    "as_mixture",
    "flat",
    "from_dict",
    "nearest",
    "to_dict",
]
