"""The attention layer against NumPy float64: projections with biases, norms, positions, and another sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.test_attention import reference
from zoo.config import Block, ModelConfig
from zoo.layers.attention import Attention, Memory
from zoo.layers.position import alibi_slopes

B, T, D, H, K, h = 2, 6, 12, 4, 2, 8
RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(B, n, D)) for n in (T, 5))
POSITIONS = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 0]])
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 1, 0]])


def make(window=None, rope_theta=None, **fields):
    """(module, float64 parameters drawn at random)."""
    fields = {"position": "none"} | fields
    pattern = (Block(window=window, rope_theta=rope_theta),)
    model = ModelConfig(d_model=D, n_heads=H, n_kv_heads=K, head_dim=h, n_layers=1, pattern=pattern, **fields)
    module = Attention(model.expand()[0].blocks[0])
    ids = jnp.ones((B, T), jnp.int32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((B, T, D)), ids, ids))["params"]
    leaf = lambda s: RNG.normal(size=s.value.shape) * (0.3 if len(s.value.shape) > 1 else 1)  # noqa: E731
    return module, jax.tree.map(leaf, shapes, is_leaf=lambda s: hasattr(s, "value"))


def run(module, params, memory=None, **settings):
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    args = (jnp.asarray(X, jnp.float32), jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))
    return module.apply({"params": params}, *args, memory=memory, **settings)[0]


def project(x, p, name):
    return np.einsum("BTD,DNh->BTNh", x, p[f"w_{name}"]) + p.get(f"b_{name}", 0)


def output(heads, p):
    return np.einsum("BTNh,NhD->BTD", heads, p["w_o"]) + p.get("b_o", 0)


def expected(p, norm=lambda x, name: x, turn=lambda x: x, window=None, **options):
    q, k, v = (project(X, p, name) for name in "qkv")
    q, k = turn(norm(q, "q_norm")), turn(norm(k, "k_norm"))
    return output(reference(q, k, v, window, POSITIONS, POSITIONS, SEGMENTS, SEGMENTS, **options), p)


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("biases", [(), ("q",), ("q", "k", "v"), ("q", "k", "v", "o")])
def test_a_bias_per_projection(biases):
    module, params = make(attention_bias=biases)
    assert {name for name in params if name.startswith("b_")} == {f"b_{name}" for name in biases}
    assert_close(run(module, params), expected(params))


@pytest.mark.parametrize("kind", ["head", "full"])
def test_qk_norm(kind):
    module, params = make(qk_norm=kind)
    assert params["q_norm"]["scale"].shape == ((h,) if kind == "head" else (H, h))
    axes = -1 if kind == "head" else (-2, -1)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(axes, keepdims=True) + 1e-6) * params[name]["scale"]

    assert_close(run(module, params), expected(params, norm))


def test_scale_softcap_sinks_and_window():
    module, params = make(3, attention_scale=0.7, attention_softcap=1.5, attention_sinks=True)
    options = {"scale": 0.7, "softcap": 1.5, "sinks": params["sinks"]}
    assert_close(run(module, params), expected(params, window=3, **options))


def test_alibi():
    module, params = make(position="alibi")
    assert_close(run(module, params), expected(params, slopes=alibi_slopes(H)))


@pytest.mark.parametrize("theta", [None, 50.0])
def test_a_block_may_have_a_base_of_its_own(theta):
    module, params = make(rope_theta=theta, position="rope")
    angle = POSITIONS[..., None, None] * (theta or 10_000.0) ** (-2 * np.arange(h // 2) / h)

    def turn(x):
        pairs = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    assert_close(run(module, params), expected(params, turn=turn))


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_attention_to_another_sequence(position):
    """Keys and values of the memory; no order, no rotation, no distance, and padding unseen."""
    module, params = make(position=position, attention_bias=("q", "k", "v", "o"))
    segments = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 0, 0]])
    q, (k, v) = project(X, params, "q"), (project(Y, params, name) for name in "kv")
    late, early = np.full((B, T), 9), np.zeros((B, 5), int)
    wanted = output(reference(q, k, v, None, late, early, SEGMENTS, segments), params)
    memory = Memory(jnp.asarray(Y, jnp.float32), jnp.asarray(segments))
    assert_close(run(module, params, memory), wanted)
    changed = Memory(memory.x.at[0, 4].add(1.0), memory.segment_ids)
    np.testing.assert_array_equal(run(module, params, changed), run(module, params, memory))


def test_dropout_needs_its_stream_in_training_only():
    module, params = make(attention_dropout=0.5)
    plain, _ = make()
    np.testing.assert_array_equal(run(module, params), run(plain, params))
    keys = [{"dropout": jax.random.key(i)} for i in range(2)]
    one, other = (run(module, params, deterministic=False, rngs=rngs) for rngs in keys)
    assert np.abs(one - other).max() > 0.01
