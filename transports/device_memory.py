"""Memory of a device that the trainer writes, and engines of other processes read: what a back end has to do.

    trainer                                     engine
    allocate                                    settle: what is queued so far is done
    settle
    copy, copy, ... finish    bucket is shown
                                                lease, copy, copy, ... finish    bucket is let go of
    drop, then collect                          what was opened is let go of when nothing refers to it

A device does what it is told later than it is told. So ``copy`` may be back before anything is copied, and
``finish`` waits for it, on this host: on the trainer's side before a bucket is shown, on an engine's side
before it is let go of. What is said between the processes is then the same as for memory of the host, and
needs no events that both of them know (which not every device has).

A block is exported to each process by itself, as plain values. Such an *export* is a claim on the block: the
back end keeps the block until the process that opened it has let go, or the claim is withdrawn because it is
dead or never opened it.

A back end for another kind of device is one more class with these methods; rounds, tickets and messages stay
as they are. ROCm goes by the name of CUDA in torch, and so by the same class (``cuda_memory.py``).
"""

from __future__ import annotations

import secrets
import weakref
from typing import Any, Protocol, final

import torch

__all__ = ["DeviceMemory", "Handle", "Leases", "Local", "local_block"]

Handle = tuple[str | int | bytes, ...]
"""What an export is, as it travels: plain values."""


class DeviceMemory(Protocol):
    """One kind of device. An object is used by one thread at a time."""

    def allocate(self, size: int) -> torch.Tensor:
        """A block of ``size`` bytes, flat.

        Raises:
            TransportError: there is not so much memory.
        """

    def export(self, block: torch.Tensor) -> Handle:
        """What one other process needs to open the block. It is kept until that one has let go.

        Raises:
            TransportError: it cannot be exported.
        """

    def withdraw(self, handle: Handle) -> None:
        """Nobody opens this export, or who has opened it is dead."""

    def open(self, handle: Handle, size: int) -> torch.Tensor:
        """The block of another process, flat. Whatever refers to it keeps it.

        Raises:
            TransportError: it cannot be opened here, or is not of ``size`` bytes.
        """

    def lease(self, block: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A view of a part of a block, and what tells whether anything is left of it, or of views of it."""

    def settle(self) -> None:
        """Wait until the devices have done what this process told them so far."""

    def copy(self, into: torch.Tensor, of: torch.Tensor) -> None:
        """Copy between this device and this device, another one or the host. May be back before it is done.

        Both have the same shape and a dtype of integers, and any strides.
        """

    def finish(self) -> None:
        """Wait until what was copied by this object is there."""

    def collect(self) -> None:
        """Give back what was kept for processes that have let go meanwhile."""


@final
class Leases:
    """The leases of one block. Thread-safe enough: lists are replaced, never changed."""

    def __init__(self) -> None:
        self._leases: list[weakref.ref[Any]] = []

    def add(self, lease: weakref.ref[Any]) -> None:
        """One more."""
        self._leases = [lease, *(each for each in self._leases if each() is not None)]

    @property
    def left(self) -> bool:
        """Whether anything is left of one of them."""
        return any(lease() is not None for lease in self._leases)


# -- within one process --------------------------------------------------------------------------------------

_PROCESS = "this process"


@final
class Local:
    """An offer of a block to this very process, which no system lets open what it has exported.

    It stands as long as this object is kept.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self.block, self._name = block, secrets.token_hex(8)
        _local[self._name] = self

    @property
    def handle(self) -> Handle:
        """What names it."""
        return (_PROCESS, self._name)


def local_block(handle: Handle) -> torch.Tensor | None:
    """The block that was offered so; None if it is another process's, or stands no more."""
    local = _local.get(str(handle[1])) if handle[:1] == (_PROCESS,) and len(handle) == 2 else None
    return local.block if local is not None else None


_local: weakref.WeakValueDictionary[str, Local] = weakref.WeakValueDictionary()
