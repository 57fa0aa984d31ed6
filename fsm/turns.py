"""What a hand-over does while a round runs: the decision alone, as a pure function.

A trainer that overlaps training and hand-overs can be faster than its engines. What is to become of the
weights it brings meanwhile is the user's to say (``Policy.when_busy``). Two of the answers leave weights out,
and those are bounded: because of them the engines never fall more than ``Policy.staleness`` hand-overs
behind. The hand-over that would leave them further behind waits until a round is over, and is asked again.
"""

from __future__ import annotations

from enum import Enum

from .policy import Policy

__all__ = ["Turn", "turn"]


class Turn(Enum):
    """What is to be done with weights that were brought."""

    enter = "queue up behind whoever is there"
    replace = "queue up in the place of those that were not begun yet"
    block = "wait until the oldest of them is over, and ask again"
    skip = "do not send them"
    refuse = "raise"


def turn(policy: Policy, *, busy: bool, behind: int) -> Turn:
    """Decide.

    Args:
        policy: the user's.
        busy: whether a round is running or waits for its turn.
        behind: by how many hand-overs the engines are behind this one, itself included.
    """
    if not busy:
        return Turn.enter
    match policy.when_busy:
        case "wait":
            return Turn.enter
        case "refuse":
            return Turn.refuse
        case "coalesce" if behind <= policy.staleness:
            return Turn.replace
        case "skip" if behind <= policy.staleness:
            return Turn.skip
        case _:
            return Turn.block
