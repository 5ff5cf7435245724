"""Every file in configs/ is an experiment that can be built, and keeps what its text promises."""

import dataclasses
import math
from pathlib import Path

import jax
import pytest

from tests.train.tiny import Setup
from zoo import Experiment, build
from zoo.cli import load_experiment
from zoo.data.loader import Batch
from zoo.layers.logical import is_spec
from zoo.parallel.rules import device_bytes
from zoo.train.state import abstract_state

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))
SHAKESPEARE_CHARACTERS = 65


def load(name: str) -> Experiment:
    return load_experiment(str(CONFIGS[0].parent / f"{name}.py"))


def n_params(experiment: Experiment, vocab_size: int) -> int:
    specs = build(dataclasses.replace(experiment.model, vocab_size=vocab_size)).abstract_params()
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_builds_and_says_how_it_is_run(path):
    experiment = load_experiment(str(path))
    assert experiment.name == path.stem
    assert n_params(experiment, experiment.data.vocab_size) > 0
    assert f"zoo train --config configs/{path.name}" in path.read_text()


def test_no_config_is_missing():
    wanted = {"mixtral_8x7b_pod", "quickstart", "moe_sparse", "moe_dense", "moe_soft", "dense", "shakespeare_char"}
    assert wanted <= {path.stem for path in CONFIGS}


def test_the_mixtures_differ_in_nothing_else():
    sparse = load("moe_sparse")
    for kind in ("dense", "soft"):
        other = load(f"moe_{kind}")
        assert other.model.moe.kind == kind
        assert (other.model.moe.n_experts, other.model.moe.d_ff) == (sparse.model.moe.n_experts, sparse.model.moe.d_ff)
        back = dataclasses.replace(other.model, moe=sparse.model.moe)
        assert dataclasses.replace(other, name=sparse.name, model=back) == sparse


def test_dense_uses_as_much_per_token_as_sparse():
    sparse, dense = load("moe_sparse").model, load("dense").model
    assert dense.moe is None
    assert dense.d_ff == sparse.moe.top_k * sparse.moe.d_ff


def test_quickstart_is_a_sparse_mixture_on_the_standard_library():
    quickstart = load("quickstart")
    assert quickstart.model.moe.kind == "sparse" and quickstart.data.path is None


def test_shakespeare_keeps_to_the_budget():
    experiment = load("shakespeare_char")
    assert n_params(experiment, SHAKESPEARE_CHARACTERS + 4) <= 820_000
    assert experiment.model.context_length == 64
    assert experiment.train.steps * experiment.train.batch_size * 64 <= 1_536_000
    assert (experiment.data.split, experiment.data.validation_fraction) == ("tail", 0.1)


def test_the_pod_config_lowers_at_full_size_on_eight_devices():
    experiment = load("mixtral_8x7b_pod")
    setup = Setup(experiment, jax.devices())
    assert setup.mesh.shape == {"data": 1, "fsdp": 1, "tensor": 1, "expert": 8, "context": 1}
    state = abstract_state(setup.specs, setup.optimizer)
    rows = jax.ShapeDtypeStruct((experiment.train.batch_size, experiment.model.context_length), "int32")
    lowered = setup.step.lower(state, Batch(rows, rows, rows, rows))
    assert lowered.out_info[1]["train/loss"].shape == ()
    assert "num_partitions = 8" in lowered.as_text()
    # Experts and routers are split in eight, everything else is whole on each device.
    split = 45_097_156_608 + 32 * 4096 * 8
    assert device_bytes(setup.specs, setup.layout.state.params) == 4 * (46_702_792_704 - 7 * split // 8)
