"""Chips that are not there, and programs compiled for them.

A Pallas kernel that goes through here has passed what interpret mode cannot see: the tiling and the VMEM of a TPU,
the shared memory and the assembler of a GPU.
"""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

H200 = Path(__file__).with_name("h200.txtpb")


class Chip(NamedTuple):
    """A kind of chip, and the smallest topology of it that its compiler takes."""

    platform: str
    topology: str


CHIPS = {
    "v5e": Chip("tpu", "v5e:2x2"),
    "v5p": Chip("tpu", "v5p:2x2x1"),
    "v6e": Chip("tpu", "v6e:2x2"),
    "h200": Chip("cuda", "1x1x1"),
}


@cache
def devices(platform: str, topology: str) -> list[jax.Device]:
    """The devices of a topology: "v5e:16x16" for "tpu"; slices x hosts x GPUs, "1x1x8", for "cuda", all H200."""
    if platform == "tpu":
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    config = H200.read_text()
    return list(topologies.get_topology_desc(platform="cuda", target_config=config, topology=topology).devices)


def one(chip: str) -> Mesh:
    """A mesh of one chip of CHIPS."""
    return Mesh(np.array(devices(*CHIPS[chip])[:1]), ("chip",))


class Program(NamedTuple):
    """A compiled program, and the seconds that tracing and lowering, and compiling it took."""

    compiled: Compiled
    lowering: float
    compiling: float

    @property
    def text(self) -> str:
        """The program as the chip runs it."""
        return self.compiled.as_text()

    @property
    def kernels(self) -> int:
        """Calls of Pallas kernels."""
        names = ('"tpu_custom_call"', '"__gpu$xla.gpu.triton"', '"mosaic_gpu')
        return sum(self.text.count(f"custom_call_target={name}") for name in names)

    def __str__(self) -> str:
        memory = self.compiled.memory_analysis()
        sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.generated_code_size_in_bytes)
        held = " + ".join(
            f"{size / 1e6:.1f} MB {of}" for size, of in zip(sizes, ("arguments", "temp", "code"), strict=True)
        )
        return f"lowered in {self.lowering:.1f} s, compiled in {self.compiling:.1f} s, {held}, {self.kernels} kernels"


def compiled(f: Callable, *args: Any, on: str) -> Program:
    """`f` compiled for one chip of CHIPS, with `args` (trees of arrays or jax.ShapeDtypeStruct) in its memory."""
    mesh = one(on)
    whole = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    return built(jax.jit(f), *placed, mesh=mesh)


def built(jitted: Any, *args: Any, mesh: Mesh) -> Program:
    """A jitted function compiled for the devices of `mesh`, where shapes or shardings say what lies where."""
    with jax.set_mesh(mesh):  # says which chip it is for while tracing
        start = time.perf_counter()
        lowered = jitted.lower(*args)
        middle = time.perf_counter()
        return Program(lowered.compile(), middle - start, time.perf_counter() - middle)
