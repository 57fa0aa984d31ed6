"""A barrier with votes: what the ranks of a trainer say at it, and what is decided from that.

A barrier is *of* a round and has a name in it. Each rank comes to it once and votes: its part is done, or
this is why it is not. It is passed when every rank has come and none has voted against it. Otherwise it is
passed by nobody: there is one decision, the first that anybody writes down, and every rank goes by it.

Everything here is a value, or follows from values. What carries them is ``handlers/barrier.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import BarrierAborted, BarrierTimeout, RankError
from .lines import named

__all__ = ["Decision", "Meeting", "Vote", "against", "decided", "missing", "without"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Which barrier it is.

    Args:
        round: whose it is.
        epoch: of the round; a barrier of an older one is over.
        name: of the barrier, in the round.
        run: one life of the trainer. Epochs are compared within it.
        title: how it is told of, if it is not one of a round.
    """

    round: str
    epoch: int
    name: str
    run: str = ""
    title: str = ""

    def __str__(self) -> str:
        return self.title or f"barrier {self.name!r} of round {self.round} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class Vote:
    """What a rank says when it comes.

    Args:
        rank: who.
        error: why its part is not done, in one line; empty if it is.
        told: what else there is to say of its part, as plain values.
    """

    rank: int
    error: str = ""
    told: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Vote:
        """Read ``to_json`` back."""
        return cls(told["rank"], told["error"], tuple(told["told"]))


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a barrier.

    Args:
        passed: whether every rank goes on.
        ranks: if not, whose fault it is.
        why: and what happened, in one line.
        late: whether these ranks did not come, rather than voted against it.
    """

    passed: bool
    ranks: tuple[int, ...] = ()
    why: str = ""
    late: bool = False

    def error(self) -> RankError | None:
        """What it is on every rank; None if it was passed."""
        if self.passed:
            return None
        return (BarrierTimeout if self.late else BarrierAborted)(self.why, self.ranks)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Decision:
        """Read ``to_json`` back."""
        return cls(told["passed"], tuple(told["ranks"]), told["why"], told["late"])


def decided(meeting: Meeting, votes: Mapping[int, Vote], world: int) -> Decision | None:
    """What follows from these votes; None while there may be others."""
    bad = sorted(rank for rank, vote in votes.items() if vote.error)
    if bad:
        return against(meeting, bad, "; ".join(votes[rank].error for rank in bad))
    return None if missing(votes, world) else Decision(passed=True)


def missing(votes: Iterable[int], world: int) -> tuple[int, ...]:
    """Who has not voted."""
    return tuple(sorted(set(range(world)) - set(votes)))


def against(meeting: Meeting, ranks: Iterable[int], why: str) -> Decision:
    """These have voted against it, or have given it up."""
    ranks = tuple(ranks)
    return Decision(passed=False, ranks=ranks, why=f"{meeting} is not passed: {named(ranks)}: {why}")


def without(meeting: Meeting, ranks: Iterable[int], why: str) -> Decision:
    """These do not come."""
    ranks = tuple(ranks)
    return Decision(
        passed=False, ranks=ranks, why=f"{meeting} is not passed: {named(ranks)} missing: {why}", late=True
    )
