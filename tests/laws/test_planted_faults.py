"""The laws find faults that were put in on purpose, and name the token."""

import dataclasses

import jax.numpy as jnp
import pytest

import zoo
from tests.laws.architectures import ARCHITECTURES
from zoo.config import Block
from zoo.layers.logical import unconstrained
from zoo.models.decoder import Decoder, following_positions

TINY = dataclasses.replace(ARCHITECTURES["sparse"], n_layers=1, prefix=())


class Leak(Decoder):
    """Every token gets a little of the last one."""

    def hidden(self, tokens, positions=None, segment_ids=None, cache=None, deterministic=True):
        out = super().hidden(tokens, positions, segment_ids, cache, deterministic)
        return out._replace(hidden=out.hidden + 0.01 * out.hidden[:, -1:])


class OffByOne(Decoder):
    """With a cache, positions run one ahead after the prefill."""

    def hidden(self, tokens, positions=None, segment_ids=None, cache=None, deterministic=True):
        if cache is not None and tokens.shape[1] == 1:
            positions = following_positions(cache, segment_ids) + 1
        return super().hidden(tokens, positions, segment_ids, cache, deterministic)


class CountsPadding(Decoder):
    """The routers' token count includes padding."""

    def hidden(self, tokens, positions=None, segment_ids=None, cache=None, deterministic=True):
        out = super().hidden(tokens, positions, segment_ids, cache, deterministic)
        routing = [
            [s and s._replace(tokens=jnp.full_like(s.tokens, tokens.size)) for s in stage] for stage in out.routing
        ]
        return out._replace(routing=tuple(map(tuple, routing)))


class SeesPadding(Decoder):
    """Padding is taken for text."""

    def hidden(self, tokens, positions=None, segment_ids=None, cache=None, deterministic=True):
        segment_ids = None if segment_ids is None else jnp.maximum(segment_ids, 1)
        return super().hidden(tokens, positions, segment_ids, cache, deterministic)


class SeesOtherDocuments(Decoder):
    """All documents of a row are taken for one."""

    def hidden(self, tokens, positions=None, segment_ids=None, cache=None, deterministic=True):
        segment_ids = None if segment_ids is None else jnp.minimum(segment_ids, 1)
        return super().hidden(tokens, positions, segment_ids, cache, deterministic)


class MixesRows(Decoder):
    """Every row gets a little of the others."""

    def hidden(self, tokens, positions=None, segment_ids=None, cache=None, deterministic=True):
        out = super().hidden(tokens, positions, segment_ids, cache, deterministic)
        return out._replace(hidden=out.hidden + 0.01 * out.hidden.mean(0))


class Overscaled(Decoder):
    """Hidden states are larger by a hundredth where `wrong` holds."""

    def wrong(self, tokens):
        raise NotImplementedError

    def hidden(self, tokens, positions=None, segment_ids=None, cache=None, deterministic=True):
        out = super().hidden(tokens, positions, segment_ids, cache, deterministic)
        return out._replace(hidden=out.hidden * (1.01 if self.wrong(tokens) else 1.0))


class DependsOnTheBatch(Overscaled):
    def wrong(self, tokens):
        return len(tokens) == 2


class DependsOnUnrolling(Overscaled):
    def wrong(self, tokens):
        return self.config.unroll


class DependsOnTheMesh(Overscaled):
    def wrong(self, tokens):
        return self.constrain is not unconstrained


class DependsOnTheMixture(Overscaled):
    def wrong(self, tokens):
        return self.config.moe is None


FAULTS = [
    (Leak, "causality", "at evaluation, changing token 1 changes the output at 0"),
    (OffByOne, "cache", "prefilled with"),
    (CountsPadding, "padding", "routing statistics differ at"),
    (SeesPadding, "padding", "with padding after the tokens, loss or routing"),
    (SeesOtherDocuments, "packing", "differs from the document alone"),
    (MixesRows, "batch", "in a batch differs"),
    (DependsOnTheBatch, "accumulation", "in 2 micro-batches, gradients differ at"),
    (DependsOnUnrolling, "compilation", "unrolled, gradients differ at"),
    (DependsOnTheMesh, "sharding", "on the mesh data 8, gradients differ at"),
    (DependsOnTheMixture, "equivalence", "with identical experts, the output"),
]


@pytest.mark.parametrize(("faulty", "law", "message"), FAULTS)
def test_law_finds_the_fault(faulty, law, message):
    lines = []
    report = zoo.check(faulty(TINY), laws=[law], say=lines.append)
    assert not report.passed
    assert report[law].passed is False
    assert message in report[law].detail
    assert f"{law:<13} FAIL" in lines[0] and message in lines[0]


def test_an_unknown_law_names_the_nearest():
    with pytest.raises(zoo.ConfigError, match="did you mean causality"):
        zoo.check(zoo.build(ARCHITECTURES["none"]), laws=["causalty"])
    with pytest.raises(zoo.ConfigError, match=r"laws=\[\] holds no law to try; name some of causality, padding,"):
        zoo.check(zoo.build(ARCHITECTURES["none"]), laws=[])


def test_a_context_of_one_token_can_be_checked_and_one_law_named_alone():
    model = zoo.build(dataclasses.replace(ARCHITECTURES["none"], context_length=1, n_layers=1, pattern=(Block(),)))
    assert zoo.check(model, laws="padding").passed
