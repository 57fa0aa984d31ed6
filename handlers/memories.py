"""Memories whose caches can be released: the protocol, a GPU's by torch, and the host's by glibc.

**What is here for CUDA was not run on a GPU**: it is four functions of torch that are documented. The host's
is tried in the tests.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

__all__ = ["CudaCache", "Held", "HostCache", "Memory", "usual_memory"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds of a memory.

    Args:
        reserved: bytes that nobody else can have.
        live: those of them that something uses.
    """

    reserved: int
    live: int


class Memory(Protocol):
    """A memory that is shared with other processes, and what can be done about it."""

    @property
    def name(self) -> str:
        """For the log."""

    def held(self) -> Held:
        """What this process holds of it now. Cheap."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""

    def collect_exports(self) -> None:
        """Take back what was shown to other processes, and let go of by them."""

    def cache_release(self) -> None:
        """Hand back what is reserved and not live."""


def usual_memory() -> Memory:
    """The GPU's if there is one, else the host's."""
    import torch

    return CudaCache() if torch.cuda.is_available() else HostCache()


@final
class CudaCache:
    """What torch's allocator holds of one GPU.

    Args:
        device: which; the current one by default.
    """

    def __init__(self, device: Any = None) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self.name = "cuda" if device is None else str(device)

    def held(self) -> Held:
        """By its own statistics."""
        return Held(self._cuda.memory_reserved(self._device), self._cuda.memory_allocated(self._device))

    def synchronize(self) -> None:
        """All streams of the GPU."""
        self._cuda.synchronize(self._device)

    def collect_exports(self) -> None:
        """Blocks that were shown by CUDA IPC, and that nobody has open any more."""
        self._cuda.ipc_collect()

    def cache_release(self) -> None:
        """Blocks without a tensor in them go back to the driver."""
        self._cuda.empty_cache()


@final
class HostCache:
    """What this process holds of the host's memory. What glibc keeps of freed memory is its cache.

    Without glibc, or without ``/proc``, there is nothing to hand back, and nothing is known.
    """

    name = "host"

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._statm = Path("/proc/self/statm")

    def held(self) -> Held:
        """Pages that are really there. Of these, nobody knows which are live."""
        try:
            resident = int(self._statm.read_text().split()[1]) * _PAGE
        except (OSError, IndexError, ValueError):
            return Held(0, 0)
        return Held(resident, resident)

    def synchronize(self) -> None:
        """A host has always done what it was told."""

    def collect_exports(self) -> None:
        """Shared memory goes when its last user does, by itself."""

    def cache_release(self) -> None:
        """Free pages at the ends of the heaps, and in them, go back to the system."""
        if self._trim is not None:
            self._trim(0)
