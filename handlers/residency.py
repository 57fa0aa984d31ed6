"""Residency: trainer and engine take turns with a memory, in the order in which both fit.

    Residency(
        before=[offload(optimizer), onload(engine_weights)],   # before the engines are paused
        release=[offload(parameters)],                         # when the update is proven; or when it failed
        after=[onload(engine_cache)],                          # last, before the engines resume
    )

An executor. ``before`` is done in order, and taken back in reverse if the round fails. What is in ``release``
has to stay until the update is proven and must not stay any longer, however the round ends: it goes in the
clean-up on the good way, and by the undo when the round fails, before anything comes back. ``after`` belongs
to the good way alone. Whoever would rather have the engines serve the old version after a failure than
everything as it was says so by ``failed``.

A move that has nothing to change is left out, so the lists say what is wanted and not what happened to be.
Each one that is made has its line in the round's log, with its seconds and with the bytes of all parts before
and after. With ``capacity``, the lists are read before the first move, the ways on which the round fails
included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from ..fsm import checks
from ..fsm.errors import MemoryShort, ResidencyError, SetupError
from ..fsm.executors import Note, RoundView, Undo
from ..fsm.residency import Course, Move, Part, overflow
from ..fsm.tensors import has_memory

__all__ = ["Residency", "shift"]

_WHERE = "Residency"


def _untold(event: str, /, **_: object) -> None:
    """Outside a round there is no log."""


class Residency:
    """An executor that brings parts into memory and lets them go, in an order.

    Args:
        before: moves before the engines are paused, as ``onload(part)`` and ``offload(part)`` make them.
        release: what is let go of at the end of every round.
        after: moves after that, before the engines resume, if the round has worked.
        failed: moves when it has not, after the release; by default ``before`` is taken back in reverse.
        capacity: bytes that all parts together may take. By default nobody counts.
        after_ranks: with a trainer of several ranks: make these moves when every rank has made its own, in
            both halves of the round. For the parts of engines, whose devices are those of all ranks.
        name: for the log.

    Raises:
        SetupError: these are no moves; two parts have one name; or something is released by coming.
    """

    def __init__(
        self,
        *,
        before: Iterable[Move] = (),
        release: Iterable[Move] = (),
        after: Iterable[Move] = (),
        failed: Iterable[Move] | None = None,
        capacity: int | None = None,
        after_ranks: bool = False,
        name: str = "residency",
    ) -> None:
        checks.text(_WHERE, "name", name)
        if capacity is not None:
            checks.whole(_WHERE, "capacity", capacity)
        checks.flag(_WHERE, "after_ranks", after_ranks)
        self.name, self._capacity, self.after_ranks = name, capacity, after_ranks
        self._course = Course(
            _moves("before", before),
            _moves("release", release),
            _moves("after", after),
            None if failed is None else _moves("failed", failed),
        )
        _check(self._course)
        woken = [getattr(move.part, "engine", None) for move in self._course.before if move.resident]
        self.wakes = frozenset(engine for engine in woken if engine is not None)
        """Engines that may be asleep when a round begins, because this wakes them."""
        engines = [getattr(part, "engine", None) for part in self._course.parts]
        self.engines = frozenset(engine for engine in engines if engine is not None)
        """Engines that it moves parts of."""
        self._done: list[Move] = []
        self._round = ""
        """Whose moves were begun, and are neither cleaned up nor undone."""
        self._turn = threading.Lock()

    def prepare(self, round: RoundView) -> Undo | None:
        """Make the moves of ``before``; the undo takes them back, and releases.

        Raises:
            MemoryShort: the moves need more than ``capacity``. None was made.
            ResidencyError: the round sends from the memory of a part that is to go first, or an older round's
                moves are not over. None was made.
        """
        view = round
        if not self._turn.acquire(blocking=False):
            raise self._busy()
        try:
            if self._round:
                raise self._busy()
            self._refuse(view)
            self._done, self._round = [], view.session.round
            try:
                self._go(self._course.before, view.note)
                _refuse_gone(view)
            except BaseException as error:
                for line in self._put_back(view.note):
                    error.add_note(f"and {line}")
                raise
        finally:
            self._turn.release()
        return lambda: self._undo(view.note)

    def clean(self, round: RoundView) -> None:
        """Release, and make the moves of ``after``."""
        with self._turn:
            self._go((*self._course.release, *self._course.after), round.note)
            self._done, self._round = [], ""

    def _busy(self) -> ResidencyError:
        return ResidencyError(
            f"{self.name} has not finished the moves of round {self._round}: a part is slow, or hangs"
        )

    def _go(self, moves: Sequence[Move], note: Note) -> None:
        for move in moves:
            if move.needed():
                try:
                    _make(move, self._course.parts, note, self.name)
                finally:
                    if not move.needed():  # also of one that has come, or gone, and raised then
                        self._done.append(move)

    def _undo(self, note: Note) -> None:
        with self._turn:
            failures = self._put_back(note)
        if failures:
            raise ResidencyError(f"{self.name} could not be put back: {'; '.join(failures)}")

    def _put_back(self, note: Note) -> list[str]:
        """All that is owed, as far as it can be done; what failed, a line each."""
        owed = self._course.owed(tuple(self._done))
        self._done, self._round = [], ""
        failures: list[str] = []
        stuck = False
        for move in owed:
            if stuck and move.resident:
                failures.append(f"{move} was not tried: what should have gone before it is still there")
                continue
            try:
                if move.needed():
                    _make(move, self._course.parts, note, self.name)
            except Exception as error:  # noqa: BLE001 - it is told, and the others are owed all the same
                stuck = stuck or not move.resident
                failures.append(f"{move} failed: {type(error).__name__}: {error}")
        return failures

    def _refuse(self, view: RoundView) -> None:
        """What could not end well is refused while everything is where it was."""
        there = {part.name: part.resident() for part in self._course.parts}
        if self._capacity is not None:
            sizes = {part.name: part.nbytes() for part in self._course.parts}
            if (over := overflow(self._course, sizes, there, self._capacity)) is not None:
                move, used = over
                raise MemoryShort(
                    f"{move} would bring {self.name} to {used} bytes of {self._capacity}: let something go "
                    "before it, in the lists of moves"
                )
        ends = {move.part.name: move for move in self._course.before}
        sent = getattr(view.weights, "tensors", {}).values()
        for move in ends.values():
            shares = getattr(move.part, "shares", None)
            if not move.resident and shares is not None and shares(sent):
                raise ResidencyError(
                    f"{move} before the round would take away what it sends: release it at the end "
                    "(release=[...]), or hand a private copy over by begin(...)"
                )


def _refuse_gone(view: RoundView) -> None:
    """A retry, or a round that brings somebody back, comes when what it sends was released already."""
    for name, tensor in getattr(view.weights, "tensors", {}).items():
        if not has_memory(tensor):
            raise ResidencyError(
                f"tensor {name!r} is to be sent and has no memory: an earlier round of these weights has let "
                "go of it; onload its part in before=[...], or hand over anew"
            )


def shift(*moves: Move) -> None:
    """Make moves in order, outside a round; if one fails, those before it are taken back.

    Raises:
        SetupError: these are no moves.
    """
    done: list[Move] = []
    for move in _moves("moves", moves, "shift"):
        if not move.needed():
            continue
        try:
            _make(move, (), _untold, "shift")
            done.append(move)
        except BaseException as error:
            if not move.needed():
                done.append(move)
            for other in Course(tuple(done)).owed(done):
                try:
                    (other.part.onload if other.resident else other.part.offload)()
                except Exception as later:  # noqa: BLE001 - it is told with the first one
                    error.add_note(f"and {other} failed: {type(later).__name__}: {later}")
                    break
            raise


def _make(move: Move, parts: Sequence[Part], note: Note, executor: str) -> None:
    before, began = _used(parts), time.monotonic()
    (move.part.onload if move.resident else move.part.offload)()
    seconds, after = time.monotonic() - began, _used(parts)
    if move.needed():
        raise ResidencyError(f"{move} was done, and the part says that it is not {_where(move)} memory")
    note(
        "action", trigger=move.word, executor=executor, seconds=round(seconds, 6), freed=before - after,
        facts={"part": move.part.name, "bytes_before": before, "bytes_after": after},
    )  # fmt: skip


def _where(move: Move) -> str:
    return "in" if move.resident else "out of"


def _used(parts: Sequence[Part]) -> int:
    return sum(part.nbytes() for part in parts if part.resident())


def _moves(name: str, moves: object, where: str = _WHERE) -> tuple[Move, ...]:
    needed = "a list of moves is needed: onload(part), offload(part)"
    if isinstance(moves, str | bytes | Move) or not isinstance(moves, Iterable):
        raise checks.refusal(where, name, moves, needed)
    listed = tuple(moves)
    for each in listed:
        checks.kind(where, name, each, Move, needed)
    return listed


def _check(course: Course) -> None:
    known: dict[str, Part] = {}
    for move in (*course.before, *course.release, *course.after, *(course.failed or ())):
        if known.setdefault(move.part.name, move.part) is not move.part:
            raise SetupError(
                f"{_WHERE}: two parts are called {move.part.name!r}: give each a name of its own"
            )
    for move in course.release:
        if move.resident:
            raise SetupError(f"{_WHERE}(release=...): {move} is no release: put it in before, or in after")
