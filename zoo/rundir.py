"""A run directory: everything a run writes, and how it is found again.

config.json     the experiment, and what it was resolved to
tokenizer/      of the training text
checkpoints/    one directory a step
metrics.jsonl   one JSON object a line
events/         the same for TensorBoard
samples/        text that the model wrote on the way
loss.png, experts.png
saved           there as soon as a checkpoint has been: without one, only a run that lacks it begins anew
wandb_id, wandb/  of the run at Weights & Biases, where it has one, and what is kept of it here
lock            held while a process trains here, and names it
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zoo.checkpoint import Checkpoints, saved_steps
from zoo.config import Experiment, from_dict, to_dict
from zoo.data.cache import Corpus
from zoo.data.lock import locked
from zoo.data.tokenizer import Tokenizer, load_tokenizer
from zoo.layers.logical import is_spec
from zoo.models.decoder import Decoder, build

_DRAFT = ".new"  # ends the name of what is written beside its place and moved there whole


class RunError(ValueError):
    """A directory that is not the run it should be, or cannot be written; the message says what to do."""


class Record(NamedTuple):
    """What makes a run this one: config.json holds it, and so does every checkpoint.

    Attributes:
        experiment: as it was asked for when the run was last started.
        vocab_size: of the model.
        tokenizer: fingerprint.
        tokens: of the training and of the validation text.
        text: digests of both.
    """

    experiment: Experiment
    vocab_size: int
    tokenizer: str
    tokens: tuple[int, int]
    text: tuple[str, str]

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict() | {"experiment": to_dict(self.experiment)}

    def foreign(self, values: dict[str, Any]) -> str | None:
        """From the `values` of a record, what it belongs to instead of this run; None where it belongs to it."""
        try:
            return difference(_read_record(values), self)
        except ValueError as error:
            return f"a run that this program does not know ({error})"


def make_record(experiment: Experiment, corpus: Corpus) -> Record:
    """The record of a run of `experiment` on its text."""
    parts, tokenizer = (corpus.train, corpus.validation), corpus.tokenizer
    vocab_size = experiment.model.vocab_size or tokenizer.vocab_size
    tokens, text = tuple(len(part.tokens) for part in parts), tuple(part.digest for part in parts)
    return Record(experiment, vocab_size, tokenizer.fingerprint, tokens, text)


_FIELDS = {"experiment": dict, "vocab_size": int, "tokenizer": str, "tokens": [int, int], "text": [str, str]}


def _read_record(values: Any) -> Record:
    """Raises ValueError where these are not the values of a record."""
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}, not an object")
    for name, kind in _FIELDS.items():
        if name not in values:
            raise ValueError(f"it has no field {name}")
        if not _fits(values[name], kind):
            raise ValueError(f"its field {name} is {json.dumps(values[name])[:40]}")
    try:
        experiment = from_dict(Experiment, values["experiment"])
    except (AttributeError, TypeError) as error:  # a list, say, where a section belongs
        raise ValueError(f"its field experiment is damaged: {error}") from None
    tokens, text = tuple(values["tokens"]), tuple(values["text"])
    return Record(experiment, values["vocab_size"], values["tokenizer"], tokens, text)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list | tuple) and list(map(type, value)) == kind
    return type(value) is kind


def difference(there: Record, here: Record) -> str | None:
    """What `there` is, seen from `here`: another experiment, tokenizer or text; None where it is the same run."""
    if there.experiment.identity() != here.experiment.identity():
        return another_experiment(there.experiment, here.experiment)
    if there.tokenizer != here.tokenizer:
        then, now = (f"{r.tokenizer} of {r.vocab_size} ids" for r in (there, here))
        return f"a run with another tokenizer ({then} there and {now} here)"
    if there.tokens != here.tokens:
        then, now = (f"{r.tokens[0]:,} training and {r.tokens[1]:,} validation tokens" for r in (there, here))
        return f"a run on another text ({then} there, {now} here)"
    if there.text != here.text:
        return "a run on another text (of as many tokens, but not the same ones)"
    return None


def another_experiment(there: Experiment, here: Experiment) -> str:
    """`another experiment (model.d_model is 128 there and 256 here)`, of all fields that differ."""
    old, new = there.identity(), here.identity()
    differences = (
        f"{name} is {old.get(name, 'unset')!r} there and {new.get(name, 'unset')!r} here"
        for name in sorted(old | new)
        if old.get(name) != new.get(name)
    )
    return f"another experiment ({'; '.join(differences)})"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system refuses inside, such as a full disk, into one sentence about `path`.

    Raises:
        RunError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"{path} cannot be written ({reason}); put that right, then the same command goes on from the last "
            "checkpoint, or choose another --train.dir"
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write a file to, which becomes `path` at the end: a kill or a full disk leaves no half of one.

    Raises:
        RunError: it cannot be written; what was there before still is.
    """
    draft = path.with_name(path.name + _DRAFT)
    with writing(path):
        try:
            yield draft
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


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
    saved = property(lambda self: self.path / "saved")
    wandb_id = property(lambda self: self.path / "wandb_id")
    lock = property(lambda self: self.path / "lock")

    def record(self) -> Record | None:
        """What config.json says; None where there is none.

        Raises:
            RunError: the file is damaged or of another program.
        """
        if not self.config.exists():
            return None
        try:
            return _read_record(json.loads(self.config.read_text(encoding="utf-8")))
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        except RecursionError:
            problem = "does not describe a run (it is nested too deeply)"
        except ValueError as error:
            problem = f"does not describe a run ({error})"
        raise RunError(f"{self.config} {problem}; restore it or choose another directory")

    def open_tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None before it has one. Raises DataError where its files are damaged."""
        return load_tokenizer(self.tokenizer) if self.tokenizer.exists() else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes the directory where there is none, and keeps every other process from training in it.

        Raises:
            RunError: another process trains there, or the directory cannot be made.
        """

        def busy(holder: str) -> None:
            raise RunError(f"{holder} is training in {self.path}; wait for its end, or choose another --train.dir")

        with ExitStack() as stack:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.lock, busy))
            yield

    def mark_saved(self) -> None:
        """Notes that there is a checkpoint, so that its loss is noticed; raises RunError as `writing` does."""
        with writing(self.saved):
            self.saved.touch()

    def begin(self, record: Record, tokenizer: Tokenizer) -> None:
        """Writes config.json and the tokenizer, or checks them where an earlier start has; within `held`.

        config.json comes first, so that a directory in which a kill left anything at all is known as a run's.

        Raises:
            RunError: the experiment, the tokenizer or the text is not the one that the run began with, or the
                files cannot be written.
        """
        known = self.record()
        if known is not None and (other := difference(known, record)) is not None:
            raise RunError(f"{self.path} holds {other}; bring that back, or choose another --train.dir")
        with replacing(self.config) as draft:
            draft.write_text(json.dumps(record.values(), indent=1) + "\n", encoding="utf-8")
        if not self.tokenizer.exists():
            draft = self.tokenizer.with_name(self.tokenizer.name + _DRAFT)
            with writing(self.tokenizer):
                shutil.rmtree(draft, ignore_errors=True)
                tokenizer.save(draft)
                draft.rename(self.tokenizer)


def open_run(experiment: Experiment) -> RunDir:
    """The directory of an experiment, new or of an earlier start of the same one; writes nothing.

    Raises:
        RunError: the directory cannot be made or written to, or it holds another experiment, files that are not a
            run's, or a run whose checkpoints are gone.
    """
    run = RunDir(Path(experiment.directory))
    _check_place(run)
    record = run.record()
    if record is None:
        _check_empty(run)
    elif record.experiment.identity() != experiment.identity():
        other = another_experiment(record.experiment, experiment)
        raise RunError(f"{run.path} holds {other}; choose another --train.dir")
    if run.saved.exists() and not saved_steps(run.checkpoints):
        raise RunError(
            f"{run.path} has been saved before, but {run.checkpoints} holds no checkpoint; put the checkpoints back, "
            "or choose another --train.dir"
        )
    return run


def _check_place(run: RunDir) -> None:
    """Raises RunError where the directory could not be made or written to, or has a file in a folder's place."""
    place = next(p for p in (run.path.absolute(), *run.path.absolute().parents) if os.path.lexists(p))
    label = f"train.dir={str(run.path)!r}"
    if not place.exists():
        raise RunError(f"{label}: {place} is a link to nothing; mend it, or choose another --train.dir")
    if not place.is_dir():
        where = "is a file" if place == run.path.absolute() else f"lies below {place}, which is a file"
        raise RunError(f"{label} {where}; choose another --train.dir")
    if not os.access(place, os.W_OK | os.X_OK):
        raise RunError(f"{label}: {place} cannot be written to; make it writable, or choose another --train.dir")
    for path in (run.tokenizer, run.checkpoints, run.events, run.samples):
        if os.path.lexists(path) and not path.is_dir():
            raise RunError(f"{path} is not the folder that a run keeps there; move it, or choose another --train.dir")
    for path in (run.config, run.metrics, run.loss, run.experts, run.saved, run.wandb_id, run.lock):
        if path.is_dir():
            raise RunError(f"{path} is a folder, not the file of a run; move it, or choose another --train.dir")


def _check_empty(run: RunDir) -> None:
    """Raises RunError where a directory without config.json holds anything that a kill would not have left."""
    found = sorted(p.name for p in run.path.iterdir()) if run.path.exists() else []
    strange = [name for name in found if not name.endswith(_DRAFT) and name != run.lock.name]
    if run.checkpoints.name in strange:
        raise RunError(f"{run.path} has checkpoints but no config.json; restore it, or choose another --train.dir")
    if strange:
        raise RunError(f"{run.path} is not a run but holds {strange[0]}; choose another --train.dir")


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
    return Run(model, _restore_params(run, model, record), tokenizer, config)


def _restore_params(run: RunDir, model: Decoder, record: Record) -> Any:
    mean = record.experiment.optimizer.ema_decay is not None
    specs = model.abstract_params()
    # The running mean of the parameters is kept in float32 whatever they are.
    dtype = lambda s: "float32" if mean else s.dtype  # noqa: E731
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype(s)), specs, is_leaf=is_spec)
    checkpoints = Checkpoints(run.checkpoints, say=lambda text: print(text, file=sys.stderr))
    try:
        found = checkpoints.restore_params(shapes, record.foreign, "ema" if mean else "params")
    finally:
        checkpoints.close()
    if found is None:
        raise RunError(f"{run.path} has no checkpoint yet; train it until train.save_every, or to the end")
    return jax.tree.map(lambda s, p: p.astype(s.dtype), specs, found[1], is_leaf=is_spec)
