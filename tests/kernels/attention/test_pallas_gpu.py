"""The Triton kernels, interpreted: numbers against NumPy float64 over a cover of features, and what they refuse.

That they compile for a GPU is tests/aot's to say.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from allpairspy import AllPairs

from tests.kernels.attention.oracle import assert_as_exact_as_dense, expected, problem, run
from tests.kernels.attention.test_backends import documents
from zoo.kernels.attention import attention, dispatch, explain
from zoo.kernels.attention.tables import GpuSizes, gpu_blocks, too_large
from zoo.kernels.attention.triton import columns_of, padded_width
from zoo.kernels.masks import Causal, Full, Global, Mask, Prefix
from zoo.kernels.target import interpreting

SIZES = {"1x40": (1, 40), "17": (17, 17), "200": (200, 200), "20x75": (20, 75), "75x20": (75, 20)}
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


def in_cover(case):
    """Not the gradient of slopes in two bytes: every kernel takes it of an output rounded to them, and dense not."""
    return "alibi" not in case or "float32" in case or len(case) < 6


COVER = list(AllPairs([list(SIZES), list(MASKS), list(WIDTHS), FEATURES, list(HEADS), list(DTYPES)], in_cover))
GPU = ("gpu", "NVIDIA H200")
ALL = {"backend": "pallas_gpu", "backward": "pallas_gpu"}


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


def test_a_block_of_queries_that_no_key_reaches_is_zero_and_so_are_its_gradients():
    case = problem(64, 48, (2, 1), (16, 16), ~(Full() | Global(1)))
    with interpreting(*GPU):
        for name, x in zip(case.names, run(case, jnp.float32, blocks=(16, 16), **ALL), strict=True):
            np.testing.assert_array_equal(x, 0, err_msg=name)


def test_padding_of_nan_and_what_is_behind_the_length_reach_nothing():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 40, 2, 16)), jnp.float32) for _ in "qkv")
    lengths = jnp.array([0, 21])
    behind = (jnp.arange(40) >= lengths[:, None])[..., None, None]

    @jax.jit
    def grads(k, v):
        f = lambda *qkv: attention(*qkv, mask=Causal(), lengths=lengths, blocks=(16, 16), **ALL)  # noqa: E731
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(jnp.ones_like(out))

    with interpreting(*GPU):
        plain, poisoned = grads(k, v), grads(*(jnp.where(behind, jnp.nan, x) for x in (k, v)))
    for a, b in zip(plain, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_bias_goes_forward_in_the_kernel_and_backward_in_blocks():
    for bias in ((2, 6, 40, 72), (1, 1, 40, 1), (2, 1, 1, 72)):
        case = problem(40, 72, (6, 2), (16, 24), Causal(), q_offset=32, bias=bias)
        with interpreting(*GPU):
            assert_as_exact_as_dense(case, jnp.float32, backend="pallas_gpu", blocks=(16, 32))


def test_the_size_of_blocks_does_not_change_the_result():
    case = problem(100, 100, (6, 2), (48, 16), Causal(30), softcap=2.0)
    right = expected(case)
    with interpreting(*GPU):
        for blocks in ((64, 16), (16, 64), None):
            found = run(case, jnp.float32, blocks=blocks, **ALL)
            for name, a, b in zip(case.names, right, found, strict=True):
                np.testing.assert_allclose(b, a, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("Tesla T4", {}, "compute capability 8.0, and the program is for 'Tesla T4'"),
        ("NVIDIA L4", {"blocks": (128, 128)}, "of shared memory in its kernel 'forward', and 'NVIDIA L4' has 99"),
        ("NVIDIA H200", {"blocks": (48, 64)}, r"blocks=\(48, 64\) have to be powers of two"),
        (
            "NVIDIA H200",
            {"bias": jnp.zeros((1, 1, 64, 64))},
            "cannot run backward: its kernels have no gradient of a bias",
        ),
    ],
)
def test_what_it_cannot_do_it_refuses_before_anything_is_compiled(kind, change, message):
    x = jnp.zeros((1, 64, 2, 256), jnp.bfloat16)
    with interpreting("gpu", kind), pytest.raises(ValueError, match=message):
        attention(x, x, x, mask=Causal(), **ALL, **change)


def test_dtypes_that_differ_are_refused_and_a_cpu_is_told_how_to_interpret():
    x = jnp.zeros((1, 64, 2, 16), jnp.bfloat16)
    with interpreting(*GPU), pytest.raises(ValueError, match="q, k and v have dtypes bfloat16, float32"):
        attention(x, x, x.astype(jnp.float32), mask=Causal(), **ALL)
    with pytest.raises(ValueError, match="interpreting runs it on a CPU"):
        attention(x, x, x, mask=Causal(), **ALL)


def test_auto_takes_it_on_a_gpu_and_says_once_why_an_old_one_cannot(caplog):
    x = jax.ShapeDtypeStruct((1, 256, 2, 16), jnp.bfloat16)
    dispatch._say_once.cache_clear()
    with interpreting(*GPU):
        assert "forward: pallas_gpu\n  backward: pallas_gpu" in explain(x, x, x, mask=Causal())
    assert not caplog.records
    with interpreting("gpu", "Tesla T4"), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert "forward: chunked" in explain(x, x, x, mask=Causal())
    assert [record.getMessage() for record in caplog.records] == [
        "attention runs on 'chunked': 'pallas_gpu' steps aside, because Triton needs an NVIDIA GPU of compute"
        " capability 8.0, and the program is for 'Tesla T4'"
    ]


def test_table_sizes_fit_every_device_and_no_block_is_longer_than_its_sequence():
    for kernel in ("forward", "dkv", "dq", "decode"):
        for kind in ("NVIDIA H200", "NVIDIA A100-SXM4-40GB", "NVIDIA L4"):
            for h, d in ((64, 64), (128, 128), (256, 256), (192, 128), (576, 512)):
                for itemsize in (2, 4) if h <= 256 else (2,):
                    sizes = GpuSizes(17, 4096, h, d, itemsize)
                    blocks = gpu_blocks(kind, sizes, kernel)
                    assert too_large(kind, sizes, kernel, blocks) is None
                    assert 16 <= blocks.q <= 32
                    assert blocks.kv >= 16


@pytest.mark.parametrize("width", [1, 16, 40, 64, 72, 80, 96, 112, 128, 192, 256, 576])
def test_columns_are_powers_of_two_that_cover_a_width(width):
    columns = columns_of(width)
    assert all(c.size & (c.size - 1) == 0 and c.size >= 16 for c in columns)
    assert [c.start for c in columns] == [0, columns[0].size][: len(columns)]
    assert sum(c.real for c in columns) == width <= padded_width(width) < max(17, 1.4 * width)
