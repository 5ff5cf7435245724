"""Text, tokenized once: flat tokens and document offsets in memory-mapped files.

A cache is a directory named by a hash of the source, the tokenizer and the settings that decide its tokens.
It is built beside its place under a lock and moved there whole, so that neither an interrupted build nor a
second process leaves a part of one.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import rich.console
import rich.progress
import sentencepiece
from jaxtyping import Int64, Integer

from zoo.config import DataConfig
from zoo.data.errors import DataError
from zoo.data.lock import locked
from zoo.data.sources import PART_NAMES, Document, Source, open_sources, split_documents
from zoo.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer

FORMAT = 2  # part of every key; another number for another layout or another meaning of the tokens
BATCH_CHARACTERS = 1 << 21  # of text that are tokenized at once, on all cores

T = TypeVar("T")


class TokenCache(NamedTuple):
    """The tokens of one part of a corpus, N of them, in documents that lie one after another.

    Attributes:
        tokens: [N] uint16 or uint32, mapped from disk.
        offsets: [documents + 1] int64, mapped too: document i is tokens[offsets[i] : offsets[i + 1]].
        text_bytes: UTF-8 bytes of the text, for bits per byte.
        gzip_bytes: bytes of the same text after `gzip -9`; None for the training part.
        vocab_size, pad_id: of the tokenizer.
        label: how messages name the part.
        digest: 16 hexadecimal digits that differ where tokens or offsets do.
        documents: how many documents each source has, which lie one source after another.
        labels: how messages name the part of each source.
    """

    tokens: Integer[np.ndarray, "N"]
    offsets: Int64[np.ndarray, "documents_and_1"]
    text_bytes: int
    gzip_bytes: int | None
    vocab_size: int
    pad_id: int
    label: str
    digest: str
    documents: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()

    def by_source(self) -> list["TokenCache"]:
        """The part of each source, as a cache of its own on the same memory."""
        if len(self.documents) <= 1:
            return [self]
        ends = np.cumsum(self.documents)
        parts = zip(ends.tolist(), self.documents, self.labels, strict=True)
        return [self._slice(end - n, end, label) for end, n, label in parts]

    def _slice(self, first: int, last: int, label: str) -> "TokenCache":
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        offsets = np.asarray(self.offsets[first : last + 1]) - start
        tokens, documents = self.tokens[start:stop], (last - first,)
        return self._replace(tokens=tokens, offsets=offsets, label=label, documents=documents, labels=(label,))


class Corpus(NamedTuple):
    """Tokenized text, ready to be cut into windows, and the tokenizer that made it."""

    train: TokenCache
    validation: TokenCache
    tokenizer: Tokenizer


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Opens the token cache of `config`, built first where there is none.

    Args:
        config: what to read and how.
        tokenizer: the one of an earlier run; None makes what `config` asks for.

    Raises:
        DataError: the text, the tokenizer or the cache folder cannot be used.
    """
    sources = open_sources(config)
    labels = [source.label for source in sources]
    tokenizer = tokenizer or _tokenizer(config, sources)
    for add, token in (("add_bos", tokenizer.bos_id), ("add_eos", tokenizer.eos_id)):
        if getattr(config, add) and token < 0:
            raise DataError(f"{config.named(add)} needs a token that {config.named('tokenizer_model')} lacks; unset it")
    key = _key(sources, config, ["add_bos", "add_eos"], tokenizer.fingerprint)
    parts = _kept(
        cache_root(config) / "tokens" / key,
        lambda place: _load(place, labels),
        lambda draft: _build(draft, sources, config, tokenizer),
    )
    return Corpus(*parts, tokenizer)


def cache_root(config: DataConfig) -> pathlib.Path:
    """The folder of all caches: `config.cache_dir`, else $ZOO_CACHE, else ~/.cache/zoo."""
    return pathlib.Path(config.cache_dir or os.environ.get("ZOO_CACHE") or "~/.cache/zoo").expanduser()


def _tokenizer(config: DataConfig, sources: Sequence[Source]) -> Tokenizer:
    if config.tokenizer == "bytes" or config.tokenizer_model is not None:
        return make_tokenizer(config, ())

    def train(draft: pathlib.Path) -> None:
        with _progress("learning a tokenizer", sources) as advance:
            parts = itertools.chain.from_iterable(split_documents(source, config) for source in sources)
            documents = (_watched(document, advance) for part, document in parts if part == "train")
            make_tokenizer(config, documents).save(draft)

    key = _key(sources, config, ["tokenizer", "vocab_size"], sentencepiece.__version__)
    return _kept(cache_root(config) / "tokenizers" / key, _try_tokenizer, train)


def _try_tokenizer(place: pathlib.Path) -> Tokenizer | None:
    try:
        return load_tokenizer(place)
    except DataError:
        return None


def _key(sources: Sequence[Source], config: DataConfig, fields: list[str], *more: str) -> str:
    settings = [getattr(config, name) for name in ("split", "validation_fraction", *fields)]
    identities = [source.identity for source in sources]
    return hashlib.sha256(json.dumps([FORMAT, identities, settings, more]).encode()).hexdigest()[:24]


def _kept(place: pathlib.Path, load: Callable[[pathlib.Path], T | None], build: Callable[[pathlib.Path], None]) -> T:
    """What `load` reads from `place`; where it is missing or damaged (None), it is built there first.

    Raises:
        DataError: it cannot be written, or not be read although it was.
    """
    found = load(place)
    if found is not None:
        return found
    with _lock(place):
        found = load(place)  # while this process waited, another may have built it
        if found is None:
            _replace(place, build)
            found = load(place)
    if found is None:
        raise DataError(f"the cache {place} was built but cannot be read; set data.cache_dir to another folder")
    return found


def _replace(place: pathlib.Path, build: Callable[[pathlib.Path], None]) -> None:
    draft = place.with_name(place.name + ".building")  # one a killed process has left is thrown away
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        build(draft)
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
    except OSError as error:  # of the cache: those of the text are DataErrors
        raise _cannot_write(place, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _lock(place: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time build what belongs at `place`; the others wait."""

    def wait(holder: str) -> None:
        print(f"waiting for {holder}, which builds {place}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(place.with_name(place.name + ".lock"), wait))
        except OSError as error:
            raise _cannot_write(place, error) from None
        yield


def _cannot_write(place: pathlib.Path, error: OSError) -> DataError:
    return DataError(f"the cache {place} cannot be written ({error.strerror}); set data.cache_dir to another folder")


@contextlib.contextmanager
def _progress(what: str, sources: Sequence[Source]) -> Iterator[Callable[[str], None]]:
    """Shows a bar that moves with each text it is given; a plain line where there is no terminal."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        print(f"{what}: {', '.join(source.label for source in sources)}", file=sys.stderr, flush=True)
        yield lambda text: None
        return
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.DownloadColumn())
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        sizes = [source.size for source in sources]
        task = bar.add_task(what, total=None if None in sizes else sum(sizes))
        yield lambda text: bar.advance(task, len(text.encode()))


def _watched(document: Document, advance: Callable[[str], None]) -> Document:
    def pieces() -> Iterator[str]:
        for text in document.pieces():
            advance(text)
            yield text

    return Document(document.name, pieces)


class _Writer:
    """Appends the tokens of documents to the files of one part."""

    def __init__(self, folder: pathlib.Path, part: str, tokenizer: Tokenizer, config: DataConfig):
        self._tokens: BinaryIO = (folder / f"{part}.tokens").open("wb")
        self._offsets: BinaryIO = (folder / f"{part}.offsets").open("wb")
        self._dtype = _dtype(tokenizer.vocab_size)
        self._begin = [tokenizer.bos_id] if config.add_bos else []
        self._end = [tokenizer.eos_id] if config.add_eos else []
        # Only the validation text is compared with gzip, and compressing is slower than tokenizing.
        self._gzip = zlib.compressobj(9, wbits=31) if part == "validation" else None
        self._gzip_bytes = self._count = self._documents = self._text_bytes = 0
        self._digest = hashlib.sha256()
        self._by_source: list[int] = []

    def end_source(self) -> None:
        """Notes that the documents of the next source follow."""
        self._by_source.append(self._documents - sum(self._by_source))

    def add(self, text: str, tokens: list[int], first: bool) -> None:
        """Appends a piece of a document, the `first` of a new one or a further one of the last."""
        data = text.encode()
        self._text_bytes += len(data)
        if self._gzip:
            self._gzip_bytes += len(self._gzip.compress(data))
        if first:
            self._finish_document()
            self._write_offset()
            self._documents += 1
            tokens = self._begin + tokens
        self._write(tokens)

    def close(self) -> dict[str, Any]:
        """Ends the last document and brings the files to disk; returns what the description keeps."""
        self._finish_document()
        self._write_offset()
        for stream in (self._tokens, self._offsets):
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        size = self._gzip_bytes + len(self._gzip.flush()) if self._gzip else None
        counts = {"tokens": self._count, "documents": self._by_source, "digest": self._digest.hexdigest()[:16]}
        return counts | {"text_bytes": self._text_bytes, "gzip_bytes": size}

    def _finish_document(self) -> None:
        if self._documents:
            self._write(self._end)

    def _write_offset(self) -> None:
        self._put(self._offsets, np.int64(self._count).tobytes())

    def _write(self, tokens: list[int]) -> None:
        self._put(self._tokens, np.asarray(tokens, self._dtype).tobytes())
        self._count += len(tokens)

    def _put(self, stream: BinaryIO, data: bytes) -> None:
        stream.write(data)
        self._digest.update(data)


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _build(folder: pathlib.Path, sources: Sequence[Source], config: DataConfig, tokenizer: Tokenizer) -> None:
    writers = {part: _Writer(folder, part, tokenizer, config) for part in ("train", "validation")}
    label = ", ".join(source.label for source in sources)
    with _progress("tokenizing", sources) as advance:
        for source in sources:
            for batch in _batches(split_documents(source, config)):
                encoded = tokenizer.encode_many([text for _, _, text in batch])
                for (part, first, text), tokens in zip(batch, encoded, strict=True):
                    writers[part].add(text, tokens, first)
                    advance(text)
            for writer in writers.values():
                writer.end_source()
    meta = {part: writer.close() for part, writer in writers.items()}
    for part, counts in meta.items():
        if not counts["tokens"]:
            what = f"the {PART_NAMES[part]} text of {label}"
            raise DataError(f"{what} has no tokens; give more text or another data.split")
    meta |= {"vocab_size": tokenizer.vocab_size, "pad_id": tokenizer.pad_id, "source": label}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _batches(parts: Iterable[tuple[str, Document]]) -> Iterator[list[tuple[str, bool, str]]]:
    """Lists of (part, whether a document begins here, text), each of about BATCH_CHARACTERS."""
    batch: list[tuple[str, bool, str]] = []
    size = 0
    for part, document in parts:
        for number, text in enumerate(document.pieces()):
            batch.append((part, number == 0, text))
            size += len(text)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _load(place: pathlib.Path, labels: Sequence[str]) -> tuple[TokenCache, TokenCache] | None:
    """The two parts of a cache; None where it is missing or its files are not as long as they should be."""
    try:
        meta = json.loads((place / "meta.json").read_text(encoding="utf-8"))
        return _map(place, "train", meta, labels), _map(place, "validation", meta, labels)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(place: pathlib.Path, part: str, meta: dict[str, Any], labels: Sequence[str]) -> TokenCache:
    counts = meta[part]
    tokens = np.memmap(place / f"{part}.tokens", _dtype(meta["vocab_size"]), "r")
    offsets = np.memmap(place / f"{part}.offsets", np.int64, "r")
    documents = tuple(counts["documents"])
    if len(tokens) != counts["tokens"] or len(offsets) != sum(documents) + 1 or offsets[-1] != len(tokens):
        raise ValueError(f"{place} is damaged")
    sizes = counts["text_bytes"], counts["gzip_bytes"]
    kind = meta["vocab_size"], meta["pad_id"]
    name = f"the {PART_NAMES[part]} text of"
    label, each = f"{name} {', '.join(labels)}", tuple(f"{name} {label}" for label in labels)
    return TokenCache(tokens, offsets, *sizes, *kind, label, counts["digest"], documents, each)
