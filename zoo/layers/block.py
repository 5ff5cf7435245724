"""A decoder block: attention and a feed-forward part, with norms and residual sums around them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import BlockConfig
from zoo.kernels.attention import Attend, attention
from zoo.layers.attention import Attention, KVCache, init_kv_cache
from zoo.layers.ffn import FFN
from zoo.layers.logical import Constrain, unconstrained
from zoo.layers.moe import build_moe, init_moe_state
from zoo.layers.norm import build_norm


class BlockCache(NamedTuple):
    """What one block remembers of the tokens so far.

    Attributes:
        attention: keys and values.
        moe: the state of a soft mixture, else None.
    """

    attention: KVCache
    moe: Any


def init_block_cache(block: BlockConfig, batch_size: int, length: int) -> BlockCache:
    """An empty cache for `length` tokens."""
    moe = None if block.moe is None else init_moe_state(block, batch_size)
    return BlockCache(init_kv_cache(block, batch_size, length), moe)


# x [B, T, D] -> (y [B, T, D], what else it returns): attention or a feed-forward part.
Part = Callable[[Array], tuple[Array, Any]]


class DecoderBlock(nn.Module):
    """Attention, then a plain FFN or a mixture of experts; each with the residual stream x around it.

    By `norm_placement`, with f for either part: "pre" x + f(norm(x)), "post" norm(x + f(x)) (arXiv 1706.03762),
    "sandwich" x + norm(f(norm(x))) (Gemma 2, arXiv 2408.00118), "deepnorm" norm((2 L)^(1/4) x + f(x))
    (arXiv 2203.00555, section 3). With `parallel` both parts read x, behind one norm or one each, and are added
    together (PaLM, arXiv 2204.02311, section 2; GPT-NeoX, arXiv 2204.06745, section 2).

    Attributes:
        block: every size and choice of the block.
        constrain: pins activations to the mesh.
        experts: runs the experts of a sparse mixture, where parallel/ has a way of its own; else None.
        attend: computes attention.
    """

    block: BlockConfig
    constrain: Constrain = unconstrained
    experts: Any = None
    attend: Attend = attention

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        cache: BlockCache | None,
        deterministic: bool,
    ) -> tuple[Float[Array, "B T D"], Any, BlockCache | None]:
        """Returns the residual stream, the routing statistics (None for a plain FFN) and the new cache."""
        kv_cache, moe_cache = (None, None) if cache is None else cache
        attend = partial(self._attention, positions, segment_ids, kv_cache, deterministic)
        feed = partial(self._ffn, positions, segment_ids, moe_cache, deterministic)
        if self.block.parallel:
            x, kv_cache, (stats, moe_cache) = self._side_by_side(x, attend, feed, deterministic)
        else:
            x, kv_cache = self._residual("attention", x, attend, deterministic)
            x, (stats, moe_cache) = self._residual("ffn", x, feed, deterministic)
        return x, stats, None if cache is None else BlockCache(kv_cache, moe_cache)

    def _residual(self, name: str, x: Array, part: Part, deterministic: bool) -> tuple[Array, Any]:
        """One part with its norms and the residual sum."""
        block, placement = self.block, self.block.norm_placement
        before = placement in ("pre", "sandwich")
        y, rest = part(build_norm(block, f"{name}_norm")(x) if before else x)
        if placement == "sandwich":
            y = build_norm(block, f"{name}_post_norm")(y)
        if placement == "deepnorm":  # in float32: bfloat16 would round alpha itself
            x = ((2 * block.n_layers) ** 0.25 * x.astype(jnp.float32)).astype(x.dtype)
        x = self._add(x, y, deterministic)
        return (x if before else build_norm(block, f"{name}_norm")(x)), rest

    def _side_by_side(self, x: Array, attend: Part, feed: Part, deterministic: bool) -> tuple[Array, Any, Any]:
        """Both parts on the same input."""
        for_attention = build_norm(self.block, "attention_norm")(x)
        for_ffn = for_attention if self.block.parallel == "one_norm" else build_norm(self.block, "ffn_norm")(x)
        (y, kv_cache), (z, rest) = attend(for_attention), feed(for_ffn)
        return self._add(self._add(x, y, deterministic), z, deterministic), kv_cache, rest

    def _add(self, residual: Array, y: Array, deterministic: bool) -> Array:
        y = nn.Dropout(self.block.dropout, deterministic=deterministic)(y)
        return self.constrain(residual + y.astype(residual.dtype), ("batch", "length", "embed"))

    def _attention(
        self, positions: Array, segment_ids: Array, cache: KVCache | None, deterministic: bool, x: Array
    ) -> tuple[Array, KVCache | None]:
        layer = Attention(self.block, self.constrain, self.attend, name="attention")
        return layer(x, positions, segment_ids, cache, deterministic=deterministic)

    def _ffn(
        self, positions: Array, segment_ids: Array, cache: Any, deterministic: bool, x: Array
    ) -> tuple[Array, tuple[Any, Any]]:
        if self.block.moe is None:
            return FFN(self.block, self.block.d_ff, self.constrain, name="ffn")(x), (None, None)
        moe = build_moe(self.block, self.constrain, self.experts, name="moe")
        where = {"positions": positions, "segment_ids": segment_ids}
        y, stats, cache = moe(x, segment_ids > 0, **where, cache=cache, deterministic=deterministic)
        return y, (stats, cache)
