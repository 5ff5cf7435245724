"""What is asked of a model beside its parameters."""

import math
from typing import NamedTuple

from zoo.config import Experiment, MeshConfig
from zoo.describe.devices import Device
from zoo.parallel.mesh import mesh_sizes
from zoo.parallel.rules import BATCH_AXES


class Question(NamedTuple):
    """What is asked of a model beside its parameters.

    Attributes:
        length: tokens of a sequence.
        batch_size: sequences on one device, for activations and logits.
        n_devices: devices that share a training run.
        optimizer: name in OptimizerConfig.
        ema: training keeps a running mean of the weights.
        mesh: how the devices stand, with a size for every axis; None for no such question.
        tokens: to train on; None for no such question.
        device: one of `DEVICES`; None for no such question.
        mfu: the share of the device's peak that training reaches.
    """

    length: int
    batch_size: int = 1
    n_devices: int = 8
    optimizer: str = "adamw"
    ema: bool = False
    mesh: MeshConfig | None = None
    tokens: float | None = None
    device: Device | None = None
    mfu: float = 0.4

    @property
    def batch_parts(self) -> int:
        """Devices among which the sequences of a batch are split."""
        return 1 if self.mesh is None else _parts(self.mesh)


def _parts(mesh: MeshConfig) -> int:
    return math.prod(getattr(mesh, axis) for axis in BATCH_AXES)


def question_of(experiment: Experiment, n_devices: int | None = None) -> Question:
    """What an experiment's own settings ask: its context, optimizer, mesh, batch and steps.

    Args:
        n_devices: of which an axis at -1 takes what the others leave; None leaves it one.

    Raises:
        ConfigError: the mesh needs another number of devices.
    """
    config, train = experiment.mesh, experiment.train
    if n_devices is None:
        n_devices = math.prod(size for axis in config.axes if (size := getattr(config, axis)) != -1)
    sizes = dict(zip(config.axes, mesh_sizes(config, n_devices), strict=True))
    mesh = MeshConfig(**sizes, zero=config.zero)
    rows = train.batch_size // train.micro_batches
    length = experiment.model.context_length
    return Question(
        length=length,
        batch_size=math.ceil(rows / _parts(mesh)),
        n_devices=n_devices,
        optimizer=experiment.optimizer.name,
        ema=experiment.optimizer.ema_decay is not None,
        mesh=mesh,
        tokens=float(train.steps * train.batch_size * length),
    )
