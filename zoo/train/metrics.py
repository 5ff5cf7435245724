"""What a run says about itself: a line on the screen, metrics.jsonl, and events for TensorBoard."""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from zoo.rundir import replacing, writing

Row = dict[str, Any]
FLUSH_SECONDS = 10  # TensorBoard sees what is older


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with the number of finished steps as `step`."""

    def __init__(self, path: Path, last_step: int = 0):
        """Opens the file to go on after `last_step` finished steps.

        Rows of later steps, and a line that a kill left half written, are cut off; other lines stay as they are. The
        file is replaced as a whole, so a kill meanwhile loses nothing.

        Raises:
            RunError: the file cannot be written; the same holds for `write` and `close`.
        """
        with replacing(path) as draft:
            draft.write_bytes(_up_to(last_step, path.read_bytes()) if path.exists() else b"")
        self._path = path
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row; values that are not finite become null, as JSON has no word for them."""
        with writing(self._path):
            self._file.write(_as_line(row))
            self._file.flush()

    def flush(self) -> None:
        """Every row is on its way to the disk as soon as it is written."""

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file; none where there is no file. A line that is no object with a step is left out."""
    if not path.exists():
        return []
    with path.open("rb") as lines:
        return [row for row in map(_as_row, lines) if row is not None]


def _up_to(last_step: int, text: bytes) -> bytes:
    """The lines of a metrics file without rows of later steps, and without a last line that is half of a row."""
    *lines, end = text.split(b"\n")
    if _as_row(end) is not None:  # whole: an editor may have taken its line end
        lines.append(end)
    rows = ((line, _as_row(line)) for line in lines)
    return b"".join(line + b"\n" for line, row in rows if row is None or row["step"] <= last_step)


def _as_row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _as_line(row: Mapping[str, Any]) -> str:
    return json.dumps(_plain(row)) + "\n"


def _plain(value: Any) -> Any:
    """Values as JSON has them: arrays as lists, floats to 7 digits, nothing that is not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


class Events:
    """Scalars for TensorBoard; of a list (one value per layer), each value under its index.

    They are written at once, in the thread of the caller: tensorboardX's own SummaryWriter hands them to a thread,
    which dies in silence on a full disk, and its `flush` leaves those behind that the thread has not come to.
    """

    def __init__(self, directory: Path, last_step: int = 0):
        """Later events than `last_step`, of an earlier start of the run, are hidden.

        Raises:
            RunError: the file cannot be written; the same holds for the other methods.
        """
        now = time.time()
        # A name of its own for every start; TensorBoard reads the files in the order of their names.
        self._path = directory / f"events.out.tfevents.{now:017.6f}.{os.getpid()}"
        with writing(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(str(self._path))
        self._put(Event(wall_time=now, file_version="brain.Event:2"))
        self._put(Event(wall_time=now, step=last_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def write(self, row: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(row)]
        self._put(Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values)))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def _put(self, event: Event) -> None:
        with writing(self._path):
            self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        """Returns when all rows are on the disk."""
        with writing(self._path):
            self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        with writing(self._path):
            self._writer.close()


def scalars(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """The numbers of a row under names of their own, an array's one by one; without the step."""
    for name, value in _plain({name: value for name, value in row.items() if name != "step"}).items():
        items = (
            [(f"{name}/layer_{i}", item) for i, item in enumerate(value)]
            if isinstance(value, list)
            else [(name, value)]
        )
        yield from ((key, item) for key, item in items if isinstance(item, int | float))


@runtime_checkable
class Place(Protocol):
    """What keeps rows."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Sends every row to all the places that keep it."""

    def __init__(self, *places: Place):
        self._places = places

    def write(self, row: Mapping[str, Any]) -> None:
        for place in self._places:
            place.write(row)

    def flush(self) -> None:
        """Brings to disk what is not there yet; ask before a checkpoint, which promises the rows before it."""
        for place in self._places:
            place.flush()

    def close(self) -> None:
        with ExitStack() as stack:  # closes all, also where one raises
            for place in self._places:
                stack.callback(place.close)


class Screen:
    """One line that lives on a terminal, plain lines elsewhere; of sys.stdout, or any other text stream."""

    def __init__(self, stream: Any = None):
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()

    def status(self, text: str) -> None:
        """Replaces the live line; where there is no terminal, prints the line."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._put(f"\r\x1b[K{text[:width]}")
        else:
            self._put(f"{text}\n")

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._put(f"\r\x1b[K{text}\n" if self._live else f"{text}\n")

    def _put(self, text: str) -> None:
        """A character that the stream's encoding lacks becomes a question mark: a sample may hold any."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def status_line(row: Mapping[str, Any], steps: int, seconds_left: float | None) -> str:
    """`step 120/1000  loss 3.214  1.873 bits/byte  lr 0.001  12.3k tokens/s  ETA 3:20  132G FLOP/s`.

    Speed is left out where the row has none yet. MFU, the share of the device's peak, takes the place of FLOP/s
    where that peak is known. A narrow terminal cuts off the end, so the least important comes last.
    """
    parts = [
        f"step {row['step']}/{steps}",
        f"loss {row['train/loss']:.3f}",
        f"{row['train/bits_per_byte']:.3f} bits/byte",
        f"lr {row['learning_rate']:.2g}",
    ]
    skipped = [f"{row['skipped']} skipped"] if row.get("skipped") else []
    if "tokens_per_second" not in row or seconds_left is None:
        return "  ".join(parts + skipped)
    parts += [f"{short(row['tokens_per_second'])} tokens/s", f"ETA {clock(seconds_left)}"]
    parts.append(f"MFU {row['mfu']:.1%}" if "mfu" in row else f"{short(row['flops_per_second'])} FLOP/s")
    return "  ".join(parts + skipped)


def short(value: float) -> str:
    """Three digits and a letter: 12345 -> 12.3k."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
    whole = max(round(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
