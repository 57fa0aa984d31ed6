"""Log records: the one shape in which a round tells what happened.

A record is made inside the commit that it describes and is part of the snapshot, so that there is no
transition without its line and no line without its transition. ``KEYS`` is the only list of keys; the schema
number changes with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from .receipt import Expectation, Participant, Receipt

__all__ = ["KEYS", "NOTES", "SCHEMA", "Record", "plain"]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the state log. A key that says nothing is left out of the line.

    Args:
        time: seconds since 1970.
        event: what kind of record: ``opened``, ``transition``, or a named sub-record such as ``call``,
            ``receipt``, ``undo``, ``stale``, ``note``, ``result``.
        table: digest of the table that made it.
        seq: place in the round, from 0, without gaps.
        seconds: for a transition, how long the round had been in ``source``.
        facts: the facts that changed, and what the event carried.
    """

    time: float
    event: str
    table: str
    round: str
    seq: int
    schema: int = SCHEMA
    step: int | None = None
    epoch: int | None = None
    version: int | None = None
    attempt: int | None = None
    source: str | None = None
    target: str | None = None
    trigger: str | None = None
    guard: str | None = None
    facts: dict[str, Any] | None = field(default=None, hash=False)
    engine: str | None = None
    rank: int | None = None
    bucket: int | None = None
    seconds: float | None = None
    bytes: int | None = None
    owner: str | None = None
    culprit: str | None = None
    error: str | None = None
    undo: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as plain values in the order of ``KEYS``, without the keys that say nothing."""
        return {key: value for key in KEYS if (value := getattr(self, key)) is not None}


_ORDER = (
    "time", "event", "schema", "table", "round", "seq", "step", "epoch", "version", "attempt", "source",
    "target", "trigger", "guard", "facts", "engine", "rank", "bucket", "seconds", "bytes", "owner", "culprit",
    "error", "undo",
)  # fmt: skip
KEYS: tuple[str, ...] = _ORDER
"""Every key a line can have, in the order in which they are written."""

NOTES = frozenset({"action", "over_budget", "escalated", "barrier"})
"""The kinds of records that an executor can have written: what it did, and what that cost."""

if {f.name for f in fields(Record)} != set(KEYS):  # pragma: no cover - a slip of this file alone
    raise TypeError("KEYS and the fields of Record differ")


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it; sets come out sorted, so that lines are stable."""
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Participant):
        return {"id": value.id, "incarnation": value.incarnation, "ranks": value.ranks}
    if isinstance(value, Expectation):
        return {
            name: getattr(value, name) for name in ("fingerprint", "tensors", "bytes", "buckets", "digest")
        }
    if isinstance(value, Receipt):
        return value.to_json()
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value)]
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value)
