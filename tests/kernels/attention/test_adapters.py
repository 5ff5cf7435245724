"""Other people's attention: asked for the right thing, with XLA in cuDNN's place, and for no more."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.attention.oracle import problem
from zoo.kernels.attention import adapters, attention
from zoo.kernels.masks import Causal, Chunked, Full
from zoo.kernels.target import Target

CUDNN = {"backend": "cudnn", "backward": "cudnn"}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the adapter can see, on which XLA stands in for cuDNN."""
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(adapters.jax, "devices", lambda: [SimpleNamespace(platform="gpu", compute_capability="9.0")])
    monkeypatch.setattr("zoo.kernels.attention.dispatch.target", lambda: Target("gpu", "NVIDIA H200"))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: real(*a, **k | {"implementation": "xla"}))


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal(9)])
def test_cudnn_is_asked_for_the_same_attention(gpu, mask):
    case = problem(40, 40, (6, 2), (16, 16), mask, scale=0.3)
    q, k, v = (jnp.asarray(case.arrays[name], jnp.bfloat16) for name in "qkv")
    out, pull = jax.vjp(lambda *qkv: attention(*qkv, mask=mask, scale=0.3, **CUDNN), q, k, v)
    plain, pull_plain = jax.vjp(lambda *qkv: attention(*qkv, mask=mask, scale=0.3, backend="dense"), q, k, v)
    for a, b in zip((out, *pull(out)), (plain, *pull_plain(out)), strict=True):
        assert jnp.allclose(a, b, atol=5e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backward": "auto"}, "it gives no log sums, so backward must be 'cudnn' too"),
        ({"return_lse": True}, "its log sums are not float32"),
        ({"sinks": jnp.zeros(2)}, "its log sums are not float32"),
        ({"q_positions": jnp.zeros((1, 8), int), "kv_positions": jnp.zeros((1, 8), int)}, "it knows no positions"),
        ({"lengths": jnp.array([4])}, "it knows no documents, nor lengths"),
        ({"softcap": 5.0}, "it knows no softcap"),
        ({"alibi_slopes": jnp.ones(2)}, "it knows no ALiBi"),
        ({"bias": jnp.zeros((1, 1, 8, 8))}, "its gradient of a bias is wrong at times"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "JAX passes it no dropout"),
        ({"mask": Chunked(4)}, "it knows causal masks and windows, and not Chunked"),
        ({"q_offset": 3}, "of 8 queries and 8 keys it aligns others"),
    ],
)
def test_cudnn_drops_no_feature_in_silence(gpu, settings, message):
    x = jnp.zeros((1, 8, 2, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"backend 'cudnn' cannot run forward: {message}"):
        attention(x, x, x, **({"mask": Causal()} | CUDNN | settings))


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [(12, jnp.bfloat16, "widths 12 and 12 are not one multiple of 8 up to 256"), (16, jnp.float32, "q, k and v are")],
)
def test_cudnn_refuses_shapes_and_dtypes_that_it_does_not_have(gpu, width, dtype, message):
    x = jnp.zeros((1, 8, 2, width), dtype)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, mask=Causal(), **CUDNN)


def test_cudnn_needs_a_gpu_in_the_process():
    x = jnp.zeros((1, 8, 2, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match="cuDNN is asked about the GPU while tracing, and this process has none"):
        attention(x, x, x, mask=Causal(), **CUDNN)
