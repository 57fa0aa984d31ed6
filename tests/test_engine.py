"""An engine rank at run time: whose events it takes in, what it proves, and what it says it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import engine as module
from weightsync.fsm.engine import Answer, EngineMachine
from weightsync.fsm.engine_table import (
    AbortOrdered,
    AllApplied,
    CommitBroke,
    CommitOrdered,
    EngineEvent,
    FrameSeen,
    LimitReached,
    Opened,
    ResumeOrdered,
    Session,
    ViewClosed,
)
from weightsync.fsm.errors import GuardFailed, IllegalEvent, Reentrant, StaleSession, TableError
from weightsync.fsm.explore_engine import SESSIONS, engine_alphabet, explore_engine
from weightsync.fsm.receipt import Expectation
from weightsync.fsm.states import EngineState

PLAN = Expectation("plan", tensors=3, bytes=12, buckets=2)
ONE, LATER = Session("one", 1, 1), Session("later", 2, 2)


def transfer(session: Session = ONE) -> list[EngineEvent]:
    """The facts of one transfer, up to its proof."""
    return [
        Opened(session, PLAN), FrameSeen(session, 0), FrameSeen(session, 1), AllApplied(session),
        ViewClosed(session, 3, 12, "digest"),
    ]  # fmt: skip


def rank(*events: EngineEvent, stages: bool = True) -> EngineMachine:
    """A rank to which these facts happened."""
    machine = EngineMachine("a", rank=1, stages=stages, incarnation="7")
    for event in events:
        machine.fire(event)
    return machine


# -- a good session -----------------------------------------------------------------------------------------


def test_a_good_session_goes_through_every_state() -> None:
    """From serving the old version to serving the new one; each fact leads one state on."""
    machine = rank()
    events = [*transfer(), CommitOrdered(ONE), ResumeOrdered(ONE)]
    assert [machine.fire(event).name for event in events] == [
        "Paused", "Receiving", "Receiving", "Releasing", "Acked", "Committed", "Serving",
    ]  # fmt: skip
    assert (machine.facts.version, machine.facts.committed, machine.refused) == (1, ONE, 0)


def test_a_life_has_a_name_of_its_own() -> None:
    """Unless it is given one, every incarnation is a new one."""
    first, second = EngineMachine("a"), EngineMachine("a")
    assert first.facts.incarnation != second.facts.incarnation
    assert (first.facts.rank, first.facts.stages, first.state) == (0, True, EngineState.Serving)


def test_the_word_to_resume_may_come_twice() -> None:
    """Whoever did not hear the answer asks again, and nothing happens."""
    machine = rank(*transfer(), CommitOrdered(ONE), CommitOrdered(ONE), ResumeOrdered(ONE))
    assert machine.fire(ResumeOrdered(ONE)) is EngineState.Serving
    assert machine.refused == 0


def test_a_rank_resumes_by_itself_when_its_trainer_is_gone() -> None:
    """It holds the new version whole, so that nothing speaks against serving it."""
    machine = rank(*transfer(), CommitOrdered(ONE), LimitReached(ONE))
    assert (machine.state, machine.facts.version) == (EngineState.Serving, 1)


# -- receipts -----------------------------------------------------------------------------------------------


def test_the_receipt_says_what_was_applied() -> None:
    """Round, epoch, engine, life and rank; the plan; and what the rank itself counted."""
    assert rank(*transfer()).receipt(ONE).to_json() == {
        "bytes": 12, "digest": "digest", "engine": "a", "epoch": 1, "fingerprint": "plan", "incarnation": "7",
        "rank": 1, "round": "one", "tensors": 3,
    }  # fmt: skip


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in place"])
def test_a_receipt_is_made_in_acked_only(stages: bool) -> None:
    """In every position that a rank can be in, and for every session: only Acked proves, and only its own."""
    made = 0
    for node in explore_engine(stages=stages).nodes:
        machine = rank(stages=stages)
        machine._snapshot = module._Snapshot(*node)
        for session in SESSIONS:
            if node.state is EngineState.Acked and node.facts.session == session:
                assert machine.receipt(session).round == session.round
                made += 1
            else:
                with pytest.raises(IllegalEvent, match="no receipt in"):
                    machine.receipt(session)
    assert made


# -- refusals -----------------------------------------------------------------------------------------------

STALE: list[tuple[str, list[EngineEvent], EngineEvent]] = [
    ("never opened", [], FrameSeen(ONE, 0)),
    ("a later one", transfer()[:2], FrameSeen(LATER, 1)),
    ("an earlier one", [Opened(ONE, PLAN), *transfer(LATER)], CommitOrdered(ONE)),
    ("the same epoch in another round", transfer(), CommitOrdered(Session("twin", 1, 1))),
    ("aborted", [*transfer(), AbortOrdered(ONE)], CommitOrdered(ONE)),
    ("given up by the rank", [*transfer()[:2], LimitReached(ONE)], FrameSeen(ONE, 1)),
    ("committed and resumed", [*transfer(), CommitOrdered(ONE), ResumeOrdered(ONE)], CommitOrdered(ONE)),
    ("aborted before it was opened", [AbortOrdered(ONE)], Opened(ONE, PLAN)),
    ("overtaken by a later abort", [*transfer(), AbortOrdered(LATER)], CommitOrdered(ONE)),
    ("opened again", [*transfer(), AbortOrdered(ONE)], Opened(ONE, PLAN)),
]


@pytest.mark.parametrize(("before", "event"), [case[1:] for case in STALE], ids=[case[0] for case in STALE])
def test_a_stale_session_is_refused_and_counted(before: list[EngineEvent], event: EngineEvent) -> None:
    """The error names the engine, the fact, its session and the one that is open; nothing has changed."""
    machine = rank(*before)
    kept = machine.state, machine.facts
    name = f"engine a refuses {type(event).__name__} of round {event.session.round} "
    with pytest.raises(StaleSession, match=rf"{name}\(epoch {event.session.epoch}\) in {machine.state.name}"):
        machine.fire(event)
    assert (machine.state, machine.facts) == kept
    assert machine.refused == 1


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (transfer()[:1], AllApplied(ONE)),
        (transfer()[:1], FrameSeen(ONE, 1)),
        (transfer()[:2], FrameSeen(ONE, 0)),
        (transfer()[:3], FrameSeen(ONE, 2)),
        (transfer()[:4], CommitOrdered(ONE)),
        (transfer(), ViewClosed(ONE, 3, 12)),
        (transfer(), Opened(ONE, PLAN)),
        (transfer(), ResumeOrdered(ONE)),
        ([*transfer(), CommitOrdered(ONE)], CommitBroke(ONE)),
    ],
    ids=[
        "too early",
        "out of order",
        "twice",
        "one too many",
        "no proof",
        "again",
        "open",
        "resume",
        "broke",
    ],
)
def test_a_fact_of_the_open_session_out_of_turn_is_illegal(
    before: list[EngineEvent], event: EngineEvent
) -> None:
    """It is an error of this session, not a stale one; counted as well, and nothing has changed."""
    machine = rank(*before)
    kept = machine.state, machine.facts
    with pytest.raises(IllegalEvent, match=f"{type(event).__name__} is not legal in {machine.state.name}"):
        machine.fire(event)
    assert (machine.state, machine.facts, machine.refused) == (*kept, 1)


class Evil:
    """A session that does something when a guard looks at it."""

    round, version = "evil", 1

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do

    @property
    def epoch(self) -> int:
        """Not what a guard expects."""
        self.do()
        return 1


def fails() -> None:
    """Raise, as a guard with a mistake in it would."""
    raise ZeroDivisionError("no weights, no ratio")


def test_a_guard_that_raises_refuses_the_event() -> None:
    """The error carries the guard's own; it is counted, and nothing has changed."""
    machine = rank()
    kept = machine.state, machine.facts
    event: Any = Opened(Evil(fails), PLAN)  # type: ignore[arg-type]
    with pytest.raises(GuardFailed, match="the guard newer") as refused:
        machine.fire(event)
    assert isinstance(refused.value.__cause__, ZeroDivisionError)
    assert (machine.state, machine.facts, machine.refused) == (*kept, 1)


def test_firing_from_inside_a_guard_is_refused() -> None:
    """It does not deadlock, and neither event changes anything; the next one is taken in."""
    machine = rank()
    event: Any = Opened(Evil(lambda: machine.fire(Opened(ONE, PLAN))), PLAN)  # type: ignore[arg-type]
    with pytest.raises(GuardFailed) as refused:
        machine.fire(event)
    assert isinstance(refused.value.__cause__, Reentrant)
    assert machine.fire(Opened(ONE, PLAN)) is EngineState.Paused


def test_two_readings_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should transitions and the table ever disagree, nothing is committed."""

    class Contrary:
        def decide(self, state: object, facts: object, event: object) -> EngineState:
            return EngineState.Quarantined

    monkeypatch.setattr(module, "_DECIDER", Contrary())
    machine = rank()
    with pytest.raises(TableError, match="machine and table disagree"):
        machine.fire(Opened(ONE, PLAN))
    assert machine.state is EngineState.Serving


# -- what it says it is -------------------------------------------------------------------------------------

ABORT = AbortOrdered(ONE)
ANSWERS: list[tuple[str, list[EngineEvent], Answer, Answer]] = [
    ("never opened", [ABORT], Answer.reverted, Answer.reverted),
    ("opened", [Opened(ONE, PLAN), ABORT], Answer.reverted, Answer.reverted),
    ("first frame", [*transfer()[:2], ABORT], Answer.reverted, Answer.torn),
    ("proven", [*transfer(), ABORT], Answer.reverted, Answer.torn),
    ("committed", [*transfer(), CommitOrdered(ONE), ABORT], Answer.committed, Answer.committed),
    (
        "resumed",
        [*transfer(), CommitOrdered(ONE), ResumeOrdered(ONE), ABORT],
        Answer.committed,
        Answer.committed,
    ),
    ("broken", [*transfer(), CommitBroke(ONE), ABORT], Answer.torn, Answer.torn),
    ("limit", [*transfer(), LimitReached(ONE), ABORT], Answer.reverted, Answer.torn),
    ("overtaken", [*transfer()[:2], Opened(LATER, PLAN), ABORT], Answer.reverted, Answer.torn),
]


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in place"])
@pytest.mark.parametrize("case", ANSWERS, ids=[case[0] for case in ANSWERS])
def test_what_a_rank_answers_to_an_abort(
    case: tuple[str, list[EngineEvent], Answer, Answer], stages: bool
) -> None:
    """Reverted only if the old weights are whole; committed by its commit; otherwise torn."""
    _, events, staged, in_place = case
    machine = rank(*events, stages=stages)
    assert machine.answer(ONE) is (staged if stages else in_place)


@pytest.mark.parametrize("events", [[], transfer()[:2], transfer()], ids=["never opened", "frames", "proven"])
def test_a_session_that_was_not_aborted_gets_no_answer(events: list[EngineEvent]) -> None:
    """As long as it can go on, or be opened, nobody can say that it is refused from now on."""
    with pytest.raises(IllegalEvent, match=r"a has not ended one \(epoch 1\)"):
        rank(*events).answer(ONE)


def test_a_commit_that_a_later_session_tore_is_not_claimed() -> None:
    """The rank held the first session's version, but holds a mix by now."""
    machine = rank(*transfer(), CommitOrdered(ONE), *transfer(LATER)[:2], stages=False)
    assert machine.answer(ONE) is Answer.torn
    machine.fire(AbortOrdered(LATER))
    assert (machine.state, machine.facts.version) == (EngineState.Quarantined, None)
    assert machine.answer(ONE) is Answer.torn


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in place"])
def test_an_answer_is_true_in_every_position(stages: bool) -> None:
    """Reverted means refused for ever; committed means that it serves this version; a mix is always torn."""
    said = engine_alphabet()
    for node in explore_engine(stages=stages).nodes:
        for session in SESSIONS:
            machine = rank(stages=stages)
            machine._snapshot = module._Snapshot(*node)
            machine.fire(AbortOrdered(session))
            answer, facts = machine.answer(session), machine.facts
            assert (answer is Answer.torn) is (facts.torn or machine.state is EngineState.Quarantined)
            if answer is Answer.committed:
                assert (facts.committed, facts.version) == (session, session.version)
            if answer is Answer.reverted:
                for event in said.values():
                    if event.session == session and isinstance(event, Opened | FrameSeen | CommitOrdered):
                        with pytest.raises(StaleSession):
                            machine.fire(event)


def test_a_quarantined_rank_is_cleared_by_a_commit_only() -> None:
    """A resend that is aborted leaves it where it was; one that commits makes it whole."""
    machine = rank(*transfer()[:2], ABORT, stages=False)
    assert machine.state is EngineState.Quarantined
    machine.fire(Opened(LATER, PLAN))
    assert machine.fire(AbortOrdered(LATER)) is EngineState.Quarantined
    third = replace(LATER, round="third", epoch=3, version=3)
    for event in [*transfer(third), CommitOrdered(third), ResumeOrdered(third)]:
        machine.fire(event)
    assert (machine.state, machine.facts.torn, machine.facts.version) == (EngineState.Serving, False, 3)


# -- threads ------------------------------------------------------------------------------------------------


def race(machine: EngineMachine, *events: EngineEvent) -> list[bool]:
    """Fire all of them at once, each from its own thread; which of them were taken in."""
    together = threading.Barrier(len(events))
    taken = [False] * len(events)

    def fire(place: int) -> None:
        together.wait()
        try:
            machine.fire(events[place])
        except StaleSession:
            return
        taken[place] = True

    threads = [threading.Thread(target=fire, args=(place,)) for place in range(len(events))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other threads run between the look at what is and the commit of what follows from it."""
    decider = module._DECIDER

    class Unhurried:
        def decide(self, state: EngineState, facts: object, event: object) -> object:
            time.sleep(0.001)
            return decider.decide(state, facts, event)

    monkeypatch.setattr(module, "_DECIDER", Unhurried())


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in place"])
def test_commit_and_abort_race_and_one_of_them_wins(stages: bool) -> None:
    """Either the rank committed, and the abort hears that, or the commit is refused: never a bit of both."""
    for _ in range(25):
        machine = rank(*transfer(), stages=stages)
        committed, aborted = race(machine, CommitOrdered(ONE), ABORT)
        assert aborted
        if committed:
            assert (machine.state, machine.answer(ONE)) == (EngineState.Committed, Answer.committed)
        else:
            left = EngineState.Serving if stages else EngineState.Quarantined
            assert (machine.state, machine.facts.committed) == (left, None)
            assert machine.answer(ONE) is (Answer.reverted if stages else Answer.torn)


@pytest.mark.usefixtures("unhurried")
def test_without_the_guard_both_would_win() -> None:
    """The race above can be lost: unguarded, the commit is taken in and is gone again, or the abort is."""
    for _ in range(100):
        machine = rank(*transfer())
        machine._guard = nullcontext  # type: ignore[assignment]
        if race(machine, CommitOrdered(ONE), ABORT) == [True, True]:
            assert (machine.state is EngineState.Committed) != (machine.facts.fenced >= ONE.epoch)
            return
    pytest.fail("a hundred races without a guard, and one of the two lost each time")


def test_of_many_openings_the_latest_is_open_in_the_end() -> None:
    """Whatever the order in which they get their turn, epochs only rise, and each refusal is counted."""
    for _ in range(50):
        machine = rank()
        sessions = [Session(f"round {epoch}", epoch, epoch) for epoch in range(1, 9)]
        taken = race(machine, *(Opened(session, PLAN) for session in sessions))
        assert machine.facts.session == sessions[-1]
        assert machine.refused == taken.count(False)
