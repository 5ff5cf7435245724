"""The update rules: AdamW, Lion, Adafactor, Muon. Roles of the abstract tree decide, never names or ranks."""

import math
from collections.abc import Callable
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
    schedule's factor (decoupled decay, arXiv 1711.05101). The direction is that of the rule by name; "muon" is
    Muon's for leaves of role "matrix" and Adam's for others. The peak is `muon_learning_rate` for Muon's leaves and
    `learning_rate` for all others.
    Roles "matrix", "router" and "head" decay; "embedding", "scale" and "bias" do not. A "selection_bias" stays.
    """
    rule = jax.tree.map(lambda spec: _rule(config, spec), specs, is_leaf=is_spec)
    rules = {
        "adamw": optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        "lion": optax.scale_by_lion(config.beta1, config.beta2),
        "adafactor": _adafactor(specs),
        "muon": _muon(config, specs),
        "none": optax.set_to_zero(),
    }
    peaks = dict.fromkeys(rules, config.learning_rate) | {"muon": config.muon_learning_rate, "none": 0.0}
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
    matrices, back = _matrices(gradient, spec)
    fan_in, fan_out = matrices.shape[-2:]
    return back(newton_schulz(matrices) * math.sqrt(max(1, fan_out / fan_in)))


def _matrices(x: Array, spec: ParamSpec) -> tuple[Array, Callable[[Array], Array]]:
    """x as matrices [*batch, inputs, outputs] of its products, and the way back."""
    inputs, outputs = ([spec.axes.index(name) for name in names] for names in (spec.inputs, spec.outputs))
    batch = [axis for axis in range(x.ndim) if axis not in inputs + outputs]
    order = batch + inputs + outputs
    moved = x.transpose(order)
    rows, columns = (math.prod(x.shape[axis] for axis in axes) for axes in (inputs, outputs))

    def back(matrices: Array) -> Array:
        return matrices.reshape(moved.shape).transpose([order.index(axis) for axis in range(x.ndim)])

    return moved.reshape(*moved.shape[: len(batch)], rows, columns), back


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
    return "adamw" if config.name == "muon" and spec.role != "matrix" else config.name


def _adafactor(specs: PyTree[Any]) -> optax.GradientTransformation:
    """Updates divided by the root of a factored mean square, and scaled down to a root mean square of 1 at most.

    Every product's matrix is factored into rows and columns (from 128 of each on) and scaled on its own; without
    relative step sizes and momentum, so that peak and schedule mean what they do for the other rules.

    Source: Adafactor, arXiv 1804.04235, algorithms 4 and 6, as optax has it.
    """
    rule = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))

    def each(f: Callable[..., Any], x: Any, spec: ParamSpec, *state: Any) -> Any:
        """f on every matrix of a leaf; on the whole leaf where it is no product's."""
        if not spec.inputs:
            return f(x, *state)
        matrices, back = _matrices(x, spec)
        for _ in matrices.shape[:-2]:
            f = jax.vmap(f)
        out = f(matrices, *state)
        return (back(out[0]), out[1]) if state else out

    def init(params: PyTree[Any]) -> PyTree[Any]:
        return jax.tree.map(lambda spec, p: each(rule.init, p, spec), specs, params, is_leaf=is_spec)

    def update(updates: PyTree[Any], state: PyTree[Any], params: PyTree[Any] = None) -> tuple[Any, Any]:
        del params
        # The rule asks for a parameter's shape, which is that of its update.
        step = lambda u, s: rule.update(u, s, u)  # noqa: E731
        leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
        pairs = zip(leaves, structure.flatten_up_to(updates), structure.flatten_up_to(state), strict=True)
        moved = [each(step, u, spec, s) for spec, u, s in pairs]
        return structure.unflatten([u for u, _ in moved]), structure.unflatten([s for _, s in moved])

    return optax.GradientTransformation(init, update)


def _muon(config: OptimizerConfig, specs: PyTree[Any]) -> optax.GradientTransformation:
    """Nesterov momentum, then the orthogonal factor of it; leaves of other roles, masked out here, pass.

    The momentum is a plain sum, 1 / (1 - beta) times an average: the factor does not see a scale.
    """

    def direction(spec: ParamSpec, update: Any) -> Any:
        return orthogonalize(update, spec) if spec.role == "matrix" else update

    directions = optax.stateless(lambda updates, _: jax.tree.map(direction, specs, updates, is_leaf=is_spec))
    return optax.chain(optax.trace(config.muon_momentum, nesterov=True), directions)
