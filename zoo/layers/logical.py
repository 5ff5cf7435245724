"""Logical axes: what the dimensions of parameters and activations mean, without a word about devices.

A layer declares each parameter with its axes, its role and which axes a product sums over; parallel/ maps
axes to mesh axes, train/optimizer.py reads roles, and both see one abstract tree of `ParamSpec`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
from flax import struct
from jaxtyping import Array

Axes = tuple[str | None, ...]
Role = Literal["matrix", "router", "embedding", "head", "scale", "bias", "selection_bias"]
Initializer = Callable[[Array, tuple[int, ...], Any], Array]

# (x, logical axes of x) -> x. parallel/ builds one that pins x to the mesh; alone, a layer pins nothing.
Constrain = Callable[[Array, Axes], Array]


def unconstrained(x: Array, axes: Axes) -> Array:
    """The Constrain of a model that runs on one device."""
    del axes
    return x


class ParamSpec(struct.PyTreeNode):
    """What is known of a parameter before it has a value; a leaf of the abstract tree.

    Attributes:
        value: the array while Flax initializes it, its `jax.ShapeDtypeStruct` in the abstract tree.
        axes: logical axis of each dimension; "layers" leads where a stage stacks its repeats.
        role: what the parameter is for; decides weight decay and the update rule. A "selection_bias" is no
            optimizer's: the training step moves it.
        inputs, outputs: for a matrix, the axes that its product sums over and those that it makes.
            Other axes (layers, expert) number independent matrices.
    """

    value: Any
    axes: Axes = struct.field(pytree_node=False)
    role: Role = struct.field(pytree_node=False)
    inputs: tuple[str, ...] = struct.field(pytree_node=False, default=())
    outputs: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> Any:
        return self.value.dtype


class _Box(ParamSpec, nn.meta.AxisMetadata):
    """A ParamSpec that Flax carries through init and stacks in nn.scan."""

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "_Box":
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "_Box":
        return self.replace(axes=(*self.axes[:index], params[nn.PARTITION_NAME], *self.axes[index:]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "_Box":
        del params
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))


def declare(
    module: nn.Module,
    name: str,
    init: Initializer,
    shape: tuple[int, ...],
    axes: Axes,
    role: Role,
    dtype: Any,
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
) -> Array:
    """The parameter `name` of `module`, created at init with `init(key, shape, dtype)`.

    Raises:
        ValueError: where axes and shape differ in length, or inputs and outputs are not among the axes.
    """
    if len(axes) != len(shape) or not {*inputs, *outputs} <= set(axes):
        raise ValueError(f"{name}: axes {axes}, inputs {inputs}, outputs {outputs} do not describe shape {shape}")

    def boxed(key: Array) -> _Box:
        return _Box(init(key, shape, dtype), axes, role, inputs, outputs)

    return module.param(name, boxed)


def abstract_params(boxed_init: Callable[[], Any]) -> Any:
    """The abstract tree: path -> ParamSpec, from a function that returns boxed parameters; allocates nothing."""

    def plain(box: _Box) -> ParamSpec:
        return ParamSpec(**{f.name: getattr(box, f.name) for f in dataclasses.fields(ParamSpec)})

    return jax.tree.map(plain, jax.eval_shape(boxed_init), is_leaf=is_spec)


def is_spec(leaf: Any) -> bool:
    """For `jax.tree.map(..., is_leaf=is_spec)` over an abstract tree."""
    return isinstance(leaf, ParamSpec)
