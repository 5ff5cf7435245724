"""Weights & Biases, with a stand-in for the package."""

import importlib.util
import sys
import types

import pytest

import zoo
from zoo.config import ConfigError, DataConfig, Experiment, ModelConfig, OptimizerConfig, TrainConfig
from zoo.train.wandb import check_wandb


class Service:
    """What wandb would hold: the settings of each start, and the rows by run."""

    def __init__(self):
        self.starts, self.rows, self.finished = [], [], 0

    def init(self, **settings):
        self.starts.append(settings)
        return self

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


def test_rows_are_sent_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    service = Service()
    module = types.ModuleType("wandb")
    module.init, module.__spec__ = service.init, importlib.util.spec_from_loader("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for steps in (2, 3):
        zoo.train(experiment(tmp_path, steps))
    first, second = service.starts
    assert first["project"] == "trees" and first["resume"] == "allow" and first["config"]["model"]["d_model"] == 16
    assert first["id"] == second["id"] and service.finished == 2
    losses = {step: row["train/loss"] for step, row in service.rows if "train/loss" in row}
    assert set(losses) == {1, 2, 3} and any("val/loss" in row for _, row in service.rows)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.wandb='trees' needs the package wandb; install it, or leave this"):
        check_wandb(experiment(tmp_path, 1).train)
    check_wandb(TrainConfig())
