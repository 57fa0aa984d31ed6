"""B38 in the table itself: a guard raises. Every other place is in ``test_cases_locks.py``."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from weightsync.fsm import reducer
from weightsync.fsm import round as round_module
from weightsync.fsm._machine import Decider
from weightsync.fsm.calls import ENGINE_ACTS, Act
from weightsync.fsm.errors import WeightSyncError
from weightsync.fsm.facts import Facts
from weightsync.fsm.policy import Policy
from weightsync.fsm.rows import Table
from weightsync.fsm.states import State
from weightsync.fsm.table import ROUND
from weightsync.testing.promises import broken
from weightsync.testing.simulation import Fault, Simulation

pytestmark = pytest.mark.timeout(60)

POLICIES = (
    Policy(deadline=4.0, lease=2.0, on_engine_failure="quarantine", quorum=1),
    Policy(deadline=4.0, lease=2.0),
)
NEVER_ASKED = {
    "began_all_out", "late_answer", "late_publication", "not_asked_for", "not_gone", "settled_ours"
}  # fmt: skip
"""Guards for what nobody says in these worlds; ``tests/test_round.py`` lets one raise whatever is said."""
FOLLOWS = ("honest partners were refused", "left in a pause")
"""What follows from a fact that is refused. If it was a loss, the engine's own limit ends its pause."""
NUMBER = 1
"""How many rounds each of them spoils."""
KNOWN = {row.guard.__name__: row.guard for row in ROUND.rows if row.guard is not None}


def faults() -> Iterator[list[Fault]]:
    """Rounds that together ask nearly every guard: a good one, and those in which something goes wrong."""
    yield []
    yield [Fault(Act.broadcast, "corrupt", "e0", 1)]
    one = (*ENGINE_ACTS, Act.broadcast, Act.collect)
    for act in Act:
        for kind in ("raise", "hang", "die"):
            yield [Fault(act, kind, "e0" if act in one else None)]
    for act in (Act.abort, Act.undo, Act.transport_abort):
        yield [Fault(Act.commit, "raise", "e0"), Fault(act, "raise", "e0" if act is Act.abort else None)]
    for act in (Act.publish, Act.ask):
        yield [Fault(Act.publish, "lost"), Fault(act, "hang")]


def simulations() -> Iterator[Simulation]:
    """Each of them under both policies, and with an engine that loads in place; and rounds with one dead."""
    for policy in POLICIES:
        for each in faults():
            yield Simulation(policy=policy, faults=each)
            yield Simulation(policy=policy, faults=each, inplace=("e0",), version=1)
        gone = Simulation(policy=policy, faults=[Fault(Act.commit, "die", "e0")])
        gone.run()
        yield Simulation(policy=policy, earlier=gone)


class Broken:
    """A guard that raises once, whenever it is loaded."""

    def __init__(self, guard: Callable[..., bool]) -> None:
        self.__name__, self.guard, self.loaded = guard.__name__, guard, False

    def __call__(self, facts: Any, event: Any, state: Any) -> bool:
        """The guard's answer, or the error."""
        if self.loaded:
            self.loaded = False
            raise ZeroDivisionError(self.__name__)
        return self.guard(facts, event, state)


@pytest.mark.parametrize("name", sorted(KNOWN.keys() - NEVER_ASKED))
def test_b38_in_each_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytransitions/transitions#202, #616: the fact is refused; the round ends, and everything is put back.

    Its limits see to that: what was refused is either told again, or missed by a watchdog.
    """
    faulty = Broken(KNOWN[name])
    rows = [replace(row, guard=faulty) if row.guard is KNOWN[name] else row for row in ROUND.rows]
    table: Table[State, Facts] = Table("round", rows, start=ROUND.start, final=ROUND.final, entry=ROUND.entry)
    monkeypatch.setattr(round_module, "step", lambda before, event: reducer.step(before, event, table))
    monkeypatch.setattr(round_module, "_DECIDER", Decider(table))
    assert list(islice(_met(faulty), NUMBER)), "nobody asks it"


def _met(faulty: Broken) -> Iterator[Simulation]:
    """The rounds that the guard spoilt, checked."""
    for simulation in simulations():
        faulty.loaded = True
        try:
            result = simulation.run()
        except WeightSyncError as error:
            raise AssertionError(f"it never ends: {error}") from error
        if faulty.loaded:
            continue
        found = broken(simulation, result, slack=14 / 3)
        assert [line for line in found if not line.startswith(FOLLOWS)] == []
        assert result.path[-1] == State.Released.name
        assert simulation.driver.refused > 0
        yield simulation
