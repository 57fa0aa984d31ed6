"""A port that writes down what a transport fires, for tests of transports without a round around them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..fsm.engine_table import Session
from ..fsm.errors import PortClosed
from ..fsm.receipt import Participant, Receipt

__all__ = ["RecordingPort"]


class RecordingPort:
    """One phase. It closes when the test says so, or when a loss is more than ``quorum`` allows.

    Args:
        session: of the round.
        engines: who takes part.
        limit: seconds until the phase's deadline.
        quorum: how many engines must remain; all of them by default.
    """

    def __init__(
        self, session: Session, engines: Iterable[Participant], limit: float = 20.0, quorum: int | None = None
    ) -> None:
        self._session = session
        self._engines = tuple(engines)
        self._quorum = len(self._engines) if quorum is None else quorum
        self._end = time.monotonic() + limit
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self._closed = False
        self.fired: list[tuple[Any, ...]] = []
        self.moves = 0

    @property
    def session(self) -> Session:
        """Round, epoch and version."""
        return self._session

    @property
    def engines(self) -> tuple[Participant, ...]:
        """The participants that remain."""
        return self._engines

    @property
    def closed(self) -> bool:
        """Whether the round moved on."""
        return self._closed

    @property
    def limit(self) -> float:
        """Seconds until the deadline, at least 0."""
        return 0.0 if self._closed else max(0.0, self._end - time.monotonic())

    @property
    def left(self) -> float:
        """The same: here, nothing else limits a phase."""
        return self.limit

    @property
    def errors(self) -> dict[str, BaseException]:
        """Why engines were lost, by their ids."""
        return {fact[1].id: fact[2] for fact in self.fired if fact[0] == "lost"}

    @property
    def receipts(self) -> dict[str, tuple[Receipt, ...]]:
        """What engines proved, by their ids."""
        return {fact[1].id: fact[2] for fact in self.fired if fact[0] == "acked"}

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever ``engines`` shrinks or the port closes."""
        with self._lock:
            self._wakers.append(wake)
        if self._closed:
            wake()

    def close(self) -> None:
        """The round moves on."""
        self._closed = True
        self._wake()

    def fence(self, engine: Participant) -> None:
        """``engine`` takes no part any more."""
        self._engines = tuple(each for each in self._engines if each != engine)
        if len(self._engines) < self._quorum:
            self._closed = True
        self._wake()

    def progress(self) -> None:
        """Something moved."""
        self._check()
        self.moves += 1

    def waiting_for(self, engines: Collection[Participant]) -> None:
        """Nothing can move until one of ``engines`` does."""
        self._check()

    def bucket_sent(self, index: int) -> None:
        """Bucket ``index`` was handed over."""
        self._fire("bucket_sent", index)

    def all_sent(self) -> None:
        """Every bucket was handed over."""
        self._fire("all_sent")

    def acked(self, engine: Participant, receipts: tuple[Receipt, ...]) -> None:
        """Every rank of ``engine`` answered."""
        self._fire("acked", engine, receipts)

    def lost(self, engine: Participant, error: BaseException) -> None:
        """``engine`` cannot take part any further: it is fenced."""
        self._fire("lost", engine, error)
        self.fence(engine)

    def _fire(self, *fact: Any) -> None:
        self._check()
        self.fired.append(fact)

    def _check(self) -> None:
        if self._closed:
            raise PortClosed("the round moved on")

    def _wake(self) -> None:
        with self._lock:
            wakers = tuple(self._wakers)
        for wake in wakers:
            wake()
