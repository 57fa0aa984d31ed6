"""The ranks of a trainer put back together: a step of every round, before the engines resume.

When an engine maps its cache, it does so on all of its devices, and on some of these other ranks of the
trainer may still hold what they have not released. So each round has two executors of rank 0:

* :class:`RankCall`, the first one, has every other rank begin, beside rank 0's own handlers, with what it
  has to prepare, to clean up or to undo (``FollowerSync(handlers=...)``);
* :class:`RankBarrier`, the last one, waits until all of them have voted that theirs is done.

So *prepared* comes before an engine is paused, and *memory released* after the publication and before an
engine resumes. Without it the clean-up fails, and the round with it, with the rank that is at fault. Ranks
say what their handlers did, and the round's log has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from ..fsm import checks
from ..fsm.errors import RankLost
from ..fsm.executors import Note, RoundView, Undo
from ..fsm.ranks import Pulses
from ..fsm.votes import Decision, Meeting, Vote, without
from .barrier import Barrier
from .ranks import TrainerRanks

__all__ = ["CLEAN", "PREPARE", "UNDO", "RankBarrier", "RankCall", "meeting_of"]

PREPARE, CLEAN, UNDO = "prepare", "clean", "undo"
"""What rank 0 calls the others to do."""

_NAMES = {PREPARE: "prepared", CLEAN: "memory released", UNDO: "undone"}
_GLANCE = 0.1  # seconds between two looks at those that are missing


def meeting_of(run: str, round: str, epoch: int, what: str) -> Meeting:
    """Where the ranks meet when they have done it."""
    return Meeting(round, epoch, _NAMES[what], run)


class RankCall:
    """Calls the other ranks to their part of a round. An executor of rank 0; the first one.

    Args:
        barrier: the last one.
    """

    name = "ranks"

    def __init__(self, barrier: RankBarrier) -> None:
        self._barrier = barrier

    def prepare(self, round: RoundView) -> Undo | None:
        """Have the others prepare. The undo has them undo it, and waits for those that live."""
        self._barrier.call(round, PREPARE)
        return None if self._barrier.alone else lambda: self._barrier.undo(round)

    def clean(self, round: RoundView) -> None:
        """Have the others release what they hold, at the same time as this rank."""
        self._barrier.call(round, CLEAN)


class RankBarrier:
    """Waits for the other ranks. An executor of rank 0; the last one.

    Args:
        ranks: this trainer's; None, or a world of one, waits for nobody, which the log says.
        bound: seconds to wait for ranks that live. Those that do not are missed before it.
        undo_bound: the same when a round has failed; by default as long.

    Raises:
        SetupError: the ranks' store cannot decide (it has no ``compare_set``).
    """

    name = "barrier"

    def __init__(
        self, ranks: TrainerRanks | None = None, bound: float = 10.0, undo_bound: float | None = None
    ) -> None:
        checks.seconds("RankBarrier", "bound", bound)
        checks.seconds("RankBarrier", "undo_bound", bound if undo_bound is None else undo_bound)
        undoing = bound if undo_bound is None else undo_bound
        self._ranks, self._bounds = ranks, {PREPARE: bound, CLEAN: bound, UNDO: undoing}
        self._barrier = Barrier(ranks, 1 if ranks is None else ranks.world_size)
        self._numbers = 0
        self._cleaning = self._undoing = ""
        self.stopped: Callable[[], object] = lambda: False
        """Whether the hand-over is to stop: asked while engines are still what they were."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody to wait for."""
        return self._barrier.alone

    def prepare(self, round: RoundView) -> Undo | None:
        """Every rank is prepared; then engines may be paused."""
        self._meet(round, PREPARE)
        return None if self.alone else lambda: self._begin_undo(round)

    def clean(self, round: RoundView) -> None:
        """Every rank has released what it holds; then engines may resume."""
        self._meet(round, CLEAN)

    def close(self) -> None:
        """Give the threads back. The ranks' words are the ranks'."""
        self._barrier.close()

    def call(self, round: RoundView, what: str) -> None:
        """Have the other ranks do it; does not wait."""
        ranks, session = self._ranks, round.session
        if ranks is None or self.alone:
            return
        if what == CLEAN:
            self._cleaning = session.round
        self._numbers += 1
        said = [self._numbers, what, session.round, session.epoch, session.version, round.attempt]
        ranks.post(ranks.number, "call", [*said, round.bound, round.copied])

    def undo(self, round: RoundView) -> None:
        """Have the others undo it. Who is gone has nothing to undo any more; who fails at it is told."""
        self._call_undo(round)
        self._meet(round, UNDO)

    def _begin_undo(self, round: RoundView) -> None:
        """The first of the round's undos. Once a clean-up was called for, nobody after it waits."""
        if self._cleaning == round.session.round:
            self.undo(round)
        else:
            self._call_undo(round)

    def _call_undo(self, round: RoundView) -> None:
        if self._undoing != round.session.round:  # the last executor calls, and the first one waits
            self._undoing = round.session.round
            self.call(round, UNDO)

    def _meet(self, round: RoundView, what: str) -> None:
        ranks, session = self._ranks, round.session
        meeting = meeting_of("" if ranks is None else ranks.run, session.round, session.epoch, what)
        if ranks is None or self.alone:
            round.note("barrier", trigger=meeting.name, executor=self.name, facts={"ranks": 1})
            return
        gone = _Gone(ranks, meeting)
        try:
            met = self._barrier.meet(
                meeting, bound=self._bounds[what], gone=gone, heard=lambda vote: _tell(round.note, vote),
                stopped=lambda: what == PREPARE and self.stopped(),
            )  # fmt: skip
        except RankLost:
            if what == UNDO and gone.found:  # what it held went with it
                return
            raise
        late = {str(rank): _short(seconds) for rank, seconds in met.late.items()}
        round.note(
            "barrier", trigger=meeting.name, executor=self.name, seconds=_short(met.seconds),
            facts={"ranks": ranks.world_size, "late": late},
        )  # fmt: skip


class _Gone:
    """Who of those that are missing will not come: it has given up, or gives no sign of life."""

    def __init__(self, ranks: TrainerRanks, meeting: Meeting) -> None:
        self._ranks, self._meeting = ranks, meeting
        self._pulses = Pulses(ranks.others, time.monotonic())
        self._next, self.found = 0.0, False

    def __call__(self, absent: Collection[int]) -> Decision | None:
        found = self._look(absent)
        self.found = self.found or found is not None
        return found

    def _look(self, absent: Collection[int]) -> Decision | None:
        now, ranks = time.monotonic(), self._ranks
        if now < self._next:
            return None
        self._next = now + _GLANCE
        for rank in set(absent) - {ranks.rank}:
            report = ranks.reported(rank)
            if report is not None and (why := ranks.gave_up(report)):
                late = why.startswith(RankLost.__name__)
                why = f"rank {rank} has given up the hand-over of step {report.step}: {why}"
                return Decision(
                    passed=False, ranks=(rank,), why=f"{self._meeting} is not passed: {why}", late=late
                )
            self._pulses.heard(rank, ranks.said("beat", rank), now)
        lost = [rank for rank in self._pulses.silent(now, ranks.silent) if rank in absent]
        return without(self._meeting, lost, f"no sign of life for {ranks.silent:g} s") if lost else None


def _tell(note: Note, vote: Vote) -> None:
    """What another rank's handlers did, in the words in which they noted it there."""
    for told in vote.told:
        values: dict[str, Any] = dict(told)
        note(values.pop("event"), rank=vote.rank, **values)


def _short(seconds: float) -> float:
    return round(seconds, 6)
