"""Shared experts: one FFN that serves every token beside the routed experts."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from zoo.config import BlockConfig, MixtureConfig
from zoo.layers.ffn import declared_ffn
from zoo.layers.initializers import table_init
from zoo.layers.logical import Constrain, declare, unconstrained
from zoo.layers.moe.router import router_logits


class SharedExperts(nn.Module):
    """FFN(x) of width n_shared_experts * d_ff, times sigmoid(x w) where the config says so; never the routed scale.

    Sources: DeepSeekMoE, arXiv 2401.06066, equation 9; the gate is Qwen1.5-MoE's.

    Attributes:
        config: sizes.
        block: the block's sizes, activation, initializers and dtypes.
        constrain: pins activations to the mesh.
    """

    config: MixtureConfig
    block: BlockConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = declared_ffn(self, x, self.block, self.config.n_shared_experts * self.config.d_ff, self.constrain)
        if not self.config.shared_gate:
            return y
        shape, axes = (x.shape[-1], 1), ("embed", None)
        w = declare(self, "gate", table_init(self.block), shape, axes, "router", "float32", axes[:1])
        return (y * jax.nn.sigmoid(router_logits(x, w))).astype(y.dtype)


def add_shared(
    y: Float[Array, "B T D"], x: Float[Array, "B T D"], shared: SharedExperts | None
) -> Float[Array, "B T D"]:
    """The routed experts' output plus that of the shared ones, where there are any."""
    return y if shared is None else y + shared(x)


def build_shared(
    config: MixtureConfig, block: BlockConfig, constrain: Constrain, name: str | None = None
) -> SharedExperts | None:
    """The shared experts of a mixture; None where it has none."""
    return SharedExperts(config, block, constrain, name=name) if config.n_shared_experts else None
