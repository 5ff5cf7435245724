"""The command line: zoo train | generate | check."""

import os
import sys
from collections.abc import Sequence

from zoo.cli.commands import COMMANDS
from zoo.cli.experiment_file import load_experiment
from zoo.cli.options import OptionError
from zoo.config import nearest

__all__ = ["load_experiment", "main"]

USAGE = """usage: zoo COMMAND [OPTIONS]

  zoo train --config FILE [OPTIONS]      train a model, or go on with an interrupted run
  zoo generate --model RUN_DIR [OPTIONS] write text with a trained model
  zoo check --config FILE [OPTIONS]      run the laws of a causal decoder on a model

zoo COMMAND --help lists the options of a command.
"""


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status.

    What a user can put right, an error of this package, is one sentence on stderr and status 2; anything else
    keeps its traceback. An interruption is status 130, a closed output 141.
    """
    args = list(sys.argv[1:] if args is None else args)
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
        if type(error).__module__.partition(".")[0] != "zoo":
            raise
        print(f"zoo: error: {error}", file=sys.stderr)
        return 2


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] not in COMMANDS:
        raise OptionError(f"{args[0]!r} is not one of {', '.join(COMMANDS)}{nearest(args[0], COMMANDS)}")
    return COMMANDS[args[0]](args[1:])
