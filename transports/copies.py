"""A copy of memory, by the calling thread alone, at the speed of the memory.

The C library copies in one of several ways, by the length of the call. On processors of AMD a call that is
longer than the second cache is done by a loop that first reads what it is about to overwrite, which costs a
quarter more than several short calls. So a long copy is cut into rows, and numpy is given every other row at
once: it lets other threads go on meanwhile, and copies row by row, because they do not lie side by side.
"""

from __future__ import annotations

import ctypes
from ctypes import memmove  # which lets other threads go on
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["array_at", "copy_memory", "copy_octets"]

_ROW = 512 << 10
"""Bytes. The second cache of these processors holds as many, which is where the C library changes its way."""


def copy_octets(into: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copy flat bytes over others, as many, that do not overlap them."""
    if source.size <= _ROW:
        np.copyto(into, source)
        return
    whole = source.size // _ROW * _ROW
    rows, those = into[:whole].reshape(-1, _ROW), source[:whole].reshape(-1, _ROW)
    rows[0::2] = those[0::2]
    rows[1::2] = those[1::2]
    into[whole:] = source[whole:]


def copy_memory(into: int, source: int, size: int) -> None:
    """The same by addresses: for a small copy, an array costs more than the copy."""
    if size <= _ROW:
        memmove(into, source, size)
    else:
        copy_octets(
            np.frombuffer(array_at(into, size), np.uint8), np.frombuffer(array_at(source, size), np.uint8)
        )


def array_at(place: int, size: int) -> Any:
    """The bytes at an address as a buffer that does not hold them: to be used at once, and not kept."""
    return _array(size).from_address(place)


@lru_cache(maxsize=1 << 12)
def _array(size: int) -> Any:
    return ctypes.c_ubyte * size
