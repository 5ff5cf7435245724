"""How parameters start."""

import flax.linen as nn

from zoo.config import BlockConfig
from zoo.layers.logical import Initializer


def output_init(block: BlockConfig) -> Initializer:
    """Initializer of the projections that write to the residual stream."""
    return nn.initializers.zeros if block.zero_init_out else nn.initializers.normal(block.init_std)
