"""Retention: the trainer's tensors are kept while they may still be needed, and let go of when they are not.

A trainer that gathers its weights into a list for a round wants the memory back as soon as the engines hold
them, and the list as it was if the round fails, to send it again. So the one list, the very object, is
emptied in the clean-up of a good round, after the publication, and otherwise not touched. List this handler
last: executors clean up in their order, and what comes after it can still fail.
"""

from __future__ import annotations

from typing import Any

from ..fsm import checks
from ..fsm.executors import RoundView

__all__ = ["Retention"]


class Retention:
    """An executor that empties a list of tensors when a round has succeeded.

    Args:
        tensors: the list; by default whatever list a round was given its weights as, if it was one.

    Raises:
        SetupError: ``tensors`` is no list, so it cannot be emptied in place.
    """

    name = "retention"

    def __init__(self, tensors: list[Any] | None = None) -> None:
        # Asked with `is`: the list may well be empty until the first round.
        if tensors is not None:
            checks.kind("Retention", "tensors", tensors, list, "Retention empties a list, so one is needed")
        self._tensors = tensors

    def prepare(self, round: RoundView) -> None:
        """Nothing is changed, so nothing has to be undone."""

    def clean(self, round: RoundView) -> None:
        """The engines hold the weights and the version is published: empty the list."""
        held = self._tensors if self._tensors is not None else getattr(round.weights, "source", None)
        if isinstance(held, list):
            held.clear()
