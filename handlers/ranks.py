"""The store that a trainer's ranks share, with a bound on whatever is asked of it.

The store is the user's: a ``TCPStore``, ``FileStore`` or ``PrefixStore`` of ``torch.distributed``, or
anything with their ``set``, ``get``, ``check`` and ``delete_key``. A store can hang: its keeper may be
frozen, or another rank be stopped while it has the file locked. So each word to it runs on a thread that may
get stuck, and is given up after ``silent`` seconds. Nothing here waits *in* the store: who waits, looks
again.

Keys are ``NAME/NUMBER/WHAT/RANK``, by the number of the hand-over, so that nothing of one hand-over can be
taken for another's. Old ones are deleted as the numbers go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..fsm import checks
from ..fsm.errors import RankLost, SetupError
from ..fsm.plan import Plan
from ..fsm.ranks import Report, layout
from .workers import Workers

__all__ = ["Store", "TrainerRanks"]

_WHERE = "TrainerRanks"
_GLANCE = 0.01  # seconds between two looks
_KEPT = 8  # hand-overs whose words are kept, for a rank that is late


class Store(Protocol):
    """What is needed of a store of ``torch.distributed``. Every call may block, and may raise."""

    def set(self, key: str, value: str, /) -> object:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read what is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these are there; does not wait."""

    def delete_key(self, key: str, /) -> bool:
        """Forget."""


class TrainerRanks:
    """This process as a rank of its trainer.

    Args:
        store: shared by all ranks.
        rank: which of them this is; 0 leads.
        world_size: how many there are.
        name: of this trainer, where one store serves several, or several runs.
        limit: seconds for which a rank may be late for a hand-over, or busy with its part of it.
        silent: seconds without a sign of life after which a rank is lost, in the middle of a hand-over; and
            seconds within which the store has to answer.

    Raises:
        SetupError: something of the wrong kind, or numbers that no trainer has.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "weightsync",
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
        self.rank, self.world_size, self.limit, self.silent = rank, world_size, limit, silent
        self._store, self._name = store, name
        self._number = self._beats = 0
        self._workers = Workers("weightsync-ranks", spare=2)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    @property
    def number(self) -> int:
        """Of the last hand-over that this rank has come to."""
        return self._number

    @property
    def interval(self) -> float:
        """Seconds between two beats."""
        return self.silent / 4

    # -- a rank's part ---------------------------------------------------------------------------------------

    def arrive(self, step: int, kind: str, part: Callable[[], Plan]) -> int:
        """Do this rank's part, and report it; hands back the number of the hand-over.

        The part runs on a thread, and for ``limit`` seconds at most: it may be a collective that never ends.

        Raises:
            RankLost: it took longer, or the store did not answer.
            RanksDisagree: somebody else reported as this rank.
        """
        self._number += 1
        number = self._number
        try:
            plan = self._workers.submit(part).result(timeout=self.limit)
        except TimeoutError:
            late = RankLost(
                f"rank {self.rank} of the trainer: its part of step {step} took longer than {self.limit:g} s"
            )
            self._report(Report(self.rank, self.world_size, number, step, kind, error=_line(late)))
            raise late from None
        except BaseException as error:
            self._report(Report(self.rank, self.world_size, number, step, kind, error=_line(error)))
            raise
        self._layout(plan)
        report = Report(self.rank, self.world_size, number, step, kind, plan.fingerprint)
        self._report(report)
        return number

    def refuse(self, step: int, kind: str, error: BaseException) -> int:
        """Instead of a part: this rank could not even begin."""
        self._number += 1
        self._report(Report(self.rank, self.world_size, self._number, step, kind, error=_line(error)))
        return self._number

    def _report(self, report: Report) -> None:
        key = self._key(report.number, "report", self.rank)
        if self._ask(lambda: self._store.check([key])):
            raise SetupError(
                f"somebody has reported as rank {self.rank} already: give each rank a number of its own, and "
                f"each run a TrainerRanks(name=...) of its own in a store that outlives it"
            )
        self._write(key, report.to_json())

    def _layout(self, plan: Plan) -> None:
        """Once for each layout; read only if plans differ."""
        key = f"{self._name}/layout/{plan.fingerprint}"
        if not self._ask(lambda: self._store.check([key])):
            self._write(key, layout(plan))

    # -- words -----------------------------------------------------------------------------------------------

    def post(self, number: int, what: str, value: Any) -> None:
        """Say something about a hand-over, as this rank."""
        self._write(self._key(number, what, self.rank), value)

    def look(self, number: int, what: str, rank: int) -> Any:
        """What that rank said; None if it has not."""
        return self._read(self._key(number, what, rank))

    def layout_of(self, fingerprint: str) -> list[str]:
        """The tensors of a plan that somebody reported."""
        found: list[str] = self._read(f"{self._name}/layout/{fingerprint}") or []
        return found

    def beat(self, number: int, where: object = None) -> None:
        """A sign of life, with where it is."""
        self._beats += 1
        self.post(number, "beat", [self._beats, where])

    def pause(self) -> None:
        """Between two looks."""
        time.sleep(_GLANCE)

    def forget(self, number: int) -> None:
        """Delete what was said of a hand-over that is long over. For rank 0."""
        old = number - _KEPT
        if old < 1:
            return
        keys = [
            self._key(old, what, rank)
            for what in ("report", "beat", "fail")
            for rank in range(self.world_size)
        ]
        for key in [*keys, self._key(old, "verdict", 0), self._key(old, "outcome", 0)]:
            self._ask(lambda key=key: self._store.check([key]) and self._store.delete_key(key))  # type: ignore[misc]

    def end(self) -> None:
        """Say that this rank takes part in nothing any more."""
        self._write(f"{self._name}/ended/{self.rank}", True)  # noqa: FBT003 - any value will do

    def ended(self, rank: int) -> bool:
        """Whether that rank said so."""
        return self._read(f"{self._name}/ended/{rank}") is not None

    def close(self) -> None:
        """Give the threads back. The store is the user's."""
        self._workers.close()

    # -- the store -------------------------------------------------------------------------------------------

    def _key(self, number: int, what: str, rank: int) -> str:
        return f"{self._name}/{number}/{what}/{rank}"

    def _write(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(key, json.dumps(value)))

    def _read(self, key: str) -> Any:
        octets = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if octets is None else json.loads(octets)

    def _ask(self, word: Callable[[], Any]) -> Any:
        try:
            return self._workers.submit(word).result(timeout=self.silent)
        except TimeoutError:
            raise RankLost(
                f"the store of the trainer's ranks did not answer rank {self.rank} within {self.silent:g} s: "
                f"its keeper is dead or frozen"
            ) from None
        except Exception as error:
            raise RankLost(
                f"the store of the trainer's ranks failed on rank {self.rank}: {_line(error)}; its keeper "
                f"may be dead"
            ) from error


def _line(error: BaseException) -> str:
    first: Iterable[str] = str(error).splitlines()
    return f"{type(error).__name__}: {next(iter(first), '')}"
