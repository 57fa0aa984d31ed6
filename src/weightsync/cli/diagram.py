"""``weightsync diagram``: the tables as pictures, with the path of a round on them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import complain, show

if TYPE_CHECKING:
    from ..diagrams import Trace
    from ..fsm.rows import Table
    from .terminal import Commands

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Describe it."""
    parser = commands.add_parser(
        "diagram",
        help="draw the state machines, and the paths that rounds took",
        description="Draw a state machine from the very table that runs, to standard output or a file.",
    )
    parser.add_argument("--table", choices=("round", "engine"), default="round", help="which machine (round)")
    parser.add_argument("--format", metavar="NAME", help="mermaid (default), dot, svg, markdown or png")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a file; its ending says the format")
    parser.add_argument("--trace", metavar="FILE", help="a state log: lay the path of its last round over it")
    parser.add_argument("--round", metavar="ID", help="with --trace: the path of this round instead")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write all files that are kept in the repository"
    )
    kept.add_argument(
        "--check",
        type=Path,
        nargs="?",
        const=_beside(),
        metavar="FOLDER",
        help="exit status 1 if those files are not what the tables say (by default the library's own)",
    )
    parser.set_defaults(run=run)


def _beside() -> Path:
    """The folder that the library's own files are in."""
    return Path(__file__).resolve().parent.parent / "diagrams"


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    if arguments.write is not None:
        from ..diagrams import write_all

        arguments.write.mkdir(parents=True, exist_ok=True)
        show(f"wrote {path}" for path in write_all(arguments.write))
        return 0
    if arguments.check is not None:
        return _check(arguments.check)
    if arguments.round is not None and arguments.trace is None:
        complain("--round needs the log it is in: --trace FILE")
        return 2
    return _draw(arguments)


def _check(folder: Path) -> int:
    from ..diagrams import checked_in

    stale = [name for name, text in checked_in().items() if _text(folder / name) != text.encode()]
    show(f"{folder / name} is not what the tables say" for name in stale)
    if stale:
        show([f"write them anew: weightsync diagram --write {folder}"])
    return 1 if stale else 0


def _text(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _draw(arguments: argparse.Namespace) -> int:
    from ..diagrams import render, write

    table = _table(arguments.table)
    trace = None if arguments.trace is None else _trace(table, arguments.trace, arguments.round)
    if arguments.output is not None:
        write(arguments.output, table, arguments.format, trace)
        return 0
    wanted = arguments.format or "mermaid"
    if wanted == "png" and sys.stdout is not None and sys.stdout.isatty():
        complain("a PNG is not for a terminal: --output FILE, or into a pipe")
        return 2
    picture = render(table, wanted, trace)
    if isinstance(picture, str):
        print(picture, end="" if picture.endswith("\n") else "\n")
    elif sys.stdout is not None:
        sys.stdout.buffer.write(picture)
    return 0


def _table(name: str) -> Table[Any, Any]:
    from ..fsm.engine_table import ENGINE
    from ..fsm.table import ROUND

    return ENGINE if name == "engine" else ROUND


def _trace(table: Table[Any, Any], path: str, which: str | None) -> Trace:
    from ..diagrams import read_trace
    from ..logfile import read

    log = read(path)
    chosen = log.rounds[-1] if which is None else log.find(which)
    return read_trace(table, chosen.plain(), chosen.id)
