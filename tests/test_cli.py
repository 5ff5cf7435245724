"""The command line: values from files and options, help, mistakes, exit codes."""

import dataclasses
import errno
import io
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import zoo.infer.generate
import zoo.laws
import zoo.rundir
import zoo.train.loop
from zoo import (
    Block,
    DataConfig,
    DenseConfig,
    Experiment,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    SoftConfig,
    SparseConfig,
    TrainConfig,
)
from zoo.cli import load_experiment, main
from zoo.cli.options import attribute_texts
from zoo.infer.generate import PromptError
from zoo.laws import reduced

ROOT = Path(__file__).parents[1]
SECTIONS = {
    "": Experiment,
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "mesh": MeshConfig,
}
MIXTURES = {"sparse": SparseConfig, "dense": DenseConfig, "soft": SoftConfig}


@pytest.fixture
def file(tmp_path) -> str:
    """A config file with a sparse mixture."""
    path = tmp_path / "small.py"
    path.write_text(
        "from zoo import Block, Experiment, ModelConfig, SparseConfig, TrainConfig\n"
        "model = ModelConfig(d_model=64, moe=SparseConfig(n_experts=4, d_ff=48), pattern=(Block(window=8), Block()))\n"
        "config = Experiment('small', model=model, train=TrainConfig(steps=500))\n"
    )
    return str(path)


@pytest.fixture
def trained(monkeypatch) -> list[Experiment]:
    """The experiments that training was asked for; none is trained."""
    asked: list[Experiment] = []

    def train(experiment: Experiment) -> Any:
        asked.append(experiment)
        return types.SimpleNamespace(signal=None)

    monkeypatch.setattr(zoo.train.loop, "train", train)
    return asked


def refusal(capsys, *args: str) -> str:
    """What is said of wrong arguments: one sentence, with status 2."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err.removeprefix("zoo: error: ").rstrip("\n")


def test_a_file_alone_is_the_experiment(file, trained):
    assert main(["train", "--config", file]) == 0
    assert trained == [load_experiment(file)]


def test_options_change_the_values_of_the_file(file, trained):
    options = (
        "--train.steps 300 --model.d_model=128 --model.moe.top-k 1 --model.moe.renormalize False --model.qk-norm head"
    )
    more = "--model.n-kv-heads 2 --data.path None --optimizer.clip-norm None --mesh.data -1 --model.pattern.0.window 4"
    more += " --model.attention-bias q --model.attention-bias k"
    assert main(["train", "--config", file, *options.split(), *more.split(), "--optimizer.learning-rate", "2e-3"]) == 0
    was, now = load_experiment(file), trained[0]
    assert now == dataclasses.replace(
        was,
        train=dataclasses.replace(was.train, steps=300),
        optimizer=dataclasses.replace(was.optimizer, clip_norm=None, learning_rate=2e-3),
        model=dataclasses.replace(
            was.model,
            d_model=128,
            qk_norm="head",
            n_kv_heads=2,
            attention_bias=("q", "k"),
            moe=dataclasses.replace(was.model.moe, top_k=1, renormalize=False),
            pattern=(Block(window=4), Block()),
        ),
    )


@pytest.mark.parametrize(
    ("args", "renormalize"),
    [
        ("--model.moe.top-k 1", None),
        ("--model.moe.top-k 1 --model.moe.renormalize None", None),
        ("--model.moe.renormalize False", False),
        ("--model.moe.renormalize=True", True),
        ("--model.moe.renormalize", True),
    ],
)
def test_renormalization_can_be_set_and_left_open(args, renormalize, file, trained):
    assert main(["train", "--config", file, *args.split()]) == 0
    assert trained[0].model.moe.renormalize is renormalize


@pytest.mark.parametrize(
    ("args", "glu"),
    [("--model.glu False", False), ("--model.glu=True", True), ("--model.glu", True), ("--model.glu --name x", True)],
)
def test_true_and_false_are_values(args, glu, file, trained):
    assert main(["train", "--config", file, "--model.glu=False", *args.split()]) == 0
    assert trained[0].model.glu is glu


def test_a_value_can_be_taken_back(file, trained):
    assert main(["train", "--config", file, "--model.n-kv-heads", "2", "--model.n-kv-heads", "None"]) == 0
    assert trained[0].model.n_kv_heads is None


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_keeps_the_sizes(kind, file, trained):
    assert main(["train", "--config", file, f"--mixture={kind}", "--model.moe.n-experts", "6"]) == 0
    assert trained[0].model.moe == MIXTURES[kind](n_experts=6, d_ff=48)


def test_of_several_files_and_mixtures_the_last_counts(file, tmp_path, trained):
    other = tmp_path / "other.py"
    other.write_text("import zoo\nconfig = zoo.Experiment('other')\n")
    for pair in ([f"--config={file}", "--config", str(other)], ["--config", file, f"--config={other}"]):
        assert main(["train", *pair, "--mixture=soft", "--mixture", "dense"]) == 0
        assert (trained[-1].name, trained[-1].model.moe) == ("other", DenseConfig())
    assert main(["train", "--mixture", "soft", "--mixture", "None", "--config", file]) == 0
    assert trained[-1] == load_experiment(file)


def test_no_mixture(file, trained):
    assert main(["train", "--mixture", "none", "--config", file]) == 0
    assert trained[0].model.moe is None


def test_a_preset_is_the_model(file, trained):
    options = ["--preset", "mixtral-8x7b", "--model.n-layers", "2", "--mixture", "dense"]
    assert main(["train", *options]) == 0
    assert main(["train", "--config", file, "--preset=gpt2"]) == 0
    alone, in_file = trained
    assert (alone.name, alone.model.d_model, alone.model.n_layers, alone.model.moe.kind) == (
        "mixtral-8x7b",
        4096,
        2,
        "dense",
    )
    assert (in_file.name, in_file.model, in_file.train.steps) == ("small", zoo.preset("gpt2"), 500)


def test_a_signal_decides_the_status(file, monkeypatch):
    monkeypatch.setattr(zoo.train.loop, "train", lambda experiment: types.SimpleNamespace(signal=15))
    assert main(["train", "--config", file]) == 143


def words(text: str) -> str:
    """Without boxes, colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[─│╭╮╰╯]", " ", text).split())


def help_of(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*args, "--help"])
    assert end.value.code == 0
    return words(capsys.readouterr().out)


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("command", ["train", "check"])
def test_help_lists_every_field_with_its_meaning(command, kind, capsys):
    shown = help_of(capsys, command, "--mixture", kind)
    for prefix, section in (SECTIONS | {"model.moe": MIXTURES[kind], "model.pattern.0": Block}).items():
        texts = attribute_texts(section)
        for field in dataclasses.fields(section):
            if (section, field.name) in {(ModelConfig, "moe"), (ModelConfig, "pattern")} | {
                (Experiment, name) for name in SECTIONS
            }:
                continue  # a section of its own
            option = "--" + f"{prefix}.{field.name}".removeprefix(".").replace("_", "-")
            assert f" {option} " in shown.replace(",", " "), option
            assert texts[field.name] in shown, option


def test_help_shows_types_and_the_defaults_of_the_file(file, capsys):
    shown = help_of(capsys, "train", "--config", file)
    assert "--train.steps INT optimizer updates. (default: 500)" in shown
    assert "--model.d-model INT D, width of the residual stream. (default: 64)" in shown
    assert "--optimizer.name {adamw,muon,lion,adafactor}" in shown
    assert "--model.moe.renormalize {None,True,False}" in shown
    assert "--model.glu {True,False}" in shown
    assert "(default: 1000)" in help_of(capsys, "train")


def test_help_of_generate_names_all_options(capsys):
    shown = help_of(capsys, "generate")
    for name in ("model", "prompt", "prompts", "max-tokens", "temperature", "top-k", "top-p", "seed", "stop"):
        assert f"--{name} " in shown


def test_help_of_zoo_names_the_commands(capsys):
    for args in ([], ["--help"]):
        assert main(args) == 0
        out = capsys.readouterr().out
        assert all(f"zoo {name}" in out for name in ("train", "generate", "check", "trace"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--train.step 3", "there is no option --train.step; did you mean --train.steps?"),
        ("--steps 3", "there is no option --steps; did you mean --train.steps?"),
        (
            "--model.moe.no-renormalize",
            "there is no option --model.moe.no-renormalize; did you mean --model.moe.renormalize False?",
        ),
        ("--qqqq 3", "there is no option --qqqq; --help lists them"),
        ("train.steps 3", "'train.steps' is no option; options are written --name value, and --help lists them"),
        ("--train.steps x", "--train.steps 'x' is not a whole number"),
        ("--train.steps 1.5", "--train.steps '1.5' is not a whole number"),
        ("--optimizer.eps tiny", "--optimizer.eps 'tiny' is not a number"),
        ("--model.head-dim none", "--model.head-dim 'none' is not a whole number or None"),
        (
            "--optimizer.name adam",
            "--optimizer.name 'adam' is not one of adamw, muon, lion, adafactor; did you mean adamw?",
        ),
        (
            "--model.attention-bias query",
            "--model.attention-bias 'query' is not one of q, k, v, o, and given again for each further one",
        ),
        ("--model.d-model 1000000000000", "model.d_model=1000000000000 must be less than 2^31"),
        ("--optimizer.learning-rate 1e300", "optimizer.learning_rate=1e+300 is beyond float32; a number is 0, or"),
        ("--train.steps", "--train.steps needs a value; one that begins with dashes is written --train.steps=VALUE"),
        ("--train.steps --model.glu", "--train.steps needs a value"),
        ("--model.glu false", "--model.glu 'false' is not True or False; did you mean False?"),
        ("--model.no-glu", "there is no option --model.no-glu; did you mean --model.glu False?"),
        ("--model.moe.renormalize no", "--model.moe.renormalize 'no' is not True or False or None"),
        ("--model.moe.top-k 1 --model.moe.renormalize", "the router would get no gradient; set model.moe.renormalize"),
        ("--optimizer.clip-norm inf", "optimizer.clip_norm=inf must be a finite number"),
        ("--train.seed 4294967296", "train.seed=4294967296 must be at least 0 and less than 2^32"),
        ("--model.moe.segment-length 4", "of a mixture that this model does not have; give --mixture soft"),
        ("--mixture none --model.moe.n-experts 4", "does not have; give --mixture sparse or dense or soft"),
        ("--mixture spares", "mixture='spares' is not one of sparse, dense, soft, none; did you mean sparse?"),
        ("--model.prefix 3", "--model.prefix cannot be written as an option; set it in the config file"),
        ("--model.n-heads 3", "model.d_model=64 is not a multiple of model.n_heads=3; set model.head_dim"),
        ("--model.moe.top-k 9", "model.moe.top_k=9 is more than model.moe.n_experts=4"),
        ("--train.steps 0", "train.steps=0 must be at least 1"),
        ("--train.steps 7", "leave nothing of train.steps=7"),
    ],
)
def test_wrong_options_are_answered_in_a_sentence(args, message, file, trained, capsys):
    assert message in refusal(capsys, "train", "--config", file, *args.split())
    assert trained == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "'trian' is not one of train, generate, check, trace, describe, compare; did you mean train?"),
        (["train"], "zoo train needs --config FILE; a Python file that defines config = Experiment(...)"),
        (["train", "configs/x.py"], "zoo train needs --config FILE; did you mean --config configs/x.py?"),
        (["check", "--mixture", "soft"], "zoo check needs --config FILE"),
        (["train", "--config", "--mixture", "soft"], "zoo train needs --config FILE"),
        (["train", "--preset", "gtp2"], "preset='gtp2' is not the name of a preset; did you mean gpt2?"),
        (["generate"], "zoo generate needs --model RUN_DIR, the directory of a training run"),
        (["generate", "--model", "x", "--promt", "y"], "there is no option --promt; did you mean --prompt?"),
        (["generate", "--model", "x", "--top-k", "few"], "--top-k 'few' is not a whole number or None"),
        (["generate", "--model", "no/such"], "no/such"),
        (["generate", "--model", "x", "--prompts", "no/such"], "--prompts no/such cannot be read"),
    ],
)
def test_wrong_commands_are_answered_in_a_sentence(args, message, capsys):
    assert message in refusal(capsys, *args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", ": the file defines no `config`; end it with config = Experiment(...)"),
        ("config = {}\n", ": its `config` is of type dict; it must be a zoo.Experiment"),
        ("import zoo\n\nconfig = (\n", ", line 3: SyntaxError: '(' was never closed"),
        ("import zoo\nx = {}['a']\n", ", line 2: KeyError: 'a'"),
        ("import zoo\ndef f():\n    1 / 0\nf()\n", ", line 3: ZeroDivisionError: division by zero"),
        ("import nosuchmodule\n", ", line 1: ModuleNotFoundError: No module named 'nosuchmodule'"),
        (
            "import zoo\nconfig = zoo.Experiment('a', zoo.ModelConfig(n_heads=3))\n",
            ", line 2: model.d_model=256 is not a multiple of model.n_heads=3; set model.head_dim",
        ),
    ],
)
def test_a_wrong_file_is_named_with_the_line(text, message, tmp_path, capsys):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    assert refusal(capsys, "train", "--config", str(path)) == f"--config {path}{message}"


def test_a_missing_file_suggests_the_nearest(file, capsys):
    wrong = file.replace("small", "smal")
    assert (
        refusal(capsys, "train", "--config", wrong) == f"--config {wrong}: there is no such file; did you mean {file}?"
    )


@pytest.mark.parametrize("args", ["train --config", "check --config", "describe --config", "compare gpt2"])
def test_a_folder_is_no_file(args, tmp_path, capsys):
    said = refusal(capsys, *args.split(), str(tmp_path))
    assert said == f"--config {tmp_path} is a folder; give a Python file that defines config = Experiment(...)"


def test_files_import_their_own_neighbours(tmp_path):
    for folder, steps in (("a", 111), ("b", 222)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared_part.py").write_text(f"import zoo\ntrain = zoo.TrainConfig(steps={steps})\n")
        text = "import zoo\nfrom shared_part import train\nconfig = zoo.Experiment('x', train=train)\n"
        (tmp_path / folder / "x.py").write_text(text)
    for folder, steps in (("a", 111), ("b", 222)):
        assert load_experiment(str(tmp_path / folder / "x.py")).train.steps == steps
    assert "shared_part" not in sys.modules and str(tmp_path / "a") not in sys.path


def test_only_neighbours_are_forgotten(tmp_path):
    folder, other = tmp_path / "conf", tmp_path / "configs2"
    (folder / "lib" / "kept_package").mkdir(parents=True)
    other.mkdir()
    (folder / "lib" / "kept_package" / "__init__.py").write_text("")
    (folder / "lib" / "kept_deeper.py").write_text("")
    (other / "kept_beside.py").write_text("")
    (folder / "forgotten.py").write_text("")
    (folder / "x.py").write_text(
        f"import sys\nsys.path += [{str(folder / 'lib')!r}, {str(other)!r}]\n"
        "import forgotten, kept_beside, kept_deeper, kept_package, zoo\nconfig = zoo.Experiment('x')\n"
    )
    before = list(sys.path)
    try:
        load_experiment(str(folder / "x.py"))
        assert {"kept_package", "kept_deeper", "kept_beside"} <= sys.modules.keys()
        assert "forgotten" not in sys.modules
    finally:
        sys.path[:] = before
        for name in ("kept_package", "kept_deeper", "kept_beside"):
            sys.modules.pop(name, None)


def test_other_errors_keep_their_traceback(file, monkeypatch):
    def broken(experiment: Experiment) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(zoo.train.loop, "train", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["train", "--config", file])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "runs/x/loss.png"), "runs/x/loss.png: Permission denied"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", b"text.txt"), "text.txt: Is a directory"),
        (FileNotFoundError(errno.ENOENT, "No such file", Path("metrics.jsonl")), "metrics.jsonl: No such file"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
)
def test_a_file_that_fails_is_a_sentence(error, message, file, monkeypatch, capsys):
    def full(experiment: Experiment) -> Any:
        raise error

    monkeypatch.setattr(zoo.train.loop, "train", full)
    assert refusal(capsys, "train", "--config", file) == message


def test_an_error_of_the_standard_library_is_a_sentence(file, tmp_path, monkeypatch, capsys):
    place = tmp_path / "nowhere" / "metrics.jsonl"
    monkeypatch.setattr(zoo.train.loop, "train", lambda experiment: place.write_text("{}"))
    assert refusal(capsys, "train", "--config", file) == f"{place}: No such file or directory"


def test_errors_that_are_of_no_file_keep_their_traceback(file, monkeypatch):
    def broken(experiment: Experiment) -> Any:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(zoo.train.loop, "train", broken)
    with pytest.raises(ConnectionRefusedError):
        main(["train", "--config", file])


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_characters_that_a_terminal_lacks_are_replaced(encoding, writer, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["generate", "--model", "r", "--prompt", "日"]) == 0
    screen.flush()
    shown = "é" if encoding == "latin-1" else "?"
    assert screen.buffer.getvalue().decode(encoding) == f"? a b {shown}\n"


def test_an_interruption_is_no_traceback(file, monkeypatch, capsys):
    def interrupted(experiment: Experiment) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo.train.loop, "train", interrupted)
    assert main(["train", "--config", file]) == 130
    assert capsys.readouterr().err == "zoo: interrupted\n"


@pytest.fixture
def writer(monkeypatch) -> list[dict[str, Any]]:
    """What generation was asked for; every prompt goes on with three pieces."""
    asked: list[dict[str, Any]] = []

    def generate(run: Any, prompts: list[str], on_text: Any = None, **settings: Any) -> list[str]:
        asked.append({"run": run, "prompts": prompts, **settings})
        if settings["temperature"] < 0:
            raise PromptError("temperature is low")
        for row in range(len(prompts)):
            for piece in (" a", " b", " é") if on_text else ():
                on_text(row, piece)
        return [" a b é"] * len(prompts)

    monkeypatch.setattr(zoo.infer.generate, "generate", generate)
    monkeypatch.setattr(zoo.rundir, "load", lambda directory: f"run of {directory}")
    return asked


def test_one_prompt_is_shown_with_its_continuation(writer, capsys):
    assert main(["generate", "--model", "runs/x", "--prompt", "def"]) == 0
    assert capsys.readouterr().out == "def a b é\n"
    expected = {"max_tokens": None, "temperature": 0.8, "top_k": None, "top_p": None, "seed": 0, "stop": ()}
    assert writer == [{"run": "run of runs/x", "prompts": ["def"], **expected}]


def test_all_settings_reach_the_model(writer):
    options = "--max-tokens 5 --temperature 0 --top-k 4 --top-p 0.5 --seed 3 --stop x --stop=--y"
    assert main(["generate", "--model", "runs/x", *options.split()]) == 0
    expected = {"max_tokens": 5, "temperature": 0.0, "top_k": 4, "top_p": 0.5, "seed": 3, "stop": ("x", "--y")}
    assert writer == [{"run": "run of runs/x", "prompts": [""], **expected}]


def test_several_prompts_are_told_apart(writer, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("two\n\nthrée words here\n")
    assert main(["generate", "--model", "r", "--prompt", "one", "--prompts", str(tmp_path / "prompts.txt")]) == 0
    assert writer[0]["prompts"] == ["one", "two", "thrée words here"]
    assert capsys.readouterr().out == (
        "--- 1 of 3 ---\none a b é\n--- 2 of 3 ---\ntwo a b é\n--- 3 of 3 ---\nthrée words here a b é\n"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n \n", "holds no prompt; write one a line"), (b"abc\xff", "is not UTF-8 at byte 3; give a text file")],
)
def test_a_wrong_prompts_file_is_named(content, message, writer, tmp_path, capsys):
    path = tmp_path / "p.txt"
    path.write_bytes(content)
    assert refusal(capsys, "generate", "--model", "r", "--prompts", str(path)) == f"--prompts {path} {message}"
    assert writer == []


def test_what_generation_refuses_is_one_sentence(writer, capsys):
    assert refusal(capsys, "generate", "--model", "r", "--temperature", "-1") == "temperature is low"


@pytest.mark.parametrize(("full", "passed", "status"), [(False, True, 0), (False, False, 1), (True, True, 0)])
def test_check_runs_the_laws(full, passed, status, file, monkeypatch):
    checked = []

    def check(model: Any) -> Any:
        checked.append(model.config)
        return types.SimpleNamespace(passed=passed)

    monkeypatch.setattr(zoo.laws, "check", check)
    assert main(["check", "--config", file, "--mixture", "soft", *(["--full"] if full else [])]) == status
    model = dataclasses.replace(load_experiment(file).model, moe=SoftConfig(n_experts=4, d_ff=48))
    assert checked == [dataclasses.replace(model, vocab_size=64) if full else reduced(model)]


def python(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_and_mistakes_are_answered_without_jax(file):
    program = (
        "import sys\n"
        "from zoo.cli import main\n"
        "def call(*args):\n"
        "    try:\n"
        "        return main(args)\n"
        "    except SystemExit as end:\n"
        "        return end.code\n"
        f"print([call(), call('train', '--help'), call('train', '--config', {file!r}, '--train.step', '3'),\n"
        "       call('generate', '--top-k', 'x'), [m for m in ('jax', 'flax', 'numpy') if m in sys.modules]])\n"
    )
    assert python("-c", program).stdout.endswith("[0, 0, 2, 2, []]\n")


def test_train_py_is_zoo_train():
    by_file = python("train.py", "--config", "no/such.py")
    by_name = python("-m", "zoo.cli", "train", "--config", "no/such.py")
    assert by_file.stderr == by_name.stderr == "zoo: error: --config no/such.py: there is no such file\n"
    assert by_file.returncode == by_name.returncode == 2
