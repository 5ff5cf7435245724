"""A small model of the same structure as a large one."""

import dataclasses

from zoo.config import Block, Mixture, ModelConfig, SoftConfig, SparseConfig


def reduced(model: ModelConfig) -> ModelConfig:
    """A small model of the same structure: the laws do not depend on sizes, the time does."""
    kv_heads = model.n_kv_heads or model.n_heads
    few = min(kv_heads, 2)
    n_heads = few * min(model.n_heads // kv_heads, 2)
    return dataclasses.replace(
        model,
        vocab_size=64,
        context_length=min(model.context_length, 64),
        d_model=8 * n_heads,
        head_dim=8,
        n_heads=n_heads,
        n_kv_heads=None if model.n_kv_heads is None else few,
        n_layers=min(model.n_layers, len(model.prefix) + 2 * len(model.pattern)),
        d_ff=32,
        moe=None if model.moe is None else _reduced_mixture(model.moe),
        prefix=tuple(map(_reduced_block, model.prefix)),
        pattern=tuple(map(_reduced_block, model.pattern)),
    )


def _reduced_mixture(moe: Mixture) -> Mixture:
    top_k = moe.top_k if isinstance(moe, SparseConfig) else 1
    small = dataclasses.replace(moe, d_ff=16, n_experts=min(moe.n_experts, max(4, top_k + 1)))
    if isinstance(small, SoftConfig) and small.segment_length is not None:
        small = dataclasses.replace(small, segment_length=min(small.segment_length, 8))
    return small


def _reduced_block(block: Block) -> Block:
    return block if block.window is None else dataclasses.replace(block, window=min(block.window, 8))
