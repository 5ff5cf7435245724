"""A small model of the same structure as a large one."""

import dataclasses

from zoo.config import Block, LongRopeScaling, Mixture, ModelConfig, RopeScaling, SoftConfig, SparseConfig

HEAD_DIM = 8
CONTEXT = 64


def reduced(model: ModelConfig) -> ModelConfig:
    """A small model of the same structure: the laws do not depend on sizes, the time does."""
    kv_heads = model.n_kv_heads or model.n_heads
    few = min(kv_heads, 2)
    n_heads = few * min(model.n_heads // kv_heads, 2)
    # At least one pair of components turns.
    fraction = max(model.rope_fraction, 2 / HEAD_DIM)
    context_length = min(model.context_length, CONTEXT)
    return model.changed(
        vocab_size=64,
        vocab_multiple=min(model.vocab_multiple, 8),
        context_length=context_length,
        position_rows=None,
        d_model=HEAD_DIM * n_heads,
        head_dim=HEAD_DIM,
        n_heads=n_heads,
        n_kv_heads=None if model.n_kv_heads is None else few,
        n_layers=min(model.n_layers, len(model.prefix) + 2 * len(model.pattern)),
        d_ff=32,
        rope_fraction=fraction,
        rope_scaling=_reduced_scaling(model, context_length, int(HEAD_DIM * fraction) // 2),
        moe=None if model.moe is None else _reduced_mixture(model.moe),
        prefix=tuple(map(_reduced_block, model.prefix)),
        pattern=tuple(map(_reduced_block, model.pattern)),
    )


def _reduced_scaling(model: ModelConfig, context_length: int, pairs: int) -> RopeScaling | None:
    """The same rule, with the trained context as much shorter as the context is."""
    scaling = model.rope_scaling
    if hasattr(scaling, "original_context"):
        trained = max(2, scaling.original_context * context_length // model.context_length)
        scaling = dataclasses.replace(scaling, original_context=trained)
    if isinstance(scaling, LongRopeScaling):
        short, long = scaling.short_factors[:pairs], scaling.long_factors[:pairs]
        scaling = dataclasses.replace(scaling, short_factors=short, long_factors=long)
    return scaling


def _reduced_mixture(moe: Mixture) -> Mixture:
    fields = {"d_ff": 16, "n_experts": min(moe.n_experts, max(4, _chosen(moe) + 1))}
    if isinstance(moe, SoftConfig) and moe.segment_length is not None:
        fields["segment_length"] = min(moe.segment_length, 8)
    if isinstance(moe, SparseConfig) and moe.n_groups > 1:
        fields |= _reduced_groups(moe)
    return dataclasses.replace(moe, **fields)


def _reduced_groups(moe: SparseConfig) -> dict[str, int | None]:
    """Two groups, of which one is open where not all are; each large enough for all that a token chooses."""
    size = min(moe.n_experts // moe.n_groups, moe.k + 1)
    open_groups = None if moe.top_groups is None else -(-moe.k // size)
    n_groups = min(moe.n_groups, (open_groups or 1) + 1)
    return {"n_groups": n_groups, "top_groups": open_groups, "n_experts": n_groups * size}


def _chosen(moe: Mixture) -> int:
    return moe.k if isinstance(moe, SparseConfig) else 1


def _reduced_block(block: Block) -> Block:
    return block if block.window is None else dataclasses.replace(block, window=min(block.window, 8))
