"""Memory that one process writes and others read: a segment without a name, handed on as a descriptor.

A segment has no name anywhere (``memfd``; where that is missing, a file that is unlinked as it is made), so
a process that is killed leaves nothing behind, and the size of ``/dev/shm`` does not matter where there are
memfds. It cannot grow or shrink, and nobody but its maker can map it for writing, where the system knows how
to promise that. Fresh memory costs several times the copy into it, so a segment is touched once, when it is
made, and used for as many rounds as it fits.

A reader gets at the memory through a *lease*, a buffer of its own for one part of it. Everything that is made
of the buffer (arrays, tensors, views of views) keeps it alive, and with it the mapping; when the last of them
is gone, so is the lease. Whether a reader still has a view is therefore a question of fact, not of manners.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch

from ..fsm.errors import TransportError
from .octets import Octets

__all__ = ["Mapped", "Offer", "Segment", "available_memory", "refuse_without_room"]

_DONTFORK = 10  # MADV_DONTFORK
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which the mmap module does not name
_ADD_SEALS = 1033
_SHRINK, _GROW, _FUTURE_WRITE = 0x2, 0x4, 0x10


class Offer(NamedTuple):
    """What another process needs to reach some memory: descriptors, and plain values."""

    fds: tuple[int, ...] = ()
    handle: tuple[str | int | bytes, ...] = ()


@final
class Segment:
    """The writer's end. Made, touched and mapped once.

    Args:
        size: in bytes, at least 1.

    Raises:
        TransportError: there is not so much memory.
    """

    def __init__(self, size: int) -> None:
        self.id = secrets.token_hex(8)
        self.size = size
        refuse_without_room(size, "a segment")
        self.fd = _nameless(size)
        try:
            self._map = mmap.mmap(self.fd, size)
            _touch(self._map)
        except OSError as error:
            os.close(self.fd)
            raise TransportError(
                f"a segment of {_mebibytes(size)} cannot be had: {error.strerror}"
            ) from error
        _seal(self.fd)
        self.octets: Octets = np.frombuffer(self._map, dtype=np.uint8)

    def offer(self, process: str, pid: int) -> Offer:
        """Its descriptor, whoever is asking."""
        return Offer(fds=(self.fd,))

    def close(self) -> None:
        """Give this process's mapping back. The memory lives until the last reader let go of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.octets = np.empty(0, dtype=np.uint8)
            with contextlib.suppress(BufferError):  # a view is left: the mapping goes with it
                self._map.close()


@final
class Mapped:
    """A reader's end.

    Args:
        fd: of the segment; it is closed here.
        size: as its writer says.

    Raises:
        TransportError: it is not what its writer says, or cannot be mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        try:
            held = os.fstat(fd).st_size
            if not 0 < size == held:
                raise TransportError(f"a segment of {size} bytes was announced, and there are {held}")
            self._memory = _ReadOnly(fd, size)
        finally:
            os.close(fd)
        self.size = size
        self._lock = threading.Lock()
        self._leases: list[weakref.ref[Any]] = []

    @property
    def leased(self) -> bool:
        """Whether anything in this process still has a view of it."""
        return any(lease() is not None for lease in self._leases)

    def lease(self, start: int, size: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A flat view of ``size`` bytes from ``start`` on, and what tells whether anything is left of it.

        Torch has no tensors that cannot be written; whoever writes through this one ends his process.

        Raises:
            TransportError: the segment is not that large.
        """
        if not 0 <= start <= start + size <= self.size:
            raise TransportError(f"bytes {start} to {start + size} are not in a segment of {self.size}")
        buffer = (ctypes.c_ubyte * max(1, size)).from_address(self._memory.address + start)
        buffer.memory = self._memory  # type: ignore[attr-defined]
        lease: weakref.ref[Any] = weakref.ref(buffer)
        with self._lock:
            self._leases = [lease, *(each for each in self._leases if each() is not None)]
        return torch.frombuffer(buffer, dtype=torch.uint8, count=max(1, size))[:size], lease


@final
class _ReadOnly:
    """A mapping for reading alone, that goes with this object. Unlike ``mmap`` it keeps no descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        address = _libc.mmap(None, size, mmap.PROT_READ, flags, fd, 0)
        if address in (None, _FAILED):
            why = os.strerror(ctypes.get_errno())
            raise TransportError(f"a segment of {_mebibytes(size)} cannot be mapped: {why}")
        self.address = int(address)
        # A child would look at memory that counts its parent's views alone: it gets none of it.
        _libc.madvise(self.address, size, _DONTFORK)
        weakref.finalize(self, _unmap, self.address, size, os.getpid()).atexit = False


def _unmap(address: int, size: int, process: int) -> None:
    if os.getpid() == process:  # in a child, something else may lie there
        _libc.munmap(address, size)


_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


# -- how ----------------------------------------------------------------------------------------------------


def _nameless(size: int) -> int:
    """A descriptor of ``size`` bytes of memory that no path leads to."""
    try:
        fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return _unlinked(size)
    os.ftruncate(fd, size)
    return fd


def _unlinked(size: int) -> int:
    """The same, of a file that has no name any more; its room is taken at once, or refused."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - it gets no name there
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return os.dup(file.fileno())
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise TransportError(
            f"a segment of {_mebibytes(size)} does not fit into {where}: {error.strerror}; make it larger "
            "(--shm-size of a container)"
        ) from error


def _touch(memory: mmap.mmap) -> None:
    """Have every page there. Called past Python's own ``madvise``, which would stop every other thread."""
    octets = np.frombuffer(memory, dtype=np.uint8)
    if _libc.madvise(octets.ctypes.data, octets.size, _POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:  # an older kernel does not know it
        raise OSError(code, os.strerror(code))
    ctypes.memset(octets.ctypes.data, 0, octets.size)


def _seal(fd: int) -> None:
    """From now on its size is fixed, and nobody else maps it for writing. Not every system can do that."""
    for seals in (_SHRINK | _GROW, _FUTURE_WRITE):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, _ADD_SEALS, seals)


def refuse_without_room(size: int, what: str) -> None:
    """Too little memory is refused: to touch it would have this process, or another, killed.

    Raises:
        TransportError: ``what`` takes more memory than is left.
    """
    room = available_memory()
    if room is not None and size > room:
        raise TransportError(
            f"{what}: {_mebibytes(size)} are needed, and {_mebibytes(room)} of memory are left"
        )


def available_memory() -> int | None:
    """Bytes that can still be had on this host, or within this process's control group; None if unknown."""
    rooms = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        rooms.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    for group in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limit = int((group / "memory.max").read_text(encoding="ascii"))
            used = int((group / "memory.current").read_text(encoding="ascii"))
            rooms.append(max(0, limit - used + _cached(group)))
    return min(rooms, default=None)


def _cached(group: Path) -> int:
    """Bytes of files that are in memory for convenience, and give way."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        found = dict(line.split() for line in lines)
        return int(found.get("inactive_file", 0)) + int(found.get("active_file", 0))
    return 0


def _control_groups() -> list[Path]:
    """This process's, and those around it: each may have a limit."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            if line.startswith("0::"):
                own = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
                return [own, *(each for each in own.parents if len(each.parts) > 3)]
    return []


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
