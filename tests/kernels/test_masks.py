"""Masks answer alike pair by pair and block by block, and maps of live blocks follow them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.kernels.block_map import Places, block_map, static_block_map
from zoo.kernels.masks import (
    Causal,
    Chunked,
    Dilated,
    Full,
    Global,
    Prefix,
    RandomBlocks,
    Shifted,
    Summary,
    Window,
    big_bird,
    dense,
    longformer,
    picture,
)

MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal(5),
    "both sides": Window(3, 4),
    "shifted": Shifted(Causal(), 3),
    "dilated": Dilated(3),
    "strided": Causal() & (Window(3, 0) | Dilated(4)),
    "fixed": Causal() & (Chunked(8) | Summary(8, 2)),
    "prefix": Causal() | Prefix(5),
    "global": Global(3),
    "random": RandomBlocks(4, 2, seed=5),
    "not": ~Causal(3),
    "longformer": longformer(4, 2),
    "dilated heads": longformer(4, 2, (1, 3)).masks[1],
    "big bird": big_bird(4, 2).masks[1],
}


def blocks_of(pairs, rows, columns):
    """(row, column) -> the pairs of that block."""
    n, m = (-(-size // block) for size, block in zip(pairs.shape, (rows, columns), strict=True))
    cut = lambda i, j: pairs[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]  # noqa: E731
    return {(i, j): cut(i, j) for i in range(n) for j in range(m)}


def check(lists, pairs, rows, columns):
    """Every pair lies in a listed block, whole blocks are whole, and no more is listed than bounds can tell."""
    for (i, j), block in blocks_of(pairs, rows, columns).items():
        full, live = lists.full[i], lists.live[i]
        if j in lists.index[i, :full]:
            assert block.all() and block.shape == (rows, columns), (i, j)
        elif j not in lists.index[i, :live]:
            assert not block.any(), (i, j)
    for i, listed in enumerate(np.asarray(lists.index)):
        assert len(set(listed[: lists.live[i]].tolist())) == lists.live[i]
        assert (listed[lists.live[i] :] == listed[max(0, lists.live[i] - 1)]).all()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sizes", [(33, 40, 0, 8, 4), (17, 50, 9, 5, 7), (20, 20, 0, 20, 3)])
def test_maps_hold_every_pair_and_no_dead_block(name, sizes):
    T, S, offset, rows, columns = sizes
    mask = MASKS[name]
    pairs = dense(mask, T, S, offset)
    found = static_block_map(mask, T, S, offset, rows, columns)
    first = lambda lists: type(lists)(*(x[0] for x in lists))  # noqa: E731
    check(first(found.by_query), pairs, rows, columns)
    check(first(found.by_key), pairs.T, columns, rows)
    if name != "big bird":  # of masks joined by "and", bounds may not tell that nothing is left
        dead = sum(not block.any() for block in blocks_of(dense(mask, T, S, offset), rows, columns).values())
        assert found.by_query.live.sum() == len(blocks_of(dense(mask, T, S, offset), rows, columns)) - dead


@pytest.mark.parametrize("name", MASKS)
def test_maps_of_data_leave_out_other_documents_and_padding(name):
    ids = np.array([[1] * 9 + [0] * 3 + [2] * 20, [0] * 32])
    at = np.array([[*range(9), 0, 0, 0, *range(3, 43, 2)], [0] * 32])
    places = Places(*(jnp.asarray(x, jnp.int32) for x in (at, at, ids, ids)))
    found = block_map(MASKS[name], places, 8, 4)
    for b in range(2):
        same = (ids[b][:, None] == ids[b][None, :]) & (ids[b] > 0)[:, None]
        pairs = MASKS[name].allows(at[b][:, None], at[b][None, :]) & same
        check(type(found.by_query)(*(np.asarray(x)[b] for x in found.by_query)), pairs, 8, 4)
        check(type(found.by_key)(*(np.asarray(x)[b] for x in found.by_key)), pairs.T, 4, 8)
    assert not np.asarray(found.by_query.live)[1].any()
    if name == "full":  # blocks 0 and 1 of the queries hold document 1, keys 0 to 2 too; the rest document 2
        assert np.asarray(found.by_query.live)[0].tolist() == [3, 8, 5, 5]


def test_a_map_follows_its_live_blocks():
    found = static_block_map(Causal(512), 2**17, 2**17, 0, 128, 128)
    assert found.by_query.index.shape == (1, 1024, 5) and found.by_key.index.shape == (1, 1024, 5)


@given(row=st.integers(0, 60), count=st.integers(0, 5), seed=st.integers(0, 99), head=st.integers(0, 9))
def test_random_blocks_are_distinct_earlier_and_as_many_as_asked(row, count, seed, head):
    mask = RandomBlocks(3, count, seed, head=head)
    seen = mask.allows(np.full(1, 3 * row + 1)[:, None], np.arange(3 * 64)[None])[0].reshape(64, 3)
    assert (seen.all(1) == seen.any(1)).all()
    assert seen[:, 0].sum() == min(count, row + 1) and not seen[row + 1 :].any()


def test_random_blocks_are_uniform_and_differ_by_head_layer_and_seed():
    rows = np.arange(16, 17)[:, None]
    masks = [RandomBlocks(1, 3, seed, layer, head) for seed in range(10) for layer in range(10) for head in range(10)]
    seen = np.concatenate([mask.allows(rows, np.arange(17)[None]) for mask in masks])
    share = seen.mean(0)
    assert np.abs(share - 3 / 17).max() < 5 * (3 / 17 / len(masks)) ** 0.5
    assert len(np.unique(seen, axis=0)) > 500  # of 680 choices


def test_a_window_of_w_keys_includes_the_query():
    assert dense(Causal(3), 6, 6).sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    np.testing.assert_array_equal(dense(Causal(3), 6, 6), dense(Window(2, 0), 6, 6))


def test_published_patterns():
    strided, fixed = MASKS["strided"], MASKS["fixed"]
    assert np.flatnonzero(dense(strided, 16, 16)[14]).tolist() == [2, 6, 10, 11, 12, 13, 14]
    assert np.flatnonzero(dense(fixed, 20, 20)[18]).tolist() == [6, 7, 14, 15, 16, 17, 18]
    heads = longformer(3, 1, (1, 4)).masks
    assert np.flatnonzero(dense(heads[0], 16, 16)[13]).tolist() == [0, 11, 12, 13]
    assert np.flatnonzero(dense(heads[1], 16, 16)[13]).tolist() == [0, 5, 9, 13]
    row = dense(big_bird(2, 1, window=2, n_global=1, n_random=1).masks[0], 24, 24)[21].reshape(12, 2).any(1)
    assert row[[0, 9, 10]].all() and not row[11] and row.sum() in (3, 4)


def test_a_picture_has_a_line_for_each_query():
    assert picture(Causal(2), 3, 4) == "█···\n██··\n·██·"
    assert picture(Causal(), 1, 3, offset=1) == "██·"
