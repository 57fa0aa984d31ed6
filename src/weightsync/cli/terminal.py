"""Where the output goes: a terminal, a file, a pipe whose reader may leave."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..columns import Paint, clean

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - it has no public name

__all__ = ["complain", "hush", "paint", "show", "speak_plainly", "whole", "width"]


def show(lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        print(line)


def complain(message: str) -> None:
    """One line on standard error, whatever ``message`` holds."""
    with contextlib.suppress(OSError, ValueError):
        print(f"weightsync: {clean(message)}", file=sys.stderr)


def width() -> int | None:
    """How many characters fit into a line; None where nobody looks at the width, as in a file."""
    if os.environ.get("COLUMNS", "").isdecimal() or _is_terminal():
        return max(20, shutil.get_terminal_size().columns)
    return None


def paint() -> Paint:
    """Colours for a terminal that shows them, unless the user said no (https://no-color.org)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Paint(on=wanted and _is_terminal())


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def speak_plainly() -> None:
    """Print what the encoding of the output lacks as an escape, where Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def hush() -> None:
    """Give up on what was not printed yet: the reader is gone, or the disk is full.

    Python would try it again on its way out, and complain.
    """
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (AttributeError, ValueError):  # there is no standard output, or it is closed
        pass


def whole(least: int) -> Callable[[str], int]:
    """For argparse: a whole number of at least ``least``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {least} is needed")
        return int(text)

    return number
