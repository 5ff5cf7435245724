"""The running mean of the parameters: its formula, skipped steps, meshes, and what uses it."""

import jax
import jax.numpy as jnp
import numpy as np

import zoo
from tests.train import tiny
from zoo.config import DataConfig, Experiment, ModelConfig, OptimizerConfig, SparseConfig, TrainConfig
from zoo.train.state import evaluated
from zoo.train.step import mean_of

DECAY = 0.75


def setup(**mesh):
    settings = tiny.experiment(optimizer={"ema_decay": DECAY}, mesh=mesh)
    n = int(np.prod([n for name, n in mesh.items() if name != "zero"])) if mesh else 1
    return tiny.Setup(settings, jax.devices()[:n])


def test_it_follows_the_parameters_and_evaluation_uses_it():
    s = setup()
    state = s.state()
    expected = jax.tree.map(np.asarray, state.params)
    for n in range(3):
        state, _ = s.step(state, tiny.batch(n))
        params = jax.tree.map(np.asarray, state.params)
        expected = jax.tree.map(lambda mean, p: DECAY * mean + (1 - DECAY) * p, expected, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), state.ema, expected)
    assert evaluated(state)["final_norm"]["scale"] is not state.params["final_norm"]["scale"]
    jax.tree.map(np.testing.assert_array_equal, evaluated(state), state.ema)
    assert evaluated(state._replace(ema=None)) is state.params


def test_a_skipped_step_does_not_move_it():
    s = setup()
    state, _ = s.step(s.state(), tiny.batch(0))
    before = jax.tree.map(np.asarray, state.ema)
    broken = state._replace(params=jax.tree.map(lambda p: p.at[..., 0].set(jnp.nan), state.params))
    after, metrics = s.step(broken, tiny.batch(1))
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, after.ema, before)


def test_it_lies_where_the_optimizer_does_and_is_the_same_on_a_mesh():
    alone, split = setup(), setup(data=1, fsdp=4, tensor=2, zero=1)
    one, other = (s.run(2)[0].ema for s in (alone, split))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, other)
    of_mean = split.layout.state.ema["stage_0"]["block_0"]["attention"]["w_q"].spec
    assert "fsdp" in of_mean and "fsdp" not in split.layout.state.params["stage_0"]["block_0"]["attention"]["w_q"].spec


def test_a_selection_bias_is_taken_as_it_is():
    model = tiny.model_config(moe={"selection_bias": True})
    specs = zoo.build(model).abstract_params()
    ones = jax.tree.map(lambda s: jnp.ones(s.shape), specs, is_leaf=lambda s: hasattr(s, "axes"))
    mean = mean_of(jax.tree.map(jnp.zeros_like, ones), ones, DECAY, specs)["stage_0"]["block_0"]["moe"]["router"]
    assert float(mean["selection_bias"].min()) == 1 and float(mean["w"].max()) == 1 - DECAY


def test_a_run_saves_it_and_what_is_loaded_is_the_mean(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a tree has leaves and roots. " * 200)

    def experiment(steps, directory):
        return Experiment(
            "x",
            ModelConfig(context_length=16, d_model=16, n_layers=1, n_heads=2, moe=SparseConfig(n_experts=2, d_ff=16)),
            DataConfig(path=str(text), tokenizer="bytes", cache_dir=str(tmp_path / "cache")),
            OptimizerConfig(ema_decay=0.9, warmup_steps=1),
            TrainConfig(dir=str(tmp_path / directory), steps=steps, batch_size=8, tensorboard=False, save_every=2),
        )

    zoo.train(experiment(4, "whole"))
    loaded = zoo.load(tmp_path / "whole").params
    plain = experiment(4, "plain")
    zoo.train(Experiment("x", plain.model, plain.data, OptimizerConfig(warmup_steps=1), plain.train))
    last = zoo.load(tmp_path / "plain").params
    apart = [float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(last), strict=True)]
    assert max(apart) > 1e-4, "the mean is not the newest parameters"
