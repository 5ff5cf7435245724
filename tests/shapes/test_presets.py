"""Every preset with every mixture, at reduced size: shapes, finite numbers, and one compilation per step."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.train import tiny
from zoo.config import ModelConfig, as_mixture
from zoo.laws import reduced
from zoo.layers.logical import is_spec
from zoo.models.decoder import Decoder
from zoo.models.presets import preset_names

MIXTURES = ("none", "sparse", "dense", "soft")
B = 8


def small(name: str, mixture: str) -> ModelConfig:
    """The preset with every kind of block that it has, once."""
    config = zoo.preset(name)
    config = reduced(dataclasses.replace(config, moe=as_mixture(config.moe, mixture)))
    float32 = {"param_dtype": "float32", "compute_dtype": "float32"}
    return dataclasses.replace(config, n_layers=len(config.prefix) + len(config.pattern), **float32)


def cases() -> dict[ModelConfig, str]:
    """Config -> names; sizes of one family are the same model when reduced."""
    found: dict[ModelConfig, str] = {}
    for mixture in MIXTURES:
        for name in preset_names():
            found.setdefault(small(name, mixture), f"{name}-{mixture}")
    return found


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for config, name in cases().items()])
def test_training_and_decoding(config):
    setup = tiny.Setup(dataclasses.replace(tiny.experiment("none"), model=config), jax.devices()[:1])
    state = setup.state()
    chex.assert_trees_all_equal_shapes(state.params, jax.tree.map(lambda s: s.value, setup.specs, is_leaf=is_spec))
    step = jax.jit(chex.assert_max_traces(setup.step, n=1))
    for n in range(2):
        state, metrics = step(state, tiny.batch(n, B))
    chex.assert_tree_all_finite((state.params, metrics))
    chex.assert_shape(metrics["train/loss"], ())
    if config.moe is not None:
        moe_layers = sum(b.moe is not None for stage in config.expand() for b in stage.blocks * stage.repeat)
        chex.assert_shape(metrics["moe/load"], (moe_layers, None))
        chex.assert_trees_all_close(metrics["moe/load"].sum(-1), jnp.ones(moe_layers), atol=1e-5)
    decode(setup.model, state.params)


def decode(model: Decoder, params: dict) -> None:
    """A prompt and three more tokens."""
    tokens = tiny.batch(0, B).tokens
    out = model.apply({"params": params}, tokens[:2, :4], cache=model.init_cache(2, 8))
    chex.assert_shape(out.logits, (2, 4, model.config.vocab_size))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(token, cache):
        out = model.apply({"params": params}, token, cache=cache)
        return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out

    token = tokens[:2, 4:5]
    for _ in range(3):
        token, out = step(token, out.cache)
        chex.assert_shape(out.logits, (2, 1, model.config.vocab_size))
    chex.assert_tree_all_finite(out.logits)
    chex.assert_trees_all_equal(out.cache.length, jnp.full(2, 7, jnp.int32))
