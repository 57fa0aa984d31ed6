"""A driver whose calls are answered by hand, one at a time."""

from __future__ import annotations

from ..fsm import events as e
from ..fsm.calls import Call
from ..fsm.driver import Driver
from ..fsm.engine import EngineMachine
from ..fsm.engine_table import AllApplied, FrameSeen, Opened, Session, ViewClosed
from ..fsm.facts import opening
from ..fsm.policy import Policy
from ..fsm.receipt import Expectation, Participant, Receipt
from ..fsm.round import Identity, Round
from ..fsm.states import State
from .clock import HandClock

__all__ = ["Desk"]


class Desk:
    """Holds the calls of one driver until they are answered.

    Args:
        executors: their names.
        engines: how many; they are called e0, e1, ...
        policy: as a user would give it; a deadline of 4 seconds and a long lease by default.
    """

    plan = Expectation("plan", 2, 64, 1, "digest")

    def __init__(self, *executors: str, engines: int = 2, policy: Policy | None = None) -> None:
        self.members = [Participant(f"e{number}") for number in range(engines)]
        self.policy = policy or Policy(deadline=4.0, lease=20.0)
        quorum = self.policy.quorum_of(engines)
        facts = opening(round="r", version=0, roster=self.members, quorum=quorum)
        self.clock = HandClock()
        self.round = Round.open(facts, Identity(), at=0.0, wall=0.0)
        self.driver = Driver(self.round, self.policy.limits(), executors, self.clock)
        self.open: list[Call] = []
        self._took(self.driver.start(0.0))

    @property
    def state(self) -> State:
        """Where the round is."""
        return self.round.state

    def done(self, name: str, value: object = None, error: BaseException | None = None) -> list[str]:
        """Answer the call of that name; what is called next."""
        call = next(call for call in self.open if str(call) == name)
        self.open.remove(call)
        return self._took(self.driver.answered(call.number, self.clock.now(), value=value, error=error))

    def told(self, event: e.Event, phase: State | None = None) -> list[str]:
        """A watchdog, or a port of ``phase``, tells a fact; what is called next."""
        return self._took(self.driver.heard(event, self.clock.now(), phase=phase))

    def wait(self, seconds: float) -> list[str]:
        """Time passes, and the driver looks at the clock; what is called next."""
        self.clock.advance_to(self.clock.now() + seconds)
        return self._took(self.driver.tick(self.clock.now()))

    def locked(self) -> list[str]:
        """The lock is granted, as epoch 1; what is called next."""
        return self.done("acquire()", (1, self.clock.now() + self.policy.lease))

    def broadcasting(self) -> None:
        """The way to Broadcasting."""
        self.locked()
        self.done("plan()", self.plan)
        for index in range(len(self.driver.executors)):
            self.done(f"prepare({index})", value=True)
        for member in self.members:
            self.done(f"open({member})")
        self.done("transport_open()")

    def awaiting(self) -> None:
        """The way to Awaiting."""
        self.broadcasting()
        self.told(e.BucketSent(0), State.Broadcasting)
        self.told(e.AllSent(), State.Broadcasting)
        self.done("broadcast()")

    def cleaning(self) -> None:
        """The way to Cleaning."""
        self.awaiting()
        for member in self.members:
            self.told(e.EngineAcked(member, (self.receipt(member),)), State.Awaiting)
        self.done("collect()")

    def receipt(self, member: Participant) -> Receipt:
        """The proof of an engine that received everything."""
        machine, session = EngineMachine(member.id, incarnation=member.incarnation), Session("r", 1, 0)
        proof = ViewClosed(session, self.plan.tensors, self.plan.bytes, self.plan.digest)
        for event in (Opened(session, self.plan), FrameSeen(session, 0), AllApplied(session), proof):
            machine.fire(event)
        return machine.receipt(session)

    def _took(self, calls: list[Call]) -> list[str]:
        self.open += calls
        return [str(call) for call in calls]
