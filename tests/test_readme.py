"""Every command of the README is run, the long ones with fewer steps and smaller sizes."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from zoo.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
    if line.strip()
]
SMALL = shlex.split(
    "--model.d-model 16 --model.n-layers 1 --model.n-heads 2 --model.n-kv-heads 1 --model.context-length 32 "
    "--model.moe.n-experts 2 --model.moe.d-ff 16 --optimizer.warmup-steps 1 "
    "--train.steps 2 --train.batch-size 8 --train.eval-every 2 --train.save-every 2 --train.sample-every None"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    (folder / "text.txt").write_text("def add(a, b):\n    return a + b\n\n\n" * 40)
    return folder


def option(options, name, default):
    """The value of an option."""
    return options[options.index(name) + 1] if name in options else default


def train(options, folder):
    """Trains as the options say, but with the sizes of SMALL and on a short text."""
    directory = folder / Path(option(options, "--train.dir", "runs/quickstart")).name
    data = ["--data.path", str(folder / "text.txt"), "--data.tokenizer", "bytes", "--data.cache-dir", str(folder)]
    replaced = [*SMALL, *data, "--train.dir", str(directory)]
    kept = []
    for name, value in zip(options[::2], options[1::2], strict=True):
        kept += [] if name in replaced[::2] else [name, value]
    return main(["train", *kept, *replaced])


def run(command, folder):
    """Exit code of a README command."""
    if command[0] == "make":
        return subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True).returncode
    command = ["zoo", "train", *command[2:]] if command[:2] == ["python", "train.py"] else command
    name, options = command[1], command[2:]
    if "--help" in options:
        with pytest.raises(SystemExit) as stopped:
            main(command[1:])
        return stopped.value.code
    if name == "train":
        return train(options, folder)
    if name == "generate":
        model = folder / Path(option(options, "--model", "")).name
        return main([name, *options, "--model", str(model), "--max-tokens", "8"])
    if name == "check":
        return main([name, *options, "--law", "batch"])
    page = option(options, "--html", None)
    return main([name, *(str(folder / word) if word == page else word for word in options)])


def test_commands_run_in_their_order(folder, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    assert {command[0] for command in COMMANDS} == {"make", "python", "zoo"}
    for command in COMMANDS:
        assert run(command, folder) == 0, (command, capfd.readouterr().err)


def test_python_blocks_run(capsys):
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "(1, 16, 256)" in printed
    assert "padding       pass" in printed


def test_pictures_are_there():
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
