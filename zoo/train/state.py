"""Everything that training needs to go on from where it stopped, and where it lies."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from zoo.layers.logical import is_spec
from zoo.models.decoder import Decoder
from zoo.parallel.rules import batch_sharding, grad_shardings, optimizer_shardings, param_shardings


class TrainState(NamedTuple):
    """The state of a run between two steps; data, schedule and randomness are functions of `step`.

    Attributes:
        step: batches consumed, also those whose update was skipped; the index of the next one.
        params: the parameters.
        opt_state: of the optimizer, in float32.
        skipped: updates left out for a gradient or loss that was not finite.
        skipped_in_a_row: how many of them are the latest ones.
        ema: running mean of the parameters, in float32; None where the run keeps none.
    """

    step: Int[Array, ""]
    params: PyTree[Any]
    opt_state: PyTree[Any]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    ema: PyTree[Any] | None = None


class Layout(NamedTuple):
    """Where everything in a step lies; trees of NamedSharding.

    Attributes:
        state: a TrainState of them.
        grads: in the tree of the parameters.
        batch: of arrays [B, T].
        whole: the same on every device.
    """

    state: TrainState
    grads: PyTree[Any]
    batch: NamedSharding
    whole: NamedSharding


def as_float32(tree: PyTree[Any]) -> PyTree[Any]:
    """The arrays of a tree in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def init_state(params: PyTree[Any], optimizer: optax.GradientTransformation, ema: bool = False) -> TrainState:
    """The state before the first step, with the running mean at the parameters. The optimizer's moments are float32
    whatever the parameters are."""
    zero, wide = jnp.zeros((), jnp.int32), as_float32(params)
    # A copy: two leaves of a donated state must not share their memory.
    mean = jax.tree.map(jnp.copy, wide) if ema else None
    return TrainState(zero, params, optimizer.init(wide), zero, zero, mean)


def evaluated(state: TrainState) -> PyTree[Any]:
    """The parameters that evaluation, samples and generation use: the running mean where there is one."""
    if state.ema is None:
        return state.params
    return jax.tree.map(lambda mean, p: mean.astype(p.dtype), state.ema, state.params)


def abstract_state(specs: PyTree[Any], optimizer: optax.GradientTransformation, ema: bool = False) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s, from the abstract tree of the parameters; allocates nothing."""
    shapes = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs, is_leaf=is_spec)
    return jax.eval_shape(lambda params: init_state(params, optimizer, ema), shapes)


def make_layout(
    specs: PyTree[Any], optimizer: optax.GradientTransformation, mesh: Mesh, zero: int, ema: bool = False
) -> Layout:
    """The layout that the rules of ZeRO `zero` give; raises as parallel.rules.spec_for does."""
    whole = NamedSharding(mesh, PartitionSpec())
    params = param_shardings(specs, mesh, zero)  # first, so that an error names a parameter and not its moment
    shapes = abstract_state(specs, optimizer, ema)
    opt_state = optimizer_shardings(shapes.opt_state, specs, mesh, zero)
    mean = None if shapes.ema is None else optimizer_shardings(shapes.ema, specs, mesh, zero)
    state = TrainState(whole, params, opt_state, whole, whole, mean)
    return Layout(state, grad_shardings(specs, mesh, zero), batch_sharding(mesh), whole)


def fresh_state(model: Decoder, optimizer: optax.GradientTransformation, layout: Layout, seed: int) -> TrainState:
    """The state before the first step of a run, every device making its own part of it."""

    def init() -> TrainState:
        params = model.init(init_key(seed), jnp.zeros((1, 1), jnp.int32))["params"]
        return init_state(params, optimizer, layout.state.ema is not None)

    return jax.jit(init, out_shardings=layout.state)()


def init_key(seed: int) -> Array:
    """The key of the initial parameters; independent of those of the steps."""
    return jax.random.split(jax.random.key(seed))[0]


def step_key(seed: int, step: Int[Array, ""] | int) -> Array:
    """The key of a training step."""
    return jax.random.fold_in(jax.random.split(jax.random.key(seed))[1], step)
