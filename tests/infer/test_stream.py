"""Pieces of text as they grow: stop strings and characters that arrive in parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.data.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer, train_sentencepiece
from zoo.infer.stream import TextStream, first_stop, possible_stop


class Pieces(Tokenizer):
    """A tokenizer whose token i stands for `pieces[i]`."""

    def __init__(self, pieces: list[bytes], drops_first_space: bool = False):
        self.pieces = pieces
        self.drops_first_space = drops_first_space

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(text.encode())]

    def content(self) -> bytes:
        return b"".join(self.pieces)


def run(pieces: list[bytes], stop: list[str]) -> TextStream:
    """The stream of all pieces, checked on the way: what was shown only grows, and adds up."""
    stream = TextStream(Pieces(pieces), [], stop)
    shown = ""
    for token in range(len(pieces)):
        shown += stream.push(token)
        assert shown == stream.text
        if stream.stopped:
            break
    assert shown + stream.finish() == stream.text
    return stream


def cut(text: str, stop: list[str]) -> str:
    """The text before the first stop string, found letter by letter."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


letters = st.text("abé\U0001f600", max_size=12)
stops = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@given(st.lists(letters, max_size=6), stops)
def test_text_ends_before_the_first_stop_string_however_it_is_divided(texts, stop):
    whole = "".join(texts)
    stream = run([t.encode() for t in texts], stop)
    assert stream.text == cut(whole, stop)
    assert stream.stopped == any(s in whole for s in stop)


@given(letters, stops)
def test_bytes_one_by_one_give_the_same(text, stop):
    assert run([bytes([b]) for b in text.encode()], stop).text == cut(text, stop)


@given(letters, stops)
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(text, stop):
    stream = TextStream(Pieces([text.encode()]), [], stop)
    stream.push(0)
    held = text[len(stream.text) :]
    assert stream.stopped or held == "" or any(s.startswith(held) for s in stop)


def test_a_character_is_shown_when_it_is_whole():
    stream = TextStream(ByteTokenizer(), [])
    assert [stream.push(b) for b in "aé😀".encode()] == ["a", "", "é", "", "", "", "😀"]
    assert stream.finish() == ""


def test_half_a_character_at_the_end_becomes_a_replacement():
    stream = TextStream(ByteTokenizer(), [])
    assert stream.push("é".encode()[0]) == ""
    assert stream.finish() == "\ufffd"


def test_a_stop_string_that_never_comes_is_shown_at_the_end():
    stream = TextStream(CharacterTokenizer("ab"), [], ["abb"])
    ids = CharacterTokenizer("ab").encode("ab")
    assert [stream.push(token) for token in ids] == ["", ""]
    assert stream.finish() == "ab" and not stream.stopped


def test_nothing_comes_after_a_stop_string():
    stream = TextStream(CharacterTokenizer("abc"), [], ["b"])
    a, b, c = CharacterTokenizer("abc").encode("abc")
    assert [stream.push(a), stream.push(b), stream.push(c), stream.finish()] == ["a", "", "", ""]
    assert stream.stopped


def test_a_space_after_the_prompt_stays():
    pieces = [b" Hello", b" world"]
    stream = TextStream(Pieces(pieces, drops_first_space=True), [0])
    assert stream.push(1) == " world"
    stream = TextStream(Pieces(pieces, drops_first_space=True), [])
    assert stream.push(1) == "world"


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n", "naïve ▁ 😀 text\n\n"])
def test_sentencepiece_goes_on_from_any_place(text):
    tokenizer = train_sentencepiece(["def f(x):\n    return x  # naive text\n"] * 4, 280)
    ids = tokenizer.encode(text)
    for at in range(len(ids) + 1):
        stream = TextStream(tokenizer, ids[:at])
        rest = "".join(stream.push(token) for token in ids[at:]) + stream.finish()
        assert text.endswith(rest)
        assert len(rest) >= len(text) - len(tokenizer.decode(ids[:at]))


def test_the_first_stop_string_to_be_complete_counts():
    assert first_stop("xxab", ["ab", "xxabc"]) == 2
    assert first_stop("xxabc", ["ab", "xxabc"]) == 2
    assert first_stop("aab", ["b", "ab"]) == 1
    assert first_stop("aa", ["b"]) is None
    assert possible_stop("xab", ["abc", "b"]) == 2
    assert possible_stop("xab", []) == 0
