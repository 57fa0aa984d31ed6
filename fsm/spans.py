"""Which versions a sample was generated with: one segment each, from its beginning to its end.

An engine that is given new weights pauses its generations or cuts them short, and a sample goes on in another
*segment*, perhaps on another engine. Each segment says which version was in force when it began and when it
ended. A version changes only while nobody is admitted, so the two are the same in a good life. They differ
when the engine lost its weights under the segment: then it ended with none.

How far a sample is behind is counted from what the trainer has published. That is never negative, because
every version that an engine can hold is in the trainer's ledger first: a number is bound there before any
engine commits it, and published when all have. Three cases are told apart by the ledger alone:

* the sample is as old as the published version, or older: the difference is its staleness;
* it is newer, and the number is bound: engines committed a version whose publication failed or is not known.
  Then that version is what staleness is counted from;
* it is newer than everything in the ledger: it belongs to a trainer with another ledger, and nobody can say
  how old it is. To take it for fresh would let in the oldest samples of all, so it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from . import checks
from .errors import VersionAhead, VersionUnknown
from .ledger import Ledger

__all__ = ["SampleVersions", "Segment"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a sample, generated without a break by one engine.

    Args:
        engine: the engine's id.
        incarnation: which life of it.
        began: the version when the segment was admitted; None if the engine had none.
        ended: the version when it left; None if the engine had none any more.
    """

    engine: str
    incarnation: str
    began: int | None
    ended: int | None

    def __post_init__(self) -> None:
        checks.text("Segment", "engine", self.engine)
        checks.text("Segment", "incarnation", self.incarnation)
        for name in ("began", "ended"):
            if getattr(self, name) is not None:
                checks.step_of("Segment", name, getattr(self, name))

    @property
    def whole(self) -> bool:
        """Whether one version was in force from its beginning to its end."""
        return self.began is not None and self.began == self.ended

    def __str__(self) -> str:
        return f"{self.engine}: version {_name(self.began)} to {_name(self.ended)}"


@dataclass(frozen=True, slots=True)
class SampleVersions:
    """The segments of one sample, in order. ``plus`` makes the next value; it goes with the sample."""

    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        needed = "segments are needed, as a receiver records them"
        checks.kind("SampleVersions", "segments", self.segments, Iterable, needed)
        object.__setattr__(self, "segments", tuple(self.segments))
        for each in self.segments:
            checks.kind("SampleVersions", "segments", each, Segment, needed)

    def plus(self, *segments: Segment) -> SampleVersions:
        """These, and further ones."""
        return SampleVersions((*self.segments, *segments))

    @property
    def oldest(self) -> int:
        """The lowest version that a part of the sample was generated with.

        Raises:
            VersionUnknown: there is no segment, or one has no version.
        """
        return min(self._numbers())

    @property
    def newest(self) -> int:
        """The highest one.

        Raises:
            VersionUnknown: there is no segment, or one has no version.
        """
        return max(self._numbers())

    @property
    def mixed(self) -> bool:
        """Whether more than one version took part; None counts as one.

        The same number in two lives of an engine is one version: it stands for one set of bytes.
        """
        return len({each for segment in self.segments for each in (segment.began, segment.ended)}) > 1

    def staleness(self, ledger: Ledger) -> int:
        """By how many versions its oldest part is behind what is published; never negative.

        Args:
            ledger: what the trainer's ledger says now (``sync.ledger()``), read after the sample has ended.

        Raises:
            VersionUnknown: a segment has no version: the engine had never had weights of a round, or lost
                them meanwhile.
            VersionAhead: the ledger has never heard of its version.
        """
        checks.kind("staleness", "ledger", ledger, Ledger, "a ledger is needed, such as sync.ledger()")
        numbers = self._numbers()
        if (known := ledger.newest) is None or max(numbers) > known:
            ahead = max(self.segments, key=_highest)
            raise VersionAhead(
                f"version {_highest(ahead)} of engine {ahead.engine} is newer than any in the ledger "
                f"(its newest is {_name(known)}): another trainer's, or the ledger was lost; give the "
                "trainer the ledger that it had, and discard the sample"
            )
        return max(ledger.version or 0, *numbers) - min(numbers)

    def _numbers(self) -> list[int]:
        if not self.segments:
            raise VersionUnknown("the sample has no segments: generate inside receiver.segment()")
        numbers: list[int] = []
        for each in self.segments:
            if each.began is None or each.ended is None:
                when = "began" if each.began is None else "ended"
                raise VersionUnknown(
                    f"engine {each.engine} had weights of no version when a segment {when}: discard the "
                    "sample, or do without its age"
                )
            numbers += [each.began, each.ended]
        return numbers


def _highest(segment: Segment) -> int:
    return max(segment.began or 0, segment.ended or 0)


def _name(version: int | None) -> str:
    return "none" if version is None else str(version)
