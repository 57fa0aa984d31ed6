"""Faults to bring back into bridge and back ends, in a test run of its own: ``pytest -p bridgemutants``.

Which one is said by the environment variable ``BRIDGE_MUTANT``. Each changes the product, never a check.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from weightsync import backends, joining, sync
from weightsync.backends import Backends
from weightsync.fsm import imports
from weightsync.handlers import bridge, bridge_loop, coroutines
from weightsync.handlers.bridge import LoopBridge
from weightsync.handlers.bridge_call import BridgeCall
from weightsync.handlers.bridge_loop import BridgeLoop

__all__ = ["MUTANTS"]

Patch = pytest.MonkeyPatch
Changed = Callable[[Patch], object]

_COUNT = itertools.count()


# -- the bridge ---------------------------------------------------------------------------------------------


def a_loop_for_a_call(patch: Patch) -> None:
    """Nobody closes it. For one call in eight, so that the system has descriptors left to count."""
    home = LoopBridge._home

    def made(self: LoopBridge, name: str) -> BridgeLoop:
        return BridgeLoop("one more") if next(_COUNT) % 8 == 7 else home(self, name)

    patch.setattr(LoopBridge, "_home", made)


def a_loop_is_stopped_and_not_closed(patch: Patch) -> None:
    """The thread has ended: that looks well enough, with a collector."""
    patch.setattr(bridge_loop._Loop, "close", lambda self: None)


def a_loop_without_a_thread_stays_open(patch: Patch) -> None:
    """There is nothing to stop, so nothing is closed."""
    close = bridge_loop._Loop.close
    patch.setattr(bridge_loop._Loop, "close", lambda self: close(self) if self._ran else None)
    patch.setattr(bridge_loop._Loop, "_ran", False, raising=False)
    run = bridge_loop._Loop.run_forever

    def runs(self: Any) -> None:
        self._ran = True
        run(self)

    patch.setattr(bridge_loop._Loop, "run_forever", runs)


def first_calls_do_not_wait_for_each_other(patch: Patch) -> None:
    """Each looks, finds none, and makes one."""

    def home(self: LoopBridge, name: str) -> BridgeLoop:
        if self._loop is None:
            time.sleep(0.05)
            self._loop = BridgeLoop(self.name)
        return self._loop

    patch.setattr(LoopBridge, "_home", home)


def a_call_may_wait_for_its_own_thread(patch: Patch) -> None:
    """Nobody looks where it comes from."""
    patch.setattr(LoopBridge, "_refuse_on_a_loop", lambda self, name: None)


def nothing_is_cancelled_when_it_is_late(patch: Patch) -> None:
    """The caller goes on, and so does the coroutine."""
    patch.setattr(BridgeCall, "_expire", lambda self: None)


def an_interrupt_is_not_passed_on(patch: Patch) -> None:
    """The caller goes on, and so does the coroutine, until its own limit."""
    patch.setattr(BridgeCall, "cancel", lambda self, why=None: None)


def what_comes_too_late_is_lost(patch: Patch) -> None:
    """An undo, say."""
    patch.setattr(BridgeCall, "_give_up", lambda self: not self._over)


def a_child_keeps_its_parents_loop(patch: Patch) -> None:
    """A loop without a thread."""
    patch.setattr(LoopBridge, "forked", lambda self: None)


def a_child_closes_the_loop_as_usual(patch: Patch) -> None:
    """And takes the parent's wake-up out of the epoll that both have."""

    def closes(self: Any) -> None:
        self._remove_reader(self._ssock.fileno())
        self._forsaken = True

    patch.setattr(bridge_loop._Loop, "forsake", closes)


def a_child_leaves_descriptors_open(patch: Patch) -> None:
    """Three for each fork of a fork."""
    patch.setattr(bridge_loop._Loop, "forsake", lambda self: setattr(self, "_forsaken", True))


def a_dead_loop_is_made_anew_for_ever(patch: Patch) -> None:
    """Whatever ends it does so again."""
    patch.setattr(bridge, "_REBUILDS", 10**6)


def a_new_loop_comes_in_silence(patch: Patch) -> None:
    """Nobody hears that the first one has ended."""
    patch.setattr(LoopBridge, "_mourn", lambda self, loop, name: None)


def what_runs_at_the_end_is_dropped(patch: Patch) -> None:
    """It is neither cancelled nor named."""

    async def ends(self: BridgeLoop, limit: float, why: object) -> None:
        self._wound_up = True
        asyncio.get_running_loop().stop()

    patch.setattr(BridgeLoop, "_end", ends)


def coroutines_are_taken_for_done(patch: Patch) -> None:
    """What a step hands back is its undo, and nobody awaits it."""
    patch.setattr(joining, "executes_on_a_loop", lambda handler: False)


def a_failed_round_cancels_nothing(patch: Patch) -> None:
    """What it waited for goes on until its own limit."""
    patch.setattr(coroutines.AsyncExecutor, "__call__", lambda self, record: None)


def a_late_undo_is_forgotten(patch: Patch) -> None:
    """Nobody else does it."""
    patch.setattr(coroutines.AsyncExecutor, "_too_late", lambda self, undo: None)


# -- back ends ----------------------------------------------------------------------------------------------


def what_is_absent_is_a_warning(patch: Patch) -> None:
    """One line a back end and process for those who wanted none."""
    judged = imports.judged

    def harsh(*arguments: Any, **more: Any) -> Any:
        return judged(*arguments, **{**more, "there": lambda package: True})

    patch.setattr(backends, "judged", harsh)


def every_question_is_a_warning(patch: Patch) -> None:
    """Nobody remembers what was said."""
    tell = Backends._tell

    def forgetful(self: Backends, *told: Any) -> None:
        backends._TOLD.clear()
        tell(self, *told)

    patch.setattr(Backends, "_tell", forgetful)


def a_native_library_is_not_expected(patch: Patch) -> None:
    """Only an ``ImportError`` is taken for a broken back end."""
    judged = imports.judged
    patch.setattr(
        backends, "judged", lambda error, *rest, **more: (
            judged(error, *rest, **more) if isinstance(error, ImportError) else None
        ),
    )  # fmt: skip


def mistakes_are_missing_packages(patch: Patch) -> None:
    """Whatever is raised, somebody should install something."""
    patch.setattr(imports, "_mistaken", lambda *told: False)


def a_missing_symbol_is_a_mistake(patch: Patch) -> None:
    """Wherever an ``AttributeError`` was raised, there is the fault."""
    mistaken = imports._mistaken
    patch.setattr(
        imports, "_mistaken", lambda error, *rest: isinstance(error, AttributeError) or mistaken(error, *rest)
    )


def the_cause_is_not_kept(patch: Patch) -> None:
    """The error says that it cannot be used, and not why."""
    unavailable = Backends._unavailable

    def bare(self: Backends, name: str, verdict: imports.Verdict) -> Exception:
        object.__setattr__(verdict, "cause", None)
        return unavailable(self, name, verdict)

    patch.setattr(Backends, "_unavailable", bare)


def strict_is_lenient(patch: Patch) -> None:
    """Whoever can do without it does."""
    find = Backends.find

    def lenient(self: Backends, name: str) -> Any:
        self.mode = "warn"
        return find(self, name)

    patch.setattr(Backends, "find", lenient)


def quiet_is_loud(patch: Patch) -> None:
    """The mode is not asked for."""
    tell = Backends._tell

    def loud(self: Backends, *told: Any) -> None:
        self.mode = "warn"
        tell(self, *told)

    patch.setattr(Backends, "_tell", loud)


def everything_is_imported_at_once(patch: Patch) -> None:
    """To know what there is."""
    begin = Backends.__init__

    def eager(self: Backends, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **more)
        for each in self._known.table.values():
            backends._load(each)

    patch.setattr(Backends, "__init__", eager)


def what_is_used_late_is_missed_late(patch: Patch) -> None:
    """In the middle of a round."""
    load = backends._load
    patch.setattr(
        backends, "_load", lambda each: load(
            backends.Backend(each.name, each.path, each.attribute, (), each.purpose, each.source or "its own")
        ),
    )  # fmt: skip


def anybody_takes_a_name_of_ours(patch: Patch) -> None:
    """Entry points come first."""
    called = Backends._called

    def others_first(self: Backends, name: str) -> backends.Backend:
        found = self._others().get(name)
        return found[0] if found else called(self, name)

    patch.setattr(Backends, "_called", others_first)


def what_was_read_half_is_the_list(patch: Patch) -> None:
    """An error on the way is forgotten, and so is what would have come after it."""

    def others(self: Backends) -> Any:
        found = self._known.found
        if found is None:
            found = self._known.found = {}
            for point in backends._points(self._group or ""):
                found.setdefault(point.name, []).append(backends._of(point))
        return found

    patch.setattr(Backends, "_others", others)


def what_cannot_be_reached_is_usable(patch: Patch) -> None:
    """The doctor lists whatever has an entry point."""
    patch.setattr(Backends, "shadowed", lambda self, backend: "")


def a_recursion_is_a_broken_package(patch: Patch) -> None:
    """As is any other ``RuntimeError``."""
    mistaken = imports._mistaken
    patch.setattr(
        imports, "_mistaken",
        lambda error, *rest: not isinstance(error, RecursionError) and mistaken(error, *rest),
    )  # fmt: skip


def what_a_step_hands_back_is_dropped(patch: Patch) -> None:
    """It was called, so it is done."""
    patch.setattr(inspect, "isawaitable", lambda made: False)


def a_handler_may_wait_for_its_own_round(patch: Patch) -> None:
    """Until one of the two is given up."""
    patch.setattr(sync, "refuse_inside", lambda owner, what: None)


MUTANTS: dict[str, tuple[Changed, str]] = {
    "what_a_step_hands_back_is_dropped": (
        what_a_step_hands_back_is_dropped, "coroutines.py -k undo_of_a_plain_executor",
    ),
    "a_handler_may_wait_for_its_own_round": (
        a_handler_may_wait_for_its_own_round, "coroutines.py -k wait_for_its_own_round",
    ),
    "a_loop_for_a_call": (a_loop_for_a_call, "bridge.py -k five_hundred_calls"),
    "a_loop_is_stopped_and_not_closed": (a_loop_is_stopped_and_not_closed, "bridge.py -k five_hundred_calls"),
    "a_loop_without_a_thread_stays_open": (
        a_loop_without_a_thread_stays_open, "bridge.py -k without_a_thread",
    ),
    "first_calls_do_not_wait_for_each_other": (
        first_calls_do_not_wait_for_each_other, "bridge.py -k sixteen_first_calls",
    ),
    "a_call_may_wait_for_its_own_thread": (
        a_call_may_wait_for_its_own_thread, "bridge.py -k from_the_loop_itself",
    ),
    "nothing_is_cancelled_when_it_is_late": (
        nothing_is_cancelled_when_it_is_late, "bridge.py -k cancelled_on_the_loop",
    ),
    "an_interrupt_is_not_passed_on": (an_interrupt_is_not_passed_on, "bridge.py -k interrupt_of_the_caller"),
    "what_comes_too_late_is_lost": (what_comes_too_late_is_lost, "bridge.py -k value_is_not_lost"),
    "a_child_keeps_its_parents_loop": (a_child_keeps_its_parents_loop, "bridge.py -k takes_none_away"),
    "a_child_closes_the_loop_as_usual": (a_child_closes_the_loop_as_usual, "bridge.py -k takes_none_away"),
    "a_child_leaves_descriptors_open": (a_child_leaves_descriptors_open, "bridge.py -k keeps_no_descriptor"),
    "a_dead_loop_is_made_anew_for_ever": (a_dead_loop_is_made_anew_for_ever, "bridge.py -k third_time"),
    "a_new_loop_comes_in_silence": (a_new_loop_comes_in_silence, "bridge.py -k made_anew_once"),
    "what_runs_at_the_end_is_dropped": (what_runs_at_the_end_is_dropped, "bridge.py -k cancelled_and_named"),
    "coroutines_are_taken_for_done": (coroutines_are_taken_for_done, "coroutines.py -k awaited_on_one_loop"),
    "a_failed_round_cancels_nothing": (a_failed_round_cancels_nothing, "coroutines.py -k cancelled_round"),
    "a_late_undo_is_forgotten": (a_late_undo_is_forgotten, "coroutines.py -k too_late"),
    "what_is_absent_is_a_warning": (what_is_absent_is_a_warning, "backends.py -k level_debug"),
    "every_question_is_a_warning": (every_question_is_a_warning, "backends.py -k one_structured_warning"),
    "a_native_library_is_not_expected": (
        a_native_library_is_not_expected, "backends.py -k is_broken_explains",
    ),
    "mistakes_are_missing_packages": (mistakes_are_missing_packages, "backends.py -k mistake_of_its_own"),
    "a_missing_symbol_is_a_mistake": (a_missing_symbol_is_a_mistake, "backends.py -k is_broken_explains"),
    "the_cause_is_not_kept": (the_cause_is_not_kept, "backends.py -k is_broken_explains"),
    "strict_is_lenient": (strict_is_lenient, "backends.py -k strict_raises"),
    "quiet_is_loud": (quiet_is_loud, "backends.py -k quiet_writes"),
    "everything_is_imported_at_once": (
        everything_is_imported_at_once, "backends.py -k imported_before_it_is_asked",
    ),
    "what_is_used_late_is_missed_late": (what_is_used_late_is_missed_late, "backends.py -k used_late"),
    "what_was_read_half_is_the_list": (what_was_read_half_is_the_list, "backends.py -k read_half"),
    "what_cannot_be_reached_is_usable": (
        what_cannot_be_reached_is_usable, "backends.py -k line_for_each_stranger",
    ),
    "a_recursion_is_a_broken_package": (a_recursion_is_a_broken_package, "backends.py -k recursion"),
    "anybody_takes_a_name_of_ours": (anybody_takes_a_name_of_ours, "backends.py -k nobody_elses"),
}  # fmt: skip
"""What breaks, and the tests that must notice: ``tests/test_`` and so on, with what selects them."""

if "BRIDGE_MUTANT" in os.environ:
    MUTANTS[os.environ["BRIDGE_MUTANT"]][0](pytest.MonkeyPatch())
