"""Every two choices of parts in one model, and every choice under every law."""

import itertools
from functools import partial

import jax
import pytest

import zoo
from tests.laws.cover import LAWS, SCALINGS, SIZES, factor_choices, model, rows
from zoo.config import Block, ModelConfig
from zoo.kernels.attention import attention
from zoo.laws.case import make_case
from zoo.laws.runner import LAWS as RULES

ROWS = rows()
NAMES = ["-".join(row.values()) for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_law(row):
    finding = RULES[row["law"]](make_case(zoo.build(model(row)), None, seed=0))
    if finding.passed is None:
        assert row["law"] == "equivalence" and row["mixture"] in ("none", "sigmoid", "null"), finding.detail
    else:
        assert finding.passed, finding.detail


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.kind)
def test_scaled_positions_keep_the_cache(scaling):
    case = make_case(zoo.build(ModelConfig(**SIZES, rope_scaling=scaling)), None, seed=0)
    finding = RULES["cache"](case)
    assert finding.passed, finding.detail


@pytest.mark.parametrize("law", ["causality", "padding", "packing", "cache", "accumulation", "compilation"])
def test_attention_in_blocks_keeps_the_laws(law):
    """As for long sequences: what is so short is else computed whole."""
    config = ModelConfig(**SIZES, n_kv_heads=2, attention_softcap=5.0, pattern=(Block(window=5), Block()))
    attend = partial(attention, backend="chunked", backward="chunked", blocks=(8, 16))
    finding = RULES[law](make_case(zoo.build(config, attend=attend), None, seed=0))
    assert finding.passed, finding.detail


def test_every_two_choices_meet():
    factors = factor_choices()
    for one, other in itertools.combinations(factors, 2):
        met = {(row[one], row[other]) for row in ROWS}
        assert met == set(itertools.product(factors[one], factors[other])), (one, other)


def test_every_law_of_zoo_check_is_in_the_cover():
    assert {*LAWS, "sharding"} == RULES.keys()


def teardown_module():
    jax.clear_caches()
