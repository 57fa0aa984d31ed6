"""The receiving halves of one round, as the trainer sees them: a future each, from ``link.receive``.

A future that fails is the loss of that engine, with the very exception, and nobody else's. Losses are fired
from the transport's own thread, whenever it looks: futures are completed on any thread, which may be in the
middle of something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import final

from ..fsm.contract import EngineLink, Port, Ticket
from ..fsm.errors import EngineGone, WeightSyncError
from ..fsm.receipt import Participant, Receipt
from .bell import Bell

__all__ = ["Leave", "Receptions"]


@dataclass(frozen=True, slots=True)
class Leave:
    """A rank that went before it was done: why, and when that was noticed."""

    error: WeightSyncError
    since: float


@final
class Receptions:
    """Who was asked to receive, who failed, who answered. For the one thread of the phase that is running."""

    __slots__ = ("_acked", "_bell", "_futures", "_lost")

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._futures: dict[Participant, Future[tuple[Receipt, ...]]] = {}
        self._lost: dict[Participant, BaseException] = {}
        self._acked: set[Participant] = set()

    @property
    def lost(self) -> Mapping[Participant, BaseException]:
        """The engines whose loss was fired, and why."""
        return self._lost

    def start(self, engine: Participant, link: EngineLink, ticket: Ticket, port: Port) -> None:
        """Ask ``engine`` to receive. A link that raises is one whose future fails."""
        try:
            future = link.receive(port.session, ticket)
        except Exception as error:  # noqa: BLE001 - of this engine, not of the transport
            future = Future()
            future.set_exception(error)
        self._futures[engine] = future
        future.add_done_callback(lambda _: self._bell.ring())

    def failure(self, engine: Participant) -> BaseException | None:
        """Why the future of ``engine`` failed, if it did."""
        future = self._futures.get(engine)
        if future is None or not future.done():
            return None
        try:
            return future.exception()
        except CancelledError:
            return EngineGone(f"engine {engine}: the call to receive was cancelled")

    def lose(self, engine: Participant, error: BaseException, port: Port) -> None:
        """Fire the loss of ``engine``, once a round."""
        if engine not in self._lost:
            self._lost[engine] = error
            port.lost(engine, error)

    def lose_who_left(
        self, left: Mapping[int, Leave], engines: Mapping[int, Participant], port: Port, grace: float
    ) -> float:
        """Fire the loss of those who left ``grace`` seconds ago. Hands back when the next one is due.

        Args:
            left: the ranks that have left, by number.
            engines: whose ranks they are.
            port: of the phase.
            grace: seconds for an engine to say why with its own word.
        """
        pause = 0.0
        for rank, leave in list(left.items()):
            engine = engines[rank]
            if engine in self._lost:
                continue
            more = leave.since + grace - time.monotonic()
            if more > 0:
                pause = max(pause, more)
            else:
                self.lose(engine, leave.error, port)
        return pause

    def look(self, port: Port) -> None:
        """Fire the losses that came up since the last look."""
        for engine in self._futures:
            error = self.failure(engine)
            if error is not None:
                self.lose(engine, error, port)

    def collect(
        self, port: Port, stopped: Callable[[], bool], look: Callable[[Port], float | None] | None = None
    ) -> None:
        """Fire ``acked`` or ``lost`` for each engine that remains; returns when none is missing.

        Args:
            port: of the phase.
            stopped: whether the round was ended meanwhile.
            look: looks for losses instead of ``look``; may give seconds after which it wants to look again.
        """
        while not (stopped() or port.closed):
            noted = self._bell.rings
            again = (look or self.look)(port)
            missing = [each for each in port.engines if not self._answered(each, port)]
            if not missing or port.limit <= 0:
                return  # at the limit, the round's own clock has the word
            self._bell.rung(noted, min(again, port.limit) if again else port.limit)

    def _answered(self, engine: Participant, port: Port) -> bool:
        """Whether ``engine`` is acked or lost; fires ``acked`` as soon as it can."""
        future = self._futures.get(engine)
        if engine not in self._acked and engine not in self._lost:
            if future is None or not future.done():
                return False
            self._acked.add(engine)
            port.acked(engine, future.result())
        return True
