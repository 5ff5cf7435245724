"""Residual forms: a block is its parts and norms put together as the formulas say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.config import ModelConfig, SparseConfig
from zoo.kernels.attention import attention
from zoo.layers.attention import Attention
from zoo.layers.block import DecoderBlock
from zoo.layers.ffn import FFN
from zoo.layers.moe import build_moe
from zoo.layers.norm import build_norm

B, T, D, L = 2, 5, 16, 3
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
POSITIONS, SEGMENTS = jnp.tile(jnp.arange(T), (B, 1)), jnp.ones((B, T), jnp.int32)


def make(**fields):
    """(block, module, parameters with noise on every leaf)."""
    model = ModelConfig(d_model=D, n_layers=L, n_heads=2, d_ff=24, norm_bias=True, **fields)
    block = model.expand()[0].blocks[0]
    module = DecoderBlock(block)
    boxed = jax.eval_shape(lambda: module.init(jax.random.key(0), X, POSITIONS, SEGMENTS, None, True))["params"]
    rng = np.random.default_rng(1)
    draw = lambda s: jnp.asarray(rng.normal(size=s.value.shape) * 0.5, jnp.float32)  # noqa: E731
    return block, module, jax.tree.map(draw, boxed, is_leaf=lambda s: hasattr(s, "value"))


def parts(block, params):
    """norm(name), attention and FFN as functions of x."""

    def norm(name):
        return lambda x: build_norm(block).apply({"params": params[f"{name}_norm"]}, x)

    def attend(x):
        return Attention(block).apply({"params": params["attention"]}, x, POSITIONS, SEGMENTS)[0]

    def feed(x):
        if block.moe is None:
            return FFN(block, block.d_ff).apply({"params": params["ffn"]}, x)
        where = {"positions": POSITIONS, "segment_ids": SEGMENTS}
        return build_moe(block).apply({"params": params["moe"]}, x, SEGMENTS > 0, **where)[0]

    return norm, attend, feed


def pre(x, norm, f, name):
    return x + f(norm(name)(x))


def post(x, norm, f, name):
    return norm(name)(x + f(x))


def sandwich(x, norm, f, name):
    return x + norm(f"{name}_post")(f(norm(name)(x)))


def deepnorm(x, norm, f, name):
    return norm(name)((2 * L) ** 0.25 * x + f(x))


@pytest.mark.parametrize("form", [pre, post, sandwich, deepnorm])
@pytest.mark.parametrize("moe", [None, SparseConfig(n_experts=3, d_ff=8)])
def test_one_part_after_the_other(form, moe):
    block, module, params = make(norm_placement=form.__name__, moe=moe)
    norm, attend, feed = parts(block, params)
    expected = form(form(X, norm, attend, "attention"), norm, feed, "ffn")
    found = module.apply({"params": params}, X, POSITIONS, SEGMENTS, None, True)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
    assert (found[1] is None) == (moe is None)


@pytest.mark.parametrize("form", ["one_norm", "two_norms"])
def test_side_by_side(form):
    block, module, params = make(parallel=form)
    assert ("ffn_norm" in params) == (form == "two_norms")
    norm, attend, feed = parts(block, params)
    other = norm("ffn" if form == "two_norms" else "attention")
    expected = X + attend(norm("attention")(X)) + feed(other(X))
    found = module.apply({"params": params}, X, POSITIONS, SEGMENTS, None, True)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"norm_placement": "sandwich"}, {"parallel": "one_norm"}])
@pytest.mark.parametrize("silent", ["attention", "ffn"])
def test_dropout_is_on_each_part_and_in_training_only(fields, silent):
    """With one part silent, what the other adds is 0 or, where it is kept, twice as much."""
    _, module, params = make(dropout=0.5, **fields)
    quiet = {"attention": "attention_post_norm", "ffn": "ffn_post_norm"} if "norm_placement" in fields else {}
    params[quiet.get(silent, silent)] = jax.tree.map(jnp.zeros_like, params[quiet.get(silent, silent)])
    run = lambda *args, **rest: module.apply({"params": params}, X, POSITIONS, SEGMENTS, None, *args, **rest)[0]  # noqa: E731
    whole, dropped = run(True) - X, run(False, rngs={"dropout": jax.random.key(0)}) - X
    kept = jnp.abs(dropped) > 0
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_allclose(dropped, jnp.where(kept, 2 * whole, 0), rtol=1e-4, atol=1e-5)


def test_attention_is_computed_by_what_the_block_is_given():
    block, _, params = make()
    module = DecoderBlock(block, attend=lambda q, k, v, **settings: 2 * attention(q, k, v, **settings))
    params["ffn"] = jax.tree.map(jnp.zeros_like, params["ffn"])
    norm, attend, _ = parts(block, params)
    found = module.apply({"params": params}, X, POSITIONS, SEGMENTS, None, True)[0]
    np.testing.assert_allclose(found, X + 2 * attend(norm("attention")(X)), rtol=1e-5, atol=1e-5)


def test_deepnorm_rounds_the_product_with_alpha_and_not_alpha():
    block, _, params = make(norm_placement="deepnorm", compute_dtype="bfloat16")
    params |= {part: jax.tree.map(jnp.zeros_like, params[part]) for part in ("attention", "ffn")}
    x, sums = X.astype(jnp.bfloat16), []

    def constrain(x, axes):
        sums.extend([x] if axes == ("batch", "length", "embed") else [])
        return x

    DecoderBlock(block, constrain).apply({"params": params}, x, POSITIONS, SEGMENTS, None, True)
    np.testing.assert_array_equal(sums[0], ((2 * L) ** 0.25 * x.astype(jnp.float32)).astype(jnp.bfloat16))
    assert (sums[0] != (2 * L) ** 0.25 * x).any()  # which rounds alpha
