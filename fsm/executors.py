"""What plugs into a round beside those who move it: executors, and observers.

* **Executor** is what a trainer owes around a round (memory, barriers, retention). ``prepare`` hands back
  its undo; ``clean`` runs on the good path instead of it. What it did and what that cost it *notes*.
* **Observer** is called with every record, and can change nothing.

Like ``contract.py`` these are ``Protocol``s without defaults, and values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .contract import Weights
from .engine_table import Session
from .plan import Plan
from .record import NOTES

__all__ = ["Executor", "Note", "Observer", "RoundView", "Undo", "examined"]


class Note(Protocol):
    """Writes a line about an executor's work into the round's log. From any thread; never waits."""

    def __call__(
        self,
        event: str,
        /,
        *,
        trigger: str,
        executor: str,
        seconds: float | None = None,
        freed: int | None = None,
        rank: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """``event`` is one of ``fsm.record.NOTES``; ``facts`` are plain values.

        Raises:
            ValueError: it is none of them, or something that a log cannot hold.
        """


def examined(
    event: str,
    /,
    *,
    trigger: str,
    executor: str,
    seconds: float | None = None,
    freed: int | None = None,
    rank: int | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What is noted, as plain values: examined where it is noted, and in the same way on every rank.

    Raises:
        ValueError: as :class:`Note` says.
    """
    if event not in NOTES:
        raise ValueError(f"{executor} noted {event!r}: an executor can note {', '.join(sorted(NOTES))}")
    told = {"trigger": trigger, "executor": executor, "seconds": seconds, "freed": freed, "rank": rank}
    values: dict[str, Any] = {key: value for key, value in told.items() if value is not None}
    if facts:
        values["facts"] = {str(key): value for key, value in facts.items()}
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{executor} noted {event!r} with something that a log cannot hold ({error}): note plain "
            "numbers, strings, lists and mappings"
        ) from error
    return values


def _untold(event: str, /, **_: Any) -> None:
    """Of a round that keeps no log."""


@dataclass(frozen=True, slots=True)
class RoundView:
    """What an executor is told of the round it works for.

    Args:
        note: for the log.
        bound: the versions that engines may hold by what the ledger said under this round's lock: the
            published one, and one of a round that failed late, if there is one. In the clean-up it is this
            round's alone. The same on every rank of the trainer. None if the ledger did not say.
        copied: whether a private copy is sent, so that the trainer may go on meanwhile.
    """

    session: Session
    step: int
    attempt: int
    plan: Plan | None
    weights: Weights
    note: Note = _untold
    bound: tuple[int, ...] | None = None
    copied: bool = False


Undo = Callable[[], None]


class Executor(Protocol):
    """What a trainer owes around a round."""

    @property
    def name(self) -> str:
        """For the log and for errors."""

    def prepare(self, round: RoundView) -> Undo | None:
        """Before the engines are paused. Hands back what undoes it; called at most once."""

    def clean(self, round: RoundView) -> None:
        """After the publication, before the engines resume; the undo is dropped when this returns."""


class Observer(Protocol):
    """Called with each record after the commit. It can fire nothing; if it raises, it is disabled."""

    def __call__(self, record: Any, /) -> None:
        """Take note of ``record``, an ``fsm.record.Record``."""
