"""Documents: what is read, how it is split, and one clear sentence for everything that cannot be."""

import gzip
import json
import sysconfig

import pytest

from zoo.config import DataConfig
from zoo.data import sources
from zoo.data.sources import DataError, open_sources, read_pieces, split_documents, stdlib


def config(path, **changes):
    return DataConfig(path=str(path), **changes)


def split(settings):
    """{part: {name: text}} of a config."""
    found = {}
    for part, document in split_documents(open_sources(settings)[0], settings):
        found.setdefault(part, {})[document.name] = text(document)
    return found


def text(document):
    return "".join(document.pieces())


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_standard_library_is_read_without_its_tests_in_a_fixed_order():
    documents = [document.name for document in stdlib().documents()]
    assert documents == sorted(documents)
    assert "os.py" in documents and "json/decoder.py" in documents
    folders = {folder for name in documents for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "pydoc_data"}
    with open(sysconfig.get_path("stdlib") + "/os.py") as stream:
        assert text(next(d for d in stdlib().documents() if d.name == "os.py")) == stream.read()


def test_the_standard_library_is_split_by_file_the_same_way_every_time():
    parts = {part: [] for part in ("train", "validation")}
    for part, document in split_documents(stdlib(), DataConfig()):
        parts[part].append(document.name)
    assert parts["train"] and parts["validation"]
    assert not set(parts["train"]) & set(parts["validation"])
    # The hash of a name is the same on every machine and in every version.
    assert "sched.py" in parts["validation"] and "os.py" in parts["train"]


def test_a_library_file_in_another_encoding_is_read_and_an_unreadable_one_skipped(tmp_path, monkeypatch):
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    (tmp_path / "wrong.py").write_bytes("x = 'é'\n".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    texts = [text(document) for document in stdlib().documents()]
    assert texts == ["# coding: latin-1\nx = 'é'\n", ""]


def test_text_is_read_as_it_is_in_pieces_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 16)
    text = "one\r\ntwo\n\n   \tvier é漢😀 \u2581\n" * 9 + "x" * 50 + "\nlast"
    for name, data in (("a.txt", text.encode()), ("b.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        pieces = list(read_pieces(str(tmp_path / name)))
        assert "".join(pieces) == text
        assert len(pieces) > 5
        assert sum(piece.endswith("\n") for piece in pieces) > len(pieces) / 2


def test_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert "".join(read_pieces(str(tmp_path / "a.txt"))) == "abc"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_characters_are_not_torn_by_the_size_of_a_piece(tmp_path, monkeypatch, size):
    monkeypatch.setattr(sources, "PIECE_BYTES", size)
    (tmp_path / "a.txt").write_text("aé漢😀b" * 3)
    assert "".join(read_pieces(str(tmp_path / "a.txt"))) == "aé漢😀b" * 3


def test_the_tail_split_cuts_each_document_at_the_same_share_of_its_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 7)
    text = "é漢\nabc" * 33
    (tmp_path / "a.txt").write_text(text)
    cut = int(len(text) * 0.9)
    parts = split(config(tmp_path / "a.txt", validation_fraction=0.1))
    assert parts == {"train": {"a.txt": text[:cut]}, "validation": {"a.txt": text[cut:]}}

    (tmp_path / "b.txt").write_text("0123456789")
    parts = split(config(tmp_path / "*.txt", validation_fraction=0.1, split="tail"))
    assert parts["validation"] == {"a.txt": text[cut:], "b.txt": "9"}


def test_the_document_split_keeps_documents_whole_and_depends_on_names_alone(tmp_path):
    for folder in ("here", "there/deeper"):
        (tmp_path / folder / "x").mkdir(parents=True)
        for i in range(40):
            (tmp_path / folder / "x" / f"{i}.txt").write_text(f"{folder} {i}")
    first, second = (
        split(config(tmp_path / folder / "**" / "*.txt", validation_fraction=0.3))
        for folder in ("here", "there/deeper")
    )
    assert set(first["validation"]) == set(second["validation"])
    assert 4 < len(first["validation"]) < 24
    assert {*first["train"], *first["validation"]} == {f"x/{i}.txt" for i in range(40)}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_json_lines_are_documents_named_by_their_line(tmp_path, name):
    lines = b'{"text": "one"}\n\n{"text": "", "n": 1}\n{"n": 2, "text": "two\\n\\u00e9"}'
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    documents = list(open_sources(config(tmp_path / name))[0].documents())
    assert [(d.name, text(d)) for d in documents] == [(f"{name}:1", "one"), (f"{name}:4", "two\né")]


def test_another_field_can_hold_the_text(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"body": "x", "text": 3}])
    assert [text(d) for d in open_sources(config(path, text_field="body"))[0].documents()] == ["x"]


def test_documents_are_read_as_they_are_asked_for(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": broken')
    assert text(next(open_sources(config(path))[0].documents())) == "fine"


def test_empty_files_among_others_are_passed_over(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("text")
    assert [d.name for d in open_sources(config(tmp_path / "*.txt"))[0].documents()] == ["b.txt"]


def test_the_identity_follows_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    first = open_sources(config(tmp_path / "a.txt"))[0].identity
    assert open_sources(config(tmp_path / "a.txt"))[0].identity == first
    (tmp_path / "a.txt").write_text("other")
    assert open_sources(config(tmp_path / "a.txt"))[0].identity != first


BAD_FILES = {
    "empty": ("a.txt", b"", ["data.path=", "a.txt", "is empty"]),
    "nothing in gzip": ("a.gz", gzip.compress(b""), ["a.gz", "holds no text"]),
    "blank lines": ("a.jsonl", b"\n \n", ["a.jsonl", "holds no text"]),
    "binary": ("a.txt", b"abc\n\0def", ["a.txt", "binary", "byte 4"]),
    "latin-1": ("a.txt", b"a" * 30 + b"caf\xe9 au lait", ["a.txt", "not UTF-8", "byte 33", "0xe9"]),
    "torn at its end": ("a.txt", b"abc\xe6\xbc", ["a.txt", "not UTF-8", "byte 3"]),
    "no gzip": ("a.txt.gz", b"plain text", ["a.txt.gz", "gzip"]),
    "half a gzip": ("a.txt.gz", gzip.compress(b"text" * 99)[:-9], ["a.txt.gz", "gzip"]),
    "no JSON": ("a.jsonl", b'{"text": "x"}\n{"text": ', ["a.jsonl", "line 2", "not JSON"]),
    "a JSON list": ("a.json", b'[{"text": "x"}]', ["a.json", "line 1", "list", "object"]),
    "JSON in latin-1": ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}', ["line 2", "not UTF-8", "byte 24"]),
    "deep JSON": ("a.jsonl", b'{"text": "x"}\n' + b"[" * 100_000, ["a.jsonl", "line 2", "nested too deeply"]),
    "field missing": ("a.jsonl", b'{"body": "x", "id": 1}', ["line 1", "'text'", "'body'", "'id'"]),
    "field no string": ("a.jsonl", b'\n{"text": 3}', ["line 2", "'text'", "int", "string"]),
    "half a surrogate": ("a.jsonl", b'{"text": "a\\ud800"}', ["line 1", "surrogate", "character 1"]),
}


@pytest.mark.parametrize(("name", "data", "words"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_named_with_the_place_and_the_fault(tmp_path, monkeypatch, name, data, words):
    monkeypatch.setattr(sources, "PIECE_BYTES", 16)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as error:
        split(config(tmp_path / name))
    one_sentence(str(error.value), words)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing.txt", ["data.path=", "nothing.txt", "does not exist"]),
        ("*.none", ["data.path=", "*.none", "matches no file"]),
        (".", ["data.path=", "is a folder", "*.txt"]),
    ],
)
def test_a_path_that_leads_nowhere(tmp_path, path, words):
    with pytest.raises(DataError) as error:
        open_sources(config(tmp_path / path))[0]
    one_sentence(str(error.value), words)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.write_text("x")
    source = open_sources(config(path))[0]
    path.unlink()  # between two passes over the text
    with pytest.raises(DataError) as error:
        list(source.documents())
    one_sentence(str(error.value), [str(path), "cannot be read", "No such file", "data.path"])

    def failing(*_):
        raise OSError(5, "Input/output error")  # without a name, as reads raise it

    with pytest.raises(DataError) as error:
        sources._read(str(path), failing)
    one_sentence(str(error.value), [str(path), "cannot be read", "Input/output error"])


def test_a_library_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents = list(stdlib().documents())
    (tmp_path / "a.py").unlink()
    with pytest.raises(DataError, match=r"a.py cannot be read \(No such file"):
        text(documents[0])


@pytest.mark.parametrize(("fraction", "part"), [(1e-6, "validation"), (1 - 1e-6, "training")])
def test_a_split_that_leaves_a_part_empty(tmp_path, fraction, part):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}] * 5)
    with pytest.raises(DataError) as error:
        split(config(path, validation_fraction=fraction))
    one_sentence(str(error.value), [f"data.validation_fraction={fraction}", f"no text for {part}", "5 document"])


def one_sentence(message, words):
    assert all(word in message for word in words), message
    assert "\n" not in message and not message.endswith(".")


def test_a_document_can_be_read_twice(tmp_path):
    (tmp_path / "a.txt").write_text("text\n" * 5)
    document = next(open_sources(config(tmp_path / "a.txt"))[0].documents())
    assert text(document) == text(document) == "text\n" * 5
