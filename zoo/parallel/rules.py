"""Which logical axis lies on which mesh axis: the only place that knows both.

ZeRO 1, 2 and 3 (arXiv 1910.02054) are rows of the table `ZERO`: they differ in which part of the training
state may also be split over `fsdp`. Tensor parallelism is Megatron's (arXiv 1909.08053): heads, hidden
units and vocabulary in parts. The compiler inserts the collectives that these layouts imply.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zoo.config import ConfigError
from zoo.layers.logical import Axes, ParamSpec, is_spec

# Over `expert` too: a device has some of the experts and some of the tokens, and they meet in the experts alone
# (parallel/experts.py). Were tokens whole there, every part of the experts would compute the same attention.
BATCH_AXES = ("data", "fsdp", "expert")
# Where arrays lie depends on the sizes of the axes alone, so that it can be asked without such devices.
AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Rules:
    """A layout.

    Attributes:
        axes: (logical axis, mesh axes that it lies on); what is not named here stays whole.
        fsdp: logical axes that may be split over `fsdp`, in order of preference: of each array, the first that
            is not split otherwise and divides. "layers" is never among them: the scan over layers would have
            to fetch every slice from the one device that holds it.
        whole_if_fewer: logical axes that stay whole where they are shorter than the mesh axis, instead of being
            refused: with fewer key/value heads than tensor parts, each part needs a copy (arXiv 1911.02150).
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...]
    fsdp: tuple[str, ...] = ()
    whole_if_fewer: tuple[str, ...] = ("kv_heads",)


MODEL_AXES = (
    ("vocab", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("expert", ("expert",)),
)
ACTIVATIONS = Rules((("batch", BATCH_AXES), ("length", ("context",)), *MODEL_AXES))
WHOLE = Rules(MODEL_AXES)
SPLIT = Rules(MODEL_AXES, fsdp=("embed", "mlp", "vocab", "heads", "kv_heads", "head_dim", "expert"))


class Zero(NamedTuple):
    """The layouts of the three parts of the training state."""

    params: Rules
    grads: Rules
    optimizer: Rules


ZERO = {
    1: Zero(params=WHOLE, grads=WHOLE, optimizer=SPLIT),
    2: Zero(params=WHOLE, grads=SPLIT, optimizer=SPLIT),
    3: Zero(params=SPLIT, grads=SPLIT, optimizer=SPLIT),
}


def spec_for(axes: Axes, shape: tuple[int, ...], rules: Rules, mesh: AnyMesh, name: str = "array") -> PartitionSpec:
    """Where the dimensions of one array lie.

    Args:
        axes: logical axis of each dimension, None for one without a meaning.
        shape: size of each dimension.
        name: what the array is called in messages.

    Raises:
        ValueError: where two logical axes of the array would share a mesh axis.
        ConfigError: where a dimension is not a multiple of the mesh axis it should lie on.
    """
    table = dict(rules.axes)
    placed = [table.get(axis, ()) if axis else () for axis in axes]
    _refuse_collisions(axes, placed, name)
    parts = [_parts(axis, size, on, rules, mesh, name) for axis, size, on in zip(axes, shape, placed, strict=True)]
    split = _fsdp_dimension(axes, shape, parts, rules, mesh)
    if split is not None:
        parts[split] = ("fsdp",)
    return PartitionSpec(*(None if not p else p[0] if len(p) == 1 else p for p in parts))


def _refuse_collisions(axes: Axes, placed: list[tuple[str, ...]], name: str) -> None:
    owner: dict[str, str | None] = {}
    for axis, on in zip(axes, placed, strict=True):
        for mesh_axis in on:
            if mesh_axis in owner:
                raise ValueError(
                    f"{name}: its axes {owner[mesh_axis]} and {axis} both lie on mesh axis {mesh_axis}; "
                    "name one of them otherwise"
                )
            owner[mesh_axis] = axis


def _parts(axis: str | None, size: int, on: tuple[str, ...], rules: Rules, mesh: AnyMesh, name: str) -> tuple[str, ...]:
    """The mesh axes that a dimension really lies on: those of size 1 split nothing."""
    on = tuple(a for a in on if mesh.shape[a] > 1)
    parts = math.prod(mesh.shape[a] for a in on)
    if size % parts == 0:
        return on
    if axis in rules.whole_if_fewer and size < parts:
        return ()
    axes = " x ".join(f"mesh.{a}={mesh.shape[a]}" for a in on)
    remedy = f"pad it with model.vocab_multiple={parts}" if axis == "vocab" else "another size"
    raise ConfigError(
        f"{axes} does not divide the {axis} dimension of {name}, which is {size}; choose a divisor of {size}, "
        f"or {remedy}"
    )


def _fsdp_dimension(
    axes: Axes, shape: tuple[int, ...], parts: list[tuple[str, ...]], rules: Rules, mesh: AnyMesh
) -> int | None:
    n = mesh.shape["fsdp"]
    for candidate in rules.fsdp if n > 1 else ():
        for i, axis in enumerate(axes):
            if axis == candidate and not parts[i] and shape[i] % n == 0:
                return i
    return None


def path_name(path: tuple[Any, ...]) -> str:
    """`stage_0/block_0/ffn/up`, from a key path of jax.tree_util."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _place(specs: Any, rules: Rules, mesh: AnyMesh) -> Any:
    def sharding(path: tuple[Any, ...], spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, spec_for(spec.axes, spec.shape, rules, mesh, path_name(path)))

    return jax.tree_util.tree_map_with_path(sharding, specs, is_leaf=is_spec)


def param_shardings(specs: Any, mesh: AnyMesh, zero: int) -> Any:
    """The sharding of each parameter, in the tree of `specs` (of ParamSpec); raises as `spec_for` does."""
    return _place(specs, ZERO[zero].params, mesh)


def grad_shardings(specs: Any, mesh: AnyMesh, zero: int) -> Any:
    """The sharding of each gradient, in the tree of `specs` (of ParamSpec); raises as `spec_for` does."""
    return _place(specs, ZERO[zero].grads, mesh)


def optimizer_shardings(abstract_opt_state: Any, specs: Any, mesh: AnyMesh, zero: int) -> Any:
    """The sharding of each leaf of an optimizer's state, in its own tree.

    A leaf belongs to the parameter whose whole path ends the leaf's path (optax keeps parameter trees inside
    its named tuples). It lies as that parameter's dimensions do; a factored leaf, which lacks some of them, as
    those it has. Counters and the like are on every device.

    Args:
        abstract_opt_state: anything whose leaves have a shape, e.g. `jax.eval_shape(optimizer.init, params)`.

    Raises: as `spec_for` does.
    """
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    by_path = {_words(path): spec for path, spec in leaves}

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        words = _words(path)
        spec = next((by_path[words[i:]] for i in range(len(words)) if words[i:] in by_path), None)
        axes = _axes_of(leaf.shape, spec) if spec else None
        if axes is None:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, spec_for(axes, leaf.shape, ZERO[zero].optimizer, mesh, path_name(path)))

    return jax.tree_util.tree_map_with_path(sharding, abstract_opt_state)


def _words(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _axes_of(shape: tuple[int, ...], spec: ParamSpec) -> Axes | None:
    """The axes of a leaf with some dimensions of its parameter, in the parameter's order; None if it is no such."""
    axes: list[str | None] = []
    own = iter(zip(spec.axes, spec.shape, strict=True))
    for size in shape:
        axis = next((axis for axis, n in own if n == size), _ABSENT)
        if axis is _ABSENT:
            return None
        axes.append(axis)
    return tuple(axes)


_ABSENT: Any = object()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays [B, ...]: rows split over data, fsdp and expert, the same on every tensor part."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_parts(mesh: Mesh) -> int:
    """Into how many parts the mesh splits the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def check_batch(setting: str, rows: int, mesh: Mesh) -> None:
    """Raises ConfigError where `rows` computed at a time do not divide among the devices of BATCH_AXES.

    Args:
        setting: where the rows come from, e.g. "train.batch_size=12 in train.micro_batches=2 parts".
    """
    parts = batch_parts(mesh)
    if rows % parts:
        axes = " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in BATCH_AXES)
        raise ConfigError(
            f"{setting} gives {rows} rows at a time, not a multiple of {axes}; choose a multiple of {parts}"
        )


@dataclasses.dataclass(frozen=True)
class MeshConstrain:
    """A `Constrain` that pins activations to a mesh; equal for equal meshes, so a module may hold it."""

    mesh: Mesh

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """x, laid out by its logical axes; a dimension that does not divide stays whole (a batch of one prompt)."""
        if self.mesh.size == 1:
            return x
        table = dict(ACTIVATIONS.axes)
        fitting = tuple(
            a if a in table and self._divides(n, table[a]) else None for a, n in zip(axes, x.shape, strict=True)
        )
        spec = spec_for(fitting, x.shape, ACTIVATIONS, self.mesh, "activation")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def _divides(self, size: int, on: tuple[str, ...]) -> bool:
        return size % math.prod(self.mesh.shape[a] for a in on) == 0


def make_constrain(mesh: Mesh) -> MeshConstrain:
    """What `zoo.build(config, constrain)` takes to lay out activations on `mesh`."""
    return MeshConstrain(mesh)


def device_bytes(abstract: Any, shardings: Any) -> int:
    """Bytes that one device holds of a tree of arrays (or of anything with shape and dtype) so laid out."""

    def of(leaf: Any, sharding: NamedSharding) -> int:
        return math.prod(sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(of, abstract, shardings, is_leaf=is_spec)))


def replicated(specs: Any, mesh: Mesh, zero: int) -> list[tuple[str, str]]:
    """(path, mesh axis) of every parameter that an axis of the mesh should have split, but could not.

    For fsdp this looks at the most that `zero` splits: the optimizer's copy of the parameter.
    """
    rules = ZERO[zero].optimizer
    rows = []
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        used = {a for part in spec_for(spec.axes, spec.shape, rules, mesh, path_name(path)) for a in _as_tuple(part)}
        wanted = {a for axis, on in rules.axes if axis in spec.axes for a in on} | {"fsdp"}
        rows += [(path_name(path), a) for a in mesh.axis_names if a in wanted - used and mesh.shape[a] > 1]
    return rows


def _as_tuple(part: Any) -> tuple[str, ...]:
    return () if part is None else part if isinstance(part, tuple) else (part,)


def report(specs: Any, mesh: Mesh, zero: int) -> str:
    """One line for people: the mesh, what a device holds of the parameters, and what stayed whole on an axis."""
    shardings = param_shardings(specs, mesh, zero)
    whole = sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in jax.tree.leaves(specs, is_leaf=is_spec))
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    line = f"mesh: {axes}, ZeRO {zero}; parameters {_mb(whole)}, {_mb(device_bytes(specs, shardings))} on each device"
    left: dict[str, list[str]] = {}
    for path, axis in replicated(specs, mesh, zero):
        left.setdefault(axis, []).append(path)
    return "; ".join([line, *(f"not split over {axis}: {', '.join(paths)}" for axis, paths in left.items())])


def _mb(n: int) -> str:
    return f"{n / 1e6:.1f} MB"
