"""What a program is being traced for: the devices of the mesh that is set, which need not be here, or else our own."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax

# Triton needs compute capability 8.0; these, which notebooks still lend, have less.
_OLD_GPUS = ("T4", "V100", "P100", "P4", "K80")


class Target(NamedTuple):
    """A kind of device.

    Attributes:
        platform: "cpu", "gpu" (NVIDIA), "rocm" or "tpu".
        kind: as the device calls itself, such as "NVIDIA H200" or "TPU v5 lite".
        interpret: whether kernels for it are interpreted, on the device that is here.
    """

    platform: str
    kind: str
    interpret: bool = False

    @property
    def has_triton(self) -> bool:
        """Whether it is an NVIDIA GPU of compute capability 8.0 or more."""
        words = self.kind.replace("-", " ").split()
        return self.platform == "gpu" and not set(words) & set(_OLD_GPUS)


_INTERPRETED: ContextVar[Target | None] = ContextVar("interpreted", default=None)


def target() -> Target:
    """The devices that the program will run on."""
    interpreted = _INTERPRETED.get()
    if interpreted is not None:
        return interpreted
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    platform = "gpu" if device.platform == "cuda" else device.platform
    return Target(platform, device.device_kind)


@contextmanager
def interpreting(platform: str, kind: str) -> Iterator[None]:
    """Inside, what is traced chooses as on such a device, and its kernels are interpreted here: slow, for tests.

    A function that `jax.jit` has traced before keeps what it chose then.
    """
    token = _INTERPRETED.set(Target(platform, kind, True))
    try:
        yield
    finally:
        _INTERPRETED.reset(token)
