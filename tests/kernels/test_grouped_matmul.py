import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from zoo.kernels import grouped_matmul as kernel
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams, block_rows, collect, grouped_ffn, grouped_matmul, spread

D, F, E = 6, 10, 4
SILU = HiddenUnits("silu")
# Even groups; empty ones at both ends and between; all in one; rows left over; nothing at all.
COUNTS = [[10, 10, 10, 10], [0, 33, 0, 7], [21, 0, 0, 0], [0, 0, 0, 40], [3, 0, 5, 2], [0, 0, 0, 0]]


def numpy_matmul(x, w, counts):
    out, at = np.zeros((len(x), w.shape[2])), 0
    for e, n in enumerate(counts):
        out[at : at + n] = x[at : at + n] @ w[e]
        at += n
    return out


def numpy_ffn(x, scale, w_gate, w_up, w_down, counts):
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    up = numpy_matmul(x, w_up, counts)
    hidden = silu(up) if w_gate is None else silu(numpy_matmul(x, w_gate, counts)) * up
    return numpy_matmul(hidden * scale, w_down, counts)


def inputs(n_rows, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    x, scale = jax.random.normal(keys[0], (n_rows, D)), jax.random.uniform(keys[1], (n_rows, 1))
    gate, up = (0.4 * jax.random.normal(k, (E, D, F)) for k in keys[2:4])
    return x, scale, gate, up, 0.4 * jax.random.normal(keys[4], (E, F, D))


def wide(arrays):
    return [None if a is None else np.asarray(a, np.float64) for a in arrays]


def gradients(f, n_args):
    return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=tuple(range(n_args))))


matmul_gradients = gradients(grouped_matmul, 2)
matmul_gradients_reference = gradients(kernel.grouped_matmul_reference, 2)
ffn = lambda x, s, g, u, d, n: grouped_ffn(x, s, FFNParams(g, u, d), n, SILU)  # noqa: E731
ffn_reference = lambda x, s, g, u, d, n: kernel.grouped_ffn_reference(x, s, FFNParams(g, u, d), n, SILU)  # noqa: E731
ffn_gradients, ffn_gradients_reference = gradients(ffn, 5), gradients(ffn_reference, 5)


def assert_close(found, expected, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_matmul_is_the_formula(counts):
    x, _, _, w, _ = inputs(40)
    expected = numpy_matmul(*wide((x, w)), counts)
    counts = jnp.array(counts)
    assert_close(jax.jit(grouped_matmul)(x, w, counts), expected)
    assert_close(jax.jit(kernel.grouped_matmul_reference)(x, w, counts), expected)


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_ffn_is_the_formula(counts):
    args = inputs(40)
    expected = numpy_ffn(*wide(args), counts)
    assert_close(jax.jit(ffn)(*args, jnp.array(counts)), expected, 1e-4)
    assert_close(jax.jit(ffn_reference)(*args, jnp.array(counts)), expected, 1e-4)


@pytest.mark.parametrize("counts", COUNTS)
def test_values_and_gradients_equal_the_reference(counts):
    x, scale, gate, up, down = inputs(40, seed=1)
    counts = jnp.array(counts)
    assert_close(matmul_gradients(x, up, counts), matmul_gradients_reference(x, up, counts))
    args = (x, scale, gate, up, down, counts)
    assert_close(ffn_gradients(*args), ffn_gradients_reference(*args), 1e-4)


def test_without_a_gate():
    x, scale, _, up, down = inputs(21)
    counts = jnp.array([5, 0, 9, 4])
    args = (x, scale, None, up, down, counts)
    assert_close(jax.jit(ffn)(*args), numpy_ffn(*wide(args[:5]), [5, 0, 9, 4]), 1e-4)
    grads = lambda f: jax.jit(jax.grad(lambda x, s, u, d: jnp.sum(jnp.sin(f(x, s, None, u, d, counts))), (0, 1, 2, 3)))  # noqa: E731
    assert_close(grads(ffn)(x, scale, up, down), grads(ffn_reference)(x, scale, up, down), 1e-4)


OPTIONS = [
    ("clamped, biases", HiddenUnits("swish", 1.702, 0.3), True, True, False),
    ("plain, biases", HiddenUnits("gelu"), False, True, False),
    ("learned beta", HiddenUnits("swish_learned"), True, False, True),
    ("plain, biases, learned beta", HiddenUnits("swish_learned"), False, True, True),
]


@pytest.mark.parametrize(("name", "hidden", "glu", "biases", "learned"), OPTIONS, ids=[o[0] for o in OPTIONS])
@pytest.mark.parametrize("counts", [COUNTS[1], COUNTS[4]])
def test_biases_clamp_and_beta(name, hidden, glu, biases, learned, counts):
    """Values and gradients are the plain form's; rows beyond the groups give 0 in spite of the biases."""
    x, scale, gate, up, down = inputs(40, seed=2)
    keys = jax.random.split(jax.random.key(3), 3)
    b_gate, b_up = (jax.random.normal(key, (E, F)) if biases else None for key in keys[:2])
    params = FFNParams(
        w_gate=gate if glu else None,
        w_up=up,
        w_down=down,
        b_gate=b_gate if glu else None,
        b_up=b_up,
        b_down=jax.random.normal(keys[2], (E, D)) if biases else None,
        beta=jnp.linspace(0.5, 1.5, E) if learned else None,
    )
    counts = jnp.array(counts)
    run = lambda f: jax.jit(lambda x, scale, params: f(x, scale, params, counts, hidden))  # noqa: E731
    grads = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a, counts, hidden))), (0, 1, 2)))  # noqa: E731
    found = run(grouped_ffn)(x, scale, params)
    assert_close(found, run(kernel.grouped_ffn_reference)(x, scale, params), 1e-4)
    assert not np.any(found[counts.sum() :])
    dx, d_scale, d_params = grads(grouped_ffn)(x, scale, params)
    assert_close((dx, d_scale, d_params), grads(kernel.grouped_ffn_reference)(x, scale, params), 2e-4)
    for d in jax.tree.leaves(d_params):
        assert not np.any(d[counts == 0]) and np.any(d[counts > 0])


def test_many_blocks_of_every_length():
    """Groups longer than a block, and lengths around its multiples."""
    size = block_rows(600, E)
    counts = [2 * size, size + 1, size - 1, 600 - 4 * size]
    assert 4 * size < 600 and size > 1
    args = (*inputs(600), jnp.array(counts))
    assert_close(jax.jit(ffn)(*args), numpy_ffn(*wide(args[:5]), counts), 1e-4)
    found, expected = ffn_gradients(*args)[1], ffn_gradients_reference(*args)[1]
    assert_close(found, expected, 5e-4)


@pytest.mark.parametrize("n_rows", [1, 2, 3])
def test_fewer_rows_than_groups(n_rows):
    args = inputs(n_rows)
    counts = [0, n_rows, 0, 0]
    assert_close(jax.jit(ffn)(*args, jnp.array(counts)), numpy_ffn(*wide(args), counts), 1e-4)


def test_empty_groups_and_leftover_rows_have_exactly_zero_gradients_whatever_they_hold():
    x, scale, gate, up, down = inputs(40)
    x = x.at[30:].set(jnp.nan)
    value, (dx, d_scale, *d_weights) = ffn_gradients(x, scale, gate, up, down, jnp.array([12, 0, 18, 0]))
    assert np.isfinite(value)
    assert not np.any(dx[30:]) and not np.any(d_scale[30:])
    for d in d_weights:
        assert np.all(np.isfinite(d)) and np.any(d[0]) and np.any(d[2])
        assert not np.any(d[1]) and not np.any(d[3])
    assert not np.any(jax.jit(ffn)(x, scale, gate, up, down, jnp.array([12, 0, 18, 0]))[30:])


def test_reference_runs_in_float64():
    x, _, _, w, _ = wide(inputs(40))
    with jax.enable_x64(True):
        out = kernel.grouped_matmul_reference(jnp.asarray(x), jnp.asarray(w), jnp.array([10, 5, 0, 20]))
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, numpy_matmul(x, w, [10, 5, 0, 20]), rtol=1e-12)


def test_gradients_equal_finite_differences():
    x, scale, gate, up, down = (jnp.asarray(a) for a in wide(inputs(9)))
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a, np.float64)) for a in (x, scale, gate, up, down)]
        counts = jnp.array([4, 0, 3, 1])
        check_grads(jax.jit(lambda *a: ffn(*a, counts)), args, order=1, modes=["rev"], rtol=1e-6, atol=1e-6)


def test_bfloat16_sums_weight_gradients_in_float32():
    n = 4096
    x, w = jnp.ones((n, 1), jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    dw = jax.grad(lambda w: jnp.sum(grouped_matmul(x, w, jnp.array([n])).astype(jnp.float32)))(w)
    assert dw.dtype == jnp.bfloat16 and dw[0, 0, 0] == n


def test_bfloat16_sums_the_gradient_of_beta_in_float32():
    """One number shared by all units: rounded between blocks, large sums that cancel would leave an error."""
    n, hidden, one = 512, HiddenUnits("swish_learned"), jnp.ones((1, 1, 1), jnp.bfloat16)
    assert block_rows(n, 1) < n // 2
    g = jnp.where(jnp.arange(n) < n // 2, 1.0, -1.0).at[:3].set(2.0)[:, None]
    args = (jnp.ones((n, 1), jnp.bfloat16), jnp.ones((n, 1)))

    def loss(beta):
        y = grouped_ffn(*args, FFNParams(one, one, one, beta=beta), jnp.array([n]), hidden)
        return jnp.sum(y.astype(jnp.float32) * g)

    s = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(jax.grad(loss)(jnp.ones(1, jnp.bfloat16))[0], 3 * s * (1 - s), rtol=0.01)


def test_block_rows_wastes_an_eighth_at_most_of_large_groups():
    assert block_rows(8192, 8) == 256
    assert block_rows(4096, 64) == 32
    assert block_rows(1024, 8) == 32
    assert block_rows(3, 8) == 3


def test_spread_and_collect_are_transposes_of_each_other():
    token, row = jnp.array([1, 0, 2, 1, 0, 9]), jnp.array([[1, 4], [0, 3], [2, 9]])
    x, y = jnp.arange(6.0).reshape(3, 2), jnp.arange(12.0).reshape(6, 2) ** 2
    np.testing.assert_array_equal(spread(x, token, row), np.array([x[1], x[0], x[2], x[1], x[0], [0, 0]]))
    np.testing.assert_array_equal(collect(y, token, row), np.array([y[1] + y[4], y[0] + y[3], y[2]]))
    (dx,) = jax.vjp(lambda x: spread(x, token, row), x)[1](y)
    (dy,) = jax.vjp(lambda y: collect(y, token, row), y)[1](x)
    np.testing.assert_array_equal(dx, collect(y, token, row))
    np.testing.assert_array_equal(dy, spread(x, token, row))


@pytest.mark.parametrize("rows, weights", [("data", None), (None, "data"), ("data", "data")])
def test_sharded_inputs_give_the_same_numbers(rows, weights):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    args = (*inputs(40), jnp.array([7, 0, 21, 3]))
    specs = [PartitionSpec(rows)] * 2 + [PartitionSpec(weights)] * 3 + [PartitionSpec()]
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        found = ffn_gradients(*placed)
    assert_close(found, ffn_gradients(*args), 1e-4)


def test_inside_shard_map_each_device_may_hold_its_own_groups():
    """Each device runs its own rows; weights are replicated, so their gradients add over the devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, scale, gate, up, down = inputs(40)
    counts = jnp.array([[3, 0, 2, 1], [0, 0, 0, 10], [1, 2, 3, 4], [0, 0, 0, 0]])
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(x, scale, gate, up, down, counts):
        gate, up, down = (jax.lax.pcast(w, "data", to="varying") for w in (gate, up, down))
        return ffn(x, scale, gate, up, down, counts[0])

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, split, whole, whole, whole, split), out_specs=split)

    def one_by_one(x, scale, gate, up, down, counts):
        pieces = [
            ffn_reference(x[i : i + 10], scale[i : i + 10], gate, up, down, counts[i // 10]) for i in range(0, 40, 10)
        ]
        return jnp.concatenate(pieces)

    args = (x, scale, gate, up, down, counts)
    assert_close(gradients(mapped, 5)(*args), gradients(one_by_one, 5)(*args), 1e-4)
