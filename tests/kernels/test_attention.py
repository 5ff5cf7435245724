"""Attention against a NumPy float64 version written from the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.kernels.attention import attention
from zoo.kernels.masks import Causal


def reference(q, k, v, window, q_pos, kv_pos, q_seg, kv_seg):
    """softmax(q k^T / sqrt(h)) v, one query and head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    group = q.shape[2] // k.shape[2]
    for b, t, head in np.ndindex(q.shape[:3]):
        distance = q_pos[b, t] - kv_pos[b]
        seen = (distance >= 0) & (q_seg[b, t] == kv_seg[b]) & (q_seg[b, t] > 0)
        if window is not None:
            seen &= distance < window
        if seen.any():
            scores = k[b, seen, head // group] @ q[b, t, head] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, t, head] = weights / weights.sum() @ v[b, seen, head // group]
    return out


def inputs(n_heads, n_kv_heads, T=9, S=12, h=6):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, heads, h)) for n, heads in ((T, n_heads), (S, n_kv_heads), (S, n_kv_heads)))
    kv_pos = np.array([[*range(7), *range(5)], [*range(12)]])
    kv_seg = np.array([[1] * 7 + [2] * 5, [1] * 9 + [0] * 3])
    return q, k, v, kv_pos[:, S - T :], kv_pos, kv_seg[:, S - T :], kv_seg


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_attention_is_the_formula(n_heads, n_kv_heads, window):
    q, k, v, q_pos, kv_pos, q_seg, kv_seg = inputs(n_heads, n_kv_heads)
    expected = reference(q, k, v, window, q_pos, kv_pos, q_seg, kv_seg)
    out = attention(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        mask=Causal(window),
        q_positions=jnp.asarray(q_pos),
        kv_positions=jnp.asarray(kv_pos),
        q_segment_ids=jnp.asarray(q_seg),
        kv_segment_ids=jnp.asarray(kv_seg),
    )
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    q, k, v, _, kv_pos, _, _ = inputs(2, 1)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    nothing = jnp.zeros((2, 9), jnp.int32)

    def run(q, k, v):
        return attention(
            q,
            k,
            v,
            mask=Causal(),
            q_positions=nothing + 11,
            kv_positions=jnp.asarray(kv_pos),
            q_segment_ids=nothing,
            kv_segment_ids=jnp.zeros((2, 12), jnp.int32),
        )

    assert not run(*arrays).any()
    for gradient in jax.grad(lambda *x: run(*x).sum(), argnums=(0, 1, 2))(*arrays):
        assert not gradient.any()


def test_head_counts_that_do_not_divide_are_named():
    q, k, v, q_pos, kv_pos, q_seg, kv_seg = inputs(3, 2)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 key and value heads"):
        attention(
            *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
            mask=Causal(),
            q_positions=jnp.asarray(q_pos),
            kv_positions=jnp.asarray(kv_pos),
            q_segment_ids=jnp.asarray(q_seg),
            kv_segment_ids=jnp.asarray(kv_seg),
        )
