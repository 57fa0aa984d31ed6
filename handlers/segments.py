"""Segments: generation that knows which version it was done with.

    with receiver.segment() as segment:           # threads
        tokens += sample(model, prompt)
    versions = versions.plus(segment.done)

    async with receiver.segment_async() as segment:
        ...

Generate a sample's segment inside one of these instead of ``receiver.gate.admit()``. The version is read when
the gate has admitted, and once more before it is left. A commit needs an empty gate, so what is read first is
what everything in the segment is generated with, whole: never a number that a round is about to give, nor one
of a commit that is half done. What was read is a plain value that goes with the sample to wherever it is
collected, over a restart of this engine, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from ..fsm.engine_table import EngineFacts
from ..fsm.errors import EngineError
from ..fsm.spans import Segment
from .gate import Gate

__all__ = ["Running", "Segments"]


class Running:
    """A segment that is being generated.

    Args:
        facts: what the engine's table knows now.
    """

    def __init__(self, facts: Callable[[], EngineFacts]) -> None:
        self._facts = facts
        first = facts()
        self._who = (first.engine, first.incarnation)
        self.began = first.version
        """The version in force."""
        self._done: Segment | None = None

    @property
    def done(self) -> Segment:
        """The segment, when it is over; whatever ended it, so that cut-off ones count as well.

        Raises:
            EngineError: it is not over.
        """
        if self._done is None:
            raise EngineError(f"engine {self._who[0]}: the segment is not over; ask when its block is left")
        return self._done

    def end(self) -> None:
        """It is left now."""
        self._done = Segment(*self._who, self.began, self._facts().version)


class Segments:
    """The segments of one engine rank.

    Args:
        gate: the rank's.
        facts: what its table knows now.
    """

    def __init__(self, gate: Gate, facts: Callable[[], EngineFacts]) -> None:
        self._gate, self._facts = gate, facts

    @contextmanager
    def of_thread(self, limit: float | None) -> Iterator[Running]:
        """Generate inside; waits as ``Gate.admit`` does."""
        with self._gate.admit(limit):
            running = Running(self._facts)
            try:
                yield running
            finally:
                running.end()

    @asynccontextmanager
    async def of_task(self, limit: float | None) -> AsyncIterator[Running]:
        """The same for coroutines."""
        async with self._gate.admitted(limit):
            running = Running(self._facts)
            try:
                yield running
            finally:
                running.end()
