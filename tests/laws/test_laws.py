"""Every law on every architecture."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.laws.architectures import ARCHITECTURES
from zoo.laws import LAWS
from zoo.laws.case import Case, make_case


@cache
def case(name: str) -> Case:
    return make_case(zoo.build(ARCHITECTURES[name]), None, seed=0)


# Sharding compiles a program per mesh, so it is tried on one model per mixture.
TRIED = [(name, law) for name in ARCHITECTURES for law in LAWS if law != "sharding" or name != "sparse-top1"]


@pytest.mark.parametrize(("name", "law"), TRIED)
def test_law(name, law):
    finding = LAWS[law](case(name))
    if finding.passed is None:
        assert (name, law) in {("none", "equivalence")}, finding.detail
    else:
        assert finding.passed, finding.detail


def test_no_parameter_is_hidden_behind_a_zero():
    params = make_case(zoo.build(ARCHITECTURES["soft"]), None, seed=0).params
    assert all(bool(jnp.all(leaf != 0)) for leaf in jax.tree.leaves(params))
