"""Self-attention with rotary positions, grouped key and value heads, and a cache for generation."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import BlockConfig
from zoo.kernels.attention import attention
from zoo.kernels.linear import linear
from zoo.kernels.masks import Causal
from zoo.layers.initializers import Use, matrix_init
from zoo.layers.logical import Constrain, declare, unconstrained
from zoo.layers.norm import build_qk_norm
from zoo.layers.position import rotary


class KVCache(NamedTuple):
    """Keys and values of the tokens so far. The token at position p lies in slot p mod S, so a sliding
    window needs only as many slots as it is wide.

    Attributes:
        k, v: [B, S, K, h], keys after rotation.
        positions: [B, S] position of each slot's token, -1 where it is empty.
    """

    k: Array
    v: Array
    positions: Array


def init_kv_cache(block: BlockConfig, batch_size: int, length: int) -> KVCache:
    """An empty cache for `length` tokens, of fewer slots where the block's window is shorter."""
    slots = length if block.window is None else min(length, block.window)
    shape = (batch_size, slots, block.n_kv_heads, block.head_dim)
    empty = jnp.zeros(shape, block.compute_dtype)
    return KVCache(empty, empty, jnp.full((batch_size, slots), -1, jnp.int32))


def write_kv_cache(
    cache: KVCache,
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> KVCache:
    """The cache with the new tokens in it; padding is left out, and so are tokens that later ones replace."""
    slots = cache.positions.shape[1]
    last = jnp.max(jnp.where(segment_ids > 0, positions, -1), axis=1, keepdims=True)
    kept = (segment_ids > 0) & (positions > last - slots)
    slot = jnp.where(kept, positions % slots, slots)
    row = jnp.arange(len(slot))[:, None]
    return KVCache(
        cache.k.at[row, slot].set(k.astype(cache.k.dtype), mode="drop"),
        cache.v.at[row, slot].set(v.astype(cache.v.dtype), mode="drop"),
        cache.positions.at[row, slot].set(positions, mode="drop"),
    )


class Attention(nn.Module):
    """Causal self-attention: MHA for K = H, MQA for K = 1, GQA between (arXiv 2305.13245).

    Attributes:
        block: head counts, window, rotary base, initializers and dtypes.
        constrain: pins activations to the mesh.
    """

    block: BlockConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Returns the output, and the cache with these tokens in it where one was given.

        A token at a position that the cache has no room for gives NaN.
        """
        q, k, v = self._project(x.astype(self.block.compute_dtype), positions)
        k_seen, v_seen, kv_positions, kv_segment_ids = k, v, positions, segment_ids
        if cache is not None:
            # A cache holds one document per row: whatever is real there is visible here.
            segment_ids = (segment_ids > 0).astype(jnp.int32)
            written = write_kv_cache(cache, k, v, positions, segment_ids)
            if x.shape[1] == 1:
                k_seen, v_seen, kv_positions = written
            else:  # Of a longer input, early queries may need keys that its later tokens replace.
                k_seen = jnp.concatenate([cache.k, k], axis=1)
                v_seen = jnp.concatenate([cache.v, v], axis=1)
                own = jnp.where(segment_ids > 0, positions, -1)
                kv_positions = jnp.concatenate([cache.positions, own], axis=1)
            kv_segment_ids = (kv_positions >= 0).astype(jnp.int32)
            cache = written
        out = attention(
            q,
            k_seen,
            v_seen,
            mask=Causal(self.block.window),
            q_positions=positions,
            kv_positions=kv_positions,
            q_segment_ids=segment_ids,
            kv_segment_ids=kv_segment_ids,
        )
        if cache is not None:
            out = self._refuse_overflow(out, positions, cache)
        return self._output(self.constrain(out, ("batch", "length", "heads", "head_dim"))), cache

    def _refuse_overflow(self, out: Array, positions: Array, cache: KVCache) -> Array:
        """NaN for tokens behind the end of a cache that has to hold every token: it has lost some that they see."""
        slots = cache.positions.shape[1]
        if self.block.window is not None and slots >= self.block.window:
            return out
        return jnp.where((positions < slots)[..., None, None], out, jnp.nan)

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values, normalized and rotated."""
        block = self.block
        q = self._heads("w_q", x, block.n_heads, "heads", "inner")
        k = self._heads("w_k", x, block.n_kv_heads, "kv_heads", "inner")
        v = self._heads("w_v", x, block.n_kv_heads, "kv_heads", "deep")
        if block.qk_norm:
            q = build_qk_norm(block, "heads", "q_norm")(q)
            k = build_qk_norm(block, "kv_heads", "k_norm")(k)
        return rotary(q, positions, block.rope_theta), rotary(k, positions, block.rope_theta), v

    def _heads(self, name: str, x: Array, n_heads: int, axis: str, use: Use) -> Array:
        shape = (x.shape[-1], n_heads, self.block.head_dim)
        init = matrix_init(self.block, shape[0], shape[1] * shape[2], use)
        w = self._matrix(name, init, shape, ("embed", axis, "head_dim"), inputs=1)
        return self.constrain(linear(x, w), ("batch", "length", axis, "head_dim"))

    def _output(self, heads: Array) -> Array:
        shape = (*heads.shape[-2:], self.block.d_model)
        init = matrix_init(self.block, shape[0] * shape[1], shape[2], "out")
        w = self._matrix("w_o", init, shape, ("heads", "head_dim", "embed"), inputs=2)
        return linear(heads, w, n_inputs=2)

    def _matrix(self, name: str, init: Any, shape: tuple[int, ...], axes: tuple[str, ...], inputs: int) -> Array:
        dtype = self.block.param_dtype
        w = declare(self, name, init, shape, axes, "matrix", dtype, axes[:inputs], axes[inputs:])
        return w.astype(self.block.compute_dtype)
