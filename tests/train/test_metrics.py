import io
import json
from typing import ClassVar

import numpy as np
import pytest

from zoo.train.metrics import Events, MetricsFile, Recorder, Screen, clock, read_rows, short, status_line


def test_rows_are_written_as_they_come_and_nothing_is_buffered(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "train/loss": np.float32(3.25), "moe/load": np.array([[0.25, 0.75]], np.float32)})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "train/loss": 3.25, "moe/load": [[0.25, 0.75]]}]


def test_values_that_are_not_finite_become_null(tmp_path):
    MetricsFile(tmp_path / "m").write({"step": 1, "train/loss": float("nan"), "x": [float("inf"), 1.0]})
    assert json.loads((tmp_path / "m").read_text()) == {"step": 1, "train/loss": None, "x": [None, 1.0]}


def test_resuming_cuts_back_to_the_restored_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (10, 20, 20, 30):
        file.write({"step": step})
    file.close()
    with path.open("a") as stream:
        stream.write('{"step": 2')  # a kill in the middle of a line
    again = MetricsFile(path, last_step=20)
    again.write({"step": 25})
    assert [row["step"] for row in read_rows(path)] == [10, 20, 20, 25]
    assert path.read_text().count("\n") == 4
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_cut_replaces_the_file_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).write({"step": 10})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, last_step=0)
    assert [row["step"] for row in read_rows(path)] == [10]


def test_events_hold_scalars_and_layers(tmp_path):
    class Kept:
        rows: ClassVar[list] = []

        def add_scalar(self, *row):
            self.rows.append(row)

        def close(self):
            pass

    events = Events(tmp_path)
    assert list(tmp_path.iterdir())
    events._writer.close()
    events._writer = Kept()
    row = {"step": 3, "train/loss": 2.5, "moe/max_load": [1.0, 2.0], "moe/load": [[0.5, 0.5]], "bad": float("nan")}
    recorder = Recorder(events)
    recorder.write(row)
    recorder.close()
    assert Kept.rows == [("train/loss", 2.5, 3), ("moe/max_load/layer_0", 1.0, 3), ("moe/max_load/layer_1", 2.0, 3)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_live_line_and_a_file_plain_ones():
    for stream, want in ((Terminal(), "\r\x1b[Ka\r\x1b[Kb\r\x1b[Kc\n"), (io.StringIO(), "a\nb\nc\n")):
        screen = Screen(stream)
        screen.status("a")
        screen.status("b")
        screen.say("c")
        assert stream.getvalue() == want


def test_the_status_line():
    row = {
        "step": 120,
        "train/loss": 3.21444,
        "train/bits_per_byte": 1.8731,
        "learning_rate": 1e-3,
        "tokens_per_second": 12345.0,
        "flops_per_second": 1.321e11,
    }
    start = "step 120/1000  loss 3.214  1.873 bits/byte  lr 0.001"
    assert status_line(row, 1000, 200.4) == f"{start}  12.3k tokens/s  ETA 3:20  132G FLOP/s"
    assert status_line(row | {"mfu": 0.412, "skipped": 2}, 1000, 4000).endswith("ETA 1:06:40  MFU 41.2%  2 skipped")
    first = {name: row[name] for name in ("step", "train/loss", "train/bits_per_byte", "learning_rate")}
    assert status_line(first, 1000, None) == start


def test_short_numbers():
    assert [short(x) for x in (7.0, 1234, 12345, 9.876e6, 2e9, 3.14e12)] == [
        "7",
        "1.23k",
        "12.3k",
        "9.88M",
        "2G",
        "3.14T",
    ]
    assert [clock(x) for x in (-1, 9, 61, 3661)] == ["0:00", "0:09", "1:01", "1:01:01"]
