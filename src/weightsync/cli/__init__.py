"""The command line: ``weightsync demo | log | diagram | check | doctor``.

Each subcommand is a module of its own with an ``add`` that describes it and a ``run`` that does it. What is
costly is imported by ``run``, so that ``--help`` answers at once and a bare machine can read a log.

Exit status: 0 it is as it should be; 1 something was found that is not; 2 the question made no sense, said in
one line on standard error; 130 interrupted; 141 whoever read the output has gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..fsm.errors import SyncFailed, WeightSyncError
from ..logfile import LogEmpty
from . import check, demo, diagram, doctor, log
from .terminal import complain, hush, speak_plainly

__all__ = ["main"]

_COMMANDS = (demo, log, diagram, check, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives back the exit status.

    Args:
        argv: the arguments, without the name of the program; by default those of this process.
    """
    speak_plainly()
    try:
        arguments = _parser().parse_args(argv)
        status: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # whatever is wrong with it is to show here, and not when Python ends
    except SystemExit as end:  # argparse has said what there was to say
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except BrokenPipeError:
        hush()
        return 141
    except (WeightSyncError, OSError) as error:
        hush()
        complain(_told(error))
        return 1 if isinstance(error, (LogEmpty, SyncFailed)) else 2
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "weightsync":
            raise
        complain(f"{error.name} is not installed; `weightsync doctor` says what is")
        return 2
    return status


def _told(error: Exception) -> str:
    """What an error says, without the number that an operating system gives it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


class _Parser(argparse.ArgumentParser):
    """An argparse that complains in one line."""

    def error(self, message: str) -> NoReturn:
        complain(f"{message} (see: {self.prog} --help)")
        self.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="weightsync",
        description="Weight synchronisation for reinforcement learning, as an explicit state machine.",
    )
    parser.add_argument("--version", action="version", version=f"weightsync {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return parser
