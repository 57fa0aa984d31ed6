"""One round of the object store transport, on the trainer's side: who reads what, and every wait.

What the board says of the ranks comes by a call that is answered when something has changed, and is then made
again. Ray's threads bring the answers, and ring the bell; losses are fired from the transport's own thread.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, final

from ..fsm.contract import EngineLink, Port, Ticket
from ..fsm.errors import TransportError
from ..fsm.plan import Plan
from ..fsm.receipt import Participant
from .bell import Bell
from .board import Seen
from .buffers import Pair
from .objects_inlet import NAME, WINDOW
from .receptions import Receptions

if TYPE_CHECKING:
    from .object_store import BoardLink

__all__ = ["ObjectsRound"]

_BEGINNING = 60.0
"""Seconds for the board to start, if the phase has more: it is a process, and the machine may be busy."""


@final
class ObjectsRound:
    """What lives as long as one round. ``end`` may be called beside everything else."""

    def __init__(self, board: BoardLink, buffers: Pair) -> None:
        self.bell = Bell()
        self.receptions = Receptions(self.bell)
        self.buffers = buffers
        self._board = board
        self._name = secrets.token_urlsafe(12)
        self._keys: dict[str, Participant] = {}
        self._seen: Seen = (0, {})
        self._broken: BaseException | None = None
        self._cut: set[str] = set()
        self._let_go = 0
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether it was cleaned or aborted."""
        return self._ended.is_set()

    def begin(self, plan: Plan, engines: Mapping[Participant, EngineLink], port: Port) -> bool:
        """Tell the board who takes part, and start the receiving halves; False if the round moved on.

        Raises:
            TransportError: the board does not answer.
        """
        self._keys = {secrets.token_urlsafe(24): engine for engine in engines}
        session = [port.session.round, port.session.epoch, port.session.version]
        ranks = {key: engine.ranks for key, engine in self._keys.items()}
        if not self._wait(self._board.call("begin", self._name, session, ranks), port):
            return False
        self._watch()
        for key, engine in self._keys.items():
            if port.closed or self.ended:
                return False
            ticket = Ticket(
                NAME,
                {"board": self._board.name, "key": key, "rank": 0, "fingerprint": plan.fingerprint},
            )
            self.receptions.start(engine, engines[engine], ticket, port)
        return True

    def show(self, index: int, refs: list[Any]) -> None:
        """Show every rank a bucket, and leave its reference to the board."""
        self._board.tell("show", self._name, index, refs)

    def room(self, index: int, port: Port) -> bool:
        """Wait until there may be another bucket in the store; False if the round moved on.

        Raises:
            TransportError: an engine holds a bucket until the phase is over, none is left, or there is no
                board any more.
        """
        before = index - WINDOW
        while not (self.ended or port.closed):
            noted = self.bell.rings
            self.look(port)
            if self._broken is not None:
                raise TransportError(f"bucket {index} cannot be shown: {self._broken}") from self._broken
            ranks = self._counting()
            holding = [engine for engine, done in ranks if done <= before]
            if ranks and not holding:
                return True
            port.waiting_for(list(dict.fromkeys(holding)))
            if not self.bell.rung(noted, port.limit) and not port.closed:
                names = ", ".join(str(engine) for engine in dict.fromkeys(holding))
                why = f"{names} did not let go of bucket {before}" if names else "no engine receives any more"
                raise TransportError(f"bucket {index} cannot be sent: {why}")
        return False

    def look(self, port: Port) -> None:
        """Fire the losses that came up, stop counting on who is out, and say whether somebody moved."""
        self.receptions.look(port)
        remaining = port.engines
        out = [
            key
            for key, engine in self._keys.items()
            if key not in self._cut and (engine not in remaining or engine in self.receptions.lost)
        ]
        if out:
            self._cut.update(out)
            self._board.tell("cut", self._name, out, "the engine takes no part in the round any more")
        let_go = sum(done for done, _ in self._seen[1].values())
        if let_go > self._let_go:
            self._let_go = let_go
            port.progress()

    def end(self, why: str) -> None:
        """Wake everybody, and have the board forget every bucket. Idempotent."""
        self._ended.set()
        self._board.tell("end", self._name, why)
        self.bell.ring()

    def _counting(self) -> list[tuple[Participant, int]]:
        """The ranks that are waited for, with how many buckets each has let go of."""
        return [
            (self._keys[key], done)
            for (key, _), (done, counts) in self._seen[1].items()
            if counts and key not in self._cut
        ]

    def _wait(self, answer: Future[Any], port: Port) -> bool:
        """Wait for the board; False if the round moved on."""
        answer.add_done_callback(lambda _: self.bell.ring())
        limit = min(_BEGINNING, port.limit)
        self.bell.wait(lambda: answer.done() or self.ended or port.closed, limit)
        if self.ended or port.closed:
            return False
        if not answer.done():
            raise TransportError(f"the board, an actor beside the trainer, did not answer in {limit:.0f} s")
        answer.result()
        return True

    def _watch(self) -> None:
        self._board.call("watch", self._name, self._seen[0]).add_done_callback(self._watched)

    def _watched(self, answer: Future[Any]) -> None:
        self._broken = answer.exception()
        seen = None if self._broken else answer.result()
        if seen is not None:
            self._seen = seen
            if not self.ended:
                self._watch()
        self.bell.ring()
