"""A trainer with its engines, and rounds that are looked at from all sides after each of them.

``Bench.fails`` runs a round that must fail and ``Bench.works`` one that must not; both raise AssertionError
when one of the eight things that hold after every round does not:

    in time       the call ends within the deadline, and two seconds
    a legal path  the log alone replays to the path, which ends in Released; a failed round was in Failed
    free lock     somebody else gets the lock, at once
    no orphan     no engine is paused, or in a session, without somebody who ends that
    usable        a good round right after it works, and every engine holds the trainer's bits
    nothing left  descriptors, threads, children, segments, sockets are what they were after the first round
    explained     the error names round, state, engine and bucket; its cause is the very object
    honest        a version moves only when everything was applied, and never falls
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from weightsync import Pending, Policy, RoundResult, SyncFailed, WeightSync
from weightsync.fsm.contract import Transport
from weightsync.fsm.executors import Executor, Observer
from weightsync.fsm.journal import replay
from weightsync.fsm.ledger import LedgerKeeper
from weightsync.fsm.lock import LockKeeper
from weightsync.fsm.record import Record
from weightsync.fsm.states import Disposition, EngineState, State
from weightsync.handlers.coroutines import Awaiting, AwaitingObserver
from weightsync.transports.shm import SharedMemoryTransport
from weightsync.transports.sources import deferred
from weightsync.transports.weights import TorchWeights

from .engines import Engine, InThreads, Look
from .keeper import CountingLock, taken_by
from .levels import Levels, eventually, levels, ours
from .scripts import ANY
from .tensors import BUCKET, same, state

__all__ = ["GOOD_PATH", "SENDING", "Bench", "quick", "threads"]

GOOD_PATH = ("Idle", "Locked", "Broadcasting", "Awaiting", "Cleaning", "Released")
SENDING = ("Broadcasting", "Awaiting")
"""Where a round is when an engine fails in a bucket: the sender may have sent the last one meanwhile."""
SLACK = 2.0


def quick(**values: Any) -> Policy:
    """A policy for tests: three buckets, five seconds, and patience with a machine that is busy."""
    usual = {
        "deadline": 5.0, "idle": 3.5, "engine_limit": 2.5, "drain": 2.5, "first_contact": 30.0, "lease": 2.0,
        "bucket_bytes": BUCKET,
    }  # fmt: skip
    return Policy(**{**usual, **values})


def threads(*names: str, stages: bool = True, value: float = -1.0) -> list[InThreads]:
    """Engines in this process that hold ``state(value)``."""
    return [InThreads(name, state(value), stages=stages) for name in names]


class Log:
    """The records, in order."""

    name = "log"

    def __init__(self, keeper: CountingLock) -> None:
        self.records: list[Record] = []
        self.leaks: list[Record] = []
        self._keeper = keeper

    def __call__(self, record: Record) -> None:
        """Keep it; and look who holds the lock when a round is said to be over."""
        self.records.append(record)
        over = record.target == State.Released.name and record.source != record.target
        if over and self._keeper.holder == "trainer" and not self._keeper.dead:
            self.leaks.append(record)


def _transport(transport: str | Transport) -> str | Transport:
    """By its name; of shared memory so little that the sender waits for engines, as it does elsewhere."""
    return SharedMemoryTransport(mode="ring", slots=1) if transport == "shm" else transport


@dataclass
class _Before:
    """What was, before a round."""

    looks: dict[str, Look]
    published: int | None
    records: int


class Bench:
    """A ``WeightSync`` over engines that can be told to fail.

    Args:
        engines: of any kind.
        transport: as for ``WeightSync``.
        policy: as for ``WeightSync``; its deadline bounds every call.
        handlers: executors and observers; a log is added.
        lock: the keeper; a counting one by default, which is ``keeper``.
        rival: the same lock as somebody else has it, who gets it after each round; for a ``lock`` of the
            caller's, which is not looked at otherwise.
        ledger: as for ``WeightSync``.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        transport: str | Transport = "memory",
        *,
        policy: Policy | None = None,
        handlers: Sequence[Executor | Observer | Awaiting | AwaitingObserver] = (),
        lock: LockKeeper | str | None = None,
        rival: LockKeeper | None = None,
        ledger: LedgerKeeper | None = None,
    ) -> None:
        self.pending: Pending | None = None
        self._rival = rival
        self.policy = policy or quick()
        self.engines = {engine.name: engine for engine in engines}
        self.keeper = CountingLock(self.policy.lease)
        self.log = Log(self.keeper)
        self.history: dict[int | None, list[Mapping[str, Tensor]]] = {}
        for look in self.looks().values():
            self.history.setdefault(look.version, []).append(look.tensors)
        self.sync = WeightSync(
            [engine.link for engine in engines], _transport(transport), policy=self.policy,
            handlers=[*handlers, self.log], lock=self.keeper if lock is None else lock, ledger=ledger,
            owner="trainer",
        )  # fmt: skip
        self._own_lock = lock is None
        self._level: Levels | None = None
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        for engine in self.engines.values():
            engine.disarm()
        self.sync.close()
        kept = [] if self._own_lock else ["weightsync-line"]  # a lock of somebody else's
        assert kind or eventually(lambda: ours() in ([], kept)), f"closed, and there are {ours()}"
        return False

    # -- rounds -------------------------------------------------------------------------------------------

    def run(self, model: object, more: float = 0.0) -> RoundResult:
        """One round, which must end in time. What it did is remembered for the checks."""
        self._steps += 1
        self.pending = None
        began = time.monotonic()
        self.pending = self.sync.begin(self._steps, model, snapshot=False)
        result = self.pending.wait()
        took = time.monotonic() - began
        assert took < self.policy.deadline + SLACK + more, f"the round took {took:.1f} s"
        return result

    def works(self, model: object | None = None) -> RoundResult:
        """A round that must work, seen from all sides. The first one sets the level for what may be left."""
        model = state(self._steps + 1) if model is None else model
        weights = tensors_of(model)  # before: a handler may let go of them
        for engine in self.engines.values():
            engine.disarm()
        before = self._before()
        result = self.run(model)
        assert result.ok, result.summary()
        self._remember(result.version, weights)
        self.over(result, before)
        assert result.path == GOOD_PATH, f"the path is {result.path}"
        assert result.published == "yes"
        assert {row.disposition for row in result.engines} == {Disposition.serving_new}
        expected = dict.fromkeys(self.engines, result.version)
        assert self.sync.servable() == expected, f"servable are {self.sync.servable()}"
        for name, look in self.looks().items():
            assert look.version == result.version
            assert covers(look.tensors, weights), f"{name} does not hold the trainer's bits"
        self._nothing_left()
        return result

    def fails(
        self,
        error: BaseException | type[BaseException],
        *,
        engine: str | None = None,
        phase: str | tuple[str, ...] | None = None,
        bucket: int | None = None,
        model: object | None = None,
        published: str = "no",
    ) -> RoundResult:
        """A round that must fail with ``error`` (the object, or its kind), seen from all sides.

        Of several phases each will do. ``bucket`` may be ``ANY``.
        """
        model = state(self._steps + 1) if model is None else model
        weights = {} if deferred(model) else tensors_of(model)
        before = self._before()
        result = self.run(model)
        assert not result.ok, "the round worked"
        self._explained(result, error, engine=engine, phase=phase, bucket=bucket)
        assert result.published == published, f"published: {result.published}"
        if result.published != "no" or result.serving(Disposition.serving_new):
            self._remember(result.version, weights)
        self.over(result, before)
        return result

    def meets(self, error: BaseException, model: object | None = None) -> RoundResult:
        """A round in which ``error`` is raised somewhere: if it failed, then by that; seen from all sides."""
        model = state(self._steps + 1) if model is None else model
        before = self._before()
        result = self.run(model)
        if not result.ok:
            self._explained(
                result, error, engine=result.culprit, phase=result.failed_in, bucket=result.bucket
            )
            assert result.failed_in is not None, "where it failed is not said"
        self._remember(result.version, tensors_of(model))
        self.over(result, before)
        return result

    def endures(self, model: object, *, more: float = 0.0, free: float = 1.0) -> RoundResult:
        """A round of which nobody knows how it ends, seen from all sides but one.

        If it failed, by what is for the caller to check, who knows what went wrong. Here, no more is seen
        than whether the message has all that the result says.

        Args:
            model: as for ``works``.
            more: seconds beside the deadline for which somebody was stopped.
            free: seconds within which somebody else gets the lock afterwards.
        """
        before = self._before()
        result = self.run(model, more)
        if not result.ok:
            assert result.error is not None, f"it failed, and nothing says why: {result.summary()}"
            self._explained(
                result, result.error, engine=result.culprit, phase=result.failed_in, bucket=result.bucket
            )
        self._remember(result.version, tensors_of(model))
        self.over(result, before, free)
        return result

    def over(self, result: RoundResult, before: _Before, free: float = 1.0) -> None:
        """What holds after every round that is over, good or bad."""
        self._legal(result, before)
        self.lock_is_free(free)
        self._no_orphans(result, before)
        self._honest(result, before)

    # -- looking ------------------------------------------------------------------------------------------

    def looks(self) -> dict[str, Look]:
        """What the engines are now."""
        return {name: engine.look() for name, engine in self.engines.items()}

    def records(self, since: int = 0) -> list[Record]:
        """The records so far."""
        return self.log.records[since:]

    def lock_is_free(self, limit: float = 1.0) -> None:
        """Somebody else gets the lock at once."""
        assert not self.log.leaks, "Released was told while the lock was held"
        if self._own_lock:
            assert self.keeper.taken_by_another(), f"the lock is not free, it is {self.keeper.holder}'s"
        elif self._rival is not None:
            assert taken_by(self._rival, limit), f"nobody else got the lock within {limit:g} s"

    # -- the checks ---------------------------------------------------------------------------------------

    def _before(self) -> _Before:
        return _Before(self.looks(), self.sync.version(), len(self.log.records))

    def _remember(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self.history.setdefault(version, []).append(weights)

    def _legal(self, result: RoundResult, before: _Before) -> None:
        records = [record for record in self.records(before.records) if record.round == result.round]
        steps = replay(record.to_json() for record in records)
        path = [State.Idle.name, *(step.after.state.name for step in steps if step.row.target is not None)]
        assert tuple(path) == result.path, f"the log replays to {path}, the result says {result.path}"
        assert path[-1] == State.Released.name
        late = result.published == "yes" and result.error is not None and result.culprit is not None
        assert result.ok or late or State.Failed.name in path, f"a failed round went {path}"
        assert [record.event for record in records].count("result") == 1

    def _no_orphans(self, result: RoundResult, before: _Before) -> None:
        for row in result.engines:
            engine = self.engines[row.engine]
            engine.settle()
            look = engine.look()
            if row.incarnation not in ("?", look.incarnation):
                assert row.disposition is Disposition.quarantined, f"{row.engine} restarted, and is {row}"
                continue
            if row.disposition is Disposition.quarantined:
                assert row.engine not in self.sync.servable()
                continue  # in a session, if at all, only until its own limit; nobody is sent to it
            assert (look.state, look.in_session, look.paused) == (EngineState.Serving, False, False), (
                f"{row.engine} is {row.disposition.name}, and was left {look.state.name}, "
                f"in session: {look.in_session}, paused: {look.paused}"
            )
            new = row.disposition is Disposition.serving_new
            expected = result.version if new else before.looks[row.engine].version
            assert look.version == expected, f"{row.engine} is {row.disposition.name} with {look.version}"

    def _honest(self, result: RoundResult, before: _Before) -> None:
        for name, look in self.looks().items():
            was = before.looks[name]
            if look.version is not None and was.version is not None and was.incarnation == look.incarnation:
                assert look.version >= was.version, f"{name} fell from {was.version} to {look.version}"
            if look.state is EngineState.Serving and was.incarnation == look.incarnation:
                known = self.history.get(look.version, [])
                assert any(covers(look.tensors, each) for each in known), (
                    f"{name} serves version {look.version} with other bits"
                )
        either = {"yes": (result.version,), "no": (before.published,)}
        expected = either.get(result.published, (before.published, result.version))
        assert self.sync.version() in expected, f"published is {self.sync.version()}, not one of {expected}"

    def _explained(
        self, result: RoundResult, error: BaseException | type[BaseException], *, engine: str | None,
        phase: str | tuple[str, ...] | None, bucket: int | None,
    ) -> None:  # fmt: skip
        if isinstance(phase, tuple) and result.failed_in in phase:
            phase = result.failed_in
        if bucket == ANY:
            bucket = result.bucket
        try:
            result.require()
        except SyncFailed as failure:
            message, cause = str(failure), failure.__cause__
        else:
            raise AssertionError("require() did not raise")
        if isinstance(error, type):
            assert isinstance(cause, error), f"the cause is {cause!r}, not {error.__name__}"
        else:
            assert cause is error, f"the cause is {cause!r}, not {error!r}"
        assert (result.culprit, result.failed_in, result.bucket) == (engine, phase, bucket), (
            f"blamed: {(result.culprit, result.failed_in, result.bucket)}: {message}"
        )
        words = [result.round, f"in {phase}" if phase else None, f"engine {engine}" if engine else None]
        words.append(f"bucket {bucket}" if bucket is not None else None)
        for word in words:
            assert word is None or word in message, f"{word!r} is not in {message!r}"

    def _nothing_left(self) -> None:
        for engine in self.engines.values():
            engine.settle()
        if self._level is None:
            self._level = levels()
            return
        base, lines = self._level, len(self.engines) + 1
        assert eventually(lambda: not levels().above(base, lines)), f"left: {levels().above(base, lines)}"


def tensors_of(model: object) -> dict[str, Tensor]:
    """A copy of what a trainer hands over, under every name it has."""
    if isinstance(model, torch.nn.Module):
        model = model.state_dict()
    weights = TorchWeights.of(model)
    found = dict(weights.tensors)
    found |= {tie.name: found[tie.of] for tie in weights.ties}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def covers(held: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    """Whether every name of the engine has the bits that were sent under it."""
    return held.keys() <= sent.keys() and same(held, {name: sent[name] for name in held})
