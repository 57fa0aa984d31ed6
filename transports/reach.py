"""How an engine's process reaches memory that the trainer offers it, of whatever kind that is."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, final

import torch

from ..fsm.errors import TransportError
from .segment import Mapped, Offer

__all__ = ["HostReach", "Reach", "Reached"]


class Reached(Protocol):
    """Memory of the trainer, as this process reads it."""

    @property
    def leased(self) -> bool:
        """Whether anything in this process still has a view of it."""

    def lease(self, start: int, size: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A flat view of ``size`` bytes from ``start`` on, and what tells whether anything is left of it."""


class Reach(Protocol):
    """A way to such memory. One object serves one session of one rank."""

    @property
    def copy(self) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """Copies from there, ``copy(into, of)``, and may be back before it is done; None: it is memory."""

    def begin(self) -> None:
        """Buckets are about to come: what is to be written by then is not being read by a device."""

    def map(self, name: str, size: int, offer: Offer) -> Reached:
        """Reach what was offered; its descriptors are taken over.

        Raises:
            TransportError: it cannot be reached, or is not what the trainer says.
        """

    def decline(self, offer: Offer) -> None:
        """Do without: this process reaches it already."""

    def finish(self) -> None:
        """Wait until everything that was copied is there."""


@final
class HostReach:
    """Memory of this host, which comes as a descriptor."""

    copy = None

    def begin(self) -> None:
        """Nothing reads later than it says."""

    def map(self, name: str, size: int, offer: Offer) -> Mapped:
        """Map it."""
        if len(offer.fds) != 1:
            self.decline(offer)
            raise TransportError(f"segment {name} came with {len(offer.fds)} descriptors, not with one")
        return Mapped(offer.fds[0], size)

    def decline(self, offer: Offer) -> None:
        """Close what came."""
        for fd in offer.fds:
            os.close(fd)

    def finish(self) -> None:
        """A copy is done when it is back."""
