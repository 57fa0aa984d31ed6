"""A vote of all ranks, one after the other: either every one of them may go on, or each is told why not.

Before anything is written, and once more when it is, each rank says whether it could. They meet at a
:class:`.barrier.Barrier`, which is passed when all have come, with an error or without: then every rank knows
the same errors. What is added here is which meeting it is, since there is no round that says so. Rank 0
begins a *run* with an id of its own, in which votes are numbered, and *calls* each of them: by the run, the
number, and what it is on. Another rank takes part in the votes of a run one by one. It begins with the first
that it finds open, so that no word of an older run is taken for its own; one that failed without it is told
to it as soon as it comes.

Who gives up says so: it votes against the vote that it was at, or, if that is passed, against the next one,
for which it will not be ready. So nobody waits longer for it than until then.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from ..fsm.errors import (
    BarrierAborted,
    BarrierTimeout,
    RankFailed,
    RankLost,
    RanksDisagree,
    RoundCancelled,
    WeightSyncError,
)
from ..fsm.ranks import error_from, error_told
from ..fsm.votes import Meeting, Vote
from .barrier import Barrier
from .rank_store import RankStore, Store, check_rank, line_of

__all__ = ["Alone", "RankVotes", "Votes"]

_GLANCE = 0.005  # seconds between two looks for a call


class Votes(Protocol):
    """How the ranks of a trainer come to one mind."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def vote(self, what: str, error: BaseException | None) -> None:
        """Come to the vote on ``what``, with the error that keeps this rank from it, if there is one.

        Returns only if every rank came without. Otherwise each rank raises: one that failed its own error,
        the very object, and the others that of the first one, by its kind and text.
        """

    def close(self) -> None:
        """There are no more votes. Idempotent."""


class Alone:
    """A trainer of one rank."""

    world_size = 1

    def vote(self, what: str, error: BaseException | None) -> None:
        """This rank's own mind."""
        if error is not None:
            raise error

    def close(self) -> None:
        """Nothing is held."""


class RankVotes(RankStore):
    """This process as one of a trainer's ranks.

    Args:
        store: shared by all ranks: any store of ``torch.distributed``.
        rank: which of them this is; 0 calls the votes.
        world_size: how many there are.
        name: of these votes, where several things vote in one store.
        limit: seconds for which a rank may come later than another.
        silent: seconds within which the store has to answer.

    Raises:
        SetupError: something of the wrong kind, or numbers that no trainer has.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "weightsync-votes",
        limit: float = 60.0,
        silent: float = 10.0,
    ) -> None:
        check_rank("RankVotes", store, rank, world_size, name=name, limit=limit, silent=silent)
        super().__init__(store, name, rank, silent)
        self.world_size, self.limit = world_size, limit
        self._barrier = Barrier(self, world_size)
        self._run = "" if rank else uuid.uuid4().hex[:12]
        self._number = 0  # of the last vote that is over for this rank
        self._known = not rank  # whether the run is not an older one

    def close(self) -> None:
        """There are no more votes. Idempotent."""
        self._barrier.close()
        super().close()

    def vote(self, what: str, error: BaseException | None) -> None:
        """Come to the vote on ``what``. See :class:`Votes`.

        Raises:
            RankLost: a rank did not come in time, or the store does not answer.
            RankFailed: a rank has given up, or failed with an error that is none of ours.
            RanksDisagree: a rank has come to another vote.
            WeightSyncError: any other, as a rank said it.
        """
        if self.world_size == 1:
            Alone().vote(what, error)
            return
        try:
            told = self._vote(what, error)
        except BaseException as alone:
            if error is None:
                raise
            error.add_note(f"and the vote on it: {line_of(alone)}")
            raise error from None
        if told is not None:
            raise told if error is None else error

    def _vote(self, what: str, error: BaseException | None) -> WeightSyncError | None:
        """What all ranks are told, if they may not go on."""
        try:
            told = self._counted(what, error)
        except BaseException as alone:
            self._leave(what, alone)
            raise
        self._number, self._known = self._number + 1, True
        return told

    def _leave(self, what: str, alone: BaseException) -> None:
        """This rank goes on without the others: none of them is to wait for it."""
        left = self._next(f"on {what!r}")
        if not self._run:  # nobody has called it
            return
        self._number += 1
        with suppress(RankLost):
            found = self._barrier.abort(left, alone)
            if found is not None and found.passed:
                self._barrier.abort(self._next(f"after {what!r}"), alone)

    # -- which vote it is ------------------------------------------------------------------------------------

    def _next(self, title: str) -> Meeting:
        """Where the ranks vote next."""
        return _meeting(self._run, self._number + 1, title)

    def _call(self, what: str) -> str:
        """Call the next vote, as rank 0."""
        self.write([self._run, self._number + 1, what], "call")
        return what

    def _called(self, what: str) -> str:
        """Wait until rank 0 has called this rank's next vote, or somebody has given it up; what it is on."""
        end = time.monotonic() + self.limit
        while True:
            run, number, asked = self.read("call") or ("", 0, "")
            if run != self._run:
                over = self._barrier.decision(_meeting(run, number)) is not None
                self._run, self._number, self._known = run, number if over else number - 1, False
            if number > self._number:
                return str(asked) if number == self._number + 1 else what
            if run and self._barrier.decision(self._next("")) is not None:
                return what
            if time.monotonic() >= end:
                raise RankLost(f"rank 0 of the trainer did not come to {what!r} within {self.limit:g} s")
            time.sleep(_GLANCE)

    # -- counting --------------------------------------------------------------------------------------------

    def _counted(self, what: str, error: BaseException | None) -> WeightSyncError | None:
        """Come to the next vote; what all ranks are told of it, if it is not passed."""
        while True:
            asked = self._called(what) if self.rank else self._call(what)
            if asked != what:
                where = f"rank {self.rank} of the trainer is at {what!r}"
                error = RanksDisagree(f"{where}, and rank 0 at {asked!r}")
            meeting = self._next(f"on {asked!r}")
            found = self._barrier.decision(meeting)
            if found is not None:  # without this rank
                return found.error() or RankFailed(f"{meeting} is over")
            try:
                self._meet(meeting, error)
            except (BarrierAborted, BarrierTimeout) as failed:
                return failed
            except RoundCancelled:  # it was of an older run
                continue
            return _first_of(self._barrier.votes(meeting))

    def _meet(self, meeting: Meeting, error: BaseException | None) -> None:
        """Every rank has come, with an error or without."""
        run = meeting.run
        self._barrier.meet(
            meeting, bound=self.limit, told=[] if error is None else [error_told(error)],
            stopped=lambda: not self._known and (self.read("call") or [""])[0] != run,
        )  # fmt: skip


def _meeting(run: str, number: int, on: str = "") -> Meeting:
    return Meeting(f"{run}.{number}", number, "vote", run, title=f"the vote {on}")


def _first_of(votes: Mapping[int, Vote]) -> WeightSyncError | None:
    """What it is on a rank that did not fail: the error of the first one that did. The others are notes."""
    errors = {rank: vote.told[0] for rank, vote in sorted(votes.items()) if vote.told}
    if not errors:
        return None
    rank, *others = errors
    kind, text = errors[rank]["kind"], errors[rank]["text"]
    where = f"rank {rank} of the trainer"
    told = error_from({"kind": kind, "text": text if text.startswith("rank") else f"{where}: {text}"})
    if type(told).__name__ != kind:
        told = RankFailed(f"{where} failed: {kind}: {text}")
    for other in others:
        told.add_note(f"rank {other}: {errors[other]['kind']}: {errors[other]['text']}")
    return told
