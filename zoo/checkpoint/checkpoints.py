"""The checkpoints of a run: saved asynchronously and whole or not at all, verified when restored.

Orbax writes into a temporary directory and renames it, so a killed save leaves nothing that looks like a
checkpoint; but it restores a flipped bit in silence. Beside the state, each checkpoint therefore keeps a
manifest: shape, dtype and checksum of every leaf, what the caller adds, and a digest of itself.
"""

import contextlib
import functools
import gc
import logging
import pathlib
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from zoo.checkpoint import leaves as on_device
from zoo.checkpoint.manifest import Unusable, compare, compare_checksums, manifest, of_the_system, opened, unreadable
from zoo.parallel.distributed import agree, barrier

_TEMPORARY = ".orbax-checkpoint-tmp"
_DELETED = ".deleted"

Foreign = Callable[[dict[str, Any]], str | None]
Found = tuple[int, Any, dict[str, Any]]


@functools.cache
def _quieten() -> None:
    """Keeps the screen free of what goes on inside Orbax; what matters, `Checkpoints` raises or says.

    Orbax logs every step of a save and a traceback for every failure. After the first write that fails it leaves the
    others to themselves: asyncio logs their errors, and TensorStore's threads find the event loop closed.
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    hook = sys.unraisablehook

    def quiet(unraisable: Any) -> None:
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = quiet


class CheckpointError(OSError):
    """A checkpoint that cannot be written, or none that can be read; the message says what to do."""


def saved_steps(directory: pathlib.Path) -> list[int]:
    """The steps that have a checkpoint in a directory, good or bad, in order; none where there is no directory."""
    if not directory.is_dir():
        return []
    found = (int(p.name) for p in directory.iterdir() if p.name.isdecimal() and p.is_dir())
    return sorted(step for step in found if _path(directory, step).exists())


def _path(directory: pathlib.Path, step: int) -> pathlib.Path:
    return directory / f"{step:08d}"


class Checkpoints:
    """The checkpoints in a directory, one subdirectory a step. Reading changes nothing in it.

    Args:
        directory: created by the first save.
        keep_last: newest checkpoints that are kept.
        keep_every: checkpoints at multiples of this many steps are kept for good; None for none.
        say: is told in one sentence about each checkpoint that is passed over or moved aside.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        keep_last: int = 2,
        keep_every: int | None = None,
        say: Callable[[str], Any] = warnings.warn,
    ):
        _quieten()
        self.directory = pathlib.Path(directory).absolute()
        self._keep_last, self._keep_every, self._say = keep_last, keep_every, say
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._pending: tuple[int, int] | None = None  # step and bytes of the save under way
        self._bad: set[int] = set()  # steps that restore has passed over
        self._good: int | None = None  # the step that was last saved or restored
        self._swept = False

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, good or bad, in order."""
        return saved_steps(self.directory)

    def save(self, step: int, state: Any, meta: dict[str, Any], wait: bool = False) -> None:
        """Starts to save `state` as the checkpoint of `step`; the caller may go on, and donate the state.

        A step that this object has saved or restored before is not saved again. Checkpoints of this or later
        steps (a future that a restore has left) and those that restore passed over are moved aside first,
        never overwritten.

        Args:
            state: a tree of arrays, the same on every process.
            meta: what JSON can hold, returned by `restore`.
            wait: return when the checkpoint is complete.

        Raises:
            CheckpointError: where this or the previous save failed; earlier checkpoints stay as they were.
        """
        self.wait()
        if step == self._good:
            return
        leaves = on_device.by_path(state)
        document = manifest(step, leaves, on_device.checksums(leaves), meta)
        self._pending = (step, on_device.n_bytes(leaves))
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), meta=ocp.args.JsonSave(document))
        try:
            self._make_way(step)
            self._orbax.save(self._path(step), args=args)
        except Exception as error:  # Orbax and TensorStore raise many classes; each means that nothing was saved
            raise self._failed(error) from error
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when the save under way, if any, is complete and old checkpoints are deleted.

        Raises:
            CheckpointError: where the save failed; earlier checkpoints stay as they were.
        """
        if self._pending is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception as error:  # as in save
            raise self._failed(error) from error
        self._good, self._pending = self._pending[0], None
        self._delete_old()

    def close(self) -> None:
        """Waits, and ends the background threads.

        Raises: as `wait` does.
        """
        try:
            self.wait()
        finally:
            self._orbax.close()

    def restore(self, abstract_state: Any, foreign: Foreign = lambda meta: None) -> Found | None:
        """(step, state, meta) of the newest good checkpoint, or None where there is no checkpoint.

        One that is unreadable, damaged, foreign or of another model is passed over, and `say` told why.

        Args:
            abstract_state: the tree to restore: shapes, dtypes and the shardings wanted now, which may be of
                another mesh or number of devices than those of the save. Leaves without a sharding go to one device.
            foreign: from the meta of a checkpoint, what else it belongs to ("another experiment"), None where it
                belongs here.

        Raises:
            CheckpointError: where there are checkpoints but none is good.
        """
        return self._newest_good(abstract_state, foreign, within="")

    def restore_params(
        self, abstract_params: Any, foreign: Foreign = lambda meta: None, key: str = "params"
    ) -> Found | None:
        """As `restore`, but reads and verifies only the part of the state under `key`."""
        return self._newest_good(abstract_params, foreign, within=f"{key}/")

    def _newest_good(self, abstract: Any, foreign: Foreign, within: str) -> Found | None:
        self.wait()
        candidates = self.steps()[::-1]
        problems: dict[int, str] = {}
        for step in candidates:
            state, meta, problem = self._attempt(step, abstract, foreign, within)
            if problem is None:
                self._good = step
                for bad, reason in problems.items():
                    self._say(f"checkpoint {self._path(bad)} {reason}; falling back to that of step {step}")
                return step, state, meta
            problems[step] = problem
            self._bad.add(step)
        if problems:
            reasons = "; ".join(f"step {step} {problem}" for step, problem in problems.items())
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used: {reasons}; restore a copy of them, "
                "go back to the settings that they were made with, or choose another run directory"
            )
        return None

    def _attempt(
        self, step: int, abstract: Any, foreign: Foreign, within: str
    ) -> tuple[Any, dict[str, Any], str | None]:
        """(state, meta, None), or the problem last; every process comes to the same verdict."""
        state, meta, problem = None, {}, None
        try:
            with _no_echoes():
                state, meta = self._read(step, abstract, foreign, within)
        except Unusable as error:
            problem = str(error)
        except Exception as error:  # of `foreign`, or of devices that cannot hold the state
            problem = f"cannot be read ({_first_line(error)})"
        if not agree(problem is None):
            problem = problem or "cannot be read by another process"
        return state, meta, problem

    def _read(self, step: int, abstract: Any, foreign: Foreign, within: str) -> tuple[Any, dict[str, Any]]:
        document = self._item(step, meta=ocp.args.JsonRestore())
        body = opened(document, step)
        if (other := foreign(body["meta"])) is not None:
            raise Unusable(f"belongs to {other}")
        wanted = {within + name: on_device.placed(leaf) for name, leaf in on_device.by_path(abstract).items()}
        saved = {name: leaf for name, leaf in body["leaves"].items() if name.startswith(within)}
        compare(saved, wanted)
        args = ocp.args.PyTreeRestore(
            wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=bool(within)
        )
        found = self._item(step, state=args)
        compare_checksums(saved, on_device.checksums(found))
        state = on_device.like(abstract, {name.removeprefix(within): leaf for name, leaf in found.items()})
        return state, body["meta"]

    def _item(self, step: int, **args: Any) -> Any:
        """What a checkpoint keeps under the one name in `args`; raises Unusable where its files are damaged."""
        (name,) = args
        try:
            return self._orbax.restore(self._path(step), args=ocp.args.Composite(**args))[name]
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # the fault of no file
        except Exception as error:  # whatever damaged files make Orbax, TensorStore or a decoder raise
            raise Unusable(unreadable(error, self._path(step), name)) from None

    def _path(self, step: int) -> pathlib.Path:
        return _path(self.directory, step)

    def _make_way(self, step: int) -> None:
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self._swept:
                self._sweep()
            for old in self.steps():
                if old >= step or old in self._bad:
                    self._move_aside(old)
        self._swept = True
        self._bad.clear()
        barrier("checkpoint-make-way")

    def _move_aside(self, step: int) -> None:
        path, n = self._path(step), 0
        while (aside := path.with_name(f"{path.name}.aside{n or ''}")).exists():
            n += 1
        path.rename(aside)
        reason = "could not be restored" if step in self._bad else "is not of this run's past"
        self._say(f"checkpoint {path} {reason}; it is now {aside.name}, which you may delete")

    def _sweep(self) -> None:
        """Deletes what a killed or failed save, or a killed deletion, has left behind."""
        for path in self.directory.iterdir():
            if _TEMPORARY in path.name or path.name.endswith(_DELETED):
                shutil.rmtree(path, ignore_errors=True)

    def _delete_old(self) -> None:
        if jax.process_index() != 0:
            return
        for step in self.steps()[: -self._keep_last]:
            if self._keep_every is None or step % self._keep_every:
                # Renamed first: a directory that is half deleted must not look like a checkpoint.
                doomed = self._path(step).rename(self._path(step).with_suffix(_DELETED))
                shutil.rmtree(doomed, ignore_errors=True)

    def _failed(self, error: Exception) -> CheckpointError:
        step, needed = self._pending or (0, 0)
        self._pending = None
        free = shutil.disk_usage(_existing(self.directory)).free
        if jax.process_index() == 0 and self.directory.is_dir():
            self._sweep()
        kept = self.steps()
        last = f"the last good checkpoint is that of step {kept[-1]}" if kept else "there is no earlier checkpoint"
        return CheckpointError(
            f"the checkpoint of step {step} could not be saved to {self.directory} ({_first_line(error)}): "
            f"it needs about {needed:,} bytes and {free:,} were free; make room or choose another directory; {last}"
        )


@contextlib.contextmanager
def _no_echoes() -> Iterator[None]:
    """Keeps the screen free of the reads that Orbax leaves unfinished after the first that fails."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        yield
    except Exception:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()  # they report when they are collected
        raise
    finally:
        sys.unraisablehook = hook


def _existing(path: pathlib.Path) -> pathlib.Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _first_line(error: Exception) -> str:
    if reason := of_the_system(error):
        return reason
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line if len(line) < 160 else line[:160] + '...'}"
