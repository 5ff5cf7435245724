import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.checkpoint import Checkpoints
from zoo.config import DataConfig, Experiment, MeshConfig, ModelConfig, SparseConfig, TrainConfig
from zoo.data.tokenizer import ByteTokenizer, CharacterTokenizer
from zoo.models.decoder import build
from zoo.rundir import Record, RunDir, RunError, load, open_run, with_vocabulary

TOKENIZER = ByteTokenizer()


def experiment(path, **parts):
    model = ModelConfig(context_length=8, d_model=8, n_layers=1, n_heads=1, **parts.pop("model", {}))
    train = TrainConfig(dir=str(path), **parts.pop("train", {}))
    return Experiment(name="x", model=model, train=train, **parts)


def record(settings, tokenizer=TOKENIZER, tokens=(100, 10), text=("a1", "b2")):
    return Record(settings, tokenizer.vocab_size, tokenizer.fingerprint, tokens, text)


@pytest.fixture
def run(tmp_path):
    """A run directory as it is after its first step."""
    settings = experiment(tmp_path / "run")
    directory = open_run(settings)
    with directory.held():
        directory.begin(record(settings), TOKENIZER)
    return directory


def test_a_new_directory_is_made_by_begin_only(tmp_path):
    settings = experiment(tmp_path / "deep" / "run", model={"moe": SparseConfig(n_experts=4)})
    run = open_run(settings)
    assert not run.path.exists() and run.record() is None and run.open_tokenizer() is None
    with run.held():
        run.begin(record(settings), TOKENIZER)
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "lock", "tokenizer"]
    assert run.record() == record(settings)
    assert run.open_tokenizer().fingerprint == TOKENIZER.fingerprint


def test_the_same_experiment_opens_it_again_with_other_speed_and_length(run):
    settings = experiment(
        run.path, train={"steps": 7000, "log_every": 3}, mesh=MeshConfig(fsdp=2), model={"remat": "full"}
    )
    again = open_run(settings)
    again.begin(record(settings), TOKENIZER)
    assert again.record().experiment.train.steps == 7000


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": {"d_ff": 64}}, "model.d_ff is None there and 64 here"),
        ({"model": {"moe": SparseConfig(n_experts=4)}}, "model.moe.n_experts is 'unset' there and 4 here"),
        ({"data": DataConfig(vocab_size=99)}, "data.vocab_size is 2048 there and 99 here"),
        ({"train": {"seed": 3}}, "train.seed is 0 there and 3 here"),
    ],
)
def test_another_experiment_is_refused_by_the_fields_that_differ(run, change, words):
    with pytest.raises(RunError, match=r"choose another --train.dir") as error:
        open_run(experiment(run.path, **change))
    assert words in str(error.value) and "remat" not in str(error.value) and "\n" not in str(error.value)


def test_a_directory_that_cannot_be_made_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    settings = experiment(tmp_path / "file" / "run")
    run = RunDir(tmp_path / "file" / "run")
    with pytest.raises(RunError, match=r"file/run cannot be written \(Not a directory\); .* another --train.dir"):
        run.held().__enter__()
    with pytest.raises(RunError, match=r"file/run/config.json cannot be written \(Not a directory\)"):
        run.begin(record(settings), TOKENIZER)


def test_a_full_disk_leaves_the_old_config_whole(run):
    before = run.config.read_bytes()
    (run.path / "config.json.new").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"config.json cannot be written \(No space left on device\)"):
        run.begin(record(run.record().experiment), TOKENIZER)
    assert run.config.read_bytes() == before
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "lock", "tokenizer"]


def test_a_directory_is_held_by_one(tmp_path):
    """Also one that holds nothing but the lock: a kill may leave that."""
    run = open_run(experiment(tmp_path / "run"))
    with run.held():
        other = open_run(experiment(tmp_path / "run"))
        with pytest.raises(RunError, match=r"^process \d+ on .* is training in .*run; wait"):
            other.held().__enter__()
    with open_run(experiment(tmp_path / "run")).held():
        pass


def test_a_directory_with_something_else_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"is not a run but holds thesis.tex; choose another --train.dir"):
        open_run(experiment(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_place_where_no_directory_can_be_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, words in (
        ("file", r"train.dir=.*file' is a file"),
        ("file/deep/run", r"train.dir=.*run' lies below .*file, which is a file"),
        ("link", r"train.dir=.*link': .*link is a link to nothing"),
        ("link/run", r"train.dir=.*link/run': .*link is a link to nothing"),
    ):
        with pytest.raises(RunError, match=words + r".* another --train.dir$"):
            open_run(experiment(tmp_path / name))
    # As on a file system mounted for reading, where root may not write either.
    monkeypatch.setattr("os.access", lambda path, mode: mode == os.R_OK)
    with pytest.raises(RunError, match=rf"{tmp_path} cannot be written to; make it writable, or choose another"):
        open_run(experiment(tmp_path / "deep/run"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("name", ["tokenizer", "checkpoints", "events", "samples"])
def test_a_file_in_a_folder_s_place_is_refused(run, name):
    shutil.rmtree(run.path / name, ignore_errors=True)
    (run.path / name).write_text("")
    with pytest.raises(RunError, match=rf"{name} is not the folder that a run keeps there; move it, or choose another"):
        open_run(experiment(run.path))


@pytest.mark.parametrize("name", ["metrics.jsonl", "loss.png", "saved"])
def test_a_folder_in_a_file_s_place_is_refused(run, name):
    (run.path / name).mkdir()
    with pytest.raises(RunError, match=rf"{name} is a folder, not the file of a run; move it, or choose another"):
        open_run(experiment(run.path))


def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(run):
    open_run(experiment(run.path))  # before its first checkpoint
    run.mark_saved()
    with pytest.raises(RunError, match=r"run has been saved before, but .*checkpoints holds no checkpoint; put"):
        open_run(experiment(run.path))
    (run.checkpoints / "00000004").mkdir(parents=True)
    assert open_run(experiment(run.path)) == run


@pytest.mark.parametrize("when", ["os.replace", "pathlib.Path.rename"])
def test_a_kill_while_the_directory_is_made_is_no_obstacle(tmp_path, monkeypatch, when):
    settings = experiment(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(when, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run = open_run(settings)
        with run.held():
            run.begin(record(settings), TOKENIZER)
    run = open_run(settings)
    run.begin(record(settings), TOKENIZER)
    assert run.record() == record(settings) and run.open_tokenizer() is not None


def test_another_tokenizer_or_text_is_refused(run):
    settings = run.record().experiment
    other = CharacterTokenizer("ab")
    with pytest.raises(RunError, match=r"holds a run with another tokenizer .*259 ids there and .* 6 ids here"):
        run.begin(record(settings, other), other)
    with pytest.raises(RunError, match=r"holds a run on another text .*100 training .* 101 training"):
        run.begin(record(settings, tokens=(101, 10)), TOKENIZER)
    with pytest.raises(RunError, match=r"holds a run on another text \(of as many tokens, but not the same ones\)"):
        run.begin(record(settings, text=("a1", "b3")), TOKENIZER)
    with pytest.raises(
        RunError, match=r"holds another experiment \(train.seed is 0 there and 7 here\); bring that back"
    ):
        run.begin(record(experiment(run.path, train={"seed": 7})), TOKENIZER)
    assert run.record() == record(settings)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "Expecting value"),
        ("{}", "it has no field experiment"),
        ("[1]", "it holds a list, not an object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_damaged_config_is_named(run, text, words):
    run.config.write_text(text)
    for start in (lambda: open_run(experiment(run.path)), lambda: load(run.path)):
        with pytest.raises(RunError, match=rf"config.json does not describe a run \(.*{words}.*\); restore it"):
            start()


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("experiment", [], r"its field experiment is \[\]"),
        ("experiment", {"nam": "x"}, "nam is not a field of Experiment"),
        ("experiment", {"name": "x", "model": []}, "model"),
        ("experiment", {"name": "x", "model": {"d_model": "wide"}}, "d_model"),
        ("vocab_size", "x", 'its field vocab_size is "x"'),
        ("tokenizer", None, "its field tokenizer is null"),
        ("tokens", 3, "its field tokens is 3"),
        ("tokens", [1, 2, 3], r"its field tokens is \[1, 2, 3\]"),
        ("text", ["a", 1], r'its field text is \["a", 1\]'),
    ],
)
def test_an_edited_config_is_named_with_the_field(run, name, value, words):
    run.config.write_text(json.dumps(json.loads(run.config.read_text()) | {name: value}))
    for start in (lambda: open_run(experiment(run.path)), lambda: load(run.path)):
        with pytest.raises(RunError, match=rf"config.json does not describe a run \(.*{words}.*\); restore it"):
            start()


def test_a_config_that_cannot_be_read_is_named(run):
    run.config.unlink()
    run.config.mkdir()
    with pytest.raises(RunError, match=r"config.json cannot be read \(Is a directory\); restore it"):
        load(run.path)
    with pytest.raises(RunError, match=r"config.json is a folder, not the file of a run; move it"):
        open_run(experiment(run.path))


def test_a_run_that_lost_its_config_is_told_from_other_people_s_files(run):
    run.config.unlink()
    run.checkpoints.mkdir()
    with pytest.raises(RunError, match=r"run has checkpoints but no config.json; restore it, or choose another"):
        open_run(experiment(run.path))


# --------------------------------------------------------------------------------------------- load


def save(run, step, meta=None):
    model = build(with_vocabulary(run.record().experiment, 259).model)
    params = model.init(jax.random.key(step), jnp.zeros((1, 1), jnp.int32))["params"]
    checkpoints = Checkpoints(run.checkpoints, keep_last=9)
    checkpoints.save(step, {"step": jnp.asarray(step), "params": params}, meta or run.record().values(), wait=True)
    checkpoints.close()
    return params


def test_load_gives_the_newest_parameters_on_one_device(run):
    save(run, 1)
    want = save(run, 2)
    got = load(run.path)
    jax.tree.map(np.testing.assert_array_equal, got.params, want)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(got.params)} == {1}
    assert got.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert got.config.model == got.model.config and got.config.model.vocab_size == 259
    logits = got.model.apply({"params": got.params}, jnp.zeros((1, 4), jnp.int32)).logits
    assert logits.shape == (1, 4, 259)


def test_load_refuses_checkpoints_of_another_run(run, capsys):
    settings = run.record().experiment
    want = save(run, 1)
    save(run, 2, record(settings, CharacterTokenizer("ab")).values())
    save(run, 3, {"tokenizer": TOKENIZER.fingerprint})
    save(run, 4, record(experiment(run.path, data=DataConfig(vocab_size=99))).values())
    got = load(run.path)
    said = capsys.readouterr().err
    assert "00000002 belongs to a run with another tokenizer" in said
    assert "00000003 belongs to a run that this program does not know (it has no field experiment)" in said
    assert "00000004 belongs to another experiment (data.vocab_size is 99 there and 2048 here)" in said
    jax.tree.map(np.testing.assert_array_equal, got.params, want)


def test_load_says_what_is_missing(tmp_path, run):
    with pytest.raises(RunError, match=r"there is no run directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"is not a run: it has no config.json"):
        load(tmp_path)
    with pytest.raises(RunError, match=r"has no checkpoint yet"):
        load(run.path)


def test_load_refuses_a_tokenizer_of_another_vocabulary(run):
    CharacterTokenizer("ab").save(run.tokenizer)
    with pytest.raises(RunError, match=r"has 6 ids .* trained with 259"):
        load(run.path)


def test_the_vocabulary_is_set_only_where_it_was_left_open(tmp_path):
    settings = experiment(tmp_path)
    assert with_vocabulary(settings, 259).model.vocab_size == 259
    fixed = dataclasses.replace(settings, model=dataclasses.replace(settings.model, vocab_size=300))
    assert with_vocabulary(fixed, 259).model.vocab_size == 300


def test_config_json_is_read_by_people_too(run):
    values = json.loads(run.config.read_text())
    assert values["experiment"]["model"]["d_model"] == 8 and values["vocab_size"] == 259
    assert isinstance(RunDir(run.path).record(), Record)
