"""A run directory: everything a run writes, and how it is found again.

config.json     the experiment, and what it was resolved to
tokenizer/      of the training text
checkpoints/    one directory a step
metrics.jsonl   one JSON object a line
events/         the same for TensorBoard
samples/        text that the model wrote on the way
loss.png, experts.png
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zoo.checkpoint import Checkpoints
from zoo.config import Experiment, from_dict, to_dict
from zoo.data.tokenizer import Tokenizer, load_tokenizer
from zoo.layers.logical import is_spec
from zoo.models.decoder import Decoder, build

_DRAFT = ".new"  # ends the name of what is written beside its place and moved there whole


class RunError(ValueError):
    """A directory that is not the run it should be; the message says what to do."""


class Record(NamedTuple):
    """What config.json holds.

    Attributes:
        experiment: as it was asked for when the run was last started.
        vocab_size: of the model.
        tokenizer: fingerprint.
        tokens: of the training and of the validation text.
    """

    experiment: Experiment
    vocab_size: int
    tokenizer: str
    tokens: tuple[int, int]


class Run(NamedTuple):
    """A trained model: what `zoo.generate` takes. `config` is its experiment, with the vocabulary size set."""

    model: Decoder
    params: Any
    tokenizer: Tokenizer
    config: Experiment


@dataclass(frozen=True)
class RunDir:
    """The places in a run directory."""

    path: Path

    config = property(lambda self: self.path / "config.json")
    tokenizer = property(lambda self: self.path / "tokenizer")
    checkpoints = property(lambda self: self.path / "checkpoints")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    events = property(lambda self: self.path / "events")
    samples = property(lambda self: self.path / "samples")
    loss = property(lambda self: self.path / "loss.png")
    experts = property(lambda self: self.path / "experts.png")

    def record(self) -> Record | None:
        """What config.json says; None where there is none.

        Raises:
            RunError: the file is damaged or of another program.
        """
        if not self.config.exists():
            return None
        try:
            values = json.loads(self.config.read_text())
            experiment = from_dict(Experiment, values["experiment"])
            return Record(experiment, values["vocab_size"], values["tokenizer"], tuple(values["tokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.config} does not describe a run ({error}); restore it or choose another directory"
            ) from None

    def open_tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None before it has one. Raises DataError where its files are damaged."""
        return load_tokenizer(self.tokenizer) if self.tokenizer.exists() else None

    def begin(self, record: Record, tokenizer: Tokenizer) -> None:
        """Writes config.json and the tokenizer, or checks them where an earlier start has.

        config.json comes first, so that a directory in which a kill left anything at all is known as a run's.

        Raises:
            RunError: the tokenizer or the text is not the one that the run began with.
        """
        known = self.record()
        if known is not None:
            _check_same(self.path, known, record)
        self.path.mkdir(parents=True, exist_ok=True)
        values = record._asdict() | {"experiment": to_dict(record.experiment)}
        draft = self.config.with_name(self.config.name + _DRAFT)
        draft.write_text(json.dumps(values, indent=1) + "\n")
        os.replace(draft, self.config)
        if not self.tokenizer.exists():
            draft = self.tokenizer.with_name(self.tokenizer.name + _DRAFT)
            tokenizer.save(draft)
            draft.rename(self.tokenizer)


def _check_same(path: Path, known: Record, record: Record) -> None:
    advice = "choose another --train.dir"
    if known.tokenizer != record.tokenizer:
        raise RunError(
            f"{path} was trained with another tokenizer ({known.tokenizer}, {known.vocab_size} ids; now "
            f"{record.tokenizer}, {record.vocab_size} ids); bring the old one back, or {advice}"
        )
    if known.tokens != record.tokens:
        then, now = (f"{t[0]:,} training and {t[1]:,} validation tokens" for t in (known.tokens, record.tokens))
        raise RunError(f"the text has changed since {path} began: {then} then, {now} now; bring it back, or {advice}")


def open_run(experiment: Experiment) -> RunDir:
    """The directory of an experiment, new or of an earlier start of the same one; writes nothing.

    Raises:
        RunError: the directory holds another experiment, or files that are not a run's.
    """
    run = RunDir(Path(experiment.directory))
    if run.path.exists() and not run.path.is_dir():
        raise RunError(f"train.dir={str(run.path)!r} is a file; choose another --train.dir")
    record = run.record()
    if record is None:
        strange = sorted(p.name for p in run.path.iterdir() if p.suffix != _DRAFT) if run.path.exists() else []
        if strange:
            raise RunError(f"{run.path} is not a run but holds {strange[0]}; choose another --train.dir")
    elif record.experiment.identity() != experiment.identity():
        differences = "; ".join(_differences(record.experiment, experiment))
        raise RunError(f"{run.path} holds another experiment ({differences}); choose another --train.dir")
    return run


def _differences(there: Experiment, here: Experiment) -> Iterator[str]:
    """`model.d_model is 128 there and 256 here` for every field of the identity that differs."""
    old, new = _identity_fields(there), _identity_fields(here)
    for name in sorted(old | new):
        if old.get(name) != new.get(name):
            yield f"{name} is {old.get(name, 'unset')!r} there and {new.get(name, 'unset')!r} here"


def _identity_fields(experiment: Experiment) -> dict[str, Any]:
    fields = {}
    for part in ("model", "data", "optimizer"):
        section = getattr(experiment, part)
        free = {f"{part}.{name}" for name in getattr(section, "speed_fields", ())}
        fields |= {name: value for name, value in _flat(to_dict(section), part) if name not in free}
    return fields | {f"train.{name}": getattr(experiment.train, name) for name in ("batch_size", "seed")}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    else:
        yield name, value


def with_vocabulary(experiment: Experiment, vocab_size: int) -> Experiment:
    """The experiment with the model's vocabulary set where it was left to the tokenizer."""
    model = experiment.model
    return replace(experiment, model=replace(model, vocab_size=model.vocab_size or vocab_size))


def load(directory: str | os.PathLike[str]) -> Run:
    """The model of a run, from its newest good checkpoint, on one device.

    Raises:
        RunError: there is no such directory, it is not a run, it has no checkpoint yet, or its tokenizer is
            not the one that the model was trained with.
        DataError: the tokenizer's files are damaged.
        CheckpointError: no checkpoint can be read.
    """
    run = RunDir(Path(directory))
    if not run.path.is_dir():
        raise RunError(f"there is no run directory {run.path}; name one that `zoo train` has written")
    record = run.record()
    if record is None:
        raise RunError(f"{run.path} is not a run: it has no config.json; name one that `zoo train` has written")
    tokenizer = load_tokenizer(run.tokenizer)
    if tokenizer.fingerprint != record.tokenizer:
        raise RunError(
            f"{run.tokenizer} has {tokenizer.vocab_size} ids and fingerprint {tokenizer.fingerprint}, but the model "
            f"was trained with {record.vocab_size} and {record.tokenizer}; restore the run's own tokenizer"
        )
    config = with_vocabulary(record.experiment, record.vocab_size)
    model = build(config.model)
    return Run(model, _restore_params(run, model), tokenizer, config)


def _restore_params(run: RunDir, model: Decoder) -> Any:
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), model.abstract_params(), is_leaf=is_spec)
    checkpoints = Checkpoints(run.checkpoints, say=lambda text: print(text, file=sys.stderr))
    try:
        found = checkpoints.restore_params(shapes)
    finally:
        checkpoints.close()
    if found is None:
        raise RunError(f"{run.path} has no checkpoint yet; train it until train.save_every, or to the end")
    return found[1]
