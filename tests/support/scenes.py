"""Rounds of the real driver in which one thing goes wrong, each judged by whoever would be harmed.

A scene returns the complaints, and nothing if all is well. ``system`` makes one of the composed system: every
misfortune of some kinds at every step of two trainers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from weightsync.fsm import events as e
from weightsync.fsm.calls import Act
from weightsync.fsm.errors import EngineError
from weightsync.fsm.policy import Policy
from weightsync.fsm.states import Outcome, State
from weightsync.testing.composed import Setup
from weightsync.testing.desk import Desk
from weightsync.testing.exploring import explore_composed
from weightsync.testing.promises import broken
from weightsync.testing.simulation import Fault, Simulation
from weightsync.testing.world import World

__all__ = ["BOTH", "ONE", "Show", "system"]

Show = Callable[[], list[str]]

ONE = Setup("one after the other, one engine is enough", buckets=1)
BOTH = Setup("one after the other, both engines are needed", quorum=2, buckets=1)
GO_ON = Policy(deadline=4.0, lease=2.0, on_engine_failure="quarantine", quorum=1)
TWO_OF_THREE = Policy(deadline=4.0, lease=20.0, on_engine_failure="quarantine", quorum=2)


@functools.cache
def system(setup: Setup, *kinds: str) -> Show:
    """Every misfortune of these kinds, at every step."""
    return functools.partial(_explored, setup, kinds)


def _explored(setup: Setup, kinds: tuple[str, ...]) -> list[str]:
    found = explore_composed(setup, kinds=kinds)
    return [f"{found.hits[name]} x {broken.what}" for name, broken in found.violations.items()]


# -- told by hand --------------------------------------------------------------------------------------------


def a_receipt_of_somebody_lost() -> list[str]:
    """It was on its way when its engine was given up; the other one's is still missing."""
    desk = Desk(policy=GO_ON)
    desk.awaiting()
    lost = desk.members[0]
    desk.told(e.EngineLost(lost))
    desk.told(e.EngineAcked(lost, (desk.receipt(lost),)), State.Awaiting)
    wrong = [f"the round is {desk.state.name}"] if desk.state is not State.Awaiting else []
    return [*wrong, *(["its receipt counts"] if desk.round.facts.acks else [])]


def a_loss_told_twice() -> list[str]:
    """By the transport and by a monitor, say; two of three are enough, and two are left."""
    desk = Desk(engines=3, policy=TWO_OF_THREE)
    desk.broadcasting()
    for _ in range(2):
        desk.told(e.EngineLost(desk.members[0]))
    wrong = [f"the round is {desk.state.name}"] if desk.state is not State.Broadcasting else []
    return [*wrong, *(["the second one is refused"] if desk.driver.refused else [])]


def answers_after_the_end() -> list[str]:
    """A round that gave up is over; then one engine says that it committed, and another that it failed."""
    desk = Desk()
    desk.cleaning()
    desk.told(e.LeaseLost())
    desk.told(e.CleanupFailed(EngineError("no answer")))
    for told in (e.EngineCommitted(desk.members[0]), e.CommitFailed(desk.members[1], EngineError("torn"))):
        desk.told(told)
    wrong = [] if desk.state is State.Released else [f"the round is {desk.state.name}"]
    return [*wrong, *(["an honest answer is refused"] if desk.driver.refused else [])]


def cleaned_before_commits() -> list[str]:
    """Somebody says that all is put back when nobody has committed."""
    desk = Desk()
    desk.cleaning()
    desk.told(e.Cleaned())
    return [] if desk.driver.refused else ["Cleaned is accepted without a commit"]


def cleaned_before_answers() -> list[str]:
    """Somebody says so in Failed, with an abort under way."""
    desk = Desk()
    desk.awaiting()
    desk.told(e.Cancelled())
    desk.told(e.Cleaned())
    return [] if desk.driver.refused else [f"Cleaned is accepted with {len(desk.round.facts.open)} open"]


# -- run to the end ------------------------------------------------------------------------------------------


def the_last_commit_is_refused() -> list[str]:
    """The other one has committed, and one is enough."""
    return _published(Fault(Act.commit, "raise", "e1"))


def the_last_engine_dies() -> list[str]:
    """With its commit under way; the other one has committed, and one is enough."""
    return _published(Fault(Act.commit, "die", "e1"))


def _published(fault: Fault) -> list[str]:
    simulation = Simulation(faults=[fault], policy=GO_ON)
    result = simulation.run()
    alone = result.outcome is Outcome.partial and "Failed" not in result.path
    return [] if alone else [f"nobody published until the clock ended it: {' > '.join(result.path)}"]


def somebody_is_dead_from_the_beginning() -> list[str]:
    """Every engine is needed, and one does not say hello."""
    world = World.of(2, (), 2.0)
    world.partners["e1"].alive = False
    result = Simulation(world=world).run()
    return [] if result.published == "no" else [f"published by {result.outcome.name} round without e1"]


def a_round_after_a_torn_one() -> list[str]:
    """An engine that loads in place was torn; the next round is cancelled before it says anything to it."""
    first = Simulation(inplace=["e0"], faults=[Fault(Act.broadcast, "raise", bucket=1)])
    first.run()
    second = Simulation(earlier=first)
    return broken(second, second.run(cancel_at=0.0))


def the_ledger_falls_silent() -> list[str]:
    """It has published, and says so to nobody."""
    simulation = Simulation(faults=[Fault(Act.publish, "lost"), Fault(Act.ask, "hang")], policy=GO_ON)
    return broken(simulation, simulation.run())


def undos_that_hang() -> list[str]:
    """More of them than Failed has time for: whoever is next is owed the beginning of his all the same."""
    hang = [Fault(Act.undo, "hang", bucket=index) for index in (5, 4, 3, 2)]
    faults = [Fault(Act.broadcast, "hang"), *hang]
    simulation = Simulation(faults=faults, executors=6, policy=Policy(deadline=4.0, lease=20.0))
    simulation.run()
    log, wrong = simulation.log, []
    for undo in (f"undo({index})" for index in range(6)):
        if undo not in log:
            wrong.append(f"{undo} was never begun")
        elif log.index(undo) > log.index("release()"):
            wrong.append(f"{undo} was begun after the release")
    return wrong


def somebody_takes_other_bytes() -> list[str]:
    """Its receipt proves something else; one is enough."""
    simulation = Simulation(faults=[Fault(Act.broadcast, "corrupt", "e1", bucket=1)], policy=GO_ON)
    outcome = simulation.run().outcome
    return [] if outcome is Outcome.partial else [f"the round {outcome.name}, and its quorum held"]
