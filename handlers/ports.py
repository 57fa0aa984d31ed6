"""Ports: what a transport may say to the round, good for one phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from ..fsm import events as e
from ..fsm.contract import Clock
from ..fsm.driver import Driver
from ..fsm.engine_table import Session
from ..fsm.errors import PortClosed
from ..fsm.receipt import Participant, Receipt
from ..fsm.states import State

__all__ = ["RoundPort"]

Told = e.Event | frozenset[Participant] | None
"""A fact; whom the transport waits for; or that something moved."""

Post = Callable[[Told, State], None]


class RoundPort:
    """One phase of one round, for a transport. Thread-safe.

    Args:
        driver: whose round it is.
        phase: the state in which it is open.
        clock: for ``limit``.
        post: takes what is told to the thread that moves the driver.
    """

    def __init__(self, driver: Driver, phase: State, session: Session, clock: Clock, post: Post) -> None:
        self._driver = driver
        self._phase = phase
        self._session = session
        self._clock = clock
        self._post = post
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self._seen = self.engines

    @property
    def session(self) -> Session:
        """Round, epoch and version."""
        return self._session

    @property
    def engines(self) -> tuple[Participant, ...]:
        """The participants that remain now."""
        return tuple(sorted(self._driver.round.facts.remaining))

    @property
    def closed(self) -> bool:
        """Whether the round moved on."""
        return self._driver.round.state is not self._phase

    @property
    def limit(self) -> float:
        """Seconds until this phase's deadline, at least 0."""
        return max(0.0, self._driver.phase_end - self._clock.now()) if not self.closed else 0.0

    @property
    def left(self) -> float:
        """Seconds until the round's own deadline, at least 0."""
        return max(0.0, self._driver.round_end - self._clock.now()) if not self.closed else 0.0

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when ``engines`` shrinks or the port closes."""
        with self._lock:
            self._wakers.append(wake)
        if self.closed:
            wake()

    @property
    def changed(self) -> bool:
        """Whether there is something to see since the last look."""
        return self._seen != self._now()

    def look(self) -> None:
        """Wake the transport if something changed since the last look. Called by the loop's thread."""
        now = self._now()
        with self._lock:
            changed, self._seen = now != self._seen, now
            wakers = tuple(self._wakers) if changed else ()
        for wake in wakers:
            self._safely(wake)

    def _now(self) -> tuple[Participant, ...]:
        return () if self.closed else self.engines

    def _safely(self, wake: Callable[[], None]) -> None:
        """The transport's code, on the loop's thread: its errors are the transport's."""
        try:
            wake()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the round goes its way
            self._post(e.TransportFailed(error), self._phase)

    def progress(self) -> None:
        """Something moved."""
        self._tell(None)

    def waiting_for(self, engines: Collection[Participant]) -> None:
        """Nothing can move until one of ``engines`` does."""
        self._tell(frozenset(engines), State.Broadcasting)

    def bucket_sent(self, index: int) -> None:
        """Bucket ``index`` was handed over."""
        self._tell(e.BucketSent(index), State.Broadcasting)

    def all_sent(self) -> None:
        """Every bucket was handed over."""
        self._tell(e.AllSent(), State.Broadcasting)

    def acked(self, engine: Participant, receipts: tuple[Receipt, ...]) -> None:
        """Every rank of ``engine`` answered."""
        self._tell(e.EngineAcked(engine, tuple(receipts)), State.Awaiting)

    def lost(self, engine: Participant, error: BaseException) -> None:
        """``engine`` cannot take part any further."""
        self._tell(e.EngineLost(engine, error))

    def _tell(self, event: Told, only: State | None = None) -> None:
        if self.closed:
            raise PortClosed(f"round {self._session.round} is no longer {self._phase.name}")
        if only is not None and only is not self._phase:
            what = type(event).__name__
            raise PortClosed(
                f"a port of {self._phase.name} does not fire {what}, which belongs to {only.name}"
            )
        self._post(event, self._phase)
