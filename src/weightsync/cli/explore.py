"""``weightsync check`` without a file, the second half: the composed system, and games drawn by lot.

What there is to explore is cut into jobs, which run in processes of their own, as many as there are cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..fsm.errors import SetupError
from .terminal import show, whole

if TYPE_CHECKING:
    from ..testing.composed import Setup
    from ..testing.exploring import Broken, Explored
    from ..testing.lots import Lot

__all__ = ["add_options", "explore_worlds", "play_seeds"]

DEEP_PARTS = 64
"""How many jobs every pair of misfortunes in one world is: each takes some minutes."""

CHUNK = 50
"""How many seeds are one job."""

J = TypeVar("J")
R = TypeVar("R")


class Job(NamedTuple):
    """A part of the exploration of one world."""

    setup: Setup
    depth: int
    part: tuple[int, int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of an exploration."""
    parser.add_argument(
        "--deep", action="store_true", help="every pair of misfortunes instead of every one: takes hours"
    )
    parser.add_argument(
        "--wide", action="store_true", help="also rounds of three engines, and of a single one: some minutes"
    )
    parser.add_argument(
        "--seeds",
        type=whole(1),
        metavar="N",
        help="instead: play N games of random schedules and misfortunes",
    )
    parser.add_argument("--seed", type=whole(0), metavar="S", help="with --seeds: the first one (0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the log of a broken promise goes")


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options of which one would be ignored.

    Raises:
        SetupError: they do not go together.
    """
    given = {
        name: getattr(arguments, name) not in (None, False)
        for name in ("deep", "wide", "seeds", "seed", "out")
    }
    named = [f"--{name}" for name, there in given.items() if there]
    if arguments.files and named:
        raise SetupError(f"FILE is linted, and {named[0]} is for an exploration: leave one of them out")
    if given["seed"] and not given["seeds"]:
        raise SetupError(f"--seed {arguments.seed} is the first of some games: say how many, with --seeds N")
    if given["seeds"] and (given["deep"] or given["wide"]):
        raise SetupError(f"--seeds plays games instead of exploring: leave {named[0]} out")


# -- the worlds ---------------------------------------------------------------------------------------------


def explore_worlds(arguments: argparse.Namespace, setups: Sequence[Setup] | None = None) -> int:
    """Explore two trainers, one lock, one ledger and two engines; how many promises broke."""
    from ..testing.composed import WIDER, WORLDS

    worlds = setups if setups is not None else (*WORLDS, *WIDER) if arguments.wide else WORLDS
    parts = DEEP_PARTS if arguments.deep else 1
    depth = 2 if arguments.deep else 1
    jobs = [Job(setup, depth, (part, parts)) for setup in worlds for part in range(parts)]
    began, counts, broken = time.monotonic(), [0, 0, 0], list[str]()
    with _pool() as run:
        for job, found in zip(jobs, run(_explored, jobs), strict=True):
            counts = [
                a + b for a, b in zip(counts, (found.states, found.transitions, found.runs), strict=True)
            ]
            show(_told(job, found))
            for promise, violation in found.violations.items():
                show([f"  {found.hits[promise]} x {line}" for line in violation.lines()[:1]])
                show(f"  {line}" for line in violation.lines()[1:])
                broken.append(promise)
                path = _write(arguments.out, f"{len(broken)}-{promise}", _trace(job.setup, violation))
                show([f"  its log: {path}"])
    states, transitions, runs = counts
    counted = f"{states} states, {transitions} transitions, {runs} misfortunes"
    show([f"in all: {counted}, {len(broken)} promises broken ({time.monotonic() - began:.1f} s)"])
    return len(broken)


def _explored(job: Job) -> Explored:
    from ..testing.exploring import explore_composed

    return explore_composed(job.setup, depth=job.depth, part=job.part)


def _told(job: Job, found: Explored) -> Iterator[str]:
    part, parts = job.part
    which = f", part {part + 1} of {parts}" if parts > 1 else ""
    yield f"two trainers, {job.setup.name}{which}: {found.lines()[0]} ({found.seconds:.1f} s)"


def _trace(setup: Setup, broken: Broken) -> Iterator[str]:
    from ..testing.exploring import rerun
    from ..testing.lots import log_lines

    return log_lines(rerun(setup, broken))


# -- the seeds ----------------------------------------------------------------------------------------------


def play_seeds(arguments: argparse.Namespace) -> int:
    """Play games drawn by lot; how many of them broke a promise."""
    first, number = arguments.seed or 0, arguments.seeds
    chunks = [range(at, min(at + CHUNK, first + number)) for at in range(first, first + number, CHUNK)]
    began, steps, broken = time.monotonic(), 0, 0
    with _pool() as run:
        for taken, lots in run(_played, chunks):
            steps += taken
            for lot in lots:
                broken += 1
                show([f"seed {lot.seed}: {what}" for what in lot.broken])
                show(f"  {line}" for line in lot.story)
                show([f"  its log: {_write(arguments.out, f'seed-{lot.seed}', lot.log)}"])
                show([f"  again: weightsync check --seeds 1 --seed {lot.seed}"])
    took = time.monotonic() - began
    show([f"{number} seeds from {first}: {steps} steps, {broken} broke a promise ({took:.1f} s)"])
    return broken


def _played(seeds: Iterable[int]) -> tuple[int, list[Lot]]:
    """How many steps a chunk of games took, and those in which a promise broke."""
    from ..testing.lots import played

    lots = [played(seed) for seed in seeds]
    return sum(lot.steps for lot in lots), [lot for lot in lots if lot.broken]


# -- both ---------------------------------------------------------------------------------------------------


@contextmanager
def _pool() -> Iterator[Callable[[Callable[[J], R], Sequence[J]], Iterable[R]]]:
    """Something like ``map`` over processes; in this one if there is only one core or one job."""
    cores = os.cpu_count() or 1
    pool: list[ProcessPoolExecutor] = []

    def run(function: Callable[[J], R], jobs: Sequence[J]) -> Iterable[R]:
        if cores == 1 or len(jobs) < 2:
            return map(function, jobs)
        # Not by fork: whoever calls may have threads.
        context = multiprocessing.get_context("spawn")
        pool.append(ProcessPoolExecutor(min(cores, len(jobs)), mp_context=context))
        return pool[0].map(function, jobs)

    try:
        yield run
    finally:
        for each in pool:
            each.shutdown(cancel_futures=True)


def _write(folder: Path | None, name: str, lines: Iterable[str]) -> Path:
    """Write a state log; without a folder, into one of its own among the temporary ones."""
    folder = Path(tempfile.mkdtemp(prefix="weightsync-check-")) if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '-')}.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
