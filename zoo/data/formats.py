"""Formats that other packages read: Zstandard, Parquet, and datasets of Hugging Face; imported where they are used."""

import importlib
import io
import pathlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from zoo.data.errors import DataError

COMPRESSED = (".gz", ".zst")
HUB = "hf://"
_ZST_BLOCK = 1024  # bytes that are decompressed together: of the most repetitive text, 12 MB


class Damaged(Exception):
    """A file that its reader cannot make sense of; `kind` names what it should be."""

    def __init__(self, kind: str, reason: object):
        super().__init__(str(reason).splitlines()[0] if str(reason) else kind)
        self.kind = kind


def _package(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(f"{what} needs the package {name.split('.')[0]}; install it, or zoo[data]") from None


class _Zst(io.RawIOBase):
    """A Zstandard stream, of one frame or more, that tells its damage apart from other errors."""

    def __init__(self, path: str):
        zstandard = _package("zstandard", path)
        self._new = lambda: zstandard.ZstdDecompressor().decompressobj()
        self._error = zstandard.ZstdError
        self._file = open(path, "rb")  # noqa: SIM115  closed with this stream
        self._frame, self._rest, self._text = None, b"", io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not (count := self._text.readinto(buffer)) and self._more():
            pass
        return count

    def _more(self) -> bool:
        """Whether there was another block to decompress; a frame may end in it."""
        block = self._rest or self._file.read(_ZST_BLOCK)
        if not block:
            if self._frame is not None:
                raise Damaged("Zstandard", "it ends in the middle")
            return False
        self._frame = self._frame or self._new()
        try:
            self._text = io.BytesIO(self._frame.decompress(block))
        except self._error as error:
            raise Damaged("Zstandard", error) from None
        self._rest = self._frame.unused_data if self._frame.eof else b""
        self._frame = None if self._frame.eof else self._frame
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def open_zst(path: str) -> io.BufferedIOBase:
    """The bytes of a Zstandard file.

    Raises:
        DataError: the package zstandard is missing.
        Damaged: from reading a corrupt file.
    """
    return io.BufferedReader(_Zst(path))


def parquet_rows(path: str, text_field: str) -> Iterator[str]:
    """The texts of a column of a Parquet file, row group by row group; "" for a missing one.

    Raises:
        DataError: the package pyarrow is missing, or the file has no such column of texts.
        Damaged: a corrupt file.
    """
    parquet, arrow = _package("pyarrow.parquet", path), _package("pyarrow", path)
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if text_field not in schema.names:
                raise DataError(_no_column(path, text_field, schema.names))
            kind = schema.field(text_field).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise DataError(f"{path}: column data.text_field={text_field!r} holds {kind}, not texts; name another")
            for batch in file.iter_batches(columns=[text_field]):
                yield from (text or "" for text in batch.column(0).to_pylist())
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise Damaged("Parquet", error) from None


def _no_column(where: str, text_field: str, names: Sequence[str]) -> str:
    return f"{where} has no column data.text_field={text_field!r}; its columns: {', '.join(map(repr, names)) or 'none'}"


def open_hub(path: str, label: str) -> tuple[Any, str]:
    """The dataset hf://NAME[/CONFIG][:SPLIT], and what changes with its content.

    NAME is ORGANISATION/DATASET, or a local folder that begins with . or /; the split is "train" unless given.

    Raises:
        DataError: the package datasets is missing, or it cannot find or load the dataset.
    """
    datasets = _package("datasets", label)
    name, _, split = path.removeprefix(HUB).partition(":")
    config = None
    if not name.startswith((".", "/")):
        *owner, last = name.split("/")[:2]
        config = "/".join(name.split("/")[2:]) or None
        name = "/".join([*owner, last])
    try:
        dataset = datasets.load_dataset(name, config, split=split or "train")
    except Exception as error:  # of the network, the hub, the reader: there are many
        raise DataError(f"{label} cannot be loaded ({str(error).splitlines()[0]}); check its name and split") from None
    # Their folders are named by what the dataset was made from.
    files = [pathlib.Path(file["filename"]) for file in dataset.cache_files]
    return dataset, repr((len(dataset), [(str(file), file.stat().st_size) for file in files]))


def hub_rows(dataset: Any, text_field: str, path: str) -> Iterator[str]:
    """The texts of a column; "" for a missing one.

    Raises:
        DataError: there is no such column, or it holds something else.
    """
    if text_field not in dataset.column_names:
        raise DataError(_no_column(path, text_field, dataset.column_names))
    for row in dataset.select_columns([text_field]):
        text = row[text_field]
        if not isinstance(text, str | None):
            kind = type(text).__name__
            raise DataError(f"{path}: column data.text_field={text_field!r} holds a {kind}, not texts; name another")
        yield text or ""
