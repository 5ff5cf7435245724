"""Attention against a NumPy float64 version written from the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from zoo.kernels.attention import attention
from zoo.kernels.masks import Causal, Full


def reference(q, k, v, window, q_pos, kv_pos, q_seg, kv_seg, scale=None, softcap=None, slopes=None, sinks=None):
    """softmax(scale q k^T) v, one query and head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    group = q.shape[2] // k.shape[2]
    for b, t, head in np.ndindex(q.shape[:3]):
        distance = q_pos[b, t] - kv_pos[b]
        seen = (distance >= 0) & (q_seg[b, t] == kv_seg[b]) & (q_seg[b, t] > 0)
        if window is not None:
            seen &= distance < window
        if seen.any():
            scores = k[b, seen, head // group] @ q[b, t, head] * (scale or q.shape[-1] ** -0.5)
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            scores = scores if slopes is None else scores - slopes[head] * distance[seen]
            top = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[b, t, head] = weights / total @ v[b, seen, head // group]
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
        scale=6**-0.5,
    )
    np.testing.assert_allclose(out, expected, atol=2e-6)


SLOPES, SINKS = np.array([0.5, 0.25, 0.1, 0.0]), np.array([-1.0, 0.0, 2.0, 40.0])
OPTIONS = {
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 0.7},
    "alibi": {"slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "all": {"scale": 0.9, "softcap": 2.0, "slopes": SLOPES, "sinks": SINKS},
}


def places(q_pos, kv_pos, q_seg, kv_seg):
    names = ("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids")
    return dict(zip(names, map(jnp.asarray, (q_pos, kv_pos, q_seg, kv_seg)), strict=True))


def keywords(scale=6**-0.5, softcap=None, slopes=None, sinks=None):
    as_array = lambda x: None if x is None else jnp.asarray(x)  # noqa: E731
    return {"scale": scale, "softcap": softcap, "alibi_slopes": as_array(slopes), "sinks": as_array(sinks)}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_the_formula_and_their_gradients_finite_differences(name):
    q, k, v, *at = inputs(4, 2)
    options = OPTIONS[name]
    with jax.enable_x64(True):
        run = lambda q, k, v: attention(q, k, v, mask=Causal(4), **places(*at), **keywords(**options))  # noqa: E731
        arrays = [jnp.asarray(x) for x in (q, k, v)]
        np.testing.assert_allclose(run(*arrays), reference(q, k, v, 4, *at, **options), atol=1e-12)
        check_grads(jax.jit(run), arrays, order=1, modes=["rev"], rtol=1e-6, atol=1e-6)
    narrow = run(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(narrow, reference(q, k, v, 4, *at, **options), atol=5e-6)


def test_a_sink_has_a_gradient_and_rows_without_keys_give_zero_beside_it():
    q, k, v, q_pos, kv_pos, q_seg, kv_seg = inputs(4, 2)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]

    def run(sinks, q_seg):
        settings = keywords() | {"sinks": sinks}
        return attention(*arrays, mask=Causal(), **places(q_pos, kv_pos, q_seg, kv_seg), **settings)

    sinks = jnp.asarray(SINKS, jnp.float32)
    grad = jax.grad(lambda sinks: jnp.sum(run(sinks, q_seg)))(sinks)
    assert np.all(np.abs(grad[:3]) > 1e-6)
    nothing = np.zeros_like(q_seg)
    assert not np.any(run(sinks, nothing))
    assert not np.any(jax.grad(lambda sinks: jnp.sum(run(sinks, nothing)))(sinks))


def test_full_sees_all_of_its_segment():
    q, k, v, q_pos, kv_pos, q_seg, kv_seg = inputs(4, 2)
    late = np.full_like(q_pos, 99)  # behind every key, so that causal and full agree
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    full = attention(*arrays, mask=Full(), **places(q_pos, kv_pos, q_seg, kv_seg), **keywords())
    causal = attention(*arrays, mask=Causal(), **places(late, kv_pos, q_seg, kv_seg), **keywords())
    np.testing.assert_array_equal(full, causal)


def test_dropout_drops_its_share_and_keeps_the_mean():
    q, k, v, *at = inputs(4, 2)
    q, k = (jnp.zeros_like(jnp.asarray(x, jnp.float32)) for x in (q, k))
    v = jnp.ones((*k.shape[:3], 1))

    def run(seed):
        dropout = {"dropout_rate": 0.25, "dropout_key": jax.random.key(seed)}
        return attention(q, k, v, mask=Causal(), **places(*at), **keywords(), **dropout)

    outs = jnp.stack([run(seed) for seed in range(200)])
    seen = reference(q, k, v, None, *at)
    np.testing.assert_allclose(outs.mean(0), seen, atol=0.25)
    np.testing.assert_allclose(outs[:, :, -1].mean(), seen[:, -1].mean(), atol=0.02)
    np.testing.assert_array_equal(run(3), run(3))
    with pytest.raises(ValueError, match=r"dropout_rate=0\.25 needs a dropout_key"):
        attention(q, k, v, mask=Causal(), **places(*at), **keywords(), dropout_rate=0.25)


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
            scale=1.0,
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
            scale=1.0,
        )
