"""Every backend that runs here against NumPy float64, values and gradients, over a cover of all features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from allpairspy import AllPairs

from tests.kernels.attention.oracle import assert_as_exact_as_dense, expected, problem, run
from zoo.kernels.masks import Causal, Dilated, Full, Global, Prefix, Window, big_bird, longformer

SIZES = {
    "one": (1, 1),
    "last": (1, 40),
    "17": (17, 17),
    "75": (75, 75),
    "long": (20, 75),
    "short": (75, 20),
}
MASKS = {
    "full": lambda H: Full(),
    "causal": lambda H: Causal(),
    "window": lambda H: Causal(9),
    "prefix": lambda H: Causal() | Prefix(6),
    "strided": lambda H: Causal() & (Window(3, 0) | Dilated(4)),
    "longformer": lambda H: longformer(6, 3, (1, 2)) if H % 2 == 0 else longformer(6, 3),
    "big bird": lambda H: big_bird(8, H),
    "nothing": lambda H: ~(Full() | Global(1)),
}
HEADS = {"1": (1, 1), "MQA": (8, 1), "GQA": (6, 2), "MHA": (4, 4)}
WIDTHS = {"16": (16, 16), "40": (40, 40), "MLA": (24, 16)}
DATA = ["none", "documents", "lengths", "positions"]
SCORES = ["scale", "softcap", "alibi", "bias", "rows of bias", "sinks", "dropout"]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float64": jnp.float64}
COVER = list(AllPairs([list(SIZES), list(MASKS), list(HEADS), list(WIDTHS), DATA, SCORES, list(DTYPES)]))


def documents(length, total):
    """Segment ids of the last `length` of `total` tokens: two documents and padding, and a row of padding."""
    at = np.arange(total)
    first = np.where(at < total // 3, 1, np.where(at < total // 3 + 2, 0, 3))
    return jnp.asarray(np.stack([first, np.zeros_like(at)])[:, total - length :], jnp.int32)


def features(T, S, H, data, scores):
    total = max(T, S)
    settings = {}
    if data == "documents":
        settings |= {"q_segment_ids": documents(T, total), "kv_segment_ids": documents(S, total)}
    if data == "lengths":
        settings["lengths"] = jnp.array([S // 2, 0])
    if data == "positions":  # with gaps, as padding between tokens leaves them
        at = jnp.asarray(np.random.default_rng(1).choice(2 * total, (2, total)).cumsum(1) % 199, jnp.int32)
        settings |= {"q_positions": jnp.sort(at)[:, total - T :], "kv_positions": jnp.sort(at)[:, total - S :]}
    if data in ("none", "lengths"):
        settings["q_offset"] = max(0, S - T)
    return (
        settings
        | {
            "scale": {"scale": 0.3},
            "softcap": {"softcap": 1.5},
            "alibi": {"slopes": True},
            "bias": {"bias": (2, H, T, S)},
            "rows of bias": {"bias": (1, 1, T, 1)},
            "sinks": {"sinks": True},
            "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)},
        }[scores]
    )


def build(size, mask, heads, widths, data, scores):
    (T, S), (H, K) = SIZES[size], HEADS[heads]
    return problem(T, S, (H, K), WIDTHS[widths], MASKS[mask](H), **features(T, S, H, data, scores))


@pytest.mark.parametrize("case", COVER, ids=lambda case: ", ".join(case))
def test_a_backend_is_as_exact_as_the_plain_form(case):
    dtype = DTYPES[case[-1]]
    with jax.enable_x64(dtype == jnp.float64):
        assert_as_exact_as_dense(build(*case[:-1]), dtype, backend="chunked", backward="chunked", blocks=(16, 32))


@pytest.mark.parametrize("scores", SCORES)
def test_the_plain_form_is_the_formula(scores):
    case = build("75", "strided", "GQA", "MLA", "documents", scores)
    with jax.enable_x64(True):
        for name, right, found in zip(case.names, expected(case), run(case, jnp.float64, backend="dense"), strict=True):
            # The factors of dropout are float32, as kernels have them.
            bound = 1e-6 if scores == "dropout" else 1e-11
            np.testing.assert_allclose(found, right, atol=bound, err_msg=name)
