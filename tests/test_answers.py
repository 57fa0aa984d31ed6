"""Answers: which fact each of them is, and what a partner's nonsense proves, which is nothing."""

from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm import guards
from weightsync.fsm.answers import examined
from weightsync.fsm.calls import Act
from weightsync.fsm.engine import Answer
from weightsync.fsm.errors import EngineError, LedgerError, PortClosed, ReceiptRefused, TransportError
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Participant, Receipt
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, Outcome, Publication, State
from weightsync.testing.desk import Desk
from weightsync.testing.promises import broken
from weightsync.testing.simulation import Fault, Simulation


def run(*faults: Fault, **options: Any) -> tuple[Simulation, RoundResult]:
    """A simulated round that kept every promise."""
    simulation = Simulation(faults=faults, **options)
    result = simulation.run()
    assert broken(simulation, result) == []
    return simulation, result


def quorum(count: int = 1) -> Policy:
    """A policy that goes on with ``count`` engines."""
    return Policy(deadline=4.0, lease=2.0, on_engine_failure="quarantine", quorum=count)


# -- receipts -----------------------------------------------------------------------------------------------

E0, E1 = Participant("e0"), Participant("e1")
BIG = Participant("e0", ranks=2)


def changed(receipt: Receipt, **values: Any) -> Receipt:
    """The same receipt with other values, as a forger would make it."""
    return Receipt._sealed(**{**receipt.to_json(), **values})


@pytest.mark.parametrize(
    ("forge", "engine", "why"),
    [
        (lambda good: (good,), E0, None),
        (lambda good: (), E0, "has 1 ranks, its receipts are of ranks \\[\\]"),
        (lambda good: (good, good), E0, "its receipts are of ranks \\[0, 0\\]"),
        (lambda good: (changed(good, rank=1),), E0, "its receipts are of ranks \\[1\\]"),
        (lambda good: (good,), E1, "came in the name of e1"),
        (lambda good: (changed(good, incarnation="9"),), E0, "came in the name of e0"),
        (lambda good: (changed(good, digest="other"),), E0, "digest is 'other', expected 'digest'"),
        (lambda good: (changed(good, epoch=9),), E0, "epoch is 9, expected 1"),
        (lambda good: (good,), Participant("e0", "7"), "owes no receipt to round r"),
        (lambda good: (good,), Participant("stranger"), "owes no receipt to round r"),
    ],
)
def test_a_receipt_that_proves_nothing_says_why(forge: Any, engine: Participant, why: str | None) -> None:
    """Exactly when the table's guard does not take it for a proof."""
    desk = Desk()
    desk.awaiting()
    event = examined(e.EngineAcked(engine, forge(desk.receipt(E0))), desk.round.facts)
    facts = desk.round.facts
    if engine in facts.members:
        assert (event.error is None) is guards.proves(facts, event)
    if why is None:
        assert event.error is None
    else:
        assert isinstance(event.error, ReceiptRefused)
        with pytest.raises(ReceiptRefused, match=why):
            raise event.error


def test_nobody_owes_a_receipt_before_there_is_a_plan() -> None:
    """Whatever it says."""
    desk = Desk()
    event = examined(e.EngineAcked(E0, (desk.receipt(E0),)), desk.round.facts)
    assert isinstance(event.error, ReceiptRefused)


def test_a_strangers_receipt_fails_the_round_with_its_reason() -> None:
    """Somebody who is no member answers for one: nothing of this round can be trusted."""
    desk = Desk()
    desk.awaiting()
    desk.told(e.EngineAcked(Participant("stranger"), (desk.receipt(E0),)), State.Awaiting)
    cause = desk.round.facts.cause
    assert cause is not None
    assert isinstance(cause.error, ReceiptRefused)


# -- the transport ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "state", "missing"),
    [("broadcast()", State.Broadcasting, "bucket"), ("collect()", State.Awaiting, "receipt")],
)
def test_a_transport_that_returns_without_having_told_everything_failed(
    act: str, state: State, missing: str
) -> None:
    """Nothing would come after it any more."""
    desk = Desk()
    (desk.broadcasting if state is State.Broadcasting else desk.awaiting)()
    assert "transport_abort()" in desk.done(act)
    cause = desk.round.facts.cause
    assert cause is not None
    assert str(cause.error) == f"{act[:-2]} returned without every {missing}"


def test_a_port_of_another_phase_is_stale() -> None:
    """Late words of a phase that is over are counted, and change nothing."""
    desk = Desk()
    desk.awaiting()
    before = desk.round.facts
    assert desk.told(e.BucketSent(1), State.Broadcasting) == []
    assert desk.told(e.EngineLost(desk.members[0], EngineError("late")), State.Broadcasting) == []
    assert desk.round.facts is before
    assert desk.driver.stale == 2


def test_a_transport_that_fires_what_the_table_refuses_is_counted_and_told() -> None:
    """Its round goes on as if nothing had been said, and ends by its time-out if nothing is."""
    desk = Desk()
    desk.broadcasting()
    assert desk.told(e.AllSent(), State.Broadcasting) == []
    assert (desk.driver.refused, desk.state) == (1, State.Broadcasting)
    record = desk.round.records()[-1]
    assert (record.event, record.trigger) == ("refused", "AllSent")
    assert "not legal in Broadcasting" in str(record.error)


@pytest.mark.parametrize(
    ("error", "fails"), [(PortClosed("moved on"), False), (TransportError("socket"), True)]
)
def test_an_error_after_the_phase_is_one_unless_it_says_so(error: Exception, fails: bool) -> None:
    """A transport that noticed that the round moved on did nothing wrong."""
    desk = Desk()
    desk.broadcasting()
    desk.told(e.BucketSent(0), State.Broadcasting)
    desk.told(e.AllSent(), State.Broadcasting)
    desk.done("broadcast()", error=error)
    assert desk.state is (State.Failed if fails else State.Awaiting)


@pytest.mark.parametrize("act", [Act.transport_open, Act.broadcast, Act.collect])
def test_a_transport_that_even_its_abort_cannot_stop_leaves_the_round_unclean(act: Act) -> None:
    """Something of it is still under way when the lock is given back, and the result says so."""
    _, result = run(Fault(act, "hang"))
    assert result.unclean
    assert any(f"later, {act.name}: RoundTimedOut" in note for note in result.notes)
    _, stopped = run(Fault(Act.broadcast, "hang", bucket=1))
    assert not stopped.unclean


# -- commit and publication -------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [True, False])
def test_a_publication_that_is_unsure_is_asked_for(published: bool) -> None:
    """The call failed, and the ledger knows: the round goes on, or fails with the call's error."""
    desk, error = Desk(engines=1), OSError("net")
    desk.cleaning()
    desk.done("bind()")
    assert desk.done("commit(e0)") == ["publish()"]
    assert desk.done("publish()", error=error) == ["ask()"]
    if published:
        assert desk.done("ask()", value=True) == ["resume(e0)"]
        assert desk.round.facts.publication is Publication.yes
    else:
        assert desk.done("ask()", value=False) == ["transport_abort()"]
        cause = desk.round.facts.cause
        assert cause is not None
        assert (cause.trigger, cause.error) == ("PublishFailed", error)


def test_a_publication_that_the_ledger_refuses_is_none() -> None:
    """It is an answer, so nobody asks again; who committed serves what it holds, unpublished."""
    desk, refusal = Desk(engines=1), LedgerError("a later round has published")
    desk.cleaning()
    desk.done("bind()")
    desk.done("commit(e0)")
    assert desk.done("publish()", error=refusal) == ["transport_abort()"]
    facts = desk.round.facts
    assert facts.cause is not None
    assert (facts.cause.trigger, facts.cause.error) == ("PublishFailed", refusal)
    assert facts.publication is Publication.no
    assert desk.done("transport_abort()") == ["resume(e0)"]
    assert facts.disposition(E0) is Disposition.serving_new


@pytest.mark.parametrize("late", [None, LedgerError("stale"), OSError("net")])
def test_the_first_answer_of_the_ledger_counts(late: Exception | None) -> None:
    """It was asked in Failed and has answered; what the publication itself says then is nothing new."""
    desk = Desk(engines=1)
    desk.cleaning()
    desk.done("bind()")
    desk.done("commit(e0)")
    assert desk.wait(1.01) == ["transport_abort()", "ask()"]
    desk.done("transport_abort()")
    desk.done("ask()", value=late is None)
    publication = desk.round.facts.publication
    assert desk.done("publish()", error=late) == ["resume(e0)"]
    assert desk.round.facts.publication is publication
    assert desk.driver.refused == 0


def test_a_version_that_the_ledger_refuses_is_not_published() -> None:
    """It says so before the lock's work begins, and its word is the error."""
    first, _ = run()
    simulation, result = run(version=0, content="other bytes", earlier=first)
    assert isinstance(result.error, LedgerError)
    assert (result.published, result.failed_in) == ("no", "Locked")
    assert "open(e0)" not in simulation.log


def test_a_number_that_cannot_be_bound_has_nobody_commit() -> None:
    """Every engine keeps the old version."""
    simulation, result = run(Fault(Act.bind, "raise"))
    assert not any(call.startswith("commit") for call in simulation.log)
    assert result.serving(Disposition.serving_old) == ("e0", "e1")
    assert str(result.error) == "injected into bind()"


def test_a_commit_that_is_refused_is_not_resumed() -> None:
    """With a quorum the round goes on; the engine is fenced."""
    simulation, result = run(Fault(Act.commit, "raise", "e0"), policy=quorum())
    assert result.outcome is Outcome.partial
    assert "resume(e0)" not in simulation.log
    assert "fence(e0)" in simulation.log


def aborted(answer: object, error: BaseException | None = None) -> tuple[Desk, list[str]]:
    """A round that failed in Broadcasting; e0 answers so, e1 well."""
    desk = Desk()
    desk.broadcasting()
    desk.done("broadcast()", error=TransportError("gone"))
    desk.done("transport_abort()")
    desk.done("abort(e1)", Answer.reverted)
    return desk, desk.done("abort(e0)", answer, error)


@pytest.mark.parametrize(
    ("answer", "disposition"),
    [
        (Answer.reverted, Disposition.serving_old),
        (Answer.torn, Disposition.quarantined),
        (Answer.committed, Disposition.quarantined),  # before anybody was told to
        (None, Disposition.quarantined),
        ("fine", Disposition.quarantined),
    ],
)
def test_what_an_engine_says_to_an_abort_decides_what_it_is(answer: object, disposition: Disposition) -> None:
    """Only its own word that it holds the old weights makes it serve them; nonsense proves nothing."""
    desk, calls = aborted(answer)
    assert calls[-1] == "release()"
    assert desk.round.facts.disposition(desk.members[0]) is disposition
    assert desk.round.facts.disposition(desk.members[1]) is Disposition.serving_old


def test_an_engine_that_fails_to_answer_an_abort_is_fenced() -> None:
    """Whatever its error is."""
    desk, calls = aborted(None, ValueError("no"))
    assert calls == ["fence(e0)", "release()"]
    assert desk.round.facts.disposition(desk.members[0]) is Disposition.quarantined
