import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_router import LOGITS, four

from zoo.layers.moe.capacity import capacity, expert_choice, reroute, within_capacity
from zoo.layers.moe.router import route

REAL = jnp.arange(6)[None] < 5
PRIORITIES = ("token", "choice", "probability")


def numpy_order(priority, length, top_k, likelihood):
    """(token, choice) in the order in which they ask for a place."""
    if priority == "token":
        return [(t, j) for t in range(length) for j in range(top_k)]
    by = range(length) if priority == "choice" else np.argsort(-np.asarray(likelihood), kind="stable")
    return [(t, j) for j in range(top_k) for t in by]


def numpy_kept(indices, mask, n_experts, limit, priority, likelihood):
    """One sequence, assignment by assignment."""
    room = np.full(n_experts, limit)
    kept = np.zeros(indices.shape, bool)
    for t, j in numpy_order(priority, *indices.shape, likelihood):
        e = indices[t, j]
        if mask[t] and (e >= n_experts or room[e] > 0):
            kept[t, j] = True
            room[e : e + 1] -= 1  # of a null expert, nothing
    return kept


def numpy_reroute(ranking, mask, top_k, n_experts, limit):
    room = np.where(np.arange(ranking.shape[1]) < n_experts, limit, np.inf)
    placed = []
    for ranks, real in zip(ranking, mask, strict=True):
        best = [e for e in np.argsort(-ranks, kind="stable") if real and room[e] > 0 and ranks[e] > -np.inf]
        placed.append(best[:top_k])
        room[best[:top_k]] -= 1
    return placed


@st.composite
def sequences(draw):
    """Two sequences of tokens that choose different experts, null ones among them, with padding anywhere."""
    # Few shapes, each of which compiles anew.
    length, n_experts, n_null = (draw(st.sampled_from(sizes)) for sizes in ((1, 7), (2, 5), (0, 2)))
    top_k = draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ranking = rng.normal(size=(2, length, n_experts + n_null)).astype(np.float32)
    ranking[..., : draw(st.integers(0, n_experts - top_k))] = -np.inf  # shut groups
    mask = rng.uniform(size=(2, length)) < draw(st.sampled_from([0.5, 1.0]))
    return ranking, mask, top_k, n_experts, draw(st.integers(1, 4))


# ------------------------------------------------------------------------------------ the number


def test_capacity_is_never_rounded_down():
    assert capacity(1.25, 2, 1, 8) == 1
    assert capacity(0.5, 1, 8, 8) == 1
    assert capacity(1.25, 2, 16, 8) == 5
    assert capacity(1.0, 2, 5, 4) == 3
    assert capacity(1.1, 1, 40, 4) == 11  # in floating point 1.1 * 40 / 4 is above 11


# ------------------------------------------------------------------------------- tokens that choose


@pytest.mark.parametrize(
    "priority, expected",
    [
        ("token", {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (4, 1)}),
        ("choice", {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (4, 1)}),
        ("probability", {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (4, 0), (4, 1)}),
    ],
)
def test_golden_table_of_kept_assignments(priority, expected):
    routing = route(LOGITS, four())
    likelihood = jnp.max(routing.ranking, axis=-1)
    order = np.asarray(likelihood)[[4, 0, 1, 2, 3]]  # 0, 1 and 2 are equal but for rounding
    np.testing.assert_allclose(order, -np.sort(-likelihood[:5]), rtol=1e-6)
    kept = within_capacity(routing.indices[None], REAL, 4, 2, priority, likelihood[None])[0]
    assert {tuple(map(int, at)) for at in np.argwhere(kept)} == expected


@settings(max_examples=30)
@given(sequences(), st.sampled_from(PRIORITIES))
def test_places_are_given_one_after_the_other(case, priority):
    ranking, mask, top_k, n_experts, limit = case
    indices = np.argsort(-ranking, axis=-1, kind="stable")[..., :top_k]
    likelihood = np.round(ranking.max(-1), 1)  # with ties
    kept = within_capacity(jnp.asarray(indices), jnp.asarray(mask), n_experts, limit, priority, jnp.asarray(likelihood))
    for b in range(2):
        expected = numpy_kept(indices[b], mask[b], n_experts, limit, priority, likelihood[b])
        np.testing.assert_array_equal(kept[b], expected)


def test_padding_takes_no_place():
    indices = jnp.zeros((1, 4, 1), jnp.int32)
    mask = jnp.array([[False, True, False, True]])
    np.testing.assert_array_equal(within_capacity(indices, mask, 4, 1)[0, :, 0], [False, True, False, False])


def test_the_last_token_moves_others_unless_they_go_by_token():
    indices = jnp.array([[[0, 1], [1, 0], [1, 2]], [[0, 1], [1, 0], [0, 2]]])  # another last token in the second row
    likelihood = jnp.array([[0.5, 0.6, 0.2], [0.5, 0.6, 0.9]])
    mask = jnp.ones((2, 3), bool)
    for priority in PRIORITIES:
        first, second = within_capacity(indices, mask, 3, 2, priority, likelihood)[:, :2]
        assert np.array_equal(first, second) == (priority == "token")


# ------------------------------------------------------------------------------------- rerouting


@settings(max_examples=30)
@given(sequences())
def test_tokens_go_to_their_best_experts_with_room(case):
    ranking, mask, top_k, n_experts, limit = case
    n_choices = ranking.shape[-1]
    indices, placed = reroute(jnp.asarray(ranking), jnp.asarray(mask), top_k, n_experts, limit)
    np.testing.assert_array_equal(indices == n_choices, ~placed)
    for b in range(2):
        found = [row[at].tolist() for row, at in zip(np.asarray(indices[b]), np.asarray(placed[b]), strict=True)]
        assert found == numpy_reroute(ranking[b], mask[b], top_k, n_experts, limit)
    counts = jax.nn.one_hot(indices, n_choices).sum((1, 2))
    assert np.all(counts[:, :n_experts] <= limit)


def test_rerouting_by_hand():
    """Expert 0 serves two tokens and 1 two; the fifth finds two full and one shut, and keeps what is left."""
    ranking = jnp.array([[3.0, 2, 1, 0], [3, 1, 2, 0], [3, 2, 1, 0], [3, 2, 1, -jnp.inf], [3, 2, 1, -jnp.inf]])[None]
    indices, placed = reroute(ranking, jnp.ones((1, 5), bool), 2, 4, 2)
    np.testing.assert_array_equal(indices[0], [[0, 1], [0, 2], [1, 2], [4, 4], [4, 4]])
    np.testing.assert_array_equal(placed[0].sum(1), [2, 2, 2, 0, 0])


def test_no_earlier_token_is_moved_by_a_later_one():
    ranking = jax.random.normal(jax.random.key(0), (1, 9, 4))
    other = ranking.at[:, 5].set(-ranking[:, 5])
    (before, _), (after, _) = (reroute(r, jnp.ones((1, 9), bool), 2, 4, 3) for r in (ranking, other))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.any(before[:, 5:] != after[:, 5:])


# ---------------------------------------------------------------------------- experts that choose


def test_golden_choice_of_experts():
    scores = jax.nn.softmax(LOGITS)[None]
    tokens, weights = expert_choice(scores, REAL, 2)
    np.testing.assert_array_equal(tokens[0], [[4, 0], [1, 3], [1, 3], [2, 3]])
    np.testing.assert_allclose(weights[0], np.take_along_axis(scores[0].T, tokens[0], 1))


@settings(max_examples=30)
@given(sequences())
def test_experts_take_their_best_tokens(case):
    ranking, mask, _, _, limit = case
    scores = np.asarray(jax.nn.softmax(np.where(np.isfinite(ranking), ranking, 0)))
    tokens, weights = expert_choice(jnp.asarray(scores), jnp.asarray(mask), limit)
    length = scores.shape[1]
    for b, e in np.ndindex(2, scores.shape[2]):
        best = [t for t in np.argsort(-scores[b, :, e], kind="stable") if mask[b, t]][:limit]
        empty = min(limit, length) - len(best)
        np.testing.assert_array_equal(tokens[b, e], best + [length] * empty)
        np.testing.assert_allclose(weights[b, e], [*scores[b, best, e], *[0] * empty])
