"""What must hold at every moment of the composed system, whatever went wrong: promises, held against truth.

The truth is the world's: the bytes an engine really holds, what the keeper's book says, what the ledger has
written. ``Watch.look`` compares one moment with the one before, so that a promise is accused at the very step
that breaks it; ``Watch.end`` judges what is left when everything has come to rest. Tables are not asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..fsm import engine_table as t
from ..fsm.engine import EngineMachine
from ..fsm.engine_table import Session
from ..fsm.errors import WeightSyncError
from ..fsm.facts import Facts
from ..fsm.lock import LockBook
from ..fsm.receipt import Expectation, Participant
from ..fsm.states import Disposition, EngineState, Lock, Outcome, State
from .composed import DEADLINE, Composed, Owner
from .deviations import Deviation
from .partner import Partner
from .promises import broken_at_end
from .snapshot import driver_key

__all__ = ["COMPOSED_PROMISES", "Watch"]

COMPOSED_PROMISES: dict[str, str] = {
    "P1 one owner": "never two trainers that hold the lock by what they know, nor one beside another's grant",
    "P1 release once": "each grant has an epoch above all earlier ones, and ends once",
    "P1 evidence": "a round that is Released does not hold the lock",
    "P2 proof": "an acknowledgement counts only after the rank let go of the transfer buffer",
    "P3 publish": "published only when all remaining, at least the quorum, hold the version",
    "P4 whole": "an engine that serves holds the bytes of one version, the one it says; and a result is true",
    "P5 stale": "what an older epoch says, or says too late, changes nothing",
    "P6 deadline": "every state, and every round, ends by its deadline",
    "P7 versions": "versions never fall",
    "P8 members": "who takes part is fixed when the lock is granted, by name and incarnation",
    "P9 anew": "a round never goes back, and what is committed is one round's full resend",
    "P10 pause": "an engine that was paused and not used is put back, or quarantined",
    "misfit": "weights that fit too few engines put none out; whom they do not fit is sent nothing",
    "fence": "the lock is not given back with a call under way to somebody who is not fenced",
    "honest": "no honest partner is refused, the first error is the error",
    "good": "where nothing goes wrong, every round is complete",
    "deadlock": "until every round is over, something is due or under way, and never the same again",
    "rest": "when all is quiet the lock is free, and no engine is left in a session",
}
"""Every promise the composed exploration checks, by name."""

_WIRE = 0.05
_SERVING = (Disposition.serving_new, Disposition.serving_old)


class Watch:
    """Looks at one system, moment by moment."""

    def __init__(self, system: Composed) -> None:
        self._system = system
        self._book, self._ledger = system.world.book, system.world.ledger
        self._grants: set[int] = set()
        self._ended: set[int] = set()
        self._rounds: dict[str, tuple[State, Facts]] = {}
        self._stale: dict[str, tuple[int, object]] = {}
        self._engines: dict[str, tuple[object, ...]] = {}
        self._highest: dict[tuple[str, str], tuple[int, int]] = {}
        self._probed: set[object] = set()
        self._closed = {closed.ticket.id for closed in self._book.closed}
        self._over: set[str] = set()
        self._said = {owner.name: len(owner.simulation.log) for owner in system.owners}
        self._judged = {owner.name for owner in system.owners if owner.result is not None}

    def look(self) -> Iterator[str]:
        """The promises that the last step has broken, each with what is wrong."""
        yield from self._lock()
        for owner in self._system.owners:
            yield from self._owner(owner)
        yield from self._published()
        for name, partner in self._system.world.partners.items():
            yield from self._engine(name, partner)

    # -- P1 --------------------------------------------------------------------------------------------------

    def _lock(self) -> Iterator[str]:
        system = self._system
        now, holder = system.world.clock.now(), system.world.book.holder
        believers = [owner for owner in system.owners if not system.dead(owner) and _believes(owner, now)]
        if len(believers) > 1:
            yield f"P1 one owner: {' and '.join(owner.name for owner in believers)} hold the lock"
        for owner in believers:
            if holder is not None and holder.epoch != owner.simulation.round.facts.epoch:
                yield f"P1 one owner: {owner.name} holds the lock, and so does {holder.ticket.owner}"
        before, self._book = self._book, system.world.book
        if before is self._book:
            return
        yield from self._buried(before, self._book)
        if before.holder is not None and (holder is None or holder.epoch != before.holder.epoch):
            if before.holder.epoch in self._ended:
                yield f"P1 release once: epoch {before.holder.epoch} ended twice"
            self._ended.add(before.holder.epoch)
        if holder is not None and holder.epoch not in self._grants:
            if holder.epoch <= max(self._grants, default=0):
                yield f"P1 release once: epoch {holder.epoch} is granted after {max(self._grants)}"
            self._grants.add(holder.epoch)
        elif holder is not None and holder.epoch in self._ended:
            yield f"P1 release once: epoch {holder.epoch} is granted again"

    def _buried(self, before: LockBook, book: LockBook) -> Iterator[str]:
        """A ticket that is over is over: its request may come again, and is granted nothing.

        Who has left the queue without the lock, or had it, is over, whatever the book remembers. A keeper
        that was started anew knows nothing of what was closed before it.
        """
        if book.not_before != before.not_before:
            self._closed.clear()
            return
        holder = book.holder.ticket.id if book.holder is not None else None
        had = before.holder.ticket.id if before.holder is not None else None
        if holder is not None and holder in self._closed:
            yield f"P1 release once: ticket {holder} is over, and is granted the lock"
        known = {had, *(waiter.ticket.id for waiter in before.queue)} - {None, holder}
        waiting = {waiter.ticket.id for waiter in book.queue}
        self._closed |= {each for each in known if each is not None and (each == had or each not in waiting)}
        self._closed |= {closed.ticket.id for closed in book.closed}

    # -- a round ---------------------------------------------------------------------------------------------

    def _owner(self, owner: Owner) -> Iterator[str]:
        round, driver = owner.simulation.round, owner.simulation.driver
        state, facts = round.state, round.facts
        before, known = self._rounds.get(owner.name, (State.Idle, facts))
        if state is not before or facts is not known:
            yield from self._moved(owner, before, known)
            self._rounds[owner.name] = (state, facts)
        stale, then = self._stale.get(owner.name, (0, None))
        if driver.stale != stale:
            mine = driver_key(owner.simulation)
            if then is not None and mine != then:
                yield f"P5 stale: {owner.name} was told something too late, and it changed the round"
        end = owner.simulation.began + DEADLINE + owner.slack + _WIRE
        late = not facts.settled and driver.phase_end > end
        if not driver.over and not self._system.dead(owner) and late:
            over = driver.phase_end - end
            yield f"P6 deadline: {state.name} of {owner.name} may end {over:.3g} s too late"
        yield from self._resumed(owner)
        if owner.result is not None and owner.name not in self._judged:
            self._judged.add(owner.name)
            yield from self._result(owner)

    def before(self, deviation: Deviation | None = None) -> None:
        """Remember, before a step, what something that comes too late must leave as it is.

        A step that is bent may be several at once, and then it is not known which of them came too late; but
        what an earlier epoch says must change nothing in any case.
        """
        old = deviation is not None and deviation.kind == "old"
        for owner in self._system.owners:
            driver = owner.simulation.driver
            kept = None
            if not driver.over and (deviation is None or (old and deviation.what == owner.name)):
                kept = driver_key(owner.simulation)
            always = old and kept is not None
            self._stale[owner.name] = (-1 if always else driver.stale, kept)

    def _moved(self, owner: Owner, before: State, known: Facts) -> Iterator[str]:
        state, facts = owner.simulation.round.state, owner.simulation.round.facts
        session = owner.simulation.session
        if state.rank < before.rank:
            yield f"P9 anew: {owner.name} went back from {before.name} to {state.name}"
        if known.epoch and known.epoch != facts.epoch:
            yield f"P9 anew: the epoch of {owner.name} was {known.epoch} and is {facts.epoch}"
        if known.members and facts.members != known.members:
            yield f"P8 members: of {owner.name} changed in {state.name}"
        for engine in facts.acks - known.acks:
            if session not in self._life(engine, "let_go"):
                yield f"P2 proof: the receipt of {engine} counts for {owner.name} before it let go"
        for engine in facts.committed - known.committed:
            if session not in self._life(engine, "commits"):
                yield f"P8 members: {engine} ({engine.incarnation}) never committed the round of {owner.name}"
        yield from _ill_matched(owner, before)
        if facts.settled and not known.settled:
            yield from _unfenced(owner)
        if state is State.Released and self._system.world.keeper.alive:
            yield from self._evidence(owner)

    def _evidence(self, owner: Owner) -> Iterator[str]:
        """By its own clock it holds nothing; the keeper knows that too, or is about to be told."""
        world, simulation = self._system.world, owner.simulation
        holder = world.book.expire(world.clock.now())[0].holder
        told = any(f"{simulation.name} release()" in message.label for message in world.under_way)
        if holder is not None and holder.ticket == simulation.lock.ticket and not told:
            yield f"P1 evidence: {owner.name} is Released, and the lock is its own until {holder.until}"

    def _life(self, engine: Participant, what: str) -> set[Session]:
        """The sessions in which this very life of an engine has done something."""
        partner = self._system.world.lives.get((engine.id, engine.incarnation))
        found: set[Session] = getattr(partner, what, set())
        return found

    def _result(self, owner: Owner) -> Iterator[str]:
        """What a round tells when it is over, against what is."""
        simulation, result = owner.simulation, owner.result
        if result is None:
            return
        for what in broken_at_end(simulation, result, slack=owner.slack + _WIRE, replaying=False):
            yield f"{_promise_of(what)}: {owner.name}: {what}"
        epoch = simulation.round.facts.epoch
        for row in result.engines:
            partner = self._system.world.partners[row.engine]
            if not partner.alive or partner.incarnation != row.incarnation or row.disposition not in _SERVING:
                continue
            asked = row.engine in {member.id for member in simulation.round.facts.members}
            if not asked and partner.machine.facts != simulation.before[row.engine]:
                continue  # what the other trainer has done since is not known to who never asked
            later = partner.machine.facts.session
            if later not in (None, simulation.session) or self._later(partner, epoch):
                continue  # in another trainer's session, from which its own limit frees it
            new = row.disposition is Disposition.serving_new
            if partner.machine.state is not EngineState.Serving:
                promise = "P4 whole" if new else "P10 pause"
                yield f"{promise}: {row.engine} is {row.disposition.name}, but {partner.machine.state.name}"
            elif new and partner.machine.facts.version != result.version:
                yield f"P4 whole: {row.engine} is new, with version {partner.machine.facts.version}"

    @staticmethod
    def _later(partner: Partner, epoch: int) -> bool:
        committed = partner.machine.facts.committed
        return partner.machine.facts.fenced > epoch or (committed is not None and committed.epoch > epoch)

    # -- P3, P7 ----------------------------------------------------------------------------------------------

    def _resumed(self, owner: Owner) -> Iterator[str]:
        """In Cleaning nobody is resumed before the ledger has the version; in Failed who committed may be."""
        log, said = owner.simulation.log, self._said.get(owner.name, 0)
        self._said[owner.name] = len(log)
        if owner.simulation.round.state is State.Cleaning and self._unpublished(owner):
            for call in log[said:]:
                if call.startswith("resume("):
                    yield f"P3 publish: {owner.name} orders {call}, and its version is not published"

    def _unpublished(self, owner: Owner) -> bool:
        """Whether the ledger never had the version by this round or a later one, for all that it says now."""
        facts, ledger = owner.simulation.round.facts, self._system.world.ledger
        if ledger.version is None or ledger.version < facts.version:
            return True
        return ledger.version == facts.version and ledger.epoch < facts.epoch

    def _told(self) -> Iterator[str]:
        """What the results said of the ledger, against what it says; also of what it is told afterwards."""
        ledger = self._system.world.ledger
        for owner in self._system.owners:
            if (result := owner.result) is None:
                continue
            mine = (ledger.version, ledger.epoch) == (result.version, result.epoch)
            if result.published == "no" and mine:
                yield f"P3 publish: {owner.name} was told no, and version {result.version} is published"
            if result.published == "yes" and self._unpublished(owner):
                yield f"P3 publish: {owner.name} was told yes, and the ledger has {ledger.version}"

    def _published(self) -> Iterator[str]:
        before, ledger = self._ledger, self._system.world.ledger
        over = {owner.name for owner in self._system.owners if owner.result is not None}
        if ledger is not before or over != self._over:
            self._over = over
            yield from self._told()
        if ledger is before:
            return
        self._ledger = ledger
        if before.version is not None and (ledger.version is None or ledger.version < before.version):
            yield f"P7 versions: the ledger fell from {before.version} to {ledger.version}"
        if ledger.fence < before.fence or ledger.epoch < before.epoch:
            yield f"P5 stale: epoch {ledger.epoch} changed the ledger after {before.fence}"
        if (ledger.version, ledger.epoch) == (before.version, before.epoch):
            return
        for owner in self._system.owners:
            facts, session = owner.simulation.round.facts, owner.simulation.session
            if facts.epoch != ledger.epoch:
                continue
            hold = {engine for engine in facts.members if session in self._life(engine, "commits")}
            if not facts.remaining <= hold or len(hold) < facts.quorum:
                yield f"P3 publish: {owner.name} published, and only {len(hold)} engines hold the version"

    # -- an engine -------------------------------------------------------------------------------------------

    def _engine(self, name: str, partner: Partner) -> Iterator[str]:
        machine = partner.machine
        now = (machine._snapshot, tuple(partner.live.values()))
        before = self._engines.get(name)
        if before is not None and before[0] is now[0] and before[1] == now[1]:
            return
        self._engines[name] = now
        state, facts = machine.state, machine.facts
        epoch, version = self._highest.get((name, facts.incarnation), (0, -1))
        if facts.version is not None and facts.version < version:
            yield f"P7 versions: {name} fell from version {version} to {facts.version}"
        told = max(
            facts.session.epoch if facts.session else 0, facts.committed.epoch if facts.committed else 0
        )
        if told < epoch and facts.session is not None:
            yield f"P5 stale: {name} takes epoch {told} in after {epoch}"
        version = max(version, -1 if facts.version is None else facts.version)
        self._highest[name, facts.incarnation] = (max(epoch, told), version)
        yield from self._bytes(name, partner)
        if (state, facts) not in self._probed:
            self._probed.add((state, facts))
            yield from _probe(name, machine)

    def _bytes(self, name: str, partner: Partner) -> Iterator[str]:
        state, facts = partner.machine.state, partner.machine.facts
        marks = {partner.live.get(index) for index in range(self._system.setup.buckets)}
        if state is EngineState.Committed and facts.session is not None:
            ours = {mark and mark[0] for mark in marks}
            if ours != {facts.session}:
                yield f"P9 anew: {name} committed a mix of rounds"
        if state is not EngineState.Serving:
            return
        if len(marks) > 1:
            yield f"P4 whole: {name} serves a mix"
        mark = next(iter(marks))
        if facts.version != (mark and mark[0].version) or (mark and mark[1] == "other bytes"):
            yield f"P4 whole: {name} serves {mark}, and says version {facts.version}"

    # -- the end ---------------------------------------------------------------------------------------------

    def end(self) -> Iterator[str]:
        """What is wrong when nothing is due or under way any more."""
        system = self._system
        for owner in system.owners:
            if not system.dead(owner) and not owner.simulation.driver.over:
                yield f"deadlock: nothing will ever end {owner.simulation.round.state.name} of {owner.name}"
            told = owner.result.outcome if owner.result is not None else Outcome.complete
            if told is not Outcome.complete and system.steady and not system.story:
                yield f"good: nothing went wrong, and {owner.name} ends {told.name}"
        system.world.settle()
        book = system.world.book
        if system.world.keeper.alive and (book.holder is not None or book.queue):
            yield "rest: the lock is not free"
        for name, partner in system.world.partners.items():
            facts = partner.machine.facts
            idle = partner.machine.state in (EngineState.Serving, EngineState.Quarantined)
            if partner.alive and (facts.session is not None or not idle):
                yield f"rest: {name} is left {partner.machine.state.name}"
            yield from self._engine(name, partner)


def _believes(owner: Owner, now: float) -> bool:
    """Whether a trainer takes itself for the holder: the lock was granted, and is not given back or over."""
    facts, driver = owner.simulation.round.facts, owner.simulation.driver
    return facts.lock is Lock.held and not facts.settled and now < driver.lease_end


def _ill_matched(owner: Owner, before: State) -> Iterator[str]:
    """Who is sent something that it said does not fit it."""
    round = owner.simulation.round
    if round.state is State.Broadcasting and before is not State.Broadcasting:
        for engine in sorted(round.facts.remaining & owner.simulation.misfits):
            yield f"misfit: the weights of {owner.name} do not fit {engine}, and are sent to it"


def _unfenced(owner: Owner) -> Iterator[str]:
    """Whoever is out, or has not said what it is, is told that it is out before the lock is given back."""
    simulation = owner.simulation
    facts, log = simulation.round.facts, simulation.log
    told = log[: log.index("release()")] if "release()" in log else log
    for engine in sorted(facts.evicted | facts.quarantined | facts.open):
        asked = f"abort({engine})" in told and engine not in facts.open
        if f"fence({engine})" not in told and not asked:
            yield f"fence: {owner.name} gives the lock back, and {engine} is not told that it is out"


def _promise_of(what: str) -> str:
    """Under which name what :mod:`.promises` finds is told."""
    for words, promise in (
        ("deadline is", "P6 deadline"), ("in flight", "fence"), ("the lock is held", "P1 evidence"),
        ("serving_new, but", "P4 whole"), ("left in a pause", "P10 pause"), ("too few engines fit", "misfit"),
    ):  # fmt: skip
        if words in what:
            return promise
    return "honest"


def _probe(name: str, machine: EngineMachine) -> Iterator[str]:
    """Say to an engine what a trainer of an older epoch may still say, and see that it changes nothing."""
    facts, kept = machine.facts, machine._snapshot
    newest = max(facts.fenced, facts.session.epoch - 1 if facts.session else 0)
    refused = machine.refused
    for epoch in range(1, newest + 1):
        for word in _words(Session("stale", epoch, 0), facts.frames):
            try:
                machine.fire(word)
            except WeightSyncError:
                pass
            else:
                after = machine.facts
                same = machine.state is kept.state and _but_fence(after) == _but_fence(kept.facts)
                if not same:
                    what = f"{type(word).__name__} of epoch {epoch}"
                    yield f"P5 stale: {what} changed {name} in {kept.state.name}"
            machine._snapshot = kept
    machine.refused = refused


def _but_fence(facts: t.EngineFacts) -> tuple[Any, ...]:
    return (facts.session, facts.frames, facts.touched, facts.tainted, facts.version, facts.committed)


def _words(session: Session, frames: int) -> Iterator[t.EngineEvent]:
    yield t.Opened(session, Expectation("plan", 1, 1, 1))
    yield t.FrameSeen(session, frames)
    yield t.AllApplied(session)
    yield t.ViewClosed(session, 1, 1)
    yield t.CommitOrdered(session)
    yield t.ResumeOrdered(session)
    yield t.AbortOrdered(session)
