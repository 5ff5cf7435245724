"""The update rules: AdamW, Lion, Adafactor, Muon. Roles of the abstract tree decide, never names or ranks."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from zoo.config import OptimizerConfig
from zoo.layers.logical import ParamSpec, is_spec

DECAYED = frozenset({"matrix", "router", "head"})
# Coefficients of the quintic that pushes every singular value towards 1 (kellerjordan.github.io/posts/muon):
# steep at 0 rather than convergent, so five iterations leave them within about 0.7 to 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

_FACTORED, _CLIP = optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)


def make_optimizer(config: OptimizerConfig, specs: PyTree[Any]) -> optax.GradientTransformationExtraArgs:
    """The update rule of a model, from its abstract tree of ParamSpec.

    `update(gradients, state, parameters, good=True)`: where `good`, a bool of the devices, is false, the state that
    comes back is the old one, bit for bit, and the update is to be left out.

    An update is `peak * (direction + weight_decay * parameter)`; a training step subtracts it times the
    schedule's factor (decoupled decay, arXiv 1711.05101). The direction is that of the rule by name; "muon" is
    Muon's for leaves of role "matrix" and Adam's for others. The peak is `muon_learning_rate` for Muon's leaves and
    `learning_rate` for all others.
    Roles "matrix", "router" and "head" decay; "embedding", "scale" and "bias" do not. A "selection_bias" stays.
    """
    rule = jax.tree.map(lambda spec: _rule(config, spec), specs, is_leaf=is_spec)
    rules = {
        "adamw": _adam(config.beta1, config.beta2, config.eps),
        "lion": _guarded(optax.scale_by_lion(config.beta1, config.beta2)),
        "adafactor": _guarded(_adafactor(specs)),
        "muon": _guarded(_muon(config, specs)),
        "none": optax.set_to_zero(),
    }
    peaks = dict.fromkeys(rules, config.learning_rate) | {"muon": config.muon_learning_rate, "none": 0.0}
    return optax.chain(
        optax.partition({name: rules[name] for name in sorted(set(jax.tree.leaves(rule)))}, rule),
        optax.add_decayed_weights(config.weight_decay, decay_mask(specs)),
        optax.stateless(lambda updates, _: jax.tree.map(lambda name, u: peaks[name] * u, rule, updates)),
    )


def _guarded(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The rule with the state that `make_optimizer` asks for where an update is not good."""

    def update(updates: Any, state: Any, params: Any = None, *, good: Any = True) -> tuple[Any, Any]:
        updates, new = rule.update(updates, state, params)
        return updates, keep(good, new, state)

    return optax.GradientTransformationExtraArgs(rule.init, update)


def _adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Adam's direction, with optax's state; source: arXiv 1412.6980, algorithm 1.

    The direction is made of the moments that are kept, behind a barrier: each array is then read once and written
    in place. XLA would else copy the old moments and compute the new ones again with the parameters, which takes
    twice as long on CPUs (benchmarks/NOTES.md).
    """
    rule = optax.scale_by_adam(beta1, beta2, eps)

    def update(grads: Any, state: Any, params: Any = None, *, good: Any = True) -> tuple[Any, Any]:
        del params
        mean = optax.tree.update_moment(grads, state.mu, beta1, 1)
        square = optax.tree.update_moment_per_elem_norm(grads, state.nu, beta2, 2)
        count = optax.safe_increment(state.count)
        count, mean, square = keep(good, (count, mean, square), tuple(state))
        mean, square = jax.lax.optimization_barrier((mean, square))
        directions = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + eps),
            optax.tree.bias_correction(mean, beta1, count),
            optax.tree.bias_correction(square, beta2, count),
        )
        return directions, optax.ScaleByAdamState(count, mean, square)

    return optax.GradientTransformationExtraArgs(rule.init, update)


def keep(good: Bool[Array, ""] | bool, new: PyTree[Any], old: PyTree[Any]) -> PyTree[Any]:
    """`new` where `good`, else `old`, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def decay_mask(specs: PyTree[Any]) -> PyTree[bool]:
    """Which leaves weight decay reaches: those that multiply activations, by role."""
    return jax.tree.map(lambda spec: spec.role in DECAYED, specs, is_leaf=is_spec)


def orthogonalize(gradient: Float[Array, "..."], spec: ParamSpec) -> Float[Array, "..."]:
    """Muon's direction of a gradient or momentum: every matrix in it with its singular values pushed to about 1.

    `spec.inputs` together are the rows of a matrix and `spec.outputs` its columns; each index of the other
    axes (layers, expert) is a matrix of its own. These stay separate axes, so a mesh that splits experts
    splits this work too. The result is scaled by sqrt(max(1, fan_out / fan_in)), as in Keller Jordan's code.
    """
    matrices, back = _matrices(gradient, *_places(spec))
    fan_in, fan_out = matrices.shape[-2:]
    return back(newton_schulz(matrices) * math.sqrt(max(1, fan_out / fan_in)))


def _places(spec: ParamSpec) -> tuple[list[int], list[int]]:
    """The dimensions of a product's inputs and of its outputs."""
    inputs, outputs = ([spec.axes.index(name) for name in names] for names in (spec.inputs, spec.outputs))
    return inputs, outputs


def _matrices(x: Array, inputs: list[int], outputs: list[int]) -> tuple[Array, Callable[[Array], Array]]:
    """x as matrices [*batch, inputs, outputs], from the dimensions that make rows and columns, and the way back."""
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
    relative step sizes and momentum, so that peak and schedule mean what they do for the other rules. The state has
    the dimensions of its parameters, so that it lies on a mesh as they do.

    Source: Adafactor, arXiv 1804.04235, algorithms 4 and 6, as optax has it.
    """
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)

    def over(f: Callable[..., tuple[Any, ...]], *trees: PyTree[Any]) -> list[PyTree[Any]]:
        """f(spec, leaf of each tree) -> a tuple, as a tuple of trees; what another rule has, f does not see."""
        rows = zip(*map(structure.flatten_up_to, trees), strict=True)
        found = [f(spec, *row) for spec, row in zip(leaves, rows, strict=True)]
        return [structure.unflatten(column) for column in zip(*found, strict=True)]

    def init(params: PyTree[Any]) -> optax.FactoredState:
        return optax.FactoredState(jnp.zeros((), jnp.int32), *over(_mean_squares, params))

    def update(updates: PyTree[Any], state: optax.FactoredState, params: Any = None) -> tuple[Any, Any]:
        del params
        step = functools.partial(_factored_step, state.count)
        updates, *squares = over(step, updates, state.v_row, state.v_col, state.v)
        return updates, optax.FactoredState(state.count + 1, *squares)

    return optax.GradientTransformation(init, update)


def _mean_squares(spec: ParamSpec, p: Any) -> tuple[Any, Any, Any]:
    """Adafactor's state of a leaf at the start: of rows, of columns, and of every entry where it is not factored."""
    if isinstance(p, optax.MaskedNode):
        return p, p, p
    rows, columns = _sides(spec)
    matrices, back = _matrices(p, rows, columns)
    state = _of_each(_FACTORED.init, matrices.ndim - 2)(matrices)
    if state.v.shape == matrices.shape:
        return state.v_row, state.v_col, back(state.v)
    # What optax calls the rows is the shorter side.
    short, long = (rows, columns) if matrices.shape[-2] <= matrices.shape[-1] else (columns, rows)
    shape = lambda left_out: [n for axis, n in enumerate(p.shape) if axis not in left_out]  # noqa: E731
    return state.v_row.reshape(shape(long)), state.v_col.reshape(shape(short)), state.v


def _factored_step(count: Array, spec: ParamSpec, g: Any, row: Any, column: Any, whole: Any) -> tuple[Any, ...]:
    """Adafactor's direction of a leaf, and its state after step `count`."""
    if isinstance(g, optax.MaskedNode):
        return g, row, column, whole
    matrices, back = _matrices(g, *_sides(spec))
    batch, factored = matrices.shape[:-2], whole.shape != g.shape
    squares = whole if factored else _matrices(whole, *_sides(spec))[0]
    state = optax.FactoredState(count, row.reshape(*batch, -1), column.reshape(*batch, -1), squares)
    axes = optax.FactoredState(None, 0, 0, 0)

    def step(m: Array, old: optax.FactoredState) -> tuple[Array, optax.FactoredState]:
        scaled, new = _FACTORED.update(m, old, m)  # it asks for the parameter's shape, which is that of its update
        return _CLIP.update(scaled, optax.EmptyState())[0], new

    u, new = _of_each(step, len(batch), in_axes=(0, axes), out_axes=(0, axes))(matrices, state)
    entries = new.v if factored else back(new.v)
    return back(u), new.v_row.reshape(row.shape), new.v_col.reshape(column.shape), entries


def _sides(spec: ParamSpec) -> tuple[list[int], list[int]]:
    """The dimensions that are a leaf's rows and those that are its columns, for Adafactor.

    A product's inputs and outputs; a table's entries and their width; else no rows: layers stay apart.
    """
    if spec.inputs:
        return _places(spec)
    rest = [axis for axis, name in enumerate(spec.axes) if name != "layers"]
    return (rest[:1], rest[1:]) if spec.role == "embedding" else ([], rest)


def _of_each(f: Callable[..., Any], n: int, **axes: Any) -> Callable[..., Any]:
    """f of what n leading dimensions number."""
    for _ in range(n):
        f = jax.vmap(f, **axes)
    return f


def _muon(config: OptimizerConfig, specs: PyTree[Any]) -> optax.GradientTransformation:
    """Nesterov momentum, then the orthogonal factor of it; leaves of other roles, masked out here, pass.

    The momentum is a plain sum, 1 / (1 - beta) times an average: the factor does not see a scale.
    """

    def direction(spec: ParamSpec, update: Any) -> Any:
        return orthogonalize(update, spec) if spec.role == "matrix" else update

    directions = optax.stateless(lambda updates, _: jax.tree.map(direction, specs, updates, is_leaf=is_spec))
    return optax.chain(optax.trace(config.muon_momentum, nesterov=True), directions)
