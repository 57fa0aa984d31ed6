"""What can go wrong in one step of the composed system.

    for deviation in possible(system):
        ...                               deviation.bend(system) instead of, or before, the next step

A deviation is a plain value and names what it bends by numbers and names, so that the same list of choices
always leads to the same moment.

Of the message that comes next: ``raise`` (whoever gets it fails at it), ``spoil`` (other bytes), ``unfit``
(the plan fits no engine, or not this one), ``gone`` (the engine sees that it has lost its weights), ``lose``
(it never arrives: a request that hangs, a reply that is lost), ``late`` (it arrives long after everybody has
given up on it), ``twice`` (a second one follows at once), ``again`` (a second one follows long after). Of
another message under way: ``first`` (it overtakes).
Of time: ``wait`` (nothing arrives until the next limit is reached). Of a process: ``kill``, ``stop`` (until
its lease is over, and then it goes on), ``restart`` of an engine (another incarnation), ``limit`` (an
engine's own limit), ``keeper`` (the lock's host dies, another one takes over), ``keeper-gone`` (and nobody
does). Of a trainer: ``cancel``, ``alarm`` (somebody says that an engine is lost), ``old`` (a receipt of an
earlier epoch reaches it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..fsm import events as e
from ..fsm.states import State
from .composed import Composed, Owner
from .world import Injected, Message

__all__ = ["KINDS", "LONG", "Deviation", "possible"]

LONG = 3.0
"""Seconds by which a late message is late: longer than any limit but the deadline, and than a lease."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """One misfortune: its kind, and what it befalls (the number of a message, or a name)."""

    kind: str
    what: str = ""
    told: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.told or self.what}".strip()

    def bend(self, system: Composed) -> None:
        """Have it happen."""
        system.story.append((system.steps, str(self)))
        for owner in system.owners:
            if owner.begun and not system.dead(owner):
                owner.simulation.round.note(
                    "injected",
                    wall=system.world.clock.wall(),
                    facts={"what": str(self), "step": system.steps},
                )
        KINDS[self.kind](system, self.what)
        system.begin()


def possible(system: Composed) -> list[Deviation]:
    """Everything that can go wrong now."""
    return list(_possible(system))


def _possible(system: Composed) -> Iterator[Deviation]:
    message, _ = system.next()
    if message is not None and not message.alarm:
        yield from _of_a_message(message)
    yield from _overtaking(system, message)
    if system.running:
        yield Deviation("wait")
    for owner in system.owners:
        if owner.begun and owner in system.running:
            yield from _of_an_owner(system, owner)
    for name, partner in system.world.partners.items():
        if partner.alive:
            yield Deviation("kill", name)
            yield Deviation("restart", name)
            if partner.machine.facts.session is not None:
                yield Deviation("limit", name)
    if system.world.keeper.alive and system.running:
        yield Deviation("keeper")
        yield Deviation("keeper-gone")


def _of_a_message(message: Message) -> Iterator[Deviation]:
    number, told = str(message.number), message.label
    if message.refuse:
        yield Deviation("raise", number, told)
    if message.spoil:
        yield Deviation("spoil", number, told)
    if message.unfit:
        yield Deviation("unfit", number, told)
    if message.gone:
        yield Deviation("gone", number, told)
    for kind in ("lose", "late") if message.local else ("lose", "late", "twice", "again"):
        yield Deviation(kind, number, told)


def _overtaking(system: Composed, next_one: Message | None) -> Iterator[Deviation]:
    """Messages that can arrive before the one that is next: the first of each link."""
    links = {next_one.link} if next_one is not None and next_one.link else set()
    for message in sorted(system.world.under_way):
        if message.alarm or message is next_one or message.link in links:
            continue
        if message.link:
            links.add(message.link)
        yield Deviation("first", str(message.number), message.label)


def _of_an_owner(system: Composed, owner: Owner) -> Iterator[Deviation]:
    yield Deviation("kill", owner.name)
    yield Deviation("stop", owner.name)
    yield Deviation("cancel", owner.name)
    facts = owner.simulation.round.facts
    for engine in sorted(facts.remaining or facts.roster):
        yield Deviation("alarm", f"{owner.name} {engine.id}")
    if owner.simulation.round.state is State.Awaiting and _old_receipts(system, owner):
        yield Deviation("old", owner.name)


def _old_receipts(system: Composed, owner: Owner) -> list[e.EngineAcked]:
    """What an earlier round's engines have proved, as if it were told to this round."""
    members = owner.simulation.round.facts.members
    return [
        e.EngineAcked(engine, (receipt,))
        for other in system.owners
        if other is not owner
        for engine, receipt in sorted(other.simulation.transport.receipts.items())
        if engine in members
    ]


# -- what they do -------------------------------------------------------------------------------------------


def _message(system: Composed, number: str) -> Message:
    return next(message for message in system.world.under_way if message.number == int(number))


def _arriving(system: Composed, number: str) -> Message:
    """Take a message off its way, at the moment at which it arrives."""
    message = _message(system, number)
    system.world.take(message)
    system.world.clock.advance_to(message.due)
    _unsure(system, message)
    return message


def _unsure(system: Composed, message: Message) -> None:
    if any(word in message.label for word in ("acquire", "release", "renew")):
        system.unsure()


def _raise(system: Composed, number: str) -> None:
    message = _arriving(system, number)
    if message.refuse and message.to not in system.world.dead:
        message.refuse()


def _spoil(system: Composed, number: str) -> None:
    message = _arriving(system, number)
    if message.spoil:
        message.spoil()


def _unfit(system: Composed, number: str) -> None:
    message = _arriving(system, number)
    if message.unfit and message.to not in system.world.dead:
        message.unfit()


def _gone(system: Composed, number: str) -> None:
    message = _arriving(system, number)
    if message.gone and message.to not in system.world.dead:
        message.gone()


def _lose(system: Composed, number: str) -> None:
    _arriving(system, number)


def _late(system: Composed, number: str) -> None:
    _later(system, _arriving(system, number))


def _later(system: Composed, message: Message, seconds: float = LONG) -> None:
    kept = ("to", "label", "link", "refuse", "spoil", "unfit", "gone", "local")
    rest = {name: getattr(message, name) for name in kept}
    system.world.at(seconds, message.action, **rest)


def _twice(system: Composed, number: str) -> None:
    message = _message(system, number)
    _later(system, message, message.due - system.world.clock.now())
    _unsure(system, message)


def _again(system: Composed, number: str) -> None:
    message = _message(system, number)
    _later(system, message)
    _unsure(system, message)


def _first(system: Composed, number: str) -> None:
    message = _message(system, number)
    system.world.take(message)
    system.world.deliver(message)


def _wait(system: Composed, what: str) -> None:
    now = system.world.clock.now()
    moment = max(now, min(owner.simulation.driver.due for owner in system.running))
    system.late(moment)
    system.unsure()
    while system.world.under_way and system.world.under_way[0].due <= moment:
        system.world.step()
    system.world.clock.advance_to(moment)
    for owner in system.running:
        owner.simulation.tick()


def _kill(system: Composed, name: str) -> None:
    if name in system.world.partners:
        system.world.partners[name].alive = False
    else:
        system.kill(_owner(system, name))


def _owner(system: Composed, name: str) -> Owner:
    return next(owner for owner in system.owners if owner.name == name)


def _cancel(system: Composed, name: str) -> None:
    _owner(system, name).simulation.hear(e.Cancelled(Injected("cancelled")))


def _alarm(system: Composed, what: str) -> None:
    name, engine = what.split()
    simulation = _owner(system, name).simulation
    lost = next(member for member in simulation.round.facts.roster if member.id == engine)
    simulation.hear(e.EngineLost(lost, Injected(f"somebody says that {engine} is lost")))


def _old(system: Composed, name: str) -> None:
    owner = _owner(system, name)
    for told in _old_receipts(system, owner):
        owner.simulation.hear(told, State.Awaiting)


def _keeper(system: Composed, what: str) -> None:
    system.unsure()
    system.world.keeper.restart()


def _keeper_gone(system: Composed, what: str) -> None:
    system.unsure()
    system.world.keeper.die()


KINDS: dict[str, Callable[[Composed, str], None]] = {
    "raise": _raise,
    "spoil": _spoil,
    "unfit": _unfit,
    "gone": _gone,
    "lose": _lose,
    "late": _late,
    "twice": _twice,
    "again": _again,
    "first": _first,
    "wait": _wait,
    "kill": _kill,
    "stop": lambda system, name: system.stop(_owner(system, name)),
    "restart": lambda system, name: system.world.restart(name),
    "limit": lambda system, name: system.world.partners[name].give_up(),
    "cancel": _cancel,
    "alarm": _alarm,
    "old": _old,
    "keeper": _keeper,
    "keeper-gone": _keeper_gone,
}
"""What each kind does."""
