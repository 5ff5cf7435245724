"""Weights & Biases, with a stand-in for the package."""

import importlib.util
import sys
import types

import pytest

import zoo
from zoo.config import ConfigError, DataConfig, Experiment, ModelConfig, OptimizerConfig, TrainConfig
from zoo.rundir import RunDir
from zoo.train.wandb import WandbRun, check_wandb


class WandbError(Exception):
    """The package's own."""


class Service:
    """What wandb would hold: the settings of each start, and the rows by run."""

    def __init__(self, reachable=True):
        self.starts, self.rows, self.finished, self.torn_down = [], [], 0, 0
        self.reachable = reachable

    def init(self, **settings):
        self.starts.append(settings)
        if not self.reachable and settings.get("mode") != "offline":
            raise WandbError("no API key configured\nand much more")
        return self

    def teardown(self):
        self.torn_down += 1

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.finished += 1


def experiment(tmp_path, steps):
    text = tmp_path / "text.txt"
    text.write_text("a tree has leaves and roots. " * 100)
    return Experiment(
        "x",
        ModelConfig(context_length=16, d_model=16, n_layers=1, n_heads=2),
        DataConfig(path=str(text), tokenizer="bytes", cache_dir=str(tmp_path / "cache")),
        OptimizerConfig(warmup_steps=1),
        TrainConfig(
            dir=str(tmp_path / "run"), steps=steps, batch_size=8, log_every=1, tensorboard=False, wandb="trees"
        ),
    )


def install(monkeypatch, service):
    module = types.ModuleType("wandb")
    module.init, module.teardown, module.Error = service.init, service.teardown, WandbError
    module.__spec__ = importlib.util.spec_from_loader("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return service


def test_rows_are_sent_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    service = install(monkeypatch, Service())
    settings = experiment(tmp_path, 3)
    zoo.train(settings)
    WandbRun(settings, RunDir(tmp_path / "run"), print).close()
    first, second = service.starts
    assert first["project"] == "trees" and first["resume"] == "allow" and first["config"]["model"]["d_model"] == 16
    assert first["id"] == second["id"] and service.finished == 2
    losses = {step: row["train/loss"] for step, row in service.rows if "train/loss" in row}
    assert set(losses) == {1, 2, 3} and any("val/loss" in row for _, row in service.rows)


def test_runs_in_equal_places_of_other_machines_are_other_runs(tmp_path, monkeypatch):
    service = install(monkeypatch, Service())
    for _ in range(2):
        directory = RunDir(tmp_path / "run")
        directory.path.mkdir()
        WandbRun(experiment(tmp_path, 1), directory, print)
        directory.wandb_id.unlink()
        directory.path.rmdir()
    first, second = service.starts
    assert first["id"] != second["id"]


def test_without_a_connection_rows_are_kept_and_the_screen_says_so(tmp_path, monkeypatch):
    service, said = install(monkeypatch, Service(reachable=False)), []
    run = WandbRun(experiment(tmp_path, 1), RunDir(tmp_path), said.append)
    run.write({"step": 3, "train/loss": 1.0})
    online, offline = service.starts
    assert offline == online | {"mode": "offline"} and service.torn_down == 1
    assert service.rows == [(3, {"train/loss": 1.0})]
    (line,) = said
    assert line.startswith("no connection to Weights & Biases (no API key configured); metrics are kept in ")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"train.wandb='trees' needs the package wandb; install zoo\[wandb\], or leave this"
    ):
        check_wandb(experiment(tmp_path, 1).train)
    check_wandb(TrainConfig())
