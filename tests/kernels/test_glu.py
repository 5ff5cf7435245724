"""Hidden units: their gradients against differences of the formulas, in float64."""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import Activation
from zoo.kernels.glu import ACTIVATIONS, HiddenUnits

BETA, CLAMP = 1.702, 0.5
# x and the beta of the two that have one.
FORMULAS = {
    "sigmoid": lambda x, beta: 1 / (1 + np.exp(-x)),
    "swish": lambda x, beta: x / (1 + np.exp(-BETA * x)),
    "swish_learned": lambda x, beta: x / (1 + np.exp(-beta * x)),
    "silu": lambda x, beta: x / (1 + np.exp(-x)),
    "gelu": lambda x, beta: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x, beta: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x, beta: np.maximum(x, 0),
    "relu2": lambda x, beta: np.maximum(x, 0) ** 2,
}
# Both sides of every kink, and none within the step of a difference.
GATE = np.array([-3.1, -0.6, -0.2, 0.3, 0.4, 0.9, 2.5])
UP = np.array([0.7, -1.2, 0.1, 1.9, -0.3, -0.4, 0.45])


def formula(name, clamp, gate, up, beta):
    if gate is None:
        return FORMULAS[name](up, beta)
    if clamp is None:
        return FORMULAS[name](gate, beta) * up
    return FORMULAS[name](np.minimum(gate, clamp), beta) * (np.clip(up, -clamp, clamp) + 1)


def slope(f, x, step=1e-5):
    return (f(x + step) - f(x - step)) / (2 * step)


@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.parametrize(("glu", "clamp"), [(False, None), (True, None), (True, CLAMP)])
def test_gradients_are_the_slopes_of_the_formula(name, glu, clamp):
    """Units are independent, so the gradient of their sum holds the slope of each."""
    gate, beta = GATE if glu else None, 0.7
    of = lambda gate, up, beta: formula(name, clamp, gate, up, beta)  # noqa: E731
    expected = [
        None if gate is None else slope(lambda a: of(a, UP, beta), gate),
        slope(lambda a: of(gate, a, beta), UP),
        slope(lambda a: of(gate, UP, a), beta).sum() if name == "swish_learned" else None,
    ]
    with jax.enable_x64(True):
        arrays = [None if a is None else jnp.asarray(a) for a in (gate, UP, beta if expected[2] is not None else None)]
        hidden = HiddenUnits(name, BETA, clamp)
        units, pull = jax.vjp(hidden, *arrays)
        found = pull(jnp.ones_like(units))
    np.testing.assert_allclose(units, of(gate, UP, beta), rtol=1e-12)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8)


def test_every_activation_of_the_config_has_a_formula_here():
    assert set(typing.get_args(Activation)) == set(FORMULAS) == {*ACTIVATIONS, "swish", "swish_learned"}


def test_units_are_equal_for_equal_choices():
    assert HiddenUnits("silu") == HiddenUnits("silu", 1.0, None) != HiddenUnits("silu", glu_clamp=7.0)
    assert hash(HiddenUnits("silu")) == hash(HiddenUnits("silu"))
