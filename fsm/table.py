"""The round, as a table. This is the protocol; everything else carries it out, draws it or checks it.

A round is one attempt to bring all participants to one version. It asks for the lock (Idle), pauses the
engines and agrees on the plan (Locked), sends (Broadcasting), waits for the proofs (Awaiting), and then has
everybody take the new version over, publishes it and puts everything back (Cleaning) before it gives the
lock back and is over (Released). Whatever goes wrong leads to Failed, which does its own putting back and
has one way out, to Released. No row goes back: a retry is a new round.

Rules of this file:

* every transition of a round is a row here, and a row is data: a fact, a source, a target, a guard, what is
  learnt, and what is ordered. There are no callbacks;
* orders are given on entering a state (``ENTRY``), after the orders of the row itself. The one exception is
  a row that orders RetryRelease: it enters Failed with everything already put back, so nothing is aborted;
* Released is entered only on evidence that the lock is not held: Unlocked, LockRefused, LeaseLost, or the
  guard "the lock is gone already";
* a row that gives up (TimedOut, CleanupFailed in Failed) fences before it releases.

The laws below are checked when this module is imported, and the explorer checks the rest in the ordinary
test run. Rows of one state stand together, in the order of a good round, then losses, then clocks.
"""

from __future__ import annotations

from . import events as e
from . import guards as g
from . import learn as k
from .errors import TableError
from .facts import Facts
from .orders import Verb
from .rows import Guard, Learn, Row, Table
from .states import State

__all__ = ["ENTRY", "LAWS", "ROUND", "check_laws"]

Idle, Locked, Broadcasting, Awaiting = State.Idle, State.Locked, State.Broadcasting, State.Awaiting
Cleaning, Failed, Released = State.Cleaning, State.Failed, State.Released
Fence, FenceAll, Publish, PutBack = Verb.Fence, Verb.FenceAll, Verb.Publish, Verb.PutBack
ReleaseLock, RetryRelease = Verb.ReleaseLock, Verb.RetryRelease

ENTRY: dict[State, Verb] = {
    Idle: Verb.AcquireLock,
    Locked: Verb.Prepare,
    Broadcasting: Verb.Broadcast,
    Awaiting: Verb.Collect,
    Cleaning: Verb.Commit,
    Failed: Verb.Abort,
    Released: Verb.Deliver,
}

stays = None

# fmt: off
# ruff: noqa: E501
_ROWS: list[tuple[type[e.Event], State, State | None, Guard | None, Learn | None, tuple[Verb, ...]]] = [
    # Idle: the ticket is in the queue ---------------------------------------------------------------------
    (e.LockGranted,     Idle,         Locked,       g.enough,              k.membership,       ()),
    (e.LockGranted,     Idle,         Failed,       g.too_few,             k.held,             ()),
    (e.LockRefused,     Idle,         Failed,       None,                  k.gone,             ()),
    (e.EngineLost,      Idle,         stays,        g.asked_for,           k.missed,           ()),
    (e.EngineLost,      Idle,         stays,        g.not_asked_for,       None,               ()),
    (e.LeaseLost,       Idle,         stays,        None,                  None,               ()),
    (e.TimedOut,        Idle,         Failed,       g.due,                 None,               ()),
    (e.TimedOut,        Idle,         stays,        g.late,                None,               ()),
    (e.Cancelled,       Idle,         Failed,       None,                  None,               ()),

    # Locked: pausing, opening, agreeing -------------------------------------------------------------------
    (e.Prepared,        Locked,       Broadcasting, g.positive,            k.agreed,           ()),
    (e.PrepareFailed,   Locked,       Failed,       None,                  None,               ()),
    (e.TransportFailed, Locked,       Failed,       None,                  None,               ()),
    (e.EngineLost,      Locked,       stays,        g.loss_holds,          k.evicted,          (Fence,)),
    (e.EngineLost,      Locked,       Failed,       g.loss_breaks,         k.evicted,          (Fence,)),
    (e.EngineLost,      Locked,       stays,        g.loss_void,           None,               ()),
    (e.LeaseLost,       Locked,       Failed,       None,                  k.gone,             ()),
    (e.TimedOut,        Locked,       Failed,       g.due,                 None,               ()),
    (e.TimedOut,        Locked,       stays,        g.late,                None,               ()),
    (e.Cancelled,       Locked,       Failed,       None,                  None,               ()),

    # Broadcasting: bytes under way ------------------------------------------------------------------------
    (e.BucketSent,      Broadcasting, stays,        g.next_bucket,         k.sent,             ()),
    (e.AllSent,         Broadcasting, Awaiting,     g.all_out,             None,               ()),
    (e.TransportFailed, Broadcasting, Failed,       None,                  None,               ()),
    (e.EngineLost,      Broadcasting, stays,        g.loss_holds,          k.evicted,          (Fence,)),
    (e.EngineLost,      Broadcasting, Failed,       g.loss_breaks,         k.evicted,          (Fence,)),
    (e.EngineLost,      Broadcasting, stays,        g.loss_void,           None,               ()),
    (e.LeaseLost,       Broadcasting, Failed,       None,                  k.gone,             ()),
    (e.TimedOut,        Broadcasting, Failed,       g.due,                 None,               ()),
    (e.TimedOut,        Broadcasting, stays,        g.late,                None,               ()),
    (e.Cancelled,       Broadcasting, Failed,       None,                  None,               ()),

    # Awaiting: receipts missing ---------------------------------------------------------------------------
    (e.EngineAcked,     Awaiting,     Cleaning,     g.last,                k.decided,          ()),
    (e.EngineAcked,     Awaiting,     stays,        g.more,                k.acked,            ()),
    (e.EngineAcked,     Awaiting,     stays,        g.again,               None,               ()),
    (e.EngineAcked,     Awaiting,     stays,        g.out,                 None,               ()),
    (e.EngineAcked,     Awaiting,     stays,        g.bad_more,            k.evicted,          (Fence,)),
    (e.EngineAcked,     Awaiting,     Cleaning,     g.bad_last,            k.evicted_decided,  (Fence,)),
    (e.EngineAcked,     Awaiting,     Failed,       g.bad_breaks,          k.evicted,          (Fence,)),
    (e.EngineAcked,     Awaiting,     Failed,       g.stranger,            None,               ()),
    (e.TransportFailed, Awaiting,     Failed,       None,                  None,               ()),
    (e.EngineLost,      Awaiting,     stays,        g.loss_more,           k.evicted,          (Fence,)),
    (e.EngineLost,      Awaiting,     Cleaning,     g.loss_last,           k.evicted_decided,  (Fence,)),
    (e.EngineLost,      Awaiting,     Failed,       g.loss_breaks,         k.evicted,          (Fence,)),
    (e.EngineLost,      Awaiting,     stays,        g.loss_void,           None,               ()),
    (e.LeaseLost,       Awaiting,     Failed,       None,                  k.gone,             ()),
    (e.TimedOut,        Awaiting,     Failed,       g.due,                 None,               ()),
    (e.TimedOut,        Awaiting,     stays,        g.late,                None,               ()),
    (e.Cancelled,       Awaiting,     Failed,       None,                  None,               ()),

    # Cleaning: commit, publish, put back, give the lock back ------------------------------------------------
    (e.EngineCommitted, Cleaning,     stays,        g.c_more,              k.committed,        ()),
    (e.EngineCommitted, Cleaning,     stays,        g.c_last,              k.committed_last,   (Publish,)),
    (e.EngineCommitted, Cleaning,     stays,        g.c_again,             None,               ()),
    (e.CommitFailed,    Cleaning,     stays,        g.x_more,              k.quarantined,      (Fence,)),
    (e.CommitFailed,    Cleaning,     stays,        g.x_last,              k.quarantined_last, (Fence, Publish)),
    (e.CommitFailed,    Cleaning,     Failed,       g.x_breaks,            k.quarantined,      (Fence,)),
    (e.CommitFailed,    Cleaning,     stays,        g.x_void,              None,               ()),
    (e.Published,       Cleaning,     stays,        g.asked,               k.published,        (PutBack,)),
    (e.PublishFailed,   Cleaning,     Failed,       g.asked,               k.unpublished,      ()),
    (e.Cleaned,         Cleaning,     stays,        g.published_unsettled, k.put_back,         (ReleaseLock,)),
    (e.CleanupFailed,   Cleaning,     Failed,       g.unsettled,           None,               ()),
    (e.Unlocked,        Cleaning,     Released,     g.settled,             k.gone,             ()),
    (e.UnlockFailed,    Cleaning,     Failed,       g.settled,             k.retried,          (RetryRelease,)),
    (e.EngineLost,      Cleaning,     stays,        g.l_more,              k.quarantined,      (Fence,)),
    (e.EngineLost,      Cleaning,     stays,        g.l_last,              k.quarantined_last, (Fence, Publish)),
    (e.EngineLost,      Cleaning,     Failed,       g.l_breaks,            k.quarantined,      (Fence,)),
    (e.EngineLost,      Cleaning,     stays,        g.l_after,             k.quarantined,      (Fence,)),
    (e.EngineLost,      Cleaning,     stays,        g.loss_void,           None,               ()),
    (e.LeaseLost,       Cleaning,     Released,     g.settled,             k.gone,             ()),
    (e.LeaseLost,       Cleaning,     Failed,       g.unsettled,           k.gone,             ()),
    (e.TimedOut,        Cleaning,     Failed,       g.due_unsettled,       None,               ()),
    (e.TimedOut,        Cleaning,     Failed,       g.due_settled,         k.retried,          (RetryRelease,)),
    (e.TimedOut,        Cleaning,     stays,        g.late,                None,               ()),
    (e.Cancelled,       Cleaning,     stays,        None,                  None,               ()),

    # Failed: answers to Abort -------------------------------------------------------------------------------
    (e.EngineReverted,  Failed,       stays,        g.f_revert,            k.reverted,         ()),
    (e.EngineReverted,  Failed,       stays,        g.f_revert_incredible, k.quarantined,      ()),
    (e.EngineReverted,  Failed,       stays,        g.f_revert_late,       None,               ()),
    (e.EngineCommitted, Failed,       stays,        g.f_commit,            k.committed,        ()),
    (e.EngineCommitted, Failed,       stays,        g.f_commit_late,       None,               ()),
    (e.CommitFailed,    Failed,       stays,        g.f_torn,              k.quarantined,      ()),
    (e.Published,       Failed,       stays,        g.asked,               k.published,        ()),
    (e.PublishFailed,   Failed,       stays,        g.asked,               k.unpublished,      ()),
    (e.EngineAcked,     Failed,       stays,        g.began_all_out,       None,               ()),
    (e.TransportFailed, Failed,       stays,        None,                  None,               ()),
    (e.EngineLost,      Failed,       stays,        g.loss_remaining,      k.quarantined,      (Fence,)),
    (e.EngineLost,      Failed,       stays,        g.loss_void,           None,               ()),

    # Failed: settling, and the lock -------------------------------------------------------------------------
    (e.Cleaned,         Failed,       stays,        g.proven_ours,         k.put_back,         (ReleaseLock,)),
    (e.Cleaned,         Failed,       Released,     g.proven_gone,         k.put_back,         ()),
    (e.Cleaned,         Failed,       stays,        g.gave_up,             None,               ()),
    (e.CleanupFailed,   Failed,       stays,        g.unsettled_ours,      k.given_up,         (FenceAll, ReleaseLock)),
    (e.CleanupFailed,   Failed,       Released,     g.unsettled_gone,      k.given_up,         (FenceAll,)),
    (e.CleanupFailed,   Failed,       stays,        g.gave_up,             None,               ()),
    (e.TimedOut,        Failed,       stays,        g.due_unsettled_ours,  k.given_up,         (FenceAll, ReleaseLock)),
    (e.TimedOut,        Failed,       Released,     g.due_unsettled_gone,  k.given_up,         (FenceAll,)),
    (e.TimedOut,        Failed,       stays,        g.due_settled,         k.retried,          (RetryRelease,)),
    (e.TimedOut,        Failed,       stays,        g.late,                None,               ()),
    (e.LockGranted,     Failed,       stays,        g.not_gone,            k.held,             ()),
    (e.LockRefused,     Failed,       stays,        g.unsettled_ours,      k.gone,             ()),
    (e.LockRefused,     Failed,       Released,     g.settled_ours,        k.gone,             ()),
    (e.LeaseLost,       Failed,       stays,        g.unsettled,           k.gone,             ()),
    (e.LeaseLost,       Failed,       Released,     g.settled,             k.gone,             ()),
    (e.Unlocked,        Failed,       Released,     g.settled,             k.gone,             ()),
    (e.UnlockFailed,    Failed,       stays,        g.settled,             k.retried,          (RetryRelease,)),
    (e.Cancelled,       Failed,       stays,        None,                  None,               ()),

    # Released: too late -------------------------------------------------------------------------------------
    (e.Cleaned,         Released,     stays,        g.gave_up,             None,               ()),
    (e.CleanupFailed,   Released,     stays,        g.gave_up,             None,               ()),
    (e.EngineCommitted, Released,     stays,        g.late_answer,         None,               ()),
    (e.EngineReverted,  Released,     stays,        g.late_answer,         None,               ()),
    (e.CommitFailed,    Released,     stays,        g.late_answer,         None,               ()),
    (e.Published,       Released,     stays,        g.late_publication,    None,               ()),
    (e.PublishFailed,   Released,     stays,        g.late_publication,    None,               ()),
    (e.EngineLost,      Released,     stays,        None,                  None,               ()),
    (e.LeaseLost,       Released,     stays,        None,                  None,               ()),
    (e.TimedOut,        Released,     stays,        None,                  None,               ()),
    (e.Cancelled,       Released,     stays,        None,                  None,               ()),
]
# fmt: on

_EVIDENCE = frozenset({e.Unlocked, e.LockRefused, e.LeaseLost})
_GONE_ALREADY = frozenset({"proven_gone", "unsettled_gone", "due_unsettled_gone"})
_FORWARD: dict[type[e.Event], tuple[State, State]] = {
    e.Prepared: (Locked, Broadcasting),
    e.AllSent: (Broadcasting, Awaiting),
}

LAWS: dict[str, str] = {
    "downhill": "every move goes to a state of higher rank, so a round ends",
    "failed-released": "Failed is left only to Released, and Released never",
    "evidence": "Released is entered only on evidence that the lock is not held",
    "last-receipt": "Cleaning is entered only from Awaiting, by EngineAcked or EngineLost",
    "publish": "Publish is ordered only in Cleaning, by a row that empties the missing",
    "fence-first": "a row that gives up in Failed fences everybody, before it releases",
    "release": "ReleaseLock is ordered only by a row that settles",
    "watchdogs": "watchdogs have a row in every state",
    "forward": "Prepared and AllSent move one state forward and nowhere else",
}
"""The laws of the table, by name."""


def _broken(row: Row[State]) -> list[str]:
    """The laws that this row breaks."""
    source, goal, moved = row.source, row.goal, row.target is not None
    guard = row.guard.__name__ if row.guard else ""
    gives_up = row.event in (e.CleanupFailed, e.TimedOut) and row.learn is k.given_up
    checks = {
        "downhill": not moved or goal.rank > source.rank,
        "failed-released": not moved
        or (source is not Released and (source is not Failed or goal is Released)),
        "evidence": not moved or goal is not Released or row.event in _EVIDENCE or guard in _GONE_ALREADY,
        "last-receipt": not moved
        or goal is not Cleaning
        or (source is Awaiting and row.event in (e.EngineAcked, e.EngineLost)),
        "publish": (Publish in row.orders) == (row.learn in (k.committed_last, k.quarantined_last))
        and (Publish not in row.orders or source is Cleaning),
        "fence-first": not gives_up or row.orders[:1] == (FenceAll,),
        "release": ReleaseLock not in row.orders or row.learn in (k.put_back, k.given_up),
        "forward": row.event not in _FORWARD or (source, goal) == _FORWARD[row.event],
    }
    return [law for law, holds in checks.items() if not holds]


def check_laws(table: Table[State, Facts]) -> None:
    """Refuse a table that breaks a law.

    Raises:
        TableError: naming the law and the row.
    """
    for row in table.rows:
        for law in _broken(row):
            raise TableError(f"law {law!r} ({LAWS[law]}) is broken by {row}")
    for state in table.states:
        for watchdog in sorted(e.WATCHDOGS, key=lambda event: event.__name__):
            if not table.rows_for(state, watchdog):
                raise TableError(
                    f"law 'watchdogs' ({LAWS['watchdogs']}): {watchdog.__name__} in {state.name}"
                )


def build(
    rows: list[tuple[type[e.Event], State, State | None, Guard | None, Learn | None, tuple[Verb, ...]]],
) -> Table[State, Facts]:
    """A table of the round from rows, numbered in their order; the laws are checked.

    Raises:
        TableError: a law is broken.
    """
    numbered = [Row(number, *row) for number, row in enumerate(rows, start=1)]
    table: Table[State, Facts] = Table("round", numbered, start=Idle, final=(Released,), entry=ENTRY)
    check_laws(table)
    return table


ROUND: Table[State, Facts] = build(_ROWS)
"""The table of the round."""
