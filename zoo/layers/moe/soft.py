"""Soft mixture: the experts' parameters are merged, and one merged expert serves a segment of tokens.

SMEAR (arXiv 2306.03745) merges once for a whole sequence from its own mean, so a token sees later ones.
The causal form (Lory, arXiv 2405.03133, section 3.1) routes each segment of L tokens by the mean of the
segment before it. Lory lets the first segment see itself behind a stop_gradient, which hides the leak from
the gradient only; here the first segment of a document uses a learned prior, so nothing leaks.
"""

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.config import BlockConfig, ConfigError, SoftConfig
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams, collect, spread
from zoo.layers.ffn import declare_ffn, ffn, hidden_units
from zoo.layers.logical import Axes, Constrain, declare, unconstrained
from zoo.layers.moe.router import Router, RoutingStats, routing_stats
from zoo.layers.moe.shared import add_shared, build_shared


class SoftState(NamedTuple):
    """What decoding keeps of the open segment of each row.

    Attributes:
        sum: [B, D] float32, the sum of the mixture's inputs in the segment so far.
        tokens: [B] float32, how many they are.
        logits: [B, E] float32, raw router logits that serve it.
        merged: the expert that serves it, with a leading [B], in the compute dtype.
        document: [B] int32, segment id of its document; 0 before the first token.
        segment: [B] int32, its number in the document, position // L.
    """

    sum: Array
    tokens: Array
    logits: Array
    merged: FFNParams
    document: Array
    segment: Array


def init_soft_state(config: SoftConfig, block: BlockConfig, batch_size: int) -> SoftState:
    """The state before any token.

    Raises:
        ConfigError: for a mixture without segments, which cannot decode token by token.
    """
    if not config.causal:
        raise ConfigError(f"{config.named('segment_length')} cannot decode token by token; set a length")
    return SoftState(
        sum=jnp.zeros((batch_size, block.d_model), jnp.float32),
        tokens=jnp.zeros(batch_size, jnp.float32),
        document=jnp.zeros(batch_size, jnp.int32),
        segment=jnp.zeros(batch_size, jnp.int32),
        logits=jnp.zeros((batch_size, config.n_experts), jnp.float32),
        merged=_empty_expert(config, block, batch_size),
    )


def _empty_expert(config: SoftConfig, block: BlockConfig, batch_size: int) -> FFNParams:
    zeros = lambda *shape: jnp.zeros((batch_size, *shape), block.compute_dtype)  # noqa: E731
    D, F = block.d_model, config.d_ff
    return FFNParams(
        w_gate=zeros(D, F) if block.glu else None,
        w_up=zeros(D, F),
        w_down=zeros(F, D),
        b_gate=zeros(F) if block.glu and block.ffn_bias else None,
        b_up=zeros(F) if block.ffn_bias else None,
        b_down=zeros(D) if block.ffn_bias else None,
        beta=zeros() if block.activation == "swish_learned" else None,
    )


def merge(params: FFNParams, weights: Float[Array, "*N E"], dtype: str) -> FFNParams:
    """theta = sum_e weights_e theta_e, summed in float32: every [E, ...] becomes [*N, ...] in `dtype`.

    Source: SMEAR, arXiv 2306.03745, section 3.
    """

    def one(w: Array) -> Array:
        return jnp.tensordot(weights, w.astype(jnp.float32), 1).astype(dtype)

    return jax.tree.map(one, params)


def summarize(total: Float[Array, "*N D"], tokens: Float[Array, "*N"], eps: float) -> Float[Array, "*N D"]:
    """The mean of `tokens` tokens whose sum is `total`, layer-normed without parameters; 0 for no tokens.

    Source: SMEAR, arXiv 2306.03745, section 3 (the router's input is normed).
    """
    mean = total / jnp.maximum(tokens, 1)[..., None]
    return nn.standardize(mean, axis=-1, epsilon=eps)


def segment_slots(config: SoftConfig, length: int) -> int:
    """Segments that a row of `length` tokens has at most, so how often it merges: ceil(T / L) + max_documents - 1."""
    return min(length, -(-length // config.segment_length) + config.max_documents - 1)


class Slots(NamedTuple):
    """Where tokens go: S slots of W places, each slot one segment of one document.

    Attributes:
        source: [B, S, W] token in each place, T in an empty one.
        place: [B, T] the token's place, s W + w; S W for padding and for lost tokens.
        lost: [B, T] real tokens that found no place.
        last: [B] slot of the row's last real token.
    """

    source: Array
    place: Array
    lost: Array
    last: Array


def assign_slots(
    document: Int[Array, "B T"],
    segment: Int[Array, "B T"],
    token_mask: Bool[Array, "B T"],
    opened: tuple[Int[Array, "B"], Int[Array, "B"]] | None,
    n_slots: int,
    width: int,
) -> Slots:
    """A new slot starts at each real token whose (document, segment) is not that of the real token before it.

    With `opened`, the (document, segment) of an earlier call's last token, slot 0 continues that segment.
    """
    length = document.shape[1]
    start = _starts(document, segment, token_mask, opened)
    slot = jnp.cumsum(start, axis=1) - (opened is None)
    rank = jnp.cumsum(token_mask, axis=1) - 1
    within = rank - jax.lax.cummax(jnp.where(start, rank, 0), axis=1)
    fits = token_mask & (slot < n_slots) & (within < width)
    place = jnp.where(fits, slot * width + within, n_slots * width)
    source = jnp.full((place.shape[0], n_slots * width), length)
    token = jnp.broadcast_to(jnp.arange(length), place.shape)
    source = jax.vmap(lambda s, p, t: s.at[p].set(t, mode="drop"))(source, place, token)
    return Slots(source.reshape(-1, n_slots, width), place, token_mask & ~fits, slot[:, -1])


def _starts(document: Array, segment: Array, token_mask: Array, opened: tuple[Array, Array] | None) -> Array:
    """Whether a real token begins a slot: it differs from the real token before it, however much padding between."""
    batch, length = document.shape
    opened = opened or (jnp.zeros(batch, jnp.int32),) * 2
    newest = jax.lax.cummax(jnp.where(token_mask, jnp.arange(1, length + 1), 0), axis=1)
    before = jnp.pad(newest[:, :-1], ((0, 0), (1, 0)))

    def differs(key: Array, first: Array) -> Array:
        return key != jnp.take_along_axis(jnp.concatenate([first[:, None], key], axis=1), before, axis=1)

    return token_mask & (differs(document, opened[0]) | differs(segment, opened[1]))


def apply_merged(x: Float[Array, "*N W D"], merged: FFNParams, hidden: HiddenUnits) -> Float[Array, "*N W D"]:
    """Each group of W tokens through its own merged expert, whose parameters have the leading axes [*N]."""
    run = lambda x, expert: ffn(x, expert, hidden)  # noqa: E731
    for _ in x.shape[:-2]:
        run = jax.vmap(run)
    return run(x, merged)


# Of a merged expert; its width D stays whole.
_AXES = FFNParams(
    w_gate=(None, "mlp"),
    w_up=(None, "mlp"),
    w_down=("mlp", None),
    b_gate=("mlp",),
    b_up=("mlp",),
    b_down=(None,),
    beta=(),
)


class SoftMoE(nn.Module):
    """One merged expert per segment, plus the shared experts' FFN(x).

    Causal with `config.segment_length`, for positions that count up from 0 in each document. A row with
    more segments than ceil(T / L) + max_documents - 1, so with too many documents, gives NaN from the first
    token that found no place on, never a wrong number; the packer bounds the documents.
    Without a segment length the whole row is one segment and is routed by its own mean: not causal.
    Routing and merging are in float32, the merged experts in the compute dtype. The mixture gives padding 0.

    Attributes:
        config: sizes, segment length and the bound on documents.
        block: the block's sizes, activation, initializers and dtypes.
        constrain: pins activations to the mesh.
    """

    config: SoftConfig
    block: BlockConfig
    constrain: Constrain = unconstrained

    def setup(self):
        config, block = self.config, self.block
        self.router = Router(block, config.n_experts)
        self.bias = declare(
            self, "router_bias", nn.initializers.zeros, (config.n_experts,), ("expert",), "bias", "float32"
        )
        self.params = declare_ffn(self, block, config.d_ff, config.n_experts)
        self.shared = build_shared(config, block, self.constrain)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        token_mask: Bool[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        cache: SoftState | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], RoutingStats, SoftState | None]:
        """Returns the output, the routing statistics and, where a cache is given, the state after x."""
        del deterministic
        if not self.config.causal:
            y, stats = self._whole(x, token_mask)
        else:
            segment = positions // self.config.segment_length
            run = self._step if cache is not None and x.shape[1] == 1 else self._segments
            y, stats, cache = run(x, token_mask, segment_ids, segment, cache)
        y = self.constrain(jnp.where(token_mask[..., None], y, 0), ("batch", "length", "embed"))
        return add_shared(y, x, self.shared), stats, cache

    def _logits(self, summary: Float[Array, "*N D"]) -> Float[Array, "*N E"]:
        return self.router(summary) + self.bias

    def _merge(self, logits: Float[Array, "*N E"]) -> FFNParams:
        merged = merge(self.params, jax.nn.softmax(logits), self.block.compute_dtype)
        lead = ("batch", None)[: logits.ndim - 1]

        def pin(p: Array, axes: Axes) -> Array:
            return self.constrain(p, (*lead, *axes))

        return FFNParams(*(None if p is None else pin(p, axes) for p, axes in zip(merged, _AXES, strict=True)))

    def _apply(self, x: Float[Array, "*N W D"], merged: FFNParams) -> Float[Array, "*N W D"]:
        return apply_merged(x.astype(self.block.compute_dtype), merged, hidden_units(self.block))

    def _whole(self, x: Array, token_mask: Array) -> tuple[Array, RoutingStats]:
        tokens = jnp.sum(token_mask, axis=1, dtype=jnp.float32)
        total = jnp.einsum("BTD,BT->BD", x.astype(jnp.float32), token_mask.astype(jnp.float32))
        logits = self._logits(summarize(total, tokens, self.block.norm_eps))
        return self._apply(x, self._merge(logits)), _stats(logits, tokens)

    def _segments(
        self, x: Array, token_mask: Array, document: Array, segment: Array, state: SoftState | None
    ) -> tuple[Array, RoutingStats, SoftState | None]:
        """Any number of tokens; with a state, slot 0 continues its open segment."""
        config, length = self.config, x.shape[1]
        n_slots = segment_slots(config, length) + (state is not None)
        width = min(config.segment_length, length)
        opened = None if state is None else (state.document, state.segment)
        slots = assign_slots(document, segment, token_mask, opened, n_slots, width)
        source = slots.source.reshape(x.shape[0], -1)
        rows = jax.vmap(spread)(x, source, slots.place[..., None]).reshape(*slots.source.shape, -1)
        tokens = jnp.sum(slots.source < length, axis=-1, dtype=jnp.float32)
        opening = partial(_first, source=slots.source[..., 0])
        new, keys = _chain(jnp.sum(rows.astype(jnp.float32), 2), tokens, opening(document), opening(segment), state)
        logits = self._logits(_previous(*new, *keys, self.block.norm_eps))
        logits = logits if state is None else logits.at[:, 0].set(state.logits)
        merged = self._merge(logits) if state is None else self._merge_after(logits, state)
        y = self._apply(rows, merged)
        y = jax.vmap(collect)(y.reshape(*source.shape, -1), source, slots.place[..., None])
        y = jnp.where(slots.lost[..., None], jnp.nan, y)
        if state is not None:
            kept = jax.tree.map(partial(_at, slot=slots.last), (*new, logits, merged))
            state = SoftState(*kept, *_latest(token_mask, (document, segment), opened))
        return y, _stats(logits, tokens), state

    def _merge_after(self, logits: Array, state: SoftState) -> FFNParams:
        """Merged experts of all slots, where slot 0 keeps the one that serves the open segment."""
        later = self._merge(logits[:, 1:])
        return jax.tree.map(lambda first, rest: jnp.concatenate([first[:, None], rest], 1), state.merged, later)

    def _step(
        self, x: Array, token_mask: Array, document: Array, segment: Array, state: SoftState
    ) -> tuple[Array, RoutingStats, SoftState]:
        """One token a row; experts are merged again only where some row begins a segment."""
        mask, document, segment = token_mask[:, 0], document[:, 0], segment[:, 0]
        start = mask & ((document != state.document) | (segment != state.segment))
        follows = (document == state.document) & (segment == state.segment + 1)
        summary = summarize(state.sum, state.tokens, self.block.norm_eps)
        logits = self._logits(jnp.where(follows[:, None], summary, 0))
        logits = jnp.where(start[:, None], logits, state.logits)
        merged = jax.lax.cond(jnp.any(start), self._merge, lambda _: state.merged, logits)
        total = jnp.where(start[:, None], 0, state.sum) + jnp.where(mask[:, None], x[:, 0], 0)
        tokens = jnp.where(start, 0, state.tokens) + mask
        keep = lambda new, old: jnp.where(start, new, old)  # noqa: E731
        new = SoftState(total, tokens, logits, merged, keep(document, state.document), keep(segment, state.segment))
        return self._apply(x, merged), _stats(logits, mask.astype(jnp.float32)), new


def _first(values: Int[Array, "B T"], source: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """values[source], 0 where source is T."""
    return jnp.take_along_axis(jnp.pad(values, ((0, 0), (0, 1))), source, axis=1)


def _at(values: Array, slot: Int[Array, "B"]) -> Array:
    """values[b, slot[b]]; NaN for a slot that does not exist, so that what was lost stays lost."""
    index = slot.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1, mode="fill")[:, 0]


def _chain(
    total: Array, tokens: Array, document: Array, segment: Array, state: SoftState | None
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(sum, tokens) and (document, segment) of each slot; slot 0 goes on from the state."""
    if state is None:
        return (total, tokens), (document, segment)
    total, tokens = total.at[:, 0].add(state.sum), tokens.at[:, 0].add(state.tokens)
    return (total, tokens), (document.at[:, 0].set(state.document), segment.at[:, 0].set(state.segment))


def _latest(token_mask: Array, keys: tuple[Array, Array], opened: tuple[Array, Array]) -> tuple[Array, Array]:
    """The keys of each row's last real token; `opened` where there is none."""
    newest = jnp.max(jnp.where(token_mask, jnp.arange(1, token_mask.shape[1] + 1), 0), axis=1)
    padded = (jnp.concatenate([first[:, None], key], axis=1) for first, key in zip(opened, keys, strict=True))
    return tuple(jnp.take_along_axis(key, newest[:, None], axis=1)[:, 0] for key in padded)


def _previous(total: Array, tokens: Array, document: Array, segment: Array, eps: float) -> Float[Array, "B S D"]:
    """What routes each slot: the summary of the slot before it if that is its document's segment before, else 0."""
    follows = (document[:, 1:] == document[:, :-1]) & (segment[:, 1:] == segment[:, :-1] + 1)
    summary = jnp.where(follows[..., None], summarize(total, tokens, eps)[:, :-1], 0)
    return jnp.pad(summary, ((0, 0), (1, 0), (0, 0)))


def _stats(logits: Float[Array, "*N E"], tokens: Float[Array, "*N"]) -> RoutingStats:
    probs = jax.nn.softmax(logits)
    return routing_stats(logits, tokens, probs, probs)
