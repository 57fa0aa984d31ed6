"""A device without a device: memory of the host that is copied only when somebody waits for it.

It is the slowest device there could be, and the strictest: ``copy`` queues, ``finish`` copies. What the
library shows before it has waited is not there, on any machine and in any run. Blocks have no name; another
process opens one through ``/proc``, and takes down a count in it when it has let go, as torch does for CUDA.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any, final

import torch

from weightsync.fsm.contract import Inlet, Ticket
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import TransportError
from weightsync.fsm.plan import Plan
from weightsync.transports.device_memory import Handle
from weightsync.transports.device_ring import DeviceRing, device_inlet
from weightsync.transports.segment import _libc

__all__ = ["NAME", "StandIn", "standin_inlet", "standin_ring"]

NAME = "standin"
_CLAIMS = 4096
"""Bytes behind a block: whether each export of it is still open."""

_numbers = itertools.count()


class _Map:
    """A mapping that goes with this object, and keeps no descriptor, as ``mmap`` would."""

    def __init__(self, fd: int, size: int) -> None:
        self.size, whole = size, size + _CLAIMS
        both = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = int(_libc.mmap(None, whole, both, mmap.MAP_SHARED, fd, 0))
        weakref.finalize(self, _libc.munmap, ctypes.c_void_p(self.address), whole).atexit = False
        self.claims = (ctypes.c_ubyte * _CLAIMS).from_address(self.address + size)

    def flat(self) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """The block as a tensor, and what tells whether anything of it is left."""
        buffer = (ctypes.c_ubyte * self.size).from_address(self.address)
        buffer.memory = self  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8), weakref.ref(buffer)


@dataclass(eq=False)
class _Block:
    """What the exporter knows of a block of its own."""

    number: int
    fd: int
    memory: _Map
    used: weakref.ref[Any]
    exports: int = 0


@final
class StandIn:
    """One such device."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.settled = self.finished = 0

    @property
    def kept(self) -> int:
        """Blocks that were allocated and not given back yet."""
        return len(self._blocks)

    def allocate(self, size: int) -> torch.Tensor:
        """Nameless memory, with room for claims behind it."""
        fd = os.memfd_create("standin")
        os.ftruncate(fd, size + _CLAIMS)
        memory = _Map(fd, size)
        block, used = memory.flat()
        weakref.finalize(used(), os.close, fd).atexit = False  # nobody opens it any more
        self._blocks = [*self._blocks, _Block(next(_numbers), fd, memory, used)]
        return block.fill_(0xA5)

    def export(self, block: torch.Tensor) -> Handle:
        """Where it is to be found, and the number of the claim."""
        own = next(each for each in self._blocks if each.memory.address == block.data_ptr())
        own.memory.claims[own.exports] = 1
        own.exports += 1
        return (os.getpid(), own.fd, own.memory.size, own.exports - 1, own.number)

    def withdraw(self, handle: Handle) -> None:
        """Take the claim down."""
        pid, _, _, claim, number = _checked(handle)
        own = [each.memory for each in self._blocks if (pid, number) == (os.getpid(), each.number)]
        _let_go(own[0] if own else _mapped(handle), claim)

    def open(self, handle: Handle, size: int) -> torch.Tensor:
        """Map it; when nothing of it is left, the claim goes."""
        _, _, there, claim, _ = _checked(handle)
        if there != size:
            raise TransportError(f"a block of {size} bytes was announced, and there are {there}")
        memory = _mapped(handle)
        block, used = memory.flat()
        weakref.finalize(used(), _let_go, memory, claim).atexit = False
        return block

    def lease(self, block: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A buffer of its own, which keeps the block."""
        buffer = (ctypes.c_ubyte * max(1, size)).from_address(block.data_ptr() + start)
        buffer.block = block  # type: ignore[attr-defined]
        view = torch.frombuffer(buffer, dtype=torch.uint8, count=max(1, size))[:size]
        return view, weakref.ref(buffer)

    def settle(self) -> None:
        """Nothing else computes here."""
        self.settled += 1

    def copy(self, into: torch.Tensor, of: torch.Tensor) -> None:
        """Later."""
        assert into.shape == of.shape
        assert into.dtype == of.dtype
        assert not into.dtype.is_floating_point
        assert into.dtype is not torch.bool
        self._queue.append((into, of))

    def finish(self) -> None:
        """Now."""
        queue, self._queue = self._queue, []
        with torch.inference_mode():
            for into, of in queue:
                into.copy_(of)
        self.finished += 1

    def collect(self) -> None:
        """Give back what nobody uses, here or elsewhere."""
        self._blocks = [each for each in self._blocks if each.used() is not None or any(each.memory.claims)]


def _let_go(memory: _Map, claim: int) -> None:
    memory.claims[claim] = 0


def _mapped(handle: Handle) -> _Map:
    pid, number, size, _, _ = _checked(handle)
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    except OSError as error:
        raise TransportError(f"the block of process {pid} is gone: {error.strerror}") from error
    try:
        return _Map(fd, size)
    finally:
        os.close(fd)


def _checked(handle: Handle) -> tuple[int, int, int, int, int]:
    if tuple(map(type, handle)) != (int,) * 5:
        raise TransportError(f"{handle} is no export of this device")
    return handle  # type: ignore[return-value]


def standin_ring(slots: int = 3, memory: StandIn | None = None) -> DeviceRing:
    """A transport over such a device."""
    return DeviceRing("standin_ring", NAME, StandIn() if memory is None else memory, slots)


def standin_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """Its receiving half."""
    return device_inlet(StandIn(), ticket, session, plan, limit)
