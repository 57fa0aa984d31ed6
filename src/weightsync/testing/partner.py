"""An engine of the simulated world: its machine, its process, and the bytes it really holds.

The machine says what the engine takes itself for. The bytes are kept beside it and know nothing of tables, so
that one can be held against the other: each bucket carries the mark of the session that brought it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..fsm.engine import EngineMachine
from ..fsm.engine_table import (
    AbortOrdered,
    AllApplied,
    CommitOrdered,
    FrameSeen,
    LimitReached,
    Session,
    ViewClosed,
    WeightsLost,
)
from ..fsm.errors import IllegalEvent
from ..fsm.receipt import Expectation
from ..fsm.states import EngineState

__all__ = ["Mark", "Partner", "end_session"]

Mark = tuple[Session, str]
"""Who brought a bucket, and the digest of what it belongs to."""


@dataclass(slots=True)
class Partner:
    """One engine.

    Args:
        machine: what it takes itself for.
        alive: whether its process lives.
        deaf: the session in which it applies nothing any more and says nothing.
        spoilt: the session in which it applies other bytes.
        live: the marks of the weights it generates with, by bucket; one that is not named is as at start.
        staged: the marks of the copy beside them.
        view: the session whose transfer buffer it still looks at.
        let_go: the sessions whose buffer it has let go of.
        commits: the sessions whose weights it has made its own.
    """

    machine: EngineMachine
    alive: bool = True
    deaf: Session | None = None
    spoilt: Session | None = None
    live: dict[int, Mark] = field(default_factory=dict)
    staged: dict[int, Mark] = field(default_factory=dict)
    view: Session | None = None
    let_go: set[Session] = field(default_factory=set)
    commits: set[Session] = field(default_factory=set)

    @property
    def incarnation(self) -> str:
        """Which life of it this is."""
        return self.machine.facts.incarnation

    def frame(self, session: Session, index: int, plan: Expectation) -> None:
        """A bucket is applied: to the live weights, or to the copy beside them."""
        self.machine.fire(FrameSeen(session, index))
        if index == 0:
            self.staged = {}
        weights = self.staged if self.machine.facts.stages else self.live
        weights[index] = (session, "other bytes" if self.spoilt == session else plan.digest)
        self.view = session
        if index + 1 == plan.buckets:
            self.machine.fire(AllApplied(session))

    def close_view(self, session: Session, plan: Expectation) -> None:
        """It lets go of the transfer buffer."""
        weights = {**self.live, **self.staged}
        whole = all(weights.get(index) == (session, plan.digest) for index in range(plan.buckets))
        digest = plan.digest if whole else "other bytes"
        if self.view == session:
            self.view = None
        self.let_go.add(session)
        self.machine.fire(ViewClosed(session, plan.tensors, plan.bytes, digest))

    def commit(self, session: Session) -> None:
        """The new weights become its own."""
        before = self.machine.state
        self.machine.fire(CommitOrdered(session))
        if self.machine.state is EngineState.Committed and before is not EngineState.Committed:
            self.commits.add(session)
            if self.machine.facts.stages:
                self.live, self.staged = {**self.live, **self.staged}, {}

    def lose_weights(self, session: Session) -> None:
        """Other bytes are where its weights were, and it has looked because of this session."""
        self.live[0] = (session, "other bytes")
        self.machine.fire(WeightsLost(session))

    def give_up(self) -> None:
        """Nobody has said anything for its own limit."""
        session = self.machine.facts.session
        if self.alive and session is not None:
            self.machine.fire(LimitReached(session))


def end_session(machine: EngineMachine, session: Session) -> None:
    """An abort, as every rank takes it: of a session that is not open it is only remembered."""
    try:
        machine.fire(AbortOrdered(session))
    except IllegalEvent:
        machine.refused += 1
