"""From a step to its record, and from records back to the steps.

``replay`` folds the reducer over the records of a round and compares what comes out with what they say. A log
is therefore enough to know where a round was at any time, and a log that was made by another table is refused
instead of being read wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from . import events as e
from .errors import IllegalEvent, ReceiptRefused, ReplayMismatch
from .facts import Facts, opening
from .receipt import Expectation, Participant, _carried
from .record import SCHEMA, plain
from .reducer import Position, Step, step
from .states import State
from .table import ROUND

__all__ = ["changes", "event_from", "follow", "opening_facts", "payload", "replay"]

_COMPARED = tuple(f.name for f in fields(Facts) if f.name not in ("round", "version", "cause"))
_values = attrgetter(*_COMPARED)


def changes(before: Facts, after: Facts) -> dict[str, Any]:
    """The facts that differ, as plain values. The cause is told by ``culprit`` and ``error`` instead."""
    if before is after:
        return {}
    both = zip(_COMPARED, _values(before), _values(after), strict=True)
    return {name: plain(new) for name, old, new in both if new is not old and new != old}


def opening_facts(facts: Facts) -> dict[str, Any]:
    """The facts a round starts from, as plain values."""
    return {name: plain(getattr(facts, name)) for name in ("roster", "quorum", "inplace", "tainted")}


def payload(event: e.Event, facts: Facts) -> dict[str, Any]:
    """What ``event`` carried beyond its engine, its bucket, its epoch and its error."""
    found: dict[str, Any] = {}
    if isinstance(event, e.EngineAcked):
        found["receipts"] = plain(event.receipts)
    if isinstance(event, e.TimedOut):
        found["phase"] = event.phase.name
    engine = getattr(event, "engine", None)
    if engine is not None and engine not in facts.roster:
        found["stranger"] = plain(engine)
    return found


def _participant(values: Mapping[str, Any]) -> Participant:
    return Participant(values["id"], values["incarnation"], values["ranks"])


def event_from(record: Mapping[str, Any], facts: Facts) -> e.Event:
    """The event a transition record tells of.

    Raises:
        ReplayMismatch: the record names no event, or leaves out what it carried.
    """
    told = record.get("facts") or {}
    makers: dict[str, Callable[[], e.Event]] = {
        "LockGranted": lambda: e.LockGranted(record["epoch"]),
        "Prepared": lambda: e.Prepared(Expectation(**told["plan"])),
        "BucketSent": lambda: e.BucketSent(record["bucket"]),
        "EngineAcked": lambda: e.EngineAcked(
            _engine(record, told, facts), tuple(_carried(values) for values in told["receipts"])
        ),
        "TimedOut": lambda: e.TimedOut(State[told["phase"]]),
    }
    name = str(record.get("trigger"))
    kind = {cls.__name__: cls for cls in e.EVENTS}.get(name)
    if kind is None:
        raise ReplayMismatch(f"record {record.get('seq')}: no event is called {name}")
    try:
        if name in makers:
            return makers[name]()
        return kind(_engine(record, told, facts)) if "engine" in kind.__slots__ else kind()  # type: ignore[call-arg, arg-type]
    except (KeyError, TypeError, ReceiptRefused) as error:
        raise ReplayMismatch(f"record {record.get('seq')}: {name} is incomplete: {error}") from error


def _engine(record: Mapping[str, Any], told: Mapping[str, Any], facts: Facts) -> Participant:
    if "stranger" in told:
        return _participant(told["stranger"])
    return {member.id: member for member in facts.roster}[record["engine"]]


def replay(records: Iterable[Mapping[str, Any]]) -> list[Step]:
    """Fold the reducer over the records of *one* round; records of other kinds are passed over.

    Args:
        records: plain dicts as in the log, in order, starting with the round's ``opened`` record.

    Returns:
        The steps, one a transition record; the last one's ``after`` is where the round is.

    Raises:
        ReplayMismatch: another schema or table, a gap, an event the table refuses, or a state, guard or fact
            that differs from what comes out.
    """
    steps: list[Step] = []
    position: Position | None = None
    for expected, record in enumerate(records):
        followed = follow(position, record, expected)
        position = followed.after if isinstance(followed, Step) else followed
        if isinstance(followed, Step):
            steps.append(followed)
    return steps


def follow(position: Position | None, record: Mapping[str, Any], expected: int) -> Step | Position:
    """Fold the reducer over the next record of a round.

    Args:
        position: where the round was before; None for its first record.
        record: as plain values.
        expected: the number it must have.

    Returns:
        The step of a transition; after any other record, where the round is.

    Raises:
        ReplayMismatch: as for ``replay``.
    """
    where = f"round {record.get('round')}, record {record.get('seq')}"
    _same_story(record, expected, position.facts if position else None, where)
    if position is None:
        return Position(ROUND.start, _opened(record, where))
    return _replayed(position, record, where) if record.get("event") == "transition" else position


def _same_story(record: Mapping[str, Any], expected: int, facts: Facts | None, where: str) -> None:
    """Refuse a record that cannot be the next one of this round."""
    if record.get("schema") != SCHEMA or record.get("table") != ROUND.digest:
        raise ReplayMismatch(
            f"{where}: made by schema {record.get('schema')} and table {record.get('table')}; "
            f"this is schema {SCHEMA} and table {ROUND.digest}"
        )
    if record.get("seq") != expected:
        raise ReplayMismatch(f"{where}: expected record {expected}")
    if (record.get("event") == "opened") is not (facts is None):
        raise ReplayMismatch(f"{where}: a round is opened by its first record, and by no other")
    if facts is not None and (record.get("round"), record.get("version")) != (facts.round, facts.version):
        raise ReplayMismatch(f"{where}: it follows records of round {facts.round}, version {facts.version}")


def _opened(record: Mapping[str, Any], where: str) -> Facts:
    try:
        told = record["facts"]
        return opening(
            round=record["round"],
            version=record["version"],
            roster=map(_participant, told["roster"]),
            quorum=told["quorum"],
            inplace=map(_participant, told["inplace"]),
            tainted=map(_participant, told["tainted"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayMismatch(f"{where}: the opening is incomplete: {error!r}") from error


def _replayed(position: Position, record: Mapping[str, Any], where: str) -> Step:
    event = event_from(record, position.facts)
    try:
        taken = step(position, event)
    except IllegalEvent as error:
        raise ReplayMismatch(f"{where}: {error}") from error
    guard = taken.row.guard.__name__ if taken.row.guard else None
    told = {**changes(position.facts, taken.after.facts), **payload(event, position.facts)}
    for key, found in (
        ("epoch", taken.after.facts.epoch or None),
        ("source", position.state.name),
        ("target", taken.after.state.name),
        ("guard", guard),
        ("facts", told or None),
    ):
        if record.get(key) != found:
            raise ReplayMismatch(f"{where}: {key} is {record.get(key)}, replay gives {found}")
    return taken
