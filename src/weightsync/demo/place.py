"""Where a run leaves its files: a folder of its own, in which nothing of an earlier run is touched.

The folder is made before anything is started, since nothing else proves that it can be made. If nothing came
into it in the end, it is taken away again. ``runs/latest`` is a link to the newest run in ``runs``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..fsm.errors import SetupError

__all__ = ["DEFAULT", "LATEST", "folder_for", "mark_latest"]

DEFAULT = Path("runs/demo")
LATEST = "latest"
_MOST = 10_000


@contextmanager
def folder_for(out: Path) -> Iterator[Path]:
    """The folder of one run: ``out``, or the first free ``out-N``. Empty ones are gone afterwards.

    Raises:
        SetupError: it cannot be made.
    """
    made: list[Path] = []
    try:
        yield _claim(out, made)
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # there is something in it
                folder.rmdir()


def mark_latest(folder: Path) -> Path | None:
    """Let the link ``latest`` beside ``folder`` lead to it, in one step; None where that cannot be.

    Only in the place of all runs: what lies beside a folder that the user chose is the user's.
    """
    link = folder.with_name(LATEST)
    if folder.parent != DEFAULT.parent or (os.path.lexists(link) and not link.is_symlink()):
        return None
    beside = folder.with_name(f".{LATEST}-{uuid.uuid4().hex}")
    try:
        beside.symlink_to(folder.name, target_is_directory=True)
        beside.replace(link)
    except OSError:  # a file system without links: the run's own name is printed as well
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        return None
    return link


def _claim(out: Path, made: list[Path]) -> Path:
    """Make the folder, and note in ``made`` all that were made for it."""
    if out.name in ("", ".."):
        raise SetupError(f"--out {out}: name a folder for this run alone, such as {out / DEFAULT.name}")
    try:
        if os.path.lexists(out) and not out.is_dir():
            raise SetupError(f"--out {out}: is there and is no folder; name another place")
        for parent in [each for each in reversed(out.parents) if not each.exists()]:
            parent.mkdir(exist_ok=True)
            made.append(parent)
        for number in range(_MOST):
            folder = out if number == 0 else out.with_name(f"{out.name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                made.append(folder)
                return folder
    except OSError as error:
        raise SetupError(f"--out {out}: the folder cannot be made: {error.strerror or error}") from error
    raise SetupError(f"--out {out}: ten thousand runs lie there; name another folder")
