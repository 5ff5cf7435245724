from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from mixtures import (
    D,
    F,
    assert_close,
    block_of,
    call,
    expert,
    gradients,
    influence,
    initialize,
    make,
    numpy_params,
    numpy_sparse,
    softmax,
    swiglu,
    tokens,
)

from zoo.config import DenseConfig, SparseConfig
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.layers.moe import build_moe, route, sorted_experts
from zoo.layers.moe.experts import Share, most_rows, some_experts

E = 4
CONFIG = SparseConfig(n_experts=E, d_ff=F)


@pytest.fixture(scope="module")
def sparse():
    return make(CONFIG)


def with_equal_experts(params):
    return params | {n: jnp.broadcast_to(params[n][:1], params[n].shape) for n in ("w_gate", "w_up", "w_down")}


@pytest.mark.parametrize("top_k, renormalize", [(1, False), (2, True), (2, False), (E, True)])
def test_is_the_formula(top_k, renormalize):
    module, params = make(SparseConfig(n_experts=E, d_ff=F, top_k=top_k, renormalize=renormalize))
    x = tokens()
    y, stats, cache = call(module, params, x)
    assert_close(y, numpy_sparse(x, params, top_k, renormalize))
    assert cache is None and stats.tokens == 12 and stats.counts.sum() == 12 * top_k
    p = softmax(np.asarray(x, np.float64) @ numpy_params(params)["router"]["w"])
    np.testing.assert_allclose(stats.prob_sum, p.sum((0, 1)), rtol=1e-5)
    weights = np.sort(p)[..., -top_k:]
    expected = 12 if renormalize else weights.sum()
    np.testing.assert_allclose(stats.gate_sum.sum(), expected, rtol=1e-5)


@pytest.mark.parametrize("renormalize", [True, False])
def test_identical_experts_are_one_ffn_times_the_sum_of_weights(renormalize):
    module, params = make(SparseConfig(n_experts=E, d_ff=F, renormalize=renormalize))
    params, x = with_equal_experts(params), tokens()
    plain = swiglu(np.asarray(x, np.float64), *expert(numpy_params(params), 0))
    p = np.sort(softmax(np.asarray(x, np.float64) @ numpy_params(params)["router"]["w"]))
    weight = 1 if renormalize else p[..., -2:].sum(-1, keepdims=True)
    assert_close(call(module, params, x)[0], weight * plain)


def test_with_all_experts_it_is_the_dense_mixture_in_values_and_all_gradients():
    module, params = make(SparseConfig(n_experts=E, d_ff=F, top_k=E, renormalize=False))
    dense, _ = make(DenseConfig(n_experts=E, d_ff=F))
    x = tokens()
    assert_close(call(module, params, x)[0], call(dense, params, x)[0])
    assert_close(gradients(module, params, x), gradients(dense, params, x), 1e-4)


def test_permuting_tokens_permutes_outputs(sparse):
    x, order = tokens(1, 10), jnp.array([3, 1, 9, 0, 2, 8, 7, 5, 6, 4])
    assert_close(call(*sparse, x[:, order])[0], call(*sparse, x)[0][:, order])


def test_with_a_capacity_the_order_of_tokens_matters():
    module, params = make(SparseConfig(n_experts=E, d_ff=F, capacity_factor=0.5))
    x, order = tokens(1, 10), jnp.arange(10)[::-1]
    run = lambda x: call(module, params, x, deterministic=False)[0]  # noqa: E731
    assert np.abs(run(x[:, order]) - run(x)[:, order]).max() > 1e-2


def test_permuting_experts_with_the_router_changes_nothing(sparse):
    module, params = sparse
    order = jnp.array([2, 0, 3, 1])
    moved = {n: w[order] for n, w in params.items() if n != "router"}
    moved["router"] = {"w": params["router"]["w"][:, order]}
    y, stats, _ = call(module, params, tokens())
    y_moved, stats_moved, _ = call(module, moved, tokens())
    assert_close(y, y_moved)
    np.testing.assert_array_equal(stats.counts[order], stats_moved.counts)


def test_dropped_assignments_add_nothing_and_their_weight_goes_nowhere():
    config = SparseConfig(n_experts=E, d_ff=F, capacity_factor=0.5)
    module, params = make(config)
    x = tokens(2, 8)
    y, stats, _ = call(module, params, x, deterministic=False)
    wide, inputs = numpy_params(params), np.asarray(x, np.float64)
    expected, gates, dropped = np.zeros_like(inputs), np.zeros(E), 0
    for b in range(2):
        places = np.zeros(E)
        for t in range(8):
            p = softmax(inputs[b, t] @ wide["router"]["w"])
            chosen = np.argsort(-p)[:2]
            for e in chosen:
                places[e] += 1
                if places[e] > 2:  # ceil(0.5 * 2 * 8 / 4)
                    dropped += 1
                    continue
                weight = p[e] / p[chosen].sum()
                gates[e] += weight
                expected[b, t] += weight * swiglu(inputs[b, t], *expert(wide, e))
    assert dropped > 0
    assert_close(y, expected)
    assert stats.dropped == dropped and stats.counts.sum() == 32
    np.testing.assert_allclose(stats.gate_sum, gates, rtol=1e-5)


def test_evaluation_is_dropless_and_so_is_a_large_capacity(sparse):
    module, params = make(SparseConfig(n_experts=E, d_ff=F, capacity_factor=0.1))
    x = tokens()
    dropless = call(*sparse, x)
    assert_close(call(module, params, x)[:2], dropless[:2])
    roomy, _ = make(SparseConfig(n_experts=E, d_ff=F, capacity_factor=E / 2))
    assert_close(call(roomy, params, x, deterministic=False)[:2], dropless[:2])


def numpy_chosen(x, params, config, places):
    """y, where `places(scores [T, E], router's parameters)` gives every token's [(expert, weight), ...]."""
    wide, x = numpy_params(params), np.asarray(x, np.float64)
    y = np.zeros_like(x)
    for b in range(len(x)):
        logits = x[b] @ wide["router"]["w"] + wide["router"].get("bias", 0)
        scores = softmax(logits) if config.score != "sigmoid" else 1 / (1 + np.exp(-logits))
        for t, served in enumerate(places(scores, wide["router"])):
            y[b, t] = sum((w * swiglu(x[b, t], *expert(wide, e)) for e, w in served), np.zeros(D))
    return config.routed_scale * y


def shares(scores, chosen, renormalize=True):
    total = sum(scores[e] for e in chosen) if renormalize else 1
    return [(e, scores[e] / total) for e in chosen]


@pytest.mark.parametrize(
    "fields",
    [
        {"score": "sigmoid", "selection_bias": True, "routed_scale": 2.5, "router_bias": True},
        {"score": "sigmoid", "selection_bias": True, "n_groups": 2, "top_groups": 1, "group_score": "top2_sum"},
        {"score": "softmax_selected", "router_bias": True},
        {"n_null_experts": 2, "top_k": 3},
    ],
)
def test_is_the_formula_with_other_routers(fields):
    config = SparseConfig(n_experts=E, d_ff=F, **fields)
    module, params = make(config)

    def places(scores, router):
        for row in scores:
            ranking = row + router.get("selection_bias", 0)
            if config.top_groups:
                best = np.sort(ranking.reshape(2, 2), axis=1).sum(1).argmax()
                ranking = np.where(np.arange(E) // 2 == best, ranking, -np.inf)
            chosen = [e for e in np.argsort(-ranking)[: config.k] if e < E]
            yield shares(row, chosen) if chosen else []

    x = tokens(2, 8)
    y, stats, _ = call(module, params, x)
    assert_close(y, numpy_chosen(x, params, config, places))
    assert stats.counts.sum() == 16 * config.k and stats.tokens == 16
    if config.n_null_experts:
        assert np.any(stats.counts[E:]) and not np.any(stats.gate_sum[E:])


def test_null_experts_cost_nothing():
    """Nothing that the experts are called with names one: tokens of null experts reach none."""
    seen = []

    def count(x, indices, weights, params, hidden, share):
        seen.append(np.asarray(indices))
        return sorted_experts(x, indices, weights, params, hidden)

    config = SparseConfig(n_experts=E, d_ff=F, n_null_experts=2)
    module, params = make(config)
    mask = jnp.ones((2, 6), bool).at[1, 3:].set(False)
    ids = mask.astype(jnp.int32)
    _, stats, _ = module.clone(experts=count).apply({"params": params}, tokens(), mask, positions=ids, segment_ids=ids)
    assert (seen[0] < E).sum() == stats.counts[:E].sum() and stats.counts.sum() == 18


def test_rerouted_tokens_go_to_their_next_best_experts_with_their_own_scores():
    config = SparseConfig(n_experts=E, d_ff=F, capacity_factor=0.75, overflow="reroute")
    module, params = make(config)

    def places(scores, router):
        room = np.full(E, 3)  # ceil(0.75 * 2 * 8 / 4)
        for row in scores:
            chosen = [e for e in np.argsort(-row) if room[e] > 0][:2]
            room[chosen] -= 1
            yield shares(row, chosen) if chosen else []

    x = tokens(2, 8)
    y, stats, _ = call(module, params, x, deterministic=False)
    expected = numpy_chosen(x, params, config, places)
    assert_close(y, expected)
    assert stats.counts.sum() == 32 and stats.dropped == 2 * (16 - 4 * 3)
    wished = call(*make(CONFIG), x)[1].counts
    np.testing.assert_array_equal(stats.counts, wished)  # before rerouting
    served = np.any(expected != 0, axis=-1).sum()  # with a weight of 1 in all, also by one expert alone
    np.testing.assert_allclose(stats.gate_sum.sum(), served, rtol=1e-5)
    roomy = SparseConfig(n_experts=E, d_ff=F, capacity_factor=E / 2, overflow="reroute")
    found = call(make(roomy)[0], params, x, deterministic=False)
    assert_close(found[:2], call(*make(CONFIG), x)[:2])


@pytest.mark.parametrize("deterministic", [True, False])
def test_experts_choose_their_best_tokens(deterministic):
    config = SparseConfig(n_experts=E, d_ff=F, choice="expert", capacity_factor=0.5, routed_scale=2.0)
    module, params = make(config)

    def places(scores, router):
        best = np.argsort(-scores, axis=0)[:2]  # ceil(0.5 * 2 * 8 / 4)
        return [[(e, row[e]) for e in range(E) if t in best[:, e]] for t, row in enumerate(scores)]

    x = tokens(2, 8)
    y, stats, cache = call(module, params, x, deterministic=deterministic)
    expected = numpy_chosen(x, params, config, places)
    assert_close(y, expected)
    assert np.any(np.all(expected == 0, axis=-1)) and cache is None  # tokens that no expert chose
    np.testing.assert_array_equal(stats.counts, [4] * E)
    grads, dx = gradients(module, params, x)
    assert all(np.any(g) for g in jax.tree.leaves(grads)) and np.all(np.isfinite(dx))


def test_experts_choose_no_padding_and_no_other_row():
    config = SparseConfig(n_experts=E, d_ff=F, choice="expert", n_shared_experts=1)
    module, params = make(config)
    x = tokens(2, 6)
    mask = jnp.array([[1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 0]], bool)
    y, stats, _ = call(module, params, x, mask)
    other = call(module, params, jnp.where(mask[..., None], x, 1e3), mask)
    assert_close((y[mask], stats), (other[0][mask], other[1]))
    np.testing.assert_array_equal(stats.counts, [3 + 2] * E)  # ceil(2 * 6 / 4), and all that the second row has
    assert_close(y[:1], call(module, params, x[:1])[0])
    empty = call(module, params, x, jnp.zeros((2, 6), bool))
    assert not np.any(empty[1].counts) and not np.any(empty[1].gate_sum)


@pytest.mark.parametrize(
    "config",
    [
        SparseConfig(n_experts=E, d_ff=F, capacity_factor=0.5),
        SparseConfig(n_experts=E, d_ff=F, capacity_factor=0.5, overflow="reroute"),
        SparseConfig(n_experts=E, d_ff=F, capacity_factor=0.5, priority="choice"),
        SparseConfig(n_experts=E, d_ff=F, capacity_factor=0.5, priority="probability"),
        SparseConfig(n_experts=E, d_ff=F, choice="expert", top_k=1),
    ],
)
def test_who_looks_ahead_is_what_the_config_says(config):
    """Each token is changed in two ways: a small change may move no place."""
    module, params = make(config)
    x = tokens(1, 6)
    run = lambda x: call(module, params, x, deterministic=False)[0][0]  # noqa: E731
    change = lambda s: [x.at[0, s].add(0.7), x.at[0, s].multiply(-2.0)]  # noqa: E731
    moved = np.stack([np.max([np.abs(run(c) - run(x)).max(-1) for c in change(s)], axis=0) for s in range(6)], 1)
    assert np.all(np.diag(moved)[:2] > 0)
    assert np.any(np.triu(moved, 1) > 1e-6) != config.causal


def test_dropless_routing_is_causal_in_training(sparse):
    moved = influence(*sparse, tokens(1, 6), deterministic=False)
    assert not np.any(np.triu(moved, 1)) and np.any(moved)


def test_padding_and_other_rows_change_no_real_token(sparse):
    module, params = sparse
    x = tokens(2, 6)
    mask = jnp.array([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0]], bool)
    y, stats, _ = call(module, params, x, mask)
    noisy = jnp.where(mask[..., None], x, 1e3)
    y_noisy, stats_noisy, _ = call(module, params, noisy, mask)
    np.testing.assert_array_equal(y, y_noisy)
    assert_close(stats, stats_noisy)
    assert not np.any(y[~mask])
    alone, stats_alone, _ = call(module, params, x[1:][:, jnp.array([1, 2, 4])])
    assert_close(y[1][mask[1]], alone[0])
    first = call(module, params, x[:1])[1]
    assert_close(stats, jax.tree.map(jnp.add, first, stats_alone))


@pytest.mark.parametrize("batch, length, top_k, n_experts", [(1, 1, 2, 4), (2, 7, 3, 5), (1, 3, 1, 1), (2, 5, 4, 4)])
def test_odd_sizes_and_rows_of_padding_are_finite(batch, length, top_k, n_experts):
    module, params = make(SparseConfig(n_experts=n_experts, d_ff=F, top_k=top_k, renormalize=top_k > 1))
    x = tokens(batch, length)
    assert_close(call(module, params, x)[0], numpy_sparse(x, params, top_k, top_k > 1))
    y, stats, _ = call(module, params, x, jnp.zeros((batch, length), bool))
    assert not np.any(y) and not np.any(stats.counts) and stats.tokens == 0


def test_rows_of_padding_and_unused_experts_have_gradients_of_exactly_zero(sparse):
    module, params = sparse
    x = tokens()
    for grad in jax.tree.leaves(gradients(module, params, x, jnp.zeros((2, 6), bool))):
        assert not np.any(grad)
    only_two = params | {"router": {"w": jnp.zeros((D, E)).at[0, :2].set(jnp.sign(x[0, 0, 0]) * 50)}}
    one = jnp.zeros((2, 6), bool).at[0, 0].set(True)
    grads, dx = gradients(module, only_two, x, one)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves((grads, dx)))
    for name in ("w_gate", "w_up", "w_down"):
        assert np.any(grads[name][:2]) and not np.any(grads[name][2:])


def test_shared_experts_serve_every_token_unscaled():
    module, params = make(SparseConfig(n_experts=E, d_ff=F, n_shared_experts=2))
    x = tokens()
    assert params["shared"]["w_up"].shape == (D, 2 * F)
    shared = numpy_params(params)["shared"]
    plain = swiglu(np.asarray(x, np.float64), shared["w_gate"], shared["w_up"], shared["w_down"])
    assert np.abs(plain).max() > 0.1
    assert_close(call(module, params, x)[0], numpy_sparse(x, params, 2, True) + plain)


def test_without_a_gate():
    module, params = make(CONFIG, glu=False, activation="relu")
    assert set(params) == {"router", "w_up", "w_down"}
    x = tokens(1, 3)
    wide, inputs = numpy_params(params), np.asarray(x[0], np.float64)
    for t in range(3):
        p = softmax(inputs[t] @ wide["router"]["w"])
        best = np.argsort(-p)[:2]
        outputs = [np.maximum(inputs[t] @ wide["w_up"][e], 0) @ wide["w_down"][e] for e in best]
        assert_close(call(module, params, x)[0][0, t], p[best] @ outputs / p[best].sum())


def test_slices_of_experts_add_up():
    """What expert parallelism does: each device its own experts, and a sum over devices."""
    _, params = make(CONFIG)
    params = FFNParams(params["w_gate"], params["w_up"], params["w_down"])
    x, indices = tokens(1, 9)[0], jax.random.randint(jax.random.key(0), (9, 2), 0, E + 1)  # E: to no expert
    weights = jax.random.uniform(jax.random.key(1), (9, 2))
    silu, part = HiddenUnits("silu"), lambda i: jax.tree.map(lambda w: w[i : i + 2], params)
    run = jax.jit(some_experts, static_argnums=(4, 6))
    slices = [run(x, indices, weights, part(i), silu, i, most_rows(9, 2, 2, None)) for i in (0, 2)]
    whole = jax.jit(sorted_experts, static_argnums=4)(x, indices, weights, params, silu)
    assert_close(sum(slices), whole)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 12, 24])
def test_a_share_bounds_what_any_device_may_hold(n_tokens):
    """Of 24 tokens in sequences of 6, cut into parts of n: each expert's places in all sequences that a part meets."""
    share = Share(tokens=6, places=2)
    parts = [range(start, start + n_tokens) for start in range(0, 24, n_tokens)]
    met = max(len({token // 6 for token in part}) for part in parts)
    assert met * 2 * 3 <= share.most(n_tokens, 3) <= (met + 1) * 2 * 3
    if 6 % n_tokens == 0 or n_tokens % 6 == 0:
        assert share.most(n_tokens, 3) == met * 2 * 3
    assert most_rows(n_tokens, 2, 3, share) == min(2 * n_tokens, share.most(n_tokens, 3))
    assert most_rows(n_tokens, 4, 3, None) == 3 * n_tokens


def test_gradients_of_gates_router_and_experts_equal_finite_differences():
    keys = jax.random.split(jax.random.key(0), 5)
    with jax.enable_x64(True):
        x, w_router = (jax.random.normal(k, s, jnp.float64) for k, s in zip(keys, ((5, D), (D, E)), strict=False))
        shapes = ((E, D, F), (E, D, F), (E, F, D))
        experts = [0.3 * jax.random.normal(k, s, jnp.float64) for k, s in zip(keys[2:], shapes, strict=True)]

        @jax.jit
        def mixture(x, w_router, *experts):
            indices, weights, _ = route(x @ w_router, SparseConfig(n_experts=4, top_k=2))
            return sorted_experts(x, indices, weights, FFNParams(*experts), HiddenUnits("silu"))

        check_grads(mixture, (x, w_router, *experts), order=1, modes=["rev"], rtol=1e-5, atol=1e-5, eps=1e-6)


def test_parameters_declare_what_they_are():
    module = build_moe(block_of(CONFIG, out_init="zero"))
    boxed = jax.jit(partial(initialize, module))(jax.random.key(0))
    up, down, router = boxed["w_up"], boxed["w_down"], boxed["router"]["w"]
    assert up.axes == boxed["w_gate"].axes == ("expert", "embed", "mlp") and up.inputs == ("embed",)
    assert down.axes == ("expert", "mlp", "embed") and down.inputs == ("mlp",) and down.outputs == ("embed",)
    assert up.role == down.role == "matrix" and router.role == "router" and router.axes == ("embed", "expert")
    assert not np.any(down.value) and 0.4 < np.std(up.value) < 0.6
