"""Places of experts: the golden tables of priorities and expert choice, rerouting, and what is causal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixtures import call, make, softmax, tokens
from test_router import LOGITS, MASK

from zoo.config import SparseConfig
from zoo.layers.moe.capacity import expert_choice, reroute, within_capacity
from zoo.layers.moe.router import route

TABLES = {
    "token": {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (4, 1)},
    "choice": {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (4, 1)},
    "probability": {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (4, 0), (4, 1)},
}


@pytest.mark.parametrize("priority", TABLES)
def test_golden_tables(priority):
    indices = route(LOGITS, SparseConfig(n_experts=4, top_k=2)).indices
    likelihood = jax.nn.softmax(LOGITS).max(-1)
    kept = within_capacity(indices[None], MASK[None] > 0, 4, 2, priority, likelihood[None])[0]
    assert {tuple(map(int, at)) for at in np.argwhere(kept)} == TABLES[priority]


def test_golden_expert_choice():
    chosen, weights = expert_choice(jax.nn.softmax(LOGITS)[None], MASK[None] > 0, 2)
    assert chosen[0].tolist() == [[4, 0], [1, 3], [1, 3], [2, 3]]
    p = softmax(np.asarray(LOGITS, np.float64))
    np.testing.assert_allclose(weights[0], [[p[t, e] for t in row] for e, row in enumerate(chosen[0])], rtol=1e-6)


def test_an_expert_takes_no_padding_where_tokens_run_out():
    chosen, weights = expert_choice(jax.nn.softmax(LOGITS)[None], jnp.arange(6)[None] < 1, 3)
    assert chosen[0].tolist() == [[0, 6, 6]] * 4
    assert np.all(weights[0, :, 0] > 0) and not np.any(weights[0, :, 1:])


def rerouted(ranking, mask, top_k, limit):
    """Token by token, each its best experts with room."""
    room, found = [limit] * ranking.shape[1], []
    for ranks, real in zip(ranking, mask, strict=True):
        order = [int(e) for e in np.argsort(-ranks, kind="stable") if room[e] > 0 and ranks[e] > -np.inf]
        mine = order[:top_k] if real else []
        for e in mine:
            room[e] -= 1
        found.append(mine)
    return found


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_rerouting_is_the_rule(seed, length, top_k, limit):
    rng = np.random.default_rng(seed)
    ranking, mask = rng.normal(size=(9, 4)).astype(np.float32), np.arange(9) < length
    indices, placed = _reroute(jnp.asarray(ranking)[None], jnp.asarray(mask)[None], top_k, limit)
    pairs = [zip(row, there, strict=True) for row, there in zip(indices, placed, strict=True)]
    found = [[int(e) for e, ok in pair if ok] for pair in pairs]
    assert found == rerouted(ranking, mask, top_k, limit)


def _reroute(ranking, mask, top_k, limit):
    indices, placed = jax.jit(reroute, static_argnums=(2, 3, 4))(ranking, mask, top_k, 4, limit)
    return indices[0].tolist(), placed[0].tolist()


def influence(config, deterministic):
    """[t, s]: how much the output at t moves with the input at s."""
    module, params = make(config)
    x = tokens(1, 6)
    run = lambda x: call(module, params, x, deterministic=deterministic)[0][0]  # noqa: E731
    moved = [jnp.abs(run(x.at[0, s].add(0.7)) - run(x)).max(-1) for s in range(6)]
    moved += [jnp.abs(run(x.at[0, s].multiply(-2.0)) - run(x)).max(-1) for s in range(6)]
    return np.maximum(np.stack(moved[:6], axis=1), np.stack(moved[6:], axis=1))


SIZES = {"n_experts": 4, "d_ff": 12}


@pytest.mark.parametrize(
    ("causal", "config"),
    [
        (True, SparseConfig(**SIZES, capacity_factor=0.5, overflow="reroute")),
        (True, SparseConfig(**SIZES, capacity_factor=0.5)),
        (False, SparseConfig(**SIZES, capacity_factor=0.5, priority="choice")),
        (False, SparseConfig(**SIZES, capacity_factor=0.5, priority="probability")),
        (False, SparseConfig(**SIZES, choice="expert", top_k=1)),
    ],
)
def test_who_looks_ahead_is_what_the_config_says(causal, config):
    assert config.causal == causal
    later = np.triu(influence(config, deterministic=False), 1)
    assert np.any(later > 1e-6) != causal


def test_rerouted_tokens_use_their_own_scores_and_are_not_dropped():
    module, params = make(SparseConfig(**SIZES, capacity_factor=0.5, overflow="reroute"))
    _, stats, _ = call(module, params, tokens(2, 8), deterministic=False)
    assert stats.dropped >= 0 and float(stats.gate_sum.sum()) <= 16 + 1e-4
    roomy, _ = make(SparseConfig(**SIZES, capacity_factor=4.0, overflow="reroute"))
    dropless, _ = make(SparseConfig(**SIZES))
    found = call(roomy, params, tokens(2, 8), deterministic=False)
    expected = call(dropless, params, tokens(2, 8))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
