"""The TPU kernels, interpreted: numbers against NumPy float64 over a cover of features, races, and what they refuse.

That they compile for a TPU is tests/aot's to say.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from allpairspy import AllPairs

from tests.aot.interpreted import interpreted
from tests.kernels.attention.oracle import assert_as_exact_as_dense, expected, problem, run
from tests.kernels.attention.test_backends import documents
from zoo.config import MeshConfig
from zoo.kernels.attention import attention, explain
from zoo.kernels.attention.paged import decode_attention
from zoo.kernels.attention.problem import Operands, Settings
from zoo.kernels.attention.tpu_blocks import KINDS, too_large, tpu_blocks
from zoo.kernels.masks import Causal, Full, Global, Prefix, big_bird
from zoo.kernels.target import interpreting
from zoo.parallel.attention import MeshAttention
from zoo.parallel.mesh import make_mesh

SIZES = {"1x200": (1, 200), "200": (200, 200), "128x300": (128, 300), "200x17": (200, 17)}
HEADS = {"1": (1, 1), "MQA": (8, 1), "GQA": (6, 2)}
WIDTHS = {"16": (16, 16), "40": (40, 40), "80": (80, 80), "MLA": (192, 128)}
MASKS = {
    "full": lambda H: Full(),
    "causal": lambda H: Causal(),
    "window": lambda H: Causal(9),
    "prefix": lambda H: Causal() | Prefix(6),
    "dead": lambda H: Causal() & ~Global(3),
    "big bird": lambda H: big_bird(16, min(H, 2)),
}
FEATURES = ["plain", "documents", "softcap", "alibi", "dropout"]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def in_cover(case):
    """Not the gradient of slopes in two bytes: every kernel takes it of an output rounded to them, and dense not."""
    return "alibi" not in case or "float32" in case or len(case) < 6


COVER = list(AllPairs([list(SIZES), list(MASKS), list(WIDTHS), FEATURES, list(HEADS), list(DTYPES)], in_cover))
TPU = ("tpu", "TPU v5 lite")
ALL = {"backend": "pallas_tpu", "backward": "pallas_tpu"}


def build(size, mask, widths, feature, heads):
    T, S = SIZES[size]
    settings = {
        "plain": {},
        "documents": {"q_segment_ids": documents(T, max(T, S)), "kv_segment_ids": documents(S, max(T, S))},
        "softcap": {"softcap": 1.5},
        "alibi": {"slopes": True},
        "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)},
    }[feature]
    (H, K), offset = HEADS[heads], max(0, S - T)
    case = problem(T, S, (H, K), WIDTHS[widths], MASKS[mask](H), q_offset=offset, **settings)
    if feature == "alibi":  # below 1, as they are: of scores of hundreds a float32 log sum has too few digits
        case.arrays["alibi_slopes"] *= 0.1
    return case


@pytest.mark.parametrize("case", COVER, ids=lambda case: ", ".join(case))
def test_kernels_are_as_exact_as_the_plain_form(case):
    with interpreting(*TPU):
        assert_as_exact_as_dense(build(*case[:-1]), DTYPES[case[-1]], blocks=(128, 128), **ALL)


def test_a_block_of_queries_that_no_key_reaches_is_zero_and_so_are_its_gradients():
    case = problem(200, 140, (2, 1), (16, 16), ~(Full() | Global(1)))
    with interpreting(*TPU):
        for name, x in zip(case.names, run(case, jnp.float32, blocks=(128, 128), **ALL), strict=True):
            np.testing.assert_array_equal(x, 0, err_msg=name)


def test_padding_of_nan_and_what_is_behind_the_length_reach_nothing():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 150, 2, 16)), jnp.float32) for _ in "qkv")
    lengths = jnp.array([0, 131])
    behind = (jnp.arange(150) >= lengths[:, None])[..., None, None]

    @jax.jit
    def grads(k, v):
        f = lambda *qkv: attention(*qkv, mask=Causal(), lengths=lengths, blocks=(128, 128), **ALL)  # noqa: E731
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(jnp.ones_like(out))

    with interpreting(*TPU):
        plain, poisoned = grads(k, v), grads(*(jnp.where(behind, jnp.nan, x) for x in (k, v)))
    for a, b in zip(plain, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_row_of_the_batch_follows_its_own_list():
    case = problem(300, 300, (2, 1), (16, 16), Full(), B=3, lengths=jnp.array([0, 300, 131]))
    with interpreting(*TPU):
        assert_as_exact_as_dense(case, jnp.float32, blocks=(128, 128), **ALL)


def test_it_runs_beside_numbers_of_64_bits():
    case = problem(140, 200, (2, 1), (16, 16), Causal(), q_offset=60, slopes=True)
    arrays = [jnp.asarray(case.arrays[name], jnp.float32) for name in (*"qkv", "alibi_slopes")]

    def grads(*arrays):
        f = lambda q, k, v, slopes: attention(q, k, v, mask=Causal(), q_offset=60, alibi_slopes=slopes, **ALL)  # noqa: E731
        out, pull = jax.vjp(f, *arrays)
        return out, *pull(jnp.cos(out))

    with interpreting(*TPU):
        narrow = jax.jit(lambda *arrays: grads(*arrays))(*arrays)
        with jax.enable_x64(True):
            wide = jax.jit(lambda *arrays: grads(*arrays))(*arrays)
    for a, b in zip(wide, narrow, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_positions_with_gaps_are_the_formula():
    rng = np.random.default_rng(1)
    at = jnp.asarray(np.sort(rng.integers(0, 300, (2, 200)), 1), jnp.int32)
    case = problem(200, 200, (2, 1), (16, 16), Causal(40), q_positions=at, kv_positions=at)
    with interpreting(*TPU):
        assert_as_exact_as_dense(case, jnp.float32, blocks=(128, 128), **ALL)


@pytest.mark.parametrize("bias", [(2, 6, 140, 200), (1, 1, 140, 1), (2, 1, 1, 200)], ids=str)
def test_a_bias_goes_forward_in_the_kernel_and_backward_in_blocks(bias):
    case = problem(140, 200, (6, 2), (16, 24), Causal(), q_offset=60, bias=bias)
    with interpreting(*TPU):
        assert_as_exact_as_dense(case, jnp.float32, backend="pallas_tpu", blocks=(128, 128))


def test_the_size_of_blocks_does_not_change_the_result():
    case = problem(500, 500, (2, 1), (48, 16), Causal(300), B=1, softcap=2.0)
    right = expected(case)
    with interpreting(*TPU):
        for blocks in ((128, 384), (384, 128), None):
            found = run(case, jnp.float32, blocks=blocks, **ALL)
            for name, a, b in zip(case.names, right, found, strict=True):
                np.testing.assert_allclose(b, a, atol=2e-5, err_msg=name)


# ------------------------------------------------------------------------- memories and devices


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"q_segment_ids": documents(200, 200), "kv_segment_ids": documents(200, 200), "softcap": 2.0},
        {"dropout_rate": 0.3, "dropout_key": jax.random.key(3), "alibi_slopes": jnp.array([0.1, 0.2])},
    ],
    ids=["plain", "documents", "dropout"],
)
def test_no_two_cores_race_and_nothing_unwritten_is_read(settings):
    arrays = problem(200, 200, (2, 1), (16, 16), None).arrays
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays.values())

    def grads(how, q, k, v):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, mask=Causal(150), **settings, **how), q, k, v)
        return out, *pull(jnp.cos(out))

    found = interpreted(lambda *qkv: grads({"blocks": (128, 128), **ALL}, *qkv), q, k, v)
    for a, b in zip(found, grads({"backend": "dense", "backward": "dense"}, q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_decoding_has_no_races_and_reads_nothing_unwritten():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 4, 128), (9, 16, 2, 128), (9, 16, 2, 128)))
    table, lengths = jnp.asarray(rng.permutation(9).reshape(3, 3), jnp.int32), jnp.array([0, 20, 48])
    run = lambda backend: lambda *args: decode_attention(*args, window=30, backend=backend)  # noqa: E731
    args = (q, k, v, table, lengths)
    np.testing.assert_allclose(interpreted(run("paged_tpu"), *args), run("gathered")(*args), atol=2e-6)


@pytest.mark.parametrize("lengths", [None, jnp.array([200, 0, 7, 150])], ids=["whole", "lengths"])
def test_on_a_mesh_and_made_a_second_time_it_is_the_same(lengths):
    arrays = problem(200, 200, (4, 2), (16, 16), None, B=4).arrays
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays.values())
    settings = {"mask": Causal(150), "lengths": lengths, "blocks": (128, 128), **ALL}

    def grads(attend):
        f = jax.checkpoint(lambda *qkv: attend(*qkv, **settings))
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(jnp.cos(out))

    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with interpreting(*TPU):
        alone = jax.jit(lambda: grads(attention))()
        with jax.set_mesh(mesh):
            found = jax.jit(lambda: grads(MeshAttention(mesh)))()
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("TPU v2", {}, "it knows TPU v4, .*, and the program is for 'TPU v2'"),
        ("TPU v5 lite", {"blocks": (128, 100)}, r"blocks=\(128, 100\) have to be multiples of 128"),
        ("TPU v4", {"blocks": (4096, 4096)}, r"take \d+ MB in the kernel 'forward', and a kernel may have 12 MB"),
        ("TPU v4", {"bias": jnp.zeros((1, 1, 1, 1))}, "cannot run backward: its kernels have no gradient of a bias"),
    ],
)
def test_what_it_cannot_do_it_refuses_before_anything_is_compiled(kind, change, message):
    x = jnp.zeros((1, 4096, 2, 64), jnp.bfloat16)
    with interpreting("tpu", kind), pytest.raises(ValueError, match=message):
        attention(x, x, x, mask=Causal(), **ALL, **change)


def test_lists_that_the_scalars_memory_cannot_hold_are_refused():
    x = jax.ShapeDtypeStruct((64, 2**16, 1, 64), jnp.bfloat16)
    run = lambda q, ids: attention(q, q, q, mask=Causal(), q_segment_ids=ids, kv_segment_ids=ids, **ALL)  # noqa: E731
    with interpreting(*TPU), pytest.raises(ValueError, match=r"its lists of live blocks take 1\.0 MB"):
        jax.eval_shape(run, x, jax.ShapeDtypeStruct(x.shape[:2], jnp.int32))


def test_half_precision_is_refused_and_a_cpu_is_told_how_to_interpret():
    x = jnp.zeros((1, 64, 2, 16), jnp.float16)
    with interpreting(*TPU), pytest.raises(ValueError, match="dtypes float16; it takes one of float32, bfloat16"):
        attention(x, x, x, mask=Causal(), **ALL)
    with pytest.raises(ValueError, match=r"it is for TPUs, and the program is for 'cpu'.*interpreting runs it"):
        attention(x, x, x, mask=Causal(), **ALL)


def test_auto_takes_it_on_a_tpu():
    x = jax.ShapeDtypeStruct((1, 256, 2, 16), jnp.bfloat16)
    with interpreting(*TPU):
        assert "forward: pallas_tpu\n  backward: pallas_tpu" in explain(x, x, x, mask=Causal())


def test_decoding_refuses_widths_that_would_copy_the_cache():
    q, pages = jnp.zeros((1, 2, 64)), jnp.zeros((4, 16, 2, 64))
    table, lengths = jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="widths 64 and 64 are not multiples of 128, so every step would copy"):
        interpreted(lambda *args: decode_attention(*args, backend="paged_tpu"), q, pages, pages, table, lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_table_sizes_fit_every_chip_and_cover_the_lengths_without_a_block_too_many(kind, kernel):
    for T, width in ((17, 64), (1000, 128), (1152, 256), (65536, 576)):
        x = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
        operands = Operands(x, x, x, None)
        blocks = tpu_blocks(kind, operands, Settings(1.0, Causal()), kernel)
        assert too_large(kind, operands, blocks, kernel) is None
        n = -(-T // blocks.q)
        assert blocks.q % 128 == 0 and n * blocks.q - T < 128 * n


# --------------------------------------------------------------------------------------- splash


@pytest.mark.parametrize(
    ("T", "S", "settings"),
    [
        (256, 256, {"mask": Causal()}),
        (128, 256, {"mask": Causal(50), "q_offset": 128, "softcap": 2.0}),
        (256, 128, {"mask": Full()}),
    ],
    ids=["causal", "window", "full"],
)
def test_splash_is_the_formula(T, S, settings):
    # A scale of 1 / 8 leaves queries their digits.
    case = problem(T, S, (4, 2), (64, 64), B=1, **settings)
    q, k, v = (jnp.asarray(case.arrays[name], jnp.bfloat16) for name in "qkv")

    def grads(how):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, **settings, **how), q, k, v)
        lse = attention(q, k, v, **settings, backend=how["backend"], return_lse=True)[1]
        return out, lse, *pull(jnp.asarray(case.d_out, jnp.bfloat16))

    with interpreting(*TPU):
        found = grads({"backend": "splash", "backward": "splash", "blocks": (128, 128)})
    for a, b in zip(found, grads({"backend": "dense", "backward": "dense"}), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), atol=0.03, rtol=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": jnp.array([5])}, "it gives rows of padding a mean of values"),
        ({"mask": Causal() | Prefix(3)}, "it knows causal masks and windows, and not Or"),
        ({"q_offset": -1}, "some queries see no key"),
        ({"mask": Causal(4), "q_offset": 10}, "some queries see no key"),
        ({"alibi_slopes": jnp.ones(2)}, "it knows no ALiBi"),
        ({"bias": jnp.zeros((1, 1, 1, 1))}, "it knows no bias"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "it knows no dropout"),
        ({"return_lse": True}, "cannot run backward: it has no gradient of log sums"),
        ({"blocks": (128, 100)}, r"blocks=\(128, 100\) are not multiples of 128 that divide 128 and 128"),
    ],
)
def test_splash_refuses_what_it_would_drop_or_do_otherwise(change, message):
    x = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    with interpreting(*TPU), pytest.raises(ValueError, match=message):
        attention(x, x, x, **{"mask": Causal(), "backend": "splash", "backward": "splash"} | change)
