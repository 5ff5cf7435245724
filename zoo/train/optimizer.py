"""The update rules: AdamW, and Muon for matrices. Roles of the abstract tree decide, never names or ranks."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from zoo.config import OptimizerConfig
from zoo.layers.logical import ParamSpec, is_spec

DECAYED = frozenset({"matrix", "router", "head"})
# Coefficients of the quintic that pushes every singular value towards 1 (kellerjordan.github.io/posts/muon):
# steep at 0 rather than convergent, so five iterations leave them within about 0.7 to 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def make_optimizer(config: OptimizerConfig, specs: PyTree[Any]) -> optax.GradientTransformation:
    """The update rule of a model, from its abstract tree of ParamSpec.

    An update is `peak * (direction + weight_decay * parameter)`; a training step subtracts it times the
    schedule's factor (decoupled decay, arXiv 1711.05101). The direction is Adam's, or for leaves of role
    "matrix" under name="muon" Muon's; the peak is `learning_rate` or `muon_learning_rate` accordingly.
    Roles "matrix", "router" and "head" decay; "embedding", "scale" and "bias" do not. A "selection_bias" stays.
    """
    rule = jax.tree.map(lambda spec: _rule(config, spec), specs, is_leaf=is_spec)
    peaks = {"adam": config.learning_rate, "muon": config.muon_learning_rate, "none": 0.0}
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    rules = {"adam": adam, "muon": _muon(config, specs), "none": optax.set_to_zero()}
    return optax.chain(
        optax.partition({name: rules[name] for name in sorted(set(jax.tree.leaves(rule)))}, rule),
        optax.add_decayed_weights(config.weight_decay, decay_mask(specs)),
        optax.stateless(lambda updates, _: jax.tree.map(lambda name, u: peaks[name] * u, rule, updates)),
    )


def decay_mask(specs: PyTree[Any]) -> PyTree[bool]:
    """Which leaves weight decay reaches: those that multiply activations, by role."""
    return jax.tree.map(lambda spec: spec.role in DECAYED, specs, is_leaf=is_spec)


def orthogonalize(gradient: Float[Array, "..."], spec: ParamSpec) -> Float[Array, "..."]:
    """Muon's direction of a gradient or momentum: every matrix in it with its singular values pushed to about 1.

    `spec.inputs` together are the rows of a matrix and `spec.outputs` its columns; each index of the other
    axes (layers, expert) is a matrix of its own. These stay separate axes, so a mesh that splits experts
    splits this work too. The result is scaled by sqrt(max(1, fan_out / fan_in)), as in Keller Jordan's code.
    """
    inputs, outputs = ([spec.axes.index(name) for name in names] for names in (spec.inputs, spec.outputs))
    batch = [axis for axis in range(gradient.ndim) if axis not in inputs + outputs]
    order = batch + inputs + outputs
    moved = gradient.transpose(order)
    fan_in, fan_out = (math.prod(gradient.shape[axis] for axis in axes) for axes in (inputs, outputs))
    matrices = moved.reshape(*moved.shape[: len(batch)], fan_in, fan_out)
    out = newton_schulz(matrices) * math.sqrt(max(1, fan_out / fan_in))
    return out.reshape(moved.shape).transpose([order.index(axis) for axis in range(gradient.ndim)])


def newton_schulz(x: Float[Array, "*N R C"]) -> Float[Array, "*N R C"]:
    """Five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X on every matrix, from X / |X|_F.

    It approximates the orthogonal factor U V^T of X = U S V^T (kellerjordan.github.io/posts/muon). The
    product X X^T is taken on the shorter side.
    """
    a, b, c = QUINTIC
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.mT


def _rule(config: OptimizerConfig, spec: ParamSpec) -> str:
    if spec.role == "selection_bias":
        return "none"
    return "muon" if config.name == "muon" and spec.role == "matrix" else "adam"


def _muon(config: OptimizerConfig, specs: PyTree[Any]) -> optax.GradientTransformation:
    """Nesterov momentum, then the orthogonal factor of it; leaves of other roles, masked out here, pass.

    The momentum is a plain sum, 1 / (1 - beta) times an average: the factor does not see a scale.
    """

    def direction(spec: ParamSpec, update: Any) -> Any:
        return orthogonalize(update, spec) if spec.role == "matrix" else update

    directions = optax.stateless(lambda updates, _: jax.tree.map(direction, specs, updates, is_leaf=is_spec))
    return optax.chain(optax.trace(config.muon_momentum, nesterov=True), directions)
