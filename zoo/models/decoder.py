"""The decoder-only language model: embedding, stages of scanned blocks, final norm, head."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from zoo.config import BlockConfig, ConfigError, ModelConfig, Remat
from zoo.kernels.attention import Attend, attention
from zoo.layers.block import DecoderBlock, init_block_cache
from zoo.layers.embedding import Embedding, Head, HeadWeights, logits
from zoo.layers.logical import Constrain, abstract_params, unconstrained
from zoo.layers.norm import build_norm

NO_TOKEN = -1  # has no vector
REMAT_POLICIES: dict[Remat, Any] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Cache(NamedTuple):
    """What the model remembers of the tokens so far.

    Attributes:
        length: [B] tokens of each row so far, which is the position of its next one.
        stages: [stage][block] of BlockCache, leaves stacked over the repeats of the stage.
    """

    length: Array
    stages: tuple[Any, ...]


class Hidden(NamedTuple):
    """What the model computes before its head.

    Attributes:
        hidden: [B, T, D], what the head reads.
        routing: [stage][block] of RoutingStats, leaves stacked over the repeats; None for a plain FFN.
        cache: the new cache where one was given.
    """

    hidden: Array
    routing: tuple[Any, ...]
    cache: Cache | None


class Output(NamedTuple):
    """`logits` [B, T, V] in float32; the rest as in Hidden."""

    logits: Array
    routing: tuple[Any, ...]
    cache: Cache | None


class Pattern(nn.Module):
    """The blocks of a stage, once; scanned over its repeats."""

    blocks: tuple[BlockConfig, ...]
    constrain: Constrain
    experts: Any
    attend: Attend

    @nn.compact
    def __call__(self, x: Array, caches: Any, positions: Array, segment_ids: Array, deterministic: bool) -> Any:
        routing, new_caches = [], []
        for i, block in enumerate(self.blocks):
            cache = None if caches is None else caches[i]
            layer = DecoderBlock(block, self.constrain, self.experts, self.attend, name=f"block_{i}")
            x, stats, cache = layer(x, positions, segment_ids, cache, deterministic)
            routing.append(stats)
            new_caches.append(cache)
        return x, (tuple(routing), None if caches is None else tuple(new_caches))


class Decoder(nn.Module):
    """A decoder-only language model.

    Attributes:
        config: its sizes and choices, with the vocabulary size set.
        constrain: pins activations to a mesh (parallel.rules.make_constrain).
        experts: runs the experts of a sparse mixture across a mesh (parallel.experts); None runs them here.
        attend: computes attention; the signature of kernels.attention.attention.
    """

    config: ModelConfig
    constrain: Constrain = unconstrained
    experts: Any = None
    attend: Attend = attention

    def setup(self):
        config = self.config
        self.embedding = Embedding(config, self.constrain)
        for i, stage in enumerate(config.expand()):
            pattern = self._scanned(stage.repeat)
            setattr(self, f"stage_{i}", pattern(stage.blocks, self.constrain, self.experts, self.attend))
        if self._ends_in_norm:
            self.final_norm = build_norm(config)
        if self._has_head:
            self.head = Head(config)

    @property
    def _has_head(self) -> bool:
        return not self.config.tie_embeddings or self.config.head_bias

    @property
    def _ends_in_norm(self) -> bool:
        """Whether there is a norm after the last block: not where every block ends in one."""
        return self.config.norm_placement in ("pre", "sandwich")

    def _scanned(self, repeat: int) -> Any:
        pattern = Pattern
        if self.config.remat != "none":
            policy = REMAT_POLICIES[self.config.remat]
            pattern = nn.remat(Pattern, policy=policy, prevent_cse=False, static_argnums=(5,))
        return nn.scan(
            pattern,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True, "router": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=repeat,
            unroll=repeat if self.config.unroll else 1,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        deterministic: bool = True,
    ) -> Hidden:
        """Everything before the head; arguments as in `__call__`."""
        self._check_length(tokens)
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        if positions is None:
            positions = restarting_positions(segment_ids) if cache is None else following_positions(cache, segment_ids)
        # Padding may come with any token and position. What has no vector is NaN, and 0 times NaN would reach the rest.
        tokens, positions = (jnp.where(segment_ids > 0, ids, 0) for ids in (tokens, positions))
        # Rotations and slopes go on beyond the context that the model is meant for; a position there is none of its.
        tokens = jnp.where((positions >= 0) & (positions < self.config.context_length), tokens, NO_TOKEN)
        x = self.embedding(tokens, positions, deterministic)
        routing, stages = [], []
        for i in range(len(self.config.expand())):
            stage_cache = None if cache is None else cache.stages[i]
            x, (stats, stage_cache) = getattr(self, f"stage_{i}")(x, stage_cache, positions, segment_ids, deterministic)
            routing.append(stats)
            stages.append(stage_cache)
        if cache is not None:
            cache = Cache(cache.length + jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32), tuple(stages))
        return Hidden(self.final_norm(x) if self._ends_in_norm else x, tuple(routing), cache)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        deterministic: bool = True,
    ) -> Output:
        """The logits of the token after each token.

        Args:
            tokens: token ids.
            positions: of each token in its document, from 0 and below context_length; None counts from 0 in every
                segment, or on from the cache.
            segment_ids: the document of each token, 0 for padding; None for one document per row.
            cache: of the tokens before these; rows may end in padding (segment 0), which leaves no trace.
            deterministic: evaluation; False needs rngs "dropout" (where the config has dropout) and "router"
                (where it has router jitter).

        Returns:
            NaN where a token or position is outside of the vocabulary or context, and wherever it has an influence:
            what is in an array cannot raise in a compiled program, and is never taken for another.

        Raises:
            ValueError: the input is longer than the config's context_length.
        """
        hidden, routing, cache = self.hidden(tokens, positions, segment_ids, cache, deterministic)
        if self._has_head:
            self.head()  # which declares its parameters, when they are made
        scores = logits(hidden, self.head_weights(nn.meta.unbox(self.variables["params"])), self.config)
        return Output(self.constrain(scores, ("batch", "length", "vocab")), routing, cache)

    def _check_length(self, tokens: Array) -> None:
        if tokens.shape[1] > self.config.context_length:
            raise ValueError(
                f"tokens: {tokens.shape[1]} in a row are more than model.context_length={self.config.context_length}"
            )

    @nn.nowrap
    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Flax's init with plain arrays: {"params": tree}; the axes of each leaf are in `abstract_params`."""
        return nn.meta.unbox(super().init(*args, **kwargs))

    @nn.nowrap
    def abstract_params(self) -> Any:
        """The abstract tree: the parameters' structure with a ParamSpec for every array; allocates nothing."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return abstract_params(lambda: nn.Module.init(self, jax.random.key(0), tokens))["params"]

    @nn.nowrap
    def head_weights(self, params: Any) -> HeadWeights:
        """The output weights among `params`."""
        w = params["embedding"]["table"].T if self.config.tie_embeddings else params["head"]["w"]
        return HeadWeights(w, params["head"]["bias"] if self.config.head_bias else None)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int) -> Cache:
        """An empty cache for rows of up to `length` tokens.

        Raises:
            ValueError: `length` is more than the config's context_length.
        """
        if length > self.config.context_length:
            raise ValueError(f"length={length} is more than model.context_length={self.config.context_length}")
        stages = tuple(
            tuple(_stacked(stage.repeat, init_block_cache(block, batch_size, length)) for block in stage.blocks)
            for stage in self.config.expand()
        )
        return Cache(jnp.zeros(batch_size, jnp.int32), stages)


def _stacked(repeat: int, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (repeat, *leaf.shape)), tree)


def restarting_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that count the real tokens of each document from 0; padding, also inside a document, does not count."""
    real = segment_ids > 0
    newest = jax.lax.cummax(jnp.where(real, jnp.arange(1, segment_ids.shape[1] + 1), 0), axis=1)
    before = jnp.pad(newest[:, :-1], ((0, 0), (1, 0)))  # 1 + index of the real token before, 0 for none
    document_before = jnp.take_along_axis(jnp.pad(segment_ids, ((0, 0), (1, 0))), before, axis=1)
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    begins = real & (segment_ids != document_before)
    return jnp.where(real, count - jax.lax.cummax(jnp.where(begins, count, 0), axis=1), 0)


def following_positions(cache: Cache, segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that count on from the tokens in the cache; padding does not count."""
    return cache.length[:, None] + jnp.maximum(jnp.cumsum(segment_ids > 0, axis=1) - 1, 0).astype(jnp.int32)


def build(
    config: ModelConfig, constrain: Constrain = unconstrained, experts: Any = None, attend: Attend = attention
) -> Decoder:
    """The model of a config; the other arguments as in Decoder.

    Raises:
        ConfigError: the config has no vocabulary size.
    """
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size=None: set it to the size of the tokenizer's vocabulary")
    return Decoder(config, constrain, experts, attend)
