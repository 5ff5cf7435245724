from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import (
    D,
    F,
    assert_close,
    block_of,
    call,
    expert,
    gradients,
    influence,
    make,
    numpy_params,
    softmax,
    swiglu,
    tokens,
)

from zoo.config import ConfigError, SoftConfig
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.layers.moe import init_soft_state
from zoo.layers.moe.soft import apply_merged, assign_slots, merge

E, L = 3, 4
CONFIG = SoftConfig(n_experts=E, d_ff=F, segment_length=L, max_documents=3)
WHOLE = SoftConfig(n_experts=E, d_ff=F, segment_length=None)


@pytest.fixture(scope="module")
def soft():
    return make(CONFIG)


@pytest.fixture(scope="module")
def whole():
    return make(WHOLE)


def numpy_logits(params, mean):
    """The router's answer to the mean of some tokens; None for none."""
    bias = params["router_bias"]
    if mean is None:
        return bias
    normed = (mean - mean.mean()) / np.sqrt(mean.var() + 1e-6)
    return normed @ params["router"]["w"] + bias


def numpy_merged(x, params, logits):
    p = softmax(logits)
    return swiglu(x, *(sum(p[e] * w for e, w in enumerate(stack)) for stack in expert(params, slice(None))))


def numpy_document(x, params):
    """One document [T, D]: each segment by the mean of the one before it."""
    y, logits = np.zeros_like(x), []
    for start in range(0, len(x), L):
        before = x[start - L : start].mean(0) if start else None
        logits.append(numpy_logits(params, before))
        y[start : start + L] = numpy_merged(x[start : start + L], params, logits[-1])
    return y, np.repeat(logits, L, axis=0)[: len(x)]


def packed(lengths, total):
    """positions, segment_ids [1, total] of documents of these lengths; 0 stands for one token of padding."""
    positions, segments, document = [], [], 0
    for n in lengths:
        document += n > 0
        positions += range(n) if n else [0]
        segments += [document] * n if n else [0]
    pad = total - len(positions)
    return jnp.array([positions + [0] * pad], jnp.int32), jnp.array([segments + [0] * pad], jnp.int32)


def run_packed(module, params, x, positions, segment_ids, **others):
    return call(module, params, x, segment_ids > 0, positions, segment_ids, **others)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_segments_are_the_formula(soft, length):
    module, params = soft
    x, wide = tokens(1, length), numpy_params(params)
    y, stats, cache = call(module, params, x)
    expected, logits = numpy_document(np.asarray(x[0], np.float64), wide)
    assert_close(y[0], expected)
    assert cache is None and stats.tokens == length
    p = softmax(logits)
    for name in ("counts", "prob_sum", "gate_sum"):
        np.testing.assert_allclose(getattr(stats, name), p.sum(0), rtol=1e-5)
    np.testing.assert_allclose(stats.z_sum, (np.log(np.exp(logits).sum(-1)) ** 2).sum(), rtol=1e-5)


def test_whole_sequences_are_the_formula(whole):
    module, params = whole
    x, mask = tokens(2, 5), jnp.array([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1]], bool)
    y, stats, _ = call(module, params, x, mask)
    wide, inputs = numpy_params(params), np.asarray(x, np.float64)
    for b in range(2):
        real = inputs[b][mask[b]]
        assert_close(y[b][mask[b]], numpy_merged(real, wide, numpy_logits(wide, real.mean(0))))
    assert stats.tokens == 8


def test_one_hot_weights_are_that_expert():
    _, params = make(CONFIG)
    stacked = FFNParams(params["w_gate"], params["w_up"], params["w_down"])
    x = tokens(E, 4)
    y = apply_merged(x, merge(stacked, jnp.eye(E), "float32"), HiddenUnits("silu"))
    for e in range(E):
        assert_close(y[e], swiglu(np.asarray(x[e], np.float64), *expert(numpy_params(params), e)))


def test_identical_experts_are_one_ffn(soft):
    module, params = soft
    params = params | {n: jnp.broadcast_to(params[n][:1], params[n].shape) for n in ("w_gate", "w_up", "w_down")}
    x = tokens(1, 11)
    assert_close(call(module, params, x)[0], swiglu(np.asarray(x, np.float64), *expert(numpy_params(params), 0)))


def test_segments_leak_nothing_and_whole_sequences_do(soft, whole):
    x = tokens(1, 11)
    moved = influence(*soft, x)
    assert not np.any(np.triu(moved, 1))
    assert np.all(moved[4:8, :4] > 0)  # the segment before does route
    assert np.all(np.triu(influence(*whole, x), 1)[np.triu_indices(11, 1)] > 0)


def test_packed_documents_equal_themselves_alone(soft):
    module, params = soft
    lengths = [9, 5, 6]
    positions, segment_ids = packed(lengths, 22)
    x = tokens(1, 22)
    y, stats, _ = run_packed(module, params, x, positions, segment_ids)
    start, alone = 0, []
    for n in lengths:
        expected, logits = numpy_document(np.asarray(x[0, start : start + n], np.float64), numpy_params(params))
        assert_close(y[0, start : start + n], expected)
        alone.append(softmax(logits).sum(0))
        start += n
    assert not np.any(y[0, 20:])
    np.testing.assert_allclose(stats.prob_sum, sum(alone), rtol=1e-5)


def test_padding_changes_nothing_wherever_it_stands(soft):
    module, params = soft
    x = tokens(1, 9)
    expected, plain, _ = call(module, params, x)
    places = jnp.array([0, 2, 3, 4, 7, 8, 9, 12, 13])
    spread_out = jnp.full((1, 22, D), 77.0).at[:, places].set(x)
    positions = jnp.zeros((1, 22), jnp.int32).at[:, places].set(jnp.arange(9))
    segment_ids = jnp.zeros((1, 22), jnp.int32).at[:, places].set(1)
    y, stats, _ = run_packed(module, params, spread_out, positions, segment_ids)
    assert_close(y[:, places], expected)
    assert_close(stats, plain)


def test_rows_do_not_meet(soft):
    x = tokens(2, 11)
    assert_close(call(*soft, x)[0][1:], call(*soft, x[1:])[0])


def test_too_many_documents_give_nan_and_never_a_wrong_number(soft):
    module, params = soft
    positions, segment_ids = packed([1, 1, 1, 1, 1, 1, 1, 1], 11)  # slots: ceil(11 / 4) + 3 - 1 = 5
    y, _, _ = run_packed(module, params, tokens(1, 11), positions, segment_ids)
    assert np.all(np.isfinite(y[0, :5])) and np.all(np.isnan(y[0, 5:8])) and np.all(y[0, 8:] == 0)
    state = init_soft_state(CONFIG, block_of(CONFIG), 1)
    _, _, state = run_packed(module, params, tokens(1, 11), positions, segment_ids, cache=state)
    after, _, _ = call(
        module,
        params,
        tokens(1, 1),
        positions=jnp.ones((1, 1), jnp.int32),
        cache=state,
        segment_ids=jnp.full((1, 1), 8),
    )
    assert np.all(np.isnan(after))


def test_positions_that_overfill_a_segment_give_nan(soft):
    module, params = soft
    y, _, _ = call(module, params, tokens(1, 11), positions=jnp.zeros((1, 11), jnp.int32))
    assert np.all(np.isfinite(y[0, :L])) and np.all(np.isnan(y[0, L:]))


def test_slots_follow_documents_and_segments():
    positions, segment_ids = packed([5, 0, 2], 9)
    slots = assign_slots(segment_ids, positions // L, segment_ids > 0, None, 4, L)
    np.testing.assert_array_equal(slots.source[0], [[0, 1, 2, 3], [4, 9, 9, 9], [6, 7, 9, 9], [9, 9, 9, 9]])
    np.testing.assert_array_equal(slots.place[0], [0, 1, 2, 3, 4, 16, 8, 9, 16])
    assert slots.last[0] == 2 and not np.any(slots.lost)


ROWS = ([9, 5, 6], [0, 0, 3, 0, 13], [4, 4], [0])


@pytest.fixture(scope="module")
def rows():
    """Rows of different lengths, with padding before, between and after, and one of nothing else."""
    made = [packed(lengths, 20) for lengths in ROWS]
    return tuple(jnp.concatenate(parts) for parts in zip(*made, strict=True))


@pytest.fixture(scope="module")
def full(soft, rows):
    return run_packed(*soft, tokens(len(ROWS), 20), *rows)


def decode(soft, rows, cuts):
    """The outputs of calls that end at `cuts`, one after the other, and their summed statistics."""
    positions, segment_ids = rows
    x, state, start, outs, total = (
        tokens(len(ROWS), 20),
        init_soft_state(CONFIG, block_of(CONFIG), len(ROWS)),
        0,
        [],
        None,
    )
    for end in cuts:
        part = (a[:, start:end] for a in (x, positions, segment_ids))
        y, stats, state = run_packed(*soft, *part, cache=state)
        total = stats if total is None else jax.tree.map(np.add, total, stats)
        outs.append(y)
        start = end
    return np.concatenate(outs, axis=1), total


@pytest.mark.parametrize("split", [0, 1, 3, 4, 5, 8, 9, 10, 14, 15, 19])
def test_prefill_and_one_token_steps_equal_the_full_pass(soft, rows, full, split):
    cuts = ([split] if split else []) + list(range(split + 1, 21))
    y, stats = decode(soft, rows, cuts)
    assert_close(y, full[0], 1e-5)
    assert_close(stats, full[1], 1e-4)


def test_calls_of_any_length_equal_the_full_pass(soft, rows, full):
    assert_close(decode(soft, rows, [7, 14, 17, 20])[0], full[0], 1e-5)


def test_padding_leaves_the_state_as_it_is(soft):
    module, params = soft
    state = init_soft_state(CONFIG, block_of(CONFIG), 1)
    _, _, state = call(module, params, tokens(1, 6), cache=state)
    for length in (1, 5):
        nothing = jnp.zeros((1, length), bool)
        y, stats, after = call(module, params, tokens(1, length), nothing, cache=state)
        assert_close(after, state, 0)
        assert not np.any(y) and stats.tokens == 0


def test_a_step_within_segments_merges_nothing(soft):
    """Of the two branches of the step, the one without a merge is taken: broken experts do not show."""
    module, params = soft
    state = init_soft_state(CONFIG, block_of(CONFIG), 1)
    _, _, state = call(module, params, tokens(1, 6), cache=state)
    broken = params | {"w_up": jnp.full_like(params["w_up"], jnp.nan)}
    step = lambda p, at: call(  # noqa: E731
        module, p, tokens(1, 1), positions=jnp.full((1, 1), at, jnp.int32), cache=state
    )[0]
    assert np.all(np.isfinite(step(broken, 6)))
    assert np.all(np.isnan(step(broken, 8)))


def test_gradients_reach_every_parameter_and_stay_finite_without_tokens(soft, whole):
    x = tokens(2, 6)
    for module, params in (soft, whole):
        grads, _ = gradients(module, params, x)
        assert all(np.any(g) for g in jax.tree.leaves(grads))
        empty = gradients(module, params, x, jnp.zeros((2, 6), bool))
        assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(empty))


def test_shared_experts_and_half_precision():
    module, params = make(SoftConfig(n_experts=E, d_ff=F, segment_length=L, n_shared_experts=1))
    exact = call(module, params, tokens(1, 6))[0]
    shared = {n: np.asarray(w, np.float64) for n, w in params["shared"].items()}
    x = np.asarray(tokens(1, 6), np.float64)
    routed = numpy_document(x[0], numpy_params(params))[0]
    assert_close(exact[0], routed + swiglu(x[0], shared["w_gate"], shared["w_up"], shared["w_down"]))
    half, _ = make(SoftConfig(n_experts=E, d_ff=F, segment_length=L, n_shared_experts=1), compute_dtype="bfloat16")
    y, stats, _ = call(half, params, tokens(1, 6).astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and stats.prob_sum.dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=0.15)


def test_whole_sequences_cannot_decode():
    with pytest.raises(ConfigError, match="segment_length=None"):
        init_soft_state(WHOLE, block_of(WHOLE), 1)


def test_state_has_the_compute_dtype_and_no_gate_without_one():
    block = block_of(CONFIG, glu=False, compute_dtype="bfloat16")
    state = jax.eval_shape(partial(init_soft_state, CONFIG, block, 5))
    assert state.merged.w_gate is None and state.merged.w_down.shape == (5, F, D)
    assert state.merged.w_up.dtype == jnp.bfloat16 and state.sum.dtype == jnp.float32
