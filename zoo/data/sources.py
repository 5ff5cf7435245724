"""Where text comes from: documents, read lazily, and their split into training and validation.

A document is read in pieces of some ten thousand characters, anew at each pass, so that memory is bounded by
a piece (for JSON lines: by a line) however long the text is.
"""

import codecs
import contextlib
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import platform
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zoo.config import DataConfig
from zoo.data.errors import DataError
from zoo.data.formats import COMPRESSED, HUB, Damaged, hub_rows, open_hub, open_zst, parquet_rows

# What messages call the parts of a text.
PART_NAMES = {"train": "training", "validation": "validation"}

PIECE_BYTES = 1 << 16  # SentencePiece encodes pieces of a megabyte half as fast

# Folders beside the standard library's source: its tests, packages that are not part of it, and pydoc's help,
# which is three quarters of a megabyte of generated English and would be most of the validation text.
_NOT_STDLIB = {"test", "tests", "idle_test", "pydoc_data", "__pycache__", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Document:
    """A text with a name that stays the same wherever its source lies.

    Attributes:
        name: decides, with split="document", whether the document is for validation.
        pieces: opens the text anew and reads it in order, in pieces that end, where they can, with a line.
    """

    name: str
    pieces: Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    Attributes:
        label: how messages name the source.
        documents: reads the documents, in the same order at each call; empty ones are left out.
        identity: changes when the text may have changed.
        size: bytes of text on disk; None where compression hides it.
    """

    label: str
    documents: Callable[[], Iterator[Document]]
    identity: str
    size: int | None


def open_sources(config: DataConfig) -> tuple[Source, ...]:
    """The sources that a config names: `config.sources`, or `config.path` alone; None is the standard library.

    Raises:
        DataError: nothing lies there, or it is a folder or empty; or a package that reads it is missing.
    """
    if config.sources:
        return tuple(_open(source.path, source.text_field) for source in config.sources)
    return (stdlib() if config.path is None else _open(config.path, config.text_field),)


def _open(path: str, text_field: str) -> Source:
    if path.startswith(HUB):
        label = f"data.path={path!r}"
        dataset, identity = open_hub(path, label)
        documents = functools.partial(_hub_documents, dataset, path, text_field)
        return Source(label, documents, _digest("hub", text_field, path, identity), None)
    return _text_files(path, text_field)


def _hub_documents(dataset: Any, path: str, text_field: str) -> Iterator[Document]:
    rows = hub_rows(dataset, text_field, path)
    yield from (Document(f"{path}:{i}", functools.partial(_one, text)) for i, text in enumerate(rows) if text)


def stdlib() -> Source:
    """The source text of the standard library that runs this program, one document a file, without its tests."""
    root = sysconfig.get_path("stdlib")
    names = sorted(_python_files(root))
    if not names:
        raise DataError(f"this Python keeps no source text of its standard library in {root}; set data.path")
    sizes = [(name, os.path.getsize(os.path.join(root, name))) for name in names]

    def documents() -> Iterator[Document]:
        for name, size in sizes:
            if size:
                yield Document(name, functools.partial(_read_python, os.path.join(root, name)))

    identity = _digest("stdlib", platform.python_version(), sizes)
    return Source("the standard library", documents, identity, sum(size for _, size in sizes))


def _python_files(root: str) -> Iterator[str]:
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_STDLIB]
        for name in files:
            if name.endswith(".py"):
                yield pathlib.PurePath(os.path.relpath(os.path.join(folder, name), root)).as_posix()


def _read_python(path: str) -> Iterator[str]:
    try:
        with _readable(path), tokenize.open(path) as stream:  # a few files declare another encoding than UTF-8
            text = stream.read()
    except (SyntaxError, UnicodeDecodeError):
        return  # written in another encoding than it declares: Python cannot read it either
    yield text


def _text_files(path: str, text_field: str) -> Source:
    label = f"data.path={path!r}"
    paths, root = _find(os.path.expanduser(path), label)
    with _readable(path):
        stats = [os.stat(p) for p in paths]
    if not any(s.st_size for s in stats):
        raise DataError(f"{label} is empty; give a file with text in it")

    def documents() -> Iterator[Document]:
        for p in paths:
            yield from _documents(p, pathlib.PurePath(os.path.relpath(p, root)).as_posix(), text_field)

    files = [(os.path.abspath(p), s.st_size, s.st_mtime_ns) for p, s in zip(paths, stats, strict=True)]
    compressed = any(p.endswith((*COMPRESSED, ".parquet")) for p in paths)
    size = None if compressed else sum(s.st_size for s in stats)
    return Source(label, documents, _digest("files", text_field, files), size)


def _find(path: str, label: str) -> tuple[list[str], str]:
    """The files that `path` names, in order, and the folder that their documents' names start from."""
    if os.path.isdir(path):
        example = os.path.join(path, "*.txt")
        raise DataError(f"{label} is a folder; give a file, or a glob such as {example!r}")
    if os.path.exists(path):
        return [path], os.path.dirname(path) or "."
    if not glob.has_magic(path):
        raise DataError(f"{label} does not exist; give a file of text or JSON lines, or a glob")
    found = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
    if not found:
        raise DataError(f"{label} matches no file; check the folder and the pattern")
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), pathlib.PurePath(path).parts)
    return found, str(pathlib.PurePath(*fixed))


def _documents(path: str, name: str, text_field: str) -> Iterator[Document]:
    plain = path.removesuffix(".gz").removesuffix(".zst")
    if plain.endswith((".jsonl", ".json")):
        yield from _json_documents(path, name, text_field)
    elif path.endswith(".parquet"):
        with _readable(path):
            for row, text in enumerate(parquet_rows(path, text_field)):
                if text:
                    yield Document(f"{name}:{row + 1}", functools.partial(_one, text))
    elif next(read_pieces(path), None) is not None:
        yield Document(name, functools.partial(read_pieces, path))


def read_pieces(path: str) -> Iterator[str]:
    """The UTF-8 text of a plain or compressed file, in pieces that end, where they can, with a line.

    Line ends stay as they are; a byte order mark is dropped.

    Raises:
        DataError: a file that cannot be read, a byte that is no UTF-8 (with its offset), a binary file, or a
            corrupt compressed file.
    """
    rest = ""
    for text in _decode(path):
        text = rest + text
        cut = text.rfind("\n") + 1 or len(text)
        if cut:
            yield text[:cut]
        rest = text[cut:]
    if rest:
        yield rest


def _decode(path: str) -> Iterator[str]:
    offset, rest = 0, b""
    for block in itertools.chain(_blocks(path), [None]):
        data = rest + (block or b"")
        if b"\0" in data:
            where = offset + data.index(b"\0")
            raise DataError(f"{path} is binary: byte {where} is zero; give a file of UTF-8 text")
        try:
            text, used = codecs.utf_8_decode(data, "strict", block is None)
        except UnicodeDecodeError as error:
            where = offset + error.start
            raise DataError(f"{path} is not UTF-8 at byte {where} (0x{data[error.start]:02x}); convert it") from None
        yield text.removeprefix("\ufeff") if offset == 0 else text
        offset, rest = offset + used, data[used:]


def _blocks(path: str) -> Iterator[bytes]:
    with _stream(path) as stream:
        while block := _read(path, stream.read, PIECE_BYTES):
            yield block


def _stream(path: str) -> io.BufferedIOBase:
    with _readable(path):
        if path.endswith(".zst"):
            return open_zst(path)
        return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _read(path: str, read: Callable[..., bytes], *args: int) -> bytes:
    with _readable(path):
        return read(*args)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Says of what goes wrong inside that `path` is the reason."""
    try:
        yield
    except Damaged as error:
        raise DataError(f"{path} is not a whole {error.kind} file ({error}); make or fetch it again") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); make or fetch it again") from None
    except OSError as error:
        name, reason = error.filename or path, error.strerror or error
        raise DataError(f"{name} cannot be read ({reason}); make it readable, or give another data.path") from None


def _json_documents(path: str, name: str, text_field: str) -> Iterator[Document]:
    offset = 0
    with _stream(path) as stream:
        for number in itertools.count(1):
            line = _read(path, stream.readline)
            if not line:
                return
            text = _json_text(line, f"{path}, line {number}", offset, text_field)
            offset += len(line)
            if text:
                yield Document(f"{name}:{number}", functools.partial(_one, text))


def _one(text: str) -> Iterator[str]:
    yield text


def _json_text(line: bytes, where: str, offset: int, text_field: str) -> str:
    """The text of one JSON line that begins `offset` bytes into its file; "" for a blank line."""
    if not line.strip():
        return ""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 at byte {offset + error.start} of the file; convert it") from None
    except ValueError as error:
        problem = str(error).replace("line 1 ", "")
        raise DataError(f"{where} is not JSON ({problem}); each line must be one whole JSON object") from None
    except RecursionError:
        raise DataError(f"{where} is nested too deeply to be read; each line must be one flat JSON object") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} holds a {type(record).__name__}, not an object; each line must be one JSON object")
    if text_field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{where} has no field data.text_field={text_field!r}; its fields: {fields}")
    return _checked(record[text_field], f"{where}: field data.text_field={text_field!r}")


def _checked(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"{what} holds a {type(text).__name__}, not a string; name another field")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} holds half a surrogate pair at character {error.start}; mend the line") from None
    return text


def split_documents(source: Source, config: DataConfig) -> Iterator[tuple[str, Document]]:
    """Each document, or part of one, with "train" or "validation", in the order of the source.

    "document" sends a document to validation if the hash of its name falls below `validation_fraction`; "tail"
    cuts the characters of every document at `int(n * (1 - validation_fraction))`.

    Raises:
        DataError: the source holds no text, or one of the two stays empty.
    """
    split = config.split
    if split == "auto":
        split = "tail" if len(list(itertools.islice(source.documents(), 2))) == 1 else "document"
    count, parts = 0, set()
    for document in source.documents():
        count += 1
        for part, piece in (_by_name if split == "document" else _by_length)(document, config.validation_fraction):
            parts.add(part)
            yield part, piece
    if not count:
        raise DataError(f"{source.label} holds no text; give a file with text in it")
    for part, what in PART_NAMES.items():
        if part not in parts:
            raise DataError(
                f"data.split={config.split!r} with {config.named('validation_fraction')} leaves no text for {what} "
                f"of the {count} document(s) of {source.label}; change the fraction, or set data.split=tail"
            )


def _by_name(document: Document, fraction: float) -> Iterator[tuple[str, Document]]:
    point = int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8], "big") / 2**64
    yield ("validation" if point < fraction else "train"), document


def _by_length(document: Document, fraction: float) -> Iterator[tuple[str, Document]]:
    length = sum(map(len, document.pieces()))
    cut = int(length * (1 - fraction))
    for part, start, stop in (("train", 0, cut), ("validation", cut, length)):
        if start < stop:
            yield part, Document(document.name, functools.partial(_characters, document, start, stop))


def _characters(document: Document, start: int, stop: int) -> Iterator[str]:
    at = 0
    for piece in document.pieces():
        if part := piece[max(0, start - at) : max(0, stop - at)]:
            yield part
        at += len(piece)
        if at >= stop:
            return


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
