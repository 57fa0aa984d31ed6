"""Whether what is called now is called by a handler of a round, which would wait for itself.

A handler's step runs on a thread of the round, or on the loop of its bridge; either way what it calls carries
a mark, and a task that it has begun carries it on. The mark counts for as long as the step runs: what a
handler leaves behind is nobody's step any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..fsm.errors import RoundInProgress

__all__ = ["refuse_inside", "step_of"]


class _Step:
    """A step of a handler that runs."""

    def __init__(self, owner: object, outer: _Step | None) -> None:
        self.owner, self.outer, self.runs = owner, outer, True


_STEP: ContextVar[_Step | None] = ContextVar("weightsync_step", default=None)


@contextmanager
def step_of(owner: object) -> Iterator[None]:
    """A handler's step runs. ``owner`` is the bridge of the ``WeightSync`` or ``FollowerSync``."""
    step = _Step(owner, _STEP.get())
    token = _STEP.set(step)
    try:
        yield
    finally:
        step.runs = False
        _STEP.reset(token)


def refuse_inside(owner: object, what: str) -> None:
    """Refuse what would wait for the round in which it is called.

    Raises:
        RoundInProgress: it is called by a step of a handler of this owner's.
    """
    step = _STEP.get()
    while step is not None:
        if step.owner is owner and step.runs:
            raise RoundInProgress(
                f"{what} is called by a handler of the round that runs, and would wait for its own end: call "
                "it when the round is over"
            )
        step = step.outer
