"""The three mixtures of experts behind one interface.

Each is called as `moe(x, token_mask, positions=..., segment_ids=..., cache=..., deterministic=...)` and gives
`(y, RoutingStats, cache)`.
"""

import flax.linen as nn

from zoo.config import BlockConfig, DenseConfig, SoftConfig
from zoo.layers.logical import Constrain, unconstrained
from zoo.layers.moe.balance import balance_loss, importance_cv2, to_huggingface, z_loss
from zoo.layers.moe.dense import DenseMoE
from zoo.layers.moe.experts import Experts, sorted_experts
from zoo.layers.moe.router import Routing, RoutingStats, route, router_logits, routing_stats
from zoo.layers.moe.soft import SoftMoE, SoftState, init_soft_state
from zoo.layers.moe.sparse import SparseMoE

__all__ = [
    "DenseMoE",
    "Experts",
    "Routing",
    "RoutingStats",
    "SoftMoE",
    "SoftState",
    "SparseMoE",
    "balance_loss",
    "build_moe",
    "importance_cv2",
    "init_moe_state",
    "init_soft_state",
    "route",
    "router_logits",
    "routing_stats",
    "sorted_experts",
    "to_huggingface",
    "z_loss",
]


def build_moe(
    block: BlockConfig,
    constrain: Constrain = unconstrained,
    experts: Experts | None = None,
    name: str | None = None,
) -> nn.Module:
    """The mixture that `block.moe` describes; `experts` replaces how a sparse one runs its experts."""
    if isinstance(block.moe, SoftConfig):
        return SoftMoE(block.moe, block, constrain, name=name)
    if isinstance(block.moe, DenseConfig):
        return DenseMoE(block.moe, block, constrain, name=name)
    return SparseMoE(block.moe, block, constrain, experts or sorted_experts, name=name)


def init_moe_state(block: BlockConfig, batch_size: int) -> SoftState | None:
    """What decoding keeps of a mixture before any token; None where it keeps nothing.

    Raises:
        ConfigError: for a soft mixture without segments.
    """
    return init_soft_state(block.moe, block, batch_size) if isinstance(block.moe, SoftConfig) else None
