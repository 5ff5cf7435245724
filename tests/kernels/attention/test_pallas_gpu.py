"""The Triton kernels, interpreted: numbers against NumPy float64 over a cover of features, and what they refuse.

That they compile for a GPU is tests/aot's to say.
"""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from allpairspy import AllPairs

from tests.kernels.attention.oracle import assert_as_exact_as_dense, expected, problem, run
from zoo.kernels.attention import attention, dispatch
from zoo.kernels.attention.tables import GpuSizes, gpu_blocks, too_large
from zoo.kernels.attention.triton import columns_of, padded_width
from zoo.kernels.masks import Causal, Full, Global, Mask, Prefix
from zoo.kernels.target import Target, interpreting

SIZES = {"1": (1, 1), "1x40": (1, 40), "17": (17, 17), "200": (200, 200), "20x75": (20, 75), "75x20": (75, 20)}
HEADS = {"1": (1, 1), "MQA": (8, 1), "GQA": (6, 2)}
WIDTHS = {"16": (16, 16), "40": (40, 40), "80": (80, 80), "MLA": (192, 128)}
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal(9),
    "prefix": Causal() | Prefix(6),
    "dead": Causal() & ~Global(3),
}
FEATURES = ["plain", "documents", "softcap", "alibi", "dropout"]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
COVER = list(AllPairs([list(SIZES), list(MASKS), list(WIDTHS), list(FEATURES), list(HEADS), list(DTYPES)]))
GPU = ("gpu", "NVIDIA H200")
ALL = {"backend": "pallas_gpu", "backward": "pallas_gpu"}


def documents(length, total):
    """Segment ids of the last `length` of `total` tokens: two documents with padding between, and a row of padding."""
    at = np.arange(total)
    first = np.where(at < total // 3, 1, np.where(at < total // 3 + 2, 0, 3))
    return jnp.asarray(np.stack([first, np.zeros_like(at)])[:, total - length :], jnp.int32)


def build(size, mask, widths, feature, heads):
    T, S = SIZES[size]
    settings = {
        "plain": {},
        "documents": {"q_segment_ids": documents(T, max(T, S)), "kv_segment_ids": documents(S, max(T, S))},
        "softcap": {"softcap": 1.5},
        "alibi": {"slopes": True},
        "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)},
    }[feature]
    return problem(T, S, HEADS[heads], WIDTHS[widths], MASKS[mask], q_offset=max(0, S - T), **settings)


@pytest.mark.parametrize("case", COVER, ids=lambda case: ", ".join(case))
def test_kernels_are_as_exact_as_the_plain_form(case):
    with interpreting(*GPU):
        assert_as_exact_as_dense(build(*case[:-1]), DTYPES[case[-1]], blocks=(16, 32), **ALL)
