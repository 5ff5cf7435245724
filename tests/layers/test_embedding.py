"""The way in and the way out of a model: tables, scale, positions, norm, head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import ModelConfig
from zoo.layers.embedding import Embedding, HeadWeights, logits, scores_of
from zoo.layers.position import sinusoidal

TOKENS, POSITIONS = jnp.array([[1, 4, 0], [2, 2, 3]]), jnp.array([[0, 1, 2], [0, 0, 1]])


def make(**fields):
    module = Embedding(ModelConfig(**{"vocab_size": 5, "d_model": 4, "n_heads": 1, "context_length": 3} | fields))
    boxed = jax.eval_shape(lambda: module.init(jax.random.key(0), TOKENS, POSITIONS))["params"]
    rng = np.random.default_rng(0)
    draw = lambda s: jnp.asarray(rng.normal(size=s.value.shape), jnp.float32)  # noqa: E731
    return module, jax.tree.map(draw, boxed, is_leaf=lambda s: hasattr(s, "value"))


def run(module, params, tokens=TOKENS, positions=POSITIONS):
    return module.apply({"params": params}, tokens, positions)


def test_scale():
    module, params = make(embedding_scale=True)
    np.testing.assert_allclose(run(module, params), 2 * params["table"][TOKENS], rtol=1e-6)


def test_the_scale_is_rounded_to_the_compute_dtype_as_in_gemma():
    module, params = make(embedding_scale=True, d_model=3072, compute_dtype="bfloat16")
    found = run(module, {"table": jnp.ones_like(params["table"])})
    assert found.dtype == jnp.bfloat16 and float(found[0, 0, 0]) == 55.5


def test_learned_positions():
    module, params = make(position="learned", position_rows=6, position_offset=2)
    assert params["positions"].shape == (8, 4)
    expected = params["table"][TOKENS] + params["positions"][POSITIONS + 2]
    np.testing.assert_allclose(run(module, params), expected, rtol=1e-6)
    beyond = run(module, params, positions=jnp.array([[0, 5, 6], [0, 1, -1]]))
    np.testing.assert_array_equal(np.isnan(beyond[..., 0]), [[False, False, True], [False, False, True]])


def test_sinusoidal_positions_and_a_norm():
    module, params = make(position="sinusoidal", embedding_norm=True, norm_eps=1e-3)
    x = np.asarray(params["table"][TOKENS] + sinusoidal(POSITIONS, 4), np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * np.asarray(params["norm"]["scale"])
    np.testing.assert_allclose(run(module, params), expected, rtol=1e-5, atol=1e-6)


def test_a_token_outside_the_vocabulary_is_no_padded_row():
    module, params = make(vocab_multiple=8)
    assert params["table"].shape == (8, 4)
    found = run(module, params, tokens=jnp.array([[4, 5, 7], [8, -1, 0]]))
    np.testing.assert_array_equal(np.isnan(found[..., 0]), [[False, True, True], [True, True, False]])


def test_dropout_in_training():
    module, params = make(d_model=64, dropout=0.5, embedding_norm=True)
    whole, rngs = run(module, params), {"dropout": jax.random.key(0)}
    dropped = module.apply({"params": params}, TOKENS, POSITIONS, False, rngs=rngs)
    kept = dropped != 0
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_allclose(dropped, jnp.where(kept, 2 * whole, 0), rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_logits(bias, softcap):
    config = ModelConfig(vocab_size=5, vocab_multiple=8, d_model=4, n_heads=1, head_bias=bias, logit_softcap=softcap)
    rng = np.random.default_rng(0)
    hidden, w, b = rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 8)), rng.normal(size=8)
    expected = hidden @ w[:, :5] + (b[:5] if bias else 0)
    expected = expected if softcap is None else softcap * np.tanh(expected / softcap)
    as32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    found = logits(as32(hidden), HeadWeights(as32(w), as32(b) if bias else None), config)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_padded_tokens_have_no_probability():
    config = ModelConfig(vocab_size=5, vocab_multiple=8, d_model=4, n_heads=1, logit_softcap=2.0)
    scores = scores_of(jnp.full((2, 8), 100.0), None, config)
    np.testing.assert_array_equal(jax.nn.softmax(scores)[:, 5:], 0)
    np.testing.assert_allclose(scores[:, :5], 2)
    slope = jax.grad(lambda x: jax.nn.logsumexp(scores_of(x, None, config)))(jnp.linspace(-1.0, 1.0, 8))
    np.testing.assert_array_equal(slope != 0, np.arange(8) < 5)
