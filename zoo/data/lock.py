"""Locks between processes, which the system frees when their holder ends, however it ends."""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, TextIO

# What file systems answer that know no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


@contextlib.contextmanager
def locked(path: pathlib.Path, busy: Callable[[str], Any]) -> Iterator[None]:
    """Holds a lock on the file `path`, which is made if need be and stays, and names its last holder.

    On a file system that knows no locks nothing is held.

    Args:
        busy: told who holds the lock, if another process does; if it returns, this one waits.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    with path.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            busy(stream.read() or "another process")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        _sign(stream)
        yield


def _sign(stream: TextIO) -> None:
    with contextlib.suppress(OSError):  # a lock without a name, on a full disk, is a lock
        os.truncate(stream.fileno(), 0)
        os.write(stream.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
