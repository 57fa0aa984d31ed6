"""The store that a trainer's ranks share, with a bound on whatever is asked of it.

The store is the user's: a ``TCPStore``, ``FileStore`` or ``PrefixStore`` of ``torch.distributed``, or
anything with their ``set``, ``get``, ``check``, ``delete_key``, and ``compare_set`` for the barrier. A store
can hang: its keeper may be frozen, or another rank be stopped while it has the file locked. So each word to
it runs on a thread that may get stuck, and is given up after ``silent`` seconds. Nothing here waits *in* the
store: who waits, looks again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..fsm import checks
from ..fsm.errors import RankLost, SetupError
from .workers import Workers

__all__ = ["DecidingStore", "RankStore", "Store", "check_rank", "line_of"]


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


class DecidingStore(Store, Protocol):
    """One in which the first of several ranks to write a word is the one that has written it."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write if what is there is ``expected``, or nothing if that is empty; what is there then."""


class RankStore:
    """One rank's words to the store."""

    def __init__(self, store: Store, name: str, rank: int, silent: float) -> None:
        self.rank, self.silent = rank, silent
        self._store, self._name = store, name
        self._workers = Workers("weightsync-ranks", spare=2)

    def close(self) -> None:
        """Give the threads back. The store is the user's."""
        self._workers.close()

    def _key(self, *path: object) -> str:
        return "/".join(map(str, (self._name, *path)))

    def write(self, value: Any, *path: object) -> None:
        """Write, in the place of what is there."""
        key, line = self._key(*path), json.dumps(value)  # what cannot be written is no fault of the store
        self._ask(lambda: self._store.set(key, line))

    @property
    def store(self) -> Store:
        """The user's."""
        return self._store

    def write_once(self, value: Any, *path: object) -> Any:
        """Write unless somebody has; what is there then. Of a store that has ``compare_set``."""
        store: Any = self._store
        key, line = self._key(*path), json.dumps(value)
        return json.loads(self._ask(lambda: store.compare_set(key, "", line)))

    def read(self, *path: object) -> Any:
        """What is there; None if nothing is."""
        key = self._key(*path)
        octets = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if octets is None else json.loads(octets)

    def drop(self, *path: object) -> None:
        """Forget."""
        key = self._key(*path)
        self._ask(lambda: self._store.check([key]) and self._store.delete_key(key))

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
                f"the store of the trainer's ranks failed on rank {self.rank}: {line_of(error)}; its keeper "
                f"may be dead"
            ) from error


def line_of(error: BaseException) -> str:
    """Its kind, and the first line of its text."""
    first: Iterable[str] = str(error).splitlines()
    return f"{type(error).__name__}: {next(iter(first), '')}"


def check_rank(
    where: str, store: object, rank: int, world_size: int, *, name: str, limit: float, silent: float
) -> None:
    """Whether this can be one of a trainer's ranks.

    Args:
        where: who is given these, for the error.
        store: what the ranks are to share.
        rank: which of them it is.
        world_size: how many there are.
        name: of what they share it for.
        limit: seconds for which one may come later than another.
        silent: seconds within which the store has to answer.

    Raises:
        SetupError: something of the wrong kind, or numbers that no trainer has.
    """
    if not checks.has(store, ("set", "get", "check", "delete_key")):
        raise checks.refusal(where, "store", store, "a store of torch.distributed is needed, or one like it")
    checks.whole(where, "world_size", world_size)
    checks.step_of(where, "rank", rank)
    if not rank < world_size:
        raise SetupError(f"rank {rank} of {world_size} ranks: a number from 0 to {world_size - 1} is needed")
    checks.text(where, "name", name)
    for what, seconds in (("limit", limit), ("silent", silent)):
        checks.seconds(where, what, seconds)
