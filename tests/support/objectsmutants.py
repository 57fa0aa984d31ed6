"""Faults to bring back into the object store transport: ``pytest -p objectsmutants``.

Which one is said by the environment variable ``OBJECTS_MUTANT``. Each changes the product, never a check.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from weightsync.transports import board, object_store
from weightsync.transports.object_store import BoardLink
from weightsync.transports.objects_round import ObjectsRound

__all__ = ["MUTANTS"]

Changed: Any = setattr


def freed_when_the_first_let_go() -> None:
    """A bucket is forgotten as soon as one rank has read it."""
    change = board._Round.change

    def hasty(self: Any) -> None:
        change(self)
        furthest = max((rank.done for rank in self.ranks.values()), default=0)
        self.frames = {index: refs for index, refs in self.frames.items() if index >= furthest}

    Changed(board._Round, "change", hasty)


def a_writable_view() -> None:
    """An engine is given an array that it may write."""
    fetch = object_store.fetch
    Changed(object_store, "fetch", lambda *args: fetch(*args).copy())


def objects_kept_after_a_failed_round() -> None:
    """Nobody tells the board that a round is over, or an engine out of it."""
    tell = BoardLink.tell

    def sparing(self: BoardLink, method: str, *values: Any) -> None:
        if method not in ("end", "cut"):
            tell(self, method, *values)

    Changed(BoardLink, "tell", sparing)


def a_put_for_each_engine() -> None:
    """Every engine gets an object of its own."""
    put = object_store.put

    def generous(octets: Any) -> list[Any]:
        put(octets)
        return put(octets)

    Changed(object_store, "put", generous)


def lost_engines_are_waited_for() -> None:
    """Whoever began to receive is counted on until the end."""
    tell, counting = BoardLink.tell, ObjectsRound._counting

    def trusting(self: ObjectsRound) -> Any:
        self._cut.clear()
        return counting(self)

    Changed(ObjectsRound, "_counting", trusting)
    Changed(BoardLink, "tell", lambda self, method, *values: method == "cut" or tell(self, method, *values))


MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    "freed-when-the-first-let-go": (freed_when_the_first_let_go, "board.py -k last_rank"),
    "a-writable-view": (a_writable_view, "objects_transport.py -k nothing_can_be_written"),
    "objects-kept-after-a-failed-round": (
        objects_kept_after_a_failed_round,
        "objects_transport.py -k is_killed and apply",
    ),
    "a-put-for-each-engine": (a_put_for_each_engine, "objects_transport.py -k one_put"),
    "lost-engines-are-waited-for": (lost_engines_are_waited_for, "objects_transport.py -k others_go_on"),
}
"""By name: how to break it, and the tests of which one must notice."""

if "OBJECTS_MUTANT" in os.environ:
    MUTANTS[os.environ["OBJECTS_MUTANT"]][0]()
