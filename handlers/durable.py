"""Small files that survive a crash: read whole, replaced whole, by one process at a time.

A file that is written in place can be found half written. So a new one is written beside it, forced to the
disk, and renamed over it; the folder is forced to the disk last. Whoever reads sees the old file or the new.

Writers keep each other away with a lock on a second file, ``<name>.lock``: the file itself cannot carry the
lock, since it is another file after each rename. The kernel drops that lock when its holder dies. It is taken
without blocking and asked for again for a bounded time, because a stopped process may hold it for ever.

Files are readable by their owner only. Errors are ``OSError``, and the old file is untouched. One is told
apart: ``NotForced`` comes after the rename, when the folder is forced to the disk. Then the new file is in
place, but may not outlive a power failure.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["PATIENCE", "NotForced", "exclusively", "name_of", "read", "replace"]

PATIENCE = 10.0
"""Seconds to wait for another writer, whose turn takes milliseconds."""

_PAUSE = 0.005
_NO_SUCH_CALL = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


class NotForced(OSError):
    """The file was replaced, but whether that is on the disk is not known."""


def read(path: Path, limit: int) -> bytes | None:
    """The content of a regular file of at most ``limit`` bytes; None if there is no such file."""
    try:
        # A pipe of this name would otherwise be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit} bytes", str(path))
    return content


def name_of(path: Path) -> str:
    """How a file is called in logs of several hosts. One that hosts share has a name on each of them."""
    return f"{socket.gethostname()}:{path}"


def replace(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of the file, all or nothing. Call it within ``exclusively``."""
    # One writer at a time, so one name is enough, and what a killed writer left is taken away by the next.
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    try:
        _write_new(beside, content)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    try:
        _sync_folder(path.parent)
    except OSError as error:
        raise NotForced(error.errno, f"{error.strerror}, after the file was replaced", str(path)) from error


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


@contextmanager
def exclusively(path: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Keep every other writer of this file away, other threads included. Makes the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    guard = path.with_name(f"{path.name}.lock")
    descriptor = os.open(guard, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _take(descriptor, guard, patience)
        try:
            yield
        finally:
            # Closing is not enough: a child forked meanwhile has a copy, which would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _take(descriptor: int, guard: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                message = f"is held by another writer for more than {patience:g} s"
                raise TimeoutError(errno.ETIMEDOUT, message, str(guard)) from None
            time.sleep(_PAUSE)
        else:
            return
