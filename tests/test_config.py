"""Configs: expansion into stages, JSON and back, identity, and one sentence for what cannot work."""

import dataclasses
import json
import math
import re
import types
import typing
from dataclasses import fields
from typing import Any, Literal

import numpy as np
import pytest

from zoo.config import (
    Block,
    ConfigError,
    DataConfig,
    DenseConfig,
    DynamicNTKScaling,
    Experiment,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    SoftConfig,
    Source,
    SparseConfig,
    TrainConfig,
    YarnScaling,
    as_mixture,
    from_dict,
    to_dict,
)

LOCAL, FULL, PLAIN = Block(window=4), Block(), Block(mixture=False)


def shape(config):
    return [(s.repeat, [(b.window, b.moe is not None) for b in s.blocks]) for s in config.expand()]


def test_a_pattern_becomes_stages():
    assert shape(ModelConfig(n_layers=18, pattern=(LOCAL,) * 5 + (FULL,))) == [
        (3, [(4, False)] * 5 + [(None, False)]),
    ]
    # a rest of the pattern is a stage of its own
    assert shape(ModelConfig(n_layers=5, pattern=(LOCAL, FULL))) == [
        (2, [(4, False), (None, False)]),
        (1, [(4, False)]),
    ]
    # equal blocks of the prefix are scanned together
    config = ModelConfig(n_layers=61, prefix=(PLAIN,) * 3, moe=SparseConfig())
    assert shape(config) == [(3, [(None, False)]), (58, [(None, True)])]
    assert shape(dataclasses.replace(config, n_layers=3, moe=None)) == [(3, [(None, False)])]


def test_derived_sizes():
    block = ModelConfig(d_model=96, n_heads=4).expand()[0].blocks[0]
    assert (block.n_kv_heads, block.head_dim, block.d_ff) == (4, 24, 256)
    assert ModelConfig(d_model=96, n_heads=4, glu=False).expand()[0].blocks[0].d_ff == 384
    assert ModelConfig(d_model=100, n_heads=2).expand()[0].blocks[0].d_ff == 288  # 266.7 up to a multiple of 32


@pytest.mark.parametrize("moe", [None, SparseConfig(top_k=3), DenseConfig(), SoftConfig(segment_length=8)])
@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0), LongRopeScaling(2.0, 9, (1.0,) * 32, (2.0,) * 32)])
def test_json_and_back(moe, scaling):
    model = ModelConfig(moe=moe, prefix=(PLAIN,), pattern=(LOCAL, FULL), rope_scaling=scaling)
    data = DataConfig(sources=(Source("a", 2.0), Source("b")))
    experiment = Experiment("x", model, data)
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(experiment)))) == experiment


def test_identity_is_what_decides_the_parameters():
    experiment = Experiment("x")

    def changed(section, **fields):
        new = dataclasses.replace(getattr(experiment, section), **fields)
        return dataclasses.replace(experiment, **{section: new}).identity() != experiment.identity()

    assert changed("model", d_model=512)
    assert changed("model", moe=SparseConfig())
    assert changed("data", vocab_size=99)
    assert changed("optimizer", beta1=0.8)
    assert changed("train", batch_size=8)
    assert changed("train", seed=1)
    assert not changed("model", remat="full", unroll=True)
    assert not changed("data", cache_dir="elsewhere")
    assert not changed("train", steps=5000, log_every=1, dir="elsewhere")
    assert not changed("mesh", fsdp=2)


def test_as_mixture_keeps_the_sizes():
    moe = SparseConfig(n_experts=16, top_k=4, d_ff=99, n_shared_experts=2)
    for kind, cls in (("dense", DenseConfig), ("soft", SoftConfig)):
        other = as_mixture(moe, kind)
        assert isinstance(other, cls)
        assert (other.n_experts, other.d_ff, other.n_shared_experts) == (16, 99, 2)
    assert as_mixture(moe, "sparse") is moe
    assert as_mixture(moe, "none") is None
    assert as_mixture(None, "soft") == SoftConfig()


WRONG = [
    (
        lambda: ModelConfig(d_model=384, n_heads=6, n_kv_heads=4),
        "model.n_heads=6 is not .* model.n_kv_heads=4",
    ),
    (lambda: ModelConfig(d_model=100, n_heads=3), "model.d_model=100 is not a multiple of model.n_heads=3"),
    (
        lambda: ModelConfig(d_model=12, n_heads=4),
        "model.head_dim=None gives 3 components that turn; rotary positions need an even",
    ),
    (lambda: ModelConfig(activation="sillu"), "model.activation='sillu' is not one of .*; did you mean silu?"),
    (lambda: ModelConfig(n_layers=0), "model.n_layers=0 must be at least 1"),
    (lambda: ModelConfig(dropout=1.0), "model.dropout=1.0 must lie between 0 and 0.99"),
    (lambda: ModelConfig(pattern=()), "model.pattern=\\(\\) needs at least one block"),
    (lambda: ModelConfig(n_layers=1, prefix=(PLAIN, PLAIN)), "model.prefix=.* is longer than model.n_layers=1"),
    (
        lambda: ModelConfig(n_layers=3, prefix=(PLAIN,) * 3, moe=SparseConfig()),
        "model.n_layers=3 ends before block 4, the first that has model.moe; set at least 4, or model.moe to None",
    ),
    (
        lambda: ModelConfig(prefix=(PLAIN,), pattern=(PLAIN, PLAIN), moe=DenseConfig()),
        "model.pattern=.* has no block for model.moe; set mixture=True in one, or model.moe to None",
    ),
    (lambda: ModelConfig(moe=SoftConfig(segment_length=None)), "model.moe.segment_length=None lets a token see later"),
    (lambda: SparseConfig(n_experts=4, top_k=5), "model.moe.top_k=5 is more than model.moe.n_experts=4"),
    (
        lambda: SparseConfig(top_k=1, renormalize=True),
        "model.moe.top_k=1 with model.moe.renormalize=True makes .* no gradient; set model.moe.renormalize to False",
    ),
    (
        lambda: ModelConfig(position="alibi", rope_scaling=YarnScaling(2.0)),
        "model.rope_scaling=.* needs model.position='rope'",
    ),
    (
        lambda: ModelConfig(position="alibi", rope_fraction=0.5),
        "model.rope_fraction=0.5 needs model.position='rope', not",
    ),
    (
        lambda: ModelConfig(position="learned", pattern=(Block(rope_theta=1e4),)),
        "model.pattern.rope_theta=10000.0 needs model.position='rope', not model.position='learned'",
    ),
    (
        lambda: ModelConfig(position="learned", position_rows=128),
        "model.position_rows=128 is less than model.context_length=256; a position without a row",
    ),
    (lambda: ModelConfig(position_offset=2), "model.position_offset=2 needs model.position='learned'"),
    (lambda: ModelConfig(rope_fraction=0.01), "model.rope_fraction=0.01 leaves no component of a head that turns"),
    (
        lambda: ModelConfig(rope_scaling=LongRopeScaling(2.0, short_factors=(1.0,), long_factors=(1.0,))),
        "model.rope_scaling.short_factors=\\(1.0,\\) holds 1 divisors for 32 rotated pairs",
    ),
    (lambda: YarnScaling(0.5), "model.rope_scaling.factor=0.5 must be at least 1"),
    (lambda: YarnScaling(beta_fast=1.0), "beta_fast=1.0 must be more than model.rope_scaling.beta_slow=1.0"),
    (lambda: Llama3Scaling(high_freq_factor=1.0), "high_freq_factor=1.0 must be more than .*low_freq_factor=1.0"),
    (lambda: ModelConfig(attention_bias=("q", "q")), "model.attention_bias=.* names a projection twice"),
    (lambda: ModelConfig(glu=False, glu_clamp=7.0), "model.glu_clamp=7.0 needs model.glu=True, not model.glu=False"),
    (
        lambda: ModelConfig(swish_beta=1.7),
        "model.swish_beta=1.7 needs activation 'swish' or .* model.activation='silu'",
    ),
    (lambda: ModelConfig(parallel="one_norm", norm_placement="post"), "model.parallel='one_norm' needs .*'pre', not"),
    (lambda: ModelConfig(norm_scale=False, norm_bias=True), "model.norm_bias=True needs model.norm_scale=True"),
    (lambda: ModelConfig(init="deepnorm"), "model.init='deepnorm' needs model.norm_placement='deepnorm', not"),
    (
        lambda: ModelConfig(init="deepnorm", norm_placement="deepnorm", out_init="gpt2"),
        "model.out_init='gpt2' scales down what model.init='deepnorm' has scaled already",
    ),
    (lambda: ModelConfig(attention_softcap=0.0), "model.attention_softcap=0.0 must be positive, or None"),
    (lambda: ModelConfig(rope_theta=1.0), "model.rope_theta=1.0 must be more than 1"),
    (lambda: Block(rope_theta=1.0), "model.pattern.rope_theta=1.0 must be more than 1, or None"),
    (
        lambda: SparseConfig(top_k=2, n_shared_experts=2, shared_in_top_k=True),
        "model.moe.top_k=2 leaves no routed expert beside model.moe.n_shared_experts=2",
    ),
    (
        lambda: SparseConfig(score="softmax_selected", top_k=1),
        "model.moe.top_k=1 with model.moe.score='softmax_selected' .* no gradient",
    ),
    (lambda: SparseConfig(score="softmax_selected", renormalize=False), "renormalize=False cannot be switched off"),
    (lambda: SparseConfig(n_experts=8, n_groups=3), "model.moe.n_groups=3 does not divide model.moe.n_experts=8"),
    (lambda: SparseConfig(n_groups=2, top_groups=3), "model.moe.top_groups=3 is more than model.moe.n_groups=2"),
    (
        lambda: SparseConfig(n_experts=8, n_groups=4, top_groups=1, top_k=3),
        "model.moe.top_k=3 is more than the 2 experts of model.moe.top_groups=1",
    ),
    (
        lambda: SparseConfig(n_groups=8, top_groups=4, group_score="top2_sum"),
        "model.moe.group_score='top2_sum' needs groups of 2 or more; they have 1",
    ),
    (lambda: SparseConfig(n_groups=2), "model.moe.n_groups=2 needs top_groups, device_weight or communication_weight"),
    (lambda: SparseConfig(n_groups=2, n_null_experts=1), "model.moe.n_null_experts=1 belong to no group"),
    (lambda: SparseConfig(overflow="reroute"), "model.moe.overflow='reroute' needs a capacity_factor"),
    (
        lambda: SparseConfig(overflow="reroute", capacity_factor=1.0, priority="choice"),
        "model.moe.overflow='reroute' cannot reroute by model.moe.priority='choice'",
    ),
    (lambda: SparseConfig(load_weight=0.1), "model.moe.load_weight=0.1 needs model.moe.noisy_top_k=True"),
    (
        lambda: SparseConfig(load_weight=0.1, noisy_top_k=True, selection_bias=True),
        "model.moe.load_weight=0.1 knows nothing of model.moe.selection_bias=True",
    ),
    (
        lambda: SparseConfig(device_weight=0.1),
        "model.moe.device_weight=0.1 needs more groups than model.moe.n_groups=1",
    ),
    (
        lambda: SparseConfig(shared_gate=True),
        "model.moe.shared_gate=True needs shared experts, not .*n_shared_experts=0",
    ),
    (
        lambda: SparseConfig(choice="expert", score="sigmoid"),
        "model.moe.score='sigmoid' must be 'softmax' where experts",
    ),
    (
        lambda: SparseConfig(choice="expert", selection_bias=True),
        "model.moe.selection_bias=True has no meaning where experts choose",
    ),
    (
        lambda: ModelConfig(moe=SparseConfig(choice="expert")),
        "model.moe.choice='expert' lets a token see later ones, so a decoder refuses it; set it to 'token'",
    ),
    (
        lambda: ModelConfig(moe=SparseConfig(capacity_factor=1.0, priority="probability")),
        "model.moe.priority='probability' lets a token see later ones, so a decoder refuses it; set it to 'token'",
    ),
    (lambda: DataConfig(path="a", sources=(Source("b"),)), "data.path='a' stands beside data.sources; give one"),
    (lambda: DataConfig(sources=(Source("b"), Source("b"))), "data.sources=.* holds the same path twice"),
    (lambda: Source("b", weight=0.0), "data.sources.weight=0.0 must be positive"),
    (lambda: OptimizerConfig(ema_decay=1.0), "optimizer.ema_decay=1.0 must lie between 0 and 1, both excluded"),
    (
        lambda: from_dict(ModelConfig, {"rope_scaling": {"kind": "yarm"}}),
        "rope_scaling.kind='yarm' is not one of linear, dynamic, yarn, llama3, longrope; did you mean yarn",
    ),
    (lambda: SparseConfig(capacity_factor=0.0), "model.moe.capacity_factor=0.0 must be positive, or None"),
    (lambda: Block(window=2**31), "model.pattern.window=2147483648 must be less than 2\\^31, or None for all"),
    (lambda: Block(window=0), "model.pattern.window=0 must be at least 1"),
    (lambda: OptimizerConfig(schedule="cosin"), "optimizer.schedule='cosin' is not one of .*; did you mean cosine?"),
    (lambda: OptimizerConfig(learning_rate=0.0), "optimizer.learning_rate=0.0 must be positive"),
    (
        lambda: TrainConfig(batch_size=10, micro_batches=4),
        "train.batch_size=10 is not a .*micro_batches=4",
    ),
    (lambda: MeshConfig(fsdp=-1), "mesh.data=-1 and others are -1 \\(data, fsdp\\); at most one may be"),
    (lambda: MeshConfig(tensor=0), "mesh.tensor=0 must be positive, or -1"),
    (lambda: Experiment("a/b"), "experiment.name='a/b' must be a plain, non-empty name"),
    (lambda: Experiment(".."), "experiment.name='..' must be a plain, non-empty name"),
    (lambda: TrainConfig(seed=-1), "train.seed=-1 must be at least 0 and less than 2\\^32"),
    (lambda: TrainConfig(seed=2**32), "train.seed=4294967296 must be at least 0 and less than 2\\^32"),
    (
        lambda: Experiment("x", train=TrainConfig(steps=50)),
        "optimizer.warmup_steps=100 .* train.steps=50",
    ),
    (
        lambda: as_mixture(None, "spars"),
        "mixture='spars' is not one of .*; did you mean sparse?",
    ),
    (lambda: from_dict(Experiment, {"name": "x", "model": {"d_modle": 3}}), "model.d_modle is not a field .* d_model?"),
    (lambda: from_dict(Experiment, {"model": {}}), "name is missing; Experiment needs it"),
    (
        lambda: from_dict(ModelConfig, {"d_model": {"a": 1}}),
        "model.d_model={'a': 1} must be a whole number, not a dict",
    ),
    (lambda: from_dict(ModelConfig, {"pattern": 3}), "model.pattern=3 must be a tuple of Block, not a whole number"),
    (lambda: from_dict(ModelConfig, {"moe": {"kind": ["hard"]}}), "moe.kind=\\['hard'\\] is not one of sparse, dense"),
    (lambda: from_dict(ModelConfig, {"moe": {"kind": "hard"}}), "moe.kind='hard' is not one of sparse, dense, soft"),
]


# What has an effect only beside another field: the settings, and what the message says.
IDLE = [
    (ModelConfig, {"rope_theta": 5e5, "position": "alibi"}, "model.position='rope'", "model.position='alibi'", 1e4),
    (ModelConfig, {"rope_fraction": 0.5, "position": "none"}, "model.position='rope'", "model.position='none'", 1.0),
    (
        ModelConfig,
        {"rope_interleaved": True, "position": "alibi"},
        "model.position='rope'",
        "model.position='alibi'",
        False,
    ),
    (ModelConfig, {"d_ff_multiple": 64, "d_ff": 100}, "model.d_ff=None", "model.d_ff=100", 32),
    (SparseConfig, {"group_score": "top2_sum"}, "model.moe.top_groups", "model.moe.top_groups=None", "'max'"),
    (SparseConfig, {"shared_in_top_k": True}, "model.moe.n_shared_experts", "model.moe.n_shared_experts=0", False),
    (
        SparseConfig,
        {"selection_bias_rate": 0.01},
        "model.moe.selection_bias=True",
        "model.moe.selection_bias=False",
        0.001,
    ),
    (DataConfig, {"text_field": "body", "sources": (Source("a"),)}, r"data.sources=\(\)", "data.sources=.*", "'text'"),
    (
        DataConfig,
        {"vocab_size": 999, "tokenizer": "bytes"},
        "data.tokenizer='senten.*'",
        "data.tokenizer='bytes'",
        2048,
    ),
    (DataConfig, {"tokenizer_model": "x", "tokenizer": "bytes"}, "data.tokenizer='senten.*'", "data.token.*", None),
    (OptimizerConfig, {"muon_learning_rate": 0.1}, "optimizer.name='muon'", "optimizer.name='adamw'", 0.02),
    (OptimizerConfig, {"muon_momentum": 0.9, "name": "lion"}, "optimizer.name='muon'", "optimizer.name='lion'", 0.95),
    (OptimizerConfig, {"beta1": 0.8, "name": "adafactor"}, "optimizer.name='adamw' or 'lion' or 'muon'", ".*", 0.9),
    (OptimizerConfig, {"beta2": 0.8, "name": "adafactor"}, "optimizer.name='adamw' or 'lion' or 'muon'", ".*", 0.95),
    (OptimizerConfig, {"eps": 1e-6, "name": "lion"}, "optimizer.name='adamw' or 'muon'", "optimizer.name=.*", 1e-08),
    (OptimizerConfig, {"decay_fraction": 0.5}, "optimizer.schedule='wsd'", "optimizer.schedule='cosine'", 0.2),
    (OptimizerConfig, {"min_ratio": 0.0, "schedule": "constant"}, "optimizer.schedule='cosine' or .*", ".*", 0.1),
]


@pytest.mark.parametrize(("cls", "fields", "needed", "given", "default"), IDLE)
def test_what_has_no_effect_is_refused(cls, fields, needed, given, default):
    name = next(iter(fields))
    with pytest.raises(
        ConfigError, match=rf"^{cls.section}.{name}=.* needs {needed}, not {given}; leave it at {default}$"
    ):
        cls(**fields)


def test_every_field_that_needs_another_is_tried():
    tried = {(cls, next(iter(settings))) for cls, settings, *_ in IDLE}
    for cls in (DataConfig, OptimizerConfig, SparseConfig):
        assert set(cls.needs) == {name for other, name in tried if other is cls}


def test_what_loses_its_effect_goes_back_to_its_default():
    model = ModelConfig(rope_theta=5e5, rope_fraction=0.5, d_ff_multiple=64)
    assert model.changed(position="alibi") == ModelConfig(position="alibi", d_ff_multiple=64)
    assert model.changed(n_layers=2) == dataclasses.replace(model, n_layers=2)
    with pytest.raises(ConfigError, match=r"model.rope_theta=7.0 needs model.position='rope'"):
        model.changed(position="alibi", rope_theta=7.0)


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_input_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


SECTIONS = [ModelConfig, Block, SparseConfig, DenseConfig, SoftConfig, DataConfig, OptimizerConfig, TrainConfig]
SECTIONS += [MeshConfig, LinearScaling, DynamicNTKScaling, YarnScaling, Llama3Scaling, LongRopeScaling]
FIELDS = [(cls, field.name, typing.get_type_hints(cls)[field.name]) for cls in SECTIONS for field in fields(cls)]
FLOATS = [
    (cls, name)
    for cls, name, hint in FIELDS
    if float in (hint, *typing.get_args(hint)) and typing.get_origin(hint) is not tuple
]
# Values of each type that a field may have, and of some that none has.
VALUES = {int: 3, float: 2.5, str: "text", bool: True, bytes: b"text", list: [], dict: {}, object: object()}


def admits(hint: Any) -> set[type]:
    """The types of VALUES that a field of type `hint` may hold, if its value is right."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    found = {type(choice) for kind in kinds for choice in typing.get_args(kind) if typing.get_origin(kind) is Literal}
    return found | set(kinds) | ({int} if float in kinds else set())


@pytest.mark.parametrize(("cls", "name", "hint"), FIELDS, ids=[f"{cls.section}.{name}" for cls, name, _ in FIELDS])
def test_every_field_refuses_values_of_other_types(cls, name, hint):
    for kind in VALUES.keys() - admits(hint):
        with pytest.raises(ConfigError, match=rf"^{cls.section}\.{name}=.* (must be|is not one of) .*"):
            cls(**{name: VALUES[kind]})


@pytest.mark.parametrize(("cls", "name"), FLOATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_every_float_is_finite(cls, name, value):
    with pytest.raises(ConfigError, match=rf"^{cls.section}\.{name}={value} must be a finite number$"):
        cls(**{name: value})


@pytest.mark.parametrize(("cls", "name"), FLOATS)
@pytest.mark.parametrize("value", [1e300, -3.5e38, 1e-300])
def test_every_float_is_one_of_float32(cls, name, value):
    with pytest.raises(
        ConfigError, match=rf"^{cls.section}\.{name}={re.escape(str(value))} is beyond float32; a number"
    ):
        cls(**{name: value})


def test_the_ends_of_float32_are_in_it():
    info = np.finfo(np.float32)
    ends = (float(info.smallest_normal), float(info.max))
    assert LongRopeScaling(short_factors=ends).short_factors == ends
    for beyond in (ends[0] * 0.999, ends[1] * 1.001):
        with pytest.raises(ConfigError, match=r"short_factors=.* is beyond float32"):
            LongRopeScaling(short_factors=(1.0, beyond))


SIZES = [(cls, name) for cls, name, hint in FIELDS if int in (hint, *typing.get_args(hint)) and cls is not MeshConfig]


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, name in SIZES if name != "seed"])
def test_every_size_is_less_than_2_to_the_31(cls, name):
    beside = {"position": "learned"} if name.startswith("position") else {}
    with pytest.raises(ConfigError, match=rf"^{cls.section}\.{name}=1000000000000 must be less than 2\^31"):
        cls(**{name: 10**12}, **beside)


def test_every_float_of_a_tuple_is_finite():
    with pytest.raises(ConfigError, match=r"short_factors=\(1.0, nan\) must be finite numbers$"):
        LongRopeScaling(short_factors=(1.0, math.nan))


def test_there_are_floats():
    named = {(OptimizerConfig, "clip_norm"), (SparseConfig, "capacity_factor"), (SoftConfig, "balance_weight")}
    assert named <= set(FLOATS) and len(FLOATS) > 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(d_model=256.0), "model.d_model=256.0 must be a whole number, not a number"),
        (lambda: ModelConfig(d_model="256"), "model.d_model='256' must be a whole number, not a text"),
        (lambda: ModelConfig(n_layers=True), "model.n_layers=True must be a whole number, not True or False"),
        (lambda: ModelConfig(d_ff=1.5), "model.d_ff=1.5 must be a whole number or None, not a number"),
        (lambda: ModelConfig(glu=1), "model.glu=1 must be True or False, not a whole number"),
        (lambda: ModelConfig(glu=None), "model.glu=None must be True or False, not None"),
        (lambda: ModelConfig(n_heads=None), "model.n_heads=None must be a whole number, not None"),
        (lambda: TrainConfig(steps=1e3), "train.steps=1000.0 must be a whole number, not a number"),
        (lambda: OptimizerConfig(beta1=True), "optimizer.beta1=True must be a number, not True or False"),
        (lambda: OptimizerConfig(eps=10**400), f"optimizer.eps={10**400} must be a number, not a whole number"),
        (lambda: MeshConfig(zero=True), "mesh.zero=True is not one of 1, 2, 3"),
        (lambda: MeshConfig(zero=1.0), "mesh.zero=1.0 is not one of 1, 2, 3"),
        (
            lambda: ModelConfig(pattern=Block()),
            "model.pattern=Block(mixture=True, window=None, rope_theta=None) must be a tuple of Block, not a Block",
        ),
        (
            lambda: ModelConfig(prefix=[Block()]),
            "model.prefix=[Block(mixture=True, window=None, rope_theta=None)] must be a tuple of Block, not a list",
        ),
        (
            lambda: ModelConfig(attention_bias=("query",)),
            "model.attention_bias=('query',) must be a tuple of 'q', 'k', 'v', 'o', not a tuple",
        ),
        (lambda: ModelConfig(pattern=(3,)), "model.pattern=(3,) must be a tuple of Block, not a tuple"),
        (
            lambda: ModelConfig(moe="sparse"),
            "model.moe='sparse' must be a SparseConfig or a DenseConfig or a SoftConfig or None, not a text",
        ),
        (lambda: Experiment(3), "experiment.name=3 must be a text, not a whole number"),
        (lambda: Experiment("x", train=None), "experiment.train=None must be a TrainConfig, not None"),
    ],
)
def test_a_wrong_type_is_one_sentence(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == message


def test_a_whole_number_is_also_a_float():
    whole, same = OptimizerConfig(learning_rate=1, clip_norm=2), OptimizerConfig(learning_rate=1.0, clip_norm=2.0)
    assert [type(value) for value in (whole.learning_rate, whole.clip_norm)] == [float, float]
    assert Experiment("x", optimizer=whole).identity() == Experiment("x", optimizer=same).identity()
    assert TrainConfig(seed=2**32 - 1).seed == 2**32 - 1


@pytest.mark.parametrize(
    ("top_k", "renormalize", "renormalizes"),
    [(1, None, False), (2, None, True), (8, None, True), (1, False, False), (2, False, False), (2, True, True)],
)
def test_weights_are_renormalized_where_there_are_several(top_k, renormalize, renormalizes):
    assert SparseConfig(top_k=top_k, renormalize=renormalize).renormalizes is renormalizes


def test_the_other_mixtures_have_weights_that_add_to_1():
    assert DenseConfig().convex and SoftConfig().convex and SparseConfig().convex
    assert SparseConfig(n_experts=1, top_k=1, renormalize=True).convex
    assert not SparseConfig(renormalize=False).convex
    assert not SparseConfig(routed_scale=2.5).convex
    assert not SparseConfig(n_null_experts=2).convex
