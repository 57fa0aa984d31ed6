"""Memory that many read, made so that none of them can write it: the pages of a view while it is lent.

A read-only array refuses what numpy would write. But torch makes a tensor of it that it takes for writable,
after a warning that few read, and so would C code; and in the object store the bytes are every reader's.
While pages are shielded, such a write ends the process (SIGSEGV) where it happens, and nobody else's weights
are spoiled. Pages that a view has only a part of stay as they are, at most one at each end: so what must not
be written lies between margins that take these up.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from .octets import Octets

__all__ = ["MARGIN", "shielded"]

MARGIN = 64 << 10
"""Bytes at either end of a view that may not be shielded; what is between them is. No pages are longer."""

_READ, _WRITE = 1, 2  # PROT_READ and PROT_WRITE, the same on every POSIX system


@contextmanager
def shielded(octets: Octets) -> Iterator[None]:
    """Nobody in this process can write the whole pages of ``octets`` meanwhile; afterwards, as before.

    For memory that is mapped for reading and writing, and of which nobody else has a part of these pages. If
    another thread shields the same pages, the first to leave opens them. Where the system does not do it,
    there is no shield.
    """
    low = -(-octets.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    high = (octets.ctypes.data + octets.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if high <= low or not _protect(low, high - low, _READ):
        yield
        return
    try:
        yield
    finally:
        _protect(low, high - low, _READ | _WRITE)


def _protect(start: int, size: int, how: int) -> bool:
    function = _mprotect()
    return function is not None and function(start, size, how) == 0


@cache
def _mprotect() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).mprotect
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
