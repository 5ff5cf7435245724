import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import D, assert_close, block_of, call, initialize, make, softmax, tokens
from scipy.special import ndtr

from zoo.config import ConfigError, ModelConfig, SparseConfig
from zoo.layers.moe import build_moe
from zoo.layers.moe.router import (
    LEAST_DEVIATION,
    SparseRouter,
    limit_to_groups,
    route,
    router_logits,
    routing_stats,
    score,
    select,
    smooth_load,
    weigh,
)

# Five tokens and one of padding, with a tie in the fifth.
LOGITS = jnp.array([[2, 1, 0, -1], [0, 2, 1, -1], [1, 0, -1, 2], [0.5, 0.4, 0.3, 0.2], [3, -3, 0, 0], [9, 9, 9, -9]])
MASK = jnp.array([1.0, 1, 1, 1, 1, 0])
WIDE = np.asarray(LOGITS, np.float64)


def four(**fields):
    return SparseConfig(n_experts=4, **fields)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def golden_stats(mask=MASK, kind="softmax", n_groups=1):
    routing = route(LOGITS, four(renormalize=False))
    chosen = jax.nn.one_hot(routing.indices, 4)
    gates = (chosen * routing.weights[..., None]).sum(1)
    return routing_stats(LOGITS, mask, chosen.sum(1), gates, kind=kind, n_groups=n_groups)


# ------------------------------------------------------------------------------ choice and weights


def test_golden_choice_and_weights():
    raw = route(LOGITS, four(renormalize=False))
    np.testing.assert_array_equal(raw.indices, [[0, 1], [1, 2], [3, 0], [0, 1], [0, 2], [0, 1]])
    np.testing.assert_allclose(raw.weights[0], [0.64391426, 0.23688282], rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(raw.ranking), softmax(WIDE), rtol=1e-5)
    renormalized = route(LOGITS, four(renormalize=True))
    np.testing.assert_array_equal(renormalized.indices, raw.indices)
    np.testing.assert_allclose(renormalized.weights[0], [0.73105858, 0.26894142], rtol=1e-6)


def chosen_by(ranking, k):
    return np.argsort(-ranking, axis=-1, kind="stable")[:, :k]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_weights_are_the_formula(kind, renormalize):
    draw = np.random.default_rng(0)
    logits = 2 * draw.normal(size=(3, 5, 7))
    scores = softmax(logits) if kind == "softmax" else sigmoid(logits)
    config = SparseConfig(n_experts=7, top_k=3, score=kind, renormalize=renormalize, routed_scale=2.5)
    found = route(jnp.asarray(logits, jnp.float32), config)
    best = np.argsort(-scores)[..., :3]
    np.testing.assert_array_equal(found.indices, best)
    weights = np.take_along_axis(scores, best, -1)
    weights = weights / weights.sum(-1, keepdims=True) if renormalize else weights
    np.testing.assert_allclose(found.weights, 2.5 * weights, rtol=1e-5)


def test_a_softmax_over_the_selected_is_one_over_their_logits():
    found = route(LOGITS, four(score="softmax_selected"))
    expected = softmax(np.take_along_axis(WIDE, np.asarray(found.indices), 1))
    np.testing.assert_allclose(found.weights, expected, rtol=1e-6)
    np.testing.assert_array_equal(found.indices[:5], chosen_by(WIDE[:5], 2))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_scores_that_underflow_keep_their_ratios_and_finite_gradients(kind):
    logits = jnp.array([[-200.0, -201.0, -400.0, -500.0]])
    config = four(score=kind, renormalize=True)
    weights, pull = jax.vjp(lambda logits: route(logits, config).weights, logits)
    np.testing.assert_allclose(weights, [[sigmoid(1.0), sigmoid(-1.0)]], rtol=1e-5)
    assert np.all(np.isfinite(pull(jnp.array([[1.0, 2.0]]))[0]))


@pytest.mark.parametrize(
    ("kind", "logits", "chosen"),
    [("softmax", [0.0, -200.0, -150.0, -120.0], [0, 3]), ("sigmoid", [30.0, 20.0, 35.0, 0.0], [2, 0])],
)
def test_scores_that_underflow_or_saturate_keep_their_order(kind, logits, chosen):
    assert route(jnp.array([logits]), four(top_k=2, score=kind)).indices.tolist() == [chosen]


def test_one_expert_without_renormalization_trains_the_router_and_with_it_is_refused():
    module, params = make(four(d_ff=8, top_k=1, renormalize=False))
    x = tokens()
    grad = jax.grad(lambda p: jnp.sum(call(module, p, x)[0] ** 2))(params)
    assert np.any(grad["router"]["w"])
    for fields in ({"renormalize": True}, {"score": "softmax_selected"}, {"n_null_experts": 1, "renormalize": True}):
        with pytest.raises(ConfigError, match="top_k=1"):
            four(top_k=1, **fields)


# ------------------------------------------------------------------------- bias, groups, null experts


def test_the_selection_bias_chooses_and_never_weighs():
    bias = jnp.array([-10.0, 0.0, 0.0, 10.0])
    config = four(score="sigmoid", selection_bias=True)
    found = route(LOGITS, config, bias)
    best = chosen_by(sigmoid(WIDE) + np.asarray(bias), 2)
    np.testing.assert_array_equal(found.indices, best)
    assert np.all(found.indices[:, 0] == 3) and not np.any(found.indices == 0)
    weights = np.take_along_axis(sigmoid(WIDE), best, 1)
    np.testing.assert_allclose(found.weights, weights / weights.sum(1, keepdims=True), rtol=1e-5)
    grad = jax.grad(lambda b: jnp.sum(jnp.sin(route(LOGITS, config, b).weights)))(bias)
    assert not np.any(grad)


def test_golden_groups():
    """Two groups of two, of which one is kept."""
    scores = score(LOGITS[:5], "sigmoid")
    for rule, groups in (("max", [0, 0, 1, 0, 0]), ("top2_sum", [0, 0, 0, 0, 0])):
        ranking = limit_to_groups(scores, 2, 1, rule)
        np.testing.assert_array_equal(np.isfinite(ranking), np.repeat(np.eye(2)[groups] > 0, 2, axis=1))
        config = four(score="sigmoid", n_groups=2, top_groups=1, group_score=rule)
        np.testing.assert_array_equal(select(scores, config)[0] // 2, np.repeat(groups, 2).reshape(5, 2))


@pytest.mark.parametrize("rule", ["max", "top2_sum"])
def test_groups_are_the_formula(rule):
    draw = np.random.default_rng(1)
    scores = draw.uniform(size=(20, 12))
    grouped = scores.reshape(20, 4, 3)
    best = np.sort(grouped, axis=-1)[..., -1 if rule == "max" else -2 :].sum(-1)
    kept = chosen_by(best, 2)
    inside = (np.arange(12)[None, :, None] // 3 == kept[:, None]).any(-1)
    config = SparseConfig(n_experts=12, top_k=4, n_groups=4, top_groups=2, group_score=rule)
    indices, ranking = select(jnp.asarray(scores, jnp.float32), config)
    np.testing.assert_array_equal(indices, chosen_by(np.where(inside, scores, -np.inf), 4))
    np.testing.assert_array_equal(np.isfinite(ranking), inside)


def test_groups_that_are_shut_stay_shut_where_all_biased_scores_are_negative():
    """A mask of 0 would choose from them."""
    logits = jnp.array([[0.1, 0.2, 0.3, 0.4, 1.0, 1.1, 1.2, 1.3]])
    config = SparseConfig(
        n_experts=8, score="sigmoid", n_groups=2, top_groups=1, group_score="top2_sum", selection_bias=True
    )
    found = route(logits, config, jnp.full(8, -1.5))
    np.testing.assert_array_equal(found.indices, [[7, 6]])
    assert np.all(found.weights > 0)


def test_null_experts_weigh_nothing_and_leave_the_others_a_weight_of_one():
    """As in AdaMoE's code for Mixtral: the true experts share 1, unless there are none."""
    logits = jnp.array([[3.0, 1.0, 0.0, 2.0, -9.0], [0.0, 0.0, 0.0, 5.0, 4.0], [1.0, 2.0, 3.0, 0.0, 0.0]])
    config = SparseConfig(n_experts=3, top_k=2, n_null_experts=2)
    found = route(logits, config)
    np.testing.assert_array_equal(found.indices, [[0, 3], [3, 4], [2, 1]])
    np.testing.assert_allclose(found.weights, [[1, 0], [0, 0], [sigmoid(1), sigmoid(-1)]], rtol=1e-6)
    raw = weigh(logits, found.indices, SparseConfig(n_experts=3, top_k=2, n_null_experts=2, renormalize=False))
    probs = softmax(np.asarray(logits, np.float64))
    np.testing.assert_allclose(raw, [[probs[0, 0], 0], [0, 0], probs[2, [2, 1]]], rtol=1e-6)
    grad = jax.grad(lambda logits: jnp.sum(jnp.sin(route(logits, config).weights)))(logits)
    assert np.all(np.isfinite(grad)) and np.any(grad[2]) and not np.any(grad[:2])


# ---------------------------------------------------------------------------------------- noise


def test_smooth_load_is_the_formula():
    draw = np.random.default_rng(0)
    raw, noisy = draw.normal(size=(2, 9, 6))
    deviation = draw.uniform(0.5, 2, size=(9, 6))
    expected = np.zeros((9, 6))
    for t, i in np.ndindex(9, 6):
        others = np.sort(np.delete(noisy[t], i))
        expected[t, i] = ndtr((raw[t, i] - others[-2]) / deviation[t, i])  # the second highest of the others
    found = smooth_load(*(jnp.asarray(a, jnp.float32) for a in (raw, noisy, deviation)), 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    every = smooth_load(*(jnp.asarray(a, jnp.float32) for a in (raw, noisy, deviation)), 6)
    np.testing.assert_array_equal(every, np.ones((9, 6)))


def test_smooth_load_estimates_how_often_an_expert_is_chosen():
    raw = jnp.array([1.0, 0.5, 0.0, -1.0])
    noisy = raw + jax.random.normal(jax.random.key(0), (20_000, 4))
    load = smooth_load(jnp.broadcast_to(raw, noisy.shape), noisy, jnp.ones_like(noisy), 2).mean(0)
    chosen = jax.nn.one_hot(jax.lax.top_k(noisy, 2)[1], 4).sum(1).mean(0)
    np.testing.assert_allclose(load, chosen, atol=0.01)


def test_noise_is_for_training_has_its_deviation_and_reaches_its_weights():
    config = four(d_ff=8, noisy_top_k=True, load_weight=0.1)
    module, params = make(config)
    x, key = tokens(), jax.random.key(0)
    plain, _ = make(four(d_ff=8))
    y, stats, _ = call(module, params, x)  # no rng at evaluation
    assert_close((y, stats), call(plain, params, x)[:2])
    assert not np.any(stats.load_sum)
    noisy, noisy_stats, _ = call(module, params, x, deterministic=False, rng=key)
    again = call(module, params, x, deterministic=False, rng=key)
    np.testing.assert_array_equal(noisy, again[0])
    assert np.any(noisy != call(module, params, x, deterministic=False, rng=jax.random.key(1))[0])
    for name in ("prob_sum", "z_sum", "entropy_sum"):  # of the raw logits
        np.testing.assert_allclose(getattr(noisy_stats, name), getattr(stats, name), rtol=1e-6)
    assert noisy_stats.load_sum.min() > 0 and abs(noisy_stats.load_sum.sum() - 24) < 8

    def loads(p):
        return jnp.var(call(module, p, x, deterministic=False, rng=key)[1].load_sum)

    grad = jax.grad(loads)(params)["router"]
    assert np.any(grad["w"]) and np.any(grad["w_noise"])


def test_noise_is_the_formula():
    config = four(noisy_top_k=True)
    router = SparseRouter(config, block_of(config))
    w, w_noise = np.random.default_rng(0).normal(size=(2, D, 4))
    x = jnp.broadcast_to(tokens(1, 1)[0], (50_000, D))
    params = {"params": {"w": jnp.asarray(w, jnp.float32), "w_noise": jnp.asarray(w_noise, jnp.float32)}}
    logits, bias = router.apply(params, x, False, rngs={"router": jax.random.key(0)})
    wide = np.asarray(x[0], np.float64)
    deviation = np.log1p(np.exp(wide @ w_noise)) + LEAST_DEVIATION
    np.testing.assert_allclose(logits.raw[0], wide @ w, rtol=1e-5)
    np.testing.assert_allclose(logits.deviation[0], deviation, rtol=1e-4)
    np.testing.assert_allclose(jnp.mean(logits.noisy - logits.raw, axis=0) / deviation, 0, atol=0.02)
    np.testing.assert_allclose(jnp.std(logits.noisy - logits.raw, axis=0) / deviation, 1, atol=0.02)
    assert bias is None


def test_jitter_is_for_training_and_for_the_router_alone():
    config = four(d_ff=8, top_k=4, router_jitter=0.5)
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


# ----------------------------------------------------------------------------------- statistics


def test_golden_statistics():
    stats = golden_stats()
    np.testing.assert_array_equal(stats.counts, [4, 3, 2, 1])
    np.testing.assert_allclose(stats.prob_sum, [2.16399027, 1.23137320, 0.63759018, 0.96704635], rtol=1e-6)
    assert stats.tokens == 5 and stats.dropped == 0
    p = softmax(WIDE)[:5]
    np.testing.assert_allclose(stats.entropy_sum, -(p * np.log(p)).sum(), rtol=1e-6)
    assert not np.any(stats.load_sum) and stats.sequence_sum == stats.sequences == 0
    np.testing.assert_array_equal(stats.group_tokens, [5])


def test_statistics_of_sigmoids_and_groups():
    stats = golden_stats(kind="sigmoid", n_groups=2)
    p = sigmoid(WIDE)[:5]
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(stats.prob_sum, p.sum(0), rtol=1e-6)
    np.testing.assert_allclose(stats.entropy_sum, -(p * np.log(p)).sum(), rtol=1e-6)
    np.testing.assert_allclose(stats.z_sum, np.sum(np.log(np.exp(WIDE[:5]).sum(1)) ** 2), rtol=1e-6)
    np.testing.assert_array_equal(stats.group_tokens, [5, 3])  # experts 0 and 1, 2 and 3


def test_statistics_add_over_any_split():
    """Sums of parts are the statistics of the whole; ratios are not, which is why sums are reported."""
    chosen = jnp.ones((6, 4))
    parts = [routing_stats(LOGITS[i:j], MASK[i:j], chosen[i:j], chosen[i:j], 1.0) for i, j in ((0, 1), (1, 4), (4, 6))]
    whole = routing_stats(LOGITS, MASK, chosen, chosen, 3.0)
    for a, b in zip(jax.tree.map(lambda *s: sum(s), *parts), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_which_statistics_carry_a_gradient():
    def total(logits, name):
        probs = jax.nn.softmax(logits)
        return jnp.sum(getattr(routing_stats(logits, MASK, probs, probs, n_groups=4), name) * jnp.arange(1.0, 5))

    constant, moving = ("counts", "entropy_sum", "group_tokens"), ("prob_sum", "gate_sum", "z_sum")
    grads = {name: jax.grad(total)(LOGITS, name) for name in (*constant, *moving)}
    assert not any(np.any(grads[name]) for name in constant)
    for name in moving:
        assert np.all(np.any(grads[name][:5], axis=1)) and not np.any(grads[name][5])


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_extreme_logits_stay_finite(kind):
    logits = jnp.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    stats = routing_stats(logits, jnp.ones(2), jnp.ones((2, 3)), jnp.ones((2, 3)), kind=kind)
    assert all(np.all(np.isfinite(s)) for s in stats)


# ------------------------------------------------------------------------------------ precision


def test_router_is_float32_whatever_the_model():
    config = four(d_ff=8, router_bias=True, selection_bias=True, noisy_top_k=True)
    module, params = make(config, param_dtype="bfloat16", compute_dtype="bfloat16")
    assert {p.dtype for p in params["router"].values()} == {jnp.dtype("float32")}
    assert params["w_up"].dtype == jnp.bfloat16
    y, stats, _ = call(module, params, tokens().astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and all(s.dtype == jnp.float32 for s in stats)


def test_bfloat16_inputs_choose_as_their_float32_copies_do():
    x = jax.random.normal(jax.random.key(0), (2000, 64)).astype(jnp.bfloat16)
    w = 0.02 * jax.random.normal(jax.random.key(1), (64, 32))
    config = SparseConfig(n_experts=32, top_k=4)
    chosen = route(router_logits(x, w), config).indices
    np.testing.assert_array_equal(chosen, route(router_logits(x.astype(jnp.float32), w), config).indices)
    rounded = route((x @ w.astype(jnp.bfloat16)).astype(jnp.float32), config).indices
    assert np.any(rounded != chosen)


# ---------------------------------------------------------------------------------- parameters


def test_parameters_of_the_router():
    config = four(router_bias=True, selection_bias=True, noisy_top_k=True, n_null_experts=2)
    boxed = initialize(build_moe(block_of(config)), jax.random.key(0))["router"]
    assert {name: (p.value.shape, p.role) for name, p in boxed.items()} == {
        "w": ((D, 6), "router"),
        "bias": ((6,), "bias"),
        "w_noise": ((D, 6), "router"),
        "selection_bias": ((6,), "selection_bias"),
    }
    assert np.any(boxed["w"].value)
    assert not any(np.any(boxed[name].value) for name in ("bias", "w_noise", "selection_bias"))


def test_the_bias_of_the_router_is_added_to_its_logits():
    module, params = make(four(d_ff=8, router_bias=True))
    x, router = tokens(), params["router"]
    _, stats, _ = call(module, params, x)
    logits = np.asarray(x, np.float64) @ np.asarray(router["w"], np.float64) + np.asarray(router["bias"])
    np.testing.assert_allclose(stats.prob_sum, softmax(logits).sum((0, 1)), rtol=1e-5)


def test_shared_experts_may_count_among_the_k():
    assert four(top_k=3, n_shared_experts=1, shared_in_top_k=True).k == 2
    with pytest.raises(ConfigError, match="top_k=1 leaves no routed expert"):
        four(top_k=1, n_shared_experts=1, shared_in_top_k=True)
    assert ModelConfig(moe=four(top_k=3, n_shared_experts=1, shared_in_top_k=True)).moe.k == 2
