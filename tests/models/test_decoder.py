"""The decoder's interface: shapes, positions, cache, parameter tree and errors."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.laws.architectures import ARCHITECTURES
from zoo.kernels.attention import attention
from zoo.layers.attention import init_kv_cache, write_kv_cache
from zoo.layers.logical import ParamSpec, is_spec
from zoo.models.decoder import restarting_positions

TOKENS = jnp.zeros((2, 8), jnp.int32)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def model(request):
    return zoo.build(ARCHITECTURES[request.param])


def test_abstract_tree_describes_the_parameters(model):
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    specs = model.abstract_params()
    chex.assert_trees_all_equal_structs(params, jax.tree.map(lambda spec: spec.value, specs, is_leaf=is_spec))
    for spec, leaf in zip(jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(params), strict=True):
        assert isinstance(spec, ParamSpec)
        assert (spec.shape, spec.dtype, len(spec.axes)) == (leaf.shape, leaf.dtype, leaf.ndim)
        assert bool(spec.inputs and spec.outputs) == (spec.role in {"matrix", "router", "head"})


def test_parameters_are_stacked_under_stage_and_block(model):
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    for i, stage in enumerate(model.config.expand()):
        assert set(params[f"stage_{i}"]) == {f"block_{j}" for j in range(len(stage.blocks))}
        for leaf in jax.tree.leaves(params[f"stage_{i}"]):
            assert leaf.shape[0] == stage.repeat


def test_output(model):
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    out = jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS), params)
    assert out.cache is None
    assert (out.logits.shape, out.logits.dtype) == ((2, 8, 48), jnp.float32)
    for stage, routing in zip(model.config.expand(), out.routing, strict=True):
        for block, stats in zip(stage.blocks, routing, strict=True):
            assert (stats is None) == (block.moe is None)
            if stats is not None:
                assert stats.counts.shape == (stage.repeat, block.moe.n_experts)


def test_hidden_states_times_head_weights_are_the_logits(model):
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 48)
    hidden = jax.jit(lambda p: model.apply({"params": p}, tokens, method="hidden"))(params).hidden
    logits = jax.jit(lambda p: model.apply({"params": p}, tokens))(params).logits
    np.testing.assert_allclose(hidden @ model.head_weights(params).w, logits, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_and_gives_float32_logits():
    config = dataclasses.replace(ARCHITECTURES["sparse"], compute_dtype="bfloat16")
    model = zoo.build(config)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    hidden = jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS, method="hidden"), params).hidden
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS), params).logits.dtype == jnp.float32


def test_positions_restart_in_every_segment():
    segments = jnp.array([[1, 1, 2, 2, 2, 0, 0], [3, 3, 3, 3, 1, 1, 1], [0, 1, 0, 1, 1, 0, 2]])
    # padding is at 0 and, also inside a document, does not count
    expected = [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 1, 2, 0, 0]]
    np.testing.assert_array_equal(restarting_positions(segments), expected)


def test_ring_cache_keeps_the_last_tokens_of_each_row():
    block = dataclasses.replace(ARCHITECTURES["none"].expand()[0].blocks[0], window=3, n_kv_heads=1, head_dim=2)
    cache = init_kv_cache(block, 2, 100)
    assert cache.k.shape == (2, 3, 1, 2)
    k = jnp.arange(20.0).reshape(2, 5, 1, 2)
    positions = jnp.tile(jnp.arange(5), (2, 1))
    written = write_kv_cache(cache, k, k, positions, jnp.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]))
    np.testing.assert_array_equal(written.positions, [[3, 4, 2], [0, 1, -1]])
    np.testing.assert_array_equal(written.k[0, :, 0], k[0, jnp.array([3, 4, 2]), 0])
    np.testing.assert_array_equal(written.k[1, :, 0], [[10, 11], [12, 13], [0, 0]])


def test_a_cache_that_is_full_is_not_taken_for_a_window():
    model = zoo.build(ARCHITECTURES["dense"])  # attends to all tokens
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    step = jax.jit(lambda cache: model.apply({"params": params}, TOKENS[:1, :1], cache=cache))
    cache, finite = model.init_cache(1, 3), []
    for _ in range(5):
        out = step(cache)
        cache = out.cache
        finite.append(bool(jnp.isfinite(out.logits).all()))
    assert finite == [True, True, True, False, False]


def test_a_token_beyond_the_vocabulary_is_not_taken_for_another():
    model = zoo.build(ARCHITECTURES["none"])
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    for token in (48, -1):
        logits = model.apply({"params": params}, jnp.array([[1, token]])).logits
        assert not bool(jnp.isfinite(logits[0, 1]).any())


@pytest.mark.parametrize("position", ["rope", "alibi", "sinusoidal", "learned", "none"])
def test_a_position_outside_of_the_context_is_not_taken_for_one_of_it(position):
    config = dataclasses.replace(ARCHITECTURES["none"], position=position, context_length=8)
    model = zoo.build(config)
    params = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :8])["params"]
    run = jax.jit(lambda positions: model.apply({"params": params}, TOKENS[:1, :2], positions).logits)
    assert bool(jnp.isfinite(run(jnp.array([[6, 7]]))).all())
    for outside in (8, -1):
        assert not bool(jnp.isfinite(run(jnp.array([[3, outside]]))[0, 1]).any())


@pytest.mark.parametrize("name", ["dense", "soft"])
def test_padding_may_hold_what_has_no_vector(name):
    """Tokens and positions that are NaN elsewhere; NaN times the weight 0 that padding has would spread."""
    config = dataclasses.replace(ARCHITECTURES[name], position="learned")
    model = zoo.build(config)
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    segments = jnp.array([[1, 1, 1, 0, 1, 0]])
    run = jax.jit(lambda tokens, positions: model.apply({"params": params}, tokens, positions, segments))
    tokens, positions = jnp.array([[5, 6, 7, 0, 8, 0]]), jnp.array([[0, 1, 2, 0, 3, 0]])
    clean, dirty = (
        run(jnp.where(segments, tokens, t), jnp.where(segments, positions, p)) for t, p in ((0, 0), (-100, 99))
    )
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(clean))


def test_no_norm_stands_between_a_block_that_ends_in_one_and_the_head():
    for placement, expected in {"pre": True, "sandwich": True, "post": False, "deepnorm": False}.items():
        model = zoo.build(dataclasses.replace(ARCHITECTURES["none"], norm_placement=placement))
        assert ("final_norm" in model.abstract_params()) == expected


def test_attention_is_computed_by_what_the_model_is_given():
    config = ARCHITECTURES["none"]
    windows = []

    def attend(q, k, v, *, mask, **settings):
        windows.append(mask.window)
        return attention(q, k, v, mask=mask, **settings)

    model = zoo.build(config, attend=attend)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    windows.clear()
    jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS), params)
    assert set(windows) == {5, None}


def test_errors_come_before_compilation():
    config = ARCHITECTURES["none"]
    model = zoo.build(config)
    with pytest.raises(ValueError, match=r"33 in a row are more than model.context_length=32"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 33), jnp.int32))
    with pytest.raises(ValueError, match=r"length=33 is more than model.context_length=32"):
        model.init_cache(1, 33)
    with pytest.raises(zoo.ConfigError, match=r"model.vocab_size=None: set it to the size of the tokenizer"):
        zoo.build(dataclasses.replace(config, vocab_size=None))
