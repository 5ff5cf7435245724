"""Metrics to Weights & Biases, where the package is installed and a run asks for it."""

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.config import Experiment, TrainConfig, to_dict
from zoo.train.metrics import scalars


def check_wandb(settings: TrainConfig) -> None:
    """Raises ConfigError where a run asks for Weights & Biases and the package is missing."""
    installed = settings.wandb is None or importlib.util.find_spec("wandb") is not None
    settings.require(installed, "wandb", "needs the package wandb; install it, or leave this at None")


class WandbRun:
    """A place of metrics (`Recorder`): a run of the project `train.wandb`.

    Its id follows from the run directory, so a run that is started again goes on with the same one there. Where the
    service cannot be reached, wandb itself keeps the rows; WANDB_MODE=offline tells it not to try.
    """

    def __init__(self, experiment: Experiment, directory: Path):
        """Begins or resumes the run."""
        import wandb

        place = str(directory.resolve())
        self._run = wandb.init(
            project=experiment.train.wandb,
            name=experiment.name,
            id=hashlib.sha256(place.encode()).hexdigest()[:16],
            resume="allow",
            dir=place,
            config=to_dict(experiment),
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Sends a row's numbers under its step."""
        self._run.log(dict(scalars(row)), step=row["step"])

    def flush(self) -> None:
        """Nothing: wandb sends in the background, and a checkpoint promises metrics.jsonl alone."""

    def close(self) -> None:
        """Returns when everything is sent or kept."""
        self._run.finish()
