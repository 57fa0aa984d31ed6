"""Mutation twins of the composed system: each breaks a promise in the product, and the explorer names it.

Whatever else a mutant breaks, the promise it was made for must be among what is found; on the real code the
same exploration finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from breakers import (
    Patch,
    begin_again,
    prove_too_early,
    publish_with_the_first,
    serve_a_mix,
    set_to,
    take_whatever_comes,
)
from tablechanges import change_engine, change_round, guarded
from weightsync.fsm import driver as driver_module
from weightsync.fsm import engine_table as t
from weightsync.fsm import events as e
from weightsync.fsm import learn as k
from weightsync.fsm import scripts
from weightsync.fsm.answers import Answers
from weightsync.fsm.calls import Act
from weightsync.fsm.driver import Driver
from weightsync.fsm.ledger import Ledger
from weightsync.fsm.lock import LockBook
from weightsync.fsm.open_calls import NEVER, OpenCalls
from weightsync.fsm.orders import Verb
from weightsync.fsm.receipt import Receipt
from weightsync.fsm.rows import Row
from weightsync.fsm.states import EngineState, State
from weightsync.fsm.table import ROUND
from weightsync.testing.composed import WORLDS, Setup
from weightsync.testing.exploring import explore_composed
from weightsync.testing.lots import played
from weightsync.testing.watch import COMPOSED_PROMISES

pytestmark = [pytest.mark.mutation, pytest.mark.usefixtures("untraced")]

ONE, ALL, CROWD, CROWD_ALL = WORLDS[:4]


# -- how the product is changed -----------------------------------------------------------------------------


# -- the mutants --------------------------------------------------------------------------------------------


def forget_the_lease(self: Driver, until: float) -> None:
    """The holder never looks at the end of its lease."""


def grant_at_once(epoch: int, *, lease: float, not_before: float) -> LockBook:
    """A keeper that was started anew does not wait for the leases of the one before."""
    return LockBook(lease=lease, epoch=epoch)


def grant_the_same_epoch(self: LockBook, now: float) -> Any:
    """The epoch of a grant is that of the one before."""
    if self.holder is not None or not self.queue or now < self.not_before:
        return self, ()
    real = LockBook.__dict__["_real_grant"]
    book, notices = real(self, now)
    epoch = max(1, self.epoch)
    again = replace(book, epoch=epoch, holder=book.holder and replace(book.holder, epoch=epoch))
    return again, tuple(replace(notice, epoch=epoch) for notice in notices)


def same_epoch(patch: Patch) -> None:
    """Two grants share an epoch."""
    patch.setattr(LockBook, "_real_grant", LockBook._grant, raising=False)
    patch.setattr(LockBook, "_grant", grant_the_same_epoch)


def release_without_an_answer(row: Row[Any]) -> Row[Any]:
    """A round that could not give the lock back says that it has."""
    if row.event is e.UnlockFailed and row.source is State.Cleaning:
        return replace(row, target=State.Released, learn=k.gone, orders=())
    return row


def keep_silent_at_the_end(patch: Patch) -> None:
    """A lease that has ended by our clock is not told to the keeper."""
    real = Driver._deliver

    def deliver(self: Driver) -> None:
        self._lapsed = False
        real(self)

    patch.setattr(Driver, "_deliver", deliver)


def resume_whatever(patch: Patch) -> None:
    """Everybody who was asked to pause is resumed, and called new, although one did not commit."""
    real = k.quarantined

    def forgiven(facts: Any, event: Any) -> Any:
        after = real(facts, event)
        return replace(after, quarantined=facts.quarantined, committed=facts.committed | {event.engine})

    change = change_round(
        lambda row: replace(row, learn=forgiven) if row.event is e.CommitFailed and row.learn is real else row
    )
    change(patch)


def never(self: OpenCalls) -> float:
    """No state has a deadline."""
    return NEVER


def deadline_of_awaiting(patch: Patch) -> None:
    """Awaiting waits for ever."""
    real = OpenCalls._phase_end

    def phase_end(self: OpenCalls) -> float:
        return NEVER if self.round.state is State.Awaiting else real(self)

    patch.setattr(OpenCalls, "_phase_end", phase_end)
    patch.setattr(OpenCalls, "_silence_end", never)


def admit_everything(self: Ledger, version: int, digest: str) -> None:
    """A lower version is as welcome as a higher one."""


def members_leave(row: Row[Any]) -> Row[Any]:
    """Whoever is lost was never a member."""

    def gone(facts: Any, event: Any) -> Any:
        return replace(facts, members=facts.members - {event.engine})

    return replace(row, learn=gone) if row.learn is k.evicted and row.event is e.EngineLost else row


def take_half_a_resend(patch: Patch) -> None:
    """A frame that is missing is not missed, and nobody looks at the digest."""

    def in_range(facts: t.EngineFacts, event: Any, state: EngineState) -> bool:
        return facts.live(event.session) and facts.plan is not None and event.index < facts.plan.buckets

    def seen(facts: t.EngineFacts, event: Any) -> t.EngineFacts:
        return replace(facts, frames=event.index + 1, touched=True)

    change = change_engine(
        lambda row: replace(row, guard=in_range, learn=seen) if row.event is t.FrameSeen else row
    )
    change(patch)
    real = Receipt.mismatch
    patch.setattr(
        Receipt,
        "mismatch",
        lambda self, round, epoch, expected: real(self, round, epoch, replace(expected, digest="")),
    )


def call_them_old(patch: Patch) -> None:
    """Nobody is asked to end its session: all are believed to be as they were."""

    def abort(self: Driver, engines: Any) -> None:
        real_each, self._each = self._each, lambda *_, **__: None  # type: ignore[method-assign]
        real(self, engines)
        self._each = real_each  # type: ignore[method-assign]
        for engine in sorted(engines):
            self.fire(e.EngineReverted(engine))

    real = scripts.Scripts._abort
    patch.setattr(Driver, "_abort", abort)


def give_back_at_once(patch: Patch) -> None:
    """Failed waits for nobody."""
    real = Driver._busy
    patch.setattr(
        Driver, "_busy", lambda self, beside: self.round.state is not State.Failed and real(self, beside)
    )


def forget_the_resume(patch: Patch) -> None:
    """An engine whose resume is given up on is called new."""
    patch.setattr(Driver, "_lose_the_paused", lambda self: None)


def refuse_the_late(row: Row[Any]) -> Row[Any] | None:
    """A commit that crosses the time-out finds no row."""
    return None if row.event is e.EngineCommitted and row.source is State.Failed else row


def publish_nothing(row: Row[Any]) -> Row[Any]:
    """The last commit orders nothing: only the clock ends it."""
    if row.event is e.EngineCommitted and guarded(row) == "c_last":
        return replace(row, learn=k.committed, orders=())
    return row


def nothing_is_shut(self: Ledger, epoch: int) -> Ledger:
    """A publication that was given up on may still arrive, and counts."""
    return self


def no_fence(self: Ledger, version: int, digest: str, epoch: int) -> None:
    """The ledger takes the version of an epoch that is over."""
    self.admit(version, digest)


def resume_at_commit(patch: Patch) -> None:
    """An engine is resumed as soon as it has committed."""
    real = Answers._engine_good

    def good(self: Any, act: Act, engine: Any, value: object) -> None:
        real(self, act, engine, value)
        if act is Act.commit:
            self._driver.call(Act.resume, engine=engine, limit=self._driver.limits.engine)

    patch.setattr(Answers, "_engine_good", good)


def bury_nothing(patch: Patch) -> None:
    """The book forgets a ticket as soon as it is closed."""
    real = LockBook._close

    def close(self: LockBook, ended: Any, now: float) -> Any:
        book, notices = real(self, ended, now)
        return replace(book, closed=self.closed), notices

    patch.setattr(LockBook, "_close", close)


def expire_one_lease_late(patch: Patch) -> None:
    """The book says when a lease ends, and does nothing about it until another one is over."""
    real = LockBook.expire
    patch.setattr(LockBook, "expire", lambda self, now: real(self, now - self.lease))


def stay_paused(row: Row[Any]) -> Row[Any] | None:
    """An engine whose trainer vanished never leaves the pause by itself."""
    if row.event is t.LimitReached and row.target is not None:
        return replace(row, target=None, learn=None)
    return row


def end_your_own_only(row: Row[Any]) -> Row[Any]:
    """An abort of a later epoch is remembered, and leaves the session that is open as it is."""
    open_still = row.event is t.AbortOrdered and row.source is not EngineState.Quarantined

    def whole(facts: t.EngineFacts, event: Any, state: EngineState) -> bool:
        return t.whole(facts, event, state)

    def torn(facts: t.EngineFacts, event: Any, state: EngineState) -> bool:
        return t.torn(facts, event, state)

    guards = {t.ends_whole: whole, t.ends_torn: torn, t.beneath: t.other}
    if not open_still or row.guard not in guards:
        return row
    return replace(row, guard=guards[row.guard], learn=t.fence if row.guard is t.beneath else row.learn)


def lose_whoever_it_does_not_fit(self: scripts.Scripts, engine: Any, error: Any) -> None:
    """Each engine that refuses the plan is lost at once, whatever the others say."""
    self.fire(e.EngineLost(engine, error))


@dataclass(frozen=True)
class Twin:
    """A mutant, the promise it breaks, and where."""

    mutate: Callable[[Patch], None]
    promise: str
    setup: Setup = ONE
    depth: int = 1
    kinds: tuple[str, ...] = ()


TWINS: dict[str, Twin] = {
    "the holder forgets its lease": Twin(
        set_to(Driver, "leased", forget_the_lease), "P1 one owner", kinds=("stop",)
    ),
    "a new keeper does not wait": Twin(
        set_to(LockBook, "restore", staticmethod(grant_at_once)),
        "P1 one owner",
        kinds=("keeper", "stop"),
        depth=2,
    ),
    "two grants share an epoch": Twin(same_epoch, "P1 release once", kinds=("kill",)),
    "released without evidence": Twin(
        change_round(release_without_an_answer), "P1 evidence", kinds=("raise", "lose")
    ),
    "the keeper is not told": Twin(keep_silent_at_the_end, "P1 evidence", kinds=("late", "wait")),
    "a receipt with the buffer in use": Twin(change_engine(prove_too_early), "P2 proof", kinds=("kill",)),
    "published with the first commit": Twin(
        change_round(publish_with_the_first), "P3 publish", kinds=("late", "lose")
    ),
    "a torn engine serves": Twin(change_engine(serve_a_mix), "P4 whole", kinds=("raise", "cancel")),
    "a refused commit counts": Twin(resume_whatever, "P8 members", ALL, kinds=("raise", "kill")),
    "an engine takes any opening": Twin(
        change_engine(take_whatever_comes), "P5 stale", kinds=("late", "again")
    ),
    "a receipt of another round counts": Twin(
        set_to(driver_module, "foreign", lambda event, facts: False), "P5 stale", kinds=("old",)
    ),
    "no deadline in Awaiting": Twin(deadline_of_awaiting, "P6 deadline", kinds=("lose",)),
    "nothing is shut": Twin(set_to(Ledger, "shut", nothing_is_shut), "P3 publish", kinds=("late",)),
    "a ledger without a fence": Twin(set_to(Ledger, "_check", no_fence), "P3 publish", kinds=("late",)),
    "resumed before it is published": Twin(resume_at_commit, "P3 publish", kinds=("old",)),
    "a closed ticket is forgotten": Twin(bury_nothing, "P1 release once", kinds=("late", "again")),
    "a lease ends and nobody acts": Twin(expire_one_lease_late, "deadlock", kinds=("kill",)),
    "the ledger takes any version": Twin(
        set_to(Ledger, "admit", admit_everything), "P7 versions", CROWD, kinds=("late", "first")
    ),
    "the lost were never members": Twin(change_round(members_leave), "P8 members", kinds=("alarm",)),
    "half a resend counts": Twin(take_half_a_resend, "P9 anew", kinds=("lose",)),
    "a round goes back": Twin(change_round(begin_again), "P9 anew", kinds=("raise",)),
    "nobody ends a pause": Twin(call_them_old, "P10 pause", kinds=("cancel",)),
    "Failed waits for nobody": Twin(give_back_at_once, "fence", kinds=("raise", "cancel")),
    "the last commit orders nothing": Twin(change_round(publish_nothing), "good", kinds=("old",)),
    "an honest answer has no row": Twin(change_round(refuse_the_late), "honest", ALL, kinds=("raise",)),
    "an older session stays open": Twin(
        change_engine(end_your_own_only), "P10 pause", depth=2, kinds=("kill", "cancel")
    ),
    "who does not fit is lost at once": Twin(
        set_to(scripts.Scripts, "unfit", lose_whoever_it_does_not_fit), "misfit", kinds=("unfit",)
    ),
    "who does not fit is lost at once, and all are needed": Twin(
        set_to(scripts.Scripts, "unfit", lose_whoever_it_does_not_fit), "misfit", ALL, kinds=("unfit",)
    ),
    "what a receiving half says of the plan is a loss": Twin(
        set_to(driver_module, "PlanError", ()), "misfit", kinds=("unfit",)
    ),
    "who does not fit stays": Twin(
        set_to(scripts.Scripts, "_without_unfit", lambda self: None), "misfit", kinds=("unfit",)
    ),
    "a limit that frees nobody": Twin(change_engine(stay_paused), "deadlock", CROWD, kinds=("kill",)),
}


@pytest.mark.parametrize("name", TWINS)
def test_the_explorer_names_the_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the mutant the promise breaks; on the product, with the same misfortunes, nothing does."""
    twin = TWINS[name]
    assert twin.promise in COMPOSED_PROMISES
    with monkeypatch.context() as patched:
        twin.mutate(patched)
        found = explore_composed(twin.setup, depth=twin.depth, kinds=twin.kinds, until={twin.promise})
    assert twin.promise in found.violations, "\n".join(found.lines())
    told = "\n  ".join(found.violations[twin.promise].lines())
    print(f"{twin.promise} > {name} > explore_composed: {told}")  # noqa: T201 - who noticed it, and how


def test_the_seeds_name_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes two misfortunes that fit for Failed to end before a resume is answered: lots find them."""
    with monkeypatch.context() as patched:
        forget_the_resume(patched)
        broken = (what for seed in range(1000) for what in played(seed).broken)
        assert "P4 whole" in next(broken, "nothing")


FENCING = [
    row
    for row in ROUND.rows
    if Verb.Fence in row.orders and (row.target is None or row.target is State.Cleaning)
]
"""Rows that put an engine out and go on. Those into Failed are fenced by Abort once more."""


@pytest.mark.parametrize("unfenced", FENCING, ids=[str(row) for row in FENCING])
def test_whoever_is_out_is_fenced_before_the_lock_goes(
    unfenced: Row[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may be in flight to an engine that the round goes on without: each such row has to fence it."""

    def drop(row: Row[Any]) -> Row[Any]:
        orders = tuple(order for order in row.orders if order is not Verb.Fence)
        return replace(row, orders=orders) if row is unfenced else row

    kinds = ("late", "lose", "alarm", "spoil", "raise", "stop")
    with monkeypatch.context() as patched:
        change_round(drop)(patched)
        found = explore_composed(ONE, kinds=kinds, until={"fence"})
    assert list(found.violations) == ["fence"], "\n".join(found.lines())
