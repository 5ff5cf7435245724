"""Feed-forward networks against NumPy float64 versions written from the formulas."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_glu import BETA, FORMULAS, formula
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.layers.ffn import ffn

RNG = np.random.default_rng(0)


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
    gate = x @ values["w_gate"] + b["b_gate"] if glu else None
    units = formula(name, clamp, gate, x @ values["w_up"] + b["b_up"], 0.7)
    expected = units @ values["w_down"] + b["b_down"]
    given = {key: v for key, v in values.items() if (glu or "gate" not in key) and (biases or key[0] == "w")}
    arrays = dict(zip(given, as32(*given.values()), strict=True))
    params = FFNParams(**dict.fromkeys(("w_gate", "w_up", "w_down")) | arrays)
    params = params._replace(beta=jnp.float32(0.7) if name == "swish_learned" else None)
    found = ffn(*as32(x), params, HiddenUnits(name, BETA, clamp))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
