"""The leaves of a training state by path, and what can be said of them on the device: checksums, finiteness."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Bool, Shaped, UInt32

from zoo.parallel.rules import path_name

Leaves = dict[str, Any]


def by_path(state: Any) -> Leaves:
    """{"params/stage_0/...": leaf}: the same for every class of container that keeps the paths."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def like(state: Any, leaves: Leaves) -> Any:
    """The tree of `state` with its leaves taken from `leaves`, by path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path_name(path)], state)


def placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf to restore; the first device of this process where it names none."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def n_bytes(leaves: Leaves) -> int:
    """Bytes of all leaves, each counted once however many devices hold it."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves.values())


def checksum(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """A checksum of the bits of x, the same for every sharding, mesh and number of devices.

    It is the sum over i, modulo 2^32, of mix(b_i ^ mix(i)): b_i are the bits of element i as an integer and mix a
    one-to-one function of 32 bits. So a change of any one element always changes the sum, changes of several cancel
    by chance only, and since addition modulo 2^32 is exact in every order, each device sums its own part.
    """
    bits = _bits(x)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = index * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(_mix(bits ^ _mix(index)), dtype=jnp.uint32)


def _mix(x: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """The final step of MurmurHash3: each bit of the input changes about half of those of the output."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _bits(x: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    # 8-byte elements get a trailing axis of two 4-byte halves.
    width = min(x.dtype.itemsize, 4)
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]).astype(jnp.uint32)


def checksums(leaves: Leaves) -> dict[str, int]:
    """The checksum of every leaf, computed where the leaf lies."""
    return {name: int(value) for name, value in _of_each(checksum, leaves).items()}


def is_finite(state: Any) -> bool:
    """Whether no leaf of the state holds an infinity or a NaN; ask before saving."""
    floating = {name: x for name, x in by_path(state).items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    return all(_of_each(_finite, floating).values())


def _finite(x: Shaped[Array, "..."]) -> Bool[Array, ""]:
    return jnp.isfinite(x).all()


def _of_each(function: Any, leaves: Leaves) -> dict[str, Any]:
    """`function` of each leaf, on the host of every process.

    Each leaf is a computation of its own: moments have the shapes of their parameters, so there are few to compile.
    """
    return jax.device_get({name: _compiled(function, _mesh(leaf))(leaf) for name, leaf in leaves.items()})


def _mesh(leaf: Any) -> Mesh | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


@functools.cache
def _compiled(function: Any, mesh: Mesh | None) -> Any:
    # The result lies on every device, so that every process can read it.
    return jax.jit(function, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))
