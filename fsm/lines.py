"""What many errors tell of ranks and of lists: who it is, and where two lists part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Parting", "named", "parting"]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two lists of lines are first not the same.

    Args:
        index: of the line.
        one: what it is in the one.
        other: and in the other.
    """

    index: int
    one: str
    other: str


def parting(one: Sequence[str], other: Sequence[str], absent: str = "nothing") -> Parting | None:
    """Where they part, with ``absent`` in the place of a line that only one of them has; None if nowhere."""
    for index in range(max(len(one), len(other))):
        here, there = (each[index] if index < len(each) else absent for each in (one, other))
        if here != there:
            return Parting(index, here, there)
    return None


def named(ranks: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 0, 2``, in their order."""
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
