"""Faults to bring back into residency and the versions of samples: ``pytest -p residencymutants``.

Which one is said by the environment variable ``RESIDENCY_MUTANT``. Each changes the product, never a check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weightsync import books, sync, turns
from weightsync.fsm import residency as course
from weightsync.fsm import spans
from weightsync.fsm.errors import VersionAhead
from weightsync.fsm.executors import RoundView
from weightsync.fsm.ledger import Ledger
from weightsync.handlers import rebuilt, residency, resident_parts, segments
from weightsync.handlers.gate import Gate

__all__ = ["MUTANTS"]

Changed: Any = setattr
_Residency, _Course = residency.Residency, course.Course


# -- moves -------------------------------------------------------------------------------------------------


def a_failure_releases_nothing() -> None:
    """Only the good way lets go of what was there for the update."""
    owed = _Course.owed

    def kept(self: Any, done: Any) -> Any:
        released = set(self.release)
        return tuple(each for each in owed(self, done) if each not in released)

    Changed(_Course, "owed", kept)


def moves_are_taken_back_in_their_order() -> None:
    """The trainer comes before the engine has gone."""
    inverse = course.inverse
    Changed(course, "inverse", lambda moves: inverse(tuple(moves)[::-1]))


def the_cache_comes_with_the_weights() -> None:
    """Everything is woken at once, before the update."""

    def prepare(self: Any, view: RoundView) -> Any:
        self._go((*self._course.before, *self._course.after), view.note)
        return lambda: self._undo(view.note)

    Changed(_Residency, "prepare", prepare)


def parameters_go_before_they_are_sent() -> None:
    """The release is one of the moves before the round."""
    go = _Residency._go

    def early(self: Any, moves: Any, note: Any) -> None:
        go(self, (*moves, *self._course.release), note)

    Changed(_Residency, "_go", early)


def nobody_counts() -> None:
    """The lists are not read before the first move."""
    Changed(residency, "overflow", lambda *args: None)


def only_the_good_way_is_counted() -> None:
    """What is put back after a failure may be too much."""
    ways = _Course.ways
    Changed(_Course, "ways", lambda self, there: iter([next(ways(self, there))]))


def what_does_not_go_keeps_nobody_out() -> None:
    """The way back goes on after a part that has not let go."""
    owed = _Residency._put_back

    def put_back(self: Any, note: Any) -> list[str]:
        failures = owed(self, note)
        for move in self._course.owed(self._course.before) if failures else ():
            if move.resident and move.needed():
                move.part.onload()
        return failures

    Changed(_Residency, "_put_back", put_back)


def who_raises_has_not_moved() -> None:
    """A part that has gone, and failed then, is not brought back."""

    def go(self: Any, moves: Any, note: Any) -> None:
        for move in moves:
            if move.needed():
                residency._make(move, self._course.parts, note, self.name)
                self._done.append(move)

    Changed(_Residency, "_go", go)


def what_is_sent_may_go() -> None:
    """Nobody looks whose memory it is."""
    Changed(resident_parts.Scratch, "shares", lambda self, tensors: False)


def rounds_move_at_once() -> None:
    """One that was given up still moves, and nobody waits for it."""
    prepare = _Residency.prepare

    def begin(self: Any, round: RoundView) -> Any:
        self._round = ""
        return prepare(self, round)

    Changed(_Residency, "prepare", begin)


# -- parts -------------------------------------------------------------------------------------------------


def the_copy_is_a_view() -> None:
    """Nothing is on the host, so what comes back is whatever lies there."""

    def keep(self: Any, storages: Any) -> None:
        self._copies = [torch.zeros(each.nbytes(), dtype=torch.uint8) for each in storages]

    Changed(resident_parts.HostCopy, "_keep", keep)


def each_view_is_a_memory() -> None:
    """Two tensors of one memory are counted twice."""
    storages = resident_parts._storages
    Changed(
        resident_parts, "_storages",
        lambda tensors: [each for tensor in tensors for each in storages([tensor])],
    )  # fmt: skip


def what_failed_to_come_is_there() -> None:
    """Memory that was taken again is kept, with anything in it."""
    onload = resident_parts.Scratch.onload

    def half(self: Any) -> None:
        gone = self._gone
        try:
            onload(self)
        except BaseException:
            for storage, size in gone or ():
                storage.resize_(size)
            raise

    Changed(resident_parts.Scratch, "onload", half)


def parts_go_from_under_generations() -> None:
    """Nobody is held."""
    Changed(Gate, "hold", lambda self, why, limit: None)


def masters_are_trusted() -> None:
    """Nothing is compared before it goes."""
    Changed(rebuilt.Rebuilt, "_due", lambda self: False)


def values_are_compared() -> None:
    """Zero is zero."""
    Changed(rebuilt, "_same", torch.equal)


def all_cycles_are_proven() -> None:
    """What is slow is done for ever."""
    Changed(rebuilt.Rebuilt, "_due", lambda self: True)


# -- gates and engines -------------------------------------------------------------------------------------


def an_open_gate_admits() -> None:
    """Whoever opens it knows of no hold."""
    Changed(Gate, "_admits", lambda self: self._open)


def a_hold_waits_for_nobody() -> None:
    """Whoever is inside goes on."""

    def hold(self: Gate, why: str, limit: float) -> None:
        with self._changed:
            self._holds.add(why)

    Changed(Gate, "hold", hold)


def nobody_is_woken() -> None:
    """An engine that the round would wake is refused before."""
    Changed(books, "awake", lambda said: said)


def sleepers_are_served_from() -> None:
    """A router is told of an engine that a round would wake."""
    refresh = books.EngineBooks.refresh

    def trusting(self: Any, limit: float, **how: Any) -> Any:
        return refresh(self, limit, **{**how, "before_a_round": True})

    Changed(books.EngineBooks, "refresh", trusting)


def an_engine_is_woken_among_the_moves_of_a_rank() -> None:
    """Whether the other ranks have made room or not."""
    Changed(sync, "around", lambda executors, call, barrier: (call, *executors, barrier))


# -- versions ----------------------------------------------------------------------------------------------


def the_version_is_read_at_the_door() -> None:
    """Before the gate has admitted."""

    @contextmanager
    def of_thread(self: Any, limit: float | None) -> Iterator[Any]:
        running = segments.Running(self._facts)
        with self._gate.admit(limit):
            try:
                yield running
            finally:
                running.end()

    Changed(segments.Segments, "of_thread", of_thread)


def the_end_is_taken_for_the_beginning() -> None:
    """The version is read once."""

    def end(self: Any) -> None:
        engine, incarnation = self._who
        self._done = spans.Segment(engine, incarnation, self.began, self.began)

    Changed(segments.Running, "end", end)


def a_version_of_the_future_is_fresh() -> None:
    """It is clamped."""

    def staleness(self: Any, ledger: Ledger) -> int:
        return max(0, (ledger.version or 0) - int(self.oldest))

    Changed(spans.SampleVersions, "staleness", staleness)


def only_what_is_published_counts() -> None:
    """Engines may hold more than that."""

    def staleness(self: Any, ledger: Ledger) -> int:
        self._numbers()
        if self.newest > (ledger.newest or -1):
            raise VersionAhead(f"version {self.newest} of engine e0 is newer than any in the ledger")
        return (ledger.version or 0) - int(self.oldest)

    Changed(spans.SampleVersions, "staleness", staleness)


def engines_are_ahead_by_a_negative_number() -> None:
    """Of weights that newer ones have overtaken."""
    Changed(turns.Turns, "_behind", lambda self, pending: pending.number - self._delivered)


_CASE = "cases_memory.py -k"
MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    mutant.__name__: (mutant, tests)
    for mutant, tests in (
        (a_failure_releases_nothing, "residency.py -k lets_go_of_the_parameters"),
        (moves_are_taken_back_in_their_order, "residency.py -k takes_back_in_reverse"),
        (the_cache_comes_with_the_weights, f"{_CASE} good_round"),
        (parameters_go_before_they_are_sent, "residency.py -k both_ends"),
        (nobody_counts, f"{_CASE} cannot_fit"),
        (only_the_good_way_is_counted, "residency.py -k too_much_is_named"),
        (what_does_not_go_keeps_nobody_out, f"{_CASE} not_piled_up"),
        (who_raises_has_not_moved, f"{_CASE} wherever_it_fails"),
        (what_is_sent_may_go, "residency.py -k robbed"),
        (rounds_move_at_once, "residency.py -k moves_of_another"),
        (the_copy_is_a_view, "resident_parts.py -k every_bit"),
        (each_view_is_a_memory, "resident_parts.py -k every_bit"),
        (what_failed_to_come_is_there, "resident_parts.py -k half_there"),
        (parts_go_from_under_generations, "resident_parts.py -k nobody_generates"),
        (masters_are_trusted, "rebuilt.py -k masters_cast_stays"),
        (values_are_compared, "rebuilt.py -k other_sign"),
        (all_cycles_are_proven, "rebuilt.py -k bit_for_bit_without"),
        (an_open_gate_admits, "gate.py -k held_gate"),
        (a_hold_waits_for_nobody, "gate.py -k hold_waits"),
        (nobody_is_woken, "residency.py -k handlers_name"),
        (sleepers_are_served_from, "residency.py -k handlers_name"),
        (an_engine_is_woken_among_the_moves_of_a_rank, "residency.py -k made_room"),
        (the_version_is_read_at_the_door, "segments.py -k threads_never"),
        (the_end_is_taken_for_the_beginning, "segments.py -k lost_under"),
        (a_version_of_the_future_is_fresh, "spans.py -k never_heard"),
        (only_what_is_published_counts, "spans.py -k nobody_published"),
        (engines_are_ahead_by_a_negative_number, "turns.py -k newer_ones_overtook"),
    )
}
"""By name: the change, and which tests must notice it."""

if "RESIDENCY_MUTANT" in os.environ:
    MUTANTS[os.environ["RESIDENCY_MUTANT"]][0]()
