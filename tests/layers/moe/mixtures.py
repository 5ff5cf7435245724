"""Small mixtures, calls with their defaults, and the formulas in plain NumPy."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from zoo.config import ModelConfig
from zoo.layers.moe import build_moe

D, F = 8, 12


def block_of(moe, **changes):
    """A block with this mixture, causal or not."""
    (stage,) = ModelConfig(d_model=D, n_heads=2, n_layers=1, init_std=0.5).expand()
    return dataclasses.replace(stage.blocks[0], moe=moe, **changes)


def make(moe, seed=0, **changes):
    """(module, params) of a mixture in a block of width D, with all weights drawn from N(0, 0.5^2)."""
    module = build_moe(block_of(moe, **changes))
    draw = np.random.default_rng(seed)
    return module, jax.tree.map(lambda p: jnp.asarray(0.5 * draw.normal(size=p.shape), p.dtype), shapes(module))


def shapes(module):
    """The module's parameters as shapes and dtypes; nothing is computed."""
    return nn.meta.unbox(jax.eval_shape(partial(initialize, module), jax.random.key(0)))


def initialize(module, key):
    """The module's parameters, boxed, by its own initializers."""
    x, mask, ids = jnp.zeros((1, 2, D)), jnp.ones((1, 2), bool), jnp.ones((1, 2), jnp.int32)
    return module.init(key, x, mask, positions=ids - 1, segment_ids=ids)["params"]


def tokens(batch=2, length=6, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, D)), jnp.float32)


def call(module, params, x, mask=None, positions=None, segment_ids=None, cache=None, deterministic=True, rng=None):
    """The module on whole rows of one document unless told otherwise."""
    batch, length = x.shape[:2]
    mask = jnp.ones((batch, length), bool) if mask is None else mask
    segment_ids = mask.astype(jnp.int32) if segment_ids is None else segment_ids
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length)) if positions is None else positions
    rngs = {} if rng is None else {"router": rng}
    return _apply(module, deterministic, params, x, mask, positions, segment_ids, cache, rngs)


@partial(jax.jit, static_argnums=(0, 1))
def _apply(module, deterministic, params, x, mask, positions, segment_ids, cache, rngs):
    return module.apply(
        {"params": params},
        x,
        mask,
        positions=positions,
        segment_ids=segment_ids,
        cache=cache,
        deterministic=deterministic,
        rngs=rngs,
    )


def softmax(x):
    p = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return p / np.sum(p, axis=-1, keepdims=True)


def numpy_params(params):
    return jax.tree.map(lambda w: np.asarray(w, np.float64), params)


def swiglu(x, w_gate, w_up, w_down):
    gate = x @ w_gate
    return (gate / (1 + np.exp(-gate)) * (x @ w_up)) @ w_down


def expert(params, e):
    return params["w_gate"][e], params["w_up"][e], params["w_down"][e]


def numpy_sparse(x, params, top_k, renormalize):
    """Token by token."""
    params, x = numpy_params(params), np.asarray(x, np.float64)
    y = np.zeros_like(x)
    for at in np.ndindex(x.shape[:2]):
        p = softmax(x[at] @ params["router"]["w"])
        chosen = np.argsort(-p)[:top_k]
        total = p[chosen].sum() if renormalize else 1
        y[at] = sum(p[e] / total * swiglu(x[at], *expert(params, e)) for e in chosen)
    return y


def assert_close(found, expected, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def gradients(module, params, x, mask=None, **others):
    """Gradients for the parameters and for x of a sum that weighs every output differently."""

    def loss(params, x):
        y, stats, _ = call(module, params, x, mask, **others)
        return jnp.sum(jnp.sin(y)) + 0.1 * jnp.sum(stats.prob_sum**2) + 0.01 * stats.z_sum

    return jax.grad(loss, argnums=(0, 1))(params, x)


def influence(module, params, x, **others):
    """[T, T]: how much output t of the first row moves with input s."""
    jacobian = jax.jacobian(lambda x: call(module, params, x, **others)[0][0])(x)[:, :, 0]
    return np.abs(jacobian).max(axis=(1, 3))
