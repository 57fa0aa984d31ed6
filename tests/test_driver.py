"""The driver, one behaviour at a time: orders spelled out as calls, answers joined, limits kept."""

from typing import Any, Literal

import pytest

from weightsync.fsm import events as e
from weightsync.fsm.calls import Act
from weightsync.fsm.engine import Answer
from weightsync.fsm.errors import (
    EngineSilent,
    PlanError,
)
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, EngineState, Outcome, State
from weightsync.testing.desk import Desk
from weightsync.testing.promises import broken
from weightsync.testing.simulation import Fault, Simulation


def quorum(count: int = 1) -> Policy:
    """A policy that goes on with ``count`` engines."""
    return Policy(deadline=4.0, lease=2.0, on_engine_failure="quarantine", quorum=count)


def run(*faults: Fault, **options: Any) -> tuple[Simulation, RoundResult]:
    """A simulated round that kept every promise."""
    slack = options.pop("slack", 0.0)
    simulation = Simulation(faults=faults, **options)
    result = simulation.run()
    assert broken(simulation, result, slack=slack) == []
    return simulation, result


# -- the good way ---------------------------------------------------------------------------------------


def test_a_good_round_calls_everybody_in_order() -> None:
    """Plan and executors before engines, engines before bytes, commits before publication, release last."""
    simulation, result = run(executors=2)
    assert simulation.log == [
        "acquire()", "plan()", "prepare(0)", "prepare(1)", "open(e0)", "open(e1)", "transport_open()",
        "broadcast()", "collect()", "bind()", "commit(e0)", "commit(e1)", "publish()", "clean(0)", "clean(1)",
        "resume(e0)", "resume(e1)", "transport_clean()", "release()",
    ]  # fmt: skip
    assert result.outcome is Outcome.complete
    assert simulation.driver.stale == simulation.driver.refused == 0


def test_a_step_waits_for_everything_the_step_before_has_asked_for() -> None:
    """Nothing is sent before the last engine is paused and the transport is open."""
    desk = Desk("x")
    desk.locked()
    assert desk.done("plan()", Desk.plan) == ["prepare(0)"]
    assert desk.done("prepare(0)") == ["open(e0)", "open(e1)", "transport_open()"]
    assert desk.done("open(e1)") == []
    assert desk.done("transport_open()") == []
    assert desk.done("open(e0)") == ["broadcast()"]


def test_a_driver_that_is_over_has_nothing_to_do() -> None:
    """No limit is armed, and late words change nothing but the count of them."""
    simulation, _ = run()
    driver, now = simulation.driver, simulation.clock.now()
    assert (driver.due, driver.phase_end) == (float("inf"), float("inf"))
    assert driver.tick(now + 100.0) == []
    assert driver.answered(999, now, value=1) == []
    assert driver.heard(e.AllSent(), now, phase=State.Broadcasting) == []
    assert driver.heard(e.Cancelled(), now) == []
    assert (driver.stale, driver.refused) == (2, 0)


# -- executors ------------------------------------------------------------------------------------------


def test_an_executor_that_raises_undoes_those_before_it_in_reverse() -> None:
    """No engine was paused, the later executors are not asked, and the error is the very one."""
    simulation, result = run(Fault(Act.prepare, "raise", bucket=2), executors=4)
    assert simulation.log == [
        "acquire()", "plan()", "prepare(0)", "prepare(1)", "prepare(2)", "transport_abort()", "abort(e0)",
        "abort(e1)", "undo(1)", "undo(0)", "release()",
    ]  # fmt: skip
    assert (result.failed_in, result.unclean) == ("Locked", False)
    assert str(result.error) == "injected into prepare(2)"


def test_the_undo_list_runs_newest_first_and_one_at_a_time() -> None:
    """Also when one of them fails: the others still get their turn."""
    simulation, result = run(
        Fault(Act.broadcast, "raise", bucket=1), Fault(Act.undo, "raise", bucket=1), executors=3
    )
    tail = simulation.log[simulation.log.index("abort(e1)") + 1 :]
    assert tail == ["undo(2)", "undo(1)", "undo(0)", "release()"]
    assert result.unclean
    assert str(result.error) == "injected into bucket 1"
    assert any("undo of x1" in note for note in result.notes)


def test_an_executor_that_owes_no_undo_is_not_asked_for_one() -> None:
    """It handed none back."""
    desk = Desk("keeps", "forgets")
    desk.locked()
    desk.done("plan()", Desk.plan)
    desk.done("prepare(0)", value=True)
    desk.done("prepare(1)", value=False)
    desk.done("transport_open()")
    assert desk.told(e.Cancelled()) == ["transport_abort()", "abort(e0)", "abort(e1)"]
    for name in ("transport_abort()", "abort(e0)"):
        desk.done(name, Answer.reverted)
    assert desk.done("abort(e1)", Answer.reverted) == ["undo(0)"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_clean_up_that_raises_fails_the_round_that_had_been_published(index: int) -> None:
    """Those that had their good end are not undone; the others are. The version stays published."""
    simulation, result = run(Fault(Act.clean, "raise", bucket=index), executors=2)
    undone = [call for call in simulation.log if call.startswith("undo")]
    assert undone == [f"undo({number})" for number in (1, 0) if number >= index]
    assert result.path[-3:] == ("Cleaning", "Failed", "Released")
    assert (result.published, result.outcome, result.ok) == ("yes", Outcome.complete, False)
    assert str(result.error) == f"injected into clean({index})"


def test_an_executor_that_is_late_is_waited_for_in_failed_and_then_undone() -> None:
    """The round failed without it, but what it did in the end has to be undone."""
    desk = Desk("slow")
    desk.locked()
    desk.done("plan()", Desk.plan)
    assert desk.wait(1.01) == ["transport_abort()", "abort(e0)", "abort(e1)"]
    assert desk.state is State.Failed
    for name in ("transport_abort()", "abort(e0)", "abort(e1)"):
        assert desk.done(name, Answer.reverted) == []
    assert desk.done("prepare(0)", value=True) == ["undo(0)"]
    assert desk.done("undo(0)") == ["release()"]
    assert not desk.round.facts.unclean


def test_an_executor_that_never_comes_back_is_given_up() -> None:
    """The round ends unclean, in time, and says whom it waited for."""
    simulation, result = run(Fault(Act.prepare, "hang"), executors=2)
    assert result.unclean
    assert "x0 took longer than its limit" in str(result.error)
    assert "undo(1)" not in simulation.log


def test_undos_that_hang_keep_no_other_from_being_begun() -> None:
    """Not even when the round gives up in the middle of them: what is owed to an executor is begun."""
    stuck = [Fault(Act.undo, "hang", bucket=index) for index in (3, 2, 1)]
    trouble = [Fault(Act.broadcast, "raise", bucket=1), Fault(Act.abort, "hang", "e0")]
    simulation, result = run(*trouble, *stuck, executors=4)
    begun = [call for call in simulation.log if call.startswith("undo")]
    assert begun == ["undo(3)", "undo(2)", "undo(1)", "undo(0)"]
    assert result.unclean


# -- pausing (all or nothing) -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raise", "lost"])
def test_a_pause_that_fails_on_one_engine_is_undone_on_the_others(kind: Literal["raise", "lost"]) -> None:
    """No byte is sent; each of the others is told to end its session once, the culprit is told too."""
    simulation, result = run(Fault(Act.open, kind, "e1"), engines=3)
    assert "broadcast()" not in simulation.log
    assert [simulation.log.count(f"abort({name})") for name in ("e0", "e1", "e2")] == [1, 0, 1]
    assert simulation.log.count("fence(e1)") == 1
    assert (result.culprit, result.failed_in) == ("e1", "Locked")
    assert result.serving(Disposition.serving_old) == ("e0", "e2")
    states = [partner.machine.state for partner in simulation.world.partners.values()]
    assert states == [EngineState.Serving] * 3


def test_an_engine_that_fails_over_a_bucket_has_the_others_put_back() -> None:
    """All had begun; all are ended, and the next round opens every one of them."""
    simulation, result = run(Fault(Act.broadcast, "raise", "e1", bucket=1), engines=3)
    assert (result.culprit, result.failed_in) == ("e1", "Broadcasting")
    assert result.serving(Disposition.serving_old) == ("e0", "e2")
    following = Simulation(earlier=simulation)
    again = following.run()
    assert broken(following, again) == []
    assert again.outcome is Outcome.complete


# -- silence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [Act.open, Act.commit, Act.resume])
@pytest.mark.parametrize("kind", ["hang", "lost"])
def test_an_engine_that_says_nothing_is_lost_before_its_state_is(act: Act, kind: Any) -> None:
    """Its own limit is shorter than the state's, so that a quorum helps against silence, too."""
    simulation, result = run(Fault(act, kind, "e1"), engines=3, policy=quorum(2))
    assert result.outcome is Outcome.partial
    assert State.Failed.name not in result.path
    bad = result.engines[1]
    assert (bad.engine, bad.disposition) == ("e1", Disposition.quarantined)
    assert isinstance(bad.error, EngineSilent)
    assert f"did not answer {act.name} within" in str(bad.error)
    assert "fence(e1)" in simulation.log


def test_without_a_quorum_silence_fails_the_round_and_names_the_engine() -> None:
    """The others are put back, and the one that was silent is fenced."""
    _, result = run(Fault(Act.commit, "hang", "e1"), engines=3)
    assert (result.culprit, result.failed_in, result.published) == ("e1", "Cleaning", "no")
    assert isinstance(result.error, EngineSilent)


def test_a_receipt_that_never_comes_is_the_loss_of_its_engine() -> None:
    """Within the engine's own limit, which is shorter than the phase's, and by name."""
    simulation, result = run(Fault(Act.broadcast, "lost", "e1", bucket=2), engines=3)
    assert isinstance(result.error, EngineSilent)
    assert result.culprit == "e1"
    assert "engine e1 gave no receipt" in str(result.error)
    assert result.seconds["Awaiting"] < simulation.policy.limits().idle


def test_an_engine_that_a_transport_waits_for_is_lost_by_name() -> None:
    """It takes no bucket: its own limit ends that, unless something moves meanwhile."""
    desk = Desk(policy=Policy(deadline=4.0, lease=20.0, on_engine_failure="quarantine", quorum=1))
    desk.broadcasting()
    desk.driver.waiting_for(desk.members[1:], desk.clock.now())
    desk.wait(0.6)
    desk.driver.progress(desk.clock.now())
    assert desk.wait(0.3) == []
    desk.driver.waiting_for(desk.members[1:], desk.clock.now())
    assert desk.wait(0.4) == ["fence(e1)"]
    assert desk.state is State.Broadcasting
    assert desk.round.facts.evicted == {desk.members[1]}


def test_an_engine_whose_resume_fails_after_the_publication_is_quarantined() -> None:
    """The version is out: the round goes on without it."""
    _, result = run(Fault(Act.resume, "raise", "e0"), policy=quorum())
    assert (result.outcome, result.published) == (Outcome.partial, "yes")
    assert result.serving(Disposition.quarantined) == ("e0",)
    assert result.ok


def test_a_resume_that_fails_in_failed_leaves_the_round_unclean() -> None:
    """Putting back did not succeed there."""
    _, result = run(Fault(Act.publish, "raise"), Fault(Act.resume, "raise", "e0"))
    assert result.unclean
    assert "injected into publish()" in str(result.error)
    assert any("resume of e0" in note for note in result.notes)


def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    """The engine was given up on and fenced; its word is counted and logged."""
    desk = Desk(policy=Policy(deadline=4.0, lease=20.0, on_engine_failure="quarantine", quorum=1))
    desk.locked()
    desk.done("plan()", Desk.plan)
    desk.done("open(e0)")
    assert desk.wait(1.4) == ["fence(e1)"]
    facts = desk.round.facts
    assert desk.done("open(e1)") == []
    assert desk.round.facts is facts
    assert desk.driver.stale == 1
    assert desk.round.records()[-1].event == "stale"


GO_ON_WITH_ONE = Policy(deadline=4.0, lease=20.0, on_engine_failure="quarantine", quorum=1)


def opening(policy: Policy) -> Desk:
    """Three engines are being opened, and so is the transport."""
    desk = Desk(engines=3, policy=policy)
    desk.locked()
    desk.done("plan()", desk.plan)
    return desk


def test_whom_the_plan_does_not_fit_is_out_when_the_others_have_answered() -> None:
    """The transport may be waiting for it, so its own opening is not waited for."""
    desk = opening(GO_ON_WITH_ONE)
    misfit = PlanError("something else is sent")
    desk.done("open(e0)", error=misfit)
    desk.done("open(e1)")
    assert desk.round.facts.evicted == frozenset(), "e2 may say the same, and then the plan is to blame"
    assert "fence(e0)" in desk.done("open(e2)")
    assert desk.state is State.Locked
    assert "broadcast()" in desk.done("transport_open()")


@pytest.mark.parametrize("word", ["open", "receive"])
def test_a_receiving_half_joins_what_is_decided_about_the_plan(word: str) -> None:
    """It fails as its open does, and may say so before or after; each engine is heard once."""
    desk = opening(GO_ON_WITH_ONE)
    for member in desk.members:
        misfit = PlanError(f"not what {member} holds")
        ways = (
            lambda member=member, misfit=misfit: desk.done(f"open({member})", error=misfit),
            lambda member=member, misfit=misfit: desk.told(e.EngineLost(member, misfit), State.Locked),
        )
        for way in ways if word == "open" else reversed(ways):
            if desk.state is State.Locked:
                way()
    facts = desk.round.facts
    assert (desk.state, facts.evicted, facts.quarantined) == (State.Failed, frozenset(), frozenset())
    assert facts.cause is not None
    assert facts.cause.trigger == "PrepareFailed"


def test_of_a_later_phase_it_is_a_loss() -> None:
    """In Broadcasting the engines have taken the plan: whoever says otherwise now has changed."""
    desk = Desk(policy=GO_ON_WITH_ONE)
    desk.broadcasting()
    desk.told(e.EngineLost(desk.members[0], PlanError("not any more")), State.Broadcasting)
    assert desk.round.facts.evicted == {desk.members[0]}
