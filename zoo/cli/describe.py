"""zoo describe and zoo compare: what models cost."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zoo.cli.experiment_file import load_experiment
from zoo.cli.options import OptionError, parse
from zoo.config import DataConfig, Experiment, ModelConfig
from zoo.models.presets import Preset, find_preset, preset, preset_names


@dataclass(frozen=True)
class Describe:
    """Say what a model costs: parameters, FLOPs, memory, cache; with --tokens and --device also how long it trains.

    Attributes:
        config: a Python file that defines `config = Experiment(...)`.
        preset: a published architecture.
        all: print the Markdown table of all presets instead.
        json: print JSON instead of tables.
        length: tokens of a sequence; None for the model's context_length.
        batch_size: sequences on one device, for activations and logits; None for the config's share of its batch, or 1.
        devices: how many share a training run; None for the config's mesh, with 1 for an axis at -1, or 8.
        optimizer: whose state is held; None for the config's, or adamw.
        tokens: to train on; None for those of the config's steps, or those that the preset's authors trained on, where
            the zoo knows them.
        device: a100, h100, h100-pcie, h200, v4, v5e, v5p or v6e.
        mfu: the share of the device's peak that training reaches.
    """

    config: str | None = None
    preset: str | None = None
    all: bool = False
    json: bool = False
    length: int | None = None
    batch_size: int | None = None
    devices: int | None = None
    optimizer: Literal["adamw", "muon", "lion", "adafactor"] | None = None
    tokens: float | None = None
    device: str | None = None
    mfu: float = 0.4


@dataclass(frozen=True)
class Compare:
    """Put two models side by side, `zoo compare A B`, each a preset or a config file: what differs, what it costs.

    Two config files are compared in all of their settings, and in what their training costs.

    Attributes:
        json: print JSON instead of a table.
    """

    json: bool = False


def describe(args: Sequence[str]) -> int:
    """`zoo describe`."""
    given = parse(Describe(), args, "zoo describe")
    if sum((given.config is not None, given.preset is not None, given.all)) != 1:
        raise OptionError("zoo describe needs one of --preset NAME, --config FILE and --all")
    _check(given)
    from zoo.describe import describe as run
    from zoo.describe import preset_table

    if given.all:
        print(preset_table(), end="")
        return 0
    name = given.config if given.preset is None else given.preset
    config = _named(name, is_preset=given.preset is not None)
    published = None if given.preset is None else find_preset(given.preset)
    model = config.model if isinstance(config, Experiment) else config
    found = run(model, name, _question(given, config, published))
    if given.json:
        print(json.dumps(found.values | ({} if published is None else {"published": _record(published)}), indent=1))
    else:
        print(found, *([] if published is None else _words(published)), sep="\n")
    return 0


def _question(given: Describe, config: Experiment | ModelConfig, published: Preset | None) -> Any:
    """What the options ask, and what they leave open as the file has it, or the preset."""
    from zoo.describe import Question, find_device, question_of

    if isinstance(config, Experiment):
        question = question_of(config, given.devices)
    else:
        question = Question(config.context_length, tokens=published and published.recipe and published.recipe.tokens)
    asked = {
        "length": given.length,
        "batch_size": given.batch_size,
        "n_devices": given.devices,
        "optimizer": given.optimizer,
        "tokens": given.tokens,
        "device": None if given.device is None else find_device(given.device),
        "mfu": given.mfu,
    }
    return question._replace(**{name: value for name, value in asked.items() if value is not None})


def _record(published: Preset) -> dict[str, Any]:
    """All of a preset but the model."""
    recipe = published.recipe and dataclasses.asdict(published.recipe)
    return {"source": published.source, "recipe": recipe, "note": published.note}


def _words(published: Preset) -> Iterator[str]:
    """The same, for a screen."""
    yield f"\nSource: {published.source}"
    if published.recipe is not None:
        rate, batch, tokens = dataclasses.astuple(published.recipe)
        yield f"Trained: learning rate {rate:g}, {batch / 1e6:.3g} M tokens a batch, {tokens / 1e12:g} T tokens"
    if published.note:
        yield f"Note: {published.note}"


def _check(given: Describe) -> None:
    for name in ("length", "batch_size", "devices"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if given.tokens is not None and not 0 < given.tokens <= 1e30:
        raise OptionError(f"--tokens {given.tokens} must be a positive number, at most 1e30")
    if not 1e-6 <= given.mfu <= 1:
        raise OptionError(f"--mfu {given.mfu} must lie between 1e-6 and 1")
    if given.mfu != Describe.mfu and given.device is None:
        raise OptionError(f"--mfu {given.mfu} is a share of a device's peak; it needs --device")
    asked = [f.name for f in dataclasses.fields(given) if f.name != "all" and getattr(given, f.name) != f.default]
    if given.all and asked:
        option = asked[0].replace("_", "-")
        raise OptionError(f"--all is a table in Markdown and has no --{option}; ask for one --preset")


def compare(args: Sequence[str]) -> int:
    """`zoo compare`."""
    names, options = [], list(args)
    while options and not options[0].startswith("--"):
        names.append(options.pop(0))
    given = parse(Compare(), options, "zoo compare")
    if len(names) != 2:
        raise OptionError(f"zoo compare needs two presets or config files before any option; {len(names)} are given")
    from zoo.describe import compare as run

    found = run(*((name, _named(name)) for name in names))
    print(json.dumps(found.to_json(), indent=1) if given.json else found)
    return 0


def _named(name: str, is_preset: bool | None = None) -> Experiment | ModelConfig:
    """A config file's experiment, or a preset's model; a vocabulary that the file leaves open is the tokenizer's."""
    if is_preset is None:
        is_preset = name in preset_names() or not (name.endswith(".py") or pathlib.Path(name).exists())
    if is_preset:
        return preset(name)
    experiment = load_experiment(name)
    vocab_size = experiment.model.vocab_size or _vocabulary(experiment.data)
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, vocab_size=vocab_size))


def _vocabulary(data: DataConfig) -> int:
    """Ids of the tokenizer that a run would make; that of characters depends on the text."""
    from zoo.data.tokenizer import ByteTokenizer

    if data.tokenizer == "bytes":
        return ByteTokenizer.vocab_size
    if data.tokenizer == "sentencepiece" and data.tokenizer_model is None:
        return data.vocab_size
    raise OptionError(
        f"model.vocab_size=None follows the text or model of {data.named('tokenizer')}; "
        "set model.vocab_size in the config"
    )
