"""One engine rank, as a table: what a receiving side may do, and when it may say so.

A rank serves until a session of a newer epoch is opened (Paused). Frames arrive (Receiving); when the last
one is applied the rank lets go of the sender's buffer (Releasing), and only then has it something to prove:
Acked makes the receipt. The trainer's word to commit makes the new version the rank's own (Committed), its
word to resume ends the session (Serving).

An abort, or the rank's own limit when its trainer says nothing any more, ends the session as well. What the
rank is afterwards is decided by what it saw: untouched, or staged beside the live weights, it serves the old
version; loaded in place, it holds a mix and is Quarantined, and only a full resend that commits clears that.
A rank that committed stays committed, whoever aborts.

Every closed epoch is a tombstone (``fenced``): frames, commits and opens of it or of an earlier one are
refused for ever, also when an abort overtakes the open it was meant for. A session of such an epoch is not
left open either: whoever aborts a later one is told what the rank is, and a rank in a pause that nobody will
ever end is not what it was.

A rank can also lose its weights by itself, to a reload or to whoever gave their memory away. It looks for
that when a plan does not fit and when it is asked what it is, and is Quarantined like one that was torn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .receipt import Expectation
from .rows import Guard, Learn, Row, Table
from .states import EngineState

__all__ = [
    "ENGINE", "ENGINE_EVENTS", "AbortOrdered", "AllApplied", "CommitBroke", "CommitOrdered", "EngineEvent",
    "EngineFacts", "FrameSeen", "LimitReached", "Opened", "ResumeOrdered", "Session", "ViewClosed",
    "WeightsLost",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Session:
    """One round as an engine sees it. ``epoch`` orders sessions; ``round`` tells two of one epoch apart."""

    round: str
    epoch: int
    version: int


# -- facts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a rank knows. ``version`` is what it holds by its last commit, None before the first."""

    engine: str
    incarnation: str
    rank: int = 0
    stages: bool = True
    session: Session | None = None
    plan: Expectation | None = None
    frames: int = 0
    touched: bool = False
    tainted: bool = False
    version: int | None = None
    committed: Session | None = None
    fenced: int = 0
    applied: tuple[int, int, str] = (0, 0, "")

    @property
    def round(self) -> str:
        """The round of the open session, for messages."""
        return self.session.round if self.session else "none"

    @property
    def torn(self) -> bool:
        """Whether ending the session now leaves a mix behind."""
        return self.tainted or (self.touched and not self.stages)

    @property
    def seen(self) -> int:
        """The highest epoch that it has seen; it opens none that is not above."""
        return max(self.fenced, self.session.epoch if self.session else 0)

    @property
    def taken_over(self) -> int:
        """The epoch of its last commit, 0 before the first: whose bytes those of ``version`` are."""
        return self.committed.epoch if self.committed else 0

    def live(self, session: Session) -> bool:
        """Whether ``session`` is open: its epoch is above every one that was closed here."""
        return session == self.session


# -- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The trainer paused this rank and opened a session."""

    session: Session
    plan: Expectation


@dataclass(frozen=True, slots=True)
class FrameSeen:
    """A bucket arrived and is about to be applied."""

    session: Session
    index: int


@dataclass(frozen=True, slots=True)
class AllApplied:
    """The last bucket of the plan is applied, in place or to the staging copy."""

    session: Session


@dataclass(frozen=True, slots=True)
class ViewClosed:
    """The rank let go of the transfer buffer; it holds ``tensors`` tensors of ``bytes`` bytes."""

    session: Session
    tensors: int
    bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class CommitOrdered:
    """The rank made the new version its own, on the trainer's word."""

    session: Session


@dataclass(frozen=True, slots=True)
class CommitBroke:
    """Making it its own failed half way."""

    session: Session
    error: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ResumeOrdered:
    """The trainer lets the rank generate again."""

    session: Session


@dataclass(frozen=True, slots=True)
class AbortOrdered:
    """The trainer, or the rank itself after an error, ends the session."""

    session: Session


@dataclass(frozen=True, slots=True)
class LimitReached:
    """The trainer said nothing for the session's own limit."""

    session: Session


@dataclass(frozen=True, slots=True)
class WeightsLost:
    """The rank saw that its weights are no longer what its last commit was written to.

    ``session`` is the one for which it looked, open or not.
    """

    session: Session


EngineEvent = (
    Opened | FrameSeen | AllApplied | ViewClosed | CommitOrdered | CommitBroke | ResumeOrdered | AbortOrdered
    | LimitReached | WeightsLost
)  # fmt: skip
"""Any fact an engine rank can be told."""

ENGINE_EVENTS: tuple[type[EngineEvent], ...] = EngineEvent.__args__


# -- guards -----------------------------------------------------------------------------------------------


def ours(facts: EngineFacts, event: Any, state: EngineState) -> bool:
    """It belongs to the open session."""
    return facts.live(event.session)


def newer(facts: EngineFacts, event: Opened, state: EngineState) -> bool:
    """A session of an epoch that is above every one seen here, open or closed."""
    return event.session.epoch > max(facts.fenced, facts.session.epoch if facts.session else 0)


def in_turn(facts: EngineFacts, event: FrameSeen, state: EngineState) -> bool:
    """The frame of the open session whose turn it is."""
    return (
        ours(facts, event, state)
        and facts.plan is not None
        and event.index == facts.frames < facts.plan.buckets
    )


def all_frames(facts: EngineFacts, event: AllApplied, state: EngineState) -> bool:
    """Every bucket of the plan was seen in the open session."""
    return ours(facts, event, state) and facts.plan is not None and facts.frames == facts.plan.buckets


def whole(facts: EngineFacts, event: Any, state: EngineState) -> bool:
    """The open session ends, and the old weights are untouched."""
    return ours(facts, event, state) and not facts.torn


def torn(facts: EngineFacts, event: Any, state: EngineState) -> bool:
    """The open session ends, and leaves a mix, or weights that were never proven."""
    return ours(facts, event, state) and facts.torn


def other(facts: EngineFacts, event: Any, state: EngineState) -> bool:
    """It belongs to a session that is not the open one."""
    return not ours(facts, event, state)


def buries(facts: EngineFacts, event: AbortOrdered, state: EngineState) -> bool:
    """It closes the epoch of the open session, which is another one's: that can go no further."""
    return other(facts, event, state) and not beneath(facts, event, state)


def beneath(facts: EngineFacts, event: AbortOrdered, state: EngineState) -> bool:
    """It is of an epoch below the open session's, which the opening has closed."""
    return facts.session is not None and event.session.epoch < facts.session.epoch


def ends_whole(facts: EngineFacts, event: AbortOrdered, state: EngineState) -> bool:
    """The open session ends, by its own abort or a later one, and the old weights are untouched."""
    return not beneath(facts, event, state) and not facts.torn


def ends_torn(facts: EngineFacts, event: AbortOrdered, state: EngineState) -> bool:
    """The same, and it leaves a mix, or weights that were never proven."""
    return not beneath(facts, event, state) and facts.torn


def ended(facts: EngineFacts, event: ResumeOrdered, state: EngineState) -> bool:
    """The session is over and was committed: the word to resume came twice."""
    return event.session == facts.committed


# -- lessons ----------------------------------------------------------------------------------------------


def opened(facts: EngineFacts, event: Opened) -> EngineFacts:
    """A new session; what an earlier one tore stays torn."""
    return replace(
        facts, session=event.session, plan=event.plan, frames=0, tainted=facts.torn, touched=False,
        applied=(0, 0, ""), fenced=max(facts.fenced, event.session.epoch - 1),
    )  # fmt: skip


def seen(facts: EngineFacts, event: FrameSeen) -> EngineFacts:
    """One more frame; from the first on, a rank that loads in place is touched."""
    return replace(facts, frames=facts.frames + 1, touched=True)


def closed_view(facts: EngineFacts, event: ViewClosed) -> EngineFacts:
    """What the receipt will say."""
    return replace(facts, applied=(event.tensors, event.bytes, event.digest))


def took_over(facts: EngineFacts, event: CommitOrdered) -> EngineFacts:
    """The new version is the rank's own; whatever it was before is cleared."""
    return replace(
        facts, version=event.session.version, committed=event.session, touched=False, tainted=False
    )


def broke(facts: EngineFacts, event: CommitBroke) -> EngineFacts:
    """A mix, whatever the rank stages: the session is over."""
    return replace(_over(facts, event.session), tainted=True, version=None)


def taint(facts: EngineFacts, event: WeightsLost) -> EngineFacts:
    """However the open session ends, unless it commits, what it leaves is not whole."""
    return replace(facts, tainted=True)


def gone(facts: EngineFacts, event: WeightsLost) -> EngineFacts:
    """No session is open from now on, and the rank holds no version until a resend commits."""
    session = facts.session
    return replace(_over(facts, session) if session else facts, tainted=True, version=None)


def over(facts: EngineFacts, event: Any) -> EngineFacts:
    """The session is over and its epoch is a tombstone."""
    return _over(facts, event.session)


def over_torn(facts: EngineFacts, event: Any) -> EngineFacts:
    """The same, and the rank holds no version until a resend commits."""
    return replace(_over(facts, event.session), tainted=True, version=None)


def fence(facts: EngineFacts, event: AbortOrdered) -> EngineFacts:
    """An epoch that was never open here, or is over, is a tombstone."""
    return replace(facts, fenced=max(facts.fenced, event.session.epoch))


def _over(facts: EngineFacts, session: Session) -> EngineFacts:
    return replace(
        facts, session=None, plan=None, frames=0, touched=False, applied=(0, 0, ""),
        fenced=max(facts.fenced, session.epoch),
    )  # fmt: skip


# -- the table --------------------------------------------------------------------------------------------

Serving, Paused, Receiving = EngineState.Serving, EngineState.Paused, EngineState.Receiving
Releasing, Acked = EngineState.Releasing, EngineState.Acked
Committed, Quarantined = EngineState.Committed, EngineState.Quarantined
stays = None

# fmt: off
_ROWS: list[tuple[type[EngineEvent], EngineState, EngineState | None, Guard | None, Learn | None]] = [
    (Opened,        Serving,     Paused,      newer,      opened),
    (ResumeOrdered, Serving,     stays,       ended,      None),
    (AbortOrdered,  Serving,     stays,       other,      fence),
    (LimitReached,  Serving,     stays,       other,      None),
    (WeightsLost,   Serving,     Quarantined, None,       gone),

    (FrameSeen,     Paused,      Receiving,   in_turn,    seen),
    (Opened,        Paused,      Paused,      newer,      opened),
    (AbortOrdered,  Paused,      Serving,     ends_whole, over),
    (AbortOrdered,  Paused,      Quarantined, ends_torn,  over_torn),
    (AbortOrdered,  Paused,      stays,       beneath,    None),
    (LimitReached,  Paused,      Serving,     whole,      over),
    (LimitReached,  Paused,      Quarantined, torn,       over_torn),
    (LimitReached,  Paused,      stays,       other,      None),
    (WeightsLost,   Paused,      stays,       None,       taint),

    (FrameSeen,     Receiving,   stays,       in_turn,    seen),
    (AllApplied,    Receiving,   Releasing,   all_frames, None),
    (Opened,        Receiving,   Paused,      newer,      opened),
    (AbortOrdered,  Receiving,   Serving,     ends_whole, over),
    (AbortOrdered,  Receiving,   Quarantined, ends_torn,  over_torn),
    (AbortOrdered,  Receiving,   stays,       beneath,    None),
    (LimitReached,  Receiving,   Serving,     whole,      over),
    (LimitReached,  Receiving,   Quarantined, torn,       over_torn),
    (LimitReached,  Receiving,   stays,       other,      None),
    (WeightsLost,   Receiving,   stays,       None,       taint),

    (ViewClosed,    Releasing,   Acked,       ours,       closed_view),
    (Opened,        Releasing,   Paused,      newer,      opened),
    (AbortOrdered,  Releasing,   Serving,     ends_whole, over),
    (AbortOrdered,  Releasing,   Quarantined, ends_torn,  over_torn),
    (AbortOrdered,  Releasing,   stays,       beneath,    None),
    (LimitReached,  Releasing,   Serving,     whole,      over),
    (LimitReached,  Releasing,   Quarantined, torn,       over_torn),
    (LimitReached,  Releasing,   stays,       other,      None),
    (WeightsLost,   Releasing,   stays,       None,       taint),

    (CommitOrdered, Acked,       Committed,   ours,       took_over),
    (CommitBroke,   Acked,       Quarantined, ours,       broke),
    (Opened,        Acked,       Paused,      newer,      opened),
    (AbortOrdered,  Acked,       Serving,     ends_whole, over),
    (AbortOrdered,  Acked,       Quarantined, ends_torn,  over_torn),
    (AbortOrdered,  Acked,       stays,       beneath,    None),
    (LimitReached,  Acked,       Serving,     whole,      over),
    (LimitReached,  Acked,       Quarantined, torn,       over_torn),
    (LimitReached,  Acked,       stays,       other,      None),
    (WeightsLost,   Acked,       stays,       None,       taint),

    (ResumeOrdered, Committed,   Serving,     ours,       over),
    (CommitOrdered, Committed,   stays,       ours,       None),
    (Opened,        Committed,   Paused,      newer,      opened),
    (AbortOrdered,  Committed,   stays,       ours,       None),
    (AbortOrdered,  Committed,   Serving,     buries,     over),
    (AbortOrdered,  Committed,   stays,       beneath,    None),
    (LimitReached,  Committed,   Serving,     ours,       over),
    (LimitReached,  Committed,   stays,       other,      None),
    (WeightsLost,   Committed,   Quarantined, None,       gone),

    (Opened,        Quarantined, Paused,      newer,      opened),
    (AbortOrdered,  Quarantined, stays,       other,      fence),
    (LimitReached,  Quarantined, stays,       other,      None),
    (WeightsLost,   Quarantined, stays,       None,       None),
]
# fmt: on

ENGINE: Table[EngineState, EngineFacts] = Table(
    "engine",
    [Row(number, *row, ()) for number, row in enumerate(_ROWS, start=1)],
    start=Serving,
    final=(),
)
"""The table of an engine rank."""
