"""The running mean of the parameters: its formula, skipped steps, meshes, and what uses it."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.train import tiny
from tests.train.records import assert_equal_runs
from zoo.checkpoint import Checkpoints
from zoo.config import DataConfig, Experiment, ModelConfig, OptimizerConfig, TrainConfig
from zoo.data.cache import prepare
from zoo.data.loader import Batch, evaluation_batches
from zoo.objectives import row_losses
from zoo.train.metrics import read_rows
from zoo.train.state import evaluated
from zoo.train.step import make_eval_step, mean_of

DECAY = 0.75


def setup(**mesh):
    settings = tiny.experiment("none", optimizer={"ema_decay": DECAY}, mesh=mesh)
    n = int(np.prod([n for name, n in mesh.items() if name != "zero"])) if mesh else 1
    return tiny.Setup(settings, jax.devices()[:n])


@pytest.fixture(scope="module")
def alone():
    return setup()


def test_it_follows_the_parameters_and_evaluation_uses_it(alone):
    s, state = alone, alone.state()
    expected = jax.tree.map(np.asarray, state.params)
    for n in range(3):
        state, _ = s.step(state, tiny.batch(n))
        params = jax.tree.map(np.asarray, state.params)
        expected = jax.tree.map(lambda mean, p: DECAY * mean + (1 - DECAY) * p, expected, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), state.ema, expected)
    assert evaluated(state)["final_norm"]["scale"] is not state.params["final_norm"]["scale"]
    jax.tree.map(np.testing.assert_array_equal, evaluated(state), state.ema)
    assert evaluated(state._replace(ema=None)) is state.params


def test_a_skipped_step_does_not_move_it(alone):
    s = alone
    state, _ = s.step(s.state(), tiny.batch(0))
    before = jax.tree.map(np.asarray, state.ema)
    broken = state._replace(params=jax.tree.map(lambda p: p.at[..., 0].set(jnp.nan), state.params))
    after, metrics = s.step(broken, tiny.batch(1))
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, after.ema, before)


def test_it_lies_where_the_optimizer_does_and_is_the_same_on_a_mesh(alone):
    split = setup(data=1, fsdp=4, tensor=2, zero=1)
    (one, _), (other, _) = (s.run(2) for s in (alone, split))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one.ema, other.ema)
    of_mean = split.layout.state.ema["stage_0"]["block_0"]["attention"]["w_q"].spec
    assert "fsdp" in of_mean and "fsdp" not in split.layout.state.params["stage_0"]["block_0"]["attention"]["w_q"].spec
    losses = [
        make_eval_step(s.model, s.layout)(evaluated(state), tiny.batch(5))[0]
        for s, state in ((alone, one), (split, other))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_selection_bias_is_taken_as_it_is():
    model = tiny.model_config(moe={"selection_bias": True})
    specs = zoo.build(model).abstract_params()
    ones = jax.tree.map(lambda s: jnp.ones(s.shape), specs, is_leaf=lambda s: hasattr(s, "axes"))
    mean = mean_of(jax.tree.map(jnp.zeros_like, ones), ones, DECAY, specs)["stage_0"]["block_0"]["moe"]["router"]
    assert float(mean["selection_bias"].min()) == 1 and float(mean["w"].max()) == 1 - DECAY


def test_a_run_goes_on_with_its_bits_and_what_is_loaded_is_the_mean(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a tree has leaves and roots. " * 200)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = Experiment(
        "x",
        ModelConfig(context_length=16, d_model=16, n_layers=1, n_heads=2),
        DataConfig(path=str(text), tokenizer="bytes", cache_dir=str(tmp_path / "cache")),
        OptimizerConfig(ema_decay=0.9, warmup_steps=1),
        TrainConfig(dir=str(whole), steps=4, batch_size=8, tensorboard=False, save_every=2),
    )
    zoo.train(settings)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints/00000004")  # as a kill after step 2 would have left it
    zoo.train(dataclasses.replace(settings, train=dataclasses.replace(settings.train, dir=str(parts))))
    assert_equal_runs(parts, whole, 4)
    run = zoo.load(parts)
    shapes = jax.eval_shape(lambda: run.params)
    mean, last = (Checkpoints(parts / "checkpoints").restore_params(shapes, key=key)[1] for key in ("ema", "params"))
    jax.tree.map(np.testing.assert_array_equal, run.params, mean)
    assert np.abs(mean["final_norm"]["scale"] - last["final_norm"]["scale"]).max() > 0
    (row,) = [row for row in read_rows(parts / "metrics.jsonl") if row["step"] == 4 and "val/loss" in row]
    cache = prepare(run.config.data).validation
    sums = [
        row_losses(run.model, run.params, Batch(*map(jnp.asarray, batch)))
        for batch in evaluation_batches(cache, 16, 16, vocab_size=run.config.model.vocab_size)
    ]
    loss, labels = (float(sum(part.sum() for part in column)) for column in zip(*sums, strict=True))
    np.testing.assert_allclose(row["val/loss"], loss / labels, rtol=1e-5)
