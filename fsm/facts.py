"""What a round knows: one frozen value, changed only by the table's rows (:mod:`.learn`).

Sets are frozensets of participants, so that hearing the same thing twice changes nothing. Everything that
follows from these fields is a property here or a guard in :mod:`.guards`, never a stored copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .receipt import Expectation, Participant
from .states import Disposition, Lock, Outcome, Publication, State

__all__ = ["Cause", "Facts", "opening"]


@dataclass(frozen=True, slots=True)
class Cause:
    """The first thing that sent a round to Failed. It is never replaced by a later one."""

    trigger: str
    state: State
    engine: Participant | None = None
    error: BaseException | None = field(default=None, compare=False)

    def __str__(self) -> str:
        who = f" of {self.engine.id}" if self.engine else ""
        what = f": {self.error}" if self.error is not None and str(self.error) else ""
        return f"{self.trigger}{who} in {self.state.name}{what}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a round knows. Sizes are counts; nothing here refers to a tensor, a socket or a clock."""

    round: str
    version: int
    roster: frozenset[Participant]
    quorum: int
    inplace: frozenset[Participant] = frozenset()
    tainted: frozenset[Participant] = frozenset()
    lost: frozenset[Participant] = frozenset()
    members: frozenset[Participant] = frozenset()
    lock: Lock = Lock.asked
    epoch: int = 0
    plan: Expectation | None = None
    sent: int = 0
    acks: frozenset[Participant] = frozenset()
    evicted: frozenset[Participant] = frozenset()
    decided: bool = False
    committed: frozenset[Participant] = frozenset()
    reverted: frozenset[Participant] = frozenset()
    quarantined: frozenset[Participant] = frozenset()
    publication: Publication = Publication.no
    settled: bool = False
    unclean: bool = False
    tries: int = 0
    cause: Cause | None = None

    @property
    def buckets(self) -> int:
        """How many buckets the plan has; 0 before there is one."""
        return self.plan.buckets if self.plan else 0

    @property
    def remaining(self) -> frozenset[Participant]:
        """Members that are neither evicted nor quarantined."""
        return self.members - self.evicted - self.quarantined

    @property
    def missing(self) -> frozenset[Participant]:
        """Remaining participants whose commit is not confirmed."""
        return self.remaining - self.committed

    @property
    def open(self) -> frozenset[Participant]:
        """Remaining participants that have not said what they are."""
        return self.missing - self.reverted

    @property
    def began_all_out(self) -> bool:
        """Whether there was a plan and all of it had been sent."""
        return self.plan is not None and self.sent == self.plan.buckets

    def disposition(self, engine: Participant) -> Disposition:
        """What ``engine`` is by what the round knows now; final once the round is Released."""
        if engine in self.evicted or engine in self.quarantined or engine in self.lost:
            return Disposition.quarantined
        if engine in self.committed:
            return Disposition.serving_new
        if engine in self.tainted:
            return Disposition.quarantined
        if engine not in self.members or engine in self.reverted:
            return Disposition.serving_old
        return Disposition.quarantined

    @property
    def outcome(self) -> Outcome:
        """The sum, from the dispositions and the publication."""
        new = sum(self.disposition(engine) is Disposition.serving_new for engine in self.roster)
        if self.publication is not Publication.yes or new < self.quorum:
            return Outcome.failed
        return Outcome.complete if new == len(self.roster) else Outcome.partial


def opening(
    *,
    round: str,
    version: int,
    roster: Iterable[Participant],
    quorum: int,
    inplace: Iterable[Participant] = (),
    tainted: Iterable[Participant] = (),
) -> Facts:
    """The facts of a round that has not asked for anything yet.

    Raises:
        ValueError: no engine, an engine named twice, or a quorum that is not a number from 1 to all.
    """
    asked = tuple(roster)
    everyone = frozenset(asked)
    if not everyone:
        raise ValueError("a round needs at least one engine")
    if len({engine.id for engine in asked}) != len(asked):
        raise ValueError(f"engine names must differ: {sorted(engine.id for engine in asked)}")
    if type(quorum) is not int or not 1 <= quorum <= len(everyone):  # a fraction is for the policy to round
        raise ValueError(f"quorum is {quorum}: a number from 1 to {len(everyone)}, the engines asked for")
    return Facts(
        round=round,
        version=version,
        roster=everyone,
        quorum=quorum,
        inplace=frozenset(inplace) & everyone,
        tainted=frozenset(tainted) & everyone,
    )
