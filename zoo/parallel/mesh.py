"""The device mesh: which devices stand along which axis."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from zoo.config import ConfigError, MeshConfig


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with all five axes (data, fsdp, tensor, expert, context), those of size 1 included.

    Every axis is always there so that a rule or a collective may name it without asking whether it exists.

    Args:
        config: sizes; the axis that is -1 takes the devices that the others leave.
        devices: all devices of all processes where None.

    Raises:
        ConfigError: where the sizes do not make use of exactly these devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(config, len(devices))
    # Auto: the compiler places what no constraint pins; jax.make_mesh would choose Explicit.
    return jax.make_mesh(sizes, config.axes, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def mesh_sizes(config: MeshConfig, n_devices: int) -> tuple[int, ...]:
    """The size of each of `config.axes` on so many devices; raises as `make_mesh` does."""
    sizes = [getattr(config, axis) for axis in config.axes]
    fixed = math.prod(size for size in sizes if size != -1)
    fits = n_devices % fixed == 0 if -1 in sizes else n_devices == fixed
    if not fits:
        product = " x ".join(config.named(axis) for axis in config.axes)
        wanted = f"a multiple of {fixed} devices" if -1 in sizes else f"{fixed} devices"
        raise ConfigError(
            f"{product} needs {wanted}, but there are {n_devices}; make the product {n_devices}, "
            "with at most one axis at -1 to take what the others leave"
        )
    return tuple(n_devices // fixed if size == -1 else size for size in sizes)
