"""Faults to bring back into the product, in a test run of its own: ``pytest -p membermutants``.

Which one is said by the environment variable ``MEMBERS_MUTANT``. Each changes the product, never a check.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from weightsync import turns
from weightsync.fsm.turns import Turn
from weightsync.fsm.turns import turn as right_turn

__all__ = ["MUTANTS"]

Changed: Any = setattr


def staleness_without_a_limit() -> None:
    """Weights are left out for as long as a round runs."""
    Changed(turns, "turn", lambda policy, *, busy, behind: right_turn(policy, busy=busy, behind=1))


def failed_rounds_count_as_delivered() -> None:
    """Whatever became of a round, the engines are taken to be up to date."""
    over = turns.Turns._over

    def trusting(self: turns.Turns, pending: Any, result: Any) -> None:
        over(self, pending, result)
        self._delivered = max(self._delivered, pending.number)

    Changed(turns.Turns, "_over", trusting)


def coalescing_only_queues() -> None:
    """Nothing is replaced, and every copy is kept."""

    def queues(policy: Any, *, busy: bool, behind: int) -> Turn:
        decided = right_turn(policy, busy=busy, behind=behind)
        return Turn.enter if decided is Turn.replace else decided

    Changed(turns, "turn", queues)


MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    "staleness_without_a_limit": (staleness_without_a_limit, "turns.py -k too_far_behind"),
    "failed_rounds_count_as_delivered": (failed_rounds_count_as_delivered, "turns.py -k nearer"),
    "coalescing_only_queues": (coalescing_only_queues, "turns.py -k newest_weights"),
}
"""What breaks, and the tests that must notice: ``tests/test_`` and so on, with what selects them."""

if "MEMBERS_MUTANT" in os.environ:
    MUTANTS[os.environ["MEMBERS_MUTANT"]][0]()
