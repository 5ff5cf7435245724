import io
import json
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from zoo.rundir import RunError
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


def test_lines_that_are_no_rows_stay_as_they_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    notes = [b"# mine: \xff\r", b"", b'{"note": "x"}', b"3", b'{"step":  10}', b"[" * 100_000]
    path.write_bytes(b"\n".join([*notes, b'{"step": 30}', b'{"step": 20}']))
    MetricsFile(path, last_step=20).write({"step": 25})
    assert path.read_bytes().split(b"\n") == [*notes, b'{"step": 20}', b'{"step": 25}', b""]
    assert [row["step"] for row in read_rows(path)] == [10, 20, 25]


def test_the_cut_replaces_the_file_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).write({"step": 10})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, last_step=0)
    assert [row["step"] for row in read_rows(path)] == [10]


def read_events(directory):
    """The events of all files, in TensorBoard's order: records of a length, the bytes, and a checksum of each."""
    events = []
    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
        assert at == len(data)
    return events


def test_events_hold_scalars_and_layers(tmp_path):
    row = {"step": 3, "train/loss": 2.5, "moe/max_load": [1.0, 2.0], "moe/load": [[0.5, 0.5]], "bad": float("nan")}
    recorder = Recorder(Events(tmp_path))
    recorder.write(row)
    recorder.close()
    version, start, event = read_events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (1, SessionLog.START)
    values = [(value.tag, value.simple_value) for value in event.summary.value]
    assert event.step == 3
    assert values == [("train/loss", 2.5), ("moe/max_load/layer_0", 1.0), ("moe/max_load/layer_1", 2.0)]


def test_what_is_flushed_outlives_a_kill_and_the_next_start_hides_what_came_later(tmp_path):
    first = Events(tmp_path)
    for step in (1, 2, 3):
        first.write({"step": step, "train/loss": 1.0})
    first.flush()  # and nothing more of it: killed
    second = Events(tmp_path, last_step=2)
    second.flush()
    events = read_events(tmp_path)
    assert [event.step for event in events] == [0, 1, 1, 2, 3, 0, 3]
    assert events[-1].session_log.status == SessionLog.START


def test_a_full_disk_is_said_and_hangs_nothing(tmp_path):
    events = Events(tmp_path)
    events._writer._writer = open("/dev/full", "wb")  # noqa: SIM115
    events.write({"step": 1, "train/loss": 1.0})
    with pytest.raises(RunError, match=r"events.out.tfevents.* cannot be written \(No space left on device\)"):
        events.flush()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_screen_without_a_character_shows_another():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Screen(stream).say("a 漢")
    assert stream.buffer.getvalue() == b"a ?\n"


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
