"""The commands: what each is told by its options, and what it does.

The heavy rooms are imported where they are used, so that help and mistakes are answered at once.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zoo.cli.describe import compare, describe
from zoo.cli.experiment_file import load_experiment
from zoo.cli.options import OptionError, parse
from zoo.cli.trace import trace
from zoo.config import Experiment, ModelConfig, SparseConfig, as_mixture
from zoo.models.presets import preset

# What the help shows where no file is given.
EXAMPLE = Experiment("example", model=ModelConfig(moe=SparseConfig()))


@dataclass(frozen=True)
class WithExperiment:
    """A command on an experiment; every field of the experiment is an option of its own.

    Attributes:
        config: a Python file that defines `config = Experiment(...)`; the help shows its values as defaults.
        preset: a published architecture (docs/presets.md) as the model, in place of the file's where both are given.
        mixture: the variant of the model; None leaves the file's, whose sizes another one takes over.
    """

    experiment: Experiment
    config: str | None = None
    preset: str | None = None
    mixture: Literal["sparse", "dense", "soft", "none"] | None = None


@dataclass(frozen=True)
class Train(WithExperiment):
    """Train a language model, or go on with a run that was interrupted."""


@dataclass(frozen=True)
class Check(WithExperiment):
    """Run the laws of a causal decoder on an experiment's model, and show the counterexamples.

    Attributes:
        full: check the model as it is, instead of a small one of the same structure.
        law: run this law only; give it several times for several.
    """

    full: bool = False
    law: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generate:
    """Write text with a trained model. One prompt's text is shown as it comes, that of several when all is written.

    Attributes:
        model: the run directory; it has to be given.
        prompt: the text to go on from; give it several times for several. Without one, a new document.
        prompts: a file with one prompt a line; blank lines are left out.
        max_tokens: the most new tokens per prompt; None for as many as the context leaves, at most 200.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw from this many likeliest tokens only.
        top_p: draw from the smallest set of likeliest tokens that carries this mass.
        seed: of the first prompt, at least 0 and less than 2^32; the next prompt has the next.
        stop: end the text before this string; give it several times for several.
    """

    model: str | None = None
    prompt: tuple[str, ...] = ()
    prompts: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()


def train(args: Sequence[str]) -> int:
    """`zoo train`: 0 at the end of the run, 128 and the signal's number where one ended it early."""
    given = _with_experiment(Train, args, "zoo train")
    from zoo.train.loop import train as run

    signal = run(given.experiment).signal
    return 0 if signal is None else 128 + signal


def check(args: Sequence[str]) -> int:
    """`zoo check`: 0 where all laws hold, 1 where one is broken."""
    given = _with_experiment(Check, args, "zoo check")
    from zoo.laws import check as run
    from zoo.laws import reduced
    from zoo.models.decoder import build

    model = given.experiment.model
    if not given.full:
        model = reduced(model)
    laws = {"laws": given.law} if given.law else {}
    return 0 if run(build(dataclasses.replace(model, vocab_size=model.vocab_size or 64)), **laws).passed else 1


def generate(args: Sequence[str]) -> int:
    """`zoo generate`: prints each prompt with its continuation, as it comes where there is only one."""
    given = parse(Generate(), args, "zoo generate")
    if given.model is None:
        raise OptionError("zoo generate needs --model RUN_DIR, the directory of a training run")
    prompts = [*given.prompt, *(_read_prompts(given.prompts) if given.prompts else [])] or [""]
    from zoo.infer.generate import generate as run
    from zoo.rundir import load

    ahead = [prompts[0]]

    def show(row: int, piece: str) -> None:
        print(*ahead, piece, sep="", end="", flush=True)
        ahead.clear()

    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    settings = {name: getattr(given, name) for name in names}
    texts = run(load(given.model), prompts, **settings, on_text=show if len(prompts) == 1 else None)
    if len(prompts) == 1:
        print(*ahead)
        return 0
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        print(f"--- {i} of {len(prompts)} ---", prompt + text, sep="\n")
    return 0


COMMANDS = {
    "train": train,
    "generate": generate,
    "check": check,
    "trace": trace,
    "describe": describe,
    "compare": compare,
}


def _with_experiment(command: type[WithExperiment], args: Sequence[str], prog: str) -> Any:
    """The command's options over the values of the file, preset and mixture that they name."""
    path, name, mixture = (_early(args, option) for option in ("--config", "--preset", "--mixture"))
    if path is None and name is None and not {"-h", "--help"} & set(args):
        files = [arg for arg in args if arg.endswith(".py")]
        what = "a Python file that defines config = Experiment(...)"
        hint = f"did you mean --config {files[0]}?" if files else f"{what}, or --preset NAME"
        raise OptionError(f"{prog} needs --config FILE; {hint}")
    experiment = EXAMPLE if path is None else load_experiment(path)
    if name is not None:
        experiment = dataclasses.replace(experiment, name=name if path is None else experiment.name, model=preset(name))
    if mixture is not None:
        model = dataclasses.replace(experiment.model, moe=as_mixture(experiment.model.moe, mixture))
        experiment = dataclasses.replace(experiment, model=model)
    return parse(command(experiment=experiment, config=path, preset=name, mixture=mixture), args, prog)


def _early(args: Sequence[str], name: str) -> str | None:
    """The value of an option that decides what the others are; the last one counts."""
    found = None
    for arg, following in itertools.pairwise([*args, "--"]):
        option, equals, value = arg.partition("=")
        if option == name and (equals or not following.startswith("--")):
            found = value if equals else following
    return None if found == "None" else found


def _read_prompts(path: str) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError(f"--prompts {path} cannot be read ({error.strerror}); give a text file") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--prompts {path} is not UTF-8 at byte {error.start}; give a text file") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise OptionError(f"--prompts {path} holds no prompt; write one a line")
    return prompts
