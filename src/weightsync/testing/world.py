"""What a simulated round meets: partners that outlive it, and the misfortunes that befall its messages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..fsm.calls import LOCK_ACTS, TRANSPORT_ACTS, Act, Call
from ..fsm.engine import EngineMachine
from ..fsm.engine_table import AbortOrdered, LimitReached, Session
from ..fsm.errors import IllegalEvent
from ..fsm.ledger import Ledger
from ..fsm.lock import LockBook
from ..fsm.receipt import Participant
from ..fsm.results import RoundResult
from ..fsm.states import Disposition
from .clock import HandClock

__all__ = ["Fault", "Injected", "Misfortunes", "Partner", "World", "end_session"]

_LEDGER = frozenset({Act.bind, Act.publish, Act.ask})
_SERVICES = (LOCK_ACTS, TRANSPORT_ACTS, _LEDGER)
_AGAIN = frozenset({Act.abort, Act.release, Act.renew})


class Injected(RuntimeError):
    """The error a fault raises, so that a test can tell it from every other."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One misfortune.

    Args:
        act: the kind of call it bends.
        kind: ``raise`` the work fails; ``hang`` it is never done nor answered; ``lost`` it is done, its
            answer is lost; ``die`` the partner is gone from then on; ``corrupt`` (with ``broadcast`` and an
            engine) the engine applies other bytes, so that its receipt proves something else. A fault of
            abort, release or renew happens each time, every other one once.
        engine: whose call, for the acts of an engine; any by default. With ``broadcast``: which engine fails
            over a bucket; with ``collect``: whose receipt is concerned.
        bucket: for ``broadcast``: at which bucket; for ``prepare``, ``clean`` and ``undo``: which executor.
    """

    act: Act
    kind: Literal["raise", "hang", "lost", "die", "corrupt"] = "raise"
    engine: str | None = None
    bucket: int | None = None


class Misfortunes:
    """The faults that have not happened yet, and the services that are gone."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.left = list(faults)
        self._gone: frozenset[Act] = frozenset()

    def of(self, call: Call) -> Fault | None:
        """The fault that bends the whole of ``call``."""
        if call.act in self._gone:
            return Fault(call.act, "hang")
        for fault in self.left:
            if fault.act is call.act and _bends(fault, call):
                if fault.kind == "die":
                    self._gone |= next((service for service in _SERVICES if call.act in service), frozenset())
                return self._happened(fault)
        return None

    def inside(self, act: Act, engine: str | None, bucket: int | None = None) -> Fault | None:
        """The fault that happens inside a transport's call: at a bucket, at an engine, or both."""
        for fault in self.left:
            if (
                fault.act is act
                and fault.engine == engine
                and (bucket is None or fault.bucket in (bucket, None))
            ):
                return self._happened(fault)
        return None

    def _happened(self, fault: Fault) -> Fault:
        if fault.act not in _AGAIN:
            self.left.remove(fault)
        return fault


def _bends(fault: Fault, call: Call) -> bool:
    if call.act in (Act.broadcast, Act.collect) and (fault.engine is not None or fault.bucket is not None):
        return False  # happens inside
    if fault.engine is not None and (call.engine is None or call.engine.id != fault.engine):
        return False
    return call.index is None or fault.bucket in (None, call.index)


@dataclass(slots=True)
class Partner:
    """One engine: its machine, whether its process lives, and the sessions in which it fails silently.

    In the one it applies nothing any more and says nothing, in the other it applies other bytes.
    """

    machine: EngineMachine
    alive: bool = True
    deaf: Session | None = None
    spoilt: Session | None = None

    @property
    def incarnation(self) -> str:
        """Which life of it this is."""
        return self.machine.facts.incarnation


@dataclass(slots=True)
class World:
    """What outlives a round: time, messages, lock, ledger, engines, and what a trainer remembers."""

    clock: HandClock
    book: LockBook
    ledger: Ledger
    partners: dict[str, Partner]
    inplace: tuple[str, ...] = ()
    rounds: int = 0
    known: dict[str, str] = field(default_factory=dict)
    tainted: set[str] = field(default_factory=set)
    under_way: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: int = 0

    @classmethod
    def of(cls, engines: int, inplace: Sequence[str], lease: float) -> World:
        """A new world: ``engines`` fresh engines called e0, e1, ..."""
        names = [f"e{number}" for number in range(engines)]
        partners = {
            name: Partner(EngineMachine(name, stages=name not in inplace, incarnation="0")) for name in names
        }
        return cls(HandClock(10.0), LockBook(lease=lease), Ledger(), partners, tuple(inplace))

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Have ``action`` happen in ``delay`` seconds."""
        self._number += 1
        heapq.heappush(self.under_way, (self.clock.now() + delay, self._number, action))

    def step(self) -> None:
        """Turn the clock to the next thing that is under way, and have it happen."""
        moment, _, action = heapq.heappop(self.under_way)
        self.clock.advance_to(moment)
        action()

    def settle(self) -> None:
        """Let everything under way arrive, leases end, and engines reach their own limits."""
        while self.under_way:
            self.step()
        while (expiry := self.book.next_expiry()) is not None:
            self.clock.advance_to(expiry)
            self.book, _ = self.book.expire(self.clock.now())
        for partner in self.partners.values():
            session = partner.machine.facts.session
            if partner.alive and session is not None:
                partner.machine.fire(LimitReached(session))

    def restart(self, engine: str) -> None:
        """``engine`` dies and comes up again by itself, with its start-up weights."""
        old = self.partners[engine].machine.facts
        machine = EngineMachine(engine, stages=old.stages, incarnation=f"{old.incarnation}'")
        self.partners[engine] = Partner(machine)

    def roster(self) -> list[Participant]:
        """Whom the trainer asks for: an engine is asked who it is unless that is certain."""
        for name, partner in self.partners.items():
            if partner.alive and (name in self.tainted or name not in self.known):
                self.known[name] = partner.incarnation
        return [Participant(name, self.known.get(name, "?")) for name in self.partners]

    def unreachable(self) -> list[str]:
        """The engines that were asked who they are and did not answer."""
        doubtful = self.tainted | (self.partners.keys() - self.known.keys())
        return sorted(name for name in doubtful if not self.partners[name].alive)

    def learn(self, result: RoundResult) -> None:
        """Remember what a round decided."""
        for row in result.engines:
            if row.disposition is Disposition.serving_new:
                self.tainted.discard(row.engine)
            elif row.disposition is Disposition.quarantined:
                self.tainted.add(row.engine)


def end_session(machine: EngineMachine, session: Session) -> None:
    """An abort, as every rank takes it: of a session that is not open it is only remembered."""
    try:
        machine.fire(AbortOrdered(session))
    except IllegalEvent:
        machine.refused += 1
