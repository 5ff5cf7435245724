"""What a run left behind, to be compared with what another left."""

import json

from zoo.train.metrics import read_rows


def leaves(directory, step):
    """Shape, dtype and checksum of every leaf of a checkpoint."""
    return json.loads((directory / f"checkpoints/{step:08d}/meta/metadata").read_text())["body"]["leaves"]


def numbers(directory):
    """The metrics without those of time."""
    time_free = ("tokens_per_second", "flops_per_second")
    rows = read_rows(directory / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in time_free} for row in rows]


def assert_equal_runs(got, want, step):
    assert leaves(got, step) == leaves(want, step)
    assert numbers(got) == numbers(want)
