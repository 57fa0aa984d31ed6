"""Linting files: their lines go through the linter once, in one pass, and nothing of them is kept.

Several files may be parts of one log that was rotated, or the logs of trainers that share a lock. They are
read side by side, by the times in them; within a file the order of its lines counts, whatever their times
say.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .fsm.errors import LogUnreadable
from .fsm.lint import Finding, Linter
from .fsm.record import Record
from .logfile import NAMED, BadLine, LogEmpty, stream

__all__ = ["Linted", "LintedFile", "lint"]


@dataclass(slots=True)
class LintedFile:
    """One file: how many lines it has, and which of them could not be read."""

    path: str
    lines: int = 0
    bad: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    records: int = 0


@dataclass(slots=True)
class Linted:
    """What came of it.

    Args:
        findings: the first thousand, in the order of files and lines.
        found: how many there are.
        rounds: how many rounds there are.
        flawed: in how many of them something was found.
        unfinished: how many are not over.
    """

    files: list[LintedFile]
    findings: list[Finding]
    found: int = 0
    rounds: int = 0
    flawed: int = 0
    unfinished: int = 0

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.found and not any(file.bad for file in self.files)


def lint(paths: Sequence[str | os.PathLike[str]], linter: Linter | None = None) -> Linted:
    """Lint the files together.

    Raises:
        LogEmpty: nothing in one of them can be read. One without a line is no harm beside others: its trainer
            opened no round.
        LogUnreadable: one of them is not there, cannot be opened, or is named twice.
    """
    names = [os.fspath(path) for path in paths]
    if len({_file(name) for name in names}) != len(names):
        raise LogUnreadable(f"a log is named twice: {', '.join(names)}")
    linter = linter or Linter()
    linted = Linted([LintedFile(name) for name in names], [])
    for name, number, record in _in_time(linted.files):
        _keep(linted, linter.feed(record, (name, number)))
    empty = not any(file.lines for file in linted.files)
    for file in linted.files:
        _check(file, empty=empty)
    _keep(linted, linter.end())
    linted.findings.sort(key=lambda each: (names.index(each.file), each.line))
    linted.rounds, linted.flawed, linted.unfinished = linter.rounds, linter.flawed, linter.unfinished
    return linted


def _file(name: str) -> object:
    """What is the same for two names of one file: another path, a symbolic link or a hard one."""
    try:
        found = Path(name).stat()
    except (OSError, ValueError):
        return name  # to be complained of where it is opened
    return found.st_dev, found.st_ino


def _keep(linted: Linted, findings: Iterable[Finding]) -> None:
    for finding in findings:
        linted.found += 1
        if len(linted.findings) < NAMED:
            linted.findings.append(finding)


def _check(file: LintedFile, *, empty: bool) -> None:
    if empty:
        raise LogEmpty(f"{file.path} is empty")
    if file.lines and not file.records:
        first = file.bad_lines[0]
        raise LogEmpty(f"{file.path} is no state log: none of {file.lines} lines is a record; {first}")


def _in_time(files: Sequence[LintedFile]) -> Iterator[tuple[str, int, Record]]:
    """The records of all files, by time; within a file in the order of its lines."""
    if len(files) == 1:
        yield from ((files[0].path, number, record) for number, record in _records(files[0]))
        return
    parts = (_timed(place, file) for place, file in enumerate(files))
    for _, place, number, record in heapq.merge(*parts, key=lambda each: each[:2]):
        yield files[place].path, number, record


def _timed(place: int, file: LintedFile) -> Iterator[tuple[float, int, int, Record]]:
    """With the time of each record, or the latest before it: a clock that is set back reorders nothing."""
    latest = float("-inf")
    for number, record in _records(file):
        latest = max(latest, record.time)
        yield latest, place, number, record


def _records(file: LintedFile) -> Iterator[tuple[int, Record]]:
    for number, each in stream(file.path):
        file.lines += 1
        if isinstance(each, Record):
            file.records += 1
            yield number, each
            continue
        file.bad += 1
        if file.bad <= NAMED:
            file.bad_lines.append(each)
