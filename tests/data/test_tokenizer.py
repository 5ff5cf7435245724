"""Tokenizers: exact round trips, streaming, saving, and errors that say what to change."""

import io

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zoo.config import DataConfig
from zoo.data import tokenizer as module
from zoo.data.sources import DataError, Document
from zoo.data.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    SentencePieceTokenizer,
    StreamDecoder,
    load_tokenizer,
    make_tokenizer,
    sample,
    train_sentencepiece,
)

CODE = """def f(x):
    if x:
        return [y for y in x]
    return None


class A:
    def g(self):
        pass
"""
SENTENCEPIECE = train_sentencepiece([CODE * 3, "# ▁ und ▅\té漢\n"], 320)
TOKENIZERS = [SENTENCEPIECE, ByteTokenizer(), CharacterTokenizer(CODE)]
EXACT = TOKENIZERS[:2]
kinds = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda t: t.kind)
exact = pytest.mark.parametrize("tokenizer", EXACT, ids=lambda t: t.kind)

# Hypothesis's own text, and text made of what SentencePiece gives a meaning to.
pieces = st.lists(
    st.sampled_from(["▁", "▅", " ", "  ", "\n", "\t", "\r\n", "\0", "<s>", "</s>", "<0x41>", "def", "é漢😀"])
)
texts = st.one_of(st.text(), pieces.map("".join))


def document(text, name="a"):
    return Document(name, lambda: iter([text]))


@exact
@settings(max_examples=300, deadline=None)
@given(text=texts)
@example(text="\ufeff a\u2581 \u2581\n\u00a0\u3000  ")
def test_any_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)
    assert tokenizer.encode_many([text, "x"]) == [ids, tokenizer.encode("x")]


@kinds
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_stream_of_any_tokens_adds_up_to_their_text_in_whole_characters(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    decoder = StreamDecoder(tokenizer)
    parts = [decoder.push(token) for token in ids]
    joined = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert "".join(parts) + decoder.flush() == tokenizer.decode(ids) == joined.decode("utf-8", "replace")


def test_a_character_is_held_back_until_it_is_whole():
    tokenizer = ByteTokenizer()
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(token) for token in "é😀a".encode()] == ["", "é", "", "", "", "😀", "a"]
    assert decoder.push(0xE6) == "" and decoder.flush() == "\ufffd"
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"


def test_numpy_ids_decode_too():
    assert SENTENCEPIECE.decode(np.array(SENTENCEPIECE.encode(CODE), np.uint16)) == CODE


def test_sentencepiece_learns_indentation_line_ends_and_the_requested_number_of_pieces():
    assert SENTENCEPIECE.vocab_size == 320
    assert (SENTENCEPIECE.pad_id, SENTENCEPIECE.bos_id, SENTENCEPIECE.eos_id) == (0, 2, 3)
    learned = {SENTENCEPIECE.token_bytes(token) for token in range(320)}
    assert b"    " in learned and any(b"\n" in piece and len(piece) > 1 for piece in learned)
    assert len(SENTENCEPIECE.encode(CODE)) < len(CODE) / 2


def test_training_is_deterministic_and_silent(capfd):
    again = train_sentencepiece([CODE * 3, "# ▁ und ▅\té漢\n"], 320)
    assert again.fingerprint == SENTENCEPIECE.fingerprint
    assert capfd.readouterr() == ("", "")


def test_bytes_are_their_own_ids():
    assert ByteTokenizer().encode("aé") == [97, 0xC3, 0xA9]
    assert ByteTokenizer().vocab_size == 259


def test_an_unseen_character_becomes_the_unknown_token():
    tokenizer = CharacterTokenizer("cab")
    assert tokenizer.encode("abXc") == [4, 5, 1, 6]
    assert tokenizer.decode(tokenizer.encode("abXc")) == "ab\ufffdc"


@kinds
def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "deep" / "tokenizer")
    loaded = load_tokenizer(tmp_path / "deep" / "tokenizer")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint and len(loaded.fingerprint) == 16
    assert loaded.encode(CODE) == tokenizer.encode(CODE)


def test_fingerprints_tell_tokenizers_apart():
    others = [*TOKENIZERS, CharacterTokenizer("ab"), CharacterTokenizer("abc"), train_sentencepiece([CODE * 3], 321)]
    assert len({tokenizer.fingerprint for tokenizer in others}) == len(others)


@pytest.mark.parametrize("damage", ["missing", "no JSON", "unknown kind", "other content", "no model"])
def test_a_damaged_folder_is_refused(tmp_path, damage):
    SENTENCEPIECE.save(tmp_path)
    if damage == "missing":
        (tmp_path / "tokenizer.json").unlink()
    elif damage == "no JSON":
        (tmp_path / "tokenizer.json").write_text("{")
    elif damage == "unknown kind":
        (tmp_path / "tokenizer.json").write_text('{"kind": "words", "fingerprint": ""}')
    elif damage == "other content":
        train_sentencepiece([CODE], 300).save(tmp_path / "other")
        (tmp_path / "tokenizer.model").write_bytes((tmp_path / "other" / "tokenizer.model").read_bytes())
    else:
        (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(DataError, match=f"{tmp_path}"):
        load_tokenizer(tmp_path)


def trained_elsewhere(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CODE.split()), model_writer=model, hard_vocab_limit=False, minloglevel=2, **options
    )
    path.write_bytes(model.getvalue())
    return DataConfig(tokenizer_model=str(path))


def test_a_foreign_model_with_a_dummy_space_decodes_as_sentencepiece_does(tmp_path):
    tokenizer = make_tokenizer(trained_elsewhere(tmp_path / "m.model", vocab_size=40), ())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    assert tokenizer.drops_first_space and tokenizer.pad_id == 0
    for text in ("return self", "def f", "if x"):
        assert tokenizer.encode(text) == processor.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == processor.decode(processor.encode(text)) == text


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\n\x07"])
def test_a_file_that_is_no_model_is_refused_without_noise(tmp_path, capfd, content):
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.tokenizer_model='.*x\.model' is no SentencePiece model"):
        make_tokenizer(DataConfig(tokenizer_model=str(tmp_path / "x.model")), ())
    assert capfd.readouterr() == ("", "")


def test_a_file_in_the_folder_s_place_is_refused(tmp_path):
    (tmp_path / "tokenizer").write_text("")
    with pytest.raises(DataError, match=r"tokenizer.json cannot be read \(Not a directory\); restore"):
        load_tokenizer(tmp_path / "tokenizer")


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"data\.tokenizer_model='.*none' cannot be read \(No such file"):
        make_tokenizer(DataConfig(tokenizer_model=str(tmp_path / "none")), ())
    with pytest.raises(DataError, match=r"data\.tokenizer_model=.* cannot be read \(Is a directory\); give a Sentence"):
        make_tokenizer(DataConfig(tokenizer_model=str(tmp_path)), ())


def test_a_vocabulary_too_large_or_small_for_the_text_names_the_one_that_fits():
    with pytest.raises(DataError, match=r"data\.vocab_size=5000 .* at most (\d+)") as error:
        train_sentencepiece([CODE], 5000)
    most = int(str(error.value).split("at most ")[1].split(",")[0])
    assert train_sentencepiece([CODE], most).vocab_size == most
    with pytest.raises(DataError, match="at most"):
        train_sentencepiece([CODE], most + 1)
    with pytest.raises(DataError, match=r"data\.vocab_size=100 .* at least (\d+)") as error:
        train_sentencepiece([CODE], 100)
    least = int(str(error.value).split("at least ")[1])
    assert train_sentencepiece([CODE], least).vocab_size == least
    with pytest.raises(DataError, match="at least"):
        train_sentencepiece([CODE], least - 1)


@kinds
def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(DataError, match="surrogate pair at character 2"):
        tokenizer.encode("ab\ud800")


def test_each_kind_is_made_from_its_config():
    made = make_tokenizer(DataConfig(vocab_size=300), [document(CODE)])
    assert isinstance(made, SentencePieceTokenizer) and made.vocab_size == 300
    assert isinstance(make_tokenizer(DataConfig(tokenizer="bytes"), ()), ByteTokenizer)
    made = make_tokenizer(DataConfig(tokenizer="characters"), [document("ab"), document("bc\n")])
    assert isinstance(made, CharacterTokenizer) and made.alphabet == ["\n", "a", "b", "c"]


def test_a_sample_is_bounded_in_order_and_the_same_every_time():
    documents = [document(f"{i:04d}" * 25, str(i)) for i in range(200)]
    taken = sample(documents, 2000)
    assert 2000 <= sum(map(len, taken)) < 2100
    assert taken == sorted(taken) == sample(documents, 2000)
    assert int(taken[0][:4]) < 50 and int(taken[-1][:4]) > 150  # from everywhere, not from the start
    assert sample(documents) == ["".join(d.pieces()) for d in documents]
    assert sum(map(len, sample([document("x" * 99)], 10))) == 99


def test_the_sample_of_a_config_is_what_sentencepiece_is_trained_on(monkeypatch):
    monkeypatch.setattr(module, "sample", lambda documents: [CODE])
    assert make_tokenizer(DataConfig(vocab_size=300), ()).fingerprint == train_sentencepiece([CODE], 300).fingerprint
