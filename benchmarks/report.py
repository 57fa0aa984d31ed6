"""How every benchmark prints its figures: last, one JSON object a line."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Figure", "median", "print_figures"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Args:
        bench: which benchmark.
        figure: what was measured.
        value: the figure, a median where there are several runs.
        unit: of ``value``; ``ratio`` is ours divided by the peer's.
        peer: beside what it stands; empty for none.
        n: how many runs.
    """

    bench: str
    figure: str
    value: float
    unit: str
    peer: str
    n: int


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def print_figures(figures: Sequence[Figure]) -> None:
    """Print the figures, one JSON object a line."""
    print()
    for figure in figures:
        print(json.dumps({**asdict(figure), "value": round(figure.value, 4)}))
