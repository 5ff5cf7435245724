"""Metrics to Weights & Biases, where the package is installed and a run asks for it."""

import importlib.util
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from zoo.config import Experiment, TrainConfig, to_dict
from zoo.rundir import RunDir, replacing, writing
from zoo.train.metrics import scalars


def check_wandb(settings: TrainConfig) -> None:
    """Raises ConfigError where a run asks for Weights & Biases and the package is missing."""
    installed = settings.wandb is None or importlib.util.find_spec("wandb") is not None
    settings.require(installed, "wandb", "needs the package wandb; install zoo[wandb], or leave this at None")


class WandbRun:
    """A place of metrics (`Recorder`): a run of the project `train.wandb`.

    Its id is kept in the run directory, so a run that is started again goes on with the same one there. Where the
    service cannot be reached, or nobody has logged in, the rows are kept in the run directory's folder wandb.
    """

    def __init__(self, experiment: Experiment, directory: RunDir, say: Callable[[str], Any]):
        """Begins or resumes the run.

        Args:
            experiment: becomes the run's config.
            directory: of the run.
            say: is told in one sentence where rows are kept instead of being sent.

        Raises:
            RunError: the id cannot be written.
        """
        import wandb

        settings = {
            "project": experiment.train.wandb,
            "name": experiment.name,
            "id": _run_id(directory),
            "resume": "allow",
            "dir": str(directory.path.resolve()),
            "config": to_dict(experiment),
        }
        try:
            self._run = wandb.init(**settings)
        except wandb.Error as error:
            say(
                f"no connection to Weights & Biases ({str(error).splitlines()[0]}); metrics are kept in "
                f"{directory.path / 'wandb'}, from where `wandb sync` sends them"
            )
            wandb.teardown()  # it holds the id of the start that failed
            self._run = wandb.init(**settings, mode="offline")

    def write(self, row: Mapping[str, Any]) -> None:
        """Sends a row's numbers under its step."""
        self._run.log(dict(scalars(row)), step=row["step"])

    def flush(self) -> None:
        """Nothing: wandb sends in the background, and a checkpoint promises metrics.jsonl alone."""

    def close(self) -> None:
        """Returns when everything is sent or kept."""
        self._run.finish()


def _run_id(directory: RunDir) -> str:
    """The run's id there: what an earlier start has chosen, else a new one."""
    if not directory.wandb_id.exists():
        with replacing(directory.wandb_id) as draft:
            draft.write_text(secrets.token_hex(8), encoding="utf-8")
    with writing(directory.wandb_id):
        return directory.wandb_id.read_text(encoding="utf-8").strip()
