"""The loop: moves one driver with real time, on one thread.

Answers of partners, facts of transports and a cancellation all arrive in one inbox; the thread takes one
after the other to the driver, hands its calls to the crew, and sleeps until the next of them or until the
driver's next limit. Only this thread touches the driver, and only this thread fires events.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from ..fsm import events as e
from ..fsm.calls import Call
from ..fsm.contract import Clock
from ..fsm.driver import Driver
from ..fsm.errors import RoundCancelled
from ..fsm.receipt import Participant
from ..fsm.results import RoundResult
from ..fsm.states import State
from ..fsm.tickets import Waiting
from .crew import Crew, Parts
from .observers import Observers
from .ports import Told
from .workers import Workers

__all__ = ["RoundLoop"]

_Move = Callable[[float], list[Call]]
_LONGEST = 3600.0  # seconds; a queue cannot wait for any number of them


class RoundLoop:
    """Runs one round to Released.

    Args:
        driver: of a round in Idle.
        parts: everybody the round talks to.
        workers: threads for what may block.
        observers: get the records.
        clock: real time.
        flush: seconds to wait for observers when the round is over; they go on by themselves after that.
    """

    def __init__(
        self,
        driver: Driver,
        parts: Parts,
        *,
        workers: Workers,
        observers: Observers,
        clock: Clock,
        flush: float = 1.0,
    ) -> None:
        self.driver = driver
        self._clock = clock
        self._observers = observers
        self._flush = flush
        self._inbox: queue.SimpleQueue[_Move] = queue.SimpleQueue()
        self._told = 0
        self._in_time: int | None = None
        self._crew = Crew(parts, driver, clock, workers, self._answered, self._heard, self._waits)

    def run(self) -> RoundResult:
        """Drive the round; returns its result once it is Released."""
        self._move(self.driver.start)
        while not self.driver.over:
            self._move(self._next())
        self._observers.flush(self._flush)
        return self.driver.result()

    def cancel(self, error: BaseException | None = None) -> None:
        """Ask the round to stop; it still ends in Released, by its own way. From any thread."""
        event = e.Cancelled(error or RoundCancelled(f"round {self.driver.round.facts.round} was cancelled"))
        self._inbox.put(lambda now: self.driver.heard(event, now))

    def lost(self, engine: Participant, error: BaseException) -> None:
        """Tell the round that an engine is gone, whatever state it is in. From any thread."""
        event = e.EngineLost(engine, error)
        self._inbox.put(lambda now: self.driver.heard(event, now))

    def _next(self) -> _Move:
        wait = self.driver.due - self._clock.now()
        if wait <= 0:
            return self._in_time_first()
        self._in_time = None
        try:
            return self._inbox.get(timeout=min(wait, _LONGEST))
        except queue.Empty:
            return self.driver.tick

    def _in_time_first(self) -> _Move:
        """What arrived before a limit counts, also if this thread is late; only a lease waits for nobody."""
        if self._in_time is None:
            self._in_time = self._inbox.qsize() if self._clock.now() < self.driver.lease_end else 0
        if self._in_time:
            self._in_time -= 1
            return self._inbox.get_nowait()
        self._in_time = None
        return self.driver.tick

    def _move(self, move: _Move) -> None:
        calls = move(self._clock.now())
        if self._observers.active:
            records = self.driver.round.records(self._told)
            self._told += len(records)
            self._observers.tell(records)
        for port in self._crew.ports:
            port.look()
        for call in calls:
            self._crew.carry_out(call)

    def _answered(self, number: int, value: object, error: BaseException | None) -> None:
        self._inbox.put(lambda now: self.driver.answered(number, now, value=value, error=error))

    def _heard(self, told: Told, phase: State) -> None:
        if told is None:
            self._inbox.put(self._progress)
        elif isinstance(told, frozenset):
            self._inbox.put(lambda now: self._waits_for(told, now))
        else:
            self._inbox.put(lambda now: self.driver.heard(told, now, phase=phase))

    def _waits_for(self, engines: frozenset[Participant], now: float) -> list[Call]:
        self.driver.waiting_for(engines, now)
        return []

    def _waits(self, answer: Waiting) -> None:
        self._inbox.put(lambda now: self.driver.waits(answer, now))

    def _progress(self, now: float) -> list[Call]:
        self.driver.progress(now)
        return []
