"""Rounds in real time and everything around them: real lock, ledger, threads and loop, fakes outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..fsm.contract import Clock
from ..fsm.driver import Driver
from ..fsm.facts import opening
from ..fsm.policy import Policy
from ..fsm.receipt import Participant
from ..fsm.record import Record
from ..fsm.results import RoundResult
from ..fsm.round import Identity, Round
from ..fsm.sampling import WHOLE
from ..fsm.setting import Setting
from ..fsm.states import Disposition, EngineState
from ..fsm.tickets import Granted
from ..handlers.clock import SystemClock
from ..handlers.crew import Parts
from ..handlers.ledger import MemoryLedger
from ..handlers.lock import LocalLock
from ..handlers.loop import RoundLoop
from ..handlers.observers import Observers
from ..handlers.workers import Workers
from ..sync import WeightSync
from .fakes import FakeEngine, FakeExecutor, FakeTransport, FakeWeights, Gate

__all__ = ["PATIENCE", "Scene", "Trainer", "check_free", "close_all"]

PATIENCE = 20.0
"""Seconds that nothing honest takes."""

SLACK = 2.0

_OPEN: list[Callable[[], None]] = []


def close_all() -> None:
    """End the threads of every scene and trainer that was made; for the end of a test."""
    while _OPEN:
        _OPEN.pop()()


class Scene:
    """Two engines called a and b, two executors called x and y, and a round that has not begun.

    Args:
        policy: as a user would give it; a deadline of 3 seconds by default.
        clock: real time by default.
        observers: besides the one that keeps the records.
    """

    def __init__(
        self, policy: Policy | None = None, clock: Clock | None = None, observers: Sequence[Any] = ()
    ) -> None:
        self.policy = policy or Policy(deadline=3.0, lease=2.0)
        self.lock, self.ledger = LocalLock(lease=self.policy.lease, epoch=0), MemoryLedger()
        self.workers = Workers()
        self.engines = [FakeEngine("a"), FakeEngine("b")]
        self.transport, self.weights = FakeTransport(), FakeWeights(1)
        self.story: list[str] = []
        self.executors = [FakeExecutor("x", self.story), FakeExecutor("y", self.story)]
        self.records: list[Record] = []
        self.observers = Observers([*observers, self.records.append])
        self.clock: Clock = clock or SystemClock()
        self.version = 0
        self.loop = self.next_round()
        _OPEN.append(self.close)

    def next_round(self) -> RoundLoop:
        """A round that has not begun."""
        links = {Participant(engine.id, engine.machine.facts.incarnation): engine for engine in self.engines}
        facts = opening(
            round=f"r{self.version}", version=self.version, roster=links,
            quorum=self.policy.quorum_of(len(links)),
        )  # fmt: skip
        setting = Setting("me", self.lock.name, self.ledger.name, self.policy.limits())
        now, wall = self.clock.now(), self.clock.wall()
        round = Round.open(facts, Identity(1, 1, "me"), at=now, wall=wall, setting=setting)
        driver = Driver(round, self.policy.limits(), ["x", "y"], self.clock)
        parts = Parts(
            lock=self.lock, ledger=self.ledger, transport=self.transport, links=links,
            executors=self.executors, weights=self.weights, owner="me", step=1, attempt=1,
            bucket_bytes=64, part=WHOLE,
        )  # fmt: skip
        self.version += 1
        return RoundLoop(
            driver, parts, workers=self.workers, observers=self.observers, clock=self.clock, flush=PATIENCE
        )

    def run(self) -> RoundResult:
        """Run the round, within its deadline, and check what must be true after any round."""
        begun = time.monotonic()
        result = self.loop.run()
        took = time.monotonic() - begun
        assert took < self.policy.deadline + SLACK, f"it took {took:.2f} s"
        self.check(result)
        return result

    def check(self, result: RoundResult) -> None:
        """Released, told once, the lock free, no engine paused or in a session without an owner."""
        assert result.path[-1] == "Released"
        assert sum(record.event == "result" for record in self.records) == 1
        check_free(self.lock)
        for row, engine in zip(result.engines, self.engines, strict=True):
            if row.disposition is not Disposition.quarantined:
                assert engine.machine.state is EngineState.Serving, row
                assert engine.machine.facts.session is None, row

    def close(self) -> None:
        """End the threads."""
        self.observers.close()
        self.workers.close()


class Trainer:
    """A ``WeightSync`` of two engines called a and b, and what stands around it.

    Args:
        policy: as a user would give it; a deadline of 3 seconds by default.
        handlers: besides the observer that keeps the records.
        options: of the ``WeightSync``.
    """

    def __init__(self, policy: Policy | None = None, handlers: Sequence[Any] = (), **options: Any) -> None:
        self.policy = policy or Policy(deadline=3.0, lease=2.0)
        self.engines, self.transport = [FakeEngine("a"), FakeEngine("b")], FakeTransport()
        self.lock, self.ledger = LocalLock(lease=self.policy.lease, epoch=0), MemoryLedger()
        self.records: list[Record] = []
        values: dict[str, Any] = {"lock": self.lock, "ledger": self.ledger, "owner": "me", **options}
        self.sync = WeightSync(
            self.engines,
            self.transport,
            policy=self.policy,
            handlers=[*handlers, self.records.append],
            **values,
        )
        _OPEN.append(self.sync.close)

    def hand_over(self, step: int, weights: FakeWeights) -> RoundResult:
        """The result of a step at which weights are handed over."""
        result = self.sync.on_step_end(step, weights)
        assert result is not None
        return result

    def held_in(self, state: str) -> Gate:
        """A gate that holds the next round in that state; before the last receipt, an abort opens it."""
        gate, first = Gate(), self.engines[0]
        bad, word = {
            "Locked": (self.transport.bad, "open"),
            "Broadcasting": (self.transport.bad, "bucket 1"),
            "Awaiting": (self.transport.bad, "collect"),
            "Cleaning": (first.bad, "commit"),
        }[state]
        bad[word] = gate
        return gate

    def check_equal(self, weights: FakeWeights) -> None:
        """Every engine holds exactly what the trainer holds."""
        assert [engine.content for engine in self.engines] == [weights.content] * len(self.engines)

    def check_released(self) -> None:
        """Every round that was opened is over; the lock is free; no engine is left in a session."""
        told = [record.event for record in self.records]
        assert told.count("opened") == told.count("result")
        check_free(self.lock)
        for engine in self.engines:
            assert engine.machine.facts.session is None
            assert engine.machine.state is EngineState.Serving


def check_free(lock: LocalLock) -> None:
    """Another party gets the lock in less than a second."""
    ticket = lock.request("other", "theirs")
    granted = lock.wait(ticket, 1.0)
    assert isinstance(granted, Granted), granted
    lock.release(ticket, granted.epoch)
