"""Parameters, counted from the abstract tree, and the operations that follow from them."""

import math
from typing import Any, NamedTuple

import jax

from zoo.config import BlockConfig, DenseConfig, Mixture, ModelConfig, SoftConfig
from zoo.layers.logical import ParamSpec, is_spec


class Parameters(NamedTuple):
    """Parameter counts.

    Attributes:
        total: all of them.
        active: those that one token uses; of the experts, the share that `expert_share` gives.
        products: those of the active ones that one token is multiplied by: without norms and the look-up of
            the embedding, but with the head, also where it is the embedding table.
    """

    total: int
    active: int
    products: int


def blocks_of(config: ModelConfig) -> list[BlockConfig]:
    """Every layer's block."""
    return [block for stage in config.expand() for block in stage.blocks * stage.repeat]


def count_parameters(config: ModelConfig, specs: Any) -> Parameters:
    """Counts the parameters of a model from its abstract tree of ParamSpec."""
    total = 0
    active = products = 0.0
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        size = math.prod(spec.shape)
        used = size * (expert_share(config.moe) if _of_experts(spec) else 1)
        is_head = spec.role == "head" or (config.tie_embeddings and spec.role == "embedding" and "vocab" in spec.axes)
        multiplied = spec.role in ("matrix", "router") or is_head
        total, active, products = total + size, active + used, products + used * multiplied
    return Parameters(total, round(active), round(products))


def expert_share(mixture: Mixture | None) -> float:
    """The share of its experts' parameters that a token is multiplied by.

    Sparse: k / E, and k / (E + null experts) where all are chosen alike. Dense: 1. Soft: 1 / E for the merged expert,
    and 1 / L for merging all of them once in L tokens.
    """
    if mixture is None or isinstance(mixture, DenseConfig):
        return 1.0
    if isinstance(mixture, SoftConfig):
        return min(1.0, 1 / mixture.n_experts + 1 / (mixture.segment_length or math.inf))
    return mixture.k / (mixture.n_experts + mixture.n_null_experts)


def _of_experts(spec: ParamSpec) -> bool:
    """Matrices, biases and betas of the experts; of the axes of a router, "expert" is the last."""
    return "expert" in spec.axes and (spec.role == "matrix" or spec.axes[-1] != "expert" or spec.role == "scale")


# Part -> what its paths hold; the first that fits.
PARTS = {
    "token embedding": ("embedding/table",),
    "position table": ("embedding/positions",),
    "norms": ("_norm/", "/norm/"),
    "attention queries": ("/attention/w_q", "/attention/b_q"),
    "attention keys": ("/attention/w_k", "/attention/b_k"),
    "attention values": ("/attention/w_v", "/attention/b_v"),
    "attention output": ("/attention/w_o", "/attention/b_o"),
    "attention sinks": ("/attention/sinks",),
    "router": ("/router/", "/router_bias", "shared/gate"),
    "shared experts": ("/shared/",),
    "experts": ("/moe/",),
    "feed-forward": ("/ffn/",),
    "head": ("head/",),
}


def count_parts(config: ModelConfig, specs: Any) -> dict[str, Parameters]:
    """`count_parameters` of every part of the model that has any."""
    found: dict[str, list[Any]] = {part: [] for part in PARTS}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        part = next(part for part, marks in PARTS.items() if any(mark in name for mark in marks))
        found[part].append(spec)
    return {part: count_parameters(config, leaves) for part, leaves in found.items() if leaves}


def flops_per_token(config: ModelConfig, specs: Any, length: int) -> float:
    """Operations of a training step, forward and backward, for one token of a sequence of `length` tokens.

    6 per parameter in a product (arXiv 2001.08361, section 2.1), and in attention 12 H h per position that a
    token sees: 2 for the scores and 2 for their use, three times over for forward and backward. A causal token
    sees (T + 1) / 2 positions on average, fewer in a window. What remat computes again does not count.
    """
    attention = sum(12 * b.n_heads * b.head_dim * mean_span(length, b.window) for b in blocks_of(config))
    return 6 * count_parameters(config, specs).products + attention


def mean_span(length: int, window: int | None) -> float:
    """Positions that a token of a sequence sees on average."""
    return live_pairs(length, window) / length


def live_pairs(length: int, window: int | None) -> int:
    """Pairs of tokens of a sequence of which one sees the other: the sum of min(t + 1, window) over t < length."""
    w = min(window or length, length)
    return w * (w + 1) // 2 + (length - w) * w
