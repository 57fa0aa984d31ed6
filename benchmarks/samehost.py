"""Handing weights over on one host: ours beside torch's copy, gloo and verl, in one run.

    python -m benchmarks.samehost [--quick] [--layouts smol qwen] [--engines 1 2 4 8] [--only ring ...]

The unit is one copy of the same bytes by torch on one thread, measured right before each round. *CPU* is what
all processes of a contestant computed during a round, user and system, in such copies, which are called
memcpys; *wall* is how long the round took, in how long the copy took. All transfers have one thread of torch.
Every engine is a process of its own, and says the checksum of its weights after every round. Memory is in
models, at the largest number of engines: the peaks of the trainer and of one engine with what they share, and
all processes together after a round, with what is shared counted once.

The exit status is 0 if every target was reached that could be asked for, 1 if one was missed or a contestant
failed, and 2 if one could not be judged, because a contestant is not there. `--write FOLDER` leaves
`samehost.md` and `samehost.json` there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .report import print_figures
from .samehost_field import CONTESTANTS, chosen
from .samehost_layouts import LAYOUTS
from .samehost_report import Judged, figures, judge, status, table
from .samehost_runs import Cell, Course, run_cell

__all__ = ["machine", "main"]


def machine() -> str:
    """What all of it was measured on."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB; torch {torch.__version__}"


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.samehost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=None, help="smol and qwen by default"
    )
    parser.add_argument("--engines", nargs="+", type=int, default=None, help="how many; 1 2 4 8 by default")
    parser.add_argument("--rounds", type=int, default=None, help="counted rounds; 7 by default")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before them")
    parser.add_argument(
        "--only", nargs="+", default=[], help="contestants with one of these words in the name"
    )
    parser.add_argument("--quick", action="store_true", help="smol with 1 and 2 engines, 3 rounds")
    parser.add_argument("--write", type=Path, default=None, help="a folder for the report")
    arguments = parser.parse_args(words)
    if not chosen(arguments.only):
        parser.error(f"nobody is called so; there are: {', '.join(each.name for each in CONTESTANTS)}")
    arguments.layouts = arguments.layouts or (["smol"] if arguments.quick else ["smol", "qwen"])
    arguments.engines = arguments.engines or ([1, 2] if arguments.quick else [1, 2, 4, 8])
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 7)
    return arguments


def _report(cells: Sequence[Cell], judged: Sequence[Judged], course: Course) -> str:
    lines = [
        f"Measured on {machine()}.",
        f"Medians of {course.rounds} rounds, after {course.warm_up} that do not count.",
        "CPU in memcpys, wall in copies, memory in models.",
        "",
        table(cells),
        "",
        *(f"* {each.line()}" for each in judged),
        *(f"* skipped: {name}: {why}" for name, why in course.absent.items()),
        *(f"* left out: {each}" for each in course.small),
        *(f"* FAILED: {each}" for each in course.failed),
    ]
    return "\n".join(lines)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    arguments = _arguments(words)
    torch.set_num_threads(1)
    course = Course(chosen(arguments.only), arguments.rounds, arguments.warm_up, _tell)
    cells = []
    for layout in arguments.layouts:
        for engines in arguments.engines:
            _tell(f"{layout}, {engines} engines")
            cells.append(run_cell(course, LAYOUTS[layout], engines))
            _tell(table(cells[-1:]))  # a long run says early what it finds
    names = {each.name for each in course.contestants}
    judged = [each for cell in cells for each in judge(cell, names)]
    text, found = _report(cells, judged, course), figures(cells)
    print(text)
    print_figures(found)
    if arguments.write is not None:
        arguments.write.mkdir(parents=True, exist_ok=True)
        (arguments.write / "samehost.md").write_text(f"{text}\n")
        told = {"machine": machine(), "figures": [asdict(each) for each in found]}
        (arguments.write / "samehost.json").write_text(json.dumps(told, indent=1) + "\n")
    return status(judged, course.failed)


if __name__ == "__main__":
    sys.exit(main())
