"""Whole training steps compile for TPUs and H200s, put together as `zoo train` does."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from tests.aot.targets import CHIPS, Program, built, devices
from tests.train.tiny import Setup, experiment
from zoo.config import Experiment
from zoo.data.loader import Batch
from zoo.kernels.attention.dispatch import ORDER
from zoo.train.state import abstract_state

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SMALL = {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "d_ff": 512, "vocab_size": 1024, "context_length": 512}
SMALL |= {"n_layers": 2, "moe": {"d_ff": 256}}
# The width of a model of 7 billion parameters; its depth costs the compiler nothing, since layers are scanned.
WIDE = {"d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14336, "vocab_size": 32000, "context_length": 2048}
WIDE |= {"n_layers": 4, "remat": "full"}
V5E_BYTES = 16e9


def compiled_step(settings: Experiment, on: list[jax.Device]) -> Program:
    """The training step of an experiment, compiled for devices that need not be here."""
    setup = Setup(settings, on)
    state = abstract_state(setup.specs, setup.optimizer, setup.layout.state.ema is not None)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, setup.layout.state
    )
    shape = (settings.train.batch_size, settings.model.context_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=setup.layout.batch)
    return built(setup.step, state, Batch(*[tokens] * len(Batch._fields)), mesh=setup.mesh)


def collectives(program: Program) -> Counter:
    """How many of each there are in the program; those in a loop once."""
    return Counter(re.findall(rf"= [^=]*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.text))


def has_kernels(platform: str) -> bool:
    """Whether attention is first tried with a kernel of our own."""
    return ORDER[platform][0].startswith("pallas")


# First, since it takes longest.
def test_a_wide_model_trains_on_256_v5e(report):
    mesh = {"data": 1, "fsdp": 32, "tensor": 8}
    settings = experiment("none", model=WIDE, mesh=mesh, train={"batch_size": 64})
    program = compiled_step(settings, devices("tpu", "v5e:16x16"))
    report(f"{program}, {dict(collectives(program))}")
    memory = program.compiled.memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < V5E_BYTES
    assert collectives(program)["all-gather"] and collectives(program)["all-reduce"]
    assert program.kernels >= 3 or not has_kernels("tpu")


@pytest.mark.parametrize("chip", CHIPS)
def test_a_mixture_trains_on_every_chip(chip, report):
    platform, topology = CHIPS[chip]
    mesh = {"data": 1, "fsdp": 2, "expert": 2} if platform == "tpu" else {"data": 1}
    program = compiled_step(experiment(model=SMALL, mesh=mesh), devices(platform, topology))
    report(program)
    assert bool(collectives(program)) == (platform == "tpu")
    assert program.kernels >= 3 or not has_kernels("tpu" if platform == "tpu" else "gpu")


def test_a_mixture_trains_on_eight_h200(report):
    mesh = {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}
    program = compiled_step(experiment(model=SMALL, mesh=mesh), devices("cuda", "1x1x8"))
    report(program)
    assert collectives(program)
    assert program.kernels >= 3 or not has_kernels("gpu")
