import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import call, make, tokens
from test_router import LOGITS, MASK, golden_stats

from zoo.config import DenseConfig, SparseConfig
from zoo.layers.moe.balance import (
    balance_loss,
    communication_loss,
    cv2,
    device_loss,
    importance_cv2,
    load_cv2,
    loss_weights,
    losses,
    moved_bias,
    sequence_loss,
    to_huggingface,
    to_unbiased,
    z_loss,
)
from zoo.layers.moe.router import Logits, RoutingStats, route, routing_stats
from zoo.layers.moe.sparse import sparse_stats

# Weights of the losses that have none by default.
EVERY = {name + "_weight": 0.1 for name in ("importance", "load", "device", "communication")} | {"n_groups": 2}


def stats_of(counts, probs, tokens):
    counts, probs = jnp.asarray(counts, jnp.float32), jnp.asarray(probs, jnp.float32)
    zero = jnp.zeros(counts.shape[:-1])
    return RoutingStats(counts, probs, counts, zero + tokens, zero, zero, zero, 0 * counts, zero[..., None], zero, zero)


def test_golden_losses():
    stats = golden_stats()
    np.testing.assert_allclose(balance_loss(stats, 2), 1.16738459, rtol=1e-6)
    np.testing.assert_allclose(to_huggingface(balance_loss(stats, 2), 2), 2.33476918, rtol=1e-6)
    np.testing.assert_allclose(z_loss(stats), 6.09849970, rtol=1e-6)
    np.testing.assert_allclose(importance_cv2(stats), 0.42300742, rtol=1e-5)


def test_golden_losses_of_groups_sequences_and_other_scales():
    stats = golden_stats(n_groups=2)
    np.testing.assert_allclose(device_loss(stats, 2, 2), 1.14325816, rtol=1e-6)
    np.testing.assert_allclose(communication_loss(stats, 2), 0.87162908, rtol=1e-6)
    np.testing.assert_allclose(to_unbiased(importance_cv2(stats), 4), 0.56400989, rtol=1e-5)


def test_golden_sequence_loss():
    """DeepSeek-V3's, of one sequence; through the layer's statistics."""
    config = SparseConfig(n_experts=4, score="sigmoid", balance_scope="sequence")
    chosen = jax.nn.one_hot(route(LOGITS, config).indices, 4).sum(1)
    stats = sparse_stats(
        Logits(LOGITS[None], LOGITS[None], None), MASK[None] > 0, chosen[None], chosen[None], 0.0, config
    )
    np.testing.assert_allclose(sequence_loss(stats), 1.06745040, rtol=1e-6)
    assert stats.sequences == 1


def test_golden_losses_with_padding_counted_are_others():
    stats = golden_stats(jnp.ones(6))
    np.testing.assert_allclose(balance_loss(stats, 2), 1.20301875, rtol=1e-6)
    np.testing.assert_allclose(z_loss(stats), 22.07907813, rtol=1e-6)
    masked = LOGITS * MASK[:, None]  # each token of padding adds (log E)^2
    chosen = jnp.zeros((6, 4))
    np.testing.assert_allclose(z_loss(routing_stats(masked, jnp.ones(6), chosen, chosen)), 5.40238509, rtol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_one_at_balance_and_e_over_k_at_collapse(top_k):
    n_experts, n = 8, 16
    even = np.full(n_experts, n / n_experts)
    np.testing.assert_allclose(balance_loss(stats_of(even * top_k, even, n), top_k), 1, rtol=1e-6)
    some = (np.arange(n_experts) < top_k).astype(float)
    collapsed = stats_of(some * n, some * n / top_k, n)
    np.testing.assert_allclose(balance_loss(collapsed, top_k), n_experts / top_k, rtol=1e-6)


def test_layers_that_collapse_on_different_experts_do_not_cancel():
    n_experts, n, top_k = 8, 16, 2
    used = np.repeat(np.eye(4), 2, axis=1)
    loss = balance_loss(stats_of(used * n, used * n / top_k, n), top_k)
    np.testing.assert_allclose(loss, np.full(4, n_experts / top_k), rtol=1e-6)


def test_gradient_flows_through_the_mean_probabilities_alone():
    stats = golden_stats()
    grad = jax.grad(lambda s: balance_loss(s, 2))(stats)
    assert not np.any(grad.counts)
    np.testing.assert_allclose(grad.prob_sum, 4 / 2 * stats.counts / 25, rtol=1e-6)


def test_no_tokens_give_zero_with_finite_gradients():
    empty = stats_of(np.zeros(4), np.zeros(4), 0.0)
    config = SparseConfig(n_experts=4, noisy_top_k=True, **EVERY)
    sequences = SparseConfig(n_experts=4, balance_scope="sequence")
    total = lambda s: sum(losses(s, config).values()) + losses(s, sequences)["balance"]  # noqa: E731
    assert total(empty) == 0 and len(losses(empty, config)) == 6
    assert all(np.all(np.isfinite(g)) for g in jax.grad(total)(empty))


def test_micro_batches_and_padding_do_not_change_the_losses_of_summed_statistics():
    def stats(logits, mask):
        indices, weights, _ = route(logits, SparseConfig(n_experts=4, top_k=2))
        chosen = jax.nn.one_hot(indices, 4)
        return routing_stats(logits, mask, chosen.sum(1), (chosen * weights[..., None]).sum(1))

    whole = stats(LOGITS, MASK)
    parts = [stats(LOGITS[i:j], MASK[i:j]) for i, j in ((0, 2), (2, 3), (3, 6))]
    summed = jax.tree.map(lambda *s: sum(s), *parts)
    padded = stats(jnp.pad(LOGITS, ((0, 3), (0, 0)), constant_values=5.0), jnp.pad(MASK, (0, 3)))
    for other in (summed, padded):
        np.testing.assert_allclose(balance_loss(other, 2), balance_loss(whole, 2), rtol=1e-6)
        np.testing.assert_allclose(z_loss(other), z_loss(whole), rtol=1e-6)
    mean_of_parts = np.mean([balance_loss(p, 2) for p in parts])
    assert abs(mean_of_parts - balance_loss(whole, 2)) > 0.1  # which is why statistics are summed


def test_the_router_gets_the_gradient_of_the_losses_by_finite_differences():
    """The balance loss reaches the router's weight, and rematerializing the layer changes nothing."""
    module, params = make(SparseConfig(n_experts=4, d_ff=8))
    x = tokens(1, 5)

    def loss(w):
        stats = call(module, params | {"router": {"w": w}}, x)[1]
        return balance_loss(stats, 2) + z_loss(stats)

    w = params["router"]["w"]
    grad = jax.grad(loss)(w)
    direction, step = grad / jnp.linalg.norm(grad), 1e-2
    measured = (loss(w + step * direction) - loss(w - step * direction)) / (2 * step)
    np.testing.assert_allclose(measured, jnp.linalg.norm(grad), rtol=2e-2)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(loss))(w), grad, rtol=1e-5)


# ---------------------------------------------------------------------------------- the formulas


def random_routing(n_tokens=40, n_experts=6, top_k=2, seed=0):
    """Probabilities [T, E] and who chose whom, in float64."""
    probs = np.random.default_rng(seed).dirichlet(np.ones(n_experts), n_tokens)
    return probs, np.eye(n_experts)[np.argsort(-probs)[:, :top_k]].sum(1)


def as_stats(probs, chosen, n_groups=1):
    logits = jnp.log(jnp.asarray(probs, jnp.float32))
    ones = jnp.ones(len(probs))
    return routing_stats(logits, ones, jnp.asarray(chosen, jnp.float32), jnp.asarray(probs * chosen), n_groups=n_groups)


def test_device_and_communication_losses_are_the_formulas():
    """Token by token and group by group, with three groups of two experts; 15 to 17 and 29 to 31."""
    probs, chosen = random_routing()
    P, D, k = probs.mean(0), 3, 2
    f = np.array([6 / (k * 40) * chosen[:, e].sum() for e in range(6)])
    device = sum(f[2 * i : 2 * i + 2].mean() * P[2 * i : 2 * i + 2].sum() for i in range(D))
    sent = [sum(any(token[2 * i : 2 * i + 2]) for token in chosen) for i in range(D)]
    communication = sum(D / (2 * 40) * sent[i] * P[2 * i : 2 * i + 2].sum() for i in range(D))
    stats = as_stats(probs, chosen, n_groups=3)
    np.testing.assert_allclose(device_loss(stats, k, 3), device, rtol=1e-5)
    np.testing.assert_allclose(communication_loss(stats, 2), communication, rtol=1e-5)


def test_losses_of_groups_are_one_at_balance():
    stats = as_stats(np.full((4, 4), 0.25), np.array([[1, 0, 1, 0], [0, 1, 0, 1]] * 2), n_groups=2)
    np.testing.assert_allclose([device_loss(stats, 2, 2), communication_loss(stats, 2)], 1, rtol=1e-6)


def test_variation_is_the_formula():
    values = np.array([[1.0, 2.0, 5.0], [3.0, 3.0, 3.0]])
    np.testing.assert_allclose(cv2(jnp.asarray(values)), values.var(1) / values.mean(1) ** 2, rtol=1e-6)
    np.testing.assert_allclose(
        to_unbiased(cv2(jnp.asarray(values)), 3)[0], values[0].var(ddof=1) / values[0].mean() ** 2
    )


def test_null_experts_enter_with_their_mean_load():
    """Which of them a token chose is of no account, as in AdaMoE: the load is averaged, the probabilities are not."""
    probs, chosen = random_routing(n_experts=5)
    stats = as_stats(probs, chosen)
    f = chosen.mean(0)
    f[3:] = f[3:].mean()
    np.testing.assert_allclose(balance_loss(stats, 2, 3), 5 / 2 * (f * probs.mean(0)).sum(), rtol=1e-5)
    other = as_stats(probs, chosen[:, [0, 1, 2, 4, 3]])
    np.testing.assert_allclose(balance_loss(other, 2, 3), balance_loss(stats, 2, 3), rtol=1e-6)
    assert abs(balance_loss(other, 2) - balance_loss(stats, 2)) > 1e-4
    gates = (probs * chosen).sum(0)[:3]
    np.testing.assert_allclose(importance_cv2(stats, 3), gates.var() / gates.mean() ** 2, rtol=1e-5)
    loads = stats._replace(load_sum=jnp.array([1.0, 2.0, 3.0, 0.0, 4.0]))
    np.testing.assert_allclose(load_cv2(loads, 3), np.var([1, 2, 3, 2, 2]) / 4, rtol=1e-6)


def test_scope_decides_over_what_the_loss_is_balanced():
    """Two rows that use two experts each are balanced as a batch, and not as sequences. Empty rows count nothing."""
    logits = jnp.tile(jnp.array([[[4.0, 4, 0, 0]], [[0, 0, 4, 4.0]], [[9, 0, 0, 0]]]), (1, 6, 1))
    mask = jnp.array([1, 1, 0], bool)[:, None] & jnp.array([1, 1, 1, 1, 1, 0], bool)
    config = SparseConfig(n_experts=4, balance_scope="sequence")
    chosen = jax.nn.one_hot(route(logits, config).indices, 4).sum(-2)
    stats = sparse_stats(Logits(logits, logits, None), mask, chosen, chosen, 0.0, config)
    np.testing.assert_allclose(balance_loss(stats, 2), 1, rtol=1e-6)
    p = np.exp(4) / (2 * np.exp(4) + 2)
    np.testing.assert_allclose(losses(stats, config)["balance"], 4 / 2 * 2 * p, rtol=1e-5)
    assert stats.sequences == 2


def test_a_loss_without_a_weight_is_not_computed():
    stats = golden_stats(n_groups=2)
    assert set(losses(stats, SparseConfig(n_experts=4))) == {"balance", "z"}
    assert set(losses(stats, SparseConfig(n_experts=4, n_groups=2, device_weight=1.0))) == {"balance", "z", "device"}
    assert set(losses(stats, DenseConfig(n_experts=4))) == {"balance", "z"} == set(loss_weights(DenseConfig()))
    assert loss_weights(SparseConfig(n_groups=2, communication_weight=0.5, z_weight=0.0)) == {
        "balance": 0.01,
        "z": 0.0,
        "importance": 0.0,
        "load": 0.0,
        "device": 0.0,
        "communication": 0.5,
    }


@pytest.mark.parametrize("name", ["importance", "load", "device", "communication", "sequence"])
def test_every_loss_reaches_the_router(name):
    scope = {"balance_scope": "sequence"} if name == "sequence" else EVERY
    config = SparseConfig(n_experts=4, d_ff=8, noisy_top_k=True, **scope)
    module, params = make(config)
    x, key = tokens(1, 5), jax.random.key(0)

    def loss(params):
        stats = call(module, params, x, deterministic=False, rng=key)[1]
        return losses(stats, config)["balance" if name == "sequence" else name]

    grads = jax.grad(loss)(params)
    assert np.any(grads["router"]["w"]) and np.any(grads["router"]["w_noise"]) == (name in ("importance", "load"))
    assert not np.any(grads["w_up"])


# ------------------------------------------------------------------------- balance without a loss


def test_the_bias_moves_against_the_load():
    bias = jnp.array([[0.5, 0.0, 0.0, -0.2], [0.0, 0.0, 0.0, 0.0]])
    counts = jnp.array([[4.0, 1.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    moved = moved_bias(bias, counts, 0.1, 4)
    np.testing.assert_allclose(moved, [[0.4, 0.1, 0.0, -0.1], [0, 0, 0, 0]], rtol=1e-6)
    null = moved_bias(jnp.zeros(4), jnp.array([2.0, 1.0, 0.0, 4.0]), 0.1, 2)  # the mean is 7/4, the nulls' own 2
    np.testing.assert_allclose(null, [-0.1, 0.1, -0.1, -0.1], rtol=1e-6)


def test_the_bias_evens_out_the_load_of_a_router_that_prefers_one_expert():
    logits = jax.random.normal(jax.random.key(0), (200, 4)) + jnp.array([3.0, 0, 0, -1])
    config = SparseConfig(n_experts=4, score="sigmoid", selection_bias=True, selection_bias_rate=0.02)
    bias = jnp.zeros(4)
    load = lambda bias: jax.nn.one_hot(route(logits, config, bias).indices, 4).sum((0, 1))  # noqa: E731
    before = load(bias)
    for _ in range(60):
        bias = moved_bias(bias, load(bias), config.selection_bias_rate, 4)
    assert before.max() > 190 and load(bias).max() < 125 and load(bias).min() > 75
