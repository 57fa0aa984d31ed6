"""An engine rank at run time: the engine table, committed one snapshot at a time, and the receipt it makes.

This is the only module that makes receipts, and it does so in one place: when the machine is in Acked.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import final

from ._machine import Decider
from .commit import CommitGuard
from .engine_table import ENGINE, EngineEvent, EngineFacts, Session
from .errors import GuardFailed, IllegalEvent, StaleSession, TableError
from .receipt import Receipt
from .rows import describe
from .states import EngineState

__all__ = ["Answer", "EngineMachine"]

_DECIDER = Decider(ENGINE)


class Answer(Enum):
    """What an engine says it is, when it is asked to abort a session."""

    reverted = "holds only the old weights, and refuses this session from now on"
    committed = "holds the session's version"
    torn = "holds a mix, or was never proven whole"


@dataclass(frozen=True, slots=True)
class _Snapshot:
    state: EngineState
    facts: EngineFacts


@final
class EngineMachine:
    """One receiving rank. Thread-safe; events of other sessions are refused and counted.

    Args:
        engine: the engine's id.
        rank: which of the engine's ranks this is, from 0.
        stages: whether buckets go to a copy beside the live weights, so that an abort leaves them whole.
        incarnation: which life of the engine this is; a new one by default.
        told: called with every refusal, as it is about to be raised; must not wait.
    """

    __slots__ = ("_guard", "_snapshot", "_told", "refused")

    def __init__(
        self,
        engine: str,
        *,
        rank: int = 0,
        stages: bool = True,
        incarnation: str | None = None,
        told: Callable[[Exception], None] | None = None,
    ) -> None:
        life = incarnation if incarnation is not None else uuid.uuid4().hex
        self._guard = CommitGuard()
        self._snapshot = _Snapshot(ENGINE.start, EngineFacts(engine, life, rank, stages))
        self._told = told
        self.refused = 0

    @property
    def state(self) -> EngineState:
        """Where this rank is."""
        return self._snapshot.state

    @property
    def facts(self) -> EngineFacts:
        """What this rank knows."""
        return self._snapshot.facts

    def fire(self, event: EngineEvent) -> EngineState:
        """Take ``event`` in.

        Raises:
            StaleSession: it belongs to a session that is closed or was never opened; counted in ``refused``.
            IllegalEvent: the table has no row for it here.
            GuardFailed: a guard raised.
            Nothing changed in any of these cases.
        """
        with self._guard():
            before = self._snapshot
            try:
                row = ENGINE.row(before.state, before.facts, event)
                goal = _DECIDER.decide(before.state, before.facts, event)
            except GuardFailed as error:
                self.refuse(error)
                raise
            except IllegalEvent as error:
                raise self.refuse(self._refusal(before, event, error)) from None
            if goal is not row.goal:
                raise TableError(f"machine and table disagree on {row}: {goal}")
            facts = row.learn(before.facts, event) if row.learn else before.facts
            self._snapshot = _Snapshot(row.goal, facts)  # the commit
            return row.goal

    def refuse(self, error: Exception) -> Exception:
        """Count a refusal, and tell of it. Hands ``error`` back, to be raised."""
        self.refused += 1
        if self._told is not None:
            self._told(error)
        return error

    def receipt(self, session: Session) -> Receipt:
        """The proof that this rank holds the bytes of ``session`` and let go of the sender's buffer.

        Raises:
            IllegalEvent: the rank is not Acked in that session.
        """
        now = self._snapshot  # once: state and facts must be of the same moment
        state, facts = now.state, now.facts
        if state is not EngineState.Acked or facts.session != session or facts.plan is None:
            raise IllegalEvent(f"no receipt in {state.name} ({describe(facts)})")
        tensors, size, digest = facts.applied
        return Receipt._sealed(
            round=session.round, epoch=session.epoch, engine=facts.engine, incarnation=facts.incarnation,
            rank=facts.rank, fingerprint=facts.plan.fingerprint, tensors=tensors, bytes=size, digest=digest,
        )  # fmt: skip

    def answer(self, session: Session) -> Answer:
        """What this rank is, as seen by the trainer that aborted ``session``.

        Raises:
            IllegalEvent: the session was not aborted here, so that it may still change what this rank is.
        """
        facts = self._snapshot.facts
        if facts.torn:  # also after a commit, when a later session tore what was committed
            return Answer.torn
        if facts.committed == session:
            return Answer.committed
        if session.epoch > facts.fenced:
            raise IllegalEvent(f"{facts.engine} has not ended {session.round} (epoch {session.epoch})")
        return Answer.reverted

    @staticmethod
    def _refusal(before: _Snapshot, event: EngineEvent, error: IllegalEvent) -> Exception:
        facts, session = before.facts, event.session
        if facts.live(session):
            return error
        now = f"epoch {facts.session.epoch}" if facts.session else f"none, fenced to {facts.fenced}"
        return StaleSession(
            f"engine {facts.engine} refuses {type(event).__name__} of round {session.round} "
            f"(epoch {session.epoch}) in {before.state.name}: its session is {now}"
        )
