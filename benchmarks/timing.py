"""What the benchmarks share: runs in turns, medians, and a record of the machine."""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

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


class Peer:
    """A program in another interpreter, which runs once a line and answers with its seconds.

    Attributes:
        versions: what it said of itself after its first run: name -> version, or {"error": why it cannot run}.
    """

    def __init__(self, python: str, program: str, settings: dict):
        command = [python, Path(__file__).with_name(program)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = json.loads(self._ask(json.dumps(settings)))

    def _ask(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def __call__(self) -> float:
        return float(self._ask("run"))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def row(case: str, ours: float, peers: dict[str, float]) -> dict:
    """A row of a result, {"case", "ours_ms", "peers_ms"}, from seconds."""
    return {"case": case, "ours_ms": ours * 1e3, "peers_ms": {name: peer * 1e3 for name, peer in peers.items()}}


def table(rows: list[dict]) -> str:
    """Rows as text: ours, then every peer with the ratio of its time to ours. Above 1 ours is faster."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers_ms"]))
    lines = [f"{'case':26}{'ours':>12}" + "".join(f"{name:>26}" for name in names)]
    for row in rows:
        peers, ours = row["peers_ms"], row["ours_ms"]
        cells = [f"{peers[name]:.1f} ms ({peers[name] / ours:.2f}x)" if name in peers else "-" for name in names]
        lines.append(f"{row['case']:26}{ours:9.1f} ms" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def write_json(path: str, rows: list[dict], peers: dict[str, str] | None = None) -> None:
    """The rows with the machine, the versions, also of the peers, and the date."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": versions | (peers or {}),
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
