import errno
import os
import subprocess
import sys

import pytest

from zoo.data.lock import locked


class Busy(Exception):
    pass


def busy(holder):
    raise Busy(holder)


def hold(path):
    """Another process that holds the lock until it is killed."""
    program = "import pathlib, sys, time; from zoo.data.lock import locked\n"
    program += f"with locked(pathlib.Path({str(path)!r}), print): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_one_process_at_a_time_and_a_kill_frees_it(tmp_path):
    process = hold(tmp_path / "lock")
    try:
        with pytest.raises(Busy, match=rf"process {process.pid} on "), locked(tmp_path / "lock", busy):
            pass
    finally:
        process.kill()
        process.communicate()
    with locked(tmp_path / "lock", busy):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_it_is_free_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(tmp_path / "lock", busy):
            1 / 0  # noqa: B018


def test_a_file_system_without_locks_is_no_obstacle_and_another_fault_is_one(tmp_path, monkeypatch):
    def answer(number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("fcntl.flock", flock)

    answer(errno.ENOLCK)
    with locked(tmp_path / "lock", busy):
        pass
    answer(errno.EIO)
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path / "lock", busy):
        pass
