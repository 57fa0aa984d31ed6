"""A barrier over a store: every rank comes and votes, and all of them pass it, or none does.

    barrier = Barrier(RankStore(store, "trainer", rank, silent=10), world_size)
    barrier.meet(Meeting(round, epoch, "memory released"), bound=5)

It counts votes by keys (``NAME/barrier/RUN/ROUND/NAME/RANK``) instead of being a collective, for what that
cannot do: a rank that failed says so and ends the wait of all the others; who waits can stop; whoever does
not come is named; and a wait that was given up leaves nothing behind that a later one could pair with.
Nothing here needs a process group, nobody waits *in* the store, and nobody votes for another rank.

Rank 0 counts. What it finds it writes down as the *decision*, where only the first word counts, so that a
rank which has run out of time and one that comes at that moment cannot see it differently. Any rank may
decide against it: one that fails, stops, or has waited for its bound. Who comes to a barrier that is decided
is told that. A barrier of an older epoch is over, also when its words are long deleted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..fsm import checks
from ..fsm.errors import BarrierAborted, RankLost, RoundCancelled
from ..fsm.votes import Decision, Meeting, Vote, against, decided, missing, without
from .rank_store import RankStore, line_of
from .workers import Workers

__all__ = ["Barrier", "Met"]

_FIRST, _LONGEST = 0.001, 0.01  # seconds between two looks
_WHERE = "barrier"

Gone = Callable[[Collection[int]], Decision | None]
"""Given those that are missing, what is to be decided because one of them does not come."""


def _nobody(_: Collection[int]) -> None:
    """Nothing is known of those that are missing."""


@dataclass(frozen=True, slots=True)
class Met:
    """A barrier that was passed.

    Args:
        seconds: how long this rank was at it.
        late: seconds by which each rank came after the first one, as rank 0 saw it; empty on other ranks.
        votes: what each rank said; on rank 0 alone.
    """

    seconds: float = 0.0
    late: Mapping[int, float] = field(default_factory=dict)
    votes: tuple[Vote, ...] = ()


@dataclass(slots=True)
class _Wait:
    """One rank's wait, and what it has seen."""

    meeting: Meeting
    began: float
    bound: float
    stopped: Callable[[], object]
    gone: Gone
    heard: Callable[[Vote], object]
    votes: dict[int, Vote] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)


class Barrier:
    """Where the ranks of a trainer meet, once for each name of a round. Each rank has one of these.

    Args:
        words: this rank's words to a store that has ``compare_set``; None if there is but one rank.
        world_size: how many ranks there are.

    Raises:
        SetupError: the store cannot decide, or there is none and there are several ranks.
    """

    def __init__(self, words: RankStore | None, world_size: int = 1) -> None:
        checks.whole("Barrier", "world_size", world_size)
        if world_size > 1 and (words is None or not checks.has(words.store, ("compare_set",))):
            given = None if words is None else words.store
            raise checks.refusal(
                "Barrier", "store", given, "several ranks need a store with compare_set, such as a TCPStore"
            )
        self.world_size = world_size
        self._words = words
        self._workers = Workers("weightsync-barrier", spare=1)
        self._kept: list[list[str]] | None = None

    @property
    def alone(self) -> bool:
        """Whether there is nobody to wait for: then every meeting is passed at once."""
        return self.world_size == 1

    def close(self) -> None:
        """Give the threads back."""
        self._workers.close()

    def meet(
        self,
        meeting: Meeting,
        *,
        bound: float,
        error: BaseException | str = "",
        told: Iterable[Mapping[str, Any]] = (),
        stopped: Callable[[], object] = lambda: False,
        gone: Gone = _nobody,
        heard: Callable[[Vote], object] = lambda vote: None,
    ) -> Met:
        """Vote, and wait for what is decided.

        Args:
            meeting: which barrier.
            bound: seconds to wait for the others, more than 0.
            error: why this rank's part is not done, if it is not.
            told: what else there is to say of it.
            stopped: whether this rank is to wait no longer.
            gone: asked by rank 0 about those that are missing.
            heard: told each vote, on rank 0; also those of a barrier that is not passed.

        Raises:
            BarrierAborted: a rank voted against it or gave it up, or it is over.
            BarrierTimeout: ranks are missing.
            RoundCancelled: ``stopped`` said so; every other rank gets a BarrierAborted.
            RankLost: the store did not answer.
            SetupError: the bound is no time.
        """
        checks.seconds("Barrier.meet", "bound", bound)
        if self._words is None or self.alone:
            return _alone(meeting, error)
        began = time.monotonic()
        try:
            self.vote(meeting, error, told)
            return self._wait(_Wait(meeting, began, bound, stopped, gone, heard))
        except BaseException as raised:
            if not isinstance(raised, BarrierAborted | RankLost):
                self.abort(meeting, raised)  # an interrupt, perhaps: nobody is to wait for this rank
            raise

    async def meet_async(self, meeting: Meeting, *, bound: float, **more: Any) -> Met:
        """The same for a coroutine: the event loop is never blocked, and to be cancelled is to be stopped.

        When the cancellation is raised here, the barrier is decided and no thread is left in it.
        """
        over = threading.Event()
        work = self._workers.submit(lambda: self.meet(meeting, bound=bound, stopped=over.is_set, **more))
        waits = asyncio.wrap_future(work)
        waits.add_done_callback(lambda it: it.cancelled() or it.exception())  # nobody may be there to ask
        try:
            return await asyncio.shield(waits)
        except asyncio.CancelledError:
            over.set()
            with suppress(Exception):
                await waits
            raise

    def vote(
        self, meeting: Meeting, error: BaseException | str = "", told: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Come, and wait for nobody.

        Raises:
            BarrierAborted: the barrier is over.
            RankLost: the store did not answer.
        """
        words = self._words
        if words is None or self.alone:
            return
        self._refuse_stale(meeting)
        why = error if isinstance(error, str) else line_of(error)
        words.write(Vote(words.rank, why, tuple(told)).to_json(), *_path(meeting), words.rank)
        if why:
            self._decide(meeting, against(meeting, [words.rank], why))

    def abort(self, meeting: Meeting, error: BaseException) -> Decision | None:
        """Give it up: nobody passes it, if that is not decided otherwise by now. Hands back what is."""
        if self._words is not None and not self.alone:
            with suppress(RankLost):
                return self._decide(meeting, against(meeting, [self._words.rank], line_of(error)))
        return None

    def decision(self, meeting: Meeting) -> Decision | None:
        """What was decided; None if nothing is yet."""
        words = self._words
        found = None if words is None else words.read(*_path(meeting), "decision")
        return None if found is None else Decision.from_json(found)

    def votes(self, meeting: Meeting) -> dict[int, Vote]:
        """What each rank that has come has said."""
        words = self._words
        found = {} if words is None else {
            rank: words.read(*_path(meeting), rank) for rank in range(self.world_size)
        }  # fmt: skip
        return {rank: Vote.from_json(told) for rank, told in found.items() if told is not None}

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait(self, wait: _Wait) -> Met:
        pause = _FIRST
        while (found := self.decision(wait.meeting)) is None:
            if wait.stopped():
                found = self._stop(wait.meeting)
                break
            over = time.monotonic() - wait.began >= wait.bound
            if (self._rank == 0 or over) and self._judge(wait, over=over):
                continue
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        if (error := found.error()) is not None:
            if self._rank == 0:  # whoever decided it may have said more
                self._count(wait)
            raise error
        first = min(wait.seen.values(), default=wait.began)
        late = {rank: at - first for rank, at in sorted(wait.seen.items())}
        votes = tuple(vote for _, vote in sorted(wait.votes.items()))
        return Met(time.monotonic() - wait.began, late, votes)

    def _count(self, wait: _Wait) -> None:
        for rank in missing(wait.votes, self.world_size):
            told = None if self._words is None else self._words.read(*_path(wait.meeting), rank)
            if told is not None:
                wait.votes[rank], wait.seen[rank] = Vote.from_json(told), time.monotonic()
                if self._rank == 0:
                    wait.heard(wait.votes[rank])

    def _judge(self, wait: _Wait, *, over: bool) -> bool:
        """Write down what follows, if anything does."""
        self._count(wait)
        found = decided(wait.meeting, wait.votes, self.world_size)
        absent = missing(wait.votes, self.world_size)
        if found is not None and found.passed and self._rank:  # to pass it is rank 0's alone
            found = without(wait.meeting, [0], f"it came, and has not counted after {wait.bound:g} s")
        if found is None and self._rank == 0:
            found = wait.gone(absent)
        if found is None and over:
            found = without(wait.meeting, absent, f"after {wait.bound:g} s")
        if found is not None:
            self._decide(wait.meeting, found)
        return found is not None

    def _stop(self, meeting: Meeting) -> Decision:
        """Give it up, unless it was passed at this very moment."""
        stop = RoundCancelled(f"{meeting} was given up on rank {self._rank}")
        found = self._decide(meeting, against(meeting, [self._rank], line_of(stop)))
        if not found.passed:
            raise stop
        return found

    def _decide(self, meeting: Meeting, found: Decision) -> Decision:
        words = self._words
        if words is None:
            return found
        return Decision.from_json(words.write_once(found.to_json(), *_path(meeting), "decision"))

    @property
    def _rank(self) -> int:
        return 0 if self._words is None else self._words.rank

    # -- old ones --------------------------------------------------------------------------------------------

    def _refuse_stale(self, meeting: Meeting) -> None:
        """Rank 0 says of which epoch the newest one is, and deletes those of the rounds before the last."""
        words = self._words
        if words is None:
            return
        run, epoch, kept = words.read(_WHERE, "newest") or ("", 0, [])
        if run == meeting.run and epoch > meeting.epoch:
            raise BarrierAborted(
                f"{meeting} is over: rank {words.rank} came when the ranks were at epoch {epoch}",
                [words.rank],
            )
        if words.rank:
            return
        _, *here = _path(meeting)
        if here in kept:
            return
        every = [*kept, here]
        # Of another run nothing is needed.
        last = list(dict.fromkeys(tuple(each[:-1]) for each in every))[-2 if run == meeting.run else -1 :]
        old = [each for each in every if tuple(each[:-1]) not in last]
        words.write([meeting.run, meeting.epoch, [each for each in every if each not in old]],
                    _WHERE, "newest")  # fmt: skip
        for each in old:
            for what in (*range(self.world_size), "decision"):
                words.drop(_WHERE, *each, what)


def _path(meeting: Meeting) -> tuple[str, ...]:
    """By whose life of the trainer, round and name: a store outlives each of them."""
    named = (meeting.round, meeting.name)
    parts = (meeting.run, *named) if meeting.run else named
    return _WHERE, *(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def _alone(meeting: Meeting, error: BaseException | str) -> Met:
    if error:
        why = error if isinstance(error, str) else line_of(error)
        raise BarrierAborted(against(meeting, [0], why).why, [0])
    return Met()
