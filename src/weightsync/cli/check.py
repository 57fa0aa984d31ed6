"""``weightsync check``: is the table sound, and does a log tell of rounds that kept their promises?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from . import explore
from .terminal import show

if TYPE_CHECKING:
    from ..fsm.search import Exploration
    from .terminal import Commands

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Describe it."""
    parser = commands.add_parser(
        "check",
        help="explore the tables, or lint state logs",
        description="Without FILE: try every fact in every position of small rounds and of an engine rank, "
        "then every misfortune at every step of two trainers that share lock, ledger and two engines, and "
        "show each promise that breaks, with the shortest way there. With FILE: lint a state log, or several "
        "together: name each broken promise with its line, and each round that the table would not have run. "
        "Exit status 1 if anything was found.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="a state log (JSON lines); several that belong together are merged by time",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="of what is found in logs",
    )
    explore.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    explore.check_options(arguments)
    if arguments.files:
        return _lint(arguments.files, arguments.format)
    if arguments.seeds is not None:
        return 1 if explore.play_seeds(arguments) else 0
    broken = _explore(_explorations()) + (_explore(_wide_explorations()) if arguments.wide else 0)
    return 1 if explore.explore_worlds(arguments) or broken else 0


# -- the tables ---------------------------------------------------------------------------------------------


def _explore(searches: Iterable[tuple[str, Callable[[], Exploration[Any]]]]) -> int:
    broken = 0
    for name, search in searches:
        began = time.monotonic()
        found = search()
        first, *rest = found.lines()
        show([f"{name}: {first} ({time.monotonic() - began:.1f} s)", *(f"  {line}" for line in rest)])
        broken += len(found.violations)
    return broken


def _explorations() -> Iterator[tuple[str, Callable[[], Exploration[Any]]]]:
    from ..fsm.explore import chaos, small_round
    from ..fsm.explore_engine import explore_engine

    for quorum, words in ((1, "one is enough"), (2, "both are needed")):
        yield f"round of 2 engines, {words}", lambda quorum=quorum: chaos(small_round(2, quorum))  # type: ignore[misc]
    for stages, words in ((True, "stages"), (False, "loads in place")):
        yield f"engine that {words}", lambda stages=stages: explore_engine(stages=stages)  # type: ignore[misc]


def _wide_explorations() -> Iterator[tuple[str, Callable[[], Exploration[Any]]]]:
    from ..fsm.explore import chaos, small_round

    for quorum, words in ((1, "one is enough"), (2, "two are needed"), (3, "all are needed")):
        yield f"round of 3 engines, {words}", lambda quorum=quorum: chaos(small_round(3, quorum))  # type: ignore[misc]
    for quorum, words in ((1, "one is enough"), (2, "both are needed")):
        yield (
            f"round of 2 engines that catches one up, {words}",
            lambda quorum=quorum: chaos(small_round(2, quorum, tainted=1)),  # type: ignore[misc]
        )


# -- logs ---------------------------------------------------------------------------------------------------


def _lint(paths: list[str], form: str) -> int:
    from ..lintview import json_lines, text_lines
    from ..loglint import lint

    linted = lint(paths)
    show(json_lines(linted) if form == "json" else text_lines(linted))
    return 0 if linted.good else 1
