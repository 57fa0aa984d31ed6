"""The journal: records alone lead back to every state and fact, and whatever does not fit is refused."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm.calls import Act
from weightsync.fsm.engine import EngineMachine
from weightsync.fsm.engine_table import AllApplied, FrameSeen, Opened, Session, ViewClosed
from weightsync.fsm.errors import IllegalEvent, ReplayMismatch
from weightsync.fsm.facts import opening
from weightsync.fsm.journal import event_from, replay
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Expectation, Participant, Receipt
from weightsync.fsm.reducer import Position
from weightsync.fsm.round import Identity, Round
from weightsync.fsm.rows import Row
from weightsync.fsm.states import State
from weightsync.fsm.table import ROUND
from weightsync.testing.simulation import Fault, Simulation

Log = list[dict[str, Any]]

FAULTS: tuple[tuple[Fault, ...], ...] = (
    (),
    (Fault(Act.open, "raise", "e0"),),
    (Fault(Act.broadcast, "raise", bucket=1),),
    (Fault(Act.broadcast, "corrupt", "e1"),),
    (Fault(Act.collect, "lost", "e0"), Fault(Act.abort, "hang", "e0")),
    (Fault(Act.commit, "raise", "e1"),),
    (Fault(Act.publish, "lost"),),
    (Fault(Act.publish, "hang"), Fault(Act.ask, "hang")),
    (Fault(Act.clean, "raise"), Fault(Act.undo, "raise")),
    (Fault(Act.release, "raise"),),
)


def lines(round: Round) -> Log:
    """The records as a log holds them."""
    return [json.loads(json.dumps(record.to_json())) for record in round.records()]


@pytest.mark.parametrize(
    "faults", FAULTS, ids=lambda faults: "+".join(str(f.act.name) for f in faults) or "good"
)
@pytest.mark.parametrize("quorum", ["fail", "quarantine"])
def test_the_records_of_a_round_replay_to_it(faults: tuple[Fault, ...], quorum: Any) -> None:
    """After a trip through JSON they give the same path, the same facts and the same outcome; many seeds."""
    for seed in range(10):
        policy = Policy(deadline=4.0, lease=2.0, on_engine_failure=quorum, quorum=1)
        simulation = Simulation(
            policy=policy, faults=faults, seed=seed, inplace=["e1"] * (seed % 2), jitter=0.1
        )
        result = simulation.run(cancel_at=0.07 if seed % 5 == 4 else None)
        steps = replay(lines(simulation.round))
        path = [State.Idle.name] + [step.after.state.name for step in steps if step.row.target is not None]
        after = steps[-1].after
        assert tuple(path) == result.path
        assert after == Position(simulation.round.state, simulation.round.facts)
        assert after.facts.outcome is result.outcome
        assert [after.facts.disposition(m).name for m in sorted(after.facts.roster)] == [
            row.disposition.name for row in result.engines
        ]


# -- any facts at all -----------------------------------------------------------------------------------

A, B, STRANGER = Participant("a"), Participant("b", "1", ranks=2), Participant("s")
PLAN = Expectation("plan", 2, 128, 2, "digest")


def receipts(engine: Participant, digest: str = "digest") -> tuple[Receipt, ...]:
    """One receipt a rank, as ranks that were driven to Acked make them."""
    session, made = Session("r", 1, 3), []
    for rank in range(engine.ranks):
        machine = EngineMachine(engine.id, rank=rank, incarnation=engine.incarnation)
        machine.fire(Opened(session, PLAN))
        for index in range(PLAN.buckets):
            machine.fire(FrameSeen(session, index))
        machine.fire(AllApplied(session))
        machine.fire(ViewClosed(session, PLAN.tensors, PLAN.bytes, digest))
        made.append(machine.receipt(session))
    return tuple(made)


def anything() -> tuple[e.Event, ...]:
    """Every kind of fact, good and bad, of members and of strangers."""
    errors = ValueError("told")
    told: list[e.Event] = [
        e.LockGranted(1), e.LockRefused(errors), e.Prepared(PLAN), e.PrepareFailed(errors),
        e.AllSent(), e.Published(), e.PublishFailed(), e.Cleaned(), e.CleanupFailed(), e.Unlocked(),
        e.UnlockFailed(), e.LeaseLost(errors), e.TransportFailed(errors), e.Cancelled(errors),
        *(e.BucketSent(index) for index in range(PLAN.buckets)),
        *(e.TimedOut(state) for state in State),
    ]  # fmt: skip
    for engine in (A, B, STRANGER):
        told += [
            e.EngineAcked(engine, receipts(engine)), e.EngineAcked(engine, receipts(engine, "other")),
            e.EngineLost(engine, errors), e.EngineCommitted(engine), e.CommitFailed(engine, errors),
            e.EngineReverted(engine),
        ]  # fmt: skip
    return tuple(told)


def bad(event: e.Event) -> bool:
    """Whether it leads to Failed, sooner or later."""
    harmful = (e.TimedOut, e.CleanupFailed, e.UnlockFailed)
    forged = isinstance(event, e.EngineAcked) and event.receipts[0].digest != PLAN.digest
    stranger = getattr(event, "engine", None) == STRANGER
    return forged or stranger or getattr(event, "error", None) is not None or isinstance(event, harmful)


def walks(count: int) -> Iterator[tuple[Round, list[Row[State]]]]:
    """Rounds that were told legal facts in random order, and the rows that were taken."""
    chance, alphabet = random.Random(1), anything()
    for _ in range(count):
        facts = opening(
            round="r", version=3, roster=[A, B], quorum=chance.choice((1, 2)),
            inplace=[A] * chance.choice((0, 1)), tainted=[B] * chance.choice((0, 1)),
        )  # fmt: skip
        round, rows = Round.open(facts, Identity(1, 1, "me"), at=0.0, wall=0.0), []
        calm = chance.choice((0.0, 0.9, 0.98, 1.0))
        for at in range(200):
            event = chance.choice(alphabet)
            if bad(event) and chance.random() < calm:
                continue
            try:
                rows.append(round.fire(event, at=at, wall=at).row)
            except IllegalEvent:
                continue
        yield round, rows


def test_every_fact_can_be_told_again_from_its_record() -> None:
    """Legal facts in random order: replay finds each of them, with the same row and the same facts."""
    seen: set[type[e.Event]] = set()
    for round, rows in walks(150):
        steps = replay(lines(round))
        assert [step.row for step in steps] == rows
        assert steps[-1].after == Position(round.state, round.facts)
        seen |= {row.event for row in rows}
    assert seen == set(e.EVENTS)


# -- what is refused ------------------------------------------------------------------------------------


def log(*faults: Fault) -> Log:
    """The log of a whole round."""
    simulation = Simulation(faults=faults)
    simulation.run()
    return lines(simulation.round)


def first(found: Log, **wanted: Any) -> dict[str, Any]:
    """The first record with these values."""
    return next(record for record in found if all(record.get(key) == value for key, value in wanted.items()))


def acked(found: Log) -> dict[str, Any]:
    """The first receipt that was told."""
    return first(found, trigger="EngineAcked")


def opened(found: Log) -> dict[str, Any]:
    """The record that opens the round."""
    return found[0]


def transition(trigger: str) -> Callable[[Log], dict[str, Any]]:
    """The first record of that fact."""
    return lambda found: first(found, trigger=trigger)


LIES: dict[str, tuple[Callable[[Log], dict[str, Any]], dict[str, Any], str]] = {
    "another table": (transition("Prepared"), {"table": "0123456789abcdef"}, "schema 1 and table 0123"),
    "another schema": (opened, {"schema": 2}, "made by schema 2"),
    "another round": (transition("AllSent"), {"round": "r9"}, "follows records of round r1"),
    "another version": (transition("AllSent"), {"version": 8}, "follows records of round r1, version 0"),
    "another epoch": (transition("Prepared"), {"epoch": 5}, "epoch is 5, replay gives 1"),
    "a gap": (transition("AllSent"), {"seq": 99}, "expected record"),
    "a second opening": (transition("AllSent"), {"event": "opened"}, "opened by its first record"),
    "no opening": (opened, {"event": "transition"}, "opened by its first record"),
    "half an opening": (opened, {"facts": {"roster": []}}, "opening is incomplete"),
    "an opening without a quorum": (opened, {"facts": {"roster": [], "quorum": 0}}, "opening is incomplete"),
    "another source": (transition("AllSent"), {"source": "Locked"}, "replay gives Broadcasting"),
    "another target": (transition("AllSent"), {"target": "Cleaning"}, "replay gives Awaiting"),
    "another guard": (transition("AllSent"), {"guard": "enough"}, "guard is enough, replay gives all_out"),
    "other facts": (transition("BucketSent"), {"facts": {"sent": 2}}, "facts is {'sent': 2}"),
    "no facts": (transition("BucketSent"), {"facts": None}, "facts is None"),
    "an unknown fact": (transition("AllSent"), {"trigger": "AllLost"}, "no event is called AllLost"),
    "an illegal fact": (transition("AllSent"), {"trigger": "Unlocked"}, "Unlocked is not legal"),
    "a bucket out of turn": (transition("BucketSent"), {"bucket": 1}, "BucketSent is not legal"),
    "no bucket": (transition("BucketSent"), {"bucket": None}, "BucketSent is not legal"),
    "no plan": (transition("Prepared"), {"facts": {}}, "Prepared is incomplete"),
    "a crooked plan": (transition("Prepared"), {"facts": {"plan": {"buckets": 3}}}, "Prepared is incomplete"),
    "an engine nobody knows": (acked, {"engine": "e7"}, "EngineAcked is incomplete"),
    "no receipt": (acked, {"facts": {"receipts": []}}, "target is Awaiting, replay gives Failed"),
    "no word of receipts": (acked, {"facts": {}}, "EngineAcked is incomplete"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_log_that_does_not_fit_is_refused(lie: str) -> None:
    """One value is changed; the error says which record it is and what was found there."""
    where, change, message = LIES[lie]
    found = log()
    record = where(found)
    seq = change.get("seq", record["seq"])
    record.update(change)
    with pytest.raises(ReplayMismatch) as caught:
        replay(found)
    assert message in str(caught.value)
    assert f"record {seq}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("digest", "forged"), ("round", "r0"), ("epoch", 9), ("engine", "e9"), ("incarnation", "9"),
        ("fingerprint", "forged"), ("bytes", 1), ("tensors", 9), ("rank", 1), ("bytes", "192"),
        ("bytes", True),
    ],
)  # fmt: skip
def test_a_forged_receipt_is_refused(name: str, value: Any) -> None:
    """The record says that the receipt proved it; replay looks at the receipt."""
    found = log()
    record = acked(found)
    record["facts"]["receipts"][0][name] = value
    with pytest.raises(ReplayMismatch, match=f"record {record['seq']}"):
        replay(found)


def test_a_receipt_with_a_field_too_many_or_too_few_is_refused() -> None:
    """Its fields are known."""
    for change in ({"colour": "red"}, None):
        found = log()
        receipt = acked(found)["facts"]["receipts"][0]
        if change is None:
            del receipt["digest"]
        else:
            receipt.update(change)
        with pytest.raises(ReplayMismatch, match="not a receipt"):
            replay(found)


def test_a_missing_record_is_noticed() -> None:
    """Whichever is missing, the next one's number gives it away, and it is named."""
    whole = log()
    for index in range(len(whole) - 1):
        found = copy.deepcopy(whole)
        del found[index]
        with pytest.raises(ReplayMismatch):
            replay(found)


def test_the_beginning_of_a_log_is_a_log() -> None:
    """A round that is still under way, or whose trainer died, replays as far as it is written."""
    whole = log(Fault(Act.broadcast, "raise", bucket=1))
    for end in range(len(whole)):
        transitions = sum(record["event"] == "transition" for record in whole[:end])
        assert len(replay(whole[:end])) == transitions


def test_a_time_out_without_its_phase_is_refused() -> None:
    """The phase decides whether it was due, so a record without it tells nothing."""
    found = log(Fault(Act.broadcast, "hang", bucket=1))
    late = first(found, trigger="TimedOut")
    facts = opening(round="r", version=0, roster=[A], quorum=1)
    assert event_from(late, facts) == e.TimedOut(State.Broadcasting)
    for told in ({}, {"phase": "Nowhere"}):
        with pytest.raises(ReplayMismatch, match="TimedOut is incomplete"):
            event_from({**late, "facts": told}, facts)


def test_the_rows_named_in_a_log_are_the_tables() -> None:
    """A record's digest is the table's own, so that another table's log cannot be read by mistake."""
    assert {record["table"] for record in log()} == {ROUND.digest}
