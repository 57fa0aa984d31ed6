"""Tensors as bytes: any range of one, in logical order, whatever its strides, dtype and device.

The bytes of a tensor are those of its elements in row-major order, as a contiguous copy would hold them. A
contiguous tensor in this process's memory *is* that sequence (``flat``), and a copy from or to it is one
memory copy. Everything else (transposed, sliced, channels-last, on a device) is cut into boxes and copied box
by box, so that a piece of a large tensor costs its own bytes and no temporary of the tensor's size.

Elements are moved as integers, never as numbers: a bool that is neither 0 nor 1 and the payload of a NaN
arrive as they left.

Contiguous bytes are copied by numpy, on the calling thread alone. torch would spread each copy over its
threads, which gains nothing for memory that is not in a cache and costs several times as much on a machine
whose cores are busy; and to set its number of threads would change the trainer's as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Octets", "dtype_name", "flat", "read", "write"]

Octets = NDArray[np.uint8]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """What plans call a dtype: as torch prints it, without the prefix."""
    return str(dtype).removeprefix("torch.")


def flat(tensor: torch.Tensor) -> Octets | None:
    """The bytes of ``tensor`` without a copy, or None if they do not lie in order in this memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    # A tensor of one row counts as contiguous whatever its steps, which a view as bytes does not allow.
    line = tensor.detach().as_strided((tensor.numel(),), (1,))
    octets: Octets = line.view(torch.uint8).numpy()
    return octets


def read(tensor: torch.Tensor, start: int, stop: int, into: Octets) -> None:
    """Copy bytes ``start`` to ``stop`` of ``tensor`` into ``into``, which has exactly their length."""
    own = flat(tensor)
    if own is not None:
        np.copyto(into, own[start:stop])
        return
    for box, part in _boxes_beside(tensor, start, stop, into):
        part.copy_(box)


def write(tensor: torch.Tensor, start: int, stop: int, octets: Octets) -> None:
    """Copy ``octets`` over bytes ``start`` to ``stop`` of ``tensor``; its strides and identity stay."""
    own = flat(tensor)
    if own is not None:
        np.copyto(own[start:stop], octets)
        return
    source = octets if octets.flags.writeable else octets.copy()  # torch takes no read-only memory
    for box, part in _boxes_beside(tensor, start, stop, source):
        box.copy_(part)


def _boxes_beside(
    tensor: torch.Tensor, start: int, stop: int, octets: Octets
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Boxes of ``tensor``, each with the part of ``octets`` that belongs to it, in the same shape."""
    if not octets.size:
        return
    grain = math.gcd(8, tensor.element_size(), start, stop, octets.ctypes.data)
    bits = tensor.detach()
    if grain < tensor.element_size() or not tensor.dim():
        # One more dimension, of step 1: so every tensor can be viewed as smaller words, whatever its strides.
        bits = bits.unsqueeze(-1)
    words = bits.view(_WORDS[grain])
    line = torch.from_numpy(octets).view(_WORDS[grain])
    for box, place in _boxes(words, start // grain, stop // grain):
        yield box, line[place : place + box.numel()].view(box.shape)


def _boxes(words: torch.Tensor, low: int, high: int, place: int = 0) -> Iterator[tuple[torch.Tensor, int]]:
    """Cut elements ``low`` to ``high``, in logical order, into boxes; with each, where it starts in them."""
    if low >= high:
        return
    if words.dim() == 1:
        yield words[low:high], place
        return
    row = words.numel() // words.shape[0]
    first, last = -(-low // row), high // row  # the whole rows
    if first > last:
        yield from _boxes(words[last], low - last * row, high - last * row, place)
        return
    if low < first * row:
        yield from _boxes(words[first - 1], low - (first - 1) * row, row, place)
    if first < last:
        yield words[first:last], place + first * row - low
    if last * row < high:
        yield from _boxes(words[last], 0, high - last * row, place + last * row - low)
