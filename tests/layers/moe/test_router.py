import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import D, call, make, softmax, tokens

from zoo.config import ConfigError, SparseConfig
from zoo.layers.moe.router import route, router_logits, routing_stats

# Five tokens and one of padding, with a tie in the fifth.
LOGITS = jnp.array([[2, 1, 0, -1], [0, 2, 1, -1], [1, 0, -1, 2], [0.5, 0.4, 0.3, 0.2], [3, -3, 0, 0], [9, 9, 9, -9]])
MASK = jnp.array([1.0, 1, 1, 1, 1, 0])


def golden_stats(mask=MASK):
    weights, indices, _ = route(LOGITS, 2, renormalize=False)
    chosen = jax.nn.one_hot(indices, 4)
    return routing_stats(LOGITS, mask, chosen.sum(1), (chosen * weights[..., None]).sum(1))


def test_golden_choice_and_weights():
    raw, indices, probs = route(LOGITS, 2, renormalize=False)
    np.testing.assert_array_equal(indices, [[0, 1], [1, 2], [3, 0], [0, 1], [0, 2], [0, 1]])
    np.testing.assert_allclose(raw[0], [0.64391426, 0.23688282], rtol=1e-6)
    np.testing.assert_allclose(probs, softmax(np.asarray(LOGITS, np.float64)), rtol=1e-5)
    renormalized, same, _ = route(LOGITS, 2, renormalize=True)
    np.testing.assert_array_equal(same, indices)
    np.testing.assert_allclose(renormalized[0], [0.73105858, 0.26894142], rtol=1e-6)


def test_golden_statistics():
    stats = golden_stats()
    np.testing.assert_array_equal(stats.counts, [4, 3, 2, 1])
    np.testing.assert_allclose(stats.prob_sum, [2.16399027, 1.23137320, 0.63759018, 0.96704635], rtol=1e-6)
    assert stats.tokens == 5 and stats.dropped == 0
    p = softmax(np.asarray(LOGITS, np.float64))[:5]
    np.testing.assert_allclose(stats.entropy_sum, -(p * np.log(p)).sum(), rtol=1e-6)


def test_statistics_add_over_any_split():
    """Sums of parts are the statistics of the whole; ratios are not, which is why sums are reported."""
    chosen = jnp.ones((6, 4))
    parts = [routing_stats(LOGITS[i:j], MASK[i:j], chosen[i:j], chosen[i:j], 1.0) for i, j in ((0, 1), (1, 4), (4, 6))]
    whole = routing_stats(LOGITS, MASK, chosen, chosen, 3.0)
    for a, b in zip(jax.tree.map(lambda *s: sum(s), *parts), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_only_probabilities_and_z_carry_a_gradient():
    def total(logits, name):
        probs = jax.nn.softmax(logits)
        return jnp.sum(getattr(routing_stats(logits, MASK, probs, probs), name) * jnp.arange(1.0, 5))

    grads = {name: jax.grad(total)(LOGITS, name) for name in ("counts", "gate_sum", "entropy_sum", "prob_sum", "z_sum")}
    assert not any(np.any(grads[name]) for name in ("counts", "gate_sum", "entropy_sum"))
    assert np.all(np.any(grads["prob_sum"][:5], axis=1)) and np.all(np.any(grads["z_sum"][:5], axis=1))
    assert not np.any(grads["prob_sum"][5]) and not np.any(grads["z_sum"][5])


def test_extreme_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    stats = routing_stats(logits, jnp.ones(1), jnp.ones((1, 3)), jnp.ones((1, 3)))
    assert all(np.all(np.isfinite(s)) for s in stats)


def test_router_is_float32_whatever_the_model():
    module, params = make(SparseConfig(n_experts=4, d_ff=8), param_dtype="bfloat16", compute_dtype="bfloat16")
    assert params["router"]["w"].dtype == jnp.float32 and params["w_up"].dtype == jnp.bfloat16
    y, stats, _ = call(module, params, tokens().astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and all(s.dtype == jnp.float32 for s in stats)


def test_bfloat16_inputs_choose_as_their_float32_copies_do():
    x = jax.random.normal(jax.random.key(0), (2000, 64)).astype(jnp.bfloat16)
    w = 0.02 * jax.random.normal(jax.random.key(1), (64, 32))
    chosen = route(router_logits(x, w), 4, False)[1]
    np.testing.assert_array_equal(chosen, route(router_logits(x.astype(jnp.float32), w), 4, False)[1])
    rounded = route((x @ w.astype(jnp.bfloat16)).astype(jnp.float32), 4, False)[1]
    assert np.any(rounded != chosen)


def test_jitter_is_for_training_and_for_the_router_alone():
    config = SparseConfig(n_experts=4, d_ff=8, top_k=4, router_jitter=0.5)
    module, params = make(config)
    x = tokens()
    plain = call(module, params, x)  # no rng at evaluation
    np.testing.assert_array_equal(plain[0], call(module, params, x, rng=jax.random.key(0))[0])
    noisy = call(module, params, x, deterministic=False, rng=jax.random.key(0))
    assert np.any(noisy[1].prob_sum != plain[1].prob_sum)
    other = call(module, params, x, deterministic=False, rng=jax.random.key(1))
    assert np.any(noisy[0] != other[0])
    # With equal experts only the router could change the output, and its weights sum to 1.
    same = params | {n: jnp.broadcast_to(params[n][:1], params[n].shape) for n in ("w_gate", "w_up", "w_down")}
    np.testing.assert_allclose(
        call(module, same, x, deterministic=False, rng=jax.random.key(0))[0], call(module, same, x)[0], atol=1e-5
    )


def test_jitter_multiplies_by_a_number_close_to_one():
    x, w = jnp.ones((3, D)), jnp.ones((D, 2))
    np.testing.assert_array_equal(router_logits(x, w, jnp.full((3, D), 1.5)), 1.5 * D * np.ones((3, 2)))


def test_one_expert_without_renormalization_trains_the_router_and_with_it_is_refused():
    module, params = make(SparseConfig(n_experts=4, d_ff=8, top_k=1, renormalize=False))
    x = tokens()
    grad = jax.grad(lambda p: jnp.sum(call(module, p, x)[0] ** 2))(params)
    assert np.any(grad["router"]["w"])
    with pytest.raises(ConfigError, match="top_k=1"):
        SparseConfig(n_experts=4, top_k=1, renormalize=True)
