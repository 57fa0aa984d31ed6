"""The link to an engine in this process: each word is carried out on a thread of its own.

A word may block, and another one has to get through beside it: an abort beside a receive, for example.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..fsm import checks
from ..fsm.contract import EngineStatus, Ticket
from ..fsm.engine import Answer
from ..fsm.engine_table import Session
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation, Receipt
from .receiver import Receiver
from .threads import spawn

__all__ = ["LocalEngine"]

T = TypeVar("T")


class LocalEngine:
    """An ``EngineLink`` to a ``Receiver`` in this process.

    Args:
        receiver: the engine's end.
        ranks: how many ranks it is to have; an engine that says otherwise is refused. Any by default.

    Raises:
        SetupError: this is no receiver, or no number of ranks.
    """

    in_process = True
    """It is here."""

    def __init__(self, receiver: Receiver, *, ranks: int | None = None) -> None:
        if not checks.has(receiver, ("hello", "open", "receive", "commit", "abort", "resume")):
            needed = "a receiver is needed, as receiver_for(model, 'name') makes it"
            raise checks.refusal("LocalEngine", "receiver", receiver, needed)
        if ranks is not None:
            checks.whole("LocalEngine", "ranks", ranks)
        self.receiver, self.ranks = receiver, ranks

    @property
    def id(self) -> str:
        """The engine's name."""
        return self.receiver.engine

    def hello(self) -> Future[EngineStatus]:
        """Ask the engine what it is."""
        return self._ask("hello", self.receiver.hello)

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        """Pause and open a session."""
        return self._ask("open", self.receiver.open, session, incarnation, plan, expected, limit)

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Start receiving."""
        return self._ask("receive", self.receiver.receive, session, ticket)

    def commit(self, session: Session) -> Future[None]:
        """Make the new version the engine's own."""
        return self._ask("commit", self.receiver.commit, session)

    def abort(self, session: Session) -> Future[Answer]:
        """End the session and say what the engine is."""
        return self._ask("abort", self.receiver.abort, session)

    def resume(self, session: Session) -> Future[None]:
        """Let a committed engine generate again."""
        return self._ask("resume", self.receiver.resume, session)

    def close(self) -> None:
        """Nothing is held here."""

    def _ask(self, word: str, work: Callable[..., T], *args: Any) -> Future[T]:
        return spawn(f"weightsync-{self.id}-{word}", work, *args)
