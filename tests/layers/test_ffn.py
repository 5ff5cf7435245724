"""Feed-forward networks against NumPy float64 versions written from the formulas."""

import math
import typing

import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import Activation
from zoo.kernels.glu import ACTIVATIONS, HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.layers.ffn import ffn

RNG = np.random.default_rng(0)

FORMULAS = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-1.702 * x)),
    "swish_learned": lambda x: x / (1 + np.exp(-0.7 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def as32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("glu", [True, False])
def test_ffn(name, clamp, biases, glu):
    shapes = {"w_gate": (4, 6), "w_up": (4, 6), "w_down": (6, 4), "b_gate": 6, "b_up": 6, "b_down": 4}
    x, values = RNG.normal(size=(2, 3, 4)), {key: RNG.normal(size=shape) for key, shape in shapes.items()}
    b = values if biases else dict.fromkeys(values, 0)
    act, gate, up = FORMULAS[name], x @ values["w_gate"] + b["b_gate"], x @ values["w_up"] + b["b_up"]
    if glu and clamp is not None:
        units = act(np.minimum(gate, clamp)) * (np.clip(up, -clamp, clamp) + 1)
    else:
        units = act(gate) * up if glu else act(up)
    expected = units @ values["w_down"] + b["b_down"]
    given = {key: v for key, v in values.items() if (glu or "gate" not in key) and (biases or key[0] == "w")}
    arrays = dict(zip(given, as32(*given.values()), strict=True))
    params = FFNParams(**dict.fromkeys(("w_gate", "w_up", "w_down")) | arrays)
    params = params._replace(beta=jnp.float32(0.7) if name == "swish_learned" else None)
    found = ffn(*as32(x), params, HiddenUnits(name, 1.702, clamp))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_every_activation_of_the_config_has_a_formula_here():
    assert set(typing.get_args(Activation)) == set(FORMULAS) == {*ACTIVATIONS, "swish", "swish_learned"}
