"""The promises of ``docs/architecture.md``, each with what breaks it: ``pytest -p promisetwins``.

This is the one table of them. A twin changes the product or a table, never a check, and names the ordinary
tests of which one must notice. Which twin is at work is said by the environment variable ``PROMISE_TWIN``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from breakers import (
    Changed,
    Patch,
    abort_nobody,
    answer_whoever_calls,
    begin_again,
    prove_too_early,
    publish_with_the_first,
    serve_a_mix,
    set_to,
    take_whatever_comes,
    undo_oldest_first,
)
from tablechanges import change_engine, change_round
from weightsync import books, entries
from weightsync.fsm import answers
from weightsync.fsm import driver as driver_module
from weightsync.fsm import engine_table as t
from weightsync.fsm.driver import Driver
from weightsync.fsm.errors import LockError
from weightsync.fsm.ledger import Ledger
from weightsync.fsm.lock import LockBook
from weightsync.fsm.open_calls import NEVER, OpenCalls
from weightsync.fsm.rows import Row
from weightsync.fsm.scripts import Scripts
from weightsync.fsm.states import EngineState, State
from weightsync.handlers.ledger import FileLedger
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.retention import Retention

__all__ = ["DUDS", "TWINS", "Twin"]

# -- P1 ------------------------------------------------------------------------------------------------------


def patient(patch: Patch) -> None:
    """A dead owner keeps the lock."""
    real = LockBook.expire

    def expire(self: LockBook, now: float) -> Any:
        holder = self.holder
        return real(self if holder is None else replace(self, holder=replace(holder, until=now + 1.0)), now)

    patch.setattr(LockBook, "expire", expire)


# -- P3 ------------------------------------------------------------------------------------------------------


def publish_whoever_asks(patch: Patch) -> None:
    """The ledger compares versions, and no epochs."""
    real = Ledger.publish
    patch.setattr(
        Ledger,
        "publish",
        lambda self, version, digest, epoch: real(self, version, digest, max(epoch, self.fence)),
    )


# -- P4 ------------------------------------------------------------------------------------------------------


def forget_who_was_torn(patch: Patch) -> None:
    """The books go on with what an engine was before the round."""
    real = books.EngineBooks.settle

    def settle(self: books.EngineBooks, result: Any) -> None:
        before = dict(self._entries)
        real(self, result)
        for row in result.engines:
            if row.disposition.name == "quarantined":
                self._entries[row.engine] = before[row.engine]

    patch.setattr(books.EngineBooks, "settle", settle)


# -- P6 ------------------------------------------------------------------------------------------------------


def take_much_longer(patch: Patch) -> None:
    """Nobody looks at the end of a state in time."""
    real = OpenCalls._phase_end
    patch.setattr(OpenCalls, "_phase_end", lambda self: real(self) + 10.0)


# -- P7 ------------------------------------------------------------------------------------------------------


def keep_it_in_memory(patch: Patch) -> None:
    """What is published is forgotten with the process."""
    kept: WeakKeyDictionary[FileLedger, Ledger] = WeakKeyDictionary()

    def current(self: FileLedger) -> Ledger:
        return kept.get(self, Ledger())

    def change(self: FileLedger, change: Callable[[Ledger], Ledger]) -> None:
        kept[self] = change(current(self))

    patch.setattr(FileLedger, "current", current)
    patch.setattr(FileLedger, "_change", change)


# -- P8 ------------------------------------------------------------------------------------------------------


def books_by_name(patch: Patch) -> None:
    """A restarted engine inherits the version of the one that had its name."""
    real = entries._heard

    def heard(entry: books.Entry, status: Any, ours: Any) -> Any:
        known = real(entry, status, ours)
        return known if entry.version is None else replace(known, version=entry.version)

    patch.setattr(entries, "_heard", heard)


# -- P9 ------------------------------------------------------------------------------------------------------


def take_half_a_resend(row: Row[Any]) -> Row[Any]:
    """A frame that is missing is not missed."""

    def in_range(facts: t.EngineFacts, event: Any, state: EngineState) -> bool:
        return facts.live(event.session) and facts.plan is not None and event.index < facts.plan.buckets

    def seen(facts: t.EngineFacts, event: Any) -> t.EngineFacts:
        return replace(facts, frames=event.index + 1, touched=True)

    return replace(row, guard=in_range, learn=seen) if row.event is t.FrameSeen else row


# -- P11 -----------------------------------------------------------------------------------------------------


def let_go_at_once(patch: Patch) -> None:
    """The tensors are read by then, so what for?"""

    def prepare(self: Retention, round: Any) -> None:
        self.clean(round)

    patch.setattr(Retention, "prepare", prepare)


def keep_for_ever(patch: Patch) -> None:
    """A good round has nothing to clean up."""

    def put_back(self: Scripts) -> None:
        executors, self.executors = self.executors, ()
        real(self)
        self.executors = executors

    real = Scripts._put_back
    patch.setattr(Scripts, "_put_back", put_back)


# -- P12 -----------------------------------------------------------------------------------------------------


def go_without_waiting(patch: Patch) -> None:
    """Nothing has to be settled before the lock goes."""
    real, late = Driver._busy, (State.Cleaning, State.Failed)
    patch.setattr(Driver, "_busy", lambda self, beside: self.round.state not in late and real(self, beside))


def leave_the_door_open(patch: Patch) -> None:
    """An end point outlives its round."""
    from weightsync.transports import memory  # with torch, which the other twins do without

    class Kept(dict[str, Any]):
        def pop(self, key: str, default: Any = None) -> Any:
            return self.get(key, default)

        def __delitem__(self, key: str) -> None:
            pass

    patch.setattr(memory, "_endpoints", Kept())


@dataclass(frozen=True)
class Twin:
    """What breaks a promise, which tests must notice, and in which words.

    Args:
        promise: ``P1`` to ``P12``.
        mutate: what is changed.
        tests: ``test_`` and so on, with what selects them.
        words: what must be told of it, if the test may fail for more than one reason.
    """

    promise: str
    mutate: Changed
    tests: str
    words: str = ""


TWINS: dict[str, Twin] = {
    "a lock that is unsure is none": Twin(
        "P1", set_to(answers, "_CLOSED", (LockError,)), "driver_limits.py -k lock_service_is_no_evidence"
    ),
    "a lease never ends": Twin("P1", patient, "lock.py -k expired_holder_makes_room"),
    "a receipt with the buffer in use": Twin(
        "P2", change_engine(prove_too_early), "composed.py -k owner_that_was_stopped", "P2 proof"
    ),
    "a request is taken for a receipt": Twin(
        "P2", set_to(driver_module, "examined", lambda event, facts: event),
        "cases_engines.py::TestB05 -k took_the_request",
    ),
    "published with the first commit": Twin(
        "P3", change_round(publish_with_the_first), "composed.py -k no_seed", "P3 publish"
    ),
    "published by an older epoch": Twin(
        "P3", publish_whoever_asks, "ledger.py -k older_epoch_changes_nothing"
    ),
    "a torn engine serves": Twin("P4", change_engine(serve_a_mix), "receiver.py::TestAbort"),
    "a torn engine is handed out": Twin("P4", forget_who_was_torn, "cases_engines.py::TestB18 -k staged"),
    "an engine takes any opening": Twin(
        "P5", change_engine(take_whatever_comes), "engine.py -k stale_session_is_refused"
    ),
    "an answer given up on counts": Twin("P5", answer_whoever_calls, "driver.py -k comes_too_late"),
    "silence is no loss": Twin(
        "P6", set_to(OpenCalls, "_silence_end", lambda self: NEVER), "driver.py -k receipt_that_never_comes"
    ),
    "a state ends late": Twin(
        "P6", take_much_longer, "driver_faults.py -k several_things", "its deadline is"
    ),
    "a lower version is admitted": Twin(
        "P7", set_to(Ledger, "admit", lambda self, version, digest: None), "ledger.py -k lower_version"
    ),
    "each process counts from 0": Twin("P7", keep_it_in_memory, "sync.py -k over_a_restart"),
    "a name is enough": Twin("P8", books_by_name, "cases_engines.py::TestB20 -k not_served"),
    "another life answers": Twin(
        "P8", set_to(Receiver, "check_incarnation", lambda self, incarnation: None),
        "receiver.py -k another_incarnation_is_refused",
    ),
    "a round goes back": Twin("P9", change_round(begin_again), "answers.py -k returns_without_having_told"),
    "half a resend is enough": Twin(
        "P9", change_engine(take_half_a_resend), "engine.py -k out_of_turn_is_illegal"
    ),
    "nobody ends a pause": Twin("P10", abort_nobody, "driver.py -k undone_on_the_others"),
    "what came first is undone first": Twin("P10", undo_oldest_first, "driver.py -k newest_first"),
    "tensors go before they are held": Twin("P11", let_go_at_once, "retention.py -k failed_round"),
    "tensors are kept for ever": Twin("P11", keep_for_ever, "retention.py -k good_round"),
    "the lock goes first": Twin(
        "P12", go_without_waiting, "driver_faults.py -k raise-broadcast", "in flight"
    ),
    "an end point outlives its round": Twin(
        "P12", leave_the_door_open, "memory_transport.py -k leads_nowhere_after"
    ),
}  # fmt: skip
"""By name, in the order of the promises."""


def raise_another_error(patch: Patch) -> None:
    """A mutant that does not fit the product any more."""

    def expire() -> None:
        """Takes nothing."""

    patch.setattr(LockBook, "expire", expire)


DUDS: dict[str, Twin] = {
    "it changes nothing": Twin("it lives", lambda patch: None, "lock.py -k expired_holder_makes_room"),
    "it does not fit": Twin("not an assertion", raise_another_error, "lock.py -k expired_holder_makes_room"),
    "no test is chosen": Twin("it lives", patient, "lock.py -k there_is_no_such_test"),
}
"""Mutants that break no promise: none of them may count as killed. Instead of the promise, why not."""

if "PROMISE_TWIN" in os.environ:
    (TWINS | DUDS)[os.environ["PROMISE_TWIN"]].mutate(pytest.MonkeyPatch())
