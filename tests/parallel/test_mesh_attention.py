"""Attention on 8 fake devices equals attention on one, values and gradients: rows, heads, and keys going round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import MeshConfig
from zoo.kernels.attention import attention
from zoo.kernels.masks import Causal, longformer
from zoo.parallel.attention import MeshAttention
from zoo.parallel.mesh import make_mesh

MESHES = {
    "rows": {"data": 2, "fsdp": 2, "expert": 2},
    "rows, heads": {"data": 2, "tensor": 4},
    "heads": {"data": 1, "tensor": 8},
    "context": {"data": 1, "context": 8},
    "all": {"data": 2, "tensor": 2, "context": 2},
}
B, T, H, K, h, d = 4, 24, 8, 2, 6, 5


def inputs(S=T):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"q": (B, T, H, h), "k": (B, S, K, h), "v": (B, S, K, d), "alibi_slopes": (H,), "sinks": (H,)}
    return {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=True)}


def values_and_gradients(attend, arrays, **settings):
    @jax.jit
    def run(arrays):
        def f(arrays):
            rest = {name: x for name, x in arrays.items() if name not in "qkv"}
            return attend(arrays["q"], arrays["k"], arrays["v"], **rest, **settings, return_lse=True)

        (out, lse), pull = jax.vjp(f, arrays)
        d_lse = jnp.where(jnp.isneginf(lse), 0, jnp.cos(lse))
        return out, lse, pull((jnp.sin(out), d_lse))[0]

    return jax.tree.map(np.asarray, run(arrays))


def check(mesh, arrays, **settings):
    config = MeshConfig(**MESHES[mesh])
    expected = values_and_gradients(attention, arrays, **settings)
    found = values_and_gradients(MeshAttention(make_mesh(config)), arrays, **settings)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), found, expected)


@pytest.mark.parametrize("mesh", MESHES)
def test_packed_rows_on_a_mesh(mesh):
    ids = jnp.tile(jnp.asarray(np.repeat([1, 2, 0, 3], [7, 8, 2, 7])), (B, 1))
    positions = jnp.tile(jnp.concatenate([jnp.arange(n) for n in (7, 8, 2, 7)]), (B, 1))
    places = {"q_positions": positions, "kv_positions": positions, "q_segment_ids": ids, "kv_segment_ids": ids}
    check(mesh, inputs(), mask=Causal(6), **places)


@pytest.mark.parametrize("mesh", ["rows, heads", "context", "all"])
def test_groups_of_heads_with_masks_of_their_own(mesh):
    check(mesh, inputs(), mask=longformer(4, 2, (1, 2)))


@pytest.mark.parametrize("mesh", ["rows, heads", "heads"])
def test_bias_and_dropout(mesh):
    arrays = inputs() | {"bias": jax.random.normal(jax.random.key(7), (1, H, T, 1))}
    check(mesh, arrays, mask=Causal(), dropout_rate=0.4, dropout_key=jax.random.key(1))


def test_what_cannot_go_round_is_refused():
    attend = MeshAttention(make_mesh(MeshConfig(**MESHES["context"])))
    q, k, v = (inputs()[name] for name in "qkv")
    with pytest.raises(ValueError, match=r"dropout and bias cannot be spread over mesh\.context"):
        attend(q, k, v, mask=Causal(), dropout_rate=0.4, dropout_key=jax.random.key(1))


def test_a_length_that_does_not_divide_stays_whole():
    check("context", inputs(S=31), mask=Causal(), q_offset=7)


def test_no_collective_but_the_ring():
    mesh = make_mesh(MeshConfig(**MESHES["rows, heads"]))
    arrays = inputs()

    def loss(q, k, v):
        return MeshAttention(mesh)(q, k, v, mask=Causal()).sum()

    on = lambda n: jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor" if n % 4 == 0 else None))  # noqa: E731
    placed = [jax.device_put(arrays[name], on(arrays[name].shape[2])) for name in "qkv"]
    text = jax.jit(jax.grad(loss)).lower(*placed).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
