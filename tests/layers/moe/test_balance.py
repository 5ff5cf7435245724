import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import call, make, tokens
from test_router import LOGITS, MASK, golden_stats

from zoo.config import SparseConfig
from zoo.layers.moe.balance import (
    balance_loss,
    communication_loss,
    device_loss,
    importance_cv2,
    to_huggingface,
    to_unbiased,
    z_loss,
)
from zoo.layers.moe.router import RoutingStats, route, routing_stats


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


def test_golden_device_communication_and_sequence_losses():
    stats = golden_stats(n_groups=2)
    np.testing.assert_allclose(device_loss(stats, 2, 2), 1.14325816, rtol=1e-6)
    np.testing.assert_allclose(communication_loss(stats, 2), 0.87162908, rtol=1e-6)
    np.testing.assert_allclose(balance_loss(golden_stats(kind="sigmoid"), 2), 1.06745040, rtol=1e-6)
    np.testing.assert_allclose(to_unbiased(importance_cv2(stats), 4), 0.56400989, rtol=1e-5)


def test_golden_losses_with_padding_counted_are_others():
    stats = golden_stats(jnp.ones(6))
    np.testing.assert_allclose(balance_loss(stats, 2), 1.20301875, rtol=1e-6)
    np.testing.assert_allclose(z_loss(stats), 22.07907813, rtol=1e-6)


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
    total = lambda s: balance_loss(s, 2) + z_loss(s) + importance_cv2(s)  # noqa: E731
    assert total(empty) == 0
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
