import math

import jax
import numpy as np
import pytest

from zoo.config import OptimizerConfig
from zoo.train.schedule import factor


def rates(steps, **settings):
    """The factor at every step 0..T, T included."""
    return np.asarray(jax.jit(jax.vmap(factor(OptimizerConfig(**settings), steps)))(np.arange(steps + 1)))


def cosine(t, warmup, steps, low):
    if t < warmup:
        return (t + 1) / warmup
    return low + (1 - low) * (1 + math.cos(math.pi * (t - warmup) / (steps - warmup))) / 2


def wsd(t, warmup, steps, low, length):
    if t < warmup:
        return (t + 1) / warmup
    return 1.0 if t <= steps - length else low + (1 - low) * (steps - t) / length


@pytest.mark.parametrize("warmup", [0, 1, 4, 10])
@pytest.mark.parametrize("low", [0.0, 0.1])
def test_cosine_equals_the_formula_at_every_step(warmup, low):
    got = rates(10, warmup_steps=warmup, min_ratio=low)
    want = [cosine(t, warmup, 10, low) if warmup < 10 or t < 10 else 1.0 for t in range(11)]
    np.testing.assert_allclose(got, want, atol=2e-7)
    assert (got[:10] > 0).all()


def test_cosine_by_hand():
    got = rates(6, warmup_steps=2, min_ratio=0.2)
    np.testing.assert_allclose(got, [0.5, 1, 1, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2], 1e-6)
    assert got[1] == got[2] == 1 and got[6] == np.float32(0.2)


@pytest.mark.parametrize("fraction, length", [(0.5, 5), (0.2, 2), (0.0, 0), (1.0, 7)])
def test_wsd_equals_the_formula_at_every_step(fraction, length):
    got = rates(10, schedule="wsd", warmup_steps=3, min_ratio=0.1, decay_fraction=fraction)
    want = [wsd(t, 3, 10, 0.1, length) if length else min((t + 1) / 3, 1) for t in range(11)]
    np.testing.assert_allclose(got, want, atol=2e-7)


def test_the_final_decay_goes_from_where_the_schedule_stands_to_zero():
    base = rates(20, warmup_steps=4, min_ratio=0.1)
    got = rates(20, warmup_steps=4, min_ratio=0.1, final_decay_steps=5)
    np.testing.assert_array_equal(got[:16], base[:16])
    np.testing.assert_allclose(got[15:], base[15] * np.arange(5, -1, -1) / 5, atol=1e-7)
    assert got[19] > 0 and got[20] == 0


def test_the_final_decay_of_a_stable_schedule_by_hand():
    got = rates(8, schedule="wsd", decay_fraction=0.0, warmup_steps=2, final_decay_steps=4)
    np.testing.assert_array_equal(got, [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("final", [0, 300])
def test_no_jump_at_a_joint(schedule, final):
    got = rates(1000, schedule=schedule, warmup_steps=100, final_decay_steps=final)
    assert np.abs(np.diff(got)).max() <= 1 / 100 + 1e-6  # the steepest part is the warm-up


def test_outside_the_run_the_ends_hold():
    at = factor(OptimizerConfig(warmup_steps=2, final_decay_steps=1), 5)
    assert at(-3) == at(0) == 0.5 and at(5) == at(99) == 0


@pytest.mark.parametrize("warmup", [0, 4])
def test_linear_and_constant(warmup):
    ramp = [(t + 1) / warmup for t in range(warmup)]
    linear = [0.1 + 0.9 * (10 - t) / (10 - warmup) for t in range(warmup, 11)]
    got = rates(10, schedule="linear", warmup_steps=warmup, min_ratio=0.1)
    np.testing.assert_allclose(got, ramp + linear, rtol=1e-6)
    got = rates(10, schedule="constant", warmup_steps=warmup, min_ratio=0.1)
    np.testing.assert_allclose(got, ramp + [1.0] * (11 - warmup), rtol=1e-6)
