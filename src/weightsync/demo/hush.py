"""Keeps a run's table free of what others print: that goes into a file beside the log, where it can be read.

Ray's driver prints what its raylets tell it, a paragraph for every actor that is killed, on Python's standard
output, and warns of changes of its own defaults. Standard error is left alone: errors are for everybody.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

__all__ = ["aside"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def aside(path: Path) -> Iterator[None]:
    """While it lasts, put what is printed into the file ``path``, which is there only if something was."""
    # The notice about it is Ray's; for actors that ask for no GPU both answers are the same.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with _File(path) as file, redirect_stdout(file), warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=r"ray(\.|$)")
        yield


class _File(io.TextIOBase):
    """A file that is opened by the first word that is written into it, and never complains."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, text: str) -> int:
        """Write, if that is possible: nobody who prints in passing is to fail by it."""
        try:
            if self._file is None and not self.closed:
                self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
            if self._file is not None:
                self._file.write(_COLOURS.sub("", text))
        except (OSError, ValueError):
            pass
        return len(text)

    def flush(self) -> None:
        """Write out what is held back."""
        try:
            if self._file is not None:
                self._file.flush()
        except (OSError, ValueError):
            pass

    def close(self) -> None:
        """Close the file, if there is one."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError:
            pass
        super().close()
