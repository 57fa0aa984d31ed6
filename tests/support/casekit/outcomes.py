"""What becomes of a round, for each fault in each state: told by the real driver, on a hand-turned clock.

    row = outcome(scenario, "quarantine")      one round, checked from all sides, and what is to be said of it

Two engines, e0 and e1, serve version 0 of the round before. The fault befalls e0, or somebody beside it.
Every message takes two milliseconds, so that a scenario always has the same outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from weightsync.fsm import events as e
from weightsync.fsm.calls import ENGINE_ACTS, Act
from weightsync.fsm.open_calls import NEVER
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, EngineState, State
from weightsync.testing.promises import broken
from weightsync.testing.simulation import Fault, Injected, Simulation

__all__ = ["FAULTS", "LIMIT", "POLICIES", "SCENARIOS", "Row", "Scenario", "outcome"]

LEASE, DEADLINE = 2.0, 6.0
POLICIES = {
    "quarantine": Policy(deadline=DEADLINE, lease=LEASE, on_engine_failure="quarantine", quorum=1),
    "fail": Policy(deadline=DEADLINE, lease=LEASE),
}
LIMIT = DEADLINE + 7 / 3 * LEASE
"""Seconds that no round takes: the deadline, and what a lock service that does not answer can add to it."""

_LATER = 0.01
"""Seconds by which whoever is stopped wakes after the end of his lease."""


@dataclass(frozen=True)
class Scenario:
    """One fault in one state.

    Args:
        fault: its kind, and whom it befalls.
        state: in which the round is.
        where: at which word, in a few words.
        bent: the calls that go wrong.
        deed: what happens as soon as the round is in the state.
    """

    fault: str
    state: State
    where: str
    bent: tuple[Fault, ...] = ()
    deed: str = ""

    def __str__(self) -> str:
        return f"{self.state.name}: {self.fault}, {self.where}"


@dataclass(frozen=True)
class Row:
    """What became of it.

    Args:
        path: the states from the one of the fault on.
        outcome: complete, partial, failed; or that nobody was there to be told.
        ok: whether the caller gets his result without an error.
        published: yes, no, or unknown.
        engines: what they are afterwards, if they stage.
        in_place: the same, if they load in place.
        blamed: the engine that is named, if one is.
        error: the kind of the first error.
        lock: how it came to be free.
        unclean: whether something could not be put back, and was fenced.
        seconds: how long the round took.
    """

    path: tuple[str, ...]
    outcome: str
    ok: bool
    published: str
    engines: tuple[str, ...]
    in_place: tuple[str, ...]
    blamed: str
    error: str
    lock: str
    unclean: bool
    seconds: float


# -- the scenarios ------------------------------------------------------------------------------------------

BROKE_OFF = Fault(Act.broadcast, "raise", None, 1)
"""Why a round is in Failed: sending the second of three buckets raises."""

_KINDS: dict[str, Literal["raise", "hang", "lost", "die"]] = {
    "raises": "raise",
    "is silent": "hang",
    "does it, and its answer is lost": "lost",
    "is killed at it": "die",
}
_ENGINE = {
    "told to open": (State.Locked, Act.open),
    "at bucket 1": (State.Broadcasting, Act.broadcast),
    "asked for its receipt": (State.Awaiting, Act.collect),
    "told to commit": (State.Cleaning, Act.commit),
    "told to resume": (State.Cleaning, Act.resume),
    "told to abort": (State.Failed, Act.abort),
}
_TRANSPORT = {
    "opening": (State.Locked, Act.transport_open),
    "at bucket 1": (State.Broadcasting, Act.broadcast),
    "collecting receipts": (State.Awaiting, Act.collect),
    "cleaning up": (State.Cleaning, Act.transport_clean),
    "aborting": (State.Failed, Act.transport_abort),
}
_EXECUTOR = {
    "getting ready": (State.Locked, Act.prepare),
    "cleaning up": (State.Cleaning, Act.clean),
    "undoing": (State.Failed, Act.undo),
}
_LEDGER = {"binding the number": (State.Cleaning, Act.bind), "publishing": (State.Cleaning, Act.publish)}
_LOCK = {
    "asked for it": (State.Idle, Act.acquire),
    "asked to take it back": (State.Cleaning, Act.release),
    "asked to take it back, of a failed round": (State.Failed, Act.release),
}
_DEEDS = {
    "an engine is killed between two words": "kill engine",
    "an engine starts anew, with its first weights": "restart engine",
    "the round is cancelled": "cancel",
    "the trainer is killed": "kill trainer",
    "the trainer is stopped until its lease is over": "stop trainer",
    "the lock's host dies, and another one takes over": "restart lock",
    "the lock's host dies, and nobody takes over": "kill lock",
}


def _said(who: str, kinds: tuple[str, ...], places: dict[str, tuple[State, Act]]) -> Iterator[Scenario]:
    for kind in kinds:
        for where, (state, act) in places.items():
            engine = "e0" if who == "an engine" else None
            bucket = 1 if act is Act.broadcast else None
            bent = Fault(act, _KINDS[kind], engine if act in ENGINE_ACTS or engine else None, bucket)
            first = (BROKE_OFF,) if state is State.Failed else ()
            yield Scenario(f"{who} {kind}", state, where, (*first, bent))


def _scenarios() -> Iterator[Scenario]:
    yield from _said("an engine", tuple(_KINDS), _ENGINE)
    wrong = Fault(Act.broadcast, "corrupt", "e0", 1)
    yield Scenario("an engine applies other bytes", State.Broadcasting, "at bucket 1", (wrong,))
    yield from _said("the transport", ("raises", "is silent"), _TRANSPORT)
    yield Scenario("the weights raise", State.Locked, "being read", (Fault(Act.plan),))
    yield Scenario("the weights do not fit", State.Locked, "any engine", (Fault(Act.plan, "unfit"),))
    yield Scenario("the weights do not fit", State.Locked, "one engine", (Fault(Act.open, "unfit", "e0"),))
    yield from _said("a handler", ("raises", "is silent"), _EXECUTOR)
    yield from _said("the ledger", ("raises", "is silent", "does it, and its answer is lost"), _LEDGER)
    yield from _said("the lock", ("raises", "is silent", "does it, and its answer is lost"), _LOCK)
    for fault, deed in _DEEDS.items():
        for state in State:
            if state is not State.Released:
                first = (BROKE_OFF,) if state is State.Failed else ()
                yield Scenario(fault, state, "at its beginning", first, deed)


SCENARIOS = tuple(_scenarios())
FAULTS = tuple(dict.fromkeys(scenario.fault for scenario in SCENARIOS))


# -- what happens as soon as a round is in a state ----------------------------------------------------------


class _Play:
    """One round, up to its end or to the end of its trainer."""

    def __init__(self, scenario: Scenario, policy: Policy, inplace: tuple[str, ...]) -> None:
        before = Simulation(policy=policy, inplace=inplace, steady=True)
        before.run()
        self.scenario = scenario
        self.simulation = Simulation(policy=policy, earlier=before, faults=scenario.bent, steady=True)
        self.began = self.simulation.clock.now()
        self.stopped_until = 0.0
        self.killed = False

    def run(self) -> None:
        """Until the round is over."""
        simulation, world, waiting = self.simulation, self.simulation.world, bool(self.scenario.deed)
        simulation.start()
        end = world.clock.now() + 10 * LIMIT
        while not simulation.driver.over and not self.killed:
            if waiting and simulation.round.state is self.scenario.state:
                waiting = False
                getattr(self, f"_{self.scenario.deed.replace(' ', '_')}")()
                continue
            due = max(simulation.driver.due, self.stopped_until)
            assert due < end, f"{self.scenario}: it never ends"
            if world.under_way and world.under_way[0].due <= due:
                world.step()
            else:
                world.clock.advance_to(due)
                simulation.tick()
        assert not waiting, f"{self.scenario}: the round never was in that state"
        if not self.killed:
            world.learn(simulation.driver.result(), simulation.owner)

    def _kill_engine(self) -> None:
        self.simulation.world.partners["e0"].alive = False

    def _restart_engine(self) -> None:
        self.simulation.world.restart("e0")

    def _cancel(self) -> None:
        self.simulation.hear(e.Cancelled(Injected("cancelled")))

    def _kill_trainer(self) -> None:
        self.killed = True
        self.simulation.world.dead.add(self.simulation.owner)

    def _stop_trainer(self) -> None:
        world, lease_end = self.simulation.world, self.simulation.driver.lease_end
        seconds = (lease_end - world.clock.now() if lease_end < NEVER else LEASE) + _LATER
        self.stopped_until = world.clock.now() + seconds
        world.stopped[self.simulation.owner] = []
        world.at(seconds, self._wake, label="goes on", alarm=True)

    def _wake(self) -> None:
        """The lease has waited for nobody; what else has arrived comes after it."""
        waiting = self.simulation.world.stopped.pop(self.simulation.owner)
        self.simulation.tick()
        for message in waiting:
            message.action()

    def _restart_lock(self) -> None:
        self.simulation.world.keeper.restart()

    def _kill_lock(self) -> None:
        self.simulation.world.keeper.die()


# -- what is to be said of it -------------------------------------------------------------------------------

_SHORT = {
    Disposition.serving_new: "new",
    Disposition.serving_old: "old",
    Disposition.quarantined: "quarantined",
}
_FREE = {
    "Unlocked": "given back",
    "LockRefused": "was not granted",
    "LeaseLost": "its lease ended",
}


def outcome(scenario: Scenario, policy: str) -> Row:
    """Play it with engines that stage, and with engines that load in place. Both are checked."""
    row, other = (_played(scenario, policy, names) for names in ((), ("e0", "e1")))
    assert (other.path, other.error) == (row.path, row.error), f"{scenario}: it goes {other.path} in place"
    return replace(row, in_place=other.engines)


@cache
def _played(scenario: Scenario, policy: str, inplace: tuple[str, ...]) -> Row:
    play = _Play(scenario, POLICIES[policy], inplace)
    play.run()
    row = _left_behind(play) if play.killed else _told(play)
    _next_one_works(play)
    return row


def _told(play: _Play) -> Row:
    simulation, scenario = play.simulation, play.scenario
    result: RoundResult = simulation.driver.result()
    seconds = simulation.clock.now() - play.began
    slack = LIMIT - DEADLINE + (LEASE if play.stopped_until else 0.0)
    found = broken(simulation, result, slack=slack)
    assert found == [], f"{scenario}: {found}"
    moves = [record for record in simulation.round.records() if record.event == "transition"]
    last = next(record for record in reversed(moves) if record.target == State.Released.name)
    alive = {name for name, partner in simulation.world.partners.items() if partner.alive}
    engines = tuple(
        f"{row.engine} {_SHORT[row.disposition] if row.engine in alive else 'dead'}" for row in result.engines
    )
    return Row(
        path=result.path[result.path.index(scenario.state.name) :],
        outcome=result.outcome.name,
        ok=result.ok,
        published=result.published,
        engines=engines,
        in_place=(),
        blamed=result.culprit or "",
        error="" if result.error is None else type(result.error).__name__,
        lock=_FREE.get(last.trigger or "", "was gone before"),
        unclean=result.unclean,
        seconds=seconds,
    )


def _left_behind(play: _Play) -> Row:
    """Nobody is there to be told: what engines and lock are when all is quiet."""
    simulation, world = play.simulation, play.simulation.world
    died, state = world.clock.now(), simulation.round.state
    while world.under_way:
        world.step()
    holder = world.book.holder
    late = holder is not None and holder.until > died + LEASE + _LATER
    assert not late, f"{play.scenario}: the lock is held for longer than a lease"
    simulation.settle()
    assert world.book.holder is None, f"{play.scenario}: the lock is held for ever"
    names = []
    for name, partner in world.partners.items():
        facts = partner.machine.facts
        assert facts.session is None, f"{play.scenario}: {name} is left in a session"
        whole = "new" if facts.version == simulation.round.facts.version else "old"
        names.append(f"{name} {whole if partner.machine.state is EngineState.Serving else 'quarantined'}")
    published = world.ledger.version == simulation.round.facts.version
    return Row(
        path=(state.name,),
        outcome="nobody is told",
        ok=False,
        published="yes" if published else "no",
        engines=tuple(names),
        in_place=(),
        blamed="",
        error="",
        lock="was not granted" if holder is None else "its lease ended",
        unclean=False,
        seconds=died - play.began,
    )


def _next_one_works(play: _Play) -> None:
    """Whatever happened: the next round reaches every engine that is alive."""
    world = play.simulation.world
    play.simulation.settle()
    if not world.keeper.alive:
        world.dead.discard("lock")
        world.keeper.alive = True
        world.keeper.restart()
    owner = "heir" if play.killed else play.simulation.owner
    after = Simulation(policy=POLICIES["quarantine"], earlier=play.simulation, owner=owner, steady=True)
    result = after.run()
    found = broken(after, result, slack=LIMIT)
    assert found == [], f"after {play.scenario}: {found}"
    alive = {name for name, partner in world.partners.items() if partner.alive}
    reached = set(result.serving(Disposition.serving_new))
    if (
        reached != alive
    ):  # one that started anew unseen is met in this round, and taken in by the one after it
        after = Simulation(policy=POLICIES["quarantine"], earlier=after, owner=owner, steady=True)
        reached = set(after.run().serving(Disposition.serving_new))
    assert reached == alive, f"after {play.scenario}: {reached} of {alive}"
