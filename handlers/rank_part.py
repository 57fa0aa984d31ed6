"""What a rank above 0 does in the rounds that rank 0 leads: its own handlers, when rank 0 calls for them.

Rank 0's calls (:class:`~.rank_barrier.RankCall`) stand in the ranks' store, one in the place of the other.
Who waits for the outcome of a hand-over looks there as well. What is called for is done on a thread, so that
this rank beats meanwhile, and the vote says what came of it. Handlers are executors as on rank 0, in their
order, with the same rule: what was prepared is either cleaned up or undone, backwards, once. If there is no
call any more, because rank 0 is dead or its round was refused, the rank undoes by itself what it has
prepared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from ..fsm.contract import Weights
from ..fsm.engine_table import Session
from ..fsm.errors import RankError, WeightSyncError
from ..fsm.executors import Executor, RoundView, Undo, examined
from ..fsm.plan import Plan
from ..fsm.sampling import WHOLE, Part
from .barrier import Barrier
from .coroutines import AsyncExecutor
from .rank_barrier import CLEAN, PREPARE, UNDO, meeting_of
from .rank_store import line_of
from .ranks import TrainerRanks
from .workers import Workers

__all__ = ["RankPart"]

_LOGGER = logging.getLogger("weightsync")


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """The weights of a round on a rank that sends none. Nothing of them is kept while it runs.

    Args:
        source: the list that they were given as, if it was one.
    """

    made: Plan
    source: object

    @property
    def ready(self) -> bool:
        """They are rank 0's."""
        return False

    def materialize(self) -> None:
        """It was done before the ranks met."""

    def plan(self, bucket_bytes: int) -> Plan:
        """What was reported."""
        return self.made

    def digest(self, part: Part = WHOLE, /) -> str:
        """Nobody needs one."""
        raise WeightSyncError("the weights of a round are digested on rank 0 alone")


class RankPart:
    """The handlers of a rank above 0. One thread looks; one more does what is called for.

    Args:
        ranks: this rank.
        executors: in the order in which they prepare and clean up.
    """

    def __init__(self, ranks: TrainerRanks, executors: Sequence[Executor]) -> None:
        self._ranks, self._executors = ranks, tuple(executors)
        self._barrier = Barrier(ranks, ranks.world_size)
        self._workers = Workers("weightsync-rank-part", spare=1)
        self._undos: dict[int, Undo] = {}
        self._told: list[dict[str, Any]] = []
        self._round = ""  # the one that is worked for, or was
        self._last: tuple[int, int] | None = None
        self._doing: Future[None] | None = None

    def close(self) -> None:
        """Give the threads back."""
        self._barrier.close()
        self._workers.close()

    def look(self, number: int, step: int, plan: Plan, source: object) -> None:
        """See whether rank 0 has called, and begin with that. What is under way comes first.

        Raises:
            RankLost: the store did not answer.
        """
        said = self._ranks.look(number, "call")
        if said is None or (number, said[0]) == self._last:
            return
        if self._doing is not None and not self._doing.done():
            if said[1] == UNDO:
                self._give_up(said[2])
            return
        self._last = number, said[0]
        self._doing = self._workers.submit(self._do, said[1:], step, _Elsewhere(plan, source))

    def finish(self, limit: float) -> None:
        """The hand-over is over for this rank: undo what nobody has called for. Raises nothing."""
        self._give_up(self._round)
        if self._doing is not None and not wait([self._doing], timeout=limit).done:
            # Nothing of the next round begins before it ends, and that begins by undoing what is left.
            _LOGGER.error("rank %d: a handler still runs %g s after its round", self._ranks.rank, limit)
            return
        if (error := self._undo_all()) is not None:
            _LOGGER.error("rank %d: %s", self._ranks.rank, line_of(error), exc_info=error)

    def _give_up(self, round: str) -> None:
        """The round waits for nothing that can still be cut short: that is what coroutines can."""
        for executor in self._executors:
            if isinstance(executor, AsyncExecutor):
                executor.give_up(round)

    # -- on the thread ---------------------------------------------------------------------------------------

    def _do(self, said: list[Any], step: int, weights: Weights) -> None:
        what, round, epoch, version, attempt, bound, copied = said
        self._told, self._round = [], round
        view = RoundView(
            Session(round, epoch, version), step, attempt, weights.plan(0), weights, self._note,
            None if bound is None else tuple(bound), copied,
        )  # fmt: skip
        try:
            error = self._undo_all() if what != CLEAN else None
            if error is None:
                for index, executor in enumerate(self._executors):
                    self._one(what, index, executor, view)
        except BaseException as raised:  # noqa: BLE001 - it is this rank's vote
            error = raised
        try:
            meeting = meeting_of(self._ranks.run, round, epoch, what)
            self._barrier.vote(meeting, "" if error is None else line_of(error), self._told)
        except RankError as late:  # nobody waits for it, or nobody can be told
            _LOGGER.warning("rank %d: %s", self._ranks.rank, late)

    def _one(self, what: str, index: int, executor: Executor, view: RoundView) -> None:
        if what == PREPARE and (undo := executor.prepare(view)) is not None:
            self._undos[index] = undo
        elif what == CLEAN:
            executor.clean(view)
            self._undos.pop(index, None)

    def _undo_all(self) -> BaseException | None:
        """Backwards, each once, whatever the others do; the first error."""
        first: BaseException | None = None
        for index in sorted(self._undos, reverse=True):
            try:
                self._undos.pop(index)()
            except BaseException as error:  # noqa: BLE001 - the others are owed, too
                if first is None:
                    first = error
                else:
                    first.add_note(f"and then, in {self._executors[index].name}: {line_of(error)}")
        return first

    def _note(self, event: str, /, **values: Any) -> None:
        """Examined here as on rank 0: what cannot be told is the handler's error, not the vote's."""
        told = examined(event, **values)
        told.pop("rank", None)  # it is this one
        self._told.append({"event": event, **told})
