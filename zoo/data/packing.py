"""Windows of fixed length over a flat stream of tokens: index arithmetic, and the arrays of a batch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from zoo.data.cache import TokenCache

_BLOCK = 1 << 20  # documents that are looked at together


class Batch(NamedTuple):
    """Windows of T tokens, B of them, as a model takes them.

    Attributes:
        tokens: the tokenizer's padding where there is no text.
        labels: the token that follows in the same document, or -1 where there is none.
        positions: from 0 in each document, and at the start of the window; 0 for padding.
        segment_ids: 1, 2, ... for the documents of a window; 0 for padding.
    """

    tokens: Int32[np.ndarray | jax.Array, "B T"]
    labels: Int32[np.ndarray | jax.Array, "B T"]
    positions: Int32[np.ndarray | jax.Array, "B T"]
    segment_ids: Int32[np.ndarray | jax.Array, "B T"]


class Windows:
    """The windows of a token cache, in its order.

    Window i holds the tokens of the stream from its start to the start of window i + 1, which lies T further
    on, or earlier where the window would hold more than `max_documents` documents. The label of a window's
    last token is the first of the next window, so that every token of a document but its first is a label
    exactly once. The stream's last token, which has no label, makes no window of its own.
    """

    def __init__(self, cache: TokenCache, length: int, max_documents: int | None = None):
        """Finds where windows start, in time and memory of the documents that cut one short.

        Args:
            cache: the stream and its documents.
            length: T.
            max_documents: the most documents, or parts of documents, in one window; None for any number.
        """
        self.cache, self.length = cache, length
        self._starts, counts = _runs(cache.offsets, length, max_documents)
        self._first = np.cumsum(counts) - counts  # the first window of each run
        self._count = int(counts.sum())

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Sequence[int] | Int64[np.ndarray, "B"]) -> Batch:
        """The windows of these indices, one a row; an index past the last one is a row of padding."""
        windows = np.asarray(indices, np.int64)[:, None]
        stream, offsets = self.cache.tokens, self.cache.offsets
        start, stop = self._bounds(np.minimum(windows, max(len(self) - 1, 0)))
        at = start + np.arange(self.length)
        real = (windows < len(self)) & (at < np.minimum(start + self.length, stop))
        at = np.minimum(at, len(stream) - 1)
        document = np.searchsorted(offsets, at, "right") - 1
        labelled = real & (at + 1 < offsets[document + 1])
        return Batch(
            _int32(real, stream[at], self.cache.pad_id),
            _int32(labelled, stream[np.minimum(at + 1, len(stream) - 1)], -1),
            _int32(real, at - np.maximum(offsets[document], start), 0),
            _int32(real, document - document[:, :1] + 1, 0),
        )

    def _bounds(self, windows: Int64[np.ndarray, "B 1"]) -> tuple[Int64[np.ndarray, "B 1"], Int64[np.ndarray, "B 1"]]:
        """Where each window starts in the stream, and where the next one does."""
        return self._start(windows), self._start(windows + 1)

    def _start(self, windows: Int64[np.ndarray, "B 1"]) -> Int64[np.ndarray, "B 1"]:
        run = np.searchsorted(self._first, windows, "right") - 1
        start = self._starts[run] + (windows - self._first[run]) * self.length
        return np.minimum(start, len(self.cache.tokens))


class Truncated(Windows):
    """One window a document: its first `length` tokens, or all of them; what is beyond is left out.

    Of a document that is cut, the last label is the token behind the cut.
    """

    def __init__(self, cache: TokenCache, length: int):
        """Looks at nothing yet.

        Args:
            cache: the stream and its documents.
            length: T.
        """
        self.cache, self.length = cache, length

    def __len__(self) -> int:
        return len(self.cache.offsets) - 1

    def _bounds(self, windows: Int64[np.ndarray, "B 1"]) -> tuple[Int64[np.ndarray, "B 1"], Int64[np.ndarray, "B 1"]]:
        return self.cache.offsets[windows], self.cache.offsets[windows + 1]


def _int32(
    where: Bool[np.ndarray, "B T"], values: Integer[np.ndarray, "B T"], otherwise: int
) -> Int32[np.ndarray, "B T"]:
    # Converted first: among unsigned tokens, -1 would become 65535.
    return np.where(where, values.astype(np.int32), np.int32(otherwise))


def _runs(
    offsets: Int64[np.ndarray, "documents_and_1"], length: int, max_documents: int | None
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
    """Runs of windows that follow each other every `length` tokens: where each starts and how many it has."""
    starts, counts, start = [], [], 0
    for low, high, cut in _short(offsets, length, max_documents) if max_documents else ():
        steps = max(0, -((start - low) // length))
        if start + steps * length < high:  # a window starts where it would hold a document too many
            starts.append(start)
            counts.append(steps + 1)
            start = cut
    starts.append(start)
    counts.append(max(0, -((start - int(offsets[-1]) + 1) // length)))
    return np.array(starts, np.int64), np.array(counts, np.int64)


def _short(offsets: Int64[np.ndarray, "documents_and_1"], length: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(low, high, cut) of each document: a window that starts in [low, high) is full of documents at `cut`."""
    for first in range(0, len(offsets) - 1 - most, _BLOCK):
        block = offsets[first : first + _BLOCK + most]
        cut = block[most:-1] if first + _BLOCK + most >= len(offsets) else block[most:]
        low, high = block[: len(cut)], block[1 : len(cut) + 1]
        low = np.maximum(low, cut - length + 1)
        found = low < high
        yield from zip(low[found].tolist(), high[found].tolist(), cut[found].tolist(), strict=True)
