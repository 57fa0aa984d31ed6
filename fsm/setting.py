"""Where a round runs: what its log has to say so that rounds can be held against each other.

Two rounds may be compared only if they share something: the trainer that begins one after the other, the
lock whose epochs grow, the ledger whose versions never fall. Which ones these are, and how long the round may
take, stands in its first record.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .policy import Limits

__all__ = ["Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """The surroundings of a round. What is empty is not told.

    Args:
        run: the trainer's life: one round of it ends before the next begins.
        lock: which lock. Rounds with the same one get epochs that grow.
        ledger: which ledger. Versions in the same one never fall.
        limits: how long things may take.
    """

    run: str = ""
    lock: str = ""
    ledger: str = ""
    limits: Limits | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values, without what is not known."""
        told = {"run": self.run, "lock": self.lock, "ledger": self.ledger}
        found: dict[str, Any] = {name: value for name, value in told.items() if value}
        if self.limits is not None:
            found["limits"] = {name: round(value, 3) for name, value in asdict(self.limits).items()}
        return found
