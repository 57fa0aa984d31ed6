"""Faults to bring back, above all into the lock and what fences former owners: ``pytest -p chaosmutants``.

Which one is said by the environment variable ``CHAOSKIT_MUTANT``. Engines, trainers and keepers are processes
of their own: ``tests/conftest.py`` lets each of them import this module, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from breakers import abort_nobody
from weightsync.fsm.engine import EngineMachine
from weightsync.fsm.errors import IllegalEvent, RoundError, StaleSession
from weightsync.fsm.lock import LockBook
from weightsync.fsm.tally import Tally
from weightsync.handlers import lock_actor
from weightsync.handlers.lock import Refusals
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.silence import Silence

__all__ = ["MUTANTS", "WORDS", "install"]

Changed: Any = setattr
"""A method is replaced by a function of another shape, which is the point."""


def epoch_not_checked() -> None:
    """An engine takes every session for its own: late words of an older one are carried out."""
    fire = EngineMachine.fire

    def trusting(self: EngineMachine, event: Any) -> Any:
        try:
            return fire(self, event)
        except (IllegalEvent, StaleSession):
            return self.state

    Changed(EngineMachine, "fire", trusting)


def granted_before_its_time() -> None:
    """A keeper that was started again does not let the forgotten holder's lease run out."""
    restore = LockBook.restore

    def hasty(epoch: int, *, lease: float, not_before: float = 0.0) -> LockBook:
        return restore(epoch, lease=lease)

    Changed(LockBook, "restore", staticmethod(hasty))


def stale_release_accepted() -> None:
    """Whoever gives the lock back, has it taken from whoever holds it."""
    release = LockBook.release

    def obliging(self: LockBook, ticket_id: str, epoch: int | None, now: float) -> Any:
        book, notices = release(self, ticket_id, epoch, now)
        return replace(book, holder=None) if epoch is not None else book, notices

    Changed(LockBook, "release", obliging)


def lease_never_ends() -> None:
    """A dead owner keeps the lock."""
    expire = LockBook.expire

    def patient(self: LockBook, now: float) -> Any:
        holder = self.holder
        kept = self if holder is None else replace(self, holder=replace(holder, until=now + 1.0))
        return expire(kept, now)

    Changed(LockBook, "expire", patient)


def epochs_begin_anew() -> None:
    """A keeper that was started again knows nothing of earlier epochs."""
    Changed(lock_actor, "clock_epoch", lambda: 0)


def last_come_first_served() -> None:
    """The queue is a stack."""
    grant = LockBook._grant

    def unfair(self: LockBook, now: float) -> Any:
        book, notices = grant(replace(self, queue=self.queue[-1:] + self.queue[:-1]), now)
        return (book, notices) if notices else (self, notices)

    Changed(LockBook, "_grant", unfair)


def silence_never_ends() -> None:
    """An engine waits for its trainer for ever."""
    Changed(Silence, "_count_anew", lambda self: None)


def refusals_not_counted() -> None:
    """What a keeper refuses is nobody's business."""
    Changed(Refusals, "_refused", lambda self, why: None)


def engines_not_told_to_abort() -> None:
    """A round that failed leaves whoever it had paused alone."""
    abort_nobody(pytest.MonkeyPatch())


def errors_are_all_the_same() -> None:
    """Whatever failed a round, its error says that something did, and no more."""
    first = Tally._first

    def vague(self: Tally, facts: Any) -> Any:
        culprit, error = first(self, facts)
        return culprit, None if error is None else RoundError("something went wrong")

    Changed(Tally, "_first", vague)


def another_engine_is_blamed() -> None:
    """The error is the right one, and its engine is not."""
    first = Tally._first

    def unjust(self: Tally, facts: Any) -> Any:
        culprit, error = first(self, facts)
        others = sorted(facts.roster - {culprit})
        return others[0] if culprit is not None else None, error

    Changed(Tally, "_first", unjust)


def failed_rounds_leak_a_descriptor() -> None:
    """A trainer loses one in each of them."""
    result = Tally.result

    def leaking(self: Tally, round: Any, at: float) -> Any:
        told = result(self, round, at)
        if not told.ok:
            os.open(os.devnull, os.O_RDONLY)
        return told

    Changed(Tally, "result", leaking)


def _leaks_at_each_abort(leak: Callable[[], object]) -> None:
    abort = Receiver.abort

    def leaking(self: Receiver, session: Any) -> Any:
        _leaked.append(leak())
        return abort(self, session)

    Changed(Receiver, "abort", leaking)


_leaked: list[object] = []


def aborts_leak_descriptors() -> None:
    """An engine loses five each time."""
    _leaks_at_each_abort(lambda: [os.open(os.devnull, os.O_RDONLY) for _ in range(5)])


def aborts_leak_a_thread() -> None:
    """An engine has one more each time, which waits for ever."""
    _leaks_at_each_abort(lambda: threading.Thread(target=threading.Event().wait, daemon=True).start())


def aborts_leak_memory() -> None:
    """An engine keeps ten megabytes each time."""
    _leaks_at_each_abort(lambda: bytearray(b"x" * 10_000_000))


_KILLED, _FROZEN, _KEEPER = "test_an_owner_is_killed", "test_an_owner_is_frozen", "test_in_each_state"
MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    "epoch_not_checked": (epoch_not_checked, f"lock.py -k {_FROZEN}[Awaiting]"),
    "granted_before_its_time": (granted_before_its_time, f"lock.py -k {_KEEPER}[Locked]"),
    "stale_release_accepted": (stale_release_accepted, f"lock.py -k {_FROZEN}[Awaiting]"),
    "lease_never_ends": (lease_never_ends, f"lock.py -k {_KILLED}[Locked]"),
    "epochs_begin_anew": (epochs_begin_anew, f"lock.py -k {_KEEPER}[Broadcasting]"),
    "last_come_first_served": (last_come_first_served, "lock.py -k test_trainers_with_one_lock"),
    "silence_never_ends": (silence_never_ends, f"lock.py -k {_KILLED}[Awaiting]"),
    "refusals_not_counted": (refusals_not_counted, f"lock.py -k {_FROZEN}[Locked]"),
    "engines_not_told_to_abort": (engines_not_told_to_abort, ".py -k test_every_round"),
    "lease_never_ends_in_chaos": (lease_never_ends, ".py -k test_every_round"),
    "errors_are_all_the_same": (errors_are_all_the_same, ".py -k test_every_round"),
    "another_engine_is_blamed": (another_engine_is_blamed, ".py -k test_every_round"),
    "failed_rounds_leak_a_descriptor": (failed_rounds_leak_a_descriptor, ".py -k test_every_round"),
    "aborts_leak_descriptors": (aborts_leak_descriptors, ".py -k test_every_round"),
    "aborts_leak_a_thread": (aborts_leak_a_thread, ".py -k test_every_round"),
    "aborts_leak_memory": (aborts_leak_memory, ".py -k test_every_round"),
}
"""By name: the change, and which tests of ``test_chaos*`` must notice it."""


WORDS = {
    "errors_are_all_the_same": "something went wrong",
    "another_engine_is_blamed": "is blamed, and",
    "failed_rounds_leak_a_descriptor": "the trainer leaks",
    "aborts_leak_descriptors": "more descriptors",
    "aborts_leak_a_thread": "more Python threads",
    "aborts_leak_memory": "more MB",
}
"""What has to be said of it, where a long run could die of something else."""


def install() -> None:
    """Bring the fault back that is asked for, in this process; once."""
    wanted = os.environ.get("CHAOSKIT_MUTANT")
    if wanted and not _installed:
        _installed.append(wanted)
        MUTANTS[wanted][0]()


_installed: list[str] = []
install()
