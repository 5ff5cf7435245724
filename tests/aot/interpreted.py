"""Pallas TPU kernels run on the CPU, with their DMAs, semaphores and memories simulated, and races looked for.

About 60 times slower than plain JAX: keep lengths at 512 and below. What this mode cannot see (tiling, VMEM) only a
compiler does: tests/aot/targets.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

# What makes a fault show: memory that nobody has written is NaN, a DMA moves nothing before somebody waits for it.
STRICT = pltpu.InterpretParams(
    detect_races=True,
    num_cores_or_threads=2,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    dma_execution_mode="on_wait",
)
V5E = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")


class Race(AssertionError):
    """Two cores, or a core and a DMA, use the same memory without waiting for each other."""


def interpreted(f: Callable, *args: Any, params: pltpu.InterpretParams = STRICT) -> Any:
    """f(*args), traced as for a TPU v5e, with its Pallas kernels interpreted.

    Raises:
        Race: there is one; the output says on which memory.
        ValueError: no kernel has run, so that there was nothing to interpret.
    """
    mesh = AbstractMesh((1,), ("chip",), abstract_device=V5E)
    args = jax.device_put(args, jax.devices("cpu")[0])
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pltpu.force_tpu_interpret_mode(params),
        _kernels() as kernels,
    ):
        try:
            result = jax.block_until_ready(jax.jit(lambda *args: f(*args))(*args))
        except jax.errors.JaxRuntimeError as error:  # from JAX 0.12 on, a race is one
            if "RACE DETECTED" not in str(error):
                raise
            raise Race(str(error)) from error
        finally:
            pltpu.reset_tpu_interpret_mode_state()
    if not kernels:
        raise ValueError("no Pallas kernel was interpreted: has the function stepped aside to another backend?")
    if any(kernel.races_found for kernel in kernels):
        raise Race("between cores or DMAs")
    return result


@contextmanager
def _kernels() -> Iterator[list[Any]]:
    """What JAX notes of the races of each kernel that runs; it keeps only the last one's."""
    noted = []

    def note(*args: Any, **settings: Any) -> Any:
        noted.append(RaceDetectionState(*args, **settings))
        return noted[-1]

    with mock.patch.object(interpret_pallas_call, "RaceDetectionState", note):
        yield noted
