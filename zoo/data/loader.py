"""Batches in training order, ahead of their use; and the validation set in its own order."""

import sys
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from zoo.data.cache import TokenCache
from zoo.data.errors import DataError
from zoo.data.packing import Batch, Truncated, Windows

PREFETCH = 4  # batches made ahead of the one in use

_ALL = slice(None)


class Loader:
    """The training batches: row j of the batch of step s is window number s * B + j of an endless order.

    The order is a function of the seed alone, the same for any number of processes: one permutation of all
    windows after another, each a new one. Several sources with weights have an order each, and take turns in exact
    proportion. So a step is found without the steps before it.
    """

    def __init__(
        self,
        cache: TokenCache,
        length: int,
        batch_size: int,
        seed: int,
        *,
        vocab_size: int,
        max_documents: int | None = None,
        weights: Sequence[float] = (),
        truncated: bool = False,
        rows: slice = _ALL,
    ):
        """Raises DataError as `check_fits` does, of every source.

        Args:
            cache: the tokens.
            length: T, tokens of a window.
            batch_size: B, over all processes.
            seed: of the order, at least 0.
            vocab_size: of the model.
            max_documents: the most documents in a window; None for any number.
            weights: of the cache's sources, how often a window is theirs; empty for all windows alike.
            truncated: one document a window, cut at T, instead of documents one after another.
            rows: those of this process.
        """
        sources = cache.by_source() if weights else [cache]
        for source in sources:
            check_fits(source, 0 if truncated else length, vocab_size)
        cut = (lambda c: Truncated(c, length)) if truncated else (lambda c: Windows(c, length, max_documents))
        self.windows = [cut(source) for source in sources]
        self._batch_size = batch_size
        self._rows = range(batch_size)[rows]
        self._order = _order([len(windows) for windows in self.windows], weights, seed)

    def batch(self, step: int) -> Batch:
        """This process's rows of the batch of `step`."""
        places = [self._order[step * self._batch_size + row] for row in self._rows]
        if len(self.windows) == 1:
            return self.windows[0].batch([index for _, index in places])
        each = [self.windows[source].batch([index]) for source, index in places]
        return Batch(*(np.concatenate(column) for column in zip(*each, strict=True)))

    def iterate(self, first_step: int) -> Iterator[Batch]:
        """The batches from `first_step` on, made in the background; closing the iterator ends that."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
        steps = iter(grain.MapDataset.range(first_step, sys.maxsize).map(self.batch).to_iter_dataset(options))
        try:
            yield from steps
        finally:
            steps.close()


def _order(sizes: Sequence[int], weights: Sequence[float], seed: int) -> grain.MapDataset:
    """n -> (source, window): each source shuffled anew for every pass; sources in proportion to their weights."""

    def passes(source: int) -> grain.MapDataset:
        # Seeds of their own, so that a source of one run never has the order of another source of the next.
        own = seed if source == 0 else int(np.random.SeedSequence([seed, source]).generate_state(1)[0])
        windows = grain.MapDataset.range(sizes[source]).seed(own).shuffle().repeat()
        return windows.map(lambda index: (source, index))

    if len(sizes) == 1:
        return passes(0)
    return grain.MapDataset.mix([passes(source) for source in range(len(sizes))], weights)


def evaluation_batches(
    cache: TokenCache,
    length: int,
    batch_size: int,
    *,
    vocab_size: int,
    max_documents: int | None = None,
    rows: slice = _ALL,
) -> Iterator[Batch]:
    """All windows in order, this process's `rows` of each batch; the last batch is filled up with padding.

    All of the text, of every source, whatever training makes of it. Arguments are those of `Loader`, which it raises
    the errors of, before the first batch is asked for.
    """
    check_fits(cache, length, vocab_size)
    windows = Windows(cache, length, max_documents)
    starts = range(0, len(windows), batch_size)
    return (windows.batch(np.arange(start, start + batch_size)[rows]) for start in starts)


def check_fits(cache: TokenCache, length: int, vocab_size: int) -> None:
    """Checks a cache against a model.

    Raises:
        DataError: the text is shorter than one window and its last label, or holds ids the model lacks.
    """
    if len(cache.tokens) <= length:
        raise DataError(
            f"{cache.label} has {len(cache.tokens)} tokens, fewer than the {length + 1} that one window of "
            f"model.context_length={length} needs; give more text, a shorter context or another "
            f"data.validation_fraction"
        )
    if cache.vocab_size > vocab_size:
        raise DataError(
            f"model.vocab_size={vocab_size} is less than the {cache.vocab_size} ids of the tokenizer of "
            f"{cache.label}; leave it unset, or set it to at least {cache.vocab_size}"
        )
