"""What breaks the promises of barrier, cache release and toggles: ``pytest -p barriermutants``.

Each changes the product, never a check. Which one is at work is said by the environment variable
``BARRIER_MUTANT``.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest

from breakers import Changed, Patch
from weightsync import sync
from weightsync.fsm import checks
from weightsync.fsm.errors import MemoryShort, RankError, RoundCancelled
from weightsync.fsm.executors import RoundView
from weightsync.fsm.releases import Level
from weightsync.fsm.scripts import Scripts
from weightsync.fsm.votes import Meeting
from weightsync.handlers import barrier, toggle
from weightsync.handlers.barrier import Barrier
from weightsync.handlers.cache_release import CacheRelease
from weightsync.handlers.rank_barrier import RankBarrier, RankCall
from weightsync.handlers.rank_part import RankPart
from weightsync.handlers.toggle import Toggle, _Nothing

__all__ = ["MUTANTS"]


def a_rank_that_failed_counts_like_any_other(patch: Patch) -> None:
    """All that matters is that it came."""
    vote = Barrier.vote
    patch.setattr(Barrier, "vote", lambda self, meeting, error="", told=(): vote(self, meeting, "", told))


def whoever_waits_can_let_it_be_passed(patch: Patch) -> None:
    """Also by the vote of a rank 0 that is dead."""
    rank = Barrier._rank
    judge = Barrier._judge

    def as_rank_0(self: Any, wait: Any, *, over: bool) -> bool:
        patch.setattr(Barrier, "_rank", 0)
        try:
            return judge(self, wait, over=over)
        finally:
            patch.setattr(Barrier, "_rank", rank)

    patch.setattr(Barrier, "_judge", as_rank_0)


def a_late_rank_is_not_refused(patch: Patch) -> None:
    """Its round may be long over."""
    patch.setattr(Barrier, "_refuse_stale", lambda self, meeting: None)


def every_round_has_the_same_keys(patch: Patch) -> None:
    """Who is late pairs with whoever comes next."""
    patch.setattr(barrier, "_path", lambda meeting: ("barrier", "round", meeting.name))


def every_run_has_the_same_keys(patch: Patch) -> None:
    """A round of an old run decides one of the next."""
    patch.setattr(barrier, "_path", lambda meeting: ("barrier", meeting.round, meeting.name))


def the_name_is_no_part_of_the_key(patch: Patch) -> None:
    """The second barrier of a round is passed by the votes of the first one."""
    patch.setattr(barrier, "_path", lambda meeting: ("barrier", meeting.round, "name"))


def epochs_are_compared_over_runs(patch: Patch) -> None:
    """A store outlives a run."""
    refuse = Barrier._refuse_stale

    def stale(self: Any, meeting: Meeting) -> None:
        refuse(self, Meeting(meeting.round, meeting.epoch, meeting.name))

    patch.setattr(Barrier, "_refuse_stale", stale)


def who_stops_tells_nobody(patch: Patch) -> None:
    """It just goes away, and another one is blamed."""

    def stop(self: Any, meeting: Meeting) -> Any:
        raise RoundCancelled(f"{meeting} was given up")

    patch.setattr(Barrier, "_stop", stop)
    patch.setattr(Barrier, "abort", lambda self, meeting, error: None)


def the_wait_is_in_the_loop(patch: Patch) -> None:
    """Nothing else goes on meanwhile."""

    async def meet_async(self: Any, meeting: Meeting, *, bound: float, **more: Any) -> Any:
        return self.meet(meeting, bound=bound, **more)

    patch.setattr(Barrier, "meet_async", meet_async)


def notes_are_not_examined_on_a_rank(patch: Patch) -> None:
    """They are told with the vote, if they can be."""
    patch.setattr(
        RankPart, "_note", lambda self, event, **values: self._told.append({"event": event, **values})
    )


def any_bound_will_do(patch: Patch) -> None:
    """Also one that is never reached."""
    patch.setattr(checks, "seconds", lambda where, name, value: None)


def rounds_have_no_barrier(patch: Patch) -> None:
    """Rank 0 goes on by itself."""
    patch.setattr(sync.WeightSync, "_barrier_of", lambda self, ranks: None)


def the_barrier_is_not_waited_at(patch: Patch) -> None:
    """The others are called, and that is it."""
    patch.setattr(RankBarrier, "_meet", lambda self, round, what: None)


def a_cancelled_hand_over_waits_all_the_same(patch: Patch) -> None:
    """It is over at the bound."""
    patch.setattr(sync.WeightSync, "_run", lambda self, pending, own: self._conductor.run(pending, own))


def who_holds_on_is_let_off(patch: Patch) -> None:
    """A rank that lives and does not undo is taken for one that is gone."""
    undo = RankBarrier.undo

    def lenient(self: Any, round: RoundView) -> None:
        with contextlib.suppress(RankError):
            undo(self, round)

    patch.setattr(RankBarrier, "undo", lenient)


def an_engine_resumes_over_what_was_not_undone(patch: Patch) -> None:
    """It has committed, and that is all that counts."""
    patch.setattr(Scripts, "_lose_the_held", lambda self: None)


def nobody_is_called_to_undo(patch: Patch) -> None:
    """The others find out when the hand-over is over."""
    patch.setattr(RankBarrier, "_call_undo", lambda self, round: None)
    patch.setattr(RankCall, "prepare", lambda self, round: self._barrier.call(round, "prepare"))


def a_rank_above_0_undoes_nothing(patch: Patch) -> None:
    """It is over for it."""
    patch.setattr(RankPart, "_undo_all", lambda self: None)


def a_collection_comes_back(patch: Patch) -> None:
    """As it once did, in an unrelated change."""
    real = CacheRelease._do

    def ritual(self: Any, level: Level, boundary: Any, view: RoundView) -> None:
        gc.collect()
        real(self, level, boundary, view)

    patch.setattr(CacheRelease, "_do", ritual)


def everybody_lacks_something(patch: Patch) -> None:
    """Aggressive in any case: it may help."""
    real = CacheRelease._release

    def ritual(self: Any, boundary: Any, view: RoundView) -> None:
        real(self, boundary, view)
        self._do(Level.aggressive, boundary, view)

    patch.setattr(CacheRelease, "_release", ritual)


def what_is_short_is_not_told(patch: Patch) -> None:
    """The engine will find out."""
    real = CacheRelease._release

    def careless(self: Any, boundary: Any, view: RoundView) -> None:
        try:
            real(self, boundary, view)
        except MemoryShort:
            return

    patch.setattr(CacheRelease, "_release", careless)


def nobody_looks_at_budgets(patch: Patch) -> None:
    """Whatever it takes."""
    real = CacheRelease.__init__

    def generous(self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        self._budgets = dict.fromkeys(self._budgets, float("inf"))

    patch.setattr(CacheRelease, "__init__", generous)


def bytes_are_those_of_before(patch: Patch) -> None:
    """What was freed does not add up."""
    real = CacheRelease._one

    def one(self: Any, action: Any, level: Any, boundary: Any, view: RoundView) -> None:
        def note(event: str, /, **values: Any) -> None:
            view.note(event, **{**values, "freed": 1})

        real(self, action, level, boundary, RoundView(view.session, 1, 1, None, view.weights, note))

    patch.setattr(CacheRelease, "_one", one)


def a_setting_is_left_as_it_is_in_a_round(patch: Patch) -> None:
    """Its undo does nothing."""
    patch.setattr(Toggle, "_restore", lambda self, view: None)


def only_the_good_way_restores(patch: Patch) -> None:
    """There is no undo."""
    real = Toggle.prepare
    patch.setattr(Toggle, "prepare", lambda self, round: [real(self, round)].clear())


def what_is_left_over_is_taken_for_what_was(patch: Patch) -> None:
    """A setting that could not be restored is forgotten."""
    real = Toggle._restore

    def forgetful(self: Any, view: RoundView) -> None:
        try:
            real(self, view)
        finally:
            self._shared.before = _Nothing

    patch.setattr(Toggle, "_restore", forgetful)


def a_toggle_does_not_know_of_others(patch: Patch) -> None:
    """Each keeps what it found."""
    patch.setattr(toggle, "_setting_of", toggle._Setting)


def steps_that_nobody_waits_for_go_on(patch: Patch) -> None:
    """Until they have taken all their time."""
    patch.setattr(RankPart, "_give_up", lambda self, round: None)


MUTANTS: dict[str, tuple[Changed, str]] = {
    "a_rank_that_failed_counts_like_any_other": (
        a_rank_that_failed_counts_like_any_other,
        "barrier.py -k votes_against_it",
    ),
    "whoever_waits_can_let_it_be_passed": (
        whoever_waits_can_let_it_be_passed,
        "barrier.py -k only_rank_0_can",
    ),
    "a_late_rank_is_not_refused": (a_late_rank_is_not_refused, "barrier.py -k late_rank_of_an_old_round"),
    "every_round_has_the_same_keys": (every_round_has_the_same_keys, "barrier.py -k late_rank_of_an_old"),
    "every_run_has_the_same_keys": (every_run_has_the_same_keys, "barrier.py -k decided_in_an_old_one"),
    "the_name_is_no_part_of_the_key": (the_name_is_no_part_of_the_key, "barrier.py -k another_name"),
    "epochs_are_compared_over_runs": (epochs_are_compared_over_runs, "barrier.py -k within_a_run"),
    "who_stops_tells_nobody": (who_stops_tells_nobody, "barrier.py -k who_stops_ends"),
    "the_wait_is_in_the_loop": (the_wait_is_in_the_loop, "barrier.py -k coroutine_waits_in_a_thread"),
    "notes_are_not_examined_on_a_rank": (
        notes_are_not_examined_on_a_rank,
        "rank_barrier.py -k no_log_can_hold",
    ),
    "any_bound_will_do": (any_bound_will_do, "barrier.py -k no_time"),
    "rounds_have_no_barrier": (rounds_have_no_barrier, "rank_barrier.py -k cannot_release"),
    "the_barrier_is_not_waited_at": (the_barrier_is_not_waited_at, "rank_barrier.py -k cannot_release"),
    "a_cancelled_hand_over_waits_all_the_same": (
        a_cancelled_hand_over_waits_all_the_same,
        "rank_barrier.py -k that_is_cancelled",
    ),
    "who_holds_on_is_let_off": (who_holds_on_is_let_off, "rank_barrier.py -k hangs_in_its_handler"),
    "an_engine_resumes_over_what_was_not_undone": (
        an_engine_resumes_over_what_was_not_undone,
        "rank_barrier.py -k not_undone",
    ),
    "nobody_is_called_to_undo": (nobody_is_called_to_undo, "rank_barrier.py -k undo_that_fails"),
    "a_rank_above_0_undoes_nothing": (a_rank_above_0_undoes_nothing, "rank_barrier.py -k undone_on_every"),
    "steps_that_nobody_waits_for_go_on": (
        steps_that_nobody_waits_for_go_on,
        "rank_coroutines.py -k is_cut_short",
    ),
    "a_collection_comes_back": (a_collection_comes_back, "cache_release.py -k does_without_a_garbage"),
    "everybody_lacks_something": (everybody_lacks_something, "cache_release.py -k enough_is_escalated"),
    "what_is_short_is_not_told": (what_is_short_is_not_told, "cache_release.py -k memory_that_is_short"),
    "nobody_looks_at_budgets": (nobody_looks_at_budgets, "cache_release.py -k the_log_of_a_round"),
    "bytes_are_those_of_before": (bytes_are_those_of_before, "cache_release.py -k adds_up"),
    "a_setting_is_left_as_it_is_in_a_round": (
        a_setting_is_left_as_it_is_in_a_round,
        "toggle.py -k every_way_out",
    ),
    "a_toggle_does_not_know_of_others": (a_toggle_does_not_know_of_others, "toggle.py -k two_toggles"),
    "only_the_good_way_restores": (only_the_good_way_restores, "toggle.py -k every_way_out"),
    "what_is_left_over_is_taken_for_what_was": (
        what_is_left_over_is_taken_for_what_was,
        "toggle.py -k still_owed",
    ),
}
"""What breaks, and the tests that must notice: ``tests/test_`` and so on, with what selects them."""

if "BARRIER_MUTANT" in os.environ:
    MUTANTS[os.environ["BARRIER_MUTANT"]][0](pytest.MonkeyPatch())
