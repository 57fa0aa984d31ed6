"""The one round that a transport has open, and the pair of buffers that one round leaves to the next.

Rounds are opened, used and ended by different threads, and an abort may come between any two of them.
"""

from __future__ import annotations

import os
import threading
from typing import Generic, Protocol, TypeVar, final

from ..fsm.contract import Port
from ..fsm.errors import TransportError
from .bell import Bell
from .buffers import Pair

__all__ = ["Standing"]


class _Round(Protocol):
    """What lives as long as one round."""

    @property
    def bell(self) -> Bell:
        """Rings for everything that its threads wait for."""

    def end(self, why: str) -> None:
        """Wake everybody, and close everything. Idempotent."""


R = TypeVar("R", bound=_Round)


@final
class Standing(Generic[R]):
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._round: R | None = None
        self._spare: Pair | None = None

    def open(self, round: R) -> None:
        """This is the round from now on; one that was left open ends."""
        with self._lock:
            before, self._round = self._round, round
        if before is not None:
            before.end("another round was opened")

    def at(self, port: Port) -> R | None:
        """The open round, which wakes when this port's phase is over; None if it was aborted before that.

        Raises:
            TransportError: the phase is not over, and there is no round.
        """
        with self._lock:
            round = self._round
        if round is not None:
            port.on_change(round.bell.ring)
        elif not port.closed:
            raise TransportError("no round is open here: it was aborted, or never opened")
        return round

    @property
    def here(self) -> bool:
        """Whether this is the process whose rounds these are, and not a forked child of it."""
        return os.getpid() == self._process

    @property
    def round(self) -> R | None:
        """The open round, if there is one."""
        with self._lock:
            return self._round

    def end(self, why: str, only: R | None = None) -> R | None:
        """End the open round, if there is one, and hand it back; with ``only``, if it still is that one.

        In a forked child nothing ends: it has the sockets, but the round is its parent's.
        """
        if not self.here:
            return None
        with self._lock:
            if only is not None and self._round is not only:
                return None
            round, self._round = self._round, None
        if round is not None:
            round.end(why)
        return round

    def buffers(self, size: int) -> Pair:
        """The pair that was kept, if it serves, or a new one. Nobody else gets it meanwhile."""
        with self._lock:
            spare, self._spare = self._spare, None
        return spare if spare is not None and spare.serves(size) else Pair(size)

    def keep(self, buffers: Pair | None) -> None:
        """Have this pair for the next round, which nobody reads or writes any more; or none."""
        with self._lock:
            self._spare = buffers
