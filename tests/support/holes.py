"""Fifteen holes that exploring earlier tables found, each to be torn open again by taking its fix out.

A hole is found twice. The exploration of the table alone (``chaos``) names the broken ``promise``. Then the
real driver runs by the torn table: two trainers with every misfortune of some kinds at every step, or one
round with those misfortunes that show it, and somebody complains in the ``words`` given here. Where our
driver does not let a fault come so far, the scene tells the round what another driver could tell it; the text
of the hole says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import scenes
from tablechanges import Edit, changed, edit, follow, row, without
from weightsync.fsm import events as e
from weightsync.fsm import guards as g
from weightsync.fsm import learn as k
from weightsync.fsm.explore import small_round
from weightsync.fsm.facts import Facts
from weightsync.fsm.orders import Verb
from weightsync.fsm.rows import Row, Table
from weightsync.fsm.states import Disposition, Publication, State
from weightsync.fsm.table import ROUND

__all__ = ["HOLES", "Hole", "Torn"]

ONE, BOTH = small_round(2, 1), small_round(2, 2)


@dataclass(frozen=True)
class Torn:
    """One way to take a fix out.

    Args:
        edits: of the round's table.
        promise: which the exploration of the table names.
        show: what complains once rounds follow the table; None where only the exploration can see it.
        words: of the complaint.
        added: rows that come instead.
        patch: what else is changed in the product.
        facts: the round that is explored.
    """

    edits: tuple[Edit, ...]
    promise: str
    show: scenes.Show | None
    words: str = ""
    added: tuple[Row[State], ...] = ()
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    facts: Facts = ONE
    table: Table[State, Facts] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", changed(*self.edits, added=self.added) if self.edits else ROUND)

    def tear(self, patch: pytest.MonkeyPatch) -> None:
        """Have the product work without the fix."""
        if self.edits:
            follow(self.table)(patch)
        if self.patch is not None:
            self.patch(patch)


@dataclass(frozen=True)
class Hole:
    """What was wrong once, and each way in which it would be so again."""

    what: str
    torn: dict[str, Torn]


# -- what stands in place of a fix ---------------------------------------------------------------------------


def counted(facts: Facts, event: e.EngineLost, state: State) -> bool:
    """Each loss that is told is one engine less."""
    return len(facts.members) - len(facts.evicted) - 1 >= facts.quorum


def counted_out(facts: Facts, event: e.EngineLost, state: State) -> bool:
    """The opposite."""
    return not counted(facts, event, state)


def others_missing(facts: Facts, event: Any, state: State) -> bool:
    """Whether others owe their commit, whatever the quorum."""
    return event.engine in facts.missing and bool(facts.missing - {event.engine})


def nobody_missing(facts: Facts, event: Any, state: State) -> bool:
    """It was the last, whatever the quorum."""
    return facts.missing == {event.engine}


def bad(facts: Facts, event: e.EngineAcked, state: State) -> bool:
    """A bad receipt, whatever the quorum."""
    return event.engine in facts.remaining and not g.proves(facts, event)


def shrunk(facts: Facts, event: e.LockGranted) -> Facts:
    """The quorum is of those who are left."""
    known = k.membership(facts, event)
    return replace(known, quorum=min(known.quorum, len(known.members)))


def undone(facts: Facts, event: Any) -> Facts:
    """What was not answered was not published."""
    return replace(k.given_up(facts, event), publication=Publication.no)


def believe_the_untouched(patch: pytest.MonkeyPatch) -> None:
    """Whoever stages, or was sent nothing, is as it was."""
    real = Facts.disposition

    def derived(facts: Facts, engine: Any) -> Disposition:
        found = real(facts, engine)
        untouched = engine not in facts.inplace or facts.sent == 0
        if found is Disposition.quarantined and untouched and engine not in facts.tainted:
            return Disposition.serving_old
        return found

    patch.setattr(Facts, "disposition", derived)


def forget_the_quarantine(patch: pytest.MonkeyPatch) -> None:
    """What an engine was before the round is nobody's business."""
    real = Facts.disposition
    patch.setattr(
        Facts, "disposition", lambda facts, engine: real(replace(facts, tainted=frozenset()), engine)
    )


def counting(*states: str) -> tuple[Edit, ...]:
    """The quorum asked by counting, where bytes are sent."""
    return tuple(
        change
        for state in states
        for change in (
            edit("EngineLost", state, "loss_holds", guard=counted),
            edit("EngineLost", state, "loss_breaks", guard=counted_out),
            edit("EngineLost", state, "loss_void"),
        )
    )


def below(event: type[e.Event], letter: str, words: str, *kinds: str) -> Torn:
    """Whoever falls out in Cleaning is quarantined, and the round goes on."""
    edits = [edit(event.__name__, "Cleaning", f"{letter}_{how}") for how in ("more", "last", "breaks")]
    rows = (
        row(event, State.Cleaning, others_missing, k.quarantined, Verb.Fence),
        row(event, State.Cleaning, nobody_missing, k.quarantined_last, Verb.Fence, Verb.Publish),
    )
    return Torn(tuple(edits), "publish", scenes.system(scenes.BOTH, *kinds), words, rows, facts=BOTH)


def given_up(**changes: Any) -> tuple[Edit, ...]:
    """Every row that gives up in Failed, changed."""
    guards: dict[str, Collection[str]] = {
        "TimedOut": ("due_unsettled_ours", "due_unsettled_gone"),
        "CleanupFailed": ("unsettled_ours", "unsettled_gone"),
    }
    return tuple(edit(event, "Failed", when, **changes) for event in guards for when in guards[event])


# -- the holes -----------------------------------------------------------------------------------------------

LOST = scenes.system(scenes.ONE, "alarm")

HOLES: dict[int, Hole] = {
    1: Hole(
        "an engine that was lost may have sent its receipt before: it neither fails the round nor comes back",
        {
            "no row": Torn((edit("EngineAcked", "Awaiting", "out"),), "owed", LOST, "honest"),
            "fails": Torn(
                (edit("EngineAcked", "Awaiting", "out", target=State.Failed),),
                "failing", scenes.a_receipt_of_somebody_lost, "Failed",
            ),
            "counts": Torn(
                (edit("EngineAcked", "Awaiting", "out", learn=k.acked),),
                "proof", scenes.a_receipt_of_somebody_lost, "counts",
            ),
        },
    ),
    2: Hole(
        "a loss that is told twice, or by a stranger, is no further loss. The driver tells each but once; a "
        "transport and a monitor may both have seen it",
        {
            "no row": Torn(
                (edit("EngineLost", None, "loss_void"),), "watchdogs", scenes.a_loss_told_twice, "refused"
            ),
            "counted": Torn(
                counting("Locked", "Broadcasting"), "failing", scenes.a_loss_told_twice, "Failed"
            ),
        },
    ),
    3: Hole(
        "an answer to Commit may cross the time-out. After the end our driver has closed every call, so that "
        "in Released it is somebody else who brings it",
        {
            "EngineCommitted in Failed": Torn(
                (edit("EngineCommitted", "Failed"),), "owed", scenes.system(scenes.BOTH, "raise"), "honest"
            ),
            "CommitFailed in Failed": Torn(
                (edit("CommitFailed", "Failed"),), "owed", scenes.system(scenes.ONE, "lose"), "honest"
            ),
            "EngineCommitted in Released": Torn(
                (edit("EngineCommitted", "Released"),), "owed", scenes.answers_after_the_end, "refused"
            ),
            "CommitFailed in Released": Torn(
                (edit("CommitFailed", "Released"),), "owed", scenes.answers_after_the_end, "refused"
            ),
        },
    ),
    4: Hole(
        "when too many commits are refused, or too many engines die, the round fails and publishes nothing",
        {
            "refusals": below(e.CommitFailed, "x", "P3 publish", "raise"),
            "deaths": below(e.EngineLost, "l", "P3 publish", "alarm"),
        },
    ),
    5: Hole(
        "when the last commit that was missing is answered by a refusal or a death, the round publishes "
        "then, and not only when its clock ends it",
        {
            "refusal": Torn(
                (edit("CommitFailed", "Cleaning", "x_last", learn=k.quarantined, orders=(Verb.Fence,)),),
                "awaited", scenes.the_last_commit_is_refused, "nobody published",
            ),
            "death": Torn(
                (edit("EngineLost", "Cleaning", "l_last", learn=k.quarantined, orders=(Verb.Fence,)),),
                "awaited", scenes.the_last_engine_dies, "nobody published",
            ),
        },
    ),
    6: Hole(
        "success needs the commits and the ledger's answer. The driver puts back when it is told to, so that "
        "without the guard alone it still waits",
        {
            "unguarded": Torn(
                (edit("Cleaned", "Cleaning", guard=g.unsettled),), "clean", scenes.cleaned_before_commits,
                "accepted",
            ),
            "no step of its own": Torn(
                (
                    edit("Cleaned", "Cleaning", guard=g.unsettled),
                    edit("EngineCommitted", "Cleaning", "c_last", learn=k.committed, orders=(Verb.PutBack,)),
                ),
                "clean", scenes.system(scenes.ONE, "old"), "good",
            ),
        },
    ),
    7: Hole(
        "an engine that dies while the lock is waited for makes the quorum harder to reach, not smaller",
        {
            "unguarded": Torn(
                (edit("LockGranted", "Idle", "too_few"), edit("LockGranted", "Idle", guard=None)),
                "quorum", scenes.system(scenes.BOTH, "alarm"), "P3 publish", facts=BOTH,
            ),
            "of the survivors": Torn(
                (
                    edit("LockGranted", "Idle", "too_few"),
                    edit("LockGranted", "Idle", guard=None, learn=shrunk),
                ),
                "facts", scenes.somebody_is_dead_from_the_beginning, "published", facts=BOTH,
            ),
        },
    ),
    8: Hole(
        "that an engine stages, or that nothing was sent, does not make it old while calls are under way: "
        "only its own word does",
        {
            "derived": Torn(
                (), "disposition", scenes.system(scenes.ONE, "lose"), "P10 pause",
                patch=believe_the_untouched,
            )
        },
    ),
    9: Hole(
        "in Failed an end is clean only if every open engine and the ledger answered. The driver asks the "
        "same before it says so",
        {
            "unguarded": Torn(
                (
                    edit("Cleaned", "Failed", "proven_ours", guard=g.unsettled_ours),
                    edit("Cleaned", "Failed", "proven_gone", guard=g.unsettled_gone),
                ),
                "clean", scenes.cleaned_before_answers, "accepted",
            )
        },
    ),
    10: Hole(
        "a round that fails does not hand out an engine as old that was quarantined before it began",
        {
            "forgotten": Torn(
                (), "taint", scenes.a_round_after_a_torn_one, "e0 is serving_old, but Quarantined",
                patch=forget_the_quarantine, facts=small_round(2, 1, tainted=1),
            )
        },
    ),
    11: Hole(
        "giving up does not make a publication undone that the ledger may have",
        {
            "no means no": Torn(
                given_up(learn=undone), "publication", scenes.the_ledger_falls_silent, "published is no"
            )
        },
    ),
    12: Hole(
        "whoever is out is fenced: nobody goes on waiting for it, and none of its calls outlives the lock. "
        "Rows into Failed are fenced by the driver's Abort as well",
        {
            str(fenced): Torn(
                (without(Verb.Fence, fenced.event.__name__, fenced.source.name, fenced.guard.__name__),),
                "fence", LOST if str(fenced).endswith("[loss_more] / Fence") else None, "fence",
            )
            for fenced in ROUND.rows
            if Verb.Fence in fenced.orders and fenced.guard is not None
        },
    ),
    13: Hole(
        "who gives up fences before the release. The driver bounds each call in Failed, so that what is left "
        "to fence is its own script, with the undo list in it",
        {
            "not at all": Torn(
                given_up(orders=(Verb.ReleaseLock,)), "fence", scenes.undos_that_hang, "never begun"
            ),
            "after the release": Torn(
                (edit("TimedOut", "Failed", "due_unsettled_ours", orders=(Verb.ReleaseLock, Verb.FenceAll)),),
                "orders", scenes.undos_that_hang, "after the release",
            ),
        },
    ),
    14: Hole(
        "a bad receipt costs its engine, and no more than another loss does",
        {
            "strict": Torn(
                (
                    edit("EngineAcked", "Awaiting", "bad_more"),
                    edit("EngineAcked", "Awaiting", "bad_last"),
                    edit("EngineAcked", "Awaiting", "bad_breaks", guard=bad),
                ),
                "failing", scenes.somebody_takes_other_bytes, "failed",
            )
        },
    ),
}  # fmt: skip
"""By number. The fifteenth, a quorum of nobody, is not in the table: see the tests."""
