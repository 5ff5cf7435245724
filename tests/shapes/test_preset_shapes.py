"""Every preset with every mixture, at reduced size: shapes, finite numbers, and one compilation per step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.train import tiny
from zoo.config import ModelConfig, as_mixture
from zoo.laws import reduced
from zoo.layers.logical import is_spec
from zoo.models.decoder import Decoder
from zoo.models.presets import preset_names
from zoo.train.state import abstract_state

MIXTURES = ("none", "sparse", "dense", "soft")
B = 8


# What has no bearing on a shape or on the program; equal here, so that models which differ in nothing else run once.
EQUAL = {
    name: getattr(ModelConfig(), name)
    for name in (
        *("param_dtype", "compute_dtype", "norm_eps", "init", "init_std", "out_init", "rope_theta", "rope_scaling"),
        *("logit_z_weight", "dropout", "attention_dropout", "swish_beta", "attention_scale"),
    )
}
EQUAL_MOE = {"balance_weight": 0.01, "z_weight": 0.001}


def small(name: str, mixture: str) -> ModelConfig:
    """The preset with every kind of block that it has, once."""
    config = zoo.preset(name)
    config = reduced(dataclasses.replace(config, moe=as_mixture(config.moe, mixture)))
    if config.moe is not None:
        noise = {"router_jitter": 0.0} if mixture == "sparse" else {}
        config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, **EQUAL_MOE | noise))
    kinds = tuple(dataclasses.replace(block, rope_theta=None) for block in config.pattern)
    pattern = tuple(dict.fromkeys(kinds))
    return dataclasses.replace(config, pattern=pattern, n_layers=len(config.prefix) + len(pattern), **EQUAL)


def cases() -> dict[ModelConfig, str]:
    """Config -> the first preset and mixture that it stands for."""
    found: dict[ModelConfig, str] = {}
    for mixture in MIXTURES:
        for name in preset_names():
            found.setdefault(small(name, mixture), f"{name}-{mixture}")
    return found


CASES = cases()
# The mixture that a preset has itself, or none, is trained; of the others the training step is traced only.
OWN = {small(name, getattr(zoo.preset(name).moe, "kind", "none")) for name in preset_names()}


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for config, name in CASES.items()])
def test_training_and_decoding(config):
    chex.clear_trace_counter()
    setup = tiny.Setup(dataclasses.replace(tiny.experiment("none"), model=config), jax.devices()[:1])
    step = chex.assert_max_traces(lambda state, batch: setup.step(state, batch), n=1)
    if config in OWN:
        params = train(setup, jax.jit(step))
    else:
        params = drawn(setup.specs)
        state = abstract_state(setup.specs, setup.optimizer)
        after, metrics = jax.eval_shape(step, state, tiny.batch(0, B))
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
        check_metrics(config, metrics)
    chex.assert_trees_all_equal_shapes(params, jax.tree.map(lambda s: s.value, setup.specs, is_leaf=is_spec))
    decode(setup.model, params)


def drawn(specs: Any) -> Any:
    """Small random parameters, without compiling an initializer."""
    rng = np.random.default_rng(0)
    draw = lambda s: jnp.asarray(0.1 * rng.standard_normal(s.shape), s.dtype)  # noqa: E731
    return jax.tree.map(draw, specs, is_leaf=is_spec)


def train(setup: tiny.Setup, step: Callable[..., Any]) -> Any:
    """The parameters after two steps."""
    state = setup.state()
    for n in range(2):
        state, metrics = step(state, tiny.batch(n, B))
    chex.assert_tree_all_finite((state.params, metrics))
    check_metrics(setup.settings.model, metrics)
    if setup.settings.model.moe is not None:
        load = metrics["moe/load"].sum(-1)
        chex.assert_trees_all_close(load, jnp.ones_like(load), atol=1e-5)
    return state.params


def check_metrics(config: ModelConfig, metrics: dict[str, Any]) -> None:
    chex.assert_shape(metrics["train/loss"], ())
    if config.moe is not None:
        layers = sum(b.moe is not None for stage in config.expand() for b in stage.blocks * stage.repeat)
        chex.assert_shape(metrics["moe/load"], (layers, None))


def decode(model: Decoder, params: dict) -> None:
    """The shapes of a prompt's pass, and three tokens."""
    tokens = tiny.batch(0, B).tokens
    prefill = lambda tokens, cache: model.apply({"params": params}, tokens, cache=cache)  # noqa: E731
    empty = model.init_cache(2, 8)
    after = jax.eval_shape(prefill, tokens[:2, :4], empty)
    chex.assert_shape(after.logits, (2, 4, model.config.vocab_size))
    chex.assert_trees_all_equal_shapes_and_dtypes(after.cache, empty)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(token, cache):
        out = model.apply({"params": params}, token, cache=cache)
        return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out

    token, cache = tokens[:2, 4:5], empty
    for _ in range(3):
        token, out = step(token, cache)
        cache = out.cache
        chex.assert_shape(out.logits, (2, 1, model.config.vocab_size))
    chex.assert_tree_all_finite(out.logits)
    chex.assert_trees_all_equal(out.cache.length, jnp.full(2, 3, jnp.int32))
