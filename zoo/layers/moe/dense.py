"""Dense mixture: every token goes to every expert."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.config import Activation, BlockConfig, DenseConfig
from zoo.kernels.glu import glu
from zoo.layers.ffn import ACTIVATIONS, FFN
from zoo.layers.logical import Constrain, unconstrained
from zoo.layers.moe.experts import ExpertParams, declare_experts
from zoo.layers.moe.router import Router, RoutingStats, routing_stats


def dense_experts(
    x: Float[Array, "B T D"], weights: Float[Array, "B T E"], params: ExpertParams, activation: Activation
) -> Float[Array, "B T D"]:
    """y = sum_e weights_e FFN_e(x), as one product over experts and hidden units; in x's dtype.

    The weights multiply the hidden units in float32, which is the same since FFN_e is linear in them.
    """
    up = jnp.einsum("BTD,EDF->BTEF", x, params.w_up)
    gate = None if params.w_gate is None else jnp.einsum("BTD,EDF->BTEF", x, params.w_gate)
    hidden = glu(ACTIVATIONS[activation], gate, up)
    hidden = (hidden * weights[..., None]).astype(x.dtype)
    return jnp.einsum("BTEF,EFD->BTD", hidden, params.w_down)


class DenseMoE(nn.Module):
    """y = sum_e softmax(x W)_e FFN_e(x), plus the shared experts' FFN(x). Causal.

    Attributes:
        config: sizes.
        block: the block's sizes, activation, initializers and dtypes.
        constrain: pins activations to the mesh.
    """

    config: DenseConfig
    block: BlockConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        token_mask: Bool[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        cache: None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], RoutingStats, None]:
        """Returns the output, the routing statistics and no cache."""
        del positions, segment_ids
        config, dtype = self.config, self.block.compute_dtype
        logits = Router(self.block, config.n_experts, name="router")(x, deterministic)
        probs = jax.nn.softmax(logits)
        params = declare_experts(self, self.block, config.n_experts, config.d_ff).astype(dtype)
        y = dense_experts(x.astype(dtype), probs * token_mask[..., None], params, self.block.activation)
        y = self.constrain(y, ("batch", "length", "embed"))
        if config.n_shared_experts:
            y += FFN(self.block, config.n_shared_experts * config.d_ff, self.constrain, name="shared")(x)
        return y, routing_stats(logits, token_mask.astype(jnp.float32), probs, probs), cache
