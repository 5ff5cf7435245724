"""Published figures of accelerators."""

from typing import NamedTuple

from zoo.config import ConfigError, nearest


class Device(NamedTuple):
    """One accelerator.

    Attributes:
        kind: a part of its `device_kind` in JAX.
        flops: dense bfloat16 peak, FLOP/s.
        bandwidth: of its memory, bytes/s.
    """

    kind: str
    flops: float
    bandwidth: float


# By the makers' data sheets. The first kind that fits a device is its own.
DEVICES = {
    "v6e": Device("TPU v6", 918e12, 1640e9),
    "v5e": Device("TPU v5 lite", 197e12, 819e9),
    "v5e-api": Device("TPU v5e", 197e12, 819e9),
    "v5p": Device("TPU v5", 459e12, 2765e9),
    "v4": Device("TPU v4", 275e12, 1228e9),
    "a100": Device("A100", 312e12, 2039e9),
    "h100-pcie": Device("H100 PCIe", 756e12, 2000e9),
    "h100": Device("H100", 989e12, 3350e9),
    "h200": Device("H200", 989e12, 4800e9),
}


def find_device(name: str) -> Device:
    """A device by its short name.

    Raises:
        ConfigError: there is no such device in the table; names the nearest.
    """
    if name.lower() not in DEVICES:
        raise ConfigError(f"device={name!r} is not one of {', '.join(DEVICES)}{nearest(name.lower(), DEVICES)}")
    return DEVICES[name.lower()]


def peak_flops(device_kind: str) -> float | None:
    """The published bfloat16 peak of a JAX device in FLOP/s; None for one that is not in the table (CPUs)."""
    return next((d.flops for d in DEVICES.values() if d.kind.lower() in device_kind.lower()), None)
