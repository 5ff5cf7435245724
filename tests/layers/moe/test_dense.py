import jax
import jax.numpy as jnp
import numpy as np
from mixtures import D, F, assert_close, call, expert, gradients, influence, make, numpy_params, softmax, swiglu, tokens

from zoo.config import DenseConfig
from zoo.layers.moe import balance_loss

E = 3


def test_is_the_formula():
    module, params = make(DenseConfig(n_experts=E, d_ff=F, n_shared_experts=1))
    x = tokens()
    wide, inputs = numpy_params(params), np.asarray(x, np.float64)
    p = softmax(inputs @ wide["router"]["w"])
    shared = wide["shared"]
    expected = swiglu(inputs, shared["w_gate"], shared["w_up"], shared["w_down"])
    expected += sum(p[..., e : e + 1] * swiglu(inputs, *expert(wide, e)) for e in range(E))
    y, stats, cache = call(module, params, x)
    assert_close(y, expected)
    assert cache is None
    for name in ("counts", "prob_sum", "gate_sum"):
        np.testing.assert_allclose(getattr(stats, name), p.sum((0, 1)), rtol=1e-5)
    share = p.mean((0, 1))
    np.testing.assert_allclose(balance_loss(stats), E * (share**2).sum(), rtol=1e-5)


def test_identical_experts_are_one_ffn():
    module, params = make(DenseConfig(n_experts=E, d_ff=F))
    params |= {n: jnp.broadcast_to(params[n][:1], params[n].shape) for n in ("w_gate", "w_up", "w_down")}
    x = tokens()
    assert_close(call(module, params, x)[0], swiglu(np.asarray(x, np.float64), *expert(numpy_params(params), 0)))


def test_is_causal_and_ignores_padding():
    module, params = make(DenseConfig(n_experts=E, d_ff=F))
    x, mask = tokens(1, 5), jnp.array([[1, 0, 1, 1, 0]], bool)
    assert not np.any(np.triu(influence(module, params, x), 1))
    y, stats, _ = call(module, params, x, mask)
    y_noisy, stats_noisy, _ = call(module, params, jnp.where(mask[..., None], x, 50.0), mask)
    assert_close((y, stats), (y_noisy, stats_noisy))
    assert stats.tokens == 3 and not np.any(y[~mask])
    for grad in jax.tree.leaves(gradients(module, params, x, jnp.zeros_like(mask))):
        assert not np.any(grad)


def test_half_precision_output_keeps_a_float32_router():
    module, params = make(DenseConfig(n_experts=E, d_ff=F), compute_dtype="bfloat16")
    x = tokens().astype(jnp.bfloat16)
    y, stats, _ = call(module, params, x)
    assert y.dtype == jnp.bfloat16 and y.shape == (2, 6, D)
    exact, _ = make(DenseConfig(n_experts=E, d_ff=F))
    expected, exact_stats, _ = call(exact, params, x.astype(jnp.float32))
    assert_close(stats, exact_stats)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.1)
