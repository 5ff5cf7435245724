"""The small model that the laws are tried on."""

import dataclasses

from zoo.config import Block, LongRopeScaling, ModelConfig, SoftConfig, SparseConfig
from zoo.laws import reduced


def test_a_reduced_model_has_the_same_structure():
    model = ModelConfig(
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        moe=SparseConfig(n_experts=64, top_k=6, d_ff=1024, n_shared_experts=2),
        prefix=(Block(mixture=False),),
        pattern=(Block(window=1024), Block()),
        context_length=8192,
    )
    small = reduced(model)
    assert (small.d_model, small.head_dim, small.n_heads, small.n_kv_heads, small.n_layers) == (32, 8, 4, 2, 5)
    assert small.moe == SparseConfig(n_experts=7, top_k=6, d_ff=16, n_shared_experts=2)
    assert (small.prefix, small.pattern) == (model.prefix, (Block(window=8), Block()))
    assert reduced(dataclasses.replace(model, n_kv_heads=1)).n_kv_heads == 1
    assert reduced(dataclasses.replace(model, n_kv_heads=None)).n_kv_heads is None


def test_groups_positions_and_divisors_shrink_together():
    moe = SparseConfig(n_experts=160, top_k=6, n_groups=8, top_groups=3)
    divisors = {"short_factors": (1.0,) * 16, "long_factors": tuple(map(float, range(1, 17)))}
    model = ModelConfig(
        vocab_multiple=128,
        context_length=131072,
        head_dim=64,
        rope_fraction=0.5,
        rope_scaling=LongRopeScaling(32.0, 4096, **divisors),
        moe=moe,
    )
    small = reduced(model)
    assert (small.moe.n_experts, small.moe.n_groups, small.moe.top_groups, small.moe.top_k) == (14, 2, 1, 6)
    assert small.rope_scaling == LongRopeScaling(32.0, 2, (1.0, 1.0), (1.0, 2.0))
    assert (small.context_length, small.vocab_multiple, small.padded_vocab_size) == (64, 8, 64)
    every_group = dataclasses.replace(moe, top_groups=None, device_weight=0.1)
    assert reduced(dataclasses.replace(model, moe=every_group)).moe.n_experts == 14
    learned = ModelConfig(context_length=2048, position="learned", position_rows=4096, position_offset=2)
    assert (reduced(learned).position_rows, reduced(learned).position_offset) == (None, 2)


def test_sizes_that_are_small_stay():
    model = ModelConfig(context_length=32, n_layers=1, n_heads=1, moe=SoftConfig(n_experts=2, segment_length=4))
    small = reduced(model)
    assert (small.context_length, small.n_layers, small.n_heads, small.n_kv_heads) == (32, 1, 1, None)
    assert (small.moe.n_experts, small.moe.segment_length) == (2, 4)
