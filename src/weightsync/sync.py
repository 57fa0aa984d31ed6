"""``WeightSync``: joins engines, transport, lock, ledger and handlers, and runs one round at a time.

Rounds run on a thread of their own. The synchronous form waits for it, the overlapped form hands out a
:class:`Pending`, the asynchronous form awaits it; each of them ends in Released before control goes back to
the caller, also when the caller is interrupted or cancelled.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from .books import EngineBooks, Entry
from .fsm import checks
from .fsm.contract import EngineLink, Executor, Observer, Transport, Weights
from .fsm.driver import Driver
from .fsm.errors import RoundTimedOut, SetupError
from .fsm.facts import opening
from .fsm.ledger import LedgerKeeper, StaleVersion, VersionBound
from .fsm.lock import LockKeeper
from .fsm.policy import Policy
from .fsm.results import RoundResult
from .fsm.round import Identity, Round
from .fsm.setting import Setting
from .fsm.states import Outcome
from .handlers.clock import SystemClock
from .handlers.crew import Parts
from .handlers.loop import RoundLoop
from .handlers.observers import Observers
from .handlers.workers import Workers
from .joining import (
    engines_for,
    ledger_for,
    lock_for,
    name_of,
    policy_for,
    sort_handlers,
    transport_for,
)
from .pending import Pending
from .turns import Turns

__all__ = ["Pending", "WeightSync"]

_TAKEN = (StaleVersion, VersionBound)
_AHEAD = 1 << 6
"""How far ahead of the newest version a number is chosen at most, when others keep taking the next ones."""


class WeightSync:
    """Hands a trainer's weights to rollout engines, one round at a time.

    Args:
        engines: links to the engines, e.g. ``RayEngine(actor)`` or ``LocalEngine(receiver)``.
        transport: ``"memory"``, ``"collective"``, or an object that implements ``Transport``.
        policy: what the user decides.
        handlers: executors (``prepare`` and ``clean``) and observers (callables), in their order.
        lock: a lock keeper, or the name of one shared by every trainer of the Ray cluster. By default a
            lock of this ``WeightSync`` alone.
        ledger: a ledger keeper, or the path of a file that keeps the published version over restarts. By
            default the version is kept in this process only.
        owner: how this trainer is called in logs and to those who wait for the lock.

    Raises:
        SetupError: something that is no such part, or parts that do not fit together.
    """

    def __init__(
        self,
        engines: Iterable[EngineLink],
        transport: str | Transport = "memory",
        *,
        policy: Policy | None = None,
        handlers: Sequence[Executor | Observer] = (),
        lock: LockKeeper | str | None = None,
        ledger: LedgerKeeper | str | Path | None = None,
        owner: str | None = None,
    ) -> None:
        self.policy = policy_for(policy)
        if owner is not None:
            checks.text("WeightSync", "owner", owner)
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        self._books = EngineBooks(engines_for(engines))
        self._transport = transport_for(transport)
        self._executors, observers = sort_handlers(handlers)
        self._lock = lock_for(lock, self.policy.lease)
        self._ledger = ledger_for(ledger)
        self._run = uuid.uuid4().hex[:8]
        self._clock = SystemClock()
        self._workers = Workers()
        self._observers = Observers(observers)
        self._turns = Turns(self.policy, self._attempts)
        self._closing = threading.Lock()
        self._ended = False
        self._check()

    # -- step hooks ------------------------------------------------------------------------------------------

    def on_train_begin(self, model: object) -> RoundResult:
        """Hand the initial weights over: version 0, or the next one after a restart. Waits for the round."""
        return self._hand_over(0, model)

    def on_step_end(self, step: int, model: object) -> RoundResult | None:
        """Hand the weights over if the policy says so at ``step``; None if it does not. Waits for the round.

        Args:
            step: the trainer's step, from 1.
            model: a module, a mapping or list of named tensors, or a generator of them.

        Raises:
            SetupError: the step is no whole number.
            PlanError: the model has something that cannot be sent.
        """
        step = checks.step_of("on_step_end", "step", step)
        if step % self.policy.every:
            return None
        return self._hand_over(step, model)

    # -- rounds ----------------------------------------------------------------------------------------------

    def begin(
        self, step: int, model: object, *, version: int | None = None, snapshot: bool = True
    ) -> Pending:
        """Begin a round and go on; ``.wait()`` gives its result.

        Args:
            step: the trainer's step; only logged.
            model: a module, a mapping or list of named tensors, or a generator of them.
            version: the number of these weights; by default the next that stands for nothing yet. A number
                that falls, or that stands for other bytes, is refused before the lock is asked for.
            snapshot: take a private copy of the weights first, so that training may change them meanwhile.

        What happens while another round runs, ``Policy.when_busy`` says.

        Raises:
            RoundInProgress: a round is running and the policy refuses a second one.
            SetupError: this ``WeightSync`` is closed, or a number is none.
            PlanError: the model has something that cannot be sent.
        """
        step = checks.step_of("begin", "step", step)
        if version is not None:
            version = checks.step_of("begin", "version", version)
        pending = self._turns.pending(step, version)
        self._turns.enter(pending, model, snapshot=snapshot)
        return pending

    async def round(self, step: int, model: object) -> RoundResult:
        """Hand the weights over, and await the result; never blocks the event loop.

        Cancelling it stops the round and is raised again once the round is Released.
        """
        step = checks.step_of("round", "step", step)
        pending = self._turns.pending(step)
        while (before := self._turns.try_to_enter(pending, model, snapshot=False)) is not None:
            await before.over()
        return await pending

    # -- looking ---------------------------------------------------------------------------------------------

    def servable(self) -> dict[str, int]:
        """The engines a router may use now, with their versions: each was asked if it still is who it was.

        Takes at most one engine limit. An engine that is busy with a round counts by its last proven version.
        """
        self._books.refresh(self.policy.limits().engine, everybody=True)
        return self._books.servable()

    def engines(self) -> dict[str, Entry]:
        """What the books say of each engine, without asking anybody."""
        return dict(self._books.entries())

    def version(self) -> int | None:
        """The published version; None before the first."""
        return self._ledger.version()

    # -- ending ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the rounds that were begun, then give back threads, links and endpoints. Idempotent."""
        with self._closing:
            self._close()

    def _close(self) -> None:
        if self._ended:
            return
        self._turns.close()
        self._transport.close()
        for link in self._books.links.values():
            link.close()
        close = getattr(self._lock, "close", None)  # of a connection; who goes on to use it gets another one
        if close is not None:
            close()
        self._observers.close()
        self._workers.close()
        self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False

    # -- inside ----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuse what could not work, before anything moves."""
        quorum = self.policy.quorum_of(len(self._books.links))
        name = self._transport.name
        far = [link.id for link in self._books.links.values() if not getattr(link, "in_process", True)]
        if far and not self._transport.capabilities.cross_process:
            raise SetupError(
                f"transport {name!r} reaches engines in this process only, and engine {far[0]} is in another "
                "one: use transport='collective'"
            )
        if quorum < len(self._books.links) and not self._transport.capabilities.survives_loss:
            raise SetupError(
                f"transport {name!r} cannot go on without a participant, so a quorum of {quorum} out of "
                f"{len(self._books.links)} engines would be an empty promise: use "
                "Policy(on_engine_failure='fail') or a transport that survives a loss"
            )

    def _hand_over(self, step: int, model: object) -> RoundResult:
        """Begin a round and wait for it; an interrupt at any moment leaves no running round behind."""
        pending = self._turns.pending(step)
        try:
            self._turns.enter(pending, model, snapshot=False)
            return pending.wait()
        except BaseException as error:
            if pending.queued and not pending.done:
                pending.stop_and_wait(error)
            raise

    def _attempts(self, pending: Pending, weights: Weights) -> RoundResult:
        """Run the round; a retry is a new round with a fresh membership and a full resend."""
        attempt = ahead = 1
        while True:
            result = self._one(pending, attempt, weights, ahead)
            self._books.settle(result)
            done = result.outcome is not Outcome.failed  # if not without trouble: the bytes are there
            if done or pending.cancelled is not None:
                return result
            if pending.version is None and isinstance(result.error, _TAKEN) and ahead < _AHEAD:
                # Another trainer took the number while this one waited for the lock. Those who wait with it
                # take the next ones: to be done once it has to be further ahead than they are.
                ahead *= 2
                continue
            if attempt >= self.policy.attempts:
                return result
            attempt += 1

    def _one(self, pending: Pending, attempt: int, weights: Weights, ahead: int = 1) -> RoundResult:
        step, limits, begun = pending.step, self.policy.limits(), self._clock.now()
        engines = len(self._books.links)
        self._books.refresh(
            limits.engine, first=limits.first_contact, spare=engines - self.policy.quorum_of(engines),
            stopped=lambda: pending.cancelled is not None,
        )  # fmt: skip
        begun = max(begun, self._clock.now() - limits.engine)  # a first contact has a limit of its own
        roster = self._books.roster()
        version = self._version_of(pending, weights, limits.idle, ahead)
        self._turns.numbered(pending, version)
        limits = replace(limits, forward=limits.forward - (self._clock.now() - begun))
        facts = opening(
            round=uuid.uuid4().hex[:12],
            version=version,
            roster=roster,
            quorum=self.policy.quorum_of(len(roster)),
            inplace=self._books.inplace(),
            tainted=self._books.tainted(),
        )
        identity = Identity(step, attempt, self.owner)
        setting = Setting(self._run, name_of(self._lock), name_of(self._ledger), limits)
        opened = Round.open(facts, identity, at=self._clock.now(), wall=self._clock.wall(), setting=setting)
        driver = Driver(opened, limits, [executor.name for executor in self._executors], self._clock)
        parts = Parts(
            lock=self._lock, ledger=self._ledger, transport=self._transport, links=roster,
            executors=self._executors, weights=weights, owner=self.owner, step=step, attempt=attempt,
            bucket_bytes=self.policy.bucket_bytes, verify=self.policy.verify == "full",
        )  # fmt: skip
        loop = RoundLoop(driver, parts, workers=self._workers, observers=self._observers, clock=self._clock)
        for engine, error in self._books.unreachable().items():
            loop.lost(engine, error)
        pending.started(loop)
        return loop.run()

    def _version_of(self, pending: Pending, weights: Weights, limit: float, ahead: int) -> int:
        """The number for these weights: the caller's, if the ledger admits it, or a free one."""
        if pending.version is None:
            known = (self._ledger.current().newest, self._books.newest())
            return max((each for each in known if each is not None), default=-1) + ahead
        try:
            digest = self._workers.submit(self._digest, weights).result(timeout=limit)
        except TimeoutError as error:
            raise RoundTimedOut(f"the weights could not be read within {limit:.3g} s") from error
        self._ledger.admit(pending.version, digest)
        return pending.version

    def _digest(self, weights: Weights) -> str:
        """What a version's number is bound to."""
        weights.materialize()
        plan = weights.plan(self.policy.bucket_bytes)
        return weights.digest() if self.policy.verify == "full" else plan.fingerprint
