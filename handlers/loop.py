"""The loop: moves one driver with real time, one move at a time.

Answers of partners, facts of transports and a cancellation all arrive in one inbox. Whoever has the *turn*
takes one after the other to the driver, does what is due, and hands the driver's calls to the crew. The
loop's own thread takes the turn whenever it wakes, and sleeps until the driver's next limit. A thread of this
library that brings an answer takes it as well, if it is free, and goes on with the round from there. Nobody
waits for the turn but the loop's thread, and whoever has it waits for nothing. Transports are woken by the
loop's own thread, after its turn: their code may take its time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..fsm import events as e
from ..fsm.calls import Call
from ..fsm.contract import Clock
from ..fsm.driver import Driver
from ..fsm.errors import RoundCancelled
from ..fsm.open_calls import NEVER
from ..fsm.receipt import Participant
from ..fsm.results import RoundResult
from ..fsm.states import State
from ..fsm.tickets import Waiting
from .crew import Crew, Parts
from .observers import Observers
from .ports import Told
from .threads import on_own_thread
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
        self._inbox: deque[_Move] = deque()
        self._turn = threading.Lock()
        self._alarm: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wakes = -NEVER  # when the loop's thread wakes by itself; until it sleeps it needs no alarm
        self._broken: BaseException | None = None
        self._told = 0
        self._in_time: int | None = None
        self._due = driver.due  # changes by moves alone
        self._crew = Crew(
            parts, driver, clock, workers, self._answered, self._heard, self._waits, self._noted
        )

    def run(self) -> RoundResult:
        """Drive the round; returns its result once it is Released."""
        self._inbox.appendleft(self.driver.start)
        try:
            while self._go_on():
                self._sleep()
        except BaseException as error:
            self._broken = error  # so that no other thread goes on without a loop that keeps the limits
            raise
        self._observers.flush(self._flush)
        return self.driver.result()

    def cancel(self, error: BaseException | None = None) -> None:
        """Ask the round to stop; it still ends in Released, by its own way. From any thread."""
        event = e.Cancelled(error or RoundCancelled(f"round {self.driver.round.facts.round} was cancelled"))
        self._post(lambda now: self.driver.heard(event, now))

    def lost(self, engine: Participant, error: BaseException) -> None:
        """Tell the round that an engine is gone, whatever state it is in. From any thread."""
        event = e.EngineLost(engine, error)
        self._post(lambda now: self.driver.heard(event, now))

    # -- whose turn it is ------------------------------------------------------------------------------------

    def _go_on(self) -> bool:
        """The loop's own turn. Whether the round goes on."""
        with self._turn:
            self._catch_up()
            if self._broken is not None:
                raise self._broken
            self._wakes = self._due
            over = self.driver.over
        for port in self._crew.ports:
            port.look()
        return not over

    def _sleep(self) -> None:
        wait = self._wakes - self._clock.now()
        # What arrived since the turn was given back has rung; what arrived while it was held has not.
        if wait > 0 and not self._inbox:
            with contextlib.suppress(queue.Empty):
                self._alarm.get(timeout=min(wait, _LONGEST))

    def _post(self, move: _Move) -> None:
        self._inbox.append(move)
        if not self._turn.locked():  # whoever has it looks once more when he has given it back
            self._alarm.put(None)

    def _bring(self, move: _Move) -> None:
        """Post an answer, and go on from there if this thread may."""
        if not on_own_thread():
            self._post(move)
            return
        self._inbox.append(move)
        while self._inbox and not self._ended() and self._turn.acquire(blocking=False):
            try:
                self._catch_up()
                wanted = self._ended() or self._due < self._wakes
            except BaseException as error:  # noqa: BLE001 - an error of ours, which `run` raises
                self._broken, wanted = error, True
            finally:
                self._turn.release()
            if wanted or any(port.changed for port in self._crew.ports):
                self._alarm.put(None)

    def _ended(self) -> bool:
        return self.driver.over or self._broken is not None

    # -- with the turn ---------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Take what has arrived to the driver, and do what is due."""
        while not self._ended() and (move := self._next()) is not None:
            self._move(move)

    def _next(self) -> _Move | None:
        """What is to be done now, or None.

        What arrived before a limit counts, also if this thread is late; only a lease waits for nobody.
        """
        now = self._clock.now()
        if now < self._due:
            self._in_time = None
            return self._inbox.popleft() if self._inbox else None
        if self._in_time is None:
            self._in_time = len(self._inbox) if now < self.driver.lease_end else 0
        if self._in_time:
            self._in_time -= 1
            return self._inbox.popleft()
        self._in_time = None
        return self.driver.tick

    def _move(self, move: _Move) -> None:
        calls = move(self._clock.now())
        self._due = self.driver.due
        if self._observers.active:
            records = self.driver.round.records(self._told)
            self._told += len(records)
            self._observers.tell(records)
        for call in calls:
            self._crew.carry_out(call)

    # -- what arrives ----------------------------------------------------------------------------------------

    def _answered(self, number: int, value: object, error: BaseException | None) -> None:
        self._bring(lambda now: self.driver.answered(number, now, value=value, error=error))

    def _heard(self, told: Told, phase: State) -> None:
        if told is None:
            self._post(self._progress)
        elif isinstance(told, frozenset):
            self._post(lambda now: self._waits_for(told, now))
        else:
            self._post(lambda now: self.driver.heard(told, now, phase=phase))

    def _waits_for(self, engines: frozenset[Participant], now: float) -> list[Call]:
        self.driver.waiting_for(engines, now)
        return []

    def _waits(self, answer: Waiting) -> None:
        self._post(lambda now: self.driver.waits(answer, now))

    def _noted(self, event: str, values: Mapping[str, Any]) -> None:
        self._post(lambda now: self.driver.noted(event, now, **values))

    def _progress(self, now: float) -> list[Call]:
        self.driver.progress(now)
        return []
