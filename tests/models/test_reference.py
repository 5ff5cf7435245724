"""Whole models, put together as published ones are, against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.reference import decoder
from zoo.config import Block, ModelConfig, SparseConfig

T = 11
SHAPE = {
    "vocab_size": 21,
    "context_length": 16,
    "d_model": 24,
    "n_layers": 2,
    "n_heads": 4,
    "d_ff": 20,
    "norm_eps": 0.01,
}
LAYERNORM = {"norm": "layernorm", "norm_bias": True}
PLAIN = {"glu": False, "ffn_bias": True, "attention_bias": ("q", "k", "v", "o")}
LOCAL = Block(window=4, rope_theta=100.0)

MODELS = {
    "gpt2": {**LAYERNORM, **PLAIN, "activation": "gelu_tanh", "position": "learned"},
    "opt": {**LAYERNORM, **PLAIN, "activation": "relu", "position": "learned", "position_offset": 2},
    "bloom": {
        **LAYERNORM, **PLAIN, "n_heads": 6, "activation": "gelu_tanh", "position": "alibi", "embedding_norm": True,
    },
    "pythia": {
        **LAYERNORM, **PLAIN, "activation": "gelu", "parallel": "two_norms", "head_dim": 8, "rope_fraction": 0.5,
        "tie_embeddings": False,
    },
    "falcon": {**LAYERNORM, "glu": False, "activation": "gelu", "parallel": "one_norm", "n_kv_heads": 1},
    "gemma2": {
        "pattern": (Block(window=4), Block()), "n_kv_heads": 2, "attention_scale": 0.5, "attention_softcap": 2.0,
        "logit_softcap": 3.0, "norm_placement": "sandwich", "norm_unit_offset": True, "embedding_scale": True,
        "activation": "gelu_tanh", "vocab_multiple": 8,
    },
    "gemma3": {
        "n_layers": 3, "pattern": (LOCAL, LOCAL, Block()), "n_kv_heads": 1, "qk_norm": "head",
        "norm_placement": "sandwich", "norm_unit_offset": True, "embedding_scale": True, "activation": "gelu_tanh",
    },
    "gpt-oss": {
        "pattern": (Block(window=4), Block()), "n_kv_heads": 2, "attention_bias": ("q", "k", "v", "o"),
        "attention_sinks": True, "activation": "swish", "swish_beta": 1.702, "glu_clamp": 0.5, "ffn_bias": True,
        "moe": SparseConfig(n_experts=4, d_ff=12, score="softmax_selected", router_bias=True),
        "tie_embeddings": False, "head_bias": True, "vocab_multiple": 8,
    },
    "deepnorm": {**LAYERNORM, "norm_placement": "deepnorm", "position": "sinusoidal", "embedding_scale": True},
    "post": {"norm_placement": "post", "qk_norm": "full", "head_dim": 6, "rope_interleaved": True, "n_kv_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", list(MODELS))
def test_logits(name):
    config = ModelConfig(**SHAPE | MODELS[name])
    model, rng = zoo.build(config), np.random.default_rng(0)
    specs = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    # Unlike any initializer: every bias, scale and sink takes part.
    params = jax.tree.map(lambda s: rng.normal(size=s.shape) * (0.4 if len(s.shape) > 2 else 1), specs)
    tokens = rng.integers(0, 21, (2, T))
    as32 = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    found = jax.jit(lambda p, t: model.apply({"params": p}, t).logits)(as32, jnp.asarray(tokens, jnp.int32))
    for row, logits in zip(tokens, found, strict=True):
        expected = decoder(config, params, row)
        np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())
