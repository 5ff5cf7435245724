"""Attention with grouped key and value heads: to the tokens so far, with a cache for generation, or to others."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import BlockConfig
from zoo.kernels.attention import Attend, attention
from zoo.kernels.linear import linear
from zoo.kernels.masks import Causal, Full, Mask
from zoo.layers.initializers import Use, matrix_init
from zoo.layers.logical import Constrain, declare, unconstrained
from zoo.layers.norm import build_qk_norm
from zoo.layers.position import alibi_slopes, rope_frequencies, rotary


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


class Memory(NamedTuple):
    """Another sequence to attend to.

    Attributes:
        x: [B, S, D], what keys and values are made of.
        segment_ids: [B, S], each token's document, which a query sees where it is its own; 0 for padding.
    """

    x: Array
    segment_ids: Array


class Attention(nn.Module):
    """Causal self-attention, or attention to a memory: MHA for K = H, MQA for K = 1, GQA between (arXiv 2305.13245).

    Attributes:
        block: head counts, window, positions, biases, initializers and dtypes.
        constrain: pins activations to the mesh.
        attend: computes attention; the signature of kernels.attention.attention.
    """

    block: BlockConfig
    constrain: Constrain = unconstrained
    attend: Attend = attention

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        cache: KVCache | None = None,
        memory: Memory | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Returns the output, and the cache with these tokens in it where one was given.

        A token at a position that the cache has no room for gives NaN. With a memory, keys and values are made of
        it, positions do not matter, and the cache stays as it is. Dropout needs the rng stream "dropout".
        """
        block = self.block
        rope = block.position == "rope" and memory is None
        x = x.astype(block.compute_dtype)
        q, k, v = self._project(x, x if memory is None else memory.x.astype(block.compute_dtype), positions, rope)
        settings = self._settings(deterministic, distances=memory is None)
        if memory is not None:
            nowhere = jnp.zeros_like(memory.segment_ids)
            places = (positions, nowhere, segment_ids, memory.segment_ids)
            return self._output(self._attend(q, k, v, Full(), places, settings)), cache
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
        places = (positions, kv_positions, segment_ids, kv_segment_ids)
        out = self._attend(q, k_seen, v_seen, Causal(block.window), places, settings)
        if cache is not None:
            out = self._refuse_overflow(out, positions, cache)
        return self._output(out), cache

    def _attend(self, q: Array, k: Array, v: Array, mask: Mask, places: tuple[Array, ...], settings: Any) -> Array:
        names = ("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids")
        out = self.attend(q, k, v, mask=mask, **dict(zip(names, places, strict=True)), **settings)
        return self.constrain(out, ("batch", "length", "heads", "head_dim"))

    def _settings(self, deterministic: bool, distances: bool) -> dict[str, Any]:
        """What the block asks of `attend` beside masks."""
        block = self.block
        settings: dict[str, Any] = {"scale": block.attention_scale, "softcap": block.attention_softcap}
        if block.position == "alibi" and distances:
            settings["alibi_slopes"] = jnp.asarray(alibi_slopes(block.n_heads), jnp.float32)
        if block.attention_sinks:
            shape, axes = (block.n_heads,), ("heads",)
            init = nn.initializers.zeros
            settings["sinks"] = declare(self, "sinks", init, shape, axes, "bias", block.param_dtype)
        if block.attention_dropout > 0 and not deterministic:
            settings |= {"dropout_rate": block.attention_dropout, "dropout_key": self.make_rng("dropout")}
        return settings

    def _refuse_overflow(self, out: Array, positions: Array, cache: KVCache) -> Array:
        """NaN for tokens behind the end of a cache that has to hold every token: it has lost some that they see."""
        slots = cache.positions.shape[1]
        if self.block.window is not None and slots >= self.block.window:
            return out
        return jnp.where((positions < slots)[..., None, None], out, jnp.nan)

    def _project(self, x: Array, source: Array, positions: Array, rope: bool) -> tuple[Array, Array, Array]:
        """Queries of x, keys and values of the source, normalized and rotated."""
        block = self.block
        q = self._heads("q", x, block.n_heads, "heads", "inner")
        k = self._heads("k", source, block.n_kv_heads, "kv_heads", "inner")
        v = self._heads("v", source, block.n_kv_heads, "kv_heads", "deep")
        if block.qk_norm:
            q = build_qk_norm(block, "heads", "q_norm")(q)
            k = build_qk_norm(block, "kv_heads", "k_norm")(k)
        if not rope:
            return q, k, v
        frequencies, factor = rope_frequencies(block)
        q, k = (rotary(x, positions, frequencies, block.rope_interleaved, factor) for x in (q, k))
        return q, k, v

    def _heads(self, name: str, x: Array, n_heads: int, axis: str, use: Use) -> Array:
        shape = (x.shape[-1], n_heads, self.block.head_dim)
        init = matrix_init(self.block, shape[0], shape[1] * shape[2], use)
        w = self._matrix(f"w_{name}", init, shape, ("embed", axis, "head_dim"), inputs=1)
        y = self._biased(name, linear(x, w), (axis, "head_dim"))
        return self.constrain(y, ("batch", "length", axis, "head_dim"))

    def _output(self, heads: Array) -> Array:
        shape = (*heads.shape[-2:], self.block.d_model)
        init = matrix_init(self.block, shape[0] * shape[1], shape[2], "out")
        w = self._matrix("w_o", init, shape, ("heads", "head_dim", "embed"), inputs=2)
        return self._biased("o", linear(heads, w, n_inputs=2), ("embed",))

    def _biased(self, name: str, y: Array, axes: tuple[str, ...]) -> Array:
        """y plus the bias of a projection, where it has one."""
        if name not in self.block.attention_bias:
            return y
        shape = y.shape[-len(axes) :]
        b = declare(self, f"b_{name}", nn.initializers.zeros, shape, axes, "bias", self.block.param_dtype)
        return y + b.astype(y.dtype)

    def _matrix(self, name: str, init: Any, shape: tuple[int, ...], axes: tuple[str, ...], inputs: int) -> Array:
        dtype = self.block.param_dtype
        w = declare(self, name, init, shape, axes, "matrix", dtype, axes[:inputs], axes[inputs:])
        return w.astype(self.block.compute_dtype)
