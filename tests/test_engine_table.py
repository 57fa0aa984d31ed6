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

COUNTS: dict[tuple[bool, int], tuple[int, int, int]] = {
    (True, 1): (59, 434, 1336),
    (True, 2): (69, 504, 1773),
    (False, 1): (63, 463, 1427),
    (False, 2): (74, 540, 1902),
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
    """The exploration of a changed table up to the first broken promise, which must have a sentence."""
    found = explore_engine(stages=stages, table=table, until=ENGINE_PROMISES, limit=2_000)
    assert found.violations.keys() <= ENGINE_PROMISES.keys()
    return found


@pytest.mark.parametrize(
    ("event", "source", "guard"),
    [(t.CommitOrdered, EngineState.Acked, t.ours), (t.ViewClosed, EngineState.Releasing, t.ours)],
    ids=["commit", "view"],
)
def test_an_abort_of_a_later_session_stops_an_earlier_one(
    event: type[Any], source: EngineState, guard: Any
) -> None:
    """A rank that knows a later epoch takes nothing in of an earlier one, even if that one is still open."""
    found = broken(changed(event, source, guard=guard))
    assert {"tombstone", "unasked"} <= found.violations.keys()
    assert "AbortOrdered(later)" in " ".join(found.violations["tombstone"].trace)


def test_an_abort_that_overtakes_its_open_is_remembered() -> None:
    """The open that comes after it is refused."""
    found = broken(changed(t.AbortOrdered, EngineState.Serving, learn=None))
    assert "tombstone" in found.violations


def test_a_rank_in_place_is_not_handed_out_as_whole() -> None:
    """After an abort in the middle, a rank that loads in place is not serving."""
    whole = changed(t.AbortOrdered, EngineState.Receiving, target=EngineState.Serving)
    assert "torn" in explore_engine(stages=False, table=whole, limit=2_000).violations


def test_a_rank_that_stages_is_not_quarantined_without_need() -> None:
    """Whoever staged still holds the old version whole, and goes on serving it."""
    torn = changed(t.LimitReached, EngineState.Acked, target=EngineState.Quarantined)
    assert "staged" in explore_engine(stages=True, table=torn, limit=2_000).violations


def test_a_committed_rank_stays_committed() -> None:
    """The trainer that aborts after the commit cannot take the new version back."""
    lost = changed(t.AbortOrdered, EngineState.Committed, target=EngineState.Serving, learn=t.over)
    assert "kept" in explore_engine(stages=True, table=lost, limit=2_000).violations


def test_acked_comes_after_the_buffer_was_let_go_of() -> None:
    """The last frame is no proof: the sender's buffer is still in use."""
    early = changed(t.AllApplied, EngineState.Receiving, target=EngineState.Acked)
    assert "acked" in explore_engine(stages=True, table=early, limit=2_000).violations


def test_aborts_and_limits_are_never_refused() -> None:
    """Whoever ends a session cannot know whether it was over already."""
    assert "total" in broken(changed(t.AbortOrdered, EngineState.Quarantined)).violations
    assert "total" in broken(changed(t.LimitReached, EngineState.Serving)).violations


def test_a_session_ends_by_its_own_limit() -> None:
    """When its trainer is gone, the limit alone brings the rank back; a rank that ignored it would hang."""
    deaf = changed(t.LimitReached, EngineState.Paused, target=None, learn=None)
    assert "inevitable" in explore_engine(stages=True, table=deaf, limit=2_000).violations


def test_facts_know_their_session() -> None:
    """A session is live while it is open and no later one was aborted here."""
    one, later, twin = SESSIONS
    facts = EngineFacts("e", "1")
    assert facts.round == "none"
    assert not facts.live(one)
    opened = t.opened(facts, t.Opened(one, Expectation("plan", 1, 1, 1)))
    assert opened.round == "one"
    assert (opened.live(one), opened.live(later), opened.live(twin)) == (True, False, False)
    overtaken = t.fence(opened, t.AbortOrdered(later))
    assert overtaken.session == one
    assert not overtaken.live(one)


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in place"])
def test_a_later_session_takes_over_what_an_earlier_one_tore(stages: bool) -> None:
    """What was torn stays torn in the next session, and only its commit clears it."""
    facts = replace(EngineFacts("e", "1", stages=stages), session=SESSIONS[0], touched=True)
    again = t.opened(facts, t.Opened(Session("next", 5, 5), Expectation("plan", 1, 1, 1)))
    assert again.torn is not stages
    assert (again.touched, again.frames, again.fenced) == (False, 0, 4)
    assert not t.took_over(again, t.CommitOrdered(again.session or SESSIONS[0])).torn
