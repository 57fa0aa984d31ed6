"""Mutation twins: each breaks one promise in the product on purpose, and one named check must notice.

A check passes on the real code, and fails on the mutant with its own words; a check that cannot fail, or that
fails for another reason, is worth nothing.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from breakers import Patch, abort_nobody, answer_whoever_calls, set_to, undo_oldest_first
from weightsync.books import EngineBooks
from weightsync.conductor import Conductor
from weightsync.fsm import answers, reducer
from weightsync.fsm import round as round_module
from weightsync.fsm.calls import Act
from weightsync.fsm.driver import Driver
from weightsync.fsm.errors import LeaseEnded, LockError
from weightsync.fsm.facts import Cause
from weightsync.fsm.policy import Policy
from weightsync.fsm.record import Record
from weightsync.fsm.states import Disposition, EngineState, Outcome, State
from weightsync.handlers.observers import Observers
from weightsync.handlers.ports import RoundPort
from weightsync.testing.desk import Desk
from weightsync.testing.fakes import FakeWeights
from weightsync.testing.promises import broken
from weightsync.testing.scene import Trainer, close_all
from weightsync.testing.simulation import Fault, Simulation

pytestmark = [
    pytest.mark.mutation,
    # A mutant lets an observer's error end the observers' thread, as it is meant to.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

PATIENCE = 20.0
GO_ON = Policy(deadline=4.0, lease=2.0, on_engine_failure="quarantine", quorum=1)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


# -- checks -----------------------------------------------------------------------------------------------


def nothing_is_in_flight_at_the_release() -> None:
    """The lock is given back when everything asked for was answered, in a good round and in a failed one."""
    for faults in ((), (Fault(Act.broadcast, "raise", bucket=1),)):
        simulation = Simulation(faults=faults, executors=2)
        loose = [line for line in broken(simulation, simulation.run()) if "in flight" in line]
        assert loose == [], f"released too early: {loose}"


def the_first_error_is_the_error() -> None:
    """An undo fails after the transport did."""
    faults = [Fault(Act.broadcast, "raise", bucket=1), Fault(Act.undo, "raise")]
    error = str(Simulation(faults=faults).run().error)
    assert error == "injected into bucket 1", f"the first error was masked: {error}"


def undos_run_newest_first() -> None:
    """Three executors, prepared in order."""
    simulation = Simulation(faults=[Fault(Act.broadcast, "raise", bucket=1)], executors=3)
    simulation.run()
    undone = [call for call in simulation.log if call.startswith("undo")]
    assert undone == ["undo(2)", "undo(1)", "undo(0)"], f"undone in another order: {undone}"


def a_retry_asks_for_the_engines_of_now() -> None:
    """One of them was started anew."""
    trainer = Trainer(Policy(deadline=3.0, attempts=2))
    trainer.hand_over(1, FakeWeights(1))
    trainer.engines[1].restart()
    result = trainer.hand_over(2, FakeWeights(2))
    assert result.outcome is Outcome.complete, (
        f"the retry asked for an engine that is no more: {result.summary()}"
    )


def a_silent_engine_is_fenced() -> None:
    """It paused, and its answer was lost: the round goes on without it, and tells it so."""
    simulation = Simulation(engines=3, faults=[Fault(Act.open, "lost", "e1")], policy=GO_ON)
    simulation.run()
    state = simulation.world.partners["e1"].machine.state
    assert state is EngineState.Serving, f"e1 was left {state.name}"


def a_round_without_a_lease_stops() -> None:
    """No renewal comes through; when the lease is over the lock may be somebody else's."""
    policy = Policy(deadline=40.0, lease=1.0)
    faults = [Fault(Act.renew, "hang"), Fault(Act.broadcast, "hang", bucket=1)]
    simulation, seen = Simulation(faults=faults, policy=policy), set[State]()
    simulation.at(1.2, lambda: seen.add(simulation.round.state))
    result = simulation.run()
    assert State.Broadcasting not in seen, "still sending without a lease"
    assert isinstance(result.error, LeaseEnded), f"the lease's end was ignored: {result.error}"


def a_late_answer_is_stale() -> None:
    """The engine was given up on and fenced."""
    desk = Desk(policy=GO_ON)
    desk.locked()
    desk.done("plan()", Desk.plan)
    desk.wait(1.4)
    desk.done("open(e1)")
    assert desk.driver.stale == 1, "the late answer was taken for one"


def a_quorum_counts_who_was_asked_for() -> None:
    """Every engine must take part; one that did does not even say hello any more."""
    trainer = Trainer()
    trainer.hand_over(1, FakeWeights(1))
    trainer.engines[0].alive = False
    trainer.hand_over(2, FakeWeights(2))
    outcome = trainer.hand_over(3, FakeWeights(3)).outcome
    assert outcome is Outcome.failed, f"{outcome.name} without an engine that was asked for"


def a_version_is_used_up_by_a_commit_alone() -> None:
    """A round that failed while it sent leaves its number to the next one."""
    trainer = Trainer()
    trainer.transport.bad["bucket 1"] = OSError("bucket 1")
    versions = [trainer.hand_over(step, FakeWeights(step)).version for step in (1, 2, 3)]
    assert versions == [0, 0, 1], f"numbers were skipped: {versions}"


def progress_keeps_a_state_alive() -> None:
    """A bucket that moves, longer than a state may stand still."""
    policy = Policy(deadline=4.0, lease=20.0, idle=0.5)
    simulation = Simulation(policy=policy, faults=[Fault(Act.broadcast, "hang", bucket=1)])
    for beat in range(1, 40):
        simulation.at(0.1 * beat, lambda: simulation.driver.progress(simulation.clock.now()))
    seconds = simulation.run().seconds["Broadcasting"]
    assert seconds > 1.0, f"given up after {seconds:.2f} s although it moved"


def a_deadline_is_named() -> None:
    """What ends a state that moves all the while is the deadline of the round."""
    policy = Policy(deadline=4.0, lease=20.0, idle=0.5)
    simulation = Simulation(policy=policy, faults=[Fault(Act.broadcast, "hang", bucket=1)])
    for beat in range(1, 40):
        simulation.at(0.1 * beat, lambda: simulation.driver.progress(simulation.clock.now()))
    told = str(simulation.run().error)
    assert "at the round's deadline" in told, f"nobody knows what ended it: {told}"


def an_observers_error_is_its_own() -> None:
    """The others hear everything."""
    heard: list[int] = []

    def bad(record: Record) -> None:
        raise ValueError("disk full")

    observers = Observers([bad, lambda record: heard.append(record.seq)])
    observers.tell(Record(0.0, "note", "digest", "r", number) for number in range(3))
    told = observers.flush(0.5)
    observers.close(0.5)
    assert told, "one observer's error silenced the others"
    assert heard == [0, 1, 2], f"the others missed something: {heard}"


def an_unsure_lock_service_is_no_evidence() -> None:
    """It failed to say whether it granted: the ticket has to be cancelled."""
    desk = Desk()
    desk.done("acquire()", error=LockError("disk full"))
    calls = desk.done("transport_abort()")
    assert calls == ["release()"], f"Released without evidence: {calls}"


def a_pause_that_was_half_applied_is_undone() -> None:
    """One engine refuses to pause; the others are asked to end their session, and serve."""
    simulation = Simulation(engines=3, faults=[Fault(Act.open, "raise", "e1")])
    result = simulation.run()
    old = result.serving(Disposition.serving_old)
    assert old == ("e0", "e2"), f"only {old} are back"
    assert not result.unclean


def what_is_stuck_is_not_called_clean() -> None:
    """A transport that not even its abort can stop."""
    result = Simulation(faults=[Fault(Act.broadcast, "hang")]).run()
    assert result.unclean, "called clean with a broadcast under way"


def a_phase_that_is_over_wakes_its_transport() -> None:
    """The port had never been looked at."""
    desk = Desk()
    desk.awaiting()
    port = RoundPort(desk.driver, State.Awaiting, None, desk.clock, lambda *_: None)  # type: ignore[arg-type]
    woken: list[bool] = []
    port.on_change(lambda: woken.append(True))
    desk.wait(1.01)
    port.look()
    assert woken == [True], "the transport sleeps on"


# -- mutants ----------------------------------------------------------------------------------------------


def drop_the_wait(patch: Patch) -> None:
    """Put back and settle without waiting for anything."""
    real = Driver._busy
    late = (State.Cleaning, State.Failed)
    patch.setattr(Driver, "_busy", lambda self, beside: self.round.state not in late and real(self, beside))


def let_the_last_error_win(patch: Patch) -> None:
    """Every error in Failed becomes the cause."""

    def step(before: reducer.Position, event: Any) -> reducer.Step:
        taken, error = reducer.step(before, event), getattr(event, "error", None)
        if before.state is not State.Failed or error is None:
            return taken
        cause = Cause(type(event).__name__, before.state, None, error)
        return replace(taken, after=replace(taken.after, facts=replace(taken.after.facts, cause=cause)))

    patch.setattr(round_module, "step", step)


def remember_the_first_membership(patch: Patch) -> None:
    """Engines are asked who they are once."""
    real = EngineBooks.refresh

    def refresh(self: EngineBooks, limit: float, **which: Any) -> None:
        if any(entry.participant is None for entry in self.entries().values()):
            real(self, limit, **which)

    patch.setattr(EngineBooks, "refresh", refresh)


def count_the_survivors(patch: Patch) -> None:
    """Who cannot be reached is not asked for."""
    real = Conductor._cast

    def cast(self: Conductor, *whom: Any) -> Any:
        known = real(self, *whom)
        roster = {member: link for member, link in known.roster.items() if member not in known.lost}
        return replace(known, roster=roster, quorum=len(roster), lost={})

    patch.setattr(Conductor, "_cast", cast)


def number_every_round(patch: Patch) -> None:
    """Each round takes the next number, whatever became of the last one."""
    numbers = itertools.count()
    patch.setattr(Conductor, "_version_of", lambda self, *_: next(numbers))


def look_away_from_the_stuck(patch: Patch) -> None:
    """A transport's call that ran out of time in Failed is forgotten."""
    real = answers.Answers._transport_bad

    def transport_bad(self: answers.Answers, call: Any, error: BaseException) -> None:
        if self._driver.round.state is not State.Failed:
            real(self, call, error)

    patch.setattr(answers.Answers, "_transport_bad", transport_bad)


def forget_who_was_there(patch: Patch) -> None:
    """A new port believes that nobody takes part."""
    real = RoundPort.__init__

    def init(self: RoundPort, *args: Any) -> None:
        real(self, *args)
        self._seen = ()

    patch.setattr(RoundPort, "__init__", init)


def propagate(patch: Patch) -> None:
    """An observer is called like any function."""
    patch.setattr(Observers, "_safely", lambda self, observer, call, *args: call(*args))


@dataclass(frozen=True)
class Twin:
    """A mutant, the check that must notice it, and in which words."""

    mutate: Callable[[Patch], None]
    check: Callable[[], None]
    words: str


def only_the_time(self: Driver, now: float) -> None:
    """What ``progress`` does without feeding the idle limit."""
    self._now = now


TWINS: dict[str, Twin] = {
    "release before settle": Twin(drop_the_wait, nothing_is_in_flight_at_the_release, "released too early"),
    "a later error overwrites the first": Twin(
        let_the_last_error_win, the_first_error_is_the_error, "the first error was masked"
    ),
    "undo list not reversed": Twin(undo_oldest_first, undos_run_newest_first, "undone in another order"),
    "retry with the old membership": Twin(
        remember_the_first_membership, a_retry_asks_for_the_engines_of_now, "an engine that is no more"
    ),
    "no fence on silence": Twin(
        set_to(Driver, "fence", lambda self, engines: None), a_silent_engine_is_fenced, "e1 was left Paused"
    ),
    "lease end ignored": Twin(
        set_to(Driver, "leased", lambda self, until: None), a_round_without_a_lease_stops, "without a lease"
    ),
    "late answer accepted": Twin(answer_whoever_calls, a_late_answer_is_stale, "taken for one"),
    "quorum of the survivors": Twin(
        count_the_survivors, a_quorum_counts_who_was_asked_for, "complete without an engine"
    ),
    "version counted up on failure": Twin(
        number_every_round, a_version_is_used_up_by_a_commit_alone, "numbers were skipped"
    ),
    "progress ignored": Twin(
        set_to(Driver, "progress", only_the_time), progress_keeps_a_state_alive, "although it moved"
    ),
    "a deadline is not named": Twin(
        set_to(Driver, "_which_limit", lambda self: ""), a_deadline_is_named, "what ended it"
    ),
    "observer error propagates": Twin(propagate, an_observers_error_is_its_own, "silenced the others"),
    "any lock error is a refusal": Twin(
        set_to(answers, "_CLOSED", (LockError,)), an_unsure_lock_service_is_no_evidence, "without evidence"
    ),
    "nobody is aborted": Twin(abort_nobody, a_pause_that_was_half_applied_is_undone, "are back"),
    "a stuck transport is clean": Twin(
        look_away_from_the_stuck, what_is_stuck_is_not_called_clean, "called clean"
    ),
    "a new port has seen nobody": Twin(
        forget_who_was_there, a_phase_that_is_over_wakes_its_transport, "sleeps on"
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_the_real_code_passes(name: str) -> None:
    """The check holds of the product as it is."""
    TWINS[name].check()


@pytest.mark.parametrize("name", TWINS)
def test_the_mutant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails on the mutant, in its own words."""
    twin = TWINS[name]
    with monkeypatch.context() as patched:
        twin.mutate(patched)
        with pytest.raises(AssertionError, match=twin.words) as noticed:
            twin.check()
    words = str(noticed.value).splitlines()[0]
    print(f"driver > {name} > {twin.check.__name__}: {words}")  # noqa: T201 - who noticed it, and how
