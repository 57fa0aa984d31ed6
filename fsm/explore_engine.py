"""Everything that can happen to one engine rank, told by trainers who lie as they please.

    explore_engine(stages=True) -> Exploration

Three sessions speak at any time, open or not: one, a later one, and a twin that shares the first one's
epoch. The rank starts serving version 0. ``ENGINE_PROMISES`` names what is checked, in every position and at
every step; see :mod:`.explore` for the round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from . import engine_table as t
from .engine_table import ENGINE, EngineEvent, EngineFacts, Session
from .errors import GuardFailed, IllegalEvent, TableError
from .receipt import Expectation
from .rows import Table
from .search import Edge, Exploration, explore
from .states import EngineState

__all__ = ["ENGINE_PROMISES", "SESSIONS", "Rank", "engine_alphabet", "explore_engine"]

ENGINE_PROMISES: dict[str, str] = {
    "one-row": "at most one row answers a fact, and no guard raises",
    "finite": "there is an end to what can be reached",
    "total": "an abort, the rank's own limit and the loss of its weights are never refused",
    "owed": "the fact whose turn it is is never refused",
    "unasked": "a fact whose turn it is not is refused",
    "tombstone": "an epoch that was closed stays closed: no open, frame or commit of it is taken in, and no "
    "session of it is left open",
    "onward": "a fact of the open session leads to the state it is there for",
    "acked": "Acked is entered from Releasing only, by letting go of the buffer, and knows what was applied",
    "version": "the version changes by a commit, to that of its session, or is lost when the rank is torn",
    "kept": "a rank that committed stays committed, whoever aborts, unless it loses its weights",
    "torn": "what is torn stays torn until a commit, and is never served",
    "lost": "who has lost the weights is torn, and open to nobody but the session that may bring them back",
    "staged": "a rank that stages is quarantined by a broken commit or a loss only, or if it was before",
    "session": "a session is open in every state but Serving and Quarantined",
    "counted": "frames are counted one by one, and none is missing from Releasing on",
    "others": "whoever is neither the open session, nor opens or aborts a later one, changes nothing but "
    "tombstones",
    "inevitable": "with its own limit alone, every session ends",
}
"""Every promise of an engine rank, by name."""

SESSIONS = (Session("one", 1, 1), Session("later", 2, 2), Session("twin", 1, 1))
Serving, Paused, Receiving = EngineState.Serving, EngineState.Paused, EngineState.Receiving
Releasing, Acked = EngineState.Releasing, EngineState.Acked
Committed, Quarantined = EngineState.Committed, EngineState.Quarantined


class Rank(NamedTuple):
    """A node: where the rank is and what it knows."""

    state: EngineState
    facts: EngineFacts

    def __str__(self) -> str:
        return self.state.name


def engine_alphabet(buckets: int = 1) -> dict[str, EngineEvent]:
    """Everything that can be said to a rank, by the name that a trace gives it."""
    plan = Expectation("plan", tensors=buckets, bytes=buckets, buckets=buckets)
    said: dict[str, EngineEvent] = {}
    for session in SESSIONS:
        events: list[EngineEvent] = [
            t.Opened(session, plan), t.AllApplied(session), t.ViewClosed(session, buckets, buckets),
            t.CommitOrdered(session), t.CommitBroke(session), t.ResumeOrdered(session),
            t.AbortOrdered(session), t.LimitReached(session), t.WeightsLost(session),
        ]  # fmt: skip
        said |= {f"{type(event).__name__}({session.round})": event for event in events}
        said |= {
            f"FrameSeen({session.round}, {index})": t.FrameSeen(session, index)
            for index in range(buckets + 1)
        }
    return said


def explore_engine(
    *,
    stages: bool,
    buckets: int = 1,
    table: Table[EngineState, EngineFacts] = ENGINE,
    until: Collection[str] = (),
    limit: int = 100_000,
) -> Exploration[Rank]:
    """Offer every fact in every position of an engine rank's table that can be reached.

    Args:
        stages: whether the rank keeps its old weights until it commits.
        buckets: how many buckets the plan has.
        table: another table than the engine's, to see what would become of it.
        until: stop as soon as one of these promises is broken.
        limit: how many positions are too many.
    """
    said = engine_alphabet(buckets)
    return explore(
        Rank(table.start, EngineFacts("e", "1", stages=stages, version=0)),
        lambda node: _steps(node, said, table),
        _standing,
        goal=lambda node: node.facts.session is None,
        until=until,
        limit=limit,
    )


def _steps(
    node: Rank, said: dict[str, EngineEvent], table: Table[EngineState, EngineFacts]
) -> Iterator[Edge[Rank]]:
    for label, event in said.items():
        try:
            row = table.row(node.state, node.facts, event)
        except (GuardFailed, TableError):
            yield Edge(label, None, broken=("one-row",))
        except IllegalEvent:
            yield Edge(label, None, broken=_refusal(node, event))
        else:
            after = Rank(row.goal, row.learn(node.facts, event) if row.learn else node.facts)
            certain = isinstance(event, t.LimitReached) and event.session == node.facts.session
            broken = tuple(_step_breaks(node, event, after))
            yield Edge(label, node if after == node else after, row.number, certain, broken)


def _refusal(node: Rank, event: EngineEvent) -> tuple[str, ...]:
    if isinstance(event, t.AbortOrdered | t.LimitReached | t.WeightsLost):
        return ("total",)
    return ("owed",) if _welcome(node, event) else ()


# -- whose turn it is -------------------------------------------------------------------------------------


def _frame(node: Rank, event: t.FrameSeen) -> bool:
    wanted = node.facts.plan.buckets if node.facts.plan else 0
    return node.state in (Paused, Receiving) and event.index == node.facts.frames and event.index < wanted


def _welcome(node: Rank, event: EngineEvent) -> bool:
    """Whether an honest trainer, or the rank itself, may say ``event`` now."""
    state, facts = node
    session = event.session
    ours = session == facts.session
    if isinstance(event, t.Opened):
        return session.epoch > facts.fenced and (facts.session is None or session.epoch > facts.session.epoch)
    if isinstance(event, t.ResumeOrdered):
        return (ours and state is Committed) or (state is Serving and session == facts.committed)
    if isinstance(event, t.CommitOrdered) and state is Committed:
        return ours
    turn = _TURN.get(type(event))
    if turn is None:
        return True
    closed = session.epoch <= facts.fenced and not isinstance(event, t.CommitBroke)
    return ours and not closed and turn(node, event)


_TURN: dict[type[Any], Callable[[Rank, Any], bool]] = {
    t.FrameSeen: _frame,
    t.AllApplied: lambda n, x: n.state is Receiving and n.facts.plan is not None
    and n.facts.frames == n.facts.plan.buckets,
    t.ViewClosed: lambda n, x: n.state is Releasing,
    t.CommitOrdered: lambda n, x: n.state is Acked,
    t.CommitBroke: lambda n, x: n.state is Acked,
}  # fmt: skip


# -- what holds at every step, and in every position ------------------------------------------------------


def _step_breaks(before: Rank, event: EngineEvent, after: Rank) -> Iterator[str]:
    if not _welcome(before, event):
        yield "unasked"
    if isinstance(event, t.WeightsLost):
        yield from _loses(before, after)
    elif event.session == before.facts.session or isinstance(event, t.Opened) or _buries(before, event):
        yield from _leads(before, event, after)
    elif after != Rank(before.state, replace(before.facts, fenced=after.facts.fenced)):
        yield "others"
    yield from _fences(before, event, after)
    yield from _weights(before, event, after)


def _loses(before: Rank, after: Rank) -> Iterator[str]:
    """What the rank is, once it has lost its weights."""
    may_go_on = before.state not in (Serving, Committed, Quarantined)
    if not after.facts.torn or after.state is not (before.state if may_go_on else Quarantined):
        yield "lost"
    if may_go_on and after.facts != replace(before.facts, tainted=True):
        yield "others"


def _buries(before: Rank, event: EngineEvent) -> bool:
    """Whether another session's abort closes the epoch of the open one, which ends by that."""
    session = before.facts.session
    if session is None or session == event.session or not isinstance(event, t.AbortOrdered):
        return False
    return event.session.epoch >= session.epoch


def _leads(before: Rank, event: EngineEvent, after: Rank) -> Iterator[str]:
    """What the facts of the open session must lead to, and leave behind."""
    state = _LEADS.get(type(event))
    if state is not None and after.state is not state:
        yield "onward"
    let_go = before.state is Releasing and isinstance(event, t.ViewClosed)
    if after.state is Acked and before.state is not Acked and not let_go:
        yield "acked"
    if isinstance(event, t.Opened) and (after.facts.session, after.facts.plan) != (event.session, event.plan):
        yield "session"
    if isinstance(event, t.FrameSeen) and after.facts.frames != before.facts.frames + 1:
        yield "counted"
    if isinstance(event, t.ViewClosed) and after.facts.applied != (event.tensors, event.bytes, event.digest):
        yield "acked"


_LEADS: dict[type[Any], EngineState] = {
    t.Opened: Paused,
    t.FrameSeen: Receiving,
    t.AllApplied: Releasing,
    t.ViewClosed: Acked,
    t.CommitOrdered: Committed,
    t.CommitBroke: Quarantined,
    t.ResumeOrdered: Serving,
}


def _fences(before: Rank, event: EngineEvent, after: Rank) -> Iterator[str]:
    epoch = event.session.epoch
    taken_in = isinstance(event, t.Opened | t.FrameSeen | t.AllApplied | t.ViewClosed | t.CommitOrdered)
    changed = after != before
    ended = before.facts.session is not None and before.facts.session != after.facts.session
    if (taken_in and changed and epoch <= before.facts.fenced) or after.facts.fenced < before.facts.fenced:
        yield "tombstone"
    if ended and before.facts.session is not None and after.facts.fenced < before.facts.session.epoch:
        yield "tombstone"
    kept = before.state is Committed and event.session == before.facts.session
    if isinstance(event, t.AbortOrdered) and not kept and after.facts.fenced < epoch:
        yield "tombstone"


def _weights(before: Rank, event: EngineEvent, after: Rank) -> Iterator[str]:
    committed = isinstance(event, t.CommitOrdered) and (before.state, after.state) == (Acked, Committed)
    lost = after.facts.version is None and after.state is Quarantined
    if after.facts.version != before.facts.version and not lost and not committed:
        yield "version"
    if committed and (after.facts.version, after.facts.committed) != (event.session.version, event.session):
        yield "version"
    if after.facts.committed != before.facts.committed and not committed:
        yield "kept"
    left = before.state is Committed and after.state is not Committed
    ends = isinstance(event, t.ResumeOrdered | t.LimitReached | t.Opened | t.WeightsLost)
    if left and not ends and not _buries(before, event):
        yield "kept"
    if before.facts.torn and not after.facts.torn and not committed:
        yield "torn"
    if committed and after.facts.torn:
        yield "torn"
    quarantined = after.state is Quarantined and before.state is not Quarantined
    broken = isinstance(event, t.CommitBroke | t.WeightsLost) or before.facts.tainted
    if quarantined and before.facts.stages and not broken:
        yield "staged"


def _standing(node: Rank) -> Iterator[str]:
    state, facts = node
    idle = state in (Serving, Quarantined)
    if (facts.session is None) != idle or (facts.plan is None) != idle:
        yield "session"
    if facts.session is not None and facts.session.epoch <= facts.fenced:
        yield "tombstone"
    if facts.torn != (state is Quarantined) and idle:
        yield "torn"
    if state is Quarantined and facts.version is not None:
        yield "version"
    yield from _frames_stand(state, facts)


def _frames_stand(state: EngineState, facts: EngineFacts) -> Iterator[str]:
    wanted = facts.plan.buckets if facts.plan else 0
    least = {Receiving: 1, Releasing: wanted, Acked: wanted, Committed: wanted}.get(state, 0)
    most = 0 if state in (Serving, Paused, Quarantined) else wanted
    if not least <= facts.frames <= most:
        yield "counted"
    if facts.touched != (facts.frames > 0 and state is not Committed):
        yield "counted"
