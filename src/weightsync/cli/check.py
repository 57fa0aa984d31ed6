"""``weightsync check``: is the table sound, and does a log tell of what the table allows?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..columns import clean
from .terminal import show

if TYPE_CHECKING:
    from ..fsm.search import Exploration
    from ..logfile import RoundLog
    from .terminal import Commands

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Describe it."""
    parser = commands.add_parser(
        "check",
        help="explore the tables, or replay a state log by them",
        description="Without FILE: try every fact in every position of small rounds and of an engine rank, "
        "and show each promise that breaks, with the shortest way there. With FILE: replay each round of a "
        "state log by the table and show where the two differ; promises that hold between rounds (such as "
        "epochs that grow) are not looked at yet. Exit status 1 if anything was found.",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a state log (JSON lines)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    return _explore() if arguments.file is None else _replay(arguments.file)


# -- the tables ---------------------------------------------------------------------------------------------


def _explore() -> int:
    broken = 0
    for name, explore in _explorations():
        began = time.monotonic()
        found = explore()
        first, *rest = found.lines()
        show([f"{name}: {first} ({time.monotonic() - began:.1f} s)", *(f"  {line}" for line in rest)])
        broken += len(found.violations)
    return 1 if broken else 0


def _explorations() -> Iterator[tuple[str, Callable[[], Exploration[Any]]]]:
    from ..fsm.explore import chaos, small_round
    from ..fsm.explore_engine import explore_engine

    for quorum, words in ((1, "one is enough"), (2, "both are needed")):
        yield f"round of 2 engines, {words}", lambda quorum=quorum: chaos(small_round(2, quorum))  # type: ignore[misc]
    for stages, words in ((True, "stages"), (False, "loads in place")):
        yield f"engine that {words}", lambda stages=stages: explore_engine(stages=stages)  # type: ignore[misc]


# -- a log --------------------------------------------------------------------------------------------------


def _replay(path: str) -> int:
    from ..logfile import read
    from ..logview import bad_line_lines

    log = read(path)
    over = differing = 0
    for round in log.rounds:
        trouble, released = _differs(round)
        over += released
        differing += trouble is not None
        if trouble is not None:
            show([f"line {round.line}: {clean(trouble)}"])
    show(bad_line_lines(log))
    rounds = len(log.rounds)
    show([f"{rounds - differing} of {rounds} rounds replay to what the log says; {rounds - over} not over"])
    return 1 if differing or log.bad else 0


def _differs(round: RoundLog) -> tuple[str | None, bool]:
    """Where the replay of ``round`` differs from what the log says; and whether the round is over."""
    from ..fsm.errors import ReplayMismatch
    from ..fsm.journal import replay
    from ..fsm.states import State

    try:
        steps = replay(round.plain())
    except ReplayMismatch as error:
        return str(error), round.result is not None
    except Exception as error:  # noqa: BLE001 - whatever stands in a log, it is the log that is to blame
        return (
            f"round {round.id} cannot be replayed: {type(error).__name__}: {error}",
            round.result is not None,
        )
    return None, bool(steps) and steps[-1].after.state is State.Released
