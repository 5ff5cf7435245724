import dataclasses
import json

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


def record(settings, tokenizer=TOKENIZER, tokens=(100, 10)):
    return Record(settings, tokenizer.vocab_size, tokenizer.fingerprint, tokens)


@pytest.fixture
def run(tmp_path):
    """A run directory as it is after its first step."""
    settings = experiment(tmp_path / "run")
    directory = open_run(settings)
    directory.begin(record(settings), TOKENIZER)
    return directory


def test_a_new_directory_is_made_by_begin_only(tmp_path):
    settings = experiment(tmp_path / "deep" / "run", model={"moe": SparseConfig(n_experts=4)})
    run = open_run(settings)
    assert not run.path.exists() and run.record() is None and run.open_tokenizer() is None
    run.begin(record(settings), TOKENIZER)
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "tokenizer"]
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


def test_a_directory_with_something_else_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"is not a run but holds thesis.tex; choose another --train.dir"):
        open_run(experiment(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"is a file"):
        open_run(experiment(tmp_path / "file"))


@pytest.mark.parametrize("when", ["os.replace", "pathlib.Path.rename"])
def test_a_kill_while_the_directory_is_made_is_no_obstacle(tmp_path, monkeypatch, when):
    settings = experiment(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(when, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        open_run(settings).begin(record(settings), TOKENIZER)
    run = open_run(settings)
    run.begin(record(settings), TOKENIZER)
    assert run.record() == record(settings) and run.open_tokenizer() is not None


def test_another_tokenizer_or_text_is_refused(run):
    settings = run.record().experiment
    other = CharacterTokenizer("ab")
    with pytest.raises(RunError, match=r"trained with another tokenizer .*259 ids; now .* 6 ids"):
        run.begin(record(settings, other), other)
    with pytest.raises(RunError, match=r"the text has changed .*100 training .* 101 training"):
        run.begin(record(settings, tokens=(101, 10)), TOKENIZER)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"experiment": {"nam": "x"}}'])
def test_a_damaged_config_is_named(run, text):
    run.config.write_text(text)
    with pytest.raises(RunError, match=r"config.json does not describe a run"):
        open_run(experiment(run.path))


# --------------------------------------------------------------------------------------------- load


def save(run, step):
    model = build(with_vocabulary(run.record().experiment, 259).model)
    params = model.init(jax.random.key(step), jnp.zeros((1, 1), jnp.int32))["params"]
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.save(step, {"step": jnp.asarray(step), "params": params}, {}, wait=True)
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
