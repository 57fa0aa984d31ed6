"""What linting a log costs, beside reading it.

    python -m benchmarks.lint [--rounds N]

The log is that of one simulated trainer: rounds of two engines and three buckets, every tenth of which fails
over a bucket. It is written once and read twice: as records only, and by the linter. Memory is the most that
Python had allocated while a tenth of it was linted, and while all of it was.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from weightsync.fsm.calls import Act
from weightsync.fsm.record import Record
from weightsync.handlers.log import StateLog
from weightsync.logfile import stream
from weightsync.loglint import lint
from weightsync.testing.simulation import Fault, Simulation

from .report import Figure, print_figures

BENCH = "lint"


def life(rounds: int) -> Iterator[Record]:
    """The records of so many rounds, one after the other."""
    simulation = None
    for number in range(rounds):
        faults = [Fault(Act.broadcast, "raise", bucket=1)] if number % 10 == 9 else []
        simulation = Simulation(faults=faults, earlier=simulation, seed=number)
        simulation.run()
        simulation.settle()
        yield from simulation.round.records()


def written(path: Path, rounds: int) -> Path:
    """A log of so many rounds."""
    with StateLog(path) as log:
        for record in life(rounds):
            log(record)
    return path


def peak(path: Path) -> int:
    """The most memory that linting took, in bytes."""
    tracemalloc.start()
    lint([path])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10_000, help="how many rounds the log has")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "state.jsonl"), rounds)
        small = Path(folder, "small.jsonl")
        with path.open() as whole, small.open("w") as part:
            part.writelines(islice(whole, sum(1 for _ in path.open()) // 10))
        begun = time.perf_counter()
        lines = sum(1 for _ in stream(path))
        read = time.perf_counter() - begun
        begun = time.perf_counter()
        linted = lint([path])
        took = time.perf_counter() - begun
        if not linted.good:
            raise SystemExit(f"a good log was found fault with: {linted.findings[0]}")
        print_figures(
            [
                Figure(BENCH, "log of", lines, "lines", "", rounds),
                Figure(BENCH, "linted in", took, "s", "", rounds),
                Figure(BENCH, "linting against reading", took / read, "ratio", "reading", rounds),
                Figure(
                    BENCH, "memory for ten times the rounds", peak(path) / peak(small), "ratio", "", rounds
                ),
            ]
        )


if __name__ == "__main__":
    main()
