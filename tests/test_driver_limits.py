"""The driver's patience: the lock's lease and its evidence, limits of states and calls, cancellation."""

from collections.abc import Callable
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm.calls import Act
from weightsync.fsm.driver import Driver
from weightsync.fsm.engine import Answer
from weightsync.fsm.errors import LeaseEnded, LockError, RoundTimedOut
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, Outcome, State
from weightsync.fsm.tickets import Ending, NotHolder, TicketClosed, UnknownTicket
from weightsync.testing.desk import Desk
from weightsync.testing.promises import broken
from weightsync.testing.simulation import Fault, Injected, Simulation


def run(*faults: Fault, **options: Any) -> tuple[Simulation, RoundResult]:
    """A simulated round that kept every promise."""
    slack = options.pop("slack", 0.0)
    simulation = Simulation(faults=faults, **options)
    result = simulation.run()
    assert broken(simulation, result, slack=slack) == []
    return simulation, result


# -- the lock ---------------------------------------------------------------------------------------------


def test_the_lease_is_renewed_for_as_long_as_the_round_needs() -> None:
    """Three leases long, with progress: a renewal every third, one epoch, one owner."""
    simulation = Simulation(
        buckets=2, policy=Policy(deadline=40.0, lease=2.0), faults=[Fault(Act.broadcast, "hang", bucket=1)]
    )
    for beat in range(1, 13):
        simulation.at(0.5 * beat, lambda: simulation.driver.progress(simulation.clock.now()))
    simulation.at(6.5, lambda: simulation.hear(e.Cancelled(Injected("enough"))))
    result = simulation.run()
    assert broken(simulation, result) == []
    assert simulation.log.count("renew()") in range(9, 12)
    assert str(result.error) == "enough"
    assert [closed.how for closed in simulation.world.book.closed] == [Ending.RELEASED]


STUCK: dict[State, Fault] = {
    State.Locked: Fault(Act.transport_open, "hang"),
    State.Broadcasting: Fault(Act.broadcast, "hang", bucket=1),
    State.Awaiting: Fault(Act.broadcast, "hang", "e0"),
    State.Cleaning: Fault(Act.bind, "hang"),
}


@pytest.mark.parametrize("state", STUCK)
@pytest.mark.parametrize("kind", ["hang", "raise"])
def test_a_lease_that_ends_fails_the_round_in_every_state(state: State, kind: Any) -> None:
    """The transfer is still settled before Released, and nothing is published. Why it ended is said."""
    _, result = run(Fault(Act.renew, kind), STUCK[state], policy=Policy(deadline=40.0, lease=1.0), slack=1.0)
    assert isinstance(result.error, LeaseEnded)
    cause = result.error.__cause__
    assert cause is not None
    assert str(result.error).endswith(f"renewed: {cause}")
    assert (result.failed_in, result.published) == (state.name, "no")
    assert result.path[-2:] == ("Failed", "Released")


def test_the_end_of_a_lease_frees_a_round_whose_release_is_never_answered() -> None:
    """Released only then: by the holder's clock, which comes before the keeper's."""
    simulation, result = run(Fault(Act.release, "hang"), slack=2.0)
    assert (result.outcome, result.path[-2:]) == (Outcome.complete, ("Failed", "Released"))
    assert isinstance(result.error, LockError)
    assert [closed.how for closed in simulation.world.book.closed] == [Ending.EXPIRED]
    retries = [record.event for record in simulation.round.records() if record.trigger == "RetryRelease"]
    assert retries[:2] == ["retry", "retry"]
    assert set(retries[2:]) == {"escalation"}


def test_a_release_that_fails_is_tried_again_until_it_works() -> None:
    """The first answer is lost for good; the second attempt finds the lock given back."""
    desk = Desk(engines=1)
    desk.locked()
    desk.told(e.Cancelled())
    desk.done("plan()", Desk.plan)
    desk.done("transport_abort()")
    assert desk.done("abort(e0)", Answer.reverted) == ["release()"]
    assert desk.done("release()", error=OSError("net")) == []
    assert desk.wait(0.2) == ["release()"]
    desk.done("release()")
    assert desk.driver.over


@pytest.mark.parametrize("error", [TicketClosed("over"), UnknownTicket("who"), NotHolder("no")])
def test_a_ticket_that_the_service_calls_closed_is_refused(error: Exception) -> None:
    """Evidence: the lock is not held, and nothing is left to give back."""
    desk = Desk()
    assert desk.done("acquire()", error=error) == ["transport_abort()"]
    desk.done("transport_abort()")
    assert desk.driver.over
    assert desk.driver.result().error is error


@pytest.mark.parametrize("error", [LockError("disk full"), OSError("net"), ValueError("what")])
def test_any_other_error_of_the_lock_service_is_no_evidence(error: Exception) -> None:
    """The ticket may be in its queue, so it is cancelled before the round is over."""
    desk = Desk()
    assert desk.done("acquire()", error=error) == ["transport_abort()"]
    assert desk.done("transport_abort()") == ["release()"]
    assert desk.done("release()") == []
    assert desk.driver.over
    assert desk.driver.result().error is error


def test_an_error_of_a_request_that_was_cancelled_proves_nothing() -> None:
    """The round waits for the answer to its release."""
    desk = Desk()
    desk.told(e.Cancelled())
    assert desk.done("transport_abort()") == ["release()"]
    assert desk.done("acquire()", error=LockError("nobody waits any more")) == []
    assert not desk.driver.over
    desk.done("release()")
    assert desk.driver.over


@pytest.mark.parametrize("moment", [2.9, 2.97, 2.99, 2.995, 3.0, 3.002, 3.005, 3.01, 3.02])
def test_a_grant_that_crosses_the_time_out_is_handed_back(moment: float) -> None:
    """Granted a moment before or after the round gave up: either way the lock is free at once."""
    for seed in range(5):
        simulation, result = run(rival=moment, seed=seed)
        ours = [c.how for c in simulation.world.book.closed if c.ticket.round == simulation.name]
        assert ours in ([Ending.CANCELLED], [Ending.HANDED_BACK], [Ending.RELEASED])
        assert result.path[:2] in (("Idle", "Failed"), ("Idle", "Locked"))


def test_a_waiter_gets_the_lock_when_its_holder_gives_it_back() -> None:
    """And then has a round like every other."""
    simulation, result = run(rival=1.5)
    assert result.ok
    assert result.seconds["Idle"] == pytest.approx(1.5, abs=0.1)
    assert "renew()" not in simulation.log


def test_a_lock_service_that_never_answers_costs_no_more_than_it_must() -> None:
    """Neither the request nor the release: a question, a ticket and a grant run out, one after the other."""
    simulation, result = run(Fault(Act.acquire, "die"), slack=2.0 * 7 / 3)
    assert result.path == ("Idle", "Failed", "Released")
    assert simulation.world.book.epoch == 0


def test_a_renewal_that_is_answered_after_the_end_of_the_work_arms_nothing() -> None:
    """There is nothing left to renew the lease for."""
    desk = Desk(engines=1, policy=Policy(deadline=4.0, lease=2.0))
    desk.locked()
    assert desk.wait(0.7) == ["renew()"]
    desk.told(e.Cancelled())
    desk.done("plan()", Desk.plan)
    desk.done("transport_abort()")
    desk.done("abort(e0)", Answer.reverted)
    desk.done("renew()", desk.clock.now() + 2.0)
    assert "renew()" not in desk.wait(0.3)


def test_who_was_frozen_for_longer_than_his_lease_blames_nobody() -> None:
    """It wakes, and its lease and its patience with an engine are both over: no engine is to blame."""
    desk = Desk(policy=Policy(deadline=12.0, idle=4.0, engine_limit=2.5, lease=2.0))
    desk.locked()
    desk.done("plan()", Desk.plan)
    desk.wait(3.0)
    assert desk.state is State.Failed
    cause = desk.round.facts.cause
    assert cause is not None
    assert isinstance(cause.error, LeaseEnded)


def test_of_several_that_are_silent_each_is_named() -> None:
    """One of them may hold up the others: the first is lost, and the line tells of all."""
    desk = Desk(engines=3, policy=Policy(deadline=12.0, engine_limit=1.0, lease=20.0))
    desk.awaiting()
    desk.told(e.EngineAcked(desk.members[1], (desk.receipt(desk.members[1]),)), State.Awaiting)
    desk.wait(1.1)
    cause = desk.round.facts.cause
    assert cause is not None
    assert str(cause.error) == "engine e0 gave no receipt for 1.1 s, nor did e2"


# -- clocks -----------------------------------------------------------------------------------------------


def stuck_at_a_bucket(keep_moving: Callable[[Simulation], None], **options: Any) -> tuple[float, RoundResult]:
    """How long a round lasts that never gets beyond its first bucket."""
    simulation = Simulation(
        policy=Policy(deadline=4.0, lease=20.0, **options), faults=[Fault(Act.broadcast, "hang", bucket=1)]
    )
    keep_moving(simulation)
    result = simulation.run()
    assert broken(simulation, result) == []
    return sum(result.seconds.values()), result


def test_a_state_ends_when_nothing_moves() -> None:
    """By the idle limit, which says how long that was."""
    took, result = stuck_at_a_bucket(lambda simulation: None, idle=0.5)
    assert took == pytest.approx(0.6, abs=0.1)
    assert "0.5 s without progress, waiting for broadcast()" in str(result.error)
    assert "deadline" not in str(result.error), "the round had time left"


def test_progress_feeds_the_idle_limit_and_nothing_else() -> None:
    """A state that moves lives on, but the way forward has an end all the same."""

    def keep_moving(simulation: Simulation) -> None:
        for beat in range(1, 100):
            simulation.at(0.1 * beat, lambda: simulation.driver.progress(simulation.clock.now()))

    took, result = stuck_at_a_bucket(keep_moving, idle=0.5)
    assert took == pytest.approx(3.0, abs=0.1)
    assert isinstance(result.error, RoundTimedOut)
    assert "ran out of time at the round's deadline, which leaves 3 s for all states" in str(result.error)


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.02, 0.03])
def test_a_cancellation_before_the_last_receipt_fails_the_round(moment: float) -> None:
    """Its error is what the canceller said; every engine keeps what it had."""
    simulation = Simulation()
    result = simulation.run(cancel_at=moment)
    assert broken(simulation, result) == []
    assert str(result.error) == "cancelled"
    assert result.serving(Disposition.serving_old) == ("e0", "e1")


def test_a_cancellation_after_the_last_receipt_lets_the_round_finish() -> None:
    """The engines hold the bytes: the version is published."""
    desk = Simulation()
    desk.run()
    when = next(
        record.time - desk.round.records()[0].time
        for record in desk.round.records()
        if record.target == "Cleaning"
    )
    simulation = Simulation()
    result = simulation.run(cancel_at=when + 0.001)
    assert broken(simulation, result) == []
    assert result.ok


def a_long_generation_is_waited_for() -> None:
    """It ends after the limit of one engine and that of a state, within the limit for it."""
    desk = Desk(policy=Policy(deadline=16.0, idle=2.0, engine_limit=1.0, drain=6.0, lease=60.0))
    desk.locked()
    desk.done("plan()", Desk.plan)
    desk.done("open(e0)")
    assert desk.done("transport_open()") == []
    assert desk.wait(5.0) == [], "an engine that generates was given up"
    assert desk.done("open(e1)") == ["broadcast()"]


def an_engine_that_never_pauses_is_lost_by_name() -> None:
    """By its own limit, before the state runs out of time; the error says which limit that is."""
    policy = Policy(deadline=16.0, idle=2.0, drain=6.0, lease=60.0, on_engine_failure="quarantine", quorum=1)
    desk = Desk(policy=policy)
    desk.locked()
    desk.done("plan()", Desk.plan)
    desk.done("open(e0)")
    desk.done("transport_open()")
    assert desk.wait(5.9) == []
    assert "fence(e1)" in desk.wait(0.2), "the engine was not named"
    (error,) = (str(record.error) for record in desk.round.records() if record.trigger == "EngineLost")
    assert "did not answer open within 6 s" in error
    assert "raise Policy(drain=...)" in error


def test_a_generation_that_runs_long_has_a_limit_of_its_own() -> None:
    """Neither the limit of a silent engine nor that of a state that stands still ends it."""
    a_long_generation_is_waited_for()


def test_an_engine_that_never_pauses_is_told_from_a_state_that_stands_still() -> None:
    """A quorum goes on without it."""
    an_engine_that_never_pauses_is_lost_by_name()


def test_the_deadline_bounds_a_pause_as_well() -> None:
    """The lock came late, so the round is over before the engine's limit is."""
    desk = Desk(policy=Policy(deadline=16.0, drain=9.0, lease=60.0))
    desk.wait(5.0)
    desk.locked()
    desk.done("plan()", Desk.plan)
    desk.done("open(e0)")
    desk.done("transport_open()")
    assert desk.wait(6.9) == []
    assert "abort(e1)" in desk.wait(0.2)
    assert "waiting for open(e1)" in str(desk.round.facts.cause.error)  # type: ignore[union-attr]


def _treat_a_pause_like_any_word(patch: pytest.MonkeyPatch) -> None:
    """The limit of one word to an engine."""
    real = Driver._each

    def each(self: Driver, act: Act, engines: Any, limit: float | None = None) -> None:
        real(self, act, engines, None if act is Act.open else limit)

    patch.setattr(Driver, "_each", each)


def _let_the_state_stand_still(patch: pytest.MonkeyPatch) -> None:
    """Nobody sees that an engine may be ending its generations."""
    patch.setattr(Driver, "_pausing", lambda self: False)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("mutant", "check", "words"),
    [
        (_treat_a_pause_like_any_word, a_long_generation_is_waited_for, "was given up"),
        (_let_the_state_stand_still, a_long_generation_is_waited_for, "was given up"),
        (_let_the_state_stand_still, an_engine_that_never_pauses_is_lost_by_name, r"== \[\]"),
    ],
)
def test_twins_of_the_limit_of_a_pause(
    mutant: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[], None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each breaks the limit on purpose, and its check must notice."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        check()


def test_a_plan_that_is_none_never_becomes_a_round() -> None:
    """Nothing was agreed on, so nothing is sent; the state's limit ends it."""
    desk = Desk(engines=1)
    desk.locked()
    desk.done("plan()", None)
    desk.done("open(e0)")
    assert desk.done("transport_open()") == []
    assert "abort(e0)" in desk.wait(1.01)
    assert desk.state is State.Failed
