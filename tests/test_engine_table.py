"""Everything that can happen to an engine rank, explored; and the holes that were found so in its table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import engine_table as t
from weightsync.fsm.engine_table import ENGINE, EngineFacts, Session
from weightsync.fsm.explore_engine import ENGINE_PROMISES, SESSIONS, Rank, explore_engine
from weightsync.fsm.receipt import Expectation
from weightsync.fsm.rows import Table
from weightsync.fsm.search import Exploration
from weightsync.fsm.states import EngineState

S = EngineState
COUNTS: dict[tuple[bool, int], tuple[int, int, int]] = {
    (True, 1): (79, 835, 1772),
    (True, 2): (94, 991, 2393),
    (False, 1): (79, 835, 1772),
    (False, 2): (94, 991, 2393),
}
"""(stages, buckets): (positions, accepted, refused); exact, so that a row or a state that gets lost shows."""


@pytest.mark.parametrize(("stages", "buckets"), COUNTS)
def test_no_promise_is_broken(stages: bool, buckets: int) -> None:
    """Whatever trainers say, and whenever, no promise is broken; and what was explored has a known size."""
    found = explore_engine(stages=stages, buckets=buckets)
    assert not found.violations, "\n".join(found.lines())
    assert (found.positions, found.accepted, found.refused) == COUNTS[stages, buckets]


def test_every_row_is_taken() -> None:
    """No row is dead, with ranks that stage and ranks that load in place together."""
    taken = {row for stages, buckets in COUNTS for row in explore_engine(stages=stages, buckets=buckets).rows}
    assert taken == {row.number for row in ENGINE.rows}


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in place"])
def test_every_state_is_reached(stages: bool) -> None:
    """Also Quarantined, by a rank that stages: its commit can break."""
    assert {node.state for node in explore_engine(stages=stages).nodes} == set(EngineState)


def changed(
    event: type[Any], source: EngineState | None = None, **changes: Any
) -> Table[EngineState, EngineFacts]:
    """The table with every row of one event changed; without changes, taken out."""
    rows = [
        replace(row, **changes) if row.event is event and source in (None, row.source) else row
        for row in ENGINE.rows
        if changes or row.event is not event or source not in (None, row.source)
    ]
    assert rows != list(ENGINE.rows)
    return Table("changed", rows, start=ENGINE.start)


def broken(table: Table[EngineState, EngineFacts], *, stages: bool = True) -> Exploration[Rank]:
    """The exploration of a changed table, up to the first broken promise."""
    return explore_engine(stages=stages, table=table, until=ENGINE_PROMISES, limit=2_000)


def only_its_own(facts: EngineFacts, event: t.AbortOrdered, state: EngineState) -> bool:
    """An abort ends the session it names, and no other."""
    return t.ours(facts, event, state)


def nobody(facts: EngineFacts, event: t.AbortOrdered, state: EngineState) -> bool:
    """Never."""
    return False


def test_an_abort_of_a_later_session_ends_an_earlier_one() -> None:
    """Or the rank would stay in a pause that nobody ends, while whoever aborted hears that it serves."""
    guards = {t.ends_whole: only_its_own, t.ends_torn: nobody, t.beneath: t.other}
    rows = [
        replace(row, guard=guards[row.guard]) if row.guard in guards and row.source is S.Paused else row
        for row in ENGINE.rows
    ]
    found = broken(Table("changed", rows, start=ENGINE.start))
    assert "AbortOrdered(later)" in " ".join(found.violations["tombstone"].trace)


def raises(facts: Any, event: Any, state: Any) -> bool:
    """Break."""
    raise ZeroDivisionError


def still_torn(facts: EngineFacts, event: t.CommitOrdered) -> EngineFacts:
    """A commit that clears nothing."""
    return replace(t.took_over(facts, event), tainted=facts.torn)


def same_version(facts: EngineFacts, event: t.CommitOrdered) -> EngineFacts:
    """A commit after which the rank has the number of before."""
    return replace(t.took_over(facts, event), version=facts.version)


def with_version(facts: EngineFacts, event: Any) -> EngineFacts:
    """A session that leaves a mix, under the number of what was there before."""
    return replace(t.over_torn(facts, event), version=facts.version)


def renumbered(facts: EngineFacts, event: Any) -> EngineFacts:
    """A session that ends with another number than it committed."""
    return replace(t.over(facts, event), version=7)


def healed(facts: EngineFacts, event: t.Opened) -> EngineFacts:
    """A new session that forgets what an earlier one tore."""
    return replace(t.opened(facts, event), tainted=False)


def disowned(facts: EngineFacts, event: Any) -> EngineFacts:
    """A session that ends without having been committed, although it was."""
    return replace(t.over(facts, event), committed=None)


def reopened(facts: EngineFacts, event: Any) -> EngineFacts:
    """A session that ends and leaves no tombstone."""
    return replace(t.over(facts, event), fenced=facts.fenced)


def unfenced(facts: EngineFacts, event: t.Opened) -> EngineFacts:
    """A new session that forgets the tombstones of others."""
    return replace(t.opened(facts, event), fenced=0)


def touched_only(facts: EngineFacts, event: t.FrameSeen) -> EngineFacts:
    """A frame that is taken in and not counted."""
    return replace(t.seen(facts, event), frames=facts.frames)


def uncommitted(facts: EngineFacts, event: Any) -> EngineFacts:
    """A commit that is not remembered."""
    return replace(t.took_over(facts, event), touched=True)


SPOILT: list[tuple[str, bool, Table[EngineState, EngineFacts]]] = [
    ("one-row", True, changed(t.AbortOrdered, S.Paused, guard=None)),
    ("one-row", True, changed(t.FrameSeen, S.Paused, guard=raises)),
    ("total", True, changed(t.AbortOrdered, S.Quarantined)),
    ("total", True, changed(t.LimitReached, S.Serving)),
    ("owed", True, changed(t.FrameSeen, S.Paused)),
    ("owed", True, changed(t.ResumeOrdered, S.Serving)),
    ("unasked", True, changed(t.FrameSeen, S.Receiving, guard=t.ours)),
    ("unasked", True, changed(t.CommitOrdered, S.Committed, guard=None)),
    ("tombstone", True, changed(t.AbortOrdered, S.Serving, learn=None)),
    ("tombstone", True, changed(t.AbortOrdered, S.Acked, learn=reopened)),
    ("tombstone", True, changed(t.Opened, learn=unfenced)),
    ("tombstone", True, changed(t.AbortOrdered, S.Committed, target=None, learn=t.fence)),
    ("onward", True, changed(t.AllApplied, S.Receiving, target=S.Receiving)),
    ("acked", True, changed(t.AllApplied, S.Receiving, target=S.Acked)),
    ("acked", True, changed(t.ViewClosed, learn=None)),
    ("version", True, changed(t.CommitOrdered, S.Acked, learn=same_version)),
    ("version", False, changed(t.LimitReached, S.Acked, learn=with_version)),
    ("version", True, changed(t.ResumeOrdered, S.Committed, learn=renumbered)),
    ("kept", True, changed(t.AbortOrdered, S.Committed, target=S.Serving, learn=t.over)),
    ("kept", True, changed(t.ResumeOrdered, S.Committed, learn=disowned)),
    ("torn", False, changed(t.AbortOrdered, S.Receiving, target=S.Serving)),
    ("torn", False, changed(t.CommitOrdered, S.Acked, learn=still_torn)),
    ("torn", False, changed(t.Opened, learn=healed)),
    ("lost", True, changed(t.WeightsLost, S.Serving, target=None)),
    ("lost", False, changed(t.WeightsLost, S.Paused, learn=None)),
    ("others", True, changed(t.WeightsLost, S.Acked, learn=t.gone)),
    ("total", True, changed(t.WeightsLost, S.Committed)),
    ("staged", True, changed(t.LimitReached, S.Acked, target=S.Quarantined)),
    ("session", True, changed(t.Opened, S.Serving, learn=None)),
    ("session", True, changed(t.ResumeOrdered, S.Committed, learn=None)),
    ("counted", True, changed(t.FrameSeen, learn=touched_only)),
    ("counted", True, changed(t.CommitOrdered, S.Acked, learn=uncommitted)),
    ("counted", True, changed(t.AllApplied, S.Receiving, guard=t.ours, target=S.Paused)),
    ("others", True, changed(t.LimitReached, S.Serving, target=S.Quarantined)),
    ("inevitable", True, changed(t.LimitReached, S.Paused, target=None, learn=None)),
    ("finite", True, changed(t.FrameSeen, S.Receiving, guard=None)),
]


@pytest.mark.parametrize(("promise", "stages", "table"), SPOILT)
def test_a_table_that_breaks_a_promise_is_noticed(
    promise: str, stages: bool, table: Table[EngineState, EngineFacts]
) -> None:
    """Each of these tables is wrong in one place, and the exploration says in which way."""
    assert promise in explore_engine(stages=stages, table=table, limit=300).violations


def test_no_promise_is_left_out() -> None:
    """Each of them is broken in this file, or it could be one that cannot be broken."""
    assert {case[0] for case in SPOILT} == ENGINE_PROMISES.keys()


def test_facts_know_their_session() -> None:
    """A session is live while it is open, and has one name, whatever its epoch."""
    one, later, twin = SESSIONS
    facts = EngineFacts("e", "1")
    assert facts.round == "none"
    assert not facts.live(one)
    opened = t.opened(facts, t.Opened(one, Expectation("plan", 1, 1, 1)))
    assert opened.round == "one"
    assert (opened.live(one), opened.live(later), opened.live(twin)) == (True, False, False)
    assert not t.over(opened, t.AbortOrdered(later)).live(one)


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in place"])
def test_a_later_session_takes_over_what_an_earlier_one_tore(stages: bool) -> None:
    """What was torn stays torn in the next session, and only its commit clears it."""
    facts = replace(EngineFacts("e", "1", stages=stages), session=SESSIONS[0], touched=True)
    again = t.opened(facts, t.Opened(Session("next", 5, 5), Expectation("plan", 1, 1, 1)))
    assert again.torn is not stages
    assert (again.touched, again.frames, again.fenced) == (False, 0, 4)
    assert not t.took_over(again, t.CommitOrdered(again.session or SESSIONS[0])).torn
