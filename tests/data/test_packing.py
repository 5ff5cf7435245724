"""Windows: against a packer that walks the stream token by token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.data import packing
from zoo.data.cache import TokenCache
from zoo.data.packing import Windows

PAD = 7


def make_cache(lengths, dtype=np.uint16):
    """Documents of these lengths; every token of the stream has another id."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(100, 100 + offsets[-1]).astype(dtype)
    return TokenCache(tokens, offsets, 1, None, 100 + len(tokens), PAD, "the text", "digest")


def pack(lengths, length, most):
    """The windows by definition, as lists of (token, label, position, segment)."""
    stream = [(document, place) for document, n in enumerate(lengths) for place in range(n)]
    windows, at = [], 0
    while at < len(stream) - 1:
        window, first, seen = [], stream[at][0], 0
        while at < len(stream) and len(window) < length:
            document, place = stream[at]
            if most is not None and document - first >= most:
                break
            seen = 0 if window and place == 0 else seen
            label = 100 + at + 1 if place + 1 < lengths[document] else -1
            window.append((100 + at, label, seen, document - first + 1))
            at, seen = at + 1, seen + 1
        windows.append(window + [(PAD, -1, 0, 0)] * (length - len(window)))
    return windows


lengths_strategy = st.lists(st.one_of(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=25)


@settings(max_examples=400, deadline=None)
@given(lengths=lengths_strategy, length=st.integers(1, 17), most=st.one_of(st.none(), st.integers(1, 5)))
def test_windows_equal_those_of_a_walk_over_the_stream(lengths, length, most):
    windows = Windows(make_cache(lengths), length, most)
    expected = np.array(pack(lengths, length, most)).reshape(-1, length, 4)
    batch = windows.batch(range(len(windows)))
    assert len(windows) == len(expected)
    np.testing.assert_array_equal(np.stack(batch, axis=-1), expected)
    assert all(leaf.dtype == np.int32 for leaf in batch)


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_strategy, length=st.integers(1, 17), most=st.one_of(st.none(), st.integers(1, 5)))
def test_every_token_but_the_first_of_a_document_is_predicted_exactly_once(lengths, length, most):
    cache = make_cache(lengths)
    windows = Windows(cache, length, most)
    labels = windows.batch(range(len(windows))).labels
    firsts = cache.tokens[cache.offsets[:-1]]
    np.testing.assert_array_equal(np.sort(labels[labels >= 0]), np.setdiff1d(cache.tokens, firsts))


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_strategy, length=st.integers(1, 17), most=st.integers(1, 5))
def test_a_window_holds_at_most_so_many_documents(lengths, length, most):
    windows = Windows(make_cache(lengths), length, most)
    assert windows.batch(range(len(windows))).segment_ids.max(initial=0) <= most


def test_a_label_may_be_the_first_token_of_the_next_window_but_of_no_other_document():
    batch = Windows(make_cache([6, 3]), 4).batch([0, 1, 2])
    assert batch.tokens.tolist() == [[100, 101, 102, 103], [104, 105, 106, 107], [PAD] * 4]
    assert batch.labels.tolist() == [[101, 102, 103, 104], [105, -1, 107, 108], [-1] * 4]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0] * 4]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [0] * 4]


def test_the_last_window_is_padded():
    batch = Windows(make_cache([6]), 4).batch([1])
    assert batch.tokens.tolist() == [[104, 105, PAD, PAD]]
    assert batch.labels.tolist() == [[105, -1, -1, -1]]
    assert batch.segment_ids.tolist() == [[1, 1, 0, 0]]


def test_an_index_past_the_end_is_a_row_of_padding():
    windows = Windows(make_cache([6, 3]), 4, 1)
    batch = windows.batch([len(windows), 10**6])
    assert (batch.tokens == PAD).all() and (batch.labels == -1).all()
    assert not batch.positions.any() and not batch.segment_ids.any()


def test_documents_are_searched_in_blocks_with_the_same_result(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 9, 200).tolist()
    whole = Windows(make_cache(lengths), 12, 3)
    expected = whole.batch(range(len(whole)))
    for block in (1, 2, 7, 199, 200, 201):
        monkeypatch.setattr(packing, "_BLOCK", block)
        windows = Windows(make_cache(lengths), 12, 3)
        assert len(windows) == len(whole)
        np.testing.assert_array_equal(windows.batch(range(len(windows))), expected)


def test_a_stream_of_ten_million_windows_needs_no_memory_a_window():
    class Stream:
        def __len__(self):
            return 10**10

        def __getitem__(self, at):
            return (at % 1000).astype(np.uint16)

    offsets = np.array([0, 5 * 10**9, 10**10], np.int64)
    windows = Windows(TokenCache(Stream(), offsets, 1, None, 1000, PAD, "the text", "digest"), 1000, 1)
    assert len(windows) == 10**7
    batch = windows.batch([0, 5 * 10**6, 10**7 - 1])
    assert batch.tokens[:, 0].tolist() == [0, 0, 0] and batch.labels[2, -2:].tolist() == [999, -1]


def test_ids_beyond_sixteen_bits_stay_whole():
    cache = make_cache([5], np.uint32)
    batch = Windows(cache._replace(tokens=cache.tokens + np.uint32(1 << 17)), 4).batch([0])
    assert batch.tokens[0, 0] == 100 + (1 << 17) and batch.labels[0, 0] == 101 + (1 << 17)
