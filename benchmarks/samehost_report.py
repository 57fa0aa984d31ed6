"""From turns to figures: ratios to the unit of the same turn, medians, and what they are judged by.

No figure is a time. A ratio is taken turn by turn, and its median is what counts; how far the unit itself
wandered is told beside it, for a machine on which it wanders far measures nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .report import Figure, median
from .samehost_field import CONTESTANTS, TARGETS, Target
from .samehost_runs import Cell, Run

__all__ = ["Judged", "Row", "Verdict", "figures", "judge", "row_of", "status", "table"]

BENCH = "samehost"
UNIT = "torch copy_"


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant in one cell.

    Args:
        name: the contestant's.
        cpu: processor time of all its processes, in memcpys.
        wall: time, in those of the copy.
        unit: the slowest copy against the fastest one.
        memory: in models, beyond the bare interpreters: ``trainer`` and ``engine`` at their peaks, with all
            that they share; ``all`` after the last round, with what is shared counted once.
        n: how many turns.
    """

    name: str
    cpu: float
    wall: float
    unit: float
    memory: Mapping[str, float]
    n: int


class Verdict(Enum):
    """What became of a target."""

    REACHED = "reached"
    MISSED = "MISSED"
    OPEN = "not measured"


@dataclass(frozen=True, slots=True)
class Judged:
    """One target in one cell; ``value`` is what is compared with its limit."""

    layout: str
    engines: int
    target: Target
    value: float | None
    verdict: Verdict

    def line(self) -> str:
        """In words."""
        found = "" if self.value is None else f"{self.value:.2f}, "
        what = self.target.text(self.engines)
        return f"{self.layout}, N = {self.engines}: {what}: {found}{self.verdict.value}"


def row_of(run: Run, nbytes: int) -> Row:
    """The figures of one contestant."""
    units = [sample.unit.cpu for sample in run.samples]
    return Row(
        run.name,
        median([sample.round.cpu / sample.unit.cpu for sample in run.samples]),
        median([sample.round.wall / sample.unit.wall for sample in run.samples]),
        max(units) / min(units),
        {what: held / nbytes for what, held in run.memory.items()},
        len(run.samples),
    )


def rows_of(cell: Cell) -> dict[str, Row]:
    """The figures of a cell, by the contestants' names."""
    return {run.name: row_of(run, cell.layout.nbytes) for run in cell.runs}


def judge(cell: Cell, names: Collection[str]) -> Iterator[Judged]:
    """Every target that is asked for in this cell, of those who are called so."""
    rows = rows_of(cell)
    for target in TARGETS:
        if target.name not in names or not target.asks(cell.engines):
            continue
        value = _value(target, rows)
        limit = target.limit(cell.engines)
        if value is None:
            verdict = Verdict.OPEN
        elif value <= limit if target.most is not None else value >= limit:
            verdict = Verdict.REACHED
        else:
            verdict = Verdict.MISSED
        yield Judged(cell.layout.name, cell.engines, target, value, verdict)


def _value(target: Target, rows: Mapping[str, Row]) -> float | None:
    if target.name not in rows:
        return None
    cpu = rows[target.name].cpu
    if target.most is not None:
        return cpu
    peers = [rows[peer].cpu for peer in target.peers if peer in rows]
    return min(peers) / cpu if peers else None


def status(judged: Sequence[Judged], failed: Sequence[str]) -> int:
    """The exit status: 0 all reached, 1 one was missed or somebody failed, 2 one could not be judged."""
    verdicts = {each.verdict for each in judged}
    if failed or Verdict.MISSED in verdicts:
        return 1
    return 2 if Verdict.OPEN in verdicts else 0


def table(cells: Sequence[Cell]) -> str:
    """One table a layout, in markdown that also reads as text: CPU, wall and memory by number of engines."""
    blocks = []
    for layout in dict.fromkeys(cell.layout for cell in cells):
        mine = [(cell.engines, rows_of(cell)) for cell in cells if cell.layout == layout]
        size = f"{layout.nbytes / (1 << 20):.1f} MiB in {layout.count} tensors"
        blocks.append(f"{layout.name} ({layout.model}, {size})\n\n{_grid(mine)}")
    return "\n\n".join(blocks)


def _grid(cells: Sequence[tuple[int, Mapping[str, Row]]]) -> str:
    numbers = [f"N={engines}" for engines, _ in cells]
    last = numbers[-1]
    head = [
        "",
        *(f"CPU {each}" for each in numbers),
        *(f"wall {each}" for each in numbers),
        *(f"{what}, {last}" for what in ("trainer", "engine", "all")),
    ]
    spread = [f"{max((row.unit for row in rows.values()), default=1.0):.2f}" for _, rows in cells]
    lines = [head, [f"{UNIT}: slowest / fastest", *spread, *("" for _ in range(len(numbers) + 3))]]
    for contestant in CONTESTANTS:
        found = [rows.get(contestant.name) for _, rows in cells]
        if any(found):
            memory = found[-1].memory if found[-1] else {}
            lines.append(
                [
                    contestant.name,
                    *(f"{row.cpu:.2f}" if row else "-" for row in found),
                    *(f"{row.wall:.2f}" if row else "-" for row in found),
                    *(f"{memory[what]:.2f}" if memory else "-" for what in ("trainer", "engine", "all")),
                ]
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    text = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in (head, rule, *lines[1:])]
    return "\n".join(text)


def figures(cells: Sequence[Cell]) -> list[Figure]:
    """All of it, a figure each."""
    found = []
    for cell in cells:
        where = f"{cell.layout.name}, {cell.engines} engines"
        for row in rows_of(cell).values():
            named = f"{where}, {row.name}"
            found += [
                Figure(BENCH, f"{named}: CPU", row.cpu, "memcpys", UNIT, row.n),
                Figure(BENCH, f"{named}: wall", row.wall, "ratio", UNIT, row.n),
                *(
                    Figure(BENCH, f"{named}: memory of {what}", held, "models", "", row.n)
                    for what, held in row.memory.items()
                ),
            ]
    return found
