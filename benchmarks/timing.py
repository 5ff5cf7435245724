"""What the benchmarks share: runs in turns, medians, and a record of the machine."""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

Run = Callable[[], None]


def interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of what each run returns (its own seconds), run in turns, so that a busy machine slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    return {name: statistics.median(times) for name, times in seconds.items()}


def timed(run: Run) -> Callable[[], float]:
    """`run` as a function that returns the seconds it took; run once beforehand to compile."""
    run()

    def measured() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return measured


def table(rows: list[dict], columns: list[str]) -> str:
    """Rows of {"case": name, column: milliseconds} as text, with the ratio of each column to the first."""
    lines = [f"{'case':24}" + "".join(f"{name:>22}" for name in columns)]
    for row in rows:
        cells = [f"{row[name]:9.1f} ms ({row[name] / row[columns[0]]:5.2f}x)" for name in columns if name in row]
        lines.append(f"{row['case']:24}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def write_json(path: str, rows: list[dict]) -> None:
    """The rows with the machine, the versions and the date."""
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "rows": rows,
    }
    with open(path, "w") as file:
        json.dump(record, file, indent=1)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
