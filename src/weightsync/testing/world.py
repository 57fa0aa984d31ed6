"""What a simulated round meets: partners that outlive it, and the misfortunes that befall its messages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..fsm.calls import LOCK_ACTS, TRANSPORT_ACTS, Act, Call
from ..fsm.engine import EngineMachine
from ..fsm.ledger import Ledger
from ..fsm.lock import LockBook
from ..fsm.receipt import Participant
from ..fsm.results import RoundResult
from ..fsm.states import Disposition, EngineState
from .clock import HandClock
from .keeper import Keeper
from .partner import Partner, end_session

__all__ = ["Fault", "Injected", "Memory", "Message", "Misfortunes", "Partner", "World", "end_session"]

_LEDGER = frozenset({Act.bind, Act.publish, Act.ask})
_SERVICES = (LOCK_ACTS, TRANSPORT_ACTS, _LEDGER)
_AGAIN = frozenset({Act.abort, Act.release, Act.renew})
_AT_REST = 2000
"""Messages, or leases, after which whatever is left is taken for something that never ends."""


class Injected(RuntimeError):
    """The error a fault raises, so that a test can tell it from every other."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One misfortune.

    Args:
        act: the kind of call it bends.
        kind: ``raise`` the work fails; ``hang`` it is never done nor answered; ``lost`` it is done, its
            answer is lost; ``die`` the partner is gone from then on; ``corrupt`` (with ``broadcast`` and an
            engine) the engine applies other bytes, so that its receipt proves something else;
            ``unfit`` the plan fits no engine (with ``plan``), or not this one (with ``open``); ``gone`` the
            engine sees that it has lost its weights (with ``open``). A fault of abort, release or renew
            happens each time, every other one once.
        engine: whose call, for the acts of an engine; any by default. With ``broadcast``: which engine fails
            over a bucket; with ``collect``: whose receipt is concerned.
        bucket: for ``broadcast``: at which bucket; for ``prepare``, ``clean`` and ``undo``: which executor.
    """

    act: Act
    kind: Literal["raise", "hang", "lost", "die", "corrupt", "unfit", "gone"] = "raise"
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


@dataclass(slots=True, order=True)
class Message:
    """Something under way: a word, a frame, an answer, or an alarm that somebody has set for himself.

    Args:
        due: when it arrives.
        number: in the order in which they were sent; what is due at the same time arrives in that order.
        action: what happens then.
        to: at whom it arrives: an engine, an owner, ``lock`` or ``ledger``; empty if it is nobody's.
        label: what it is, in words that tell it from every other one under way.
        link: messages of one link keep their order; without a name a message may overtake any other.
        refuse: what happens instead if whoever gets it fails at it.
        spoil: what happens instead if whoever gets it takes in something else.
        unfit: what happens instead if the weights fit no engine, or not the one it reaches.
        gone: what happens instead if the engine that it reaches has lost its own weights.
        alarm: whether it is an alarm.
        local: whether it does not leave its process: it can hang, but not come twice.
    """

    due: float
    number: int
    action: Callable[[], None] = field(compare=False)
    to: str = field(default="", compare=False)
    label: str = field(default="", compare=False)
    link: str = field(default="", compare=False)
    refuse: Callable[[], None] | None = field(default=None, compare=False)
    spoil: Callable[[], None] | None = field(default=None, compare=False)
    unfit: Callable[[], None] | None = field(default=None, compare=False)
    gone: Callable[[], None] | None = field(default=None, compare=False)
    alarm: bool = field(default=False, compare=False)
    local: bool = field(default=False, compare=False)


@dataclass(slots=True)
class Memory:
    """What a trainer remembers of its engines: which life of each it knows, and which are quarantined."""

    known: dict[str, str] = field(default_factory=dict)
    tainted: set[str] = field(default_factory=set)


@dataclass(slots=True)
class World:
    """What outlives a round: time, messages, lock, ledger, engines, and what each trainer remembers."""

    clock: HandClock
    book: LockBook
    ledger: Ledger
    partners: dict[str, Partner]
    inplace: tuple[str, ...] = ()
    rounds: int = 0
    memories: dict[str, Memory] = field(default_factory=dict)
    under_way: list[Message] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    stopped: dict[str, list[Message]] = field(default_factory=dict)
    lives: dict[tuple[str, str], Partner] = field(default_factory=dict)
    keeper: Keeper = field(init=False)
    _number: int = 0

    def __post_init__(self) -> None:
        self.keeper = Keeper(self)
        self._born(*self.partners.values())

    @classmethod
    def of(cls, engines: int, inplace: Sequence[str], lease: float) -> World:
        """A new world: ``engines`` fresh engines called e0, e1, ..."""
        names = [f"e{number}" for number in range(engines)]
        partners = {
            name: Partner(EngineMachine(name, stages=name not in inplace, incarnation="0")) for name in names
        }
        return cls(HandClock(10.0), LockBook(lease=lease), Ledger(), partners, tuple(inplace))

    # -- messages --------------------------------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], None], **what: Any) -> None:
        """Have ``action`` happen in ``delay`` seconds; ``what`` is the rest of a :class:`Message`."""
        self._number += 1
        heapq.heappush(self.under_way, Message(self.clock.now() + delay, self._number, action, **what))

    def step(self) -> None:
        """Turn the clock to the next thing that is under way, and have it happen."""
        message = heapq.heappop(self.under_way)
        self.clock.advance_to(message.due)
        self.deliver(message)

    def take(self, message: Message) -> None:
        """Take a message off its way: it does not arrive by itself any more."""
        self.under_way.remove(message)
        heapq.heapify(self.under_way)

    def deliver(self, message: Message) -> None:
        """A message arrives: whoever is dead hears nothing, whoever is stopped hears it later."""
        if message.to in self.stopped:
            self.stopped[message.to].append(message)
        elif message.to not in self.dead:
            message.action()

    def settle(self) -> None:
        """Let everything under way arrive, leases end, and engines reach their own limits.

        What never comes to rest is left as it is, for others to complain of.
        """
        for _ in range(_AT_REST):
            if not self.under_way:
                break
            self.step()
        for _ in range(_AT_REST):
            expiry = self.book.next_expiry()
            if expiry is None:
                break
            self.clock.advance_to(max(expiry, self.clock.now()))
            self.book, _notices = self.book.expire(self.clock.now())
        for partner in self.partners.values():
            partner.give_up()

    # -- engines, and what is remembered of them -------------------------------------------------------------

    def restart(self, engine: str) -> None:
        """``engine`` dies and comes up again by itself, with its start-up weights."""
        old = self.partners[engine].machine.facts
        machine = EngineMachine(engine, stages=old.stages, incarnation=f"{old.incarnation}'")
        self.partners[engine] = Partner(machine)
        self._born(self.partners[engine])

    def _born(self, *partners: Partner) -> None:
        """Whatever becomes of an engine, what it did in this life is remembered."""
        self.lives |= {(partner.machine.facts.engine, partner.incarnation): partner for partner in partners}

    def memory(self, owner: str) -> Memory:
        """What this trainer remembers."""
        return self.memories.setdefault(owner, Memory())

    def roster(self, owner: str) -> list[Participant]:
        """Whom the trainer asks for: an engine is asked who it is unless that is certain."""
        known, tainted = self.memory(owner).known, self.memory(owner).tainted
        for name, partner in self.partners.items():
            if partner.alive and (name in tainted or name not in known):
                known[name] = partner.incarnation
                if partner.machine.state is EngineState.Quarantined:
                    tainted.add(name)  # it says so itself
        return [Participant(name, known.get(name, "?")) for name in self.partners]

    def unreachable(self, owner: str) -> list[str]:
        """The engines that were asked who they are and did not answer."""
        memory = self.memory(owner)
        doubtful = memory.tainted | (self.partners.keys() - memory.known.keys())
        return sorted(name for name in doubtful if not self.partners[name].alive)

    def learn(self, result: RoundResult, owner: str) -> None:
        """Remember what a round decided."""
        tainted = self.memory(owner).tainted
        for row in result.engines:
            if row.disposition is Disposition.serving_new:
                tainted.discard(row.engine)
            elif row.disposition is Disposition.quarantined:
                tainted.add(row.engine)
