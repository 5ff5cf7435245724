"""The command line: zoo train | generate | check | trace."""

import errno
import io
import os
import sys
from collections.abc import Sequence

from zoo.cli.commands import COMMANDS
from zoo.cli.experiment_file import load_experiment
from zoo.cli.options import OptionError
from zoo.config import nearest

__all__ = ["load_experiment", "main"]

# What writing to an open file fails with; such an error names no file.
_OF_FILES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}

USAGE = """usage: zoo COMMAND [OPTIONS]

  zoo train --config FILE [OPTIONS]      train a model, or go on with an interrupted run
  zoo generate --model RUN_DIR [OPTIONS] write text with a trained model
  zoo check --config FILE [OPTIONS]      run the laws of a causal decoder on a model
  zoo trace --preset NAME --text "..."   show every step of one sentence's way through a model
  zoo describe --preset NAME [OPTIONS]   say what a model costs: parameters, FLOPs, memory, days of training
  zoo compare A B                        put two presets or config files side by side

zoo COMMAND --help lists the options of a command. Each takes a value; one of True and False alone means True.
"""


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status.

    What a user can put right, an error of this package or a file that cannot be read or written, is one sentence on
    stderr and status 2; anything else keeps its traceback. An interruption is status 130, a closed output 141.
    """
    args = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        # A model writes characters that the encoding of a terminal may lack.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return _dispatch(args)
    except KeyboardInterrupt:
        print("zoo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left; what is buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        print(f"zoo: error: {reason}", file=sys.stderr)
        return 2


def _reason(error: ValueError | OSError) -> str | None:
    """What to say of an error that a user can put right; None for any other."""
    if type(error).__module__.partition(".")[0] == "zoo":
        return str(error)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _OF_FILES):
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{place}{error.strerror or error}"
    return None


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] not in COMMANDS:
        raise OptionError(f"{args[0]!r} is not one of {', '.join(COMMANDS)}{nearest(args[0], COMMANDS)}")
    return COMMANDS[args[0]](args[1:])
