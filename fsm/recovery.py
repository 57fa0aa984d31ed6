"""Recovery: when an engine that was quarantined is tried again, as a value on whatever clock its keeper has.

A quarantined engine is asked for by the next round, with everybody else. If that does not bring it back it
rests, and each further failure doubles the rest: an engine that keeps failing must neither fail nor slow
every round of the others. Only a commit that was confirmed ends this; a new incarnation does not, because an
engine that dies in every round has a new one each time.

While it rests the rounds still ask for it, and count it in the quorum: it is lost from the beginning, by
name, with nothing said to it and nobody waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import SetupError

__all__ = ["Backoff", "Care"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a rest is, in seconds: ``first``, then twice as long each time, up to ``longest``.

    Raises:
        SetupError: a rest that no engine could take.
    """

    first: float
    longest: float

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest:
            raise SetupError(f"a rest of {self.first:g} s that grows to {self.longest:g} s is none")

    def rest(self, failures: int) -> float:
        """After that many failures to catch up, from 1."""
        doublings = min(failures - 1, 64)  # beyond that every rest is the longest
        return float(min(self.longest, self.first * 2**doublings))


@dataclass(frozen=True, slots=True)
class Care:
    """One engine's recovery.

    Args:
        tries: how often a round was to bring it back.
        rests_until: no round before that.
    """

    tries: int = 0
    rests_until: float = float("-inf")

    def failed(self, now: float, backoff: Backoff) -> Care:
        """A round was to bring it back, and did not."""
        tries = self.tries + 1
        return replace(self, tries=tries, rests_until=now + backoff.rest(tries))

    def left(self, now: float) -> float:
        """Seconds of rest that are left; 0 if it may be tried."""
        return max(0.0, self.rests_until - now)
