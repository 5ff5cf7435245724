"""Dense mixture: every token goes to every expert."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.config import BlockConfig, DenseConfig
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.layers.ffn import declare_ffn, hidden_units
from zoo.layers.logical import Constrain, unconstrained
from zoo.layers.moe.router import Router, RoutingStats, routing_stats
from zoo.layers.moe.shared import add_shared, build_shared


def dense_experts(
    x: Float[Array, "B T D"], weights: Float[Array, "B T E"], params: FFNParams, hidden: HiddenUnits
) -> Float[Array, "B T D"]:
    """y = sum_e weights_e FFN_e(x), as one product over experts and hidden units; in x's dtype.

    The weights multiply the hidden units in float32, which is the same since FFN_e is linear in them.
    """

    def layer(w: Array | None, b: Array | None) -> Array | None:
        if w is None:
            return None
        y = jnp.einsum("BTD,EDF->BTEF", x, w)
        return y if b is None else y + b

    gate, up = layer(params.w_gate, params.b_gate), layer(params.w_up, params.b_up)
    units = hidden(gate, up, None if params.beta is None else params.beta[:, None])
    y = jnp.einsum("BTEF,EFD->BTD", (units * weights[..., None]).astype(x.dtype), params.w_down)
    return y if params.b_down is None else y + jnp.einsum("BTE,ED->BTD", weights, params.b_down).astype(y.dtype)


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
        del positions, segment_ids, deterministic
        config, dtype = self.config, self.block.compute_dtype
        logits = Router(self.block, config.n_experts, name="router")(x)
        probs = jax.nn.softmax(logits)
        params = declare_ffn(self, self.block, config.d_ff, config.n_experts).astype(dtype)
        y = dense_experts(x.astype(dtype), probs * token_mask[..., None], params, hidden_units(self.block))
        y = self.constrain(y, ("batch", "length", "embed"))
        y = add_shared(y, x, build_shared(config, self.block, self.constrain, name="shared"))
        return y, routing_stats(logits, token_mask.astype(jnp.float32), probs, probs), cache
