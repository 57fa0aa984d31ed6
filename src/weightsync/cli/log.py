"""``weightsync log``: the rounds of a state log as a table, or one of them as a time line."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .terminal import paint, show, whole, width

if TYPE_CHECKING:
    from ..logfile import LogFile, RoundLog
    from .terminal import Commands

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Describe it."""
    parser = commands.add_parser(
        "log",
        help="show the rounds of a state log",
        description="Show the rounds of a state log as a table, or one of them as a time line. Lines that "
        "cannot be read are left out and named. Exit status 1 if nothing can be read.",
        epilog="epoch: the number of the lock's grant. It only grows, over restarts too; without a file that "
        "keeps it, it counts on from the milliseconds since 2026.",
    )
    parser.add_argument("file", metavar="FILE", help="a state log (JSON lines)")
    parser.add_argument(
        "--round", metavar="ID", help="the time line of one round; the beginning of its id is enough"
    )
    parser.add_argument("--failed", action="store_true", help="only rounds that failed or came to no end")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--width", type=whole(20), metavar="N", help="characters in a line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    from ..logfile import read

    log = read(arguments.file)
    if arguments.round is not None:
        _one(log.find(arguments.round), arguments)
    else:
        _all(log, arguments)
    return 0


def _one(round: RoundLog, arguments: argparse.Namespace) -> None:
    from ..logrows import row_of
    from ..timeline import timeline_lines

    if arguments.json:
        _dump({"round": row_of(round).to_json(), "records": round.plain()})
    else:
        show(timeline_lines(round, arguments.width or width(), paint()))


def _all(log: LogFile, arguments: argparse.Namespace) -> None:
    from .. import logview
    from ..logrows import row_of, totals

    rows = [row_of(round) for round in log.rounds]
    if arguments.failed:
        rows = [row for row in rows if not row.ok]
    found = totals(rows)
    if arguments.json:
        _dump(
            {
                "rounds": [row.to_json() for row in rows],
                "totals": found.to_json(),
                "lines": log.lines,
                "bad": log.bad,
                "bad_lines": [{"line": bad.number, "what": bad.what} for bad in log.bad_lines],
            }
        )
        return
    room = arguments.width or width()
    show(logview.table_lines(rows, room, paint()) if rows else [])
    show([*([""] if rows else []), logview.summary_line(found)])
    show(logview.oddity_lines(rows, room))
    show(logview.bad_line_lines(log, room))


def _dump(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))
