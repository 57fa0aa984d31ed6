"""The simulated world: deterministic, true to what it stands for, and judged by checks that can fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm.calls import Act
from weightsync.fsm.engine_table import Opened, Session
from weightsync.fsm.errors import EngineGone, WeightSyncError
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, EngineState, Outcome, State
from weightsync.fsm.tickets import Ticket
from weightsync.testing.clock import HandClock
from weightsync.testing.desk import Desk
from weightsync.testing.fakes import FakeEngine, FakeExecutor, FakeTransport, Gate
from weightsync.testing.promises import broken
from weightsync.testing.simulation import Fault, Injected, Simulation, run_together

GO_ON = Policy(deadline=4.0, lease=2.0, on_engine_failure="quarantine", quorum=1)


def test_the_hand_turned_clock_goes_forward_only() -> None:
    """Time stands still until somebody moves it, and the wall clock moves with it."""
    clock = HandClock(5.0, wall=100.0)
    assert (clock.now(), clock.wall()) == (5.0, 100.0)
    clock.advance_to(7.5)
    clock.advance_to(6.0)
    assert (clock.now(), clock.wall()) == (7.5, 102.5)


def told(seed: int) -> list[dict[str, Any]]:
    """The records of a round with a fault and slow messages."""
    simulation = Simulation(faults=[Fault(Act.commit, "raise", "e1")], policy=GO_ON, seed=seed, jitter=0.3)
    simulation.run()
    return [record.to_json() for record in simulation.round.records()]


def test_the_same_seed_gives_the_same_round() -> None:
    """To the last record and its time; another seed gives another."""
    assert told(7) == told(7)
    assert told(7) != told(8)


def test_a_world_goes_on_from_round_to_round() -> None:
    """The clock, the epoch and the versions never fall; a version is the next that is free."""
    simulation, versions, epochs = Simulation(), [], []
    for _ in range(3):
        result = simulation.run()
        versions.append(result.version)
        epochs.append(result.epoch)
        simulation = Simulation(earlier=simulation)
    assert (versions, epochs) == ([0, 1, 2], [1, 2, 3])


@pytest.mark.parametrize(
    ("kind", "done", "answered"),
    [("raise", False, True), ("hang", False, False), ("lost", True, False), ("die", False, True)],
)
def test_each_kind_of_fault_is_what_it_says(kind: Any, done: bool, answered: bool) -> None:
    """Whether the engine opened its session, and whether anybody heard of it."""
    simulation = Simulation(engines=1, faults=[Fault(Act.open, kind, "e0")])
    seen: list[EngineState] = []
    simulation.at(0.1, lambda: seen.append(simulation.world.partners["e0"].machine.state))
    result = simulation.run()
    simulation.settle()
    assert seen == [EngineState.Paused if done else EngineState.Serving]
    assert (sum(result.seconds.values()) < 0.5) is answered
    assert simulation.world.partners["e0"].alive is (kind != "die")


def test_a_fault_happens_once_or_each_time_as_documented() -> None:
    """An order that is repeated by nature is bent each time, every other one once."""
    simulation = Simulation(faults=[Fault(Act.release, "raise"), Fault(Act.clean, "raise")])
    simulation.run()
    assert [fault.act for fault in simulation.faults.left] == [Act.release]
    assert simulation.log.count("release()") > 2


def test_a_service_that_is_gone_answers_nothing_any_more() -> None:
    """The ledger dies with the publication: nobody can ask it either."""
    simulation = Simulation(faults=[Fault(Act.publish, "die")])
    assert simulation.run().published == "unknown"
    assert simulation.log.count("ask()") >= 1


def test_an_engine_that_was_started_anew_is_another_one() -> None:
    """The round that still asks for the old one loses it; the next one knows better."""
    first = Simulation()
    first.run()
    first.world.restart("e1")
    second = Simulation(earlier=first)
    result = second.run()
    assert isinstance(result.error, EngineGone)
    assert "started anew" in str(result.error)
    assert result.culprit == "e1"
    assert broken(second, result) == []
    third = Simulation(earlier=second)
    result = third.run()
    assert broken(third, result) == []
    assert [row.incarnation for row in result.engines] == ["0", "0'"]
    assert result.outcome is Outcome.complete


def test_two_rounds_at_once_take_turns() -> None:
    """One lock: the second waits in Idle until the first is over."""
    one = Simulation()
    two = Simulation(earlier=one)
    first, second = run_together(one, two)
    assert (first.epoch, second.epoch) == (1, 2)
    assert second.seconds["Idle"] > sum(first.seconds.values()) - first.seconds["Cleaning"]
    assert second.ok


def test_a_round_that_nothing_can_end_is_an_error_of_the_test() -> None:
    """Instead of a test that never ends."""
    simulation = Simulation(policy=Policy(deadline=5000.0), faults=[Fault(Act.acquire, "hang")])
    with pytest.raises(WeightSyncError, match="nothing will ever happen"):
        simulation.run()


# -- checks that can fail ---------------------------------------------------------------------------------


def hold_the_lock(simulation: Simulation, result: RoundResult) -> RoundResult:
    """The lock was never given back."""
    ticket = Ticket("t", "trainer", simulation.name)
    simulation.world.book, _ = simulation.world.book.request(ticket, simulation.clock.now())
    return result


def misquote_the_ledger(simulation: Simulation, result: RoundResult) -> RoundResult:
    """The result says no although the ledger has it."""
    return replace(result, published="no")


def misquote_an_engine(simulation: Simulation, result: RoundResult) -> RoundResult:
    """The result says old although the engine committed."""
    row = replace(result.engines[0], disposition=Disposition.serving_old)
    return replace(result, engines=(row, *result.engines[1:]))


def take_too_long(simulation: Simulation, result: RoundResult) -> RoundResult:
    """Time passes after the end."""
    simulation.clock.advance_to(simulation.clock.now() + 60.0)
    return result


def refuse_somebody(simulation: Simulation, result: RoundResult) -> RoundResult:
    """A partner's word was not legal."""
    simulation.driver.refused += 1
    return result


def leave_a_call_open(simulation: Simulation, result: RoundResult) -> RoundResult:
    """The lock was given back beside a broadcast."""
    call = next(Desk(engines=1).driver.start(0.0).__iter__())
    simulation.at_release.append((replace(call, act=Act.broadcast),))
    return result


def swallow_the_error(simulation: Simulation, result: RoundResult) -> RoundResult:
    """It failed, and nobody knows why."""
    return replace(result, outcome=Outcome.failed, error=None)


def tell_it_twice(simulation: Simulation, result: RoundResult) -> RoundResult:
    """A second result in the log."""
    simulation.round.note("result", wall=0.0)
    return result


def fall_behind(simulation: Simulation, result: RoundResult) -> RoundResult:
    """The engine had a higher version before."""
    simulation.before["e0"] = replace(simulation.before["e0"], version=50)
    return result


def end_elsewhere(simulation: Simulation, result: RoundResult) -> RoundResult:
    """The path does not end in Released."""
    return replace(result, path=("Idle", "Failed"))


SPOILS: dict[Callable[[Simulation, RoundResult], RoundResult], str] = {
    hold_the_lock: "the lock is held until",
    misquote_the_ledger: "published is no, the ledger says 0",
    misquote_an_engine: "e0 is serving_old, but Serving with version 0",
    take_too_long: "its deadline is 4.0 s",
    refuse_somebody: "honest partners were refused",
    leave_a_call_open: "given back with broadcast() in flight",
    swallow_the_error: "failed without an error",
    tell_it_twice: "not told exactly once",
    end_elsewhere: "the round ended in",
    fall_behind: "e0 fell from version 50 to 0",
}


def test_a_round_that_kept_its_promises_is_not_accused() -> None:
    """The checks say nothing about it."""
    simulation = Simulation()
    assert broken(simulation, simulation.run()) == []


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_broken_promise_is_noticed(spoil: Callable[[Simulation, RoundResult], RoundResult]) -> None:
    """Each check fails when what it looks at is spoilt, and says what."""
    simulation = Simulation()
    found = broken(simulation, spoil(simulation, simulation.run()))
    assert any(SPOILS[spoil] in line for line in found), found


def test_another_error_than_the_first_is_noticed() -> None:
    """The result of a failed round names the very object."""
    simulation = Simulation(faults=[Fault(Act.broadcast, "raise", bucket=1)])
    result = replace(simulation.run(), error=Injected("another"))
    assert any("the first error was" in line for line in broken(simulation, result))


def test_an_engine_left_in_a_session_is_noticed() -> None:
    """Its own limit would end the session; one that stays is a leak."""
    simulation = Simulation()
    result = simulation.run()
    partner = simulation.world.partners["e0"]
    simulation.settle()
    partner.machine.fire(Opened(Session("r9", 99, 9), simulation.plan))
    partner.alive = False
    assert broken(simulation, result) == []
    partner.alive = True
    simulation.settle = lambda: None  # type: ignore[method-assign]
    assert any("is left Paused" in line for line in broken(simulation, result))


def test_a_log_that_does_not_replay_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is missing."""
    simulation = Simulation()
    result = simulation.run()
    records = simulation.round.records()
    monkeypatch.setattr(type(simulation.round), "records", lambda self, since=0: records[1:])
    assert any("does not replay" in line for line in broken(simulation, result))


# -- fakes ------------------------------------------------------------------------------------------------


def test_a_gate_says_that_somebody_came_and_lets_through_when_opened() -> None:
    """Nobody waits for one that is open."""
    gate = Gate()
    gate.open()
    gate.pass_through()
    gate.await_visitor()


def test_fakes_raise_what_they_are_told_once() -> None:
    """And then keep to their contract."""
    engine, executor = FakeEngine("a"), FakeExecutor("x", bad={"prepare": Injected("no")})
    engine.bad["hello"] = Injected("no")
    assert isinstance(engine.hello().exception(1), Injected)
    assert engine.hello().result(1).engine == "a"
    with pytest.raises(Injected):
        executor.prepare(None)  # type: ignore[arg-type]
    assert executor.prepare(None) is not None  # type: ignore[arg-type]
    assert FakeTransport(survives_loss=False).capabilities.survives_loss is False


def test_a_desk_leads_a_driver_to_any_state() -> None:
    """By hand, call by call."""
    desk = Desk("x")
    desk.cleaning()
    assert desk.state is State.Cleaning
    assert [str(call) for call in desk.open] == ["bind()"]
    assert desk.told(e.Cancelled()) == []
