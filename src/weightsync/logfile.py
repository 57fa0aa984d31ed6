"""Reading a state log: its rounds, and every line that cannot be read, by number and reason.

The file may be that of a run that was killed, is still going on, or shares the file with another one. So a
line that is broken is left out and named, and the rest is read; a round that another schema or table made is
read as far as it can be, and says so. A line becomes the :class:`~.fsm.record.Record` it was written from,
with every value checked to be of its kind: whoever works with records afterwards need not ask again.

The file is read once, line by line: whole by ``read``, one record after the other by ``stream``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from .fsm.errors import LogUnreadable, WeightSyncError
from .fsm.record import KEYS, SCHEMA, Record
from .fsm.table import ROUND

__all__ = ["BadLine", "LogEmpty", "LogFile", "RoundLog", "RoundUnknown", "read", "stream"]

LONGEST = 16 * 1024 * 1024
"""A line of more bytes is no line of ours; it is not even taken into memory."""

NAMED = 1000
"""How many bad lines are named; more of them are only counted."""

_LARGEST = 2.0**63
_KEYS = frozenset(KEYS)
_NEEDED = ("time", "event", "table", "round", "seq")
_NUMBERS = frozenset({"time", "seconds"})
_INTEGERS = frozenset({"schema", "seq", "step", "epoch", "version", "attempt", "rank", "bucket", "bytes"})
# The few words that come again in every line are kept once.
_WORDS = frozenset({"event", "table", "round", "source", "target", "trigger", "guard", "engine", "owner"})


class LogEmpty(LogUnreadable):
    """There is such a file, but nothing in it can be read as a state log."""


class RoundUnknown(WeightSyncError):
    """No round of the log is called so, or more than one may be meant."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was left out. Lines are counted from 1."""

    number: int
    what: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.what}"


@dataclass(frozen=True, slots=True)
class RoundLog:
    """What a log holds of one round. ``line`` is where it begins."""

    id: str
    line: int
    records: tuple[Record, ...]

    @property
    def result(self) -> Record | None:
        """The round's last word, if it came to one."""
        return next((record for record in reversed(self.records) if record.event == "result"), None)

    @property
    def oddities(self) -> tuple[str, ...]:
        """Why this may not be the whole truth about the round; empty if it is."""
        return tuple(_oddities(self.records))

    def plain(self) -> list[dict[str, Any]]:
        """The records as plain values, as replay and pictures read them."""
        return [record.to_json() for record in self.records]


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log that was read.

    Args:
        rounds: in the order in which they begin.
        bad_lines: the lines that could not be read, the first thousand of them.
        bad: how many lines could not be read.
        lines: how many lines there are; empty ones do not count.
    """

    path: str
    rounds: tuple[RoundLog, ...]
    bad_lines: tuple[BadLine, ...]
    bad: int
    lines: int

    def find(self, name: str) -> RoundLog:
        """The round called ``name``, or the one whose id begins like that.

        Raises:
            RoundUnknown: there is none, or more than one.
        """
        found = [each for each in self.rounds if each.id == name]
        found = found or [each for each in self.rounds if each.id.startswith(name)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise RoundUnknown(f"{self.path} has no round {name!r}; it has {_some(self.rounds)}")
        raise RoundUnknown(f"{name!r} is the beginning of {len(found)} rounds: {_some(found)}")


def read(path: str | os.PathLike[str]) -> LogFile:
    """Read a state log.

    Raises:
        LogEmpty: nothing in it can be read.
        LogUnreadable: there is no such file, or it cannot be opened.
    """
    name = os.fspath(path)
    found = _collect(name, stream(name))
    if not found.lines:
        raise LogEmpty(f"{name} is empty")
    if not found.rounds:
        raise LogEmpty(
            f"{name} is no state log: none of {found.lines} lines is a record; {found.bad_lines[0]}"
        )
    return found


def stream(path: str | os.PathLike[str]) -> Iterator[tuple[int, Record | BadLine]]:
    """The lines that are not empty, each with its number, and nothing of those before.

    Raises:
        LogUnreadable: there is no such file, or it cannot be opened or read on.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:  # noqa: PTH123 - a path may be anything that can be opened
            for number, line in enumerate(_lines(file), start=1):
                if line.strip():
                    yield number, _read(number, line)
    except OSError as error:
        raise LogUnreadable(f"{name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a null byte in the name
        raise LogUnreadable(f"{name!r} cannot be read: {error}") from error


def _read(number: int, line: bytes) -> Record | BadLine:
    try:
        return _record(line)
    except (ValueError, RecursionError) as error:
        return BadLine(number, _what(line, error))


def _collect(name: str, found: Iterator[tuple[int, Record | BadLine]]) -> LogFile:
    rounds: dict[str, tuple[int, list[Record]]] = {}
    bad_lines: list[BadLine] = []
    lines = bad = 0
    for number, each in found:
        lines += 1
        if isinstance(each, Record):
            rounds.setdefault(each.round, (number, []))[1].append(each)
            continue
        bad += 1
        if bad <= NAMED:
            bad_lines.append(each)
    logs = (RoundLog(which, first, tuple(records)) for which, (first, records) in rounds.items())
    return LogFile(name, tuple(logs), tuple(bad_lines), bad, lines)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines; of one that is too long only the beginning."""
    while line := file.readline(LONGEST):
        yield line
        while len(line) == LONGEST and not line.endswith(b"\n"):
            line = file.readline(LONGEST)


# -- one line -----------------------------------------------------------------------------------------------


class _NoRecord(ValueError):
    """A line that is JSON, and still no line of ours."""


def _refuse(word: str) -> NoReturn:
    raise _NoRecord(f"{word} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _record(line: bytes) -> Record:
    """The record that a line was written from.

    Raises:
        ValueError, RecursionError: it is none.
    """
    values = _DECODER.decode(line.decode())
    if not isinstance(values, dict):
        raise _NoRecord("it is no JSON object")
    known: dict[str, Any] = {"schema": 0}  # a line without a schema is not one of this schema
    for key, value in values.items():
        if value is None or key not in _KEYS:
            continue
        kind = type(value)
        if kind is str and key in _WORDS:
            known[key] = sys.intern(value)
        elif _fits(key, kind, value):
            known[key] = value
        else:
            raise _NoRecord(f"{key} is {_short(value)}")
    missing = [key for key in _NEEDED if key not in known]
    if missing:
        raise _NoRecord(f"it has no {', '.join(missing)}")
    return Record(**known)


def _fits(key: str, kind: type, value: Any) -> bool:
    """Whether ``value`` is of the kind that ``key`` is always of, and small enough to be worked with."""
    if key in _INTEGERS:
        return kind is int and abs(value) < _LARGEST
    if key in _NUMBERS:
        return kind in (int, float) and abs(value) < _LARGEST
    return kind is (dict if key == "facts" else str)


def _what(line: bytes, error: Exception) -> str:
    """Why a line cannot be read, for the one who looks for it."""
    if len(line) == LONGEST:
        return f"longer than {LONGEST // 1024 // 1024} MiB"
    if isinstance(error, UnicodeDecodeError):
        return f"not text: byte {line[error.start]:#04x} at place {error.start + 1}"
    if isinstance(error, json.JSONDecodeError):
        if not line.endswith(b"\n"):
            return f"cut off after {len(line)} bytes, at the end of the file"
        return f"not JSON: {error.msg} at place {error.pos + 1}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"no record of schema {SCHEMA}: {error}"


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# -- one round ----------------------------------------------------------------------------------------------


def _oddities(records: tuple[Record, ...]) -> Iterator[str]:
    schemas = sorted({record.schema for record in records} - {SCHEMA})
    if schemas:
        yield f"written with schema {', '.join(map(str, schemas))}; this is schema {SCHEMA}"
    tables = sorted({record.table for record in records} - {ROUND.digest})
    if tables:
        yield f"made by the table {', '.join(tables)}; this is {ROUND.digest}"
    wanted = 0
    for record in records:
        if record.seq > wanted:
            many = record.seq - wanted
            yield (
                f"record {wanted} is missing"
                if many == 1
                else f"records {wanted} to {record.seq - 1} are missing"
            )
        elif record.seq < wanted:
            yield f"record {record.seq} comes after record {wanted - 1}"
        wanted = record.seq + 1


def _some(rounds: tuple[RoundLog, ...] | list[RoundLog]) -> str:
    """The first few ids."""
    more = f", and {len(rounds) - 5} more" if len(rounds) > 5 else ""
    return ", ".join(each.id for each in rounds[:5]) + more
