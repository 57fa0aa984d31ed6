"""The trainer's books: what is written down of an engine is what this very life of it has proved."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightsync import LocalEngine, Policy, WeightSync, receiver_for
from weightsync.books import EngineBooks
from weightsync.fsm.contract import EngineStatus
from weightsync.fsm.engine_table import AllApplied, CommitOrdered, FrameSeen, Opened, Session, ViewClosed
from weightsync.fsm.errors import EngineError, EngineGone, EngineSilent, SetupError
from weightsync.fsm.executors import RoundView
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.results import EngineRow, RoundResult
from weightsync.fsm.states import Disposition, Outcome
from weightsync.handlers.lock import LocalLock
from weightsync.testing.fakes import HANG, FakeEngine, Gate

PLAN = Expectation("plan", 1, 1, 1)
PATIENCE = 20.0
"""Seconds that nothing honest takes."""


def result(version: int, **dispositions: Disposition) -> RoundResult:
    """What a round decided about the first life of these engines."""
    rows = tuple(
        EngineRow(name, "0", what, version if what is Disposition.serving_new else None, 1, 1, (), 0.0)
        for name, what in dispositions.items()
    )
    return RoundResult("r", 1, version, version + 1, 1, Outcome.complete, "yes", rows, (), {})


def committed(engine: FakeEngine, version: int, epoch: int | None = None) -> None:
    """The engine itself holds that version, by a round of that epoch."""
    session = Session("r", version + 1 if epoch is None else epoch, version)
    for event in (
        Opened(session, PLAN), FrameSeen(session, 0), AllApplied(session), ViewClosed(session, 1, 1),
        CommitOrdered(session),
    ):  # fmt: skip
        engine.machine.fire(event)


def both() -> tuple[FakeEngine, FakeEngine, EngineBooks]:
    """Two engines that were reached."""
    a, b = FakeEngine("a"), FakeEngine("b", stages=False)
    books = EngineBooks([a, b])
    books.refresh(5.0)
    return a, b, books


NEW, OLD, OUT = Disposition.serving_new, Disposition.serving_old, Disposition.quarantined


def test_engines_have_names_of_their_own() -> None:
    """Nobody is no crew, and two of one name are one too many."""
    with pytest.raises(SetupError, match="at least one engine"):
        EngineBooks([])
    with pytest.raises(SetupError, match="two engines are called 'a'"):
        EngineBooks([FakeEngine("a"), FakeEngine("a")])


def test_an_engine_that_was_never_reached_takes_part_without_an_incarnation() -> None:
    """It is asked for, so that a quorum counts it, and known to be out of reach."""
    a, b = FakeEngine("a"), FakeEngine("b")
    a.alive = False
    books = EngineBooks([a, b])
    books.refresh(5.0)
    assert list(books.roster()) == [Participant("a", "?"), Participant("b", "0")]
    ((member, error),) = books.unreachable().items()
    assert member == Participant("a", "?")
    assert isinstance(error, EngineGone)
    assert books.servable() == {}


def test_who_loads_in_place_says_so() -> None:
    """The adapter declares it when it is asked."""
    _, _, books = both()
    assert books.inplace() == {Participant("b", "0")}


def test_a_version_is_written_down_when_it_was_committed() -> None:
    """Old is what it was before, quarantined is none, and clears only by a commit."""
    _, _, books = both()
    assert books.servable() == {}
    books.settle(result(0, a=NEW, b=NEW))
    assert books.servable() == {"a": 0, "b": 0}
    books.settle(result(1, a=OLD, b=OUT))
    assert books.servable() == {"a": 0}
    assert books.tainted() == {Participant("b", "0")}
    books.settle(result(2, a=NEW, b=OLD))
    assert books.servable() == {"a": 2}
    books.settle(result(3, a=NEW, b=NEW))
    assert books.servable() == {"a": 3, "b": 3}
    assert books.tainted() == frozenset()


def test_who_is_certain_is_not_asked_again() -> None:
    """A quarantined engine is; everybody is when a router wants to know."""
    a, b, books = both()
    books.refresh(5.0)
    assert (a.words, b.words) == (["hello"], ["hello"])
    books.settle(result(0, a=NEW, b=OUT))
    books.refresh(5.0)
    assert (a.words.count("hello"), b.words.count("hello")) == (1, 2)
    books.refresh(5.0, everybody=True)
    assert (a.words.count("hello"), b.words.count("hello")) == (2, 3)


def test_a_restarted_engine_starts_with_nothing() -> None:
    """It inherits neither the version nor the place of the one that had its name."""
    a, b, books = both()
    for engine in (a, b):
        committed(engine, 5)
    books.settle(result(5, a=NEW, b=NEW))
    b.restart()
    books.refresh(5.0, everybody=True)
    assert books.servable() == {"a": 5}
    assert books.entries()["b"].participant == Participant("b", "1")
    assert books.entries()["b"].version is None


def test_a_restart_before_the_round_was_settled_inherits_nothing_either() -> None:
    """The round speaks of the life that took part in it."""
    a, b, books = both()
    for engine in (a, b):
        committed(engine, 5)
    b.restart()
    books.refresh(5.0, everybody=True)
    books.settle(result(5, a=NEW, b=NEW))
    assert books.servable() == {"a": 5}
    assert books.entries()["b"].version is None


def test_an_engine_that_says_another_version_than_the_books_is_not_servable() -> None:
    """Somebody else changed it: it is unproven until the next round."""
    a, _, books = both()
    books.settle(result(5, a=NEW, b=NEW))
    committed(a, 4)
    books.refresh(5.0, everybody=True)
    assert "a" not in books.servable()


def test_an_engine_that_says_it_is_quarantined_is_believed() -> None:
    """Whatever the books had."""
    _, b, books = both()
    committed(b, 5)
    books.settle(result(5, a=OLD, b=NEW))
    session = Session("r9", 9, 9)
    b.machine.fire(Opened(session, PLAN))
    b.machine.fire(FrameSeen(session, 0))
    b.abort(session)
    books.refresh(5.0, everybody=True)
    assert books.servable() == {}
    assert books.tainted() == {Participant("b", "0")}


def test_silent_engines_share_one_limit() -> None:
    """All are asked at once, and all are waited for together."""
    engines = [FakeEngine(name) for name in "abcdef"]
    for engine in engines[1:]:
        engine.bad["hello"] = HANG
    books = EngineBooks(engines)
    begun = time.monotonic()
    books.refresh(0.3)
    assert time.monotonic() - begun < 1.0
    assert set(books.unreachable()) == {Participant(name, "?") for name in "bcdef"}
    assert all(isinstance(error, EngineSilent) for error in books.unreachable().values())


def an_engine_that_starts_is_waited_for() -> None:
    """It has never said hello, and takes longer to than any engine that has."""
    engine, gate = FakeEngine("a"), Gate()
    engine.bad["hello"] = gate
    books = EngineBooks([engine])
    threading.Timer(0.4, gate.open).start()
    books.refresh(0.05, first=PATIENCE)
    assert books.unreachable() == {}, "it was given up while it started"
    assert books.entries()["a"].participant == Participant("a", "0")


def test_an_engine_that_was_never_reached_may_still_be_starting() -> None:
    """Its first contact has a limit of its own."""
    an_engine_that_starts_is_waited_for()


@pytest.mark.mutation
def test_a_twin_that_knows_one_limit_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first contact gets what every other one gets."""
    real = EngineBooks.refresh

    def refresh(self: EngineBooks, limit: float, *, first: float | None = None, **which: Any) -> None:
        real(self, limit, **which)

    monkeypatch.setattr(EngineBooks, "refresh", refresh)
    with pytest.raises(AssertionError, match="it was given up while it started"):
        an_engine_that_starts_is_waited_for()


def test_a_first_contact_is_waited_for_once() -> None:
    """Then it is an engine like any other; the message says how to wait longer."""
    engine = FakeEngine("a")
    engine.bad["hello"] = HANG
    books = EngineBooks([engine])
    books.refresh(0.05, first=0.3)
    (error,) = books.unreachable().values()
    assert "engine a did not say hello within 0.3 s" in str(error)
    assert "raise Policy(first_contact=...)" in str(error)
    books.refresh(0.05, first=10 * PATIENCE)
    (error,) = books.unreachable().values()
    assert "within 0.05 s" in str(error)


def test_an_engine_that_was_there_once_is_not_waited_for_so_long() -> None:
    """Everybody else would stand still for it."""
    a, _, books = both()
    a.bad["hello"] = HANG
    books.settle(result(0, a=OUT, b=NEW))
    books.refresh(0.05, first=10 * PATIENCE)
    (error,) = books.unreachable().values()
    assert "within 0.05 s; if it is only slow, raise Policy(engine_limit=...)" in str(error)


def test_nobody_waits_for_a_first_contact_that_is_not_wanted_any_more() -> None:
    """A round that was cancelled meanwhile says nothing about the engine."""
    engine, stop = FakeEngine("a"), threading.Event()
    engine.bad["hello"] = HANG
    books = EngineBooks([engine])
    threading.Timer(0.1, stop.set).start()
    books.refresh(0.05, first=10 * PATIENCE, stopped=stop.is_set)
    assert books.entries()["a"].error is None
    assert not books.entries()["a"].waited


@pytest.mark.parametrize("order", [1, -1])
def test_nobody_waits_minutes_to_hear_that_an_engine_is_dead(order: int) -> None:
    """One raised in its start, another one is still loading: there is no round without the first."""
    slow, dead = FakeEngine("slow"), FakeEngine("dead")
    slow.bad["hello"], dead.alive = HANG, False
    books = EngineBooks([slow, dead][::order])
    begun = time.monotonic()
    books.refresh(0.05, first=10 * PATIENCE, spare=0)
    assert time.monotonic() - begun < PATIENCE
    assert set(books.unreachable()) == {Participant("dead", "?")}
    books.refresh(0.05, first=0.3, spare=1)
    assert set(books.unreachable()) == {Participant("dead", "?"), Participant("slow", "?")}


@pytest.mark.parametrize("error", [RuntimeError("adapter"), TimeoutError("of its own"), EngineGone("dead")])
def test_an_engine_that_cannot_be_reached_is_not_servable_until_it_is(error: Exception) -> None:
    """Its version is kept if it may still be alive, and forgotten if it is not."""
    a, _, books = both()
    committed(a, 5)
    books.settle(result(5, a=NEW, b=OLD))
    a.bad["hello"] = error
    books.refresh(5.0, everybody=True)
    assert books.servable() == {}
    books.refresh(5.0)
    assert books.servable() == ({} if isinstance(error, EngineGone) else {"a": 5})


def test_a_link_that_raises_at_once_is_one_that_was_not_reached() -> None:
    """The other engines are asked all the same."""
    a, b = FakeEngine("a"), FakeEngine("b")
    error = OSError("no route")

    def refuse() -> None:
        raise error

    a.hello = refuse  # type: ignore[method-assign, assignment]
    books = EngineBooks([a, b])
    books.refresh(5.0)
    assert books.unreachable() == {Participant("a", "?"): error}
    assert books.entries()["b"].asked


def test_a_link_that_leads_to_another_engine_is_not_believed() -> None:
    """Its answer would be written down under the wrong name."""
    a, b = FakeEngine("a"), FakeEngine("b")
    books = EngineBooks([a, b])
    b.hello = a.hello  # type: ignore[method-assign]
    books.refresh(5.0)
    assert books.entries()["a"].asked
    error = books.entries()["b"].error
    assert isinstance(error, EngineError)
    assert "leads to one that calls itself a" in str(error)


def test_what_an_engine_said_before_a_round_does_not_undo_what_the_round_decided() -> None:
    """A router asks while a round runs; the answer comes when the round is over, and is older than it."""
    a, _, books = both()
    committed(a, 5)
    books.settle(result(5, a=NEW, b=NEW))
    gate = Gate()
    a.bad["hello"] = gate
    router = threading.Thread(target=books.refresh, args=(20.0,), kwargs={"everybody": True}, daemon=True)
    router.start()
    gate.await_visitor()
    books.settle(replace(result(6, a=OUT, b=NEW)))
    gate.open()
    router.join(20.0)
    assert not router.is_alive()
    assert books.servable() == {"b": 6}
    assert books.tainted() == {Participant("a", "0")}


def asked_while_a_round_ends(
    books: EngineBooks, engine: FakeEngine, then: Callable[[], None]
) -> dict[str, int]:
    """A router asks, the round of version 6 is over, ``then`` happens, and only now the answer comes."""
    gate, told = Gate(), []
    engine.bad["hello"] = gate
    router = threading.Thread(target=lambda: told.append(books.vouched(PATIENCE)), daemon=True)
    router.start()
    gate.await_visitor()
    committed(engine, 6)
    books.settle(result(6, a=NEW, b=NEW))
    then()
    gate.open()
    router.join(PATIENCE)
    (answer,) = told
    return answer


@pytest.mark.parametrize("what", ["restarts", "dies", "goes on"])
def test_an_engine_whose_answer_came_too_late_is_asked_again(what: str) -> None:
    """It was asked in a round, and is another one by the end of it: a router is not sent there."""
    a, b, books = both()
    for engine in (a, b):
        committed(engine, 5)
    books.settle(result(5, a=NEW, b=NEW))
    committed(b, 6)

    def then() -> None:
        if what == "restarts":
            a.restart()
        a.alive = what != "dies"

    servable = asked_while_a_round_ends(books, a, then)
    assert servable == ({"a": 6, "b": 6} if what == "goes on" else {"b": 6}), "it was vouched for unasked"


def test_an_engine_that_is_not_asked_again_in_time_is_left_out() -> None:
    """All of it takes one limit, and its silence for the rest of that is not held against it."""
    a, b, books = both()
    committed(b, 6)
    first: Future[EngineStatus] = Future()
    asked = threading.Event()

    def hello() -> Future[EngineStatus]:
        if asked.is_set():
            return Future()
        asked.set()
        return first

    status = a.hello().result()
    a.hello = hello  # type: ignore[method-assign]
    told: list[dict[str, int]] = []
    router = threading.Thread(target=lambda: told.append(books.vouched(1.0)), daemon=True)
    router.start()
    assert asked.wait(PATIENCE)
    books.settle(result(6, a=NEW, b=NEW))
    first.set_result(status)
    router.join(PATIENCE)
    assert told == [{"b": 6}]
    assert books.entries()["a"].error is None


def test_the_answer_to_an_older_question_does_not_undo_a_newer_one() -> None:
    """It was on its way for longer, and tells of the life before."""
    a, _, books = both()
    old: Future[EngineStatus] = Future()
    status, hello, asked = a.hello().result(), a.hello, threading.Event()

    def slow() -> Future[EngineStatus]:
        asked.set()
        return old

    a.hello = slow  # type: ignore[method-assign]
    router = threading.Thread(target=books.refresh, args=(PATIENCE,), kwargs={"everybody": True}, daemon=True)
    router.start()
    assert asked.wait(PATIENCE)
    a.hello = hello  # type: ignore[method-assign]
    a.restart()
    books.refresh(PATIENCE, everybody=True)
    old.set_result(status)
    router.join(PATIENCE)
    assert books.entries()["a"].participant == Participant("a", "1"), "an old answer was believed"


def opened(engine: FakeEngine, epoch: int) -> None:
    """A session is opened and ended, in which nothing is changed."""
    session = Session(f"r{epoch}", epoch, 9)
    engine.machine.fire(Opened(session, PLAN))
    engine.abort(session)


@pytest.mark.parametrize("then", ["nothing", "a round of ours fails", "a round of ours never touches it"])
def test_an_engine_that_another_trainer_committed_on_is_not_proven(then: str) -> None:
    """It says the same number, and may hold other bytes under it, until a round of ours proves it anew."""
    a, b, books = both()
    for engine in (a, b):
        committed(engine, 5)
    books.settle(result(5, a=NEW, b=NEW))
    committed(a, 5, epoch=7)
    if then != "nothing":
        books.begun(lambda: 8)
        if then == "a round of ours fails":
            opened(a, 8)
        books.settle(replace(result(5, a=OLD, b=OLD), epoch=8))
    assert books.vouched(PATIENCE) == {"b": 5}, "others' bytes were vouched for"
    assert books.behind(5) == ["a"]
    committed(a, 9)
    books.settle(result(9, a=NEW, b=OLD))
    assert books.vouched(PATIENCE) == {"a": 9, "b": 5}


def test_another_trainers_session_that_came_to_nothing_costs_nothing() -> None:
    """Nothing was changed; while it is open, nobody knows what comes of it."""
    a, b, books = both()
    for engine in (a, b):
        committed(engine, 5)
    books.settle(result(5, a=NEW, b=NEW))
    session = Session("r7", 7, 9)
    for engine in (a, b):
        engine.machine.fire(Opened(session, PLAN))
    assert books.vouched(PATIENCE) == {}, "an engine was vouched for in somebody else's session"
    for engine in (a, b):
        engine.abort(session)
    assert books.vouched(PATIENCE) == {"a": 5, "b": 5}, "an untouched engine is unproven"
    assert books.behind(5) == []


def test_another_trainers_session_that_tore_an_engine_is_seen_by_its_state() -> None:
    """One that stages is as it was, one that loads in place is a mix."""
    a, b, books = both()
    for engine in (a, b):
        committed(engine, 5)
    books.settle(result(5, a=NEW, b=NEW))
    session = Session("r7", 7, 9)
    for engine in (a, b):
        engine.machine.fire(Opened(session, PLAN))
        engine.machine.fire(FrameSeen(session, 0))
        engine.abort(session)
    assert books.vouched(PATIENCE) == {"a": 5}
    assert books.tainted() == {Participant("b", "0")}


def test_a_commit_of_ours_whose_answer_was_lost_proves_nothing() -> None:
    """The engine holds the number, and the round that could have said so counts it as lost."""
    a, _, books = both()
    committed(a, 5)
    books.settle(result(5, a=NEW, b=OUT))
    books.begun(lambda: 7)
    committed(a, 5, epoch=7)
    assert books.vouched(PATIENCE) == {"a": 5}  # the ledger has bound the number to the same bytes
    books.settle(replace(result(5, a=OUT, b=OUT), epoch=7))
    assert books.vouched(PATIENCE) == {}
    assert books.tainted() == {Participant("a", "0"), Participant("b", "0")}


def test_an_engine_that_does_not_say_its_last_commit_may_have_had_one_in_any_session() -> None:
    """Of an older version, or an adapter's: whatever another trainer did with it, it proves itself anew."""
    a, _, books = both()
    committed(a, 5)
    books.settle(result(5, a=NEW, b=OUT))
    real = a.hello

    def older() -> Future[EngineStatus]:
        answer: Future[EngineStatus] = Future()
        answer.set_result(replace(real().result(), committed=None))
        return answer

    a.hello = older  # type: ignore[method-assign]
    books.begun(lambda: 7)
    opened(a, 7)
    assert books.vouched(PATIENCE) == {"a": 5}
    opened(a, 8)
    assert books.vouched(PATIENCE) == {}


def test_what_another_trainer_did_is_not_hidden_by_a_failed_round_of_ours() -> None:
    """Two trainers of one lock with ledgers of their own, which is a mistake, and real engines."""
    lock, trouble = LocalLock(lease=2.0), Trouble()
    receivers = [receiver_for({"w": torch.zeros(8)}, name) for name in ("e0", "e1")]
    policy = Policy(deadline=6.0, lease=2.0)
    with (
        WeightSync(map(LocalEngine, receivers), policy=policy, lock=lock, handlers=[trouble]) as ours,
        WeightSync([LocalEngine(receivers[0])], policy=policy, lock=lock) as theirs,
    ):
        ours.begin(0, {"w": torch.ones(8)}, version=7).wait().require()
        theirs.begin(0, {"w": torch.full((8,), 99.0)}, version=7).wait().require()
        trouble.due = True
        for model in ({"w": torch.full((8,), 2.0)}, {"w": torch.ones(3)}):
            failed = ours.on_step_end(1, model)
            assert failed is not None
            assert not failed.ok
            assert ours.servable() == {"e1": 7}, "the failed round hid what the other trainer did"
        assert theirs.servable() == {"e0": 7}, "a round that changed nothing made an engine unproven"


class Trouble:
    """An executor that raises when it is due."""

    name, due = "trouble", False

    def prepare(self, round: RoundView) -> None:
        """Before the engines are paused."""
        if self.due:
            raise OSError("disk")

    def clean(self, round: RoundView) -> None:
        """Nothing."""


def test_rounds_of_our_own_leave_an_engine_proven() -> None:
    """While one runs, when it has failed, and when it has ended without a result."""
    a, _, books = both()
    committed(a, 5)
    books.settle(result(5, a=NEW, b=OUT))
    for epoch in (7, 8):
        books.begun(lambda epoch=epoch: epoch)  # type: ignore[misc]
        session = Session(f"r{epoch}", epoch, 9)
        a.machine.fire(Opened(session, PLAN))
        assert books.vouched(PATIENCE) == {"a": 5}, "a round of ours is taken for another trainer's"
        a.abort(session)
        assert books.vouched(PATIENCE) == {"a": 5}, "a round of ours made a good engine unproven"
    books.settle(replace(result(5, a=OLD, b=OUT), epoch=8))
    assert books.vouched(PATIENCE) == {"a": 5}
    committed(a, 5, epoch=9)
    assert books.vouched(PATIENCE) == {}
