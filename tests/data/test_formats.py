"""Zstandard, Parquet, Hugging Face datasets, several sources by weight, and truncated documents."""

import json
import sys
import types
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from zoo.config import DataConfig, Source
from zoo.data.cache import TokenCache, prepare
from zoo.data.errors import DataError
from zoo.data.loader import Loader, evaluation_batches
from zoo.data.packing import Truncated
from zoo.data.sources import open_sources


def texts(path, **fields):
    """The documents of a path, each as one text."""
    (source,) = open_sources(DataConfig(path=str(path), **fields))
    return ["".join(document.pieces()) for document in source.documents()]


def write_parquet(path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


def test_zstandard_text_and_json_lines(tmp_path):
    text = "one line\n" * 20_000
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(text.encode()))
    assert texts(tmp_path / "a.txt.zst") == [text]
    lines = "".join(json.dumps({"text": word}) + "\n" for word in ("x", "", "y"))
    frames = zstandard.compress(lines[:10].encode()) + zstandard.compress(lines[10:].encode())
    (tmp_path / "b.jsonl.zst").write_bytes(frames)
    assert texts(tmp_path / "b.jsonl.zst") == ["x", "y"]


def test_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"n": [1, 2, 3, 4], "body": ["x", None, "", "z"]})
    assert texts(tmp_path / "a.parquet", text_field="body") == ["x", "z"]


def damaged_zst(path):
    path.write_bytes(b"not zstandard")


def half_a_zst(path):
    whole = zstandard.compress(np.random.default_rng(0).bytes(9000).hex().encode())
    path.write_bytes(whole[: len(whole) // 2])


def no_text(path):
    column = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    write_parquet(path, {"text": column})


def no_column(path):
    write_parquet(path, {"n": [1], "body": ["x"]})


def numbers(path):
    write_parquet(path, {"text": [1]})


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.txt.zst", damaged_zst, r"a\.txt\.zst is not a whole Zstandard file \(.+\); make or fetch it again"),
        ("a.txt.zst", half_a_zst, r"is not a whole Zstandard file \(it ends in the middle\); make or fetch it again"),
        ("a.parquet", no_text, "a.parquet is not a whole Parquet file .*utf-8"),
        ("a.parquet", lambda path: path.write_bytes(b"PAR1 no"), "a.parquet is not a whole Parquet file"),
        ("a.parquet", no_column, "has no column data.text_field='text'; its columns: 'n', 'body'"),
        ("a.parquet", numbers, "column data.text_field='text' holds int64, not texts; name another"),
    ],
)
def test_what_cannot_be_read_is_named(name, write, message, tmp_path):
    write(tmp_path / name)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "package"),
    [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow"), ("hf://some/thing", "datasets")],
)
def test_a_missing_package_is_named(name, package, tmp_path, monkeypatch):
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    path = name if name.startswith("hf") else tmp_path / name
    if not name.startswith("hf"):
        path.write_bytes(b"x")
    with pytest.raises(DataError, match=rf"needs the package {package}; install it, or zoo\[data\]"):
        texts(path)


class FakeDataset(list):
    column_names = ("title", "text")
    cache_files = ()

    def select_columns(self, names):
        return [{name: row[name] for name in names} for row in self]


def fake_datasets(load_dataset):
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    return module


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("hf://corpus", ("corpus", None, "train")),
        ("hf://lab/corpus:validation", ("lab/corpus", None, "validation")),
        ("hf://lab/corpus/en:train", ("lab/corpus", "en", "train")),
        ("hf://./folder:train", ("./folder", None, "train")),
    ],
)
def test_a_hugging_face_dataset(path, asked, monkeypatch):
    seen = []

    def load_dataset(name, config, split):
        seen.append((name, config, split))
        return FakeDataset([{"title": "a", "text": "x"}, {"title": "b", "text": None}, {"title": "c", "text": "z"}])

    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(load_dataset))
    assert texts(path) == ["x", "z"]
    assert seen == [asked]
    with pytest.raises(DataError, match=r"has no column data.text_field='body'; its columns: 'title', 'text'"):
        texts(path, text_field="body")


def test_a_dataset_with_other_rows_is_another_source(tmp_path, monkeypatch):
    """Its files have the same name and size in another folder."""
    identities = []
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        file = tmp_path / version / "train.arrow"
        file.write_bytes(b"12345678")
        dataset = FakeDataset([{"title": "a", "text": version}])
        dataset.cache_files = [{"filename": str(file)}]
        monkeypatch.setitem(sys.modules, "datasets", fake_datasets(lambda *a, dataset=dataset, **k: dataset))
        identities.append(open_sources(DataConfig(path="hf://./corpus"))[0].identity)
    assert identities[0] != identities[1]


def test_a_dataset_that_cannot_be_loaded_is_named(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise FileNotFoundError("no such dataset\nand much more")

    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(load_dataset))
    with pytest.raises(DataError, match=r"data.path='hf://x' cannot be loaded \(no such dataset\); check its name"):
        texts("hf://x")


# ------------------------------------------------------------------------------------------- mixtures of sources


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "a.txt").write_text("a" * 900)
    (folder / "b.txt").write_text("b" * 300)
    sources = (Source(str(folder / "a.txt"), 1.0), Source(str(folder / "b.txt"), 3.0))
    config = DataConfig(sources=sources, tokenizer="bytes", cache_dir=str(folder / "cache"), validation_fraction=0.1)
    return prepare(config), config


def test_sources_lie_one_after_another_each_with_its_own_split(corpus):
    found, _ = corpus
    assert found.train.documents == (1, 1) and found.validation.documents == (1, 1)
    a, b = found.train.by_source()
    assert (len(a.tokens), len(b.tokens)) == (812, 272)  # with BOS and EOS
    assert set(a.tokens[1:-1]) == {ord("a")} and set(b.tokens[1:-1]) == {ord("b")}
    assert b.offsets.tolist() == [0, 272]


def test_windows_come_in_proportion_to_the_weights_and_by_index(corpus):
    found, config = corpus
    weights = [source.weight for source in config.sources]
    make = lambda **rest: Loader(found.train, 16, 8, 0, vocab_size=300, weights=weights, **rest)  # noqa: E731
    loader = make()
    rows = [row for step in range(25) for row in loader.batch(step).tokens]
    letters = Counter("b" if ord("b") in row else "a" for row in rows)
    assert letters == {"a": 50, "b": 150}
    assert all(Counter("b" if ord("b") in row else "a" for row in loader.batch(s).tokens)["b"] == 6 for s in range(9))
    again, halves = make(), [make(rows=part) for part in (slice(0, 4), slice(4, 8))]
    np.testing.assert_array_equal(again.batch(17).tokens, loader.batch(17).tokens)
    np.testing.assert_array_equal(np.concatenate([h.batch(17).tokens for h in halves]), loader.batch(17).tokens)
    other = Loader(found.train, 16, 8, 1, vocab_size=300, weights=weights)
    assert any(np.any(other.batch(step).tokens != loader.batch(step).tokens) for step in range(3))


def test_shares_hold_at_every_moment_and_no_source_skips_a_window():
    weights, documents = np.array([0.5, 0.3, 0.15, 0.05]), (5, 3, 4, 2)
    offsets = 9 * np.arange(sum(documents) + 1)
    tokens = np.arange(offsets[-1]).astype(np.uint16)
    cache = TokenCache(tokens, offsets, 1, None, 200, 0, "all", "digest", documents, tuple("abcd"))
    loader = Loader(cache, 4, 10, 0, vocab_size=200, weights=(10 * weights).tolist(), max_documents=1)
    batches = [loader.batch(step) for step in range(60)]
    assert max(batch.segment_ids.max() for batch in batches) == 1
    firsts = np.concatenate([batch.tokens[:, 0] for batch in batches])
    source = np.searchsorted(np.cumsum(documents) * 9, firsts, "right")
    drawn = np.cumsum(source[:, None] == np.arange(4), axis=0)
    assert np.abs(drawn - weights * np.arange(1, 601)[:, None]).max() < 1.5
    for which, windows in enumerate(loader.windows):
        own = firsts[source == which]
        first_passes = own[: len(own) // len(windows) * len(windows)].reshape(-1, len(windows))
        assert all(len(set(one)) == len(windows) for one in first_passes) and len(first_passes)


def test_a_source_that_is_too_short_is_named(corpus):
    found, _ = corpus
    with pytest.raises(DataError, match=r"the training text of data.path='[^']*b.txt' has 272 tokens, fewer than the"):
        Loader(found.train, 300, 8, 0, vocab_size=300, weights=[1.0, 3.0])


def test_evaluation_reads_every_source_once(corpus):
    found, _ = corpus
    batches = list(evaluation_batches(found.validation, 16, 4, vocab_size=300))
    labels = np.concatenate([batch.labels[batch.labels >= 0] for batch in batches])
    assert Counter(labels[labels < 256].tolist()) == {ord("a"): 90, ord("b"): 30}


def test_a_cache_of_sources_is_kept(corpus):
    found, config = corpus
    again = prepare(config)
    assert again.train.digest == found.train.digest and again.train.documents == (1, 1)


# ------------------------------------------------------------------------------------------- truncated documents


def test_truncated_documents_have_a_window_each():
    tokens, offsets = np.arange(1, 12, dtype=np.uint16), np.array([0, 3, 4, 11])
    cache = TokenCache(tokens, offsets, 1, None, 20, 0, "the text", "digest")
    batch = Truncated(cache, 4).batch([0, 1, 2, 3])
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8], [0] * 4])
    np.testing.assert_array_equal(batch.labels, [[2, 3, -1, -1], [-1] * 4, [6, 7, 8, 9], [-1] * 4])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0], [0] * 4, [0, 1, 2, 3], [0] * 4])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 0], [1, 0, 0, 0], [1] * 4, [0] * 4])
    loader = Loader(cache, 4, 3, 0, vocab_size=20, truncated=True)
    seen = sorted(int(row[0]) for row in loader.batch(0).tokens)
    assert seen == [1, 4, 5]
