"""The token cache: what it holds, when it is built again, and builds that are killed or run twice at once."""

import dataclasses
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from zoo.config import DataConfig
from zoo.data import cache
from zoo.data.cache import cache_root, prepare
from zoo.data.sources import DataError, open_sources, split_documents
from zoo.data.tokenizer import ByteTokenizer, CharacterTokenizer

WORDS = ["alpha beta", "gamma é漢", "delta\n", "epsilon ▁"]


@pytest.fixture
def config(tmp_path):
    lines = [json.dumps({"text": f"{i} " + " ".join(WORDS) * (i % 5)}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return DataConfig(
        path=str(tmp_path / "text.jsonl"), tokenizer="bytes", validation_fraction=0.3, cache_dir=str(tmp_path / "cache")
    )


def change(config, **fields):
    return dataclasses.replace(config, **fields)


def texts(config):
    """{part: its documents' texts}."""
    found = {"train": [], "validation": []}
    for part, document in split_documents(open_sources(config)[0], config):
        found[part].append("".join(document.pieces()))
    return found


def documents(part):
    return [part.tokens[start:stop].tolist() for start, stop in zip(part.offsets[:-1], part.offsets[1:], strict=True)]


def count_builds(monkeypatch):
    built, build = [], cache._build
    monkeypatch.setattr(cache, "_build", lambda folder, *rest: (built.append(folder), build(folder, *rest)))
    return built


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_documents_lie_one_after_another_with_their_specials(config, monkeypatch, add_bos, add_eos):
    monkeypatch.setattr(cache, "BATCH_CHARACTERS", 40)
    corpus = prepare(change(config, add_bos=add_bos, add_eos=add_eos))
    for part, expected in texts(config).items():
        found = getattr(corpus, part)
        begin, end = [257] * add_bos, [258] * add_eos
        assert documents(found) == [begin + list(text.encode()) + end for text in expected]
        assert found.text_bytes == sum(len(text.encode()) for text in expected)
        assert found.tokens.dtype == np.uint16 and found.offsets.dtype == np.int64
        assert (found.vocab_size, found.pad_id) == (259, 256)


def test_the_size_after_gzip_is_that_of_the_whole_validation_text(config):
    corpus = prepare(config)
    text = "".join(texts(config)["validation"]).encode()
    assert corpus.validation.gzip_bytes == len(gzip.compress(text, 9))
    assert corpus.train.gzip_bytes is None


def test_a_long_document_is_tokenized_in_pieces_with_one_beginning_and_one_end(config, tmp_path, monkeypatch):
    monkeypatch.setattr("zoo.data.sources.PIECE_BYTES", 64)
    text = "line é\n" * 200
    (tmp_path / "long.txt").write_text(text)
    corpus = prepare(change(config, path=str(tmp_path / "long.txt")))
    cut = int(len(text) * 0.7)
    assert documents(corpus.train) == [[257, *text[:cut].encode(), 258]]
    assert documents(corpus.validation) == [[257, *text[cut:].encode(), 258]]


def test_many_ids_are_kept_in_thirty_two_bits(config, tmp_path):
    text = "".join(chr(0x10000 + i) for i in range(70_000))
    (tmp_path / "wide.txt").write_text(text)
    corpus = prepare(change(config, path=str(tmp_path / "wide.txt"), tokenizer="characters", validation_fraction=1e-3))
    assert corpus.train.tokens.dtype == np.uint32
    assert corpus.tokenizer.decode(corpus.train.tokens) == text[: int(len(text) * (1 - 1e-3))]


def test_a_second_start_only_opens_what_the_first_has_built(config, monkeypatch, capsys):
    built = count_builds(monkeypatch)
    settings = change(config, tokenizer="sentencepiece", vocab_size=290)
    first = prepare(settings)
    assert "tokenizing" in capsys.readouterr().err
    monkeypatch.setattr(cache, "make_tokenizer", None)
    second = prepare(settings)
    assert len(built) == 1 and capsys.readouterr() == ("", "")
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert documents(second.train) == documents(first.train)


def test_the_tokenizer_learns_from_the_training_text_alone(config):
    corpus = prepare(change(config, tokenizer="characters", split="tail", validation_fraction=0.99))
    train = "".join(texts(change(config, split="tail", validation_fraction=0.99))["train"])
    assert corpus.tokenizer.alphabet == sorted(set(train))
    assert corpus.tokenizer.unknown_id in corpus.validation.tokens


def test_a_given_tokenizer_is_used(config):
    tokenizer = CharacterTokenizer("abcdef")
    corpus = prepare(config, tokenizer)
    assert corpus.tokenizer is tokenizer and corpus.train.vocab_size == 10
    assert prepare(config).train.vocab_size == 259


def test_other_text_tokenizer_or_settings_get_a_cache_of_their_own(config, monkeypatch):
    built = count_builds(monkeypatch)
    for changes in (
        {},
        {"split": "tail"},
        {"add_bos": False},
        {"validation_fraction": 0.4},
        {"tokenizer": "characters"},
    ):
        prepare(change(config, **changes))
    pathlib.Path(config.path).write_text('{"text": "other"}\n' * 20)
    prepare(config)
    assert len(set(built)) == 6


@pytest.mark.parametrize("damage", ["short tokens", "short offsets", "no offsets", "bad meta", "no meta"])
def test_a_damaged_cache_is_built_again(config, monkeypatch, damage):
    expected = documents(prepare(config).validation)
    (place,) = (p for p in (cache_root(config) / "tokens").iterdir() if p.is_dir())
    if damage.startswith("short"):
        path = place / f"validation.{damage.split()[1]}"
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "bad meta":
        (place / "meta.json").write_text("{")
    else:
        (place / {"no meta": "meta.json", "no offsets": "train.offsets"}[damage]).unlink()
    built = count_builds(monkeypatch)
    assert documents(prepare(config).validation) == expected
    assert len(built) == 1


def test_a_failed_build_leaves_nothing_behind(config):
    with open(config.path, "a") as stream:
        stream.write("\nbroken")
    with pytest.raises(DataError, match=r"line 61 is not JSON"):
        prepare(config)
    assert not [path for path in (cache_root(config) / "tokens").iterdir() if path.is_dir()]


def start(config):
    """Another process that prepares `config` and prints how many tokens it got."""
    imports = "from zoo.config import DataConfig; from zoo.data.cache import prepare"
    program = f"{imports}; print(len(prepare({config!r}).train.tokens))"
    root = pathlib.Path(cache.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def large(config, tmp_path):
    line = "a line of text that is long enough to take its time, é漢\n"
    (tmp_path / "large.txt").write_text(line * (30_000_000 // len(line.encode())))
    return change(config, path=str(tmp_path / "large.txt"))


def test_a_killed_build_is_not_taken_for_a_whole_one(large):
    process = start(large)
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size for p in cache_root(large).glob("tokens/*.building/train.tokens")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(cache_root(large).glob("tokens/*/meta.json"))
    assert list(cache_root(large).glob("tokens/*.building"))
    corpus = prepare(large)
    assert not list(cache_root(large).glob("tokens/*.building"))
    data = pathlib.Path(large.path).read_text()
    assert corpus.train.text_bytes + corpus.validation.text_bytes == len(data.encode())
    assert bytes(corpus.validation.tokens[-1001:-1].astype(np.uint8)) == data.encode()[-1000:]


def test_two_processes_at_once_build_one_cache(config, tmp_path):
    (tmp_path / "some.txt").write_text("some text\n" * 100_000)
    settings = change(config, path=str(tmp_path / "some.txt"), tokenizer="sentencepiece", vocab_size=268)
    both = [start(settings), start(settings)]
    counts = [int(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert counts == [len(prepare(settings).train.tokens)] * 2
    assert len([p for p in (cache_root(settings) / "tokens").iterdir() if p.is_dir()]) == 1


def test_memory_does_not_grow_with_the_text(large, monkeypatch):
    monkeypatch.setattr("zoo.data.sources.PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(cache, "BATCH_CHARACTERS", 1 << 16)
    tracemalloc.start()
    corpus = prepare(large)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(corpus.train.tokens) > 20_000_000
    assert peak < 8_000_000


def test_the_cache_lies_where_config_environment_or_home_say(monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", "/elsewhere")
    assert cache_root(DataConfig(cache_dir="/here")) == pathlib.Path("/here")
    assert cache_root(DataConfig()) == pathlib.Path("/elsewhere")
    monkeypatch.delenv("ZOO_CACHE")
    assert cache_root(DataConfig()) == pathlib.Path.home() / ".cache" / "zoo"


def test_a_cache_folder_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"the cache .*file.* cannot be written \(Not a directory\); set data\.cache_dir"
    ):
        prepare(change(config, cache_dir=str(tmp_path / "file")))


def test_a_full_disk_is_named_and_leaves_nothing(config, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_build", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        prepare(config)
    assert not [path for path in (cache_root(config) / "tokens").iterdir() if path.is_dir()]


def test_a_part_without_tokens_is_named(config):
    class Mute(ByteTokenizer):
        def encode(self, text):
            return []

    with pytest.raises(DataError, match=r"the training text of data.path=.* has no tokens"):
        prepare(change(config, add_bos=False, add_eos=False), Mute())


def test_a_cache_that_vanishes_is_named(config, monkeypatch):
    monkeypatch.setattr(cache, "_load", lambda *_: None)
    with pytest.raises(DataError, match=r"the cache .* was built but cannot be read; set data\.cache_dir"):
        prepare(config)


def test_the_digest_follows_tokens_and_documents_alone(config, tmp_path):
    def digests(name, documents, **fields):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        settings = change(config, path=str(tmp_path / name), split="tail", validation_fraction=0.5, **fields)
        corpus = prepare(settings)
        assert prepare(settings).train.digest == corpus.train.digest  # as built, and as opened
        return corpus.train.digest, corpus.validation.digest

    plain = {"add_bos": False, "add_eos": False}
    first = digests("a.jsonl", ["abcd", "efgh"], **plain)
    assert digests("b.jsonl", ["abcd", "efgh"], **plain) == first
    assert [len(set(pair)) for pair in zip(first, digests("c.jsonl", ["abxd", "efgh"], **plain), strict=True)] == [1, 2]
    together = ["".join(parts) for parts in (("ab", "ef"), ("cd", "gh"))]
    assert len({first[0], digests("d.jsonl", [together[0] * 2], **plain)[0]}) == 2  # the same tokens in one document


def test_a_special_that_the_tokenizer_lacks_is_asked_for_in_vain(config):
    tokenizer = ByteTokenizer()
    tokenizer.eos_id = -1
    with pytest.raises(DataError, match=r"data\.add_eos=True needs a token"):
        prepare(config, tokenizer)
    prepare(change(config, add_eos=False), tokenizer)


def test_a_terminal_sees_a_bar_and_a_pipe_a_line(config, monkeypatch, capsys):
    prepare(config)
    assert capsys.readouterr().err == f"tokenizing: data.path={config.path!r}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    prepare(change(config, add_bos=False))
    assert "%" in capsys.readouterr().err
