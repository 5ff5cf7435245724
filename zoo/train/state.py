"""Everything that training needs to go on from where it stopped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from zoo.layers.logical import is_spec


class TrainState(NamedTuple):
    """The state of a run between two steps; data, schedule and randomness are functions of `step`.

    Attributes:
        step: batches consumed, also those whose update was skipped; the index of the next one.
        params: the parameters.
        opt_state: of the optimizer, in float32.
        skipped: updates left out for a gradient or loss that was not finite.
        skipped_in_a_row: how many of them are the latest ones.
    """

    step: Int[Array, ""]
    params: PyTree[Any]
    opt_state: PyTree[Any]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]


def init_state(params: PyTree[Any], optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. The optimizer's moments are float32 whatever the parameters are."""
    opt_state = optimizer.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, opt_state, zero, zero)


def abstract_state(specs: PyTree[Any], optimizer: optax.GradientTransformation) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s, from the abstract tree of the parameters; allocates nothing."""
    shapes = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs, is_leaf=is_spec)
    return jax.eval_shape(lambda params: init_state(params, optimizer), shapes)
