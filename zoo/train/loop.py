"""A run from its config to its pictures; reads from top to bottom."""

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zoo.checkpoint import Checkpoints, is_finite
from zoo.config import Experiment
from zoo.infer.generate import generate, room
from zoo.parallel.distributed import agree, global_batch, initialize
from zoo.rundir import Run, RunDir, replacing, writing
from zoo.train.evaluate import evaluate
from zoo.train.memory import keep_freed_memory
from zoo.train.metrics import Events, MetricsFile, Recorder, Row, Screen, read_rows, status_line
from zoo.train.parts import Parts, assemble, begun, introduce
from zoo.train.pictures import draw_pictures
from zoo.train.speed import Speed
from zoo.train.state import TrainState, abstract_state, evaluated, fresh_state
from zoo.train.step import make_eval_step, make_train_step
from zoo.train.wandb import WandbRun


class TrainingError(ValueError):
    """Training that cannot go on; the message says where the last good state is and what to do."""


class Result(NamedTuple):
    """How a run ended.

    Attributes:
        directory: the run directory.
        step: finished steps.
        validation: the newest `val/...` numbers of metrics.jsonl, empty where there are none.
        signal: the signal that ended it early, else None.
    """

    directory: Path
    step: int
    validation: Row
    signal: int | None


def train(experiment: Experiment) -> Result:
    """Trains a model, going on from the newest good checkpoint of its run directory.

    Everything is a function of the experiment and the step, so that a run which is killed and started again on an
    equal machine ends with the same bits. SIGTERM and SIGINT let the step end and save.

    Raises:
        ConfigError: settings that do not fit together, the text or the devices; before anything is compiled.
        DataError: text that cannot be used.
        RunError: the run directory holds something else, another process trains there, or it cannot be written.
        CheckpointError: no checkpoint can be read, or one cannot be written.
        TrainingError: train.max_bad_steps updates in a row were not finite, or the parameters are not.
    """
    initialize()
    keep_freed_memory()
    parts = assemble(experiment)
    screen = Screen() if jax.process_index() == 0 else Screen(open(os.devnull, "w"))  # noqa: SIM115
    settings = parts.experiment.train
    with begun(parts), closing(_checkpoints(parts, screen)) as checkpoints:
        introduce(parts, screen)
        state, step = restore(parts, checkpoints, screen)
        if step >= settings.steps:
            return finished(parts, step, screen)
        with closing(open_recorder(parts, step, screen)) as recorder, _signals() as caught:
            return Loop(parts, screen, recorder, checkpoints, caught).run(state, step)


# ---------------------------------------------------------------------------------------- before the first step


def _checkpoints(parts: Parts, screen: Screen) -> Checkpoints:
    settings = parts.experiment.train
    return Checkpoints(parts.directory.checkpoints, settings.keep_last, settings.keep_every, say=screen.say)


def restore(parts: Parts, checkpoints: Checkpoints, screen: Screen) -> tuple[TrainState, int]:
    """The state to go on from, and its step: that of the newest good checkpoint, or the initial one."""
    shapes = abstract_state(parts.specs, parts.optimizer, parts.layout.state.ema is not None)
    placed = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, parts.layout.state
    )
    found = checkpoints.restore(placed, parts.record.foreign)
    if found is None:
        return fresh_state(parts.model, parts.optimizer, parts.layout, parts.experiment.train.seed), 0
    step, state, _ = found
    screen.say(f"resumed at step {step} of {parts.experiment.train.steps}")
    return state, step


def finished(parts: Parts, step: int, screen: Screen) -> Result:
    """The result of a run that has nothing left to do but pictures that a kill has left out."""
    directory = parts.directory
    screen.say(f"finished: {step} of {parts.experiment.train.steps} steps are done; raise --train.steps to go on")
    validation = _newest_validation(directory)
    if jax.process_index() == 0:
        directory.mark_saved()  # a kill may have left that out too
        if not _newer(directory.loss, directory.metrics):
            draw_pictures(directory.metrics, directory.loss, directory.experts)
    return Result(directory.path, step, validation, None)


def _newer(path: Path, than: Path) -> bool:
    return path.exists() and than.exists() and path.stat().st_mtime_ns >= than.stat().st_mtime_ns


def _newest_validation(directory: RunDir) -> Row:
    rows = [row for row in read_rows(directory.metrics) if "val/loss" in row]
    return {name: value for name, value in rows[-1].items() if name.startswith("val/")} if rows else {}


def open_recorder(parts: Parts, step: int, screen: Screen) -> Recorder:
    """Where rows go; what an earlier start wrote of later steps is cut off. Only process 0 writes."""
    if jax.process_index() != 0:
        return Recorder()
    settings = parts.experiment.train
    with ExitStack() as opened:  # what is open is closed where a later one fails
        places = [opened.enter_context(closing(MetricsFile(parts.directory.metrics, step)))]
        if settings.tensorboard:
            places.append(opened.enter_context(closing(Events(parts.directory.events, step))))
        if settings.wandb is not None:
            places.append(WandbRun(parts.experiment, parts.directory, screen.say))
        opened.pop_all()
    return Recorder(*places)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The list that SIGTERM and SIGINT are noted in instead of ending the process; a second one interrupts."""
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield caught
        return
    with ExitStack() as undo:
        for number in (signal.SIGTERM, signal.SIGINT):
            undo.callback(signal.signal, number, signal.signal(number, note))
        yield caught


# ------------------------------------------------------------------------------------------------ the steps


class Loop:
    """The steps of a run, and what happens between them."""

    def __init__(self, parts: Parts, screen: Screen, recorder: Recorder, checkpoints: Checkpoints, caught: list[int]):
        self.parts, self.settings = parts, parts.experiment.train
        self.screen, self.recorder, self.checkpoints, self.caught = screen, recorder, checkpoints, caught
        self.train_step = make_train_step(parts.model, parts.experiment, parts.optimizer, parts.layout)
        self.eval_step = make_eval_step(parts.model, parts.layout)
        self.speed = Speed(parts)
        train = parts.corpus.train
        self.marked = jax.process_index() != 0
        self.labels_per_byte = (len(train.tokens) - len(train.offsets) + 1) / train.text_bytes

    def run(self, state: TrainState, step: int) -> Result:
        """Takes the steps from `step` on.

        The numbers of a step are read while the next one runs, so that accelerators never wait for the host.
        """
        with closing(self.parts.loader.iterate(step)) as batches:
            unread = None
            while step < self.settings.steps and not self._stopping(step):
                state, metrics = self.train_step(state, global_batch(next(batches), self.parts.mesh))
                step += 1
                self._read(unread, state, step)
                unread = step, metrics
                if self._due(step):
                    self._read(unread, state, step)
                    unread = None
                    self._visit(state, step)
        if step < self.settings.steps:
            self._read(unread, state, step)
            self._end(state, step)
        return self._result(step)

    def _stopping(self, step: int) -> bool:
        """Whether a signal came. Several processes have to agree, which is too slow for every step."""
        if jax.process_count() > 1 and step % self.settings.log_every:
            return False
        return not agree(not self.caught)

    def _read(self, unread: tuple[int, dict[str, Any]] | None, state: TrainState, at: int) -> None:
        """Looks at the numbers of a step, which the devices may still be computing; `state` is that after step `at`."""
        if unread is None:
            return
        step, metrics = unread
        if int(metrics["skipped_in_a_row"]) >= self.settings.max_bad_steps:
            self.save(state, at, wait=True)
            raise TrainingError(
                f"{self.settings.named('max_bad_steps')} updates in a row, the last of them step {step}, were skipped "
                f"because gradient or loss were not finite; the state before them is saved in "
                f"{self.parts.directory.checkpoints}; look at the text, or {_advice(self.parts.experiment)}"
            )
        self._mark()
        self.speed.step_done(step)
        if step == 1 or step == self.settings.steps or step % self.settings.log_every == 0:
            self._log(step, jax.device_get(metrics))

    def _log(self, step: int, metrics: Row) -> None:
        bits = float(metrics["train/loss"]) / math.log(2) * self.labels_per_byte
        first = {"step": step, "train/loss": metrics["train/loss"], "train/bits_per_byte": bits}
        row = first | self.speed.lap(step) | metrics
        self.recorder.write(row)
        left = self.settings.steps - step
        self.screen.status(status_line(row, self.settings.steps, self.speed.seconds(left)))

    def _due(self, step: int) -> bool:
        """Whether something other than the next step is to be done after `step` steps."""
        settings = self.settings
        every = (settings.eval_every, settings.save_every, settings.sample_every)
        return step == settings.steps or any(_multiple(step, n) for n in every)

    def _visit(self, state: TrainState, step: int) -> None:
        """Evaluates, saves, draws and samples, what of these is due.

        Rows come before the checkpoint of their step: resuming from it keeps them. Pictures and samples come after
        it, so that nothing that goes wrong there can cost a step.
        """
        settings, last = self.settings, step == self.settings.steps
        sampling = settings.sample_every and (last or _multiple(step, settings.sample_every))
        with self.speed.pause():
            if last or _multiple(step, settings.eval_every):
                self.evaluate(state, step)
            if last:
                self._end(state, step)
            elif _multiple(step, settings.save_every):
                self.save(state, step, wait=bool(sampling))
            if sampling:
                self.sample(state, step)

    def _end(self, state: TrainState, step: int) -> None:
        self.save(state, step, wait=True)
        directory = self.parts.directory
        if jax.process_index() == 0:
            draw_pictures(directory.metrics, directory.loss, directory.experts)

    def _result(self, step: int) -> Result:
        directory = self.parts.directory
        number = self.caught[0] if self.caught and step < self.settings.steps else None
        if number is None:
            self.screen.say(f"finished {step} steps; pictures, metrics and checkpoints are in {directory.path}")
        else:
            name = signal.Signals(number).name
            self.screen.say(f"{name}: saved step {step} of {self.settings.steps}; the same command goes on from there")
        return Result(directory.path, step, _newest_validation(directory), number)

    # ------------------------------------------------------------------------------------ between the steps

    def evaluate(self, state: TrainState, step: int) -> None:
        """Evaluates on the whole validation set, and writes and says the result."""
        self.screen.status(f"step {step}: evaluating")
        row = evaluate(self.parts, self.eval_step, evaluated(state))
        self.recorder.write({"step": step} | row)
        self.screen.say(
            f"step {step}: validation {row['val/loss']:.4f} nats/token  {row['val/bits_per_byte']:.4f} bits/byte  "
            f"perplexity {row['val/perplexity']:.2f}  (gzip -9: {row['val/gzip_bits_per_byte']:.2f} bits/byte)"
        )

    def sample(self, state: TrainState, step: int) -> None:
        """Writes a text that the model writes, and shows it. Several processes would have to write it together.

        Where the devices cannot (their memory is full of training, say), it says so and training goes on.

        Raises:
            RunError: the text cannot be written.
        """
        if jax.process_count() > 1:
            return
        parts, settings = self.parts, self.settings
        run = Run(parts.model, evaluated(state), parts.corpus.tokenizer, parts.experiment)
        prompt = settings.sample_prompt
        length = min(settings.sample_tokens, room(run, prompt))
        try:
            text = prompt + generate(run, prompt, max_tokens=length, seed=step)[0]
        except jax.errors.JaxRuntimeError as error:
            self.screen.say(f"step {step}: no sample, the devices could not write one ({str(error).splitlines()[0]})")
            return
        with writing(parts.directory.samples):
            parts.directory.samples.mkdir(exist_ok=True)
        with replacing(parts.directory.samples / f"step_{step}.txt") as draft:
            draft.write_text(text + "\n", encoding="utf-8")
        self.screen.say(f"step {step}: sample\n{text}\n")

    def save(self, state: TrainState, step: int, wait: bool = False) -> None:
        """Saves a state that is finite, after all rows; with `wait`, returns when it is on disk.

        Raises:
            TrainingError: the state is not finite; it is not saved.
            CheckpointError: this or the previous save failed.
        """
        if not is_finite(state):
            raise TrainingError(
                f"the state after step {step} is not finite and was not saved; earlier checkpoints are in "
                f"{self.parts.directory.checkpoints}; {_advice(self.parts.experiment)}"
            )
        self.recorder.flush()
        self.checkpoints.save(step, state, self.parts.record.values(), wait=wait)
        self._mark()

    def _mark(self) -> None:
        """Once the first checkpoint is complete, which may be steps after its save began, the directory says so."""
        if not self.marked and self.checkpoints.steps():
            self.parts.directory.mark_saved()
            self.marked = True


def _advice(experiment: Experiment) -> str:
    """A run keeps its learning rate: another one makes another run."""
    rate = "muon_learning_rate" if experiment.optimizer.name == "muon" else "learning_rate"
    return f"train again with less than {experiment.optimizer.named(rate)}, in another --train.dir"


def _multiple(step: int, n: int | None) -> bool:
    return n is not None and step % n == 0
