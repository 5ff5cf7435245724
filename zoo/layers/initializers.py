"""How parameters start."""

from typing import Literal

import flax.linen as nn

from zoo.config import BlockConfig, ModelConfig
from zoo.layers.logical import Initializer

# What a matrix is for: "deep" ones are those that DeepNorm scales (value, FFN), "out" those among them that write to
# the residual stream (attention's output, the FFN's second layer); queries and keys are "inner".
Use = Literal["inner", "deep", "out"]


def matrix_init(block: BlockConfig, n_inputs: int, n_outputs: int, use: Use = "inner") -> Initializer:
    """Initializer of a matrix that takes `n_inputs` numbers to `n_outputs`.

    Sources: 1 / sqrt(2 L) on what writes to the residual stream, GPT-2, section 2.3; the gain (8 L)^(-1/4) on
    Xavier's deviation sqrt(2 / (n_inputs + n_outputs)), DeepNorm, arXiv 2203.00555, section 3 and figure 2.
    """
    if use == "out" and block.out_init == "zero":
        return nn.initializers.zeros
    shrink = (2 * block.n_layers) ** -0.5 if use == "out" and block.out_init == "gpt2" else 1.0
    if block.init == "deepnorm":
        gain = 1.0 if use == "inner" else (8 * block.n_layers) ** -0.25
        return nn.initializers.normal(gain * (2 / (n_inputs + n_outputs)) ** 0.5)
    if block.init == "scaled_normal":
        return nn.initializers.normal(shrink * n_inputs**-0.5)
    return _plain(block, shrink)


def table_init(config: ModelConfig | BlockConfig) -> Initializer:
    """Initializer of embedding tables, heads and routers: a normal of init_std, cut off where matrices' is."""
    return _plain(config, 1.0)


def _plain(config: ModelConfig | BlockConfig, shrink: float) -> Initializer:
    """`init_std` is that of the normal before it is cut at two deviations, which leaves 0.880 of it."""
    normal = nn.initializers.truncated_normal if config.init == "truncated_normal" else nn.initializers.normal
    return normal(shrink * config.init_std)
