"""Ctrl-C at any instant: a round is before a fact or after it, and the next fact finds it usable.

A timer's signal, whose handler raises, comes at a moment drawn at random while the main thread fires, notes
and reads. Nothing is mocked: wherever CPython lets a signal in, it is let in here.
"""

import json
import random
import threading
import time
from collections.abc import Iterator

import pytest

from weightsync.fsm import events as e
from weightsync.fsm import round as round_module
from weightsync.fsm.facts import opening
from weightsync.fsm.journal import replay
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.reducer import Position, begin
from weightsync.fsm.round import Identity, Round
from weightsync.fsm.states import State
from weightsync.testing.interrupting import Interrupt, Interrupter

A, B = Participant("a"), Participant("b")
STORY: tuple[e.Event, ...] = (
    e.EngineLost(Participant("stranger")),
    e.LockGranted(1),
    e.Prepared(Expectation("plan", 2, 128, 3, "digest")),
    e.BucketSent(0),
    e.BucketSent(1),
    e.EngineLost(B),
    e.BucketSent(2),
    e.AllSent(),
    e.TimedOut(State.Awaiting),
    e.EngineReverted(A),
    e.Cleaned(),
    e.Unlocked(),
)
"""A round that goes wrong and ends, without anybody else's help."""

WANTED, ENOUGH, MOST_SECONDS = 500, 50, 4.0


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    """An interrupter that has the timer's signal for itself."""
    with Interrupter() as interrupter:
        yield interrupter


def opened() -> Round:
    """A round in Idle."""
    facts = opening(round="r", version=1, roster=[A, B], quorum=1)
    return Round.open(facts, Identity(), at=0.0, wall=0.0)


def tell(round: Round) -> None:
    """The whole story, with a note and a look at the records after each fact."""
    for at, event in enumerate(STORY):
        round.fire(event, at=float(at), wall=float(at))
        round.note("note", wall=float(at), trigger="test")
        round.records(at)


def check_whole(round: Round) -> None:
    """The records have no gap and lead to exactly the state and the facts that the round shows."""
    records = [json.loads(json.dumps(record.to_json())) for record in round.records()]
    steps = replay(records)
    after = steps[-1].after if steps else begin(round.facts)[0]
    assert after == Position(round.state, round.facts)
    transitions = [record["trigger"] for record in records if record["event"] == "transition"]
    assert transitions == [type(event).__name__ for event in STORY[: len(transitions)]]
    notes = sum(record["event"] == "note" for record in records)
    assert len(transitions) - notes in (0, 1)


def check_usable(round: Round) -> None:
    """The next fact is taken, from this thread and from another: nobody holds the commit's lock."""
    before = len(round.records())
    elsewhere = threading.Thread(target=lambda: round.fire(e.Cancelled(), at=99.0, wall=99.0), daemon=True)
    elsewhere.start()
    elsewhere.join(10)
    assert not elsewhere.is_alive(), "the commit's lock was left behind"
    round.fire(e.Cancelled(), at=99.0, wall=99.0)
    assert len(round.records()) == before + 2


@pytest.mark.timeout(120, method="thread")  # the timer is needed here
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in the garbage collector
def test_an_interrupt_at_any_instant_leaves_no_half_state(interrupter: Interrupter) -> None:
    """Hundreds of rounds, each interrupted somewhere: all are whole, and all go on."""
    chance, begun, interrupted, stopped_in = random.Random(0), time.monotonic(), 0, set()
    tell(opened())
    took = time.monotonic() - begun
    while interrupted < (WANTED if time.monotonic() - begun < MOST_SECONDS else ENOUGH):
        round = opened()
        interrupted += interrupter.during(lambda round=round: tell(round), chance.uniform(1e-6, took))  # type: ignore[misc]
        check_whole(round)
        stopped_in.add(round.state)
        check_usable(round)
    assert len(stopped_in) >= 4


@pytest.mark.parametrize("where", ["step", "_DECIDER", "changes", "Record", "_Entry", "_Snapshot"])
def test_an_interrupt_inside_any_part_of_a_commit_undoes_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thing that a commit asks for is interrupted in turn; the snapshot is the one before."""

    def interrupt(*_: object, **__: object) -> None:
        raise Interrupt

    round = opened()
    round.fire(STORY[0], at=0.0, wall=0.0)
    before = round._snapshot
    with monkeypatch.context() as patched:
        if where == "_DECIDER":
            patched.setattr(type(round_module._DECIDER), "decide", interrupt)
        else:
            patched.setattr(round_module, where, interrupt)
        with pytest.raises(Interrupt):
            round.fire(e.LockGranted(1), at=1.0, wall=1.0)
    assert round._snapshot is before
    check_usable(round)
