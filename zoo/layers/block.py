"""A decoder block: attention and a feed-forward part, each normed first and added to the residual stream."""

from typing import Any, NamedTuple

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from zoo.config import BlockConfig
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


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)) with a plain FFN or a mixture of experts.

    Attributes:
        block: every size and choice of the block.
        constrain: pins activations to the mesh.
        experts: runs the experts of a sparse mixture, where parallel/ has a way of its own; else None.
    """

    block: BlockConfig
    constrain: Constrain = unconstrained
    experts: Any = None

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
        block = self.block
        kv_cache, moe_cache = (None, None) if cache is None else cache

        def add(residual, y):
            y = nn.Dropout(block.dropout, deterministic=deterministic)(y)
            return self.constrain(residual + y.astype(residual.dtype), ("batch", "length", "embed"))

        y, kv_cache = Attention(block, self.constrain, name="attention")(
            build_norm(block, "attention_norm")(x), positions, segment_ids, kv_cache
        )
        x = add(x, y)
        y, stats, moe_cache = self._ffn(
            build_norm(block, "ffn_norm")(x), segment_ids > 0, positions, segment_ids, moe_cache, deterministic
        )
        return add(x, y), stats, None if cache is None else BlockCache(kv_cache, moe_cache)

    def _ffn(
        self,
        x: Float[Array, "B T D"],
        token_mask: Bool[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        cache: Any,
        deterministic: bool,
    ) -> tuple[Array, Any, Any]:
        if self.block.moe is None:
            return FFN(self.block, self.block.d_ff, self.constrain, name="ffn")(x), None, None
        moe = build_moe(self.block, self.constrain, self.experts, name="moe")
        return moe(
            x,
            token_mask,
            positions=positions,
            segment_ids=segment_ids,
            cache=cache,
            deterministic=deterministic,
        )
