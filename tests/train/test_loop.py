"""Whole runs of a model so small that they take seconds: on all 8 devices, as in the other tests."""

import dataclasses
import os
import random
import shutil
import signal
import time
import types

import jax
import numpy as np
import pytest

from tests.train.records import assert_equal_runs, numbers
from zoo.checkpoint import CheckpointError, Checkpoints
from zoo.config import ConfigError, DataConfig, DenseConfig, Experiment, ModelConfig, OptimizerConfig, TrainConfig
from zoo.data.sources import DataError
from zoo.rundir import RunDir, RunError, load
from zoo.train import loop
from zoo.train.evaluate import evaluate
from zoo.train.loop import TrainingError, train
from zoo.train.metrics import MetricsFile, read_rows
from zoo.train.parts import assemble
from zoo.train.state import TrainState
from zoo.train.step import make_eval_step

STEPS, SAVE_EVERY = 12, 4
pytestmark = pytest.mark.xdist_group("loop")  # one worker, so that the undisturbed run is made once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    words = random.Random(0).choices(["tree", "leaf", "root", "branch", "seed", "soil"], k=1500)
    (folder / "text.txt").write_text(" ".join(words))
    return folder


def settings(folder, name="run", optimizer=None, **train):
    plan = {"steps": STEPS, "batch_size": 8, "log_every": 2, "eval_every": 8, "save_every": SAVE_EVERY, "keep_last": 9}
    sample = {"sample_every": STEPS, "sample_prompt": "tree ", "sample_tokens": 4}
    return Experiment(
        name="tiny",
        model=ModelConfig(
            context_length=16, d_model=16, n_layers=1, n_heads=2, dropout=0.1, moe=DenseConfig(n_experts=2, d_ff=16)
        ),
        data=DataConfig(path=str(folder / "text.txt"), tokenizer="bytes", cache_dir=str(folder / "cache")),
        optimizer=OptimizerConfig(**{"learning_rate": 1e-2, "warmup_steps": 2} | (optimizer or {})),
        train=TrainConfig(**{"dir": str(folder / name)} | plan | sample | train),
    )


@pytest.fixture(scope="module")
def whole(folder):
    """A run that nothing disturbed."""
    return train(settings(folder))


def test_a_run_leaves_everything_in_its_directory(whole):
    assert (whole.step, whole.signal) == (STEPS, None)
    names = {p.name for p in whole.directory.iterdir()}
    assert names == {
        *("config.json", "tokenizer", "checkpoints", "metrics.jsonl", "events", "samples", "loss.png", "experts.png"),
        *("saved", "lock"),
    }
    assert (whole.directory / f"samples/step_{STEPS}.txt").read_text(encoding="utf-8").startswith("tree ")
    assert [int(p.name) for p in sorted((whole.directory / "checkpoints").iterdir())] == [4, 8, 12]


def test_rows_hold_what_applies(whole):
    rows = read_rows(whole.directory / "metrics.jsonl")
    training, validation = ([row for row in rows if name in row] for name in ("train/loss", "val/loss"))
    assert [row["step"] for row in training] == [1, 2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in validation] == [8, 12]
    assert {"train/bits_per_byte", "train/grad_norm", "learning_rate", "moe/load"} <= training[0].keys()
    assert all(row["tokens_per_second"] > 0 for row in training[1:])
    assert training[-1]["train/loss"] < training[0]["train/loss"] - 0.5
    assert training[0]["learning_rate"] == pytest.approx(1e-2 / 2)
    assert whole.validation == {name: validation[-1][name] for name in whole.validation}


def test_validation_is_a_sum_over_sums_for_any_batch_size(folder, whole):
    run = load(whole.directory)
    parts = assemble(settings(folder, eval_batch_size=24))
    params = jax.device_put(run.params, parts.layout.state.params)
    result = evaluate(parts, make_eval_step(parts.model, parts.layout), params)
    cache = parts.corpus.validation
    labels = len(cache.tokens) - (len(cache.offsets) - 1)
    assert result["val/loss"] == pytest.approx(whole.validation["val/loss"], rel=1e-6)  # there 16 rows at a time
    assert result["val/bits_per_byte"] == pytest.approx(result["val/loss"] * labels / np.log(2) / cache.text_bytes)
    assert result["val/perplexity"] == pytest.approx(np.exp(result["val/loss"]))
    assert result["val/gzip_bits_per_byte"] == 8 * cache.gzip_bytes / cache.text_bytes


def test_a_finished_run_says_so_and_does_nothing(folder, whole, capsys):
    before = {p: p.stat().st_mtime_ns for p in whole.directory.rglob("*.png")}
    again = train(settings(folder))
    assert again == whole
    assert "finished: 12 of 12 steps are done; raise --train.steps to go on" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in whole.directory.rglob("*.png")}


def test_a_signal_lets_the_step_end_and_saves(folder, whole, monkeypatch, capsys):
    real, seen = loop.global_batch, []

    def interrupted(*args):
        seen.append(1)
        if len(seen) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "global_batch", interrupted)
        result = train(settings(folder, "signal"))
    assert (result.step, result.signal) == (6, signal.SIGTERM)
    assert f"saved step 6 of {STEPS}" in capsys.readouterr().out
    assert train(settings(folder, "signal")).signal is None
    assert "resumed at step 6" in capsys.readouterr().out
    assert_equal_runs(result.directory, whole.directory, STEPS)


def test_handlers_are_put_back_and_a_second_signal_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with loop._signals() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before


def test_steps_may_be_raised(folder, whole):
    shutil.copytree(whole.directory, folder / "raised")
    assert train(settings(folder, "raised", steps=STEPS + 2)).step == STEPS + 2
    assert RunDir(folder / "raised").record().experiment.train.steps == STEPS + 2
    assert numbers(folder / "raised")[: len(numbers(whole.directory))] == numbers(whole.directory)


def test_updates_that_are_not_finite_stop_the_run_with_its_state_saved(folder):
    experiment = settings(
        folder, "diverged", {"learning_rate": 1e30}, max_bad_steps=3, eval_every=None, save_every=None
    )
    with pytest.raises(
        TrainingError, match=r"train.max_bad_steps=3 updates in a row, the last of them step \d+"
    ) as error:
        train(experiment)
    assert str(error.value).endswith("train again with less than optimizer.learning_rate=1e+30, in another --train.dir")
    rows = read_rows(RunDir(folder / "diverged").metrics)
    assert rows[-1]["train/loss"] is None or rows[-1]["skipped"] > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(load(folder / "diverged").params))


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    """By the method alone: a step would have skipped the update that leads there."""
    parts = types.SimpleNamespace(directory=RunDir(tmp_path), experiment=settings(tmp_path, optimizer={"name": "muon"}))
    this = types.SimpleNamespace(parts=parts)
    with pytest.raises(
        TrainingError, match=r"step 3 is not finite and was not saved.*muon_learning_rate=0.02, in another"
    ):
        zero = jax.numpy.zeros((), int)
        loop.Loop.save(this, TrainState(zero, {"w": jax.numpy.array([1.0, float("nan")])}, {}, zero, zero), 3)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"batch_size": 12}, "train.batch_size=12 in train.micro_batches=1 parts gives 12 rows at a time"),
        (
            {"sample_prompt": "tree" * 9},
            "train.sample_prompt='treetree.* is 37 tokens long, .* model.context_length=16",
        ),
        ({"sample_prompt": "a\udc80"}, r"train.sample_prompt='a.udc80' cannot be gone on from: .* character at 1"),
    ],
)
def test_settings_that_do_not_fit_fail_before_anything_is_written(folder, change, words):
    with pytest.raises(ConfigError, match=words):
        train(settings(folder, "never", **change))
    assert not (folder / "never").exists()


def test_a_prompt_that_nobody_samples_from_may_be_any(folder):
    assert assemble(settings(folder, "never", sample_every=None, sample_prompt="tree" * 9))


def test_a_prompt_needs_a_first_token(folder):
    with pytest.raises(ConfigError, match=r"train.sample_prompt=''"):
        experiment = settings(folder, "never", sample_prompt="")
        train(dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, add_bos=False)))
    assert not (folder / "never").exists()


def test_a_checkpoint_of_another_run_is_not_gone_on_from(folder, whole):
    """Of the same shapes: a folder that somebody copied into a run with another seed."""
    shutil.copytree(whole.directory, folder / "mixed")
    config = RunDir(folder / "mixed").config
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    words = r"step 4 belongs to another experiment \(train.seed is 0 there and 1 here\)"
    with pytest.raises(CheckpointError, match=words):
        train(settings(folder, "mixed", seed=1))
    with pytest.raises(CheckpointError, match=words):
        load(folder / "mixed")


@pytest.mark.parametrize("how", ["moved", "emptied"])
def test_a_run_that_lost_its_checkpoints_is_left_as_it_is(folder, whole, how):
    run = RunDir(folder / how)
    shutil.copytree(whole.directory, run.path)
    run.checkpoints.rename(folder / f"{how}-away")
    if how == "emptied":
        run.checkpoints.mkdir()
    before = run.metrics.read_bytes()
    with pytest.raises(RunError, match=r"has been saved before, but .*checkpoints holds no checkpoint; put .* back"):
        train(settings(folder, how))
    assert run.metrics.read_bytes() == before
    shutil.copytree(folder / f"{how}-away", run.checkpoints, dirs_exist_ok=True)
    assert train(settings(folder, how)).step == STEPS


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(folder, whole, monkeypatch):
    """Though metrics.jsonl has rows, also of the step to be saved."""

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Loop, "save", killed)
        train(settings(folder, "early"))
    assert read_rows(folder / "early/metrics.jsonl")[-1]["step"] == SAVE_EVERY
    train(settings(folder, "early"))
    assert_equal_runs(folder / "early", whole.directory, STEPS)


def test_the_loss_of_the_first_checkpoint_is_noticed_before_the_second(folder, monkeypatch):
    real = MetricsFile.write

    def write(self, row):
        if row["step"] == SAVE_EVERY + 2:
            raise KeyboardInterrupt
        real(self, row)

    def save(self, *args, **options):
        Checkpoints.save(self.checkpoints, args[1], args[0], self.parts.record.values(), wait=True)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MetricsFile, "write", write)
        patch.setattr(loop.Loop, "save", save)
        train(settings(folder, "first"))
    shutil.rmtree(folder / "first/checkpoints")
    with pytest.raises(RunError, match=r"has been saved before"):
        train(settings(folder, "first"))


def test_two_starts_at_once(folder, whole):
    words = rf"process {os.getpid()} on .* is training in .*run; wait for its end"
    with RunDir(whole.directory).held(), pytest.raises(RunError, match=words):
        train(settings(folder))
    assert train(settings(folder)) == whole


def test_a_sample_that_cannot_be_written_costs_no_step(folder, whole, monkeypatch, capsys):
    samples = folder / "sampled/samples"

    def generate(run, prompt, *, seed, **_):
        if seed == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        if seed == 4 and not samples.exists():
            samples.mkdir()
            (samples / "step_4.txt.new").symlink_to("/dev/full")
        return ["é漢"]

    monkeypatch.setattr(loop, "generate", generate)
    experiment = settings(folder, "sampled", sample_every=2)
    with pytest.raises(RunError, match=r"samples/step_4.txt cannot be written \(No space left on device\); put that"):
        train(experiment)
    assert "step 2: no sample, the devices could not write one (RESOURCE_EXHAUSTED: out of memory)\n" in (
        capsys.readouterr().out
    )
    assert list(samples.iterdir()) == []
    train(experiment)
    assert "resumed at step 4" in capsys.readouterr().out
    assert sorted(p.name for p in samples.iterdir()) == [f"step_{n}.txt" for n in (10, 12, 6, 8)]
    assert (samples / "step_12.txt").read_text(encoding="utf-8") == "tree é漢\n"
    assert_equal_runs(folder / "sampled", whole.directory, STEPS)


def test_a_full_disk_ends_a_run_that_goes_on_later(folder, whole, monkeypatch, capsys):
    real = MetricsFile.write

    def write(self, row):
        if row["step"] == 6:
            self._file = open("/dev/full", "a")  # noqa: SIM115
        real(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "write", write)
        with pytest.raises(RunError, match=r"metrics.jsonl cannot be written \(No space left on device\)"):
            train(settings(folder, "full"))
    train(settings(folder, "full"))
    assert "resumed at step 4" in capsys.readouterr().out
    assert_equal_runs(folder / "full", whole.directory, STEPS)


def test_pictures_that_a_kill_has_left_out_are_drawn_at_the_next_start(folder, whole):
    """The last checkpoint comes first."""
    run = RunDir(folder / "undrawn")
    shutil.copytree(whole.directory, run.path)
    run.loss.unlink()
    train(settings(folder, "undrawn"))
    os.utime(run.metrics)
    drawn = run.loss.stat().st_mtime_ns
    train(settings(folder, "undrawn"))
    assert run.loss.stat().st_mtime_ns > drawn


def test_too_little_text_fails_before_anything_is_written(folder):
    (folder / "short.txt").write_text("a short text of less than a window to validate on")
    experiment = settings(folder, "never")
    data = dataclasses.replace(experiment.data, path=str(folder / "short.txt"))
    with pytest.raises(DataError, match=r"validation_fraction"):
        train(dataclasses.replace(experiment, data=data))
    assert not (folder / "never").exists()
