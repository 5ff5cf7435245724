"""The order of training batches, the validation set's batches, and caches that do not fit a model."""

import threading

import numpy as np
import pytest

from zoo.data.cache import TokenCache
from zoo.data.loader import PREFETCH, Batch, Loader, check_fits, evaluation_batches
from zoo.data.sources import DataError

V, T, B = 1000, 8, 4


def make_cache(documents=13, size=7):
    offsets = np.arange(documents + 1, dtype=np.int64) * size
    tokens = np.arange(documents * size).astype(np.uint16)
    return TokenCache(tokens, offsets, 1, None, V, 0, "the training text of a test", "digest")


CACHE = make_cache()  # 91 tokens: 12 windows of 8 at most


def loader(seed=0, **changes):
    return Loader(CACHE, T, B, seed, vocab_size=V, **changes)


def firsts(batches):
    """The first token of each row, which tells windows apart."""
    return np.concatenate([batch.tokens[:, 0] for batch in batches]).tolist()


def test_a_batch_is_int32_of_rows_and_windows():
    batch = loader().batch(0)
    assert isinstance(batch, Batch)
    assert all(leaf.shape == (B, T) and leaf.dtype == np.int32 for leaf in batch)


def test_each_epoch_holds_every_window_once_in_another_order():
    count = len(loader().windows[0])
    assert count == 12 and count % B == 0
    everything = firsts([loader().windows[0].batch(range(count))])
    orders = [firsts(loader().batch(epoch * 3 + step) for step in range(3)) for epoch in range(5)]
    assert all(sorted(order) == everything for order in orders)
    assert len(set(map(tuple, orders))) == 5


def test_an_epoch_predicts_every_token_but_the_first_of_a_document_once():
    labels = np.concatenate([loader().batch(step).labels for step in range(3)])
    assert sorted(labels[labels >= 0].tolist()) == [token for token in range(91) if token % 7]


def test_epochs_need_not_end_with_a_batch():
    uneven = Loader(CACHE, T, 5, 0, vocab_size=V)
    order = firsts(uneven.batch(step) for step in range(12))
    epochs = [tuple(order[start : start + 12]) for start in range(0, 60, 12)]
    assert len(set(epochs)) == 5 and all(len(set(epoch)) == 12 for epoch in epochs)


def test_the_order_is_a_function_of_the_seed_alone():
    def order(seed):
        return firsts(loader(seed).batch(step) for step in range(9))

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in (0, 1, 2, 3, 2**40)}) == 5
    # Not the order of the next seed, one epoch later.
    assert order(0)[12:24] != order(1)[:12]


@pytest.mark.parametrize("first", [0, 1, 7, 10**9])
def test_resuming_is_a_seek(first):
    batches = loader().iterate(first)
    for step in range(first, first + 5):
        np.testing.assert_array_equal(next(batches), loader().batch(step))
    batches.close()


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_together_read_the_batches_of_one(hosts):
    rows = [slice(host * B // hosts, (host + 1) * B // hosts) for host in range(hosts)]
    parts = [loader(rows=part).iterate(2) for part in rows]
    for step in range(2, 8):
        together = np.concatenate([np.stack(next(part)) for part in parts], axis=1)
        np.testing.assert_array_equal(together, loader().batch(step))
    for part in parts:
        part.close()


def test_batches_are_made_ahead_and_closing_ends_that(monkeypatch):
    source, made, ahead = loader(), [], threading.Event()
    batch = source.batch(0)

    def note(indices):
        made.append(indices)
        if len(made) > PREFETCH:
            ahead.set()
        return batch

    monkeypatch.setattr(source.windows[0], "batch", note)
    batches = source.iterate(0)
    next(batches)
    assert ahead.wait(20)
    batches.close()
    settled = len(made)
    assert settled <= PREFETCH + 2
    assert next(batches, None) is None and len(made) == settled


def test_documents_in_a_window_are_bounded_in_training_and_evaluation():
    assert max(loader(max_documents=1).batch(step).segment_ids.max() for step in range(9)) == 1
    batches = evaluation_batches(CACHE, T, B, vocab_size=V, max_documents=1)
    assert max(batch.segment_ids.max() for batch in batches) == 1


@pytest.mark.parametrize("size", [1, 3, 5, 12, 50])
def test_evaluation_sees_every_window_once_in_order_for_any_batch_size(size):
    batches = list(evaluation_batches(CACHE, T, size, vocab_size=V))
    assert all(leaf.shape == (size, T) for batch in batches for leaf in batch)
    whole = np.concatenate([np.stack(batch) for batch in batches], axis=1)
    np.testing.assert_array_equal(whole[:, :12], loader().windows[0].batch(range(12)))
    padding = Batch(*whole[:, 12:])
    assert (padding.labels == -1).all() and not padding.segment_ids.any()


def test_evaluation_rows_of_hosts_make_up_the_batches_of_one():
    whole = list(evaluation_batches(CACHE, T, B, vocab_size=V))
    halves = [list(evaluation_batches(CACHE, T, B, vocab_size=V, rows=rows)) for rows in (slice(0, 2), slice(2, 4))]
    for one, *parts in zip(whole, *halves, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), one)


USES = [
    check_fits,
    lambda cache, length, vocab_size: Loader(cache, length, B, 0, vocab_size=vocab_size),
    lambda cache, length, vocab_size: evaluation_batches(cache, length, B, vocab_size=vocab_size),
]


@pytest.mark.parametrize("use", USES)
def test_what_does_not_fit_is_named_before_the_first_batch(use):
    use(CACHE, 90, V)
    with pytest.raises(DataError, match=r"the training text of a test has 91 tokens.* 92 .*model\.context_length=91"):
        use(CACHE, 91, V)
    with pytest.raises(DataError, match=r"model\.vocab_size=999 is less than the 1000 ids"):
        use(CACHE, T, V - 1)
