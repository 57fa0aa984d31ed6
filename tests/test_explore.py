"""Everything that can happen to a round, explored; and every hole that was once found so, kept as a test.

Each hole is put back into a copy of the table, and the explorer must find it again, for the right reason.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm import guards as g
from weightsync.fsm import learn as k
from weightsync.fsm.errors import IllegalEvent, TableError
from weightsync.fsm.explore import SOMETHING, Seen, alphabet, chaos, small_round
from weightsync.fsm.facts import Facts, opening
from weightsync.fsm.invariants import PROMISES
from weightsync.fsm.orders import Verb
from weightsync.fsm.receipt import Participant
from weightsync.fsm.reducer import Position, begin, step
from weightsync.fsm.rows import Row, Table
from weightsync.fsm.search import Exploration
from weightsync.fsm.states import Disposition, Outcome, Publication, State
from weightsync.fsm.table import ROUND, check_laws

pytestmark = pytest.mark.usefixtures("untraced")

# -- the round as it is -------------------------------------------------------------------------------------

COUNTS: dict[str, tuple[Facts, int, tuple[int, int, int]]] = {
    "one engine": (small_round(1, 1), 1, (237, 4151, 5329)),
    "two engines": (small_round(2, 1), 1, (2483, 53412, 60806)),
    "two engines, all needed": (small_round(2, 2), 1, (1187, 25546, 29056)),
    "two engines, two buckets, all needed": (small_round(2, 2), 2, (1321, 28231, 33856)),
    "two engines that stage": (small_round(2, 1, inplace=0), 1, (2907, 63002, 70720)),
    "two engines in place": (small_round(2, 1, inplace=2), 1, (2187, 46702, 53900)),
    "catching one up, all needed": (small_round(2, 2, tainted=1), 1, (1187, 25546, 29056)),
}
"""(facts, buckets, (positions, accepted, refused)): exact, so that a row or a state that gets lost shows."""


@functools.cache
def explored() -> Exploration[Seen]:
    """The chaos of two engines, one of which is enough."""
    return chaos(small_round(2, 1))


@pytest.mark.parametrize("name", COUNTS)
def test_no_promise_is_broken(name: str) -> None:
    """Whatever is said, and whenever, no promise is broken; and the size of what was explored is known."""
    facts, buckets, counts = COUNTS[name]
    found = explored() if name == "two engines" else chaos(facts, buckets=buckets)
    assert not found.violations, "\n".join(found.lines())
    assert (found.positions, found.accepted, found.refused) == counts, "a change of the table? then of these"


@pytest.mark.slow
def test_no_promise_is_broken_with_three_engines() -> None:
    """Three engines of which two are enough: the smallest round that can lose one and still have two."""
    found = chaos(small_round(3, 2))
    assert not found.violations, "\n".join(found.lines())
    assert (found.positions, found.accepted, found.refused) == (17361, 447119, 455653)


def test_every_row_is_taken() -> None:
    """No row is dead: with two engines, one in place and one enough, each row is taken at least once."""
    assert set(explored().rows) == {row.number for row in ROUND.rows}


def test_rows_about_a_quorum_that_holds_are_dead_when_all_are_needed() -> None:
    """The check for dead rows can fail: where everybody is needed, no loss leaves a quorum."""
    taken = chaos(small_round(2, 2)).rows
    dead = {row.guard.__name__ for row in ROUND.rows if row.number not in taken and row.guard}
    wanted = {
        "loss_holds",
        "loss_more",
        "loss_last",
        "bad_more",
        "bad_last",
        "x_more",
        "x_last",
        "l_more",
        "l_last",
    }
    assert dead == wanted | {"out"}


def test_every_outcome_is_reached() -> None:
    """A round can end complete, partial and failed, and what is known of its publication can be anything."""
    ends = [node.position.facts for node in explored().nodes if node.position.state is State.Released]
    assert {facts.outcome for facts in ends} == set(Outcome) - {Outcome.passed_over}
    assert {facts.publication for facts in ends} == set(Publication)
    assert {facts.disposition(engine) for facts in ends for engine in facts.roster} == set(Disposition)


def test_an_old_incarnation_and_a_stranger_change_nothing() -> None:
    """Those who take no part add steps and refusals, but not one position."""
    alone = chaos(small_round(2, 1), strangers=())
    assert alone.positions == explored().positions
    assert alone.accepted < explored().accepted


def test_what_the_explorer_forgets_decides_nothing() -> None:
    """A round with its causes and tries goes the same way as one without, in a thousand random rounds."""
    said = alphabet(small_round(2, 1))
    dice = random.Random(7)
    for _ in range(1000):
        full, _ = begin(small_round(2, 1))
        short = full
        for letter in dice.choices(said, k=25):
            full, short = after(full, letter.event), after(short, letter.event)
            short = Position(short.state, forget(short.facts))
            assert short == Position(full.state, forget(full.facts))


def after(position: Position, event: e.Event) -> Position:
    """The position after an event, which is the same one if it is refused."""
    try:
        return step(position, event).after
    except IllegalEvent:
        return position


def forget(facts: Facts) -> Facts:
    """Facts as the explorer keeps them."""
    return replace(facts, tries=0, cause=facts.cause and SOMETHING)


def test_a_violation_is_told_with_its_shortest_trace() -> None:
    """What is printed says the promise, how often it was hit, and step by step how to get there."""
    found = chaos(small_round(2, 1), table=changed(edit("LockGranted", "Idle", "too_few", guard=None)))
    assert "one-row" in found.violations
    lines = found.violations["one-row"].lines()
    assert lines == ["one-row, after 1 steps:", "  1. LockGranted -> (here)"]
    assert found.lines()[1].endswith(f"x {lines[0]}")
    assert str(found.violations["one-row"]) == "\n".join(lines)


def test_it_can_stop_at_the_first_violation() -> None:
    """Who only wants to know whether there is one need not wait for all."""
    table = changed(edit("LockGranted", "Idle", "too_few", guard=None))
    found = chaos(small_round(2, 1), table=table, until=PROMISES)
    assert list(found.violations) == ["one-row"]
    assert found.positions < explored().positions


# -- the holes of earlier tables, put back ------------------------------------------------------------------

Edit = Callable[[Row[State]], Iterable[Row[State]]]


def edit(event: str, source: str | None = None, when: str | None = None, /, **changes: Any) -> Edit:
    """Change every row of this event, source and guard; without changes, take it out."""

    def apply(row: Row[State]) -> Iterable[Row[State]]:
        name = row.guard.__name__ if row.guard else ""
        if row.event.__name__ != event or source not in (None, row.source.name) or when not in (None, name):
            return [row]
        return [replace(row, **changes)] if changes else []

    return apply


def changed(*edits: Edit, added: Iterable[Row[State]] = ()) -> Table[State, Facts]:
    """A copy of the round's table with edits; the laws are left aside, and checked where a test wants to."""
    rows = list(ROUND.rows)
    for change in edits:
        before, rows = rows, [new for row in rows for new in change(row)]
        assert rows != before, "an edit that changes nothing proves nothing"
    numbered = [replace(row, number=number) for number, row in enumerate([*rows, *added], start=1)]
    return Table("changed", numbered, start=ROUND.start, final=ROUND.final, entry=ROUND.entry)


def breaks(promise: str, *edits: Edit, facts: Facts | None = None, added: Iterable[Row[State]] = ()) -> bool:
    """Whether this promise is broken once the round's table is changed in these ways."""
    assert promise in PROMISES
    table = changed(*edits, added=added)
    found = chaos(facts or small_round(2, 1), table=table, until=[promise], limit=20_000)
    return promise in found.violations


def row(event: type[e.Event], source: State, guard: Any, learn: Any, *orders: Verb) -> Row[State]:
    """A row that stays, to be added."""
    return Row(0, event, source, None, guard, learn, orders)


def test_hole_1_a_late_receipt_of_an_evicted_engine_is_taken_in() -> None:
    """An engine that was lost may have sent its receipt before; it neither fails the round nor comes back."""
    assert breaks("owed", edit("EngineAcked", "Awaiting", "out"))
    assert breaks("failing", edit("EngineAcked", "Awaiting", "out", target=State.Failed))
    assert breaks("proof", edit("EngineAcked", "Awaiting", "out", learn=k.acked))


def test_hole_2_a_loss_counts_once() -> None:
    """Whether the quorum holds is asked of a set: told twice, or by a stranger, a loss is no further loss."""

    def counted(facts: Facts, event: e.EngineLost, state: State) -> bool:
        return len(facts.members) - len(facts.evicted) - 1 >= facts.quorum

    def counted_out(facts: Facts, event: e.EngineLost, state: State) -> bool:
        return not counted(facts, event, state)

    assert breaks("watchdogs", edit("EngineLost", None, "loss_void"))
    counting = (
        edit("EngineLost", "Locked", "loss_holds", guard=counted),
        edit("EngineLost", "Locked", "loss_breaks", guard=counted_out),
        edit("EngineLost", "Locked", "loss_void"),
    )
    assert breaks("told", *counting)
    assert breaks("failing", *counting)


def test_hole_3_an_answer_to_commit_may_cross_the_time_out() -> None:
    """The truth about an engine is taken in where it arrives: in Failed, and after the end."""
    for event in ("EngineCommitted", "CommitFailed"):
        assert breaks("owed", edit(event, "Failed"))
        assert breaks("owed", edit(event, "Released"))


def test_hole_4_nothing_is_published_below_the_quorum() -> None:
    """When too many commits are refused, or too many engines die, the round fails instead of publishing."""

    def more(facts: Facts, event: Any, state: State) -> bool:
        return event.engine in facts.missing and bool(facts.missing - {event.engine})

    def last(facts: Facts, event: Any, state: State) -> bool:
        return facts.missing == {event.engine}

    for event, letter in ((e.CommitFailed, "x"), (e.EngineLost, "l")):
        edits = [edit(event.__name__, "Cleaning", f"{letter}_{how}") for how in ("more", "last", "breaks")]
        rows = [
            row(event, State.Cleaning, more, k.quarantined, Verb.Fence),
            row(event, State.Cleaning, last, k.quarantined_last, Verb.Fence, Verb.Publish),
        ]
        assert breaks("publish", *edits, added=rows)
        assert breaks("failing", *edits, added=rows)


def test_hole_5_the_last_refusal_or_death_orders_the_publication() -> None:
    """When the last commit that was missing is answered by a refusal or a death, somebody must go on."""
    without_publish = {"learn": k.quarantined, "orders": (Verb.Fence,)}
    assert breaks("awaited", edit("CommitFailed", "Cleaning", "x_last", **without_publish))
    assert breaks("awaited", edit("EngineLost", "Cleaning", "l_last", **without_publish))


def test_hole_6_success_needs_commits_and_a_publication() -> None:
    """Cleaned before everybody committed, or before the ledger answered, is refused."""
    assert breaks("clean", edit("Cleaned", "Cleaning", guard=g.unsettled))


def test_hole_7_the_quorum_is_of_those_asked_for() -> None:
    """An engine that dies while the lock is waited for makes the quorum harder to reach, not smaller."""

    def shrink(facts: Facts, event: e.LockGranted) -> Facts:
        known = k.membership(facts, event)
        return replace(known, quorum=min(known.quorum, len(known.members)))

    assert breaks("quorum", edit("LockGranted", "Idle", "too_few"), edit("LockGranted", "Idle", guard=None))
    shrunk = (edit("LockGranted", "Idle", "too_few"), edit("LockGranted", "Idle", guard=None, learn=shrink))
    assert breaks("facts", *shrunk, facts=small_round(2, 2))


def test_hole_8_only_its_own_word_makes_an_engine_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """That an engine stages, or that no bucket was sent, proves nothing while calls are under way."""
    original = Facts.disposition

    def derived(facts: Facts, engine: Participant) -> Disposition:
        found = original(facts, engine)
        untouched = engine not in facts.inplace or facts.sent == 0
        out = facts.evicted | facts.quarantined | facts.lost | facts.tainted
        return (
            Disposition.serving_old
            if found.name == "quarantined" and untouched and engine not in out
            else found
        )

    monkeypatch.setattr(Facts, "disposition", derived)
    assert list(chaos(small_round(2, 1), until=PROMISES).violations) == ["disposition"]


def test_hole_9_the_end_is_clean_only_if_everybody_answered() -> None:
    """In Failed, Cleaned needs an answer of every open engine, and of the ledger if it was asked."""
    assert breaks(
        "clean",
        edit("Cleaned", "Failed", "proven_ours", guard=g.unsettled_ours),
        edit("Cleaned", "Failed", "proven_gone", guard=g.unsettled_gone),
    )


def test_hole_10_a_quarantine_outlives_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that fails does not hand an engine out that was quarantined before it began."""
    original = Facts.disposition

    def forgetful(facts: Facts, engine: Participant) -> Disposition:
        return original(replace(facts, tainted=frozenset()), engine)

    monkeypatch.setattr(Facts, "disposition", forgetful)
    assert list(chaos(small_round(2, 1, tainted=1), until=PROMISES).violations) == ["taint"]


def test_hole_11_an_unanswered_publication_stays_unknown() -> None:
    """Giving up does not make a publication undone that the ledger may have."""

    def given_up(facts: Facts, event: Any) -> Facts:
        return replace(k.given_up(facts, event), publication=Publication.no)

    for event in ("TimedOut", "CleanupFailed"):
        edits = [
            edit(event, "Failed", guard, learn=given_up)
            for guard in (
                ("due_unsettled_ours", "due_unsettled_gone") if event == "TimedOut"
                else ("unsettled_ours", "unsettled_gone")
            )
        ]  # fmt: skip
        assert breaks("publication", *edits)


FENCED = [row for row in ROUND.rows if Verb.Fence in row.orders]


@pytest.mark.parametrize("fenced", FENCED, ids=[str(row) for row in FENCED])
def test_hole_12_whoever_is_out_is_fenced(fenced: Row[State]) -> None:
    """Nobody goes on waiting for an engine that is out, and none of its calls outlives the lock."""
    orders = tuple(order for order in fenced.orders if order is not Verb.Fence)
    assert fenced.guard is not None
    unfenced = edit(fenced.event.__name__, fenced.source.name, fenced.guard.__name__, orders=orders)
    found = chaos(small_round(2, 1), table=changed(unfenced), until=PROMISES)
    assert list(found.violations) == ["fence"]


def test_hole_13_who_gives_up_fences_before_the_release() -> None:
    """The lock is not given back with a call under way at an engine that did not answer."""
    silent = edit("TimedOut", "Failed", "due_unsettled_ours", orders=(Verb.ReleaseLock,))
    late = edit("TimedOut", "Failed", "due_unsettled_ours", orders=(Verb.ReleaseLock, Verb.FenceAll))
    assert breaks("fence", silent)
    assert breaks("orders", late)
    for spoilt in (silent, late):
        with pytest.raises(TableError, match="fence-first"):
            check_laws(changed(spoilt))


def test_hole_14_a_bad_receipt_costs_one_engine() -> None:
    """A receipt that proves something else is a loss of its engine, and costs no more than another loss."""

    def bad(facts: Facts, event: e.EngineAcked, state: State) -> bool:
        return event.engine in facts.remaining and not g.proves(facts, event)

    strict = (
        edit("EngineAcked", "Awaiting", "bad_more"),
        edit("EngineAcked", "Awaiting", "bad_last"),
        edit("EngineAcked", "Awaiting", "bad_breaks", guard=bad),
    )
    assert breaks("failing", *strict)
    assert not breaks("failing", *strict, facts=small_round(2, 2)), "the same, where all are needed"


@pytest.mark.parametrize("quorum", [0, -1, 3, 0.5, 1.5, True])
def test_hole_15_a_quorum_is_a_number_from_one_to_all(quorum: Any) -> None:
    """Nobody, more than everybody, or half an engine is no quorum."""
    with pytest.raises(ValueError, match="quorum"):
        opening(round="r", version=1, roster=[Participant("a"), Participant("b")], quorum=quorum)
