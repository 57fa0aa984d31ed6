"""A folder of this process's own, for the endpoints of its rounds; and whether somebody lives in one.

It is readable for this user alone, and its name cannot be guessed. As long as its maker lives he holds a lock
on a file in it, which the system takes from him when he dies, however he dies. So what a killed process left
behind is told from what is in use, also between containers that share the place but not their processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import final

__all__ = ["PrivateFolder", "inhabited"]

_LOCK = "lock"
_LONGEST_PATH = 107
"""Bytes of a socket's path."""


@final
class PrivateFolder:
    """Made at once; gone with ``close``. Takes away what killed processes of this user left behind.

    Args:
        prefix: of the name.

    Raises:
        OSError: there can be none here.
    """

    def __init__(self, prefix: str) -> None:
        place = _place(prefix)
        _reclaim(place, prefix)
        # Locked before it has the name by which others look for what nobody holds.
        new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=place))  # 0700
        self._process = os.getpid()
        self._fd = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.path = new.rename(new.with_name(new.name[1:]))

    @property
    def there(self) -> bool:
        """Whether nobody has taken it away, as those do who clean up after others."""
        return (self.path / _LOCK).exists()

    def close(self) -> None:
        """Take it away. A forked child takes nothing of its parent's. Idempotent."""
        if self._fd < 0 or os.getpid() != self._process:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)
        self._fd = -1


def _place(prefix: str) -> Path:
    """Where temporary files go, unless a socket's path would be longer there than the system allows."""
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")  # noqa: S108 - the folder is private
    needed = len(os.fsencode(usual / f"{prefix}12345678" / ("0" * 16)))
    return short if needed > _LONGEST_PATH and os.access(short, os.W_OK | os.X_OK) else usual


def inhabited(folder: Path) -> bool:
    """Whether the process that made it is alive, and has not given it up."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _reclaim(place: Path, prefix: str) -> None:
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            if entry.name.startswith(prefix):
                with contextlib.suppress(OSError):
                    _reclaim_one(Path(entry.path))


def _reclaim_one(folder: Path) -> None:
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    # One without the file is just being made, or taken away.
    if mine and (folder / _LOCK).exists() and not inhabited(folder):
        shutil.rmtree(folder, ignore_errors=True)
