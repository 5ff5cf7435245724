"""Every backend of the grouped products gives the reference's values and gradients, and says what it cannot do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from zoo.kernels import grouped_backends as backends
from zoo.kernels import grouped_triton
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import (
    FFNParams,
    grouped_ffn,
    grouped_ffn_reference,
    grouped_matmul,
    grouped_matmul_reference,
)

# Rows that are no multiple of a block, widths of several tiles with a rest.
N, D, F, E = 70, 40, 24, 3
COUNTS = {
    "uneven": [1, 48, 21],
    "empty groups": [0, 70, 0],
    "rows left over": [17, 0, 16],
    "no rows": [0, 0, 0],
}
RUN_HERE = ["sweep", "ragged_dot", "triton_interpreted"]
DTYPES = [jnp.float32, jnp.bfloat16]
SWISH = HiddenUnits("swish_learned", glu_clamp=0.8)


def inputs():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[-2])  # noqa: E731
    x, scale, g = 6 * normal(N, D), np.abs(rng.normal(size=(N, 1))).astype(np.float32), 6 * normal(N, D)
    params = FFNParams(
        normal(E, D, F),
        normal(E, D, F),
        normal(E, F, D),
        normal(E, F),
        normal(E, F),
        normal(E, D),
        np.linspace(0.5, 1.5, E, dtype=np.float32),
    )
    return x, scale, params, g


def pulled(f):
    """(*args, counts, g) -> the value and all gradients of f(*args, counts), where its result has the gradient g."""

    def run(*args):
        *primals, counts, g = args
        y, pull = jax.vjp(lambda *primals: f(*primals, counts), *primals)
        return y, pull(g.astype(y.dtype))

    return jax.jit(run)


def rounded(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


def assert_as_exact_as_dense(run, dense, args, g, dtype):
    """Against float64 of the same rounded inputs: at most twice the error of the dense form in the same dtype."""
    for counts in COUNTS.values():
        counts = jnp.array(counts)
        found, plain = run(*args, counts, g), dense(*args, counts, g)
        with jax.enable_x64(True):
            exact = dense(*rounded(args, jnp.float64), counts, rounded(g, jnp.float64))
        for a, b, c in zip(*map(jax.tree.leaves, (found, plain, exact)), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            error, allowed = (np.max(np.abs(np.asarray(v, np.float64) - np.asarray(c))) for v in (a, b))
            noise = 2 * float(jnp.finfo(dtype).eps) * np.max(np.abs(c))
            assert error <= 2 * allowed + noise


@functools.cache
def dense_matmul():
    return pulled(grouped_matmul_reference)


@functools.cache
def dense_ffn(hidden):
    return pulled(lambda x, scale, params, counts: grouped_ffn_reference(x, scale, params, counts, hidden))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("backend", RUN_HERE)
def test_products_are_as_exact_as_the_dense_form(backend, dtype):
    x, _, params, g = inputs()
    args = rounded((x, params.w_up), dtype)
    run = pulled(lambda x, w, counts: grouped_matmul(x, w, counts, backend))
    assert_as_exact_as_dense(run, dense_matmul(), args, rounded(g[:, :F], dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("backend", RUN_HERE)
def test_networks_are_as_exact_as_the_dense_form(backend, dtype):
    """With a gate, a clamp and every bias."""
    x, scale, params, g = inputs()
    hidden = HiddenUnits("swish", 1.7, glu_clamp=0.8)
    args = (rounded(x, dtype), jnp.asarray(scale), rounded(params._replace(beta=None), dtype))
    run = pulled(lambda x, scale, params, counts: grouped_ffn(x, scale, params, counts, hidden, backend))
    assert_as_exact_as_dense(run, dense_ffn(hidden), args, rounded(g, dtype), dtype)


@pytest.mark.parametrize("backend", RUN_HERE)
def test_a_learned_beta(backend):
    """Its gradient is one number of many that cancel, so it has a bound of its own."""
    x, scale, params, g = rounded(inputs(), jnp.float32)
    counts = jnp.array(COUNTS["uneven"])
    run = pulled(lambda x, scale, params, counts: grouped_ffn(x, scale, params, counts, SWISH, backend))
    found, expected = run(x, scale, params, counts, g), dense_ffn(SWISH)(x, scale, params, counts, g)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", RUN_HERE)
def test_without_gate_and_biases(backend):
    x, scale, params, g = inputs()
    params = FFNParams(None, params.w_up, params.w_down)
    gelu = HiddenUnits("gelu")
    run = pulled(lambda x, scale, params, counts: grouped_ffn(x, scale, params, counts, gelu, backend))
    args = rounded((x, scale, params), jnp.float32)
    assert_as_exact_as_dense(run, dense_ffn(gelu), args, jnp.asarray(g), jnp.float32)


@pytest.mark.parametrize("backend", RUN_HERE)
def test_rows_beyond_the_groups_and_empty_groups_are_exactly_zero_whatever_they_hold(backend):
    x, scale, params, g = inputs()
    x[50:], scale[50:], g[50:] = np.nan, np.nan, np.nan
    run = pulled(lambda x, scale, params, counts: grouped_ffn(x, scale, params, counts, SWISH, backend))
    y, (dx, d_scale, d_params) = run(x, scale, params, jnp.array([30, 0, 20]), g)
    for rows in (y, dx, d_scale):
        assert not np.any(rows[50:]) and np.all(np.isfinite(rows)) and np.any(rows[:50])
    for d in d_params:
        assert not np.any(d[1]) and np.all(np.isfinite(d)) and np.any(d[0]) and np.any(d[2])


def lowered(platform, backend="auto"):
    shape = jax.ShapeDtypeStruct
    args = shape((N, D), "bfloat16"), shape((E, D, F), "bfloat16"), shape((E,), "int32")
    trace = jax.jit(lambda *args: grouped_matmul(*args, backend)).trace(*args)
    return trace.lower(lowering_platforms=(platform,)).as_text()


def a_gpu():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device))


def test_auto_goes_by_the_platform_that_a_program_is_lowered_for():
    assert "ragged_dot" in lowered("tpu") and "while" not in lowered("tpu")
    assert "ragged_dot" not in lowered("cpu") and "while" in lowered("cpu")
    assert "triton" not in lowered("cuda") and "while" not in lowered("cuda")
    with a_gpu():
        assert "triton" in lowered("cuda")


def test_gradients_lower_for_a_gpu_in_triton():
    x, scale, params, g = rounded(inputs(), jnp.bfloat16)
    run = pulled(lambda x, scale, params, counts: grouped_ffn(x, scale, params, counts, SWISH))
    with a_gpu():
        text = run.trace(x, scale, params, jnp.array([3, 2, 1]), g).lower(lowering_platforms=("cuda",)).as_text()
    assert "rows_kernel" in text and "outer_kernel" in text


X, W, FEW = jnp.ones((4, D)), jnp.ones((E, D, F)), jnp.zeros(E, int)


def test_a_backend_that_cannot_says_why():
    with pytest.raises(ValueError, match=r"^backend='triton' runs on NVIDIA GPUs, and this is a cpu; use 'auto'"):
        grouped_matmul(X, W, FEW, "triton")
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"backend='triton_inter.*has no products in float64"):
        grouped_matmul(X.astype("float64"), W.astype("float64"), FEW, "triton_interpreted")
    with pytest.raises(ValueError, match=r"^backend='cuda' is not one of auto, sweep, ragged_dot, triton"):
        backends.choose("cuda", X, W, max, max)


def test_what_triton_refuses():
    rows, large = X.astype("bfloat16"), jax.ShapeDtypeStruct((2**16, 2**15), "bfloat16")
    assert backends.refusal("triton", "cuda", rows, W) is None
    assert "counts elements in 32 bits, and an array has 2147483648" in backends.refusal("triton", "cuda", rows, large)


def test_a_gpu_too_old_for_triton_gets_ragged_dot(monkeypatch):
    monkeypatch.setattr(backends, "_compute_capabilities", lambda: [7.5])
    with a_gpu():
        assert "triton" not in lowered("cuda")
        with pytest.raises(ValueError, match=r"backend='triton' needs a compute capability of 8.0.*has 7.5;"):
            lowered("cuda", "triton")


@pytest.mark.parametrize(
    ("x", "w", "counts", "reason"),
    [
        (X, W, jnp.zeros(2, int), "2 counts for the 3 groups of w; give one for each"),
        (X[:, :7], W, FEW, "w takes rows of 40, but x's are 7 wide; give w 7"),
    ],
)
def test_sizes_of_a_product_that_do_not_fit(x, w, counts, reason):
    with pytest.raises(ValueError, match=f"^grouped_matmul: {reason}$"):
        backends.check_matmul(x, w, counts)


@pytest.mark.parametrize(
    ("params", "counts", "reason"),
    [
        (FFNParams(None, W, jnp.ones((E, F, D))), jnp.zeros(4, int), "4 counts for the 3 groups of w_up; give one for"),
        (FFNParams(None, W, jnp.ones((2, F, D))), FEW, "3 counts for the 2 groups of w_down"),
        (FFNParams(None, W[:, 1:], jnp.ones((E, F, D))), FEW, "w_up takes rows of 39, but x's are 40 wide"),
        (
            FFNParams(None, W, jnp.ones((E, 9, D))),
            FEW,
            "w_down takes rows of 9, but w_up's are 24 wide; give w_down 24",
        ),
        (FFNParams(W[..., 1:], W, jnp.ones((E, F, D))), FEW, "w_gate is 23 wide and w_up 24; give them one width"),
    ],
)
def test_sizes_of_a_network_that_do_not_fit(params, counts, reason):
    with pytest.raises(ValueError, match=f"^grouped_ffn: {reason}"):
        backends.check_ffn(X, params, counts)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_blocks_cover_every_row_once(counts):
    """Each row is in one block, of its group; those beyond all groups are in blocks of group E."""
    group, first, end = np.asarray(grouped_triton.block_list(jnp.array(counts), N, 16))
    owner = np.full(N, -1)
    for e, start, stop in zip(group, first, np.minimum(first + 16, end), strict=True):
        assert np.all(owner[start:stop] == -1)
        owner[start:stop] = e
    np.testing.assert_array_equal(owner, np.repeat(range(E + 1), [*counts, N - sum(counts)]))


def test_a_block_is_half_a_mean_group_at_most_where_tensor_cores_allow():
    assert [grouped_triton.block_rows(n, 8) for n in (1, 300, 1000, 4096)] == [16, 16, 32, 128]
