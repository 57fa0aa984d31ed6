"""Both ends of a block of device memory: the trainer's, which writes and offers it, and an engine's.

A process gets a claim of its own on a block. The claims of processes that have died are withdrawn before the
block is given back, so that a killed reader does not keep device memory of the trainer for ever.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any, final

import torch

from ..fsm.errors import TransportError
from .device_memory import DeviceMemory, Handle, Leases, Local, local_block
from .life import Life
from .segment import Offer

__all__ = ["Claims", "DeviceReach", "DeviceSegment"]


@final
class Claims:
    """Who has been offered a block, also one that was given back here, and is kept for him."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._claims: list[tuple[Life, Handle]] = []

    def add(self, pid: int, handle: Handle) -> None:
        """This process has one more."""
        self.withdraw_the_dead()
        self._claims.append((Life(pid), handle))

    def withdraw_the_dead(self) -> None:
        """They let go of nothing, and read nothing any more. Who has let go before he died, did so twice."""
        claims, self._claims = self._claims, []
        for life, handle in claims:
            if life.over:
                self._memory.withdraw(handle)
                life.close()
            else:
                self._claims.append((life, handle))

    def close(self) -> None:
        """Ask after nobody any more. What the living have opened is kept until they let go."""
        self.withdraw_the_dead()
        for life, _ in self._claims:
            life.close()
        self._claims.clear()
        self._memory.collect()


@final
class DeviceSegment:
    """The trainer's end.

    Args:
        memory: of the device.
        claims: of all blocks of the transport.
        size: in bytes, at least 1.

    Raises:
        TransportError: there is not so much memory.
    """

    def __init__(self, memory: DeviceMemory, claims: Claims, size: int) -> None:
        self.id = secrets.token_hex(8)
        self.size = size
        self._memory, self._claims = memory, claims
        self._block: torch.Tensor | None = memory.allocate(size)
        self._local: Local | None = None

    def part(self, start: int, size: int) -> torch.Tensor:
        """``size`` bytes from ``start`` on, for writing."""
        if self._block is None:
            raise TransportError("the device memory of this transport was given back")
        return self._block[start : start + size]

    def offer(self, process: str, pid: int) -> Offer:
        """One more claim for this process; this very process needs none."""
        block = self.part(0, self.size)
        if pid == os.getpid():
            self._local = self._local or Local(block)
            return Offer(handle=self._local.handle)
        handle = self._memory.export(block)
        self._claims.add(pid, handle)
        return Offer(handle=handle)

    def close(self) -> None:
        """Withdraw the claims of the dead, give the block back, and collect what nobody reads any more."""
        self._claims.withdraw_the_dead()
        self._block = self._local = None
        self._memory.collect()


@final
class DeviceReach:
    """An engine's way to such blocks.

    Args:
        memory: of the device, for this session alone.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    @property
    def copy(self) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Copies on the device."""
        return self._memory.copy

    def begin(self) -> None:
        """What generation has queued may still read the weights that are written next."""
        self._memory.settle()

    def finish(self) -> None:
        """Wait until everything that was copied is there."""
        self._memory.finish()

    def map(self, name: str, size: int, offer: Offer) -> _Reached:
        """Open the block."""
        if offer.fds:
            _close(offer)
            raise TransportError(f"segment {name} came with descriptors: it is no memory of a device")
        local = local_block(offer.handle)
        if local is None:
            return _Reached(self._memory, self._memory.open(offer.handle, size), size)
        if local.numel() != size:
            raise TransportError(f"a segment of {size} bytes was announced, and there are {local.numel()}")
        return _Reached(self._memory, weakref.ref(local), size)

    def decline(self, offer: Offer) -> None:
        """Give the claim up."""
        _close(offer)
        if offer.handle and local_block(offer.handle) is None:
            self._memory.withdraw(offer.handle)


@final
class _Reached:
    """A block as an engine reads it. One of its own process is not kept by it, only by its leases."""

    def __init__(
        self, memory: DeviceMemory, block: torch.Tensor | weakref.ref[torch.Tensor], size: int
    ) -> None:
        self._memory, self._block, self._size = memory, block, size
        self._leases = Leases()

    @property
    def leased(self) -> bool:
        return self._leases.left

    def lease(self, start: int, size: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        if not 0 <= start <= start + size <= self._size:
            raise TransportError(f"bytes {start} to {start + size} are not in a segment of {self._size}")
        block = self._block() if isinstance(self._block, weakref.ref) else self._block
        if block is None:
            raise TransportError("the trainer of this process has given its device memory back")
        view, lease = self._memory.lease(block, start, size)
        self._leases.add(lease)
        return view, lease


def _close(offer: Offer) -> None:
    for fd in offer.fds:
        os.close(fd)
