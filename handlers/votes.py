"""A vote of all ranks: either every one of them may go on, or each is told why not.

Before anything is written, and once more when it is, each rank says whether it could. Rank 0 *calls* a vote,
the others answer a call that is not judged yet, and a good verdict names the answers it counted. So no word
of an older vote, of an older run in the same store, or of a rank that has given up is taken for an answer:
who finds a call that is judged is too late for it. Each call names the one before: if the one after the last
that a rank took part in has failed without it, that is what it came to. Otherwise it waits for a newer one.

Nobody waits in the store, and each wait is bounded by ``limit``. A rank that gives up says so, so that the
others need not wait for it as long.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from ..fsm import checks
from ..fsm.errors import RankFailed, RankLost, RanksDisagree, SetupError, WeightSyncError
from ..fsm.ranks import error_from, error_told
from .rank_store import RankStore, Store, line_of

__all__ = ["Alone", "RankVotes", "Votes"]

_WHERE = "RankVotes"
_GLANCE = 0.005  # seconds between two looks
_KEPT = 8  # verdicts, for a rank that is late


class Votes(Protocol):
    """How the ranks of a trainer come to one mind."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def vote(self, what: str, error: BaseException | None) -> None:
        """Come to the vote on ``what``, with the error that keeps this rank from it, if there is one.

        Returns only if every rank came without. Otherwise each rank raises: one that failed its own error,
        the very object, and the others the first one's, by its kind and text.
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
        if not checks.has(store, ("set", "get", "check", "delete_key")):
            raise checks.refusal(
                _WHERE, "store", store, "a store of torch.distributed is needed, or one like it"
            )
        checks.whole(_WHERE, "world_size", world_size)
        checks.step_of(_WHERE, "rank", rank)
        if not rank < world_size:
            raise SetupError(
                f"rank {rank} of {world_size} ranks: a number from 0 to {world_size - 1} is needed"
            )
        checks.text(_WHERE, "name", name)
        for what, seconds in (("limit", limit), ("silent", silent)):
            checks.seconds(_WHERE, what, seconds)
        super().__init__(store, name, rank, silent)
        self.world_size, self.limit = world_size, limit
        self._me = uuid.uuid4().hex[:12]
        self._count = 0
        self._judged: list[str] = []
        self._met: dict[int, str] = {}  # the answers of the last good vote, for rank 0
        self._before = ""  # the call before that, for rank 0
        self._last = ""  # the last call: made, or taken part in and not given up

    def vote(self, what: str, error: BaseException | None) -> None:
        """Come to the vote on ``what``. See :class:`Votes`.

        Raises:
            RankLost: a rank did not come in time, or the store does not answer.
            RankFailed: a rank has given up, or failed with an error that is none of ours.
            RanksDisagree: a rank has come to another vote.
            WeightSyncError: any other, as a rank said it.
        """
        self._count += 1
        mine = f"{self._me}.{self._count}"
        try:
            failed = self._call(mine, what, error) if self.rank == 0 else self._answer(mine, what, error)
        except BaseException as lost:
            if error is None:
                raise
            error.add_note(f"and the vote on it: {line_of(lost)}")
            raise error from None
        if not failed:
            return
        if error is not None:
            raise error
        raise _told(failed)

    # -- rank 0 ----------------------------------------------------------------------------------------------

    def _call(self, call: str, what: str, error: BaseException | None) -> Mapping[str, Any]:
        """Call a vote and wait for the answers; hands back who failed, and of what."""
        answers: dict[int, list[Any]] = {0: [call, call, what, None if error is None else error_told(error)]}
        self._before, self._last = self._last, call
        self.write([call, what, self._before], "call")
        try:
            self._collect(call, what, answers)
            failed = {rank: told[3] for rank, told in answers.items() if told[3] is not None}
            for rank, told in answers.items():
                if told[2] != what:
                    text = f"rank {rank} of the trainer is at {told[2]!r}, and rank 0 at {what!r}"
                    failed = {0: error_told(RanksDisagree(text))}
        except BaseException as lost:
            with suppress(RankLost):
                self._judge(call, answers, {0: error_told(lost)})
            raise
        self._met = {} if failed else {rank: told[1] for rank, told in answers.items()}
        self._judge(call, answers, failed)
        return {str(rank): told for rank, told in failed.items()}

    def _judge(self, call: str, answers: Mapping[int, list[Any]], failed: Mapping[int, Any]) -> None:
        self.write([[told[1] for told in answers.values()], failed, self._before], "verdict", call)
        self._judged.append(call)
        if len(self._judged) > _KEPT:
            self.drop("verdict", self._judged.pop(0))

    def _collect(self, call: str, what: str, answers: dict[int, list[Any]]) -> None:
        end = time.monotonic() + self.limit
        while True:
            missing = [rank for rank in range(self.world_size) if rank not in answers]
            for rank in missing:
                told = self.read("answer", rank)
                if told is not None and told[0] == call:
                    answers[rank] = told
                    continue
                gone = self.read("gone", rank)
                if gone is not None and gone[0] == self._met.get(rank):
                    raise RankFailed(f"rank {rank} of the trainer has given up before {what!r}: {gone[1]}")
            missing = [rank for rank in missing if rank not in answers]
            if not missing:
                return
            if time.monotonic() >= end:
                raise RankLost(
                    f"rank {missing[0]} of the trainer did not come to {what!r} within {self.limit:g} s"
                )
            time.sleep(_GLANCE)

    # -- the others ------------------------------------------------------------------------------------------

    def _answer(self, answer: str, what: str, error: BaseException | None) -> Mapping[str, Any]:
        """Answer the newest call, until a verdict counts the answer; hands back who failed, and of what."""
        told = None if error is None else error_told(error)
        try:
            return self._await_verdict(answer, what, told)
        except BaseException as lost:
            self._last = ""  # what fails for want of this rank is no news to it
            with suppress(RankLost):
                self.write([answer, line_of(lost)], "gone", self.rank)
            raise

    def _await_verdict(self, answer: str, what: str, told: Any) -> Mapping[str, Any]:
        end, answered = time.monotonic() + self.limit, ""
        while True:
            call = self.read("call")
            # Rank 0 may have judged this vote and called the next one: the verdict is looked at last.
            verdict = self.read("verdict", answered) if answered else None
            if verdict is not None and (verdict[1] or answer in verdict[0]):
                self._last = answered
                return dict(verdict[1])
            if call is not None and call[0] not in (answered, self._last):
                missed = self._missed(call[0], call[2])
                if missed:
                    return missed
                if self.read("verdict", call[0]) is None:
                    answered = call[0]
                    self.write([answered, answer, what, told], "answer", self.rank)
                    continue
            if time.monotonic() >= end:
                raise RankLost(f"rank 0 of the trainer gave no verdict on {what!r} within {self.limit:g} s")
            time.sleep(_GLANCE)

    def _missed(self, call: str, before: str) -> Mapping[str, Any]:
        """Who failed in the vote right after the last one that this rank took part in, if it is over."""
        for _ in range(_KEPT if self._last else 0):
            if before == self._last:
                verdict = self.read("verdict", call)
                if verdict is None or not verdict[1]:
                    break
                self._last = call
                return dict(verdict[1])
            earlier = self.read("verdict", before) if before else None
            if earlier is None:
                break
            call, before = before, earlier[2]
        return {}


def _told(failed: Mapping[str, Any]) -> WeightSyncError:
    """The first one's error, on a rank that did not fail."""
    rank = min(failed, key=int)
    kind, text = failed[rank]["kind"], failed[rank]["text"]
    where = f"rank {rank} of the trainer"
    told = error_from({"kind": kind, "text": text if text.startswith("rank") else f"{where}: {text}"})
    if type(told).__name__ != kind:
        told = RankFailed(f"{where} failed: {kind}: {text}")
    for other in sorted(failed, key=int)[1:]:
        told.add_note(f"rank {other}: {failed[other]['kind']}: {failed[other]['text']}")
    return told
