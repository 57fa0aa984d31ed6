"""Who decides for an engine rank: its table, with the gate, the limit, and whose turn it is.

The table says what the rank is. Words of trainers come from many threads, and some overtake others; three
things keep them apart:

* The *turn* is held while something is decided: by an open, a commit (with its copying), an abort, a
  resume, or the rank's own limit. A receiving thread takes it only to say that it failed, so all of these
  get their turn while it waits for bytes or is stuck.
* A reception that is ended from outside has to be *settled* before anybody says what the engine is, and
  before its memory is written for another session.
* The gate follows the table by one rule: when something was decided, it is open if the rank is Serving, and
  shut if it is Quarantined. Only a session that is being opened, and waits for the gate to empty, keeps it
  closed.

A word of a session that is over changes nothing, whoever says it and however late. Every wait is bounded,
by the limit of the session or by ``patience``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from ..fsm.engine import Answer, EngineMachine
from ..fsm.engine_table import (
    AbortOrdered,
    LimitReached,
    Opened,
    ResumeOrdered,
    Session,
    WeightsLost,
)
from ..fsm.errors import EngineSilent
from ..fsm.receipt import Expectation
from ..fsm.states import EngineState
from .gate import Gate, GateOpened
from .silence import Silence

__all__ = ["Rank", "Running"]


class Running(Protocol):
    """A reception, as far as deciding needs to know it."""

    @property
    def session(self) -> Session:
        """Whose it is."""

    def cancel(self) -> None:
        """End it from outside; does not wait."""

    def settled(self, limit: float) -> bool:
        """Whether its thread is out of the weights; waits for it, ``limit`` seconds at most."""


class Rank:
    """One engine rank without its weights. Thread-safe.

    Args:
        machine: the table at run time.
        gate: admits generation.
        patience: seconds to wait for a commit that copies, or for a reception to settle, before saying so.
    """

    def __init__(self, machine: EngineMachine, gate: Gate, patience: float) -> None:
        self.machine, self.gate, self.patience = machine, gate, patience
        self.running: Running | None = None  # the last reception, also when it is over
        self.name = f"engine {machine.facts.engine}"
        self.silence = Silence(self._limit_reached)
        self._turn = threading.Lock()
        self._opening: list[Session] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn. Raises EngineSilent when a commit keeps it for longer than ``patience``."""
        if not self._turn.acquire(timeout=self.patience):
            raise EngineSilent(f"{self.name} is still busy with a commit, after {self.patience:g} s")
        try:
            yield
        finally:
            self._turn.release()

    def in_session(self, session: Session) -> bool:
        """Whether this is the open session."""
        return self.machine.facts.session == session

    # -- opening -------------------------------------------------------------------------------------------

    def open(self, session: Session, expected: Expectation, limit: float) -> None:
        """Close the gate, wait until it is empty, say Opened; wait until an older reception is settled."""
        end = time.monotonic() + limit
        with self.turn():
            self._refuse_stale(session, expected)
            self._opening.append(session)
        try:
            while not self._opened(session, expected, limit, end):
                pass
        finally:
            # On the good way the rank is Paused now, and this opens nothing.
            self._opening.remove(session)
            with suppress(EngineSilent), self.turn():
                self._settle_gate()

    def _opened(self, session: Session, expected: Expectation, limit: float, end: float) -> bool:
        # If an abort opens the gate meanwhile, perhaps one of this very session, the table says what to do.
        with suppress(GateOpened):
            self.gate.close(max(0.0, end - time.monotonic()))
        with self.turn():
            self._refuse_stale(session, expected)
            if not self.gate.paused:
                return False
            before = self.running
            self.machine.fire(Opened(session, expected))
            try:
                self.silence.watch(session, limit)
            except RuntimeError:  # there is no thread to watch it, so it must not be open
                self.machine.fire(AbortOrdered(session))
                raise
        if before is not None:
            before.cancel()
            self._settle(session, before, max(0.0, end - time.monotonic()))
        return True

    def _settle(self, session: Session, before: Running, limit: float) -> None:
        """No session may begin to write while another one still does."""
        try:
            self.await_settled(before, limit)
        except EngineSilent:
            self.give_up(session)
            raise

    def _refuse_stale(self, session: Session, expected: Expectation) -> None:
        """A session that the table would refuse must not even touch the gate."""
        if session.epoch <= self.machine.facts.seen:
            self.machine.fire(Opened(session, expected))  # raises, and is counted

    # -- ending --------------------------------------------------------------------------------------------

    def abort(self, session: Session, lost: Callable[[], str]) -> Answer:
        """End the session, or an older one; the answer is given when nothing of it writes any more.

        ``lost`` says whether the weights are gone, in words; it is asked while nothing else is decided.
        """
        with self.turn():
            older, running = self.machine.facts.session, self._running_by(session)
            self.machine.fire(AbortOrdered(session))
            self._look(session, lost)
            answer = self.machine.answer(session)
            self._decided(session)
            if older is not None and not self.in_session(older):
                self.silence.stop(older)
        if running is not None:
            running.cancel()
        self.await_settled(running, self.patience)
        return answer

    def resume(self, session: Session) -> None:
        """The session is over, and the rank generates."""
        with self.turn():
            self.machine.fire(ResumeOrdered(session))
            self._decided(session)

    def give_up(self, session: Session) -> None:
        """The rank ends its session by itself, because something failed."""
        # Behind a commit that hangs there is nothing to give up: whoever waits for it is told that.
        with suppress(EngineSilent), self.turn():
            self.machine.fire(AbortOrdered(session))
            self._decided(session)

    def look(self, session: Session, lost: Callable[[], str]) -> str:
        """Have the table hear whether the weights are gone; why, in words, or nothing.

        ``session`` is the one for whose opening that is asked.
        """
        with self.turn():
            older = self.machine.facts.session
            why = self._look(session, lost)
            if older is not None and not self.in_session(older):
                self.silence.stop(older)
            return why

    def _look(self, session: Session, lost: Callable[[], str]) -> str:
        why = lost()
        if why:
            self.machine.fire(WeightsLost(session))
            self._settle_gate()
        return why

    def await_settled(self, running: Running | None, limit: float) -> None:
        """Raise EngineSilent unless this reception is out of the weights within ``limit`` seconds."""
        if running is not None and not running.settled(limit):
            raise EngineSilent(
                f"{self.name} is still applying a bucket of round {running.session.round} (epoch "
                f"{running.session.epoch}), {limit:.1f} s after that session ended"
            )

    def _limit_reached(self, session: Session) -> None:
        """Nothing was heard of the trainer for the session's own limit."""
        with self._turn:
            running = self._running(session)
            self.machine.fire(LimitReached(session))
            self._decided(session)
        if running is not None:
            running.cancel()

    def _running(self, session: Session) -> Running | None:
        return self.running if self.running is not None and self.running.session == session else None

    def _running_by(self, session: Session) -> Running | None:
        """The last reception, if an abort of ``session`` ends it: one of a newer session goes on."""
        running = self.running
        return running if running is not None and running.session.epoch <= session.epoch else None

    def _decided(self, session: Session) -> None:
        if self.in_session(session):
            self.silence.heard(session)
        else:
            self.silence.stop(session)
        self._settle_gate()

    def _settle_gate(self) -> None:
        """Serving means generating, unless somebody is about to open a session that the table would take.

        Quarantined means that nobody is let in.
        """
        fenced = self.machine.facts.fenced
        if self.machine.state is EngineState.Serving and all(each.epoch <= fenced for each in self._opening):
            self.gate.open()
        elif self.machine.state is EngineState.Quarantined:
            self.gate.shut()  # also if it was a pause that did not come about which opened it
