"""Tensors as bytes: any range of one, in logical order, whatever its strides, dtype and device.

The bytes of a tensor are those of its elements in row-major order, as a contiguous copy would hold them. A
contiguous tensor in this process's memory *is* that sequence (``flat``), and a copy from or to it is one
memory copy. Everything else (transposed, sliced, channels-last, on a device) is cut into boxes and copied box
by box, so that a piece of a large tensor costs its own bytes and no temporary of the tensor's size.

Elements are moved as integers, never as numbers: a bool that is neither 0 nor 1 and the payload of a NaN
arrive as they left.

The exception is a tensor that is to be *cast*: its bytes are those of its numbers in another dtype. It is
cast on the way, block by block, right into the bytes that are asked for. Blocks lie at fixed places of the
tensor, because what becomes of a NaN depends, in torch, on its place in the call: so any range has the same
bytes, whoever asks for it, and the digest is that of what was sent. Of a block at the end of a range only as
many steps are cast as are asked for, where a step by itself turns out the same, and else the whole block.

Contiguous bytes are copied on the calling thread alone (``copies.py``). torch would spread each copy over its
threads, which gains nothing for memory that is not in a cache and costs several times as much on a machine
whose cores are busy; and to set its number of threads would change the trainer's as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..fsm.errors import PlanError
from .copies import array_at, copy_octets

__all__ = [
    "Cast", "Octets", "Source", "address", "boxes_beside", "dtype_name", "flat", "read", "span", "write",
]  # fmt: skip

Octets = NDArray[np.uint8]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_STEP = 128
"""Numbers. torch casts so many, or a divisor, at a time, and has another way for what is left in the end."""

_BLOCK = 255 * _STEP
"""Numbers that are cast at once: from 32768 on, torch would spread them over its threads."""

CHUNK = 32 * _BLOCK
"""Bytes that are read at once by those who need some memory to read into: whole blocks of any dtype."""


@dataclass(frozen=True, slots=True)
class Cast:
    """``tensor`` as numbers of another dtype, without a copy of it."""

    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """That of the tensor."""
        return self.tensor.shape

    def numel(self) -> int:
        """How many numbers there are."""
        return self.tensor.numel()

    def element_size(self) -> int:
        """Bytes a number, when it is cast."""
        return self.dtype.itemsize

    def made(self) -> torch.Tensor:
        """A contiguous tensor of these numbers: a copy, of the very bytes that are read."""
        made = torch.empty(self.shape, dtype=self.dtype)
        octets = flat(made)
        if octets is not None and octets.size:
            read(self, 0, octets.size, octets)
        return made


Source = torch.Tensor | Cast
"""What bytes can be read of."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """What plans call a dtype: as torch prints it, without the prefix."""
    return str(dtype).removeprefix("torch.")


def address(tensor: Source) -> int | None:
    """Where the bytes of ``tensor`` lie in order in this memory, all of them; None if they do not.

    For copies by addresses: nothing is made for the tensor, which costs more than to copy a small one.
    """
    if type(tensor) is Cast or not (tensor.is_cpu and tensor.is_contiguous()):  # type: ignore[union-attr]
        return None
    whole = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()  # type: ignore[union-attr]
    if tensor.untyped_storage().nbytes() < whole:  # type: ignore[union-attr]
        return None  # its storage was resized: whoever looks closer will say so
    return tensor.data_ptr()  # type: ignore[union-attr]


def flat(tensor: torch.Tensor) -> Octets | None:
    """The bytes of ``tensor`` without a copy, or None if they do not lie in order in this memory."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        return None
    # A tensor of one row counts as contiguous whatever its steps, which a view as bytes does not allow.
    # To detach costs as much as the question; most have no gradient to leave out.
    tensor = tensor.detach() if tensor.requires_grad else tensor
    line = tensor.as_strided((tensor.numel(),), (1,))
    octets: Octets = line.view(torch.uint8).numpy()
    return octets


def span(tensor: Source, start: int, stop: int) -> Any:
    """Bytes ``start`` to ``stop`` as a buffer, without a copy; None if they do not lie in order here.

    To be read at once, and not kept: it is memory of the tensor and does not hold it. That makes it several
    times as fast as ``flat``, which counts where there are hundreds of tensors and little is read of each.
    """
    if isinstance(tensor, Cast) or not (tensor.is_cpu and tensor.is_contiguous()):
        return None
    first = tensor.storage_offset() * tensor.element_size()
    if first + stop > tensor.untyped_storage().nbytes():
        raise PlanError("its memory was given away, its storage was resized")
    return array_at(tensor.data_ptr() + start, stop - start)


def read(tensor: Source, start: int, stop: int, into: Octets) -> None:
    """Copy bytes ``start`` to ``stop`` of ``tensor`` into ``into``, which has exactly their length."""
    if isinstance(tensor, Cast):
        _read_cast(tensor, start, stop, into)
        return
    own = flat(tensor)
    if own is not None:
        copy_octets(into, own[start:stop])
        return
    for box, part in _boxes_beside(tensor, start, stop, into):
        part.copy_(box)


def write(tensor: torch.Tensor, start: int, stop: int, octets: Octets) -> None:
    """Copy ``octets`` over bytes ``start`` to ``stop`` of ``tensor``; its strides and identity stay."""
    own = flat(tensor)
    if own is not None:
        copy_octets(own[start:stop], octets)
        return
    source = octets if octets.flags.writeable else octets.copy()  # torch takes no read-only memory
    for box, part in _boxes_beside(tensor, start, stop, source):
        box.copy_(part)


def _read_cast(cast: Cast, start: int, stop: int, into: Octets) -> None:
    """The same of numbers that are cast: whole units right into their place, both ends by a spare one."""
    tensor, size = cast.tensor.detach(), cast.element_size()
    unit, total = size * (_STEP if _by_steps(tensor.dtype, cast.dtype) else _BLOCK), tensor.numel() * size
    first, last = -(-start // unit) * unit, total if stop == total else stop // unit * unit
    if first >= last or (into.ctypes.data + first - start) % size:
        first = last = start
    numbers = _Numbers(tensor)
    if first < last:
        line = torch.from_numpy(into[first - start : last - start]).view(cast.dtype)
        for low, high in _calls(first // size, last // size):
            line[low - first // size : high - first // size].copy_(numbers(low, high))
    for here, end in ((start, first), (last, stop)):
        top = min(-(-end // unit) * unit, total) if here < end else 0
        for low, high in _calls(here // unit * unit // size, top // size):
            spare = numbers(low, high).to(cast.dtype).view(torch.uint8).numpy()
            begin, until = max(here, low * size), min(end, high * size)
            into[begin - start : until - start] = spare[begin - low * size : until - low * size]


def _calls(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Numbers ``low`` to ``high``, cut where blocks begin."""
    while low < high:
        stop = min((low // _BLOCK + 1) * _BLOCK, high)
        yield low, stop
        low = stop


@cache
def _by_steps(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a step, and what is left over after steps, is cast as it would be in the middle of a block.

    Here and now, by trying: it depends on torch, and on the processor.
    """
    lot = torch.Generator().manual_seed(1)
    words = torch.randint(0, 256, (_BLOCK * given.itemsize,), generator=lot, dtype=torch.uint8)
    words = words.view(_WORDS[given.itemsize])
    if given.itemsize > 1:  # of those of one byte, chance makes enough that are no numbers
        words[::3] |= torch.tensor(math.inf, dtype=given).view(words.dtype)
    numbers = words.view(given)
    steps = [numbers[low : low + _STEP].to(wanted).view(torch.uint8) for low in range(0, _BLOCK, _STEP)]
    return torch.equal(torch.cat(steps), numbers.to(wanted).view(torch.uint8))


class _Numbers:
    """The numbers of a tensor, a few at a time, in logical order, side by side and in this memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        in_order = tensor.is_cpu and tensor.is_contiguous()
        self._tensor = tensor
        self._line = tensor.as_strided((tensor.numel(),), (1,)) if in_order else None

    def __call__(self, low: int, high: int) -> torch.Tensor:
        """Those from number ``low`` to ``high``."""
        if self._line is not None:
            return self._line[low:high]
        tensor, size = self._tensor, self._tensor.element_size()
        numbers = torch.empty(high - low, dtype=tensor.dtype)
        read(tensor, low * size, high * size, numbers.view(torch.uint8).numpy())
        return numbers


def _boxes_beside(
    tensor: torch.Tensor, start: int, stop: int, octets: Octets
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Boxes of ``tensor``, each with the part of ``octets`` that belongs to it, in the same shape."""
    if not octets.size:
        return
    yield from boxes_beside(tensor, start, stop, torch.from_numpy(octets))


def boxes_beside(
    tensor: torch.Tensor, start: int, stop: int, line: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same for bytes that are a flat tensor, on any device: both of a pair are of the same integers."""
    grain = math.gcd(8, tensor.element_size(), start, stop, line.data_ptr(), line.storage_offset())
    bits = tensor.detach()
    if bits.is_contiguous():
        bits = bits.as_strided((bits.numel(),), (1,))
    elif grain < tensor.element_size() or not tensor.dim():
        # One more dimension, of step 1: so every tensor can be viewed as smaller words, whatever its strides.
        bits = bits.unsqueeze(-1)
    words = bits.view(_WORDS[grain])
    line = line.view(_WORDS[grain])
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
