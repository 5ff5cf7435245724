"""Mixtures whose experts have biases, a clamp and a learned Swish, against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layers.moe.mixtures import D, F, call, gradients, make, numpy_params, softmax, tokens
from zoo.config import DenseConfig, SoftConfig, SparseConfig

E = 3
BLOCK = {"ffn_bias": True, "activation": "swish_learned", "glu_clamp": 0.5}


def clamped(x, p):
    """One expert: its parameters are w_gate [D, F], b_gate [F], ..., beta []."""
    gate = np.minimum(x @ p["w_gate"] + p["b_gate"], 0.5)
    up = np.clip(x @ p["w_up"] + p["b_up"], -0.5, 0.5)
    return (gate / (1 + np.exp(-p["beta"] * gate)) * (up + 1)) @ p["w_down"] + p["b_down"]


def experts_of(params):
    """The parameters that have a leading [E]."""
    return {name: p for name, p in params.items() if not isinstance(p, dict) and name != "router_bias"}


def of(params, e):
    return {name: p[e] for name, p in experts_of(params).items()}


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_dense_and_sparse_with_all_experts():
    x = tokens()
    module, params = make(DenseConfig(n_experts=E, d_ff=F), **BLOCK)
    wide, inputs = numpy_params(params), np.asarray(x, np.float64)
    p = softmax(inputs @ wide["router"]["w"])
    expected = sum(p[..., e : e + 1] * clamped(inputs, of(wide, e)) for e in range(E))
    assert_close(call(module, params, x)[0], expected)
    sparse, same = make(SparseConfig(n_experts=E, d_ff=F, top_k=E), **BLOCK)
    assert jax.tree.structure(same) == jax.tree.structure(params)
    assert_close(call(sparse, params, x)[0], expected)
    jax.tree.map(assert_close, gradients(sparse, params, x), gradients(module, params, x))


@pytest.mark.parametrize(
    "config",
    [
        SparseConfig(n_experts=E, d_ff=F, top_k=2),
        DenseConfig(n_experts=E, d_ff=F),
        SoftConfig(n_experts=E, d_ff=F, segment_length=4),
    ],
    ids=lambda config: config.kind,
)
def test_identical_experts_are_one_ffn_and_padding_gets_none_of_its_biases(config):
    module, params = make(config, **BLOCK)
    params |= {name: jnp.broadcast_to(p[:1], p.shape) for name, p in experts_of(params).items()}
    x, mask = tokens(1, 6), jnp.arange(6)[None] < 5
    y = call(module, params, x, mask)[0]
    expected = clamped(np.asarray(x, np.float64), of(numpy_params(params), 0))
    assert_close(y, np.where(mask[..., None], expected, 0))


def test_soft_merges_biases_and_beta_too():
    module, params = make(SoftConfig(n_experts=E, d_ff=F, segment_length=8), **BLOCK)
    x = tokens()
    wide = numpy_params(params)
    p = softmax(wide["router_bias"])
    merged = {name: np.tensordot(p, stack, 1) for name, stack in experts_of(wide).items()}
    assert_close(call(module, params, x)[0], clamped(np.asarray(x, np.float64), merged))


@pytest.mark.parametrize("config", [SparseConfig, DenseConfig, SoftConfig])
def test_shared_experts_behind_a_gate(config):
    sizes = {"n_experts": E, "d_ff": F}
    x = tokens()
    module, params = make(config(**sizes, n_shared_experts=2, shared_gate=True), **BLOCK)
    alone, _ = make(config(**sizes), **BLOCK)
    routed = {name: p for name, p in params.items() if name != "shared"}
    shared, inputs = numpy_params(params["shared"]), np.asarray(x, np.float64)
    assert shared["w_up"].shape == (D, 2 * F) and shared["gate"].shape == (D, 1)
    gate = 1 / (1 + np.exp(-inputs @ shared["gate"]))
    assert_close(call(module, params, x)[0], call(alone, routed, x)[0] + gate * clamped(inputs, shared))
