"""What every backend of attention is given, and the arithmetic of one score that all of them share.

These functions trace inside kernels: they see blocks of any shape, and no whole array.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from zoo.kernels.block_map import BlockMap, Places, block_map, static_block_map
from zoo.kernels.masks import Mask, mixed

# What a running maximum starts from: finite, so that no difference of two is NaN.
LOWEST = -0.7 * float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Settings:
    """What is known of a problem before its arrays are.

    Attributes:
        scale: of the products.
        mask: of every head.
        softcap: c of c tanh(score / c), or None.
        dropout_rate: share of the weights dropped.
        offset: queries stand at offset, offset + 1, ... and keys at 0, 1, ...; None where positions are data.
        segmented: whether some token may be in a segment of its own, or in none.
        log_sums: whether anything but the gradient reads the log sums.
        forward, backward: names of the backends.
        blocks: (queries, keys) of a block, or None for what the tables say.
    """

    scale: float
    mask: Mask
    softcap: float | None = None
    dropout_rate: float = 0.0
    offset: int | None = 0
    segmented: bool = False
    log_sums: bool = True
    forward: str = "auto"
    backward: str = "auto"
    blocks: tuple[int, int] | None = None


class Operands(NamedTuple):
    """The arrays of a problem, all with a leading batch.

    Queries and keys of no segment (id below 1) are zero, so that no NaN of padding gets into a product.

    Attributes:
        q: [B, T, H, h].
        k: [B, S, K, h]; query head i reads key and value head i // (H / K).
        v: [B, S, K, d].
        places: positions and segment ids.
        slopes: [B, H] float32, ALiBi's, or None.
        bias: added to the scores, [B, H, T, S] with 1 for any of them, or None.
        seeds: [B, H] of dropout, or None.
    """

    q: Float[Array, "B T H h"]
    k: Float[Array, "B S K h"]
    v: Float[Array, "B S K d"]
    places: Places
    slopes: Float[Array, "B H"] | None = None
    bias: Float[Array, "..."] | None = None
    seeds: UInt32[Array, "B H"] | None = None


class PagedOperands(NamedTuple):
    """The arrays of a decoding step: one query a row, and keys and values in pages that lie anywhere.

    Attributes:
        q: [B, H, h].
        k_pages: [P, page, K, h]; query head i reads key and value head i // (H / K).
        v_pages: [P, page, K, d].
        page_table: [B, n] int32; slot t of a row lies in its page t // page, at t mod page.
        lengths: [B] int32, tokens of each row, the query's own included; pages and slots behind may hold anything.
        slopes: [H] float32, ALiBi's, or None.
    """

    q: Float[Array, "B H h"]
    k_pages: Float[Array, "P page K h"]
    v_pages: Float[Array, "P page K d"]
    page_table: Int[Array, "B n"]
    lengths: Int[Array, "B"]
    slopes: Float[Array, "H"] | None = None


class Gradients(NamedTuple):
    """The gradients of what of `Operands` has any, in their dtypes; None where there is no such operand."""

    q: Any
    k: Any
    v: Any
    slopes: Any = None
    bias: Any = None


def map_of(operands: Operands, settings: Settings, q_block: int, kv_block: int) -> BlockMap:
    """The live blocks of a problem."""
    if settings.offset is None or settings.segmented:
        return block_map(settings.mask, operands.places, q_block, kv_block)
    T, S = operands.q.shape[1], operands.k.shape[1]
    return static_block_map(settings.mask, T, S, settings.offset, q_block, kv_block)


def row_delta(out: Array, d_out: Array, d_lse: Array) -> Float[Array, "B H T"]:
    """What is taken off the gradient of every weight of a row: sum(out d_out) - d_lse."""
    dtype = jnp.promote_types(out.dtype, jnp.float32)
    return jnp.einsum("BTHd,BTHd->BHT", out.astype(dtype), d_out.astype(dtype)) - d_lse


def scores_of(
    products: Float[Array, "..."], distance: Any, slope: Any, bias: Any, settings: Settings
) -> Float[Array, "..."]:
    """What the softmax sees, from q k^T in float32: scale, softcap, ALiBi, bias. All shapes broadcast.

    Args:
        distance: query's position minus key's, where there is a slope.
    """
    scores = products * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * jnp.tanh(scores / settings.softcap)
    if slope is not None:
        scores = scores - slope * distance.astype(scores.dtype)
    return scores if bias is None else scores + bias.astype(scores.dtype)


def product_gradient(d_scores: Any, products: Any, settings: Settings) -> Any:
    """The gradient of the products from that of the scores."""
    if settings.softcap is not None:
        capped = jnp.tanh(products * (settings.scale / settings.softcap))
        d_scores = d_scores * (1 - capped * capped)
    return d_scores * settings.scale


def visible(mask: Mask, q_at: Any, k_at: Any, q_segments: Any, k_segments: Any) -> Bool[Array, "..."]:
    """Which pairs a partial block has: what the mask allows, within one segment. Shapes broadcast."""
    return mask.allows(q_at, k_at) & (q_segments == k_segments) & (q_segments > 0)


def kept(seed: Any, row: Int[Array, "..."], column: Int[Array, "..."], rate: float) -> Float[Array, "..."]:
    """The factor of dropout of a weight: 0, or 1 / (1 - rate).

    A function of the seed of batch row and head, and of the indices of query and key, so it does not depend on how
    a kernel cuts its blocks.
    """
    row = mixed(row.astype(jnp.uint32) ^ seed.astype(jnp.uint32))
    bits = mixed(row ^ (column.astype(jnp.uint32) * np.uint32(0x9E3779B1)))
    # 24 bits, which float32 holds exactly; unsigned numbers have no conversion on every device.
    share = (bits >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * 2.0**-24
    return jnp.where(share >= rate, jnp.float32(1 / (1 - rate)), jnp.float32(0))
