"""Copies of memory: every byte, and no other, whatever the size and wherever it lies."""

import numpy as np
import pytest

from weightsync.transports.copies import _ROW, copy_memory, copy_octets

SIZES = [0, 1, 7, 4096, _ROW - 1, _ROW, _ROW + 1, 2 * _ROW - 1, 2 * _ROW, 2 * _ROW + 3, 5 * _ROW + 4097]
PLACES = [0, 1, 63, 4096]


def octets(size: int, seed: int) -> np.ndarray:
    """Bytes drawn from ``seed``."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_every_byte_is_copied_and_no_other_is_written(size: int, place: int) -> None:
    """Around the length of a row, too, and where nothing is aligned."""
    source, around = octets(size + 128, 1), octets(size + place + 128, 2)
    wanted = around.copy()
    wanted[place : place + size] = source[5 : 5 + size]
    copy_octets(around[place : place + size], source[5 : 5 + size])
    assert np.array_equal(around, wanted)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_addresses_do_as_well(size: int, place: int) -> None:
    """The same, where no array is at hand."""
    source, around = octets(size + 128, 3), octets(size + place + 128, 4)
    wanted = around.copy()
    wanted[place : place + size] = source[5 : 5 + size]
    copy_memory(around.ctypes.data + place, source.ctypes.data + 5, size)
    assert np.array_equal(around, wanted)


def test_what_may_only_be_read_is_a_source_too() -> None:
    """As a segment that an engine has mapped is."""
    source, into = octets(3 * _ROW, 5), np.zeros(3 * _ROW, dtype=np.uint8)
    source.flags.writeable = False
    copy_octets(into, source)
    assert np.array_equal(into, source)
