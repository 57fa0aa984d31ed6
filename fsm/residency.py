"""Who is in memory, and in which order they change places: moves, as values, and what a list of them needs.

Trainer and engine that share a device take turns with it. Each has *parts*: the trainer's optimizer, its
parameters, an engine's weights, its cache. A **move** brings a part into memory or lets it go. The order of
moves is what keeps the sum within what there is: the trainer goes before the engine's weights come, and the
cache comes last.

``overflow`` reads lists of moves before one of them is made. It follows the good way and every way on which
the round fails after some of the moves, with what is put back then, and names the first step that would need
more than there is. Nothing here has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import checks

__all__ = ["PART", "Course", "Move", "Part", "inverse", "offload", "onload", "overflow"]

PART = ("nbytes", "resident", "onload", "offload")
"""What a part can be asked, beside its name."""


class Part(Protocol):
    """Something that is in memory, or not."""

    @property
    def name(self) -> str:
        """For the log and for errors; one name for each part."""

    def nbytes(self) -> int:
        """How much memory it takes when it is there."""

    def resident(self) -> bool:
        """Whether it is there now."""

    def onload(self) -> None:
        """Bring it into memory. Harmless if it is there. If it raises, it is not there, or is asked again."""

    def offload(self) -> None:
        """Let its memory go, so that somebody else can have it. Harmless if it has gone."""


@dataclass(frozen=True, slots=True)
class Move:
    """A part comes or goes. Make it by ``onload`` or ``offload``.

    Args:
        part: which.
        resident: whether it is in memory afterwards.
    """

    part: Part
    resident: bool

    def __post_init__(self) -> None:
        if not checks.has(self.part, PART) or not isinstance(getattr(self.part, "name", None), str):
            raise checks.refusal(
                "Move", "part", self.part, "a part is needed, such as HostCopy('optimizer', ...)"
            )
        checks.flag("Move", "resident", self.resident)

    def needed(self) -> bool:
        """Whether it would change anything now."""
        return self.part.resident() is not self.resident

    @property
    def word(self) -> str:
        """For the log."""
        return "onload" if self.resident else "offload"

    def __str__(self) -> str:
        return f"{self.word} {self.part.name}"


def onload(part: Part) -> Move:
    """Bring ``part`` into memory."""
    return Move(part, resident=True)


def offload(part: Part) -> Move:
    """Let its memory go."""
    return Move(part, resident=False)


def inverse(moves: Iterable[Move]) -> tuple[Move, ...]:
    """What takes these moves back, in order."""
    return tuple(Move(each.part, not each.resident) for each in reversed(tuple(moves)))


@dataclass(frozen=True, slots=True)
class Course:
    """The moves of a round.

    Args:
        before: before the engines are paused, in order; taken back in reverse when the round fails.
        release: let go of at the end of the round, on the good way and when it fails.
        after: on the good way, after the release.
        failed: when the round fails, after the release, instead of taking ``before`` back. None: take it
        back.
    """

    before: tuple[Move, ...] = ()
    release: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()
    failed: tuple[Move, ...] | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everybody who is moved, each once."""
        found: dict[str, Part] = {}
        for move in (*self.before, *self.release, *self.after, *(self.failed or ())):
            found.setdefault(move.part.name, move.part)
        return tuple(found.values())

    def owed(self, done: Sequence[Move]) -> tuple[Move, ...]:
        """What is to be done when the round fails after the moves ``done``, in order."""
        if self.failed is not None:
            return (*self.release, *self.failed)
        gone = {move.part.name for move in self.release}
        return (*self.release, *(each for each in inverse(done) if each.part.name not in gone))

    def ways(self, there: Mapping[str, bool]) -> Iterator[tuple[Move, ...]]:
        """Every way through the round: the good one, and one for each place where it can fail.

        Args:
            there: who is in memory at the beginning, by name.
        """
        whole = _changing((*self.before, *self.release, *self.after), there)
        yield whole
        for number in range(len(whole) + 1):
            yield (*whole[:number], *self.owed(whole[:number]))


def _changing(moves: Iterable[Move], there: Mapping[str, bool]) -> tuple[Move, ...]:
    """Those of them that change something."""
    now, found = dict(there), []
    for move in moves:
        if now.get(move.part.name) is not move.resident:
            found.append(move)
        now[move.part.name] = move.resident
    return tuple(found)


def overflow(
    course: Course, sizes: Mapping[str, int], there: Mapping[str, bool], capacity: int
) -> tuple[Move, int] | None:
    """The first move that would need more than ``capacity``, and how much; None if there is none.

    Args:
        course: the moves.
        sizes: how much each part takes, by name.
        there: who is in memory at the beginning.
        capacity: how much there is.
    """
    for way in course.ways(there):
        now = dict(there)
        for move in way:
            now[move.part.name] = move.resident
            used = sum(sizes[name] for name, resident in now.items() if resident)
            if move.resident and used > capacity:
                return move, used
    return None
