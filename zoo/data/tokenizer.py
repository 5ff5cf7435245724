"""Text to token ids and back: SentencePiece, bytes, characters."""

import abc
import codecs
import hashlib
import heapq
import io
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex

import sentencepiece

from zoo.config import DataConfig
from zoo.data.sources import DataError, Document

# Beyond this, more text changes the pieces of a small vocabulary no more (2.97 bytes per token on the
# standard library from 4 MB, 3.00 from 12 MB).
SAMPLE_CHARACTERS = 16 << 20

_REPLACEMENT = "\ufffd".encode()
_SPACE = "\u2581"  # SentencePiece's own sign for a space
_UNKNOWN = "\u2585"  # and, while it trains, for a character outside the vocabulary


class Tokenizer(abc.ABC):
    """Text to ids in [0, vocab_size) and back.

    Attributes:
        kind: "sentencepiece", "bytes" or "characters".
        vocab_size: ids, specials included.
        pad_id: fills windows that have no text.
        bos_id, eos_id: begin and end a document; -1 where a foreign SentencePiece model has none.
        fingerprint: 16 hexadecimal digits that differ where the tokenizer does.
        drops_first_space: `decode` drops one space in front, which `encode` has added there.
    """

    kind: str
    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    fingerprint: str
    drops_first_space: bool = False

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without specials.

        Raises:
            DataError: `text` holds half a surrogate pair, which is no Unicode.
        """

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text; on all cores where the tokenizer can."""
        return [self.encode(text) for text in texts]

    @abc.abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for, perhaps a part of a character; none for a special.

        An id outside the vocabulary, which a model with a larger one may sample, stands for U+FFFD.
        """

    @abc.abstractmethod
    def content(self) -> bytes:
        """What tells this tokenizer from others of its kind."""

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of `ids`; specials are dropped, bytes that are no UTF-8 become U+FFFD."""
        decoder = StreamDecoder(self)
        return decoder.push(*ids) + decoder.flush()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the files that `load_tokenizer` reads into `directory`, which is made if need be."""
        folder = pathlib.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(self.content())
        (folder / "tokenizer.json").write_text(json.dumps({"kind": self.kind, "fingerprint": self.fingerprint}))


class StreamDecoder:
    """Decodes ids as they come; what it returns adds up to `tokenizer.decode` of all of them.

    A character whose bytes are spread over tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space

    def push(self, *ids: SupportsIndex) -> str:
        """The text that these further ids complete."""
        data = b"".join(self._token_bytes(int(token)) for token in ids)
        if self._drop_space and data:
            data, self._drop_space = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 as ids 0 to 255, then padding, BOS and EOS."""

    kind = "bytes"
    vocab_size, pad_id, bos_id, eos_id = 259, 256, 257, 258

    def __init__(self):
        self.fingerprint = _fingerprint(self)

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def token_bytes(self, token: int) -> bytes:
        if 0 <= token < 256:
            return bytes([token])
        return b"" if token < self.vocab_size else _REPLACEMENT

    def content(self) -> bytes:
        return b""


class CharacterTokenizer(Tokenizer):
    """Padding, unknown, BOS and EOS as ids 0 to 3, then the characters of an alphabet.

    A character outside the alphabet becomes the unknown token, which decodes to U+FFFD: there is no round
    trip for text with characters that the training text lacks.
    """

    kind = "characters"
    pad_id, unknown_id, bos_id, eos_id = 0, 1, 2, 3

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = sorted(set(alphabet))
        self.vocab_size = 4 + len(self.alphabet)
        self._ids = {character: 4 + i for i, character in enumerate(self.alphabet)}
        self.fingerprint = _fingerprint(self)

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        return [self._ids.get(character, self.unknown_id) for character in text]

    def token_bytes(self, token: int) -> bytes:
        if 4 <= token < self.vocab_size:
            return self.alphabet[token - 4].encode()
        return b"" if token in (self.pad_id, self.bos_id, self.eos_id) else _REPLACEMENT

    def content(self) -> bytes:
        return "".join(self.alphabet).encode()


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; one trained by `train_sentencepiece` gives back every text exactly.

    SentencePiece writes a space as U+2581 and would read that character back as a space, so the character
    itself is passed around the model, as its three bytes.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        if not model:
            raise RuntimeError("the model is empty")
        self._model = model
        self._processor = processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = processor.vocab_size()
        self.bos_id, self.eos_id = processor.bos_id(), processor.eos_id()
        # LLaMA's model, for one, has no padding; what fills a window is masked, so any id will do.
        self.pad_id = max(processor.pad_id(), 0)
        self.fingerprint = _fingerprint(self)
        self.drops_first_space = processor.encode("a", out_type=str)[0].startswith(_SPACE)
        self._bytes = [self._piece_bytes(token) for token in range(self.vocab_size)]
        space = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        self._space = space if all(map(processor.is_byte, space)) and not self.drops_first_space else None

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        if self._space is None or _SPACE not in text:
            return self._processor.encode(text)
        first, *rest = (self._processor.encode(part) for part in text.split(_SPACE))
        return first + [token for part in rest for token in self._space + part]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        if any(_SPACE in text for text in texts):
            return super().encode_many(texts)
        return self._processor.encode(list(texts), num_threads=os.cpu_count())

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < self.vocab_size else _REPLACEMENT

    def content(self) -> bytes:
        return self._model

    def _piece_bytes(self, token: int) -> bytes:
        piece = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        if self._processor.is_unknown(token):
            return _REPLACEMENT
        return b"" if self._processor.is_control(token) else piece.replace(_SPACE, " ").encode()


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text holds half a surrogate pair at character {error.start}; remove it") from None


def _fingerprint(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.kind.encode() + b"\0" + tokenizer.content()).hexdigest()[:16]


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `save` has written into `directory`.

    Raises:
        DataError: files are missing or damaged.
    """
    folder = pathlib.Path(directory)
    try:
        record = json.loads((folder / "tokenizer.json").read_text())
        tokenizer = _restore(record["kind"], (folder / "tokenizer.model").read_bytes())
        whole = tokenizer.fingerprint == record["fingerprint"]
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no tokenizer: {error.filename} is missing") from None
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); restore the tokenizer's files") from None
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"the tokenizer in {folder} is damaged ({error}); restore its files") from None
    if not whole:
        raise DataError(f"the tokenizer in {folder} is damaged (its content has changed); restore its files")
    return tokenizer


def _restore(kind: str, content: bytes) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "characters":
        return CharacterTokenizer(content.decode())
    if kind == "sentencepiece":
        return SentencePieceTokenizer(content)
    raise ValueError(f"its kind is {kind!r}")


def read_sentencepiece(path: str) -> SentencePieceTokenizer:
    """The SentencePiece model in the file `path`.

    Raises:
        DataError: there is no such file, or it holds something else.
    """
    label = f"data.tokenizer_model={path!r}"
    try:
        return SentencePieceTokenizer(pathlib.Path(path).expanduser().read_bytes())
    except OSError as error:
        raise DataError(f"{label} cannot be read ({error.strerror}); give a SentencePiece .model file") from None
    except RuntimeError:
        raise DataError(f"{label} is no SentencePiece model; give a .model file that its trainer wrote") from None


def make_tokenizer(config: DataConfig, documents: Iterable[Document]) -> Tokenizer:
    """The tokenizer that `config` asks for, learned from `documents` where it has to be.

    Raises:
        DataError: the model file is unusable, or the text does not carry `config.vocab_size` pieces.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer_model is not None:
        return read_sentencepiece(config.tokenizer_model)
    if config.tokenizer == "characters":
        return CharacterTokenizer(character for d in documents for piece in d.pieces() for character in set(piece))
    return train_sentencepiece(sample(documents), config.vocab_size)


def sample(documents: Iterable[Document], limit: int = SAMPLE_CHARACTERS) -> list[str]:
    """Pieces of the text, about `limit` characters, always the same: those with the lowest hashes, in order."""
    kept: list[tuple[int, int, str]] = []
    total = 0
    for order, (key, text) in enumerate(_keyed(documents)):
        heapq.heappush(kept, (-key, order, text))
        total += len(text)
        while total - len(kept[0][2]) >= limit:
            total -= len(heapq.heappop(kept)[2])
    return [text for _, _, text in sorted(kept, key=lambda entry: entry[1])]


def _keyed(documents: Iterable[Document]) -> Iterator[tuple[int, str]]:
    for document in documents:
        for number, text in enumerate(document.pieces()):
            name = f"{document.name}#{number}".encode()
            yield int.from_bytes(hashlib.sha256(name).digest()[:8], "big"), text


def train_sentencepiece(texts: Sequence[str], vocab_size: int) -> SentencePieceTokenizer:
    """A byte-pair encoding (arXiv 1508.07909) of `vocab_size` pieces, 256 bytes and 4 specials included.

    Text is taken as it is: no normalization, no added or removed space. A text is one training sentence, so
    line ends and indentation are learned too.

    Raises:
        DataError: the texts carry fewer pieces, or need more.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=(re.sub(f"[{_SPACE}{_UNKNOWN}]", "\n", text) for text in texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            max_sentence_length=1 << 30,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            num_threads=2,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _vocabulary_error(str(error), vocab_size) from None
    return SentencePieceTokenizer(model.getvalue())


def _vocabulary_error(message: str, vocab_size: int) -> DataError:
    asked = f"data.vocab_size={vocab_size}"
    if found := re.search(r"<= (\d+)", message):
        return DataError(f"{asked} is more than the training text carries; use at most {found[1]}, or more text")
    if found := re.search(r"\d+ vs (\d+)", message):
        return DataError(f"{asked} is less than the training text needs; use at least {found[1]}")
    return DataError(f"SentencePiece cannot be trained with {asked} on this text ({message}); use more text")
