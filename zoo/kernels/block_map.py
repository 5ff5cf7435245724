"""Which blocks of keys a block of queries has to visit: all that a kernel knows of where a mask is empty.

The lists follow the live blocks, so memory and time do too. Where positions and documents are data they are made by
the program, from the bounds of each block; where they are not, by NumPy, once.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from zoo.kernels.masks import Block, Mask, Span


class Lists(NamedTuple):
    """For each of n blocks, those it meets; b is 1 where all rows of the batch share them, else B.

    Attributes:
        index: [b, n, m] int32, first those of which every pair is allowed, then those of which some are, then
            repeats of the last one (0 where there is none).
        full: [b, n] int32, how many are of the first kind.
        live: [b, n] int32, how many are of the first two kinds.
    """

    index: Any
    full: Any
    live: Any


class BlockMap(NamedTuple):
    """The live blocks of a mask, by query blocks and, for gradients of keys and values, by key blocks."""

    by_query: Lists
    by_key: Lists


class Places(NamedTuple):
    """Where queries and keys stand, int32.

    Attributes:
        q_positions, q_segment_ids: [B, T].
        kv_positions, kv_segment_ids: [B, S]; segment ids below 1 are no segment.
    """

    q_positions: Int[Array, "B T"]
    kv_positions: Int[Array, "B S"]
    q_segment_ids: Int[Array, "B T"]
    kv_segment_ids: Int[Array, "B S"]


@lru_cache(maxsize=256)
def static_block_map(mask: Mask, n_queries: int, n_keys: int, offset: int, q_block: int, kv_block: int) -> BlockMap:
    """The map of queries at positions `offset`, `offset` + 1, ... and keys at 0, 1, ..., as NumPy arrays.

    A block that reaches behind the last query or key is never `full`.
    """
    starts = np.arange(0, n_queries, q_block)
    keys = _spans(np.arange(0, n_keys, kv_block), kv_block, n_keys)
    whole_keys = keys.last - keys.first == kv_block - 1
    where, full = [], []
    for row, start in enumerate(starts):  # a row at a time, so that memory follows the live blocks
        queries = _spans(np.array([start]), q_block, n_queries)
        some, every = mask.classify(Span(queries.first + offset, queries.last + offset), keys)
        (live,) = np.nonzero(np.broadcast_to(some, keys.first.shape))
        whole = whole_keys & (queries.last - queries.first == q_block - 1)
        where.append(np.stack([np.full_like(live, row), live]))
        full.append(np.broadcast_to(every & whole, keys.first.shape)[live])
    (row, column), every = np.concatenate(where, 1), np.concatenate(full)
    n, m = len(starts), len(keys.first)
    return BlockMap(_static_lists(row, column, every, n), _static_lists(column, row, every, m))


def _spans(starts: Any, size: int, end: int) -> Span:
    return Span(starts, np.minimum(starts + size, end) - 1)


def _static_lists(row: np.ndarray, column: np.ndarray, every: np.ndarray, rows: int) -> Lists:
    """Lists from the live pairs of blocks."""
    order = np.lexsort((column, ~every, row))
    row, column, every = row[order], column[order], every[order]
    live = np.bincount(row, minlength=rows)
    place = np.arange(len(row)) - (np.cumsum(live) - live)[row]
    width = max(1, live.max(initial=0))
    index = np.zeros((rows, width), np.int32)
    index[row, place] = column
    index = np.take_along_axis(index, np.minimum(np.arange(width), np.maximum(live - 1, 0)[:, None]), 1)
    full = np.bincount(row[every], minlength=rows)
    return Lists(index[None], full[None].astype(np.int32), live[None].astype(np.int32))


def block_map(mask: Mask, places: Places, q_block: int, kv_block: int) -> BlockMap:
    """The map of any positions and documents, by the bounds of each block: a row of it for each row of the batch."""
    q_at, q_documents = _bounds(places.q_positions, places.q_segment_ids, q_block)
    k_at, k_documents = _bounds(places.kv_positions, places.kv_segment_ids, kv_block)
    q_at, q_documents = _expanded((q_at, q_documents), -1)
    k_at, k_documents = _expanded((k_at, k_documents), -2)
    meet = (q_documents.first <= k_documents.last) & (k_documents.first <= q_documents.last)
    meet &= (q_documents.last > 0) & (k_documents.last > 0)
    one = (q_documents.first == k_documents.last) & (q_documents.last == k_documents.first)
    one &= (q_documents.first > 0) & (k_documents.first > 0)
    block = mask.classify(q_at, k_at)
    some, every = block.some & meet, block.every & meet & one
    return BlockMap(_lists(Block(some, every)), _lists(Block(some.mT, every.mT)))


def _bounds(positions: Array, segment_ids: Array, size: int) -> tuple[Span, Span]:
    """Least and greatest position of what is in a segment, and segment id, of every block: [B, n].

    A block that reaches behind the end has slots of no segment there; one without any segment has none to meet.
    """
    rest = -positions.shape[1] % size
    shape = (len(positions), -1, size)
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, rest))).reshape(shape)
    positions = jnp.pad(positions, ((0, 0), (0, rest))).reshape(shape)
    real, far = segment_ids > 0, jnp.iinfo(jnp.int32).max // 4
    first = jnp.where(real, positions, far).min(-1)
    last = jnp.where(real, positions, -far).max(-1)
    empty = ~real.any(-1)
    at = Span(jnp.where(empty, 0, first), jnp.where(empty, 0, last))
    return at, Span(jnp.where(real, segment_ids, 0).min(-1), jnp.where(real, segment_ids, 0).max(-1))


def _expanded(spans: tuple[Span, ...], axis: int) -> tuple[Span, ...]:
    return tuple(Span(*(jnp.expand_dims(bound, axis) for bound in span)) for span in spans)


def _lists(blocks: Block) -> Lists:
    """Lists from dense bools [B, n, m]: a stable sort by kind."""
    kind = jnp.where(blocks.every, 0, jnp.where(blocks.some, 1, 2)).astype(jnp.int32)
    index = jnp.argsort(kind, axis=-1, stable=True).astype(jnp.int32)
    full, live = blocks.every.sum(-1, dtype=jnp.int32), (kind < 2).sum(-1, dtype=jnp.int32)
    last = jnp.minimum(jnp.arange(index.shape[-1]), jnp.maximum(live - 1, 0)[..., None])
    return Lists(jnp.take_along_axis(index, last, axis=-1), full, live)
