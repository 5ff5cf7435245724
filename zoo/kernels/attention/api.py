"""Scaled dot-product attention with grouped key and value heads."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.kernels.attention.checks import check_arrays, check_numbers, check_shapes
from zoo.kernels.attention.dispatch import WAYS, choose
from zoo.kernels.attention.problem import Operands, Settings
from zoo.kernels.attention.vjp import Runner, attend
from zoo.kernels.block_map import Places
from zoo.kernels.masks import ByHead, Full, Mask, head_masks
from zoo.kernels.target import target

# The signature of `attention`: what Attention calls, and what parallel/ or describe/ may replace.
Attend = Callable[..., Any]
HERE = Runner()


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K d"],
    *,
    mask: Mask | ByHead,
    q_positions: Int[Array, "B T"] | None = None,
    kv_positions: Int[Array, "B S"] | None = None,
    q_offset: int = 0,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    lengths: Int[Array, "B"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[Array, "H"] | None = None,
    bias: Float[Array, "#B #H #T #S"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    backward: str = "auto",
    blocks: tuple[int, int] | None = None,
    runner: Runner = HERE,
) -> Float[Array, "B T H d"] | tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """softmax(scale q k^T) v over the keys that the mask allows within the query's own segment.

    Query head i reads key and value head i // (H / K). A query of no segment, or one that sees no key, gives 0,
    gradients of 0, and the log sum -inf. Scores and softmax are float32 (float64 for float64 inputs); the result has
    v's dtype. In this order: scale, softcap, ALiBi, bias, mask, softmax, dropout.

    Args:
        mask: compares positions; of all heads, or one for each of several equal groups of query heads.
        q_positions, kv_positions: positions inside a document. Without them queries stand at `q_offset`,
            `q_offset` + 1, ... and keys at 0, 1, ...
        q_segment_ids, kv_segment_ids: documents; an id below 1 is padding or an empty slot of a cache.
        lengths: keys of each row; those behind are as padding.
        scale: of the products; None for 1 / sqrt(h).
        softcap: c, scores become c tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).
        alibi_slopes: slope times the distance of a key is taken off its score (arXiv 2108.12409, section 3).
        bias: added to the scores.
        sinks: a score per query head that is in the softmax's sum and has no value (gpt-oss, arXiv 2508.10925).
        dropout_rate: share of the weights that are dropped, the others divided by what is left; needs a key.
        return_lse: return (out, lse) with the log of the sum of the exponentials of each row's scores, sinks included.
        backend, backward: names in dispatch.BACKENDS for the two directions; "auto" takes what the device does best.
        blocks: (queries, keys) of a block; None for those of the tables.
        runner: runs the backends; that of parallel.attention does so on a mesh.

    Raises:
        ValueError: shapes do not fit, there is a rate of dropout without a key, or the backend cannot do it.

    Source: arXiv 1706.03762, equation 1; grouped heads, arXiv 2305.13245.
    """
    check_arrays(q, k, v, head_masks(mask))
    check_shapes(
        q,
        k,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        lengths=lengths,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        bias=bias,
    )
    check_numbers(softcap, dropout_rate, blocks)
    places = _places(q, k, (q_positions, kv_positions), (q_segment_ids, kv_segment_ids), q_offset, lengths)
    segmented = q_segment_ids is not None or lengths is not None
    if segmented:
        q = _without_padding(q, places.q_segment_ids)
        k, v = (_without_padding(x, places.kv_segment_ids) for x in (k, v))
    slopes = None if alibi_slopes is None else jnp.broadcast_to(alibi_slopes, (len(q), q.shape[2]))
    seeds = _seeds(dropout_rate, dropout_key, (len(q), q.shape[2]))
    operands = Operands(q, k, v, places, slopes, bias, seeds)
    settings = Settings(
        q.shape[-1] ** -0.5 if scale is None else scale,
        Full(),
        softcap=softcap,
        dropout_rate=dropout_rate,
        offset=q_offset if q_positions is None else None,
        segmented=segmented,
        log_sums=return_lse or sinks is not None,
        forward=backend,
        backward=backward,
        blocks=blocks,
    )
    out, lse = _over_groups(operands, settings, mask, runner)
    out, lse = (out, lse) if sinks is None else _with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def explain(q: Any, k: Any, v: Any, *, backend: str = "auto", backward: str = "auto", **settings: Any) -> str:
    """Which backends `attention` takes for these arguments on the devices at hand, and why not the ones before them.

    Args:
        q, k, v: arrays, or anything with shape and dtype such as jax.ShapeDtypeStruct.
        settings: the other arguments of `attention`.
    """
    recorder = _Recorder([])
    jax.eval_shape(lambda *arrays: attention(*arrays, **settings, runner=recorder), q, k, v)
    lines = [f"attention on {target().kind}:"]
    for way, name in zip(WAYS, (backend, backward), strict=True):
        asked = [(own, replace(found, forward=backend, backward=backward)) for own, found in recorder.seen]
        choices = [choose(name, *each, way) for each in asked]
        lines.append(f"  {way}: {', '.join(dict.fromkeys(choice.name for choice in choices))}")
        refused = {other: why for choice in choices for other, why in choice.refused.items()}
        lines += [f"    not {other}: {why}" for other, why in refused.items()]
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class _Recorder(Runner):
    """Computes nothing, and keeps what it was asked for."""

    seen: list[tuple[Operands, Settings]]

    def forward(self, operands: Operands, settings: Settings) -> tuple[Array, Array]:
        self.seen.append((operands, settings))
        (B, T, H), d = operands.q.shape[:3], operands.v.shape[3]
        return jnp.zeros((B, T, H, d), operands.v.dtype), jnp.zeros(
            (B, H, T), jnp.promote_types(operands.q.dtype, "f4")
        )


def _over_groups(operands: Operands, settings: Settings, mask: Mask | ByHead, runner: Runner) -> Any:
    """Output and log sums, where groups of heads may have masks of their own."""
    masks, names = head_masks(mask), (settings.forward, settings.backward)
    parts = []
    for g, mask in enumerate(masks):
        own, asked = _heads(operands, g, len(masks)), replace(settings, mask=mask)
        forward, backward = (choose(name, own, asked, way) for name, way in zip(names, WAYS, strict=True))
        parts.append(attend(own, replace(asked, forward=forward.name, backward=backward.name), runner))
    if len(parts) == 1:
        return parts[0]
    outs, sums = zip(*parts, strict=True)
    return jnp.concatenate(outs, 2), jnp.concatenate(sums, 1)


def _heads(operands: Operands, group: int, n: int) -> Operands:
    """What belongs to a group, of n, of the query heads; key heads of which a group has a part go to each."""
    if n == 1:
        return operands
    H, K = operands.q.shape[2], operands.k.shape[2]
    own = slice(group * H // n, (group + 1) * H // n)
    of_keys = slice(group * K // n, -(-(group + 1) * K // n))
    pick = lambda x: None if x is None else x[:, own]  # noqa: E731
    return operands._replace(
        q=operands.q[:, :, own],
        k=operands.k[:, :, of_keys],
        v=operands.v[:, :, of_keys],
        slopes=pick(operands.slopes),
        bias=operands.bias if operands.bias is None or operands.bias.shape[1] == 1 else operands.bias[:, own],
        seeds=pick(operands.seeds),
    )


def _with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """Both with a sink in every row's sum, which takes exp(sink) of it and gives nothing."""
    sinks = sinks.astype(lse.dtype)[:, None]
    share = jax.nn.sigmoid(lse - sinks)
    seen = lse > -jnp.inf
    total = jnp.where(seen, jnp.logaddexp(jnp.where(seen, lse, 0), sinks), -jnp.inf)
    return (out * share.mT[..., None]).astype(out.dtype), total


def _places(
    q: Array, k: Array, positions: tuple[Any, Any], segment_ids: tuple[Any, Any], offset: Any, lengths: Array | None
) -> Places:
    """Positions and segment ids of all tokens; without any, they are one document in order."""
    T, S = q.shape[1], k.shape[1]
    found = [offset + jnp.arange(T), jnp.arange(S)] if positions[0] is None else list(positions)
    found += [jnp.ones(T, jnp.int32), jnp.ones(S, jnp.int32)] if segment_ids[0] is None else segment_ids
    places = Places(*(jnp.broadcast_to(x, (len(q), x.shape[-1])).astype(jnp.int32) for x in found))
    if lengths is None:
        return places
    return places._replace(kv_segment_ids=jnp.where(jnp.arange(S) < lengths[:, None], places.kv_segment_ids, 0))


def _without_padding(x: Array, segment_ids: Array) -> Array:
    return jnp.where((segment_ids > 0)[..., None, None], x, 0)


def _seeds(rate: float, key: Array | None, shape: tuple[int, int]) -> Array | None:
    if rate == 0:
        return None
    if key is None:
        raise ValueError(f"attention: dropout_rate={rate} needs a dropout_key")
    return jax.random.bits(key, shape, jnp.uint32)
