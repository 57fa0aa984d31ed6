"""Faults to bring back into the product, in a test run of its own: ``pytest -p casemutants``.

Which one is said by the environment variable ``CASEKIT_MUTANT``. Each changes the product, never a check.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from breakers import abort_nobody
from weightsync import books, entries, sync
from weightsync.books import EngineBooks
from weightsync.fsm import driver
from weightsync.fsm.calls import Act
from weightsync.fsm.driver import Driver
from weightsync.fsm.open_calls import NEVER
from weightsync.fsm.policy import Policy
from weightsync.handlers import lock, reception
from weightsync.handlers.observers import Observers
from weightsync.handlers.sink import StagingSink
from weightsync.transports import memory, packing, sources, weights
from weightsync.transports.collective_round import CollectiveRound
from weightsync.transports.gloo import Group

__all__ = ["MUTANTS"]

Changed: Any = setattr
"""A method is replaced by a function of another shape, which is the point."""


def buffer_used_again_at_once() -> None:
    """The sender does not wait for the slowest reader."""
    Changed(memory, "_room", lambda round, index, port: True)


def request_taken_for_an_answer() -> None:
    """A receipt is not looked at."""
    Changed(driver, "examined", lambda event, facts: event)


def half_an_update_is_served() -> None:
    """The books forget that an engine was torn."""
    settle = EngineBooks.settle

    def forgetful(self: EngineBooks, result: Any) -> None:
        before = dict(self._entries)
        settle(self, result)
        for row in result.engines:
            if row.disposition.name == "quarantined":
                self._entries[row.engine] = before[row.engine]

    Changed(EngineBooks, "settle", forgetful)


def books_by_name() -> None:
    """A restarted engine inherits the version of the one that had its name."""
    heard = entries._heard

    def trusting(entry: books.Entry, status: Any, ours: Any) -> Any:
        known = heard(entry, status, ours)
        return known if entry.version is None else replace(known, version=entry.version)

    Changed(entries, "_heard", trusting)


def epochs_from_nothing() -> None:
    """Each trainer begins to count anew."""
    Changed(lock, "clock_epoch", lambda: 0)


def engines_not_told_to_abort() -> None:
    """Whoever paused is left alone."""
    abort_nobody(pytest.MonkeyPatch())


def engines_told_twice() -> None:
    """Aborted, and once more."""
    each = Driver._each

    def twice(self: Driver, act: Act, engines: Any, limit: float | None = None) -> None:
        each(self, act, engines, limit)
        if act is Act.abort:
            each(self, act, engines, limit)

    Changed(Driver, "_each", twice)


def bucket_not_named() -> None:
    """The error does not say where it came up."""
    Changed(reception, "_name_bucket", lambda error, bucket: None)


def observer_ends_the_thread() -> None:
    """An observer that raises takes the others with it."""
    Changed(Observers, "_safely", lambda self, observer, call, *args: call(*args))


def sets_are_read() -> None:
    """In whatever order they come."""
    Changed(sources, "_refuse_unordered", lambda source: None)


def strides_not_heeded() -> None:
    """Writes to a flat copy, where the tensor is none."""
    unpack = packing.unpack

    def flat(plan: Any, bucket: Any, into: Any) -> None:
        unpack(plan, bucket, {name: tensor.contiguous() for name, tensor in into.items()})

    Changed(packing, "unpack", flat)


def shapes_not_compared() -> None:
    """What fits is found out by writing it."""
    Changed(StagingSink, "check", lambda self, plan: None)


def ties_forgotten() -> None:
    """Each tensor under its first name alone."""
    read = weights._read
    Changed(weights, "_read", lambda source, only: (read(source, only)[0], ()))


def cancellation_swallowed() -> None:
    """The round is waited for, and then all goes on."""
    awaited = sync.Pending._awaited

    async def deaf(self: sync.Pending) -> Any:
        try:
            return await awaited(self)
        except asyncio.CancelledError:
            return self._told()

    Changed(sync.Pending, "_awaited", deaf)


def cancellation_not_waited_for() -> None:
    """The caller goes, and the round goes on by itself."""
    awaited = sync.Pending._awaited

    async def hasty(self: sync.Pending) -> Any:
        waiting = asyncio.ensure_future(awaited(self))
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            self.cancel(error)
            raise

    Changed(sync.Pending, "_awaited", hasty)


def silence_is_endured() -> None:
    """An engine may be silent for as long as anything."""
    limits = Policy.limits
    Changed(Policy, "limits", lambda self: replace(limits(self), engine=limits(self).forward))


def who_left_is_only_late() -> None:
    """At the end of a phase, nobody asks who has left meanwhile."""
    lose = CollectiveRound._lose_who_left

    def patient(self: CollectiveRound, port: Any, grace: float = 0.0) -> float:
        return lose(self, port, grace) if grace else 0.0

    Changed(CollectiveRound, "_lose_who_left", patient)


def groups_left_open() -> None:
    """A group is only forgotten about, by a list that keeps it."""
    kept: list[Group] = []

    def keep(self: Group) -> None:
        kept.append(self)

    Changed(Group, "close", keep)


def the_end_of_a_lease_is_told_once() -> None:
    """Although the round has refused to hear of it."""
    keep = Driver._keep_lease

    def once(self: Driver) -> None:
        over = self._now >= self._lease_end
        keep(self)
        self._lease_end = NEVER if over else self._lease_end

    Changed(Driver, "_keep_lease", once)


MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    "buffer_used_again_at_once": (buffer_used_again_at_once, "engines.py::TestB05 -k slowest"),
    "request_taken_for_an_answer": (request_taken_for_an_answer, "engines.py::TestB05 -k took_the_request"),
    "half_an_update_is_served": (half_an_update_is_served, "engines.py::TestB18 -k staged"),
    "books_by_name": (books_by_name, "engines.py::TestB20 -k not_served"),
    "epochs_from_nothing": (epochs_from_nothing, "engines.py -k test_b15"),
    "engines_not_told_to_abort": (engines_not_told_to_abort, "locks.py::TestB03 -k memory"),
    "engines_told_twice": (engines_told_twice, "locks.py::TestB03 -k memory"),
    "bucket_not_named": (bucket_not_named, "locks.py -k test_b01"),
    "observer_ends_the_thread": (observer_ends_the_thread, "locks.py::TestB38 -k observer"),
    "sets_are_read": (sets_are_read, "tensors.py::TestB14 -k without_an_order"),
    "strides_not_heeded": (strides_not_heeded, "tensors.py::TestB27 -k memory"),
    "shapes_not_compared": (shapes_not_compared, "tensors.py::TestB29 -k stages-memory"),
    "ties_forgotten": (ties_forgotten, "tensors.py::TestB31 -k memory"),
    "cancellation_swallowed": (cancellation_swallowed, "async.py::TestB39 -k around_a_round"),
    "cancellation_not_waited_for": (cancellation_not_waited_for, "async.py::TestB39 -k cancelled_task"),
    "silence_is_endured": (silence_is_endured, "waits.py::TestB09 -k bucket"),
    "who_left_is_only_late": (who_left_is_only_late, "waits.py::TestB08 -k b08_a"),
    "the_end_of_a_lease_is_told_once": (the_end_of_a_lease_is_told_once, "guards.py -k unsettled"),
    "groups_left_open": (groups_left_open, "leaks.py::TestB34 -k collective"),
}
"""By name: the change, and which tests of ``test_cases_*`` must notice it."""

if "CASEKIT_MUTANT" in os.environ:
    MUTANTS[os.environ["CASEKIT_MUTANT"]][0]()
