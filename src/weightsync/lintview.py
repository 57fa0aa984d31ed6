"""How findings look: one line each, and the sum last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from .columns import clean
from .loglint import Linted
from .logview import bad_line_lines

__all__ = ["json_lines", "text_lines"]


def text_lines(linted: Linted) -> list[str]:
    """For people: findings, lines that could not be read, and the sum."""
    lines = [clean(str(finding)) for finding in linted.findings]
    if linted.found > len(lines):
        lines.append(f"and {linted.found - len(lines)} more findings")
    for file in linted.files:
        if not file.lines:  # beside others
            lines.append(f"{clean(file.path)} is empty: no round was opened there")
        first, *rest = bad_line_lines(file) or [""]
        if first:
            lines += [first if len(linted.files) == 1 else f"{clean(file.path)}: {first}", *rest]
    return [*lines, _sum(linted)]


def _sum(linted: Linted) -> str:
    kept, rounds = linted.rounds - linted.flawed, linted.rounds
    return (
        f"{kept} of {rounds} rounds replay to what the log says and keep P1-P12; {linted.unfinished} not over"
    )


def json_lines(linted: Linted) -> list[str]:
    """For machines: one object a line; the last one is the sum."""
    return [json.dumps(each) for each in _objects(linted)]


def _objects(linted: Linted) -> Iterator[dict[str, object]]:
    yield from ({"kind": "finding", **asdict(finding)} for finding in linted.findings)
    for file in linted.files:
        for bad in file.bad_lines:
            yield {"kind": "bad line", "file": file.path, "line": bad.number, "what": bad.what}
    yield {
        "kind": "sum",
        "files": len(linted.files),
        "findings": linted.found,
        "bad_lines": sum(file.bad for file in linted.files),
        "rounds": linted.rounds,
        "flawed": linted.flawed,
        "unfinished": linted.unfinished,
    }
