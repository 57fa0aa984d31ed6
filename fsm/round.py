"""A round at run time: one immutable snapshot, changed by one assignment, and its journal.

``fire`` asks two readings of the table, ``transitions`` and the reducer, has them agree, writes the record
and commits all of it at once. The journal is part of the snapshot: an interrupt can delay a line of the log,
it can neither lose one nor write one for a transition that did not happen.

A round cannot be assigned to, subclassed, pickled or made without :meth:`Round.open`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NoReturn, final

from . import events as e
from ._machine import Decider
from .commit import CommitGuard
from .errors import TableError
from .facts import Facts
from .journal import changes, opening_facts, payload
from .orders import Order
from .record import Record
from .reducer import Position, Step, begin, step
from .setting import Setting
from .states import State
from .table import ROUND

__all__ = ["Identity", "Round"]

_DECIDER = Decider(ROUND)
_TOKEN: Final = object()


@dataclass(frozen=True, slots=True)
class Identity:
    """What every record of a round repeats: which step asked for it, which try it is, and whose it is."""

    step: int = 0
    attempt: int = 1
    owner: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The journal, newest first: appending shares everything that was there."""

    record: Record
    earlier: _Entry | None


@dataclass(frozen=True, slots=True)
class _Snapshot:
    position: Position
    since: float
    journal: _Entry


@final
class Round:
    """One attempt to bring all participants to one version. Thread-safe."""

    __slots__ = ("_guard", "_identity", "_snapshot", "orders")

    orders: tuple[Order, ...]
    """The first orders; later ones come with each step."""

    def __init__(
        self, token: object, facts: Facts, identity: Identity, *, setting: Setting, at: float, wall: float
    ) -> None:
        if token is not _TOKEN:
            raise TypeError("a round is made by Round.open")
        position, self.orders = begin(facts)
        self._guard = CommitGuard()
        self._identity = identity
        first = self._record(
            facts,
            "opened",
            seq=0,
            time=wall,
            source=None,
            target=position.state.name,
            facts={**opening_facts(facts), **setting.to_json()},
        )
        self._snapshot = _Snapshot(position, at, _Entry(first, None))

    def __init_subclass__(cls, **kwargs: Any) -> NoReturn:
        raise TypeError("a round cannot be subclassed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a round stays in its process; its records and events travel")

    @classmethod
    def open(
        cls, facts: Facts, identity: Identity, *, at: float, wall: float, setting: Setting | None = None
    ) -> Round:
        """A round in Idle.

        Args:
            facts: from :func:`~.facts.opening`.
            identity: repeated in every record.
            at: the clock's time now, seconds.
            wall: seconds since 1970 now.
            setting: told in the first record, for those who hold rounds against each other.
        """
        return cls(_TOKEN, facts, identity, setting=setting or Setting(), at=at, wall=wall)

    @property
    def state(self) -> State:
        """Where the round is."""
        return self._snapshot.position.state

    @property
    def facts(self) -> Facts:
        """What the round knows."""
        return self._snapshot.position.facts

    @property
    def since(self) -> float:
        """When the round entered its state, by the clock given to ``fire``."""
        return self._snapshot.since

    def fire(self, event: e.Event, *, at: float, wall: float) -> Step:
        """Take ``event`` in; the step holds the orders it gives.

        Raises:
            IllegalEvent: the table does not allow it here.
            GuardFailed: a guard raised.
            Reentrant: fired from inside a commit of this round.
            Nothing changed in any of these cases.
        """
        with self._guard():
            before = self._snapshot
            taken = step(before.position, event)
            decided = _DECIDER.decide(before.position.state, before.position.facts, event)
            if decided is not taken.after.state:
                raise TableError(f"machine and reducer disagree on {taken.row}: {decided}")
            record = self._transition(before, taken, event, at, wall)
            since = at if taken.row.target is not None else before.since
            self._snapshot = _Snapshot(taken.after, since, _Entry(record, before.journal))  # the commit
        return taken

    def note(self, event: str, *, wall: float, **values: Any) -> None:
        """Add a named sub-record to the journal. It changes nothing else."""
        with self._guard():
            before = self._snapshot
            record = self._record(
                before.position.facts, event, seq=before.journal.record.seq + 1, time=wall, **values
            )
            self._snapshot = _Snapshot(before.position, before.since, _Entry(record, before.journal))

    def records(self, since: int = 0) -> tuple[Record, ...]:
        """The records from number ``since`` on, oldest first."""
        found: list[Record] = []
        entry: _Entry | None = self._snapshot.journal
        while entry is not None and entry.record.seq >= since:
            found.append(entry.record)
            entry = entry.earlier
        return tuple(reversed(found))

    def _transition(self, before: _Snapshot, taken: Step, event: e.Event, at: float, wall: float) -> Record:
        facts, error = before.position.facts, getattr(event, "error", None)
        engine = getattr(event, "engine", None)
        receipts = getattr(event, "receipts", ())
        told = {**changes(facts, taken.after.facts), **payload(event, facts)}
        return self._record(
            taken.after.facts,
            "transition",
            seq=before.journal.record.seq + 1,
            time=wall,
            source=before.position.state.name,
            target=taken.after.state.name,
            trigger=type(event).__name__,
            guard=taken.row.guard.__name__ if taken.row.guard else None,
            facts=told or None,
            engine=engine.id if engine else None,
            bucket=getattr(event, "index", None),
            seconds=round(at - before.since, 6),
            bytes=sum(receipt.bytes for receipt in receipts) if receipts else None,
            culprit=engine.id if engine and error is not None else None,
            error=f"{type(error).__name__}: {error}" if error is not None else None,
        )

    def _record(self, known: Facts, event: str, /, *, seq: int, time: float, **values: Any) -> Record:
        return Record(
            time=time, event=event, table=ROUND.digest, round=known.round, seq=seq,
            step=self._identity.step, epoch=known.epoch or None, version=known.version,
            attempt=self._identity.attempt, owner=self._identity.owner or None, **values,
        )  # fmt: skip
