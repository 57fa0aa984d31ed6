"""``WeightSync``: joins engines, transport, lock, ledger and handlers, and runs one round at a time.

Rounds run on a thread of their own. The synchronous form waits for it, the overlapped form hands out a
:class:`Pending`, the asynchronous form awaits it; each of them ends in Released before control goes back to
the caller, also when the caller is interrupted or cancelled.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Self

from .backends import Mode
from .books import EngineBooks, Entry
from .conductor import Conductor, Stage
from .fsm import checks
from .fsm.contract import EngineLink, Transport, Weights
from .fsm.errors import SetupError
from .fsm.executors import Executor, Observer
from .fsm.ledger import Ledger, LedgerKeeper
from .fsm.lock import LockKeeper
from .fsm.policy import Policy
from .fsm.results import RoundResult
from .handlers.bridge import LoopBridge
from .handlers.clock import SystemClock
from .handlers.coroutines import Awaiting, AwaitingObserver
from .handlers.inside import refuse_inside
from .handlers.leader import Leader
from .handlers.observers import Observers
from .handlers.rank_barrier import RankBarrier, RankCall
from .handlers.ranks import TrainerRanks
from .handlers.workers import Workers
from .joining import around, engines_for, ledger_for, lock_for, policy_for, sort_handlers, transport_for
from .pending import Pending
from .transport_backends import transports
from .turns import Turns

__all__ = ["Pending", "WeightSync"]


class WeightSync:
    """Hands a trainer's weights to rollout engines, one round at a time.

    Args:
        engines: links to the engines, e.g. ``RayEngine(actor)`` or ``LocalEngine(receiver)``.
        transport: ``"auto"``: by where the engines are, ``"memory"``, ``"shm"`` or ``"collective"``; one of
            these, ``"cuda_ipc"`` or ``"objects"``, or an object that implements ``Transport``.
        policy: what the user decides.
        handlers: executors (``prepare`` and ``clean``) and observers (callables), in their order. What is a
            coroutine function in them runs on an event loop of this ``WeightSync``'s own.
        lock: a lock keeper, or the name of one shared by every trainer of the Ray cluster. By default a
            lock of this ``WeightSync`` alone.
        ledger: a ledger keeper, or the path of a file that keeps the published version over restarts. By
            default the version is kept in this process only.
        ranks: this process as rank 0 of a trainer of several ranks; the others use a ``FollowerSync``.
        owner: how this trainer is called in logs and to those who wait for the lock.
        backends: what becomes of a transport that cannot be used here. ``"warn"``: a line in the log if it is
            broken, none if it is not installed. ``"quiet"``: neither. ``"strict"``: an error, also where
            another transport could take its place. Whoever names it gets the error in any case.

    Raises:
        SetupError: something that is no such part, or parts that do not fit together.
    """

    def __init__(
        self,
        engines: Iterable[EngineLink],
        transport: str | Transport = "auto",
        *,
        policy: Policy | None = None,
        handlers: Sequence[Executor | Observer | Awaiting | AwaitingObserver] = (),
        lock: LockKeeper | str | None = None,
        ledger: LedgerKeeper | str | Path | None = None,
        ranks: TrainerRanks | None = None,
        owner: str | None = None,
        backends: Mode = "warn",
    ) -> None:
        self.policy = policy_for(policy)
        if owner is not None:
            checks.text("WeightSync", "owner", owner)
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        self._books = EngineBooks(engines_for(engines), self.policy.backoff())
        self._transport = transport_for(transport, self.policy, transports(backends))
        self._bridge = LoopBridge()
        executors, observers = sort_handlers(handlers, self._bridge, self.policy)
        self._books.wakes = frozenset(name for each in executors for name in getattr(each, "wakes", ()))
        self._check(list(self._books.wanted.values()))
        self._lock = lock_for(lock, self.policy.lease)
        self._ledger = ledger_for(ledger)
        self._workers = Workers()
        self._observers = Observers(observers)
        self._leader, self._barrier = self._leader_of(ranks), self._barrier_of(ranks)
        if self._barrier is not None:
            executors = around(executors, RankCall(self._barrier), self._barrier)
        stage = Stage(
            policy=self.policy, owner=self.owner, books=self._books, transport=self._transport,
            executors=executors, lock=self._lock, ledger=self._ledger, observers=self._observers,
            workers=self._workers, clock=SystemClock(),
        )  # fmt: skip
        self._turns = Turns(self.policy)
        self._conductor = Conductor(stage, self._turns.numbered, self._leader)
        self._turns.run = self._run
        self._closing = threading.Lock()
        self._ended = False

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
            RoundInProgress: a handler of the round that runs calls this, as with all that waits for one.
        """
        step = self._step_of("on_step_end", step)
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
        if self.policy.when_busy not in ("wait", "refuse"):
            refuse_inside(self._bridge, f"begin with Policy(when_busy={self.policy.when_busy!r})")
        pending = self._turns.pending(self._step_of("begin", step), version)
        with self._for_all_ranks(pending):
            if version is not None:
                pending.version = checks.step_of("begin", "version", version)
            self._turns.enter(pending, model, snapshot=snapshot)
        return pending

    async def round(self, step: int, model: object) -> RoundResult:
        """Hand the weights over, and await the result; never blocks the event loop.

        Cancelling it stops the round and is raised again once the round is Released.
        """
        refuse_inside(self._bridge, "round")
        pending = self._turns.pending(self._step_of("round", step))
        with self._for_all_ranks(pending):
            try:
                while (before := self._turns.try_to_enter(pending, model, snapshot=False)) is not None:
                    await before.over()
            except BaseException as error:
                self._turns.leave(pending, error)
                if pending.queued:  # it was let in just then
                    pending.cancel(error)
                    if isinstance(error, asyncio.CancelledError):
                        with suppress(Exception):
                            await pending
                raise
        return await pending

    # -- membership ------------------------------------------------------------------------------------------

    def add_engine(self, engine: EngineLink) -> None:
        """Have one more engine from the next round on. It is servable when that round has proved it.

        Raises:
            SetupError: it is none, there is one of that name, the transport could not reach it or keep the
                quorum, or this ``WeightSync`` is closed.
        """
        (link,) = engines_for([engine])
        self._check([*self._books.wanted.values(), link])
        self._books.add(link)

    def remove_engine(self, name: str) -> None:
        """Do without an engine from the next round on; a router is not to use it from now on.

        A round that runs goes on with it; its link is closed before the next one.

        Raises:
            SetupError: there is no such engine, it is the last one, or the others are too few for the quorum.
        """
        if name in self._books.wanted and len(self._books.wanted) > 1:
            self._check([link for each, link in self._books.wanted.items() if each != name])
        self._books.remove(name)

    def catch_up(self, step: int, model: object) -> RoundResult:
        """Bring every engine that does not hold the published version to it, apart from the others.

        If ``model`` still has the bytes of the published version, the round asks for those engines alone, and
        the others go on generating. Otherwise, or if nothing is verified, it is a round of all with the next
        version. An engine that rests after failures is not tried. Waits for the round.

        Args:
            step: the trainer's step; only logged.
            model: as for ``on_step_end``.

        Returns:
            The round's result; ``passed_over`` says so if nobody has to catch up.
        """
        refuse_inside(self._bridge, "catch_up")
        step = self._step_of("catch_up", step, "catch up")
        return self._wait_for(self._turns.catching_up(step), model)

    # -- looking ---------------------------------------------------------------------------------------------

    def servable(self) -> dict[str, int]:
        """The engines a router may use now, with their versions: each was asked if it still is who it was.

        Takes at most one engine limit. An engine that is busy with a round counts by its last proven version.
        One that could not be asked anew since a round was over is left out.
        """
        return self._books.vouched(self.policy.limits().engine)

    def engines(self) -> dict[str, Entry]:
        """What the books say of each engine, without asking anybody."""
        return dict(self._books.entries())

    def version(self) -> int | None:
        """The published version; None before the first."""
        return self._ledger.version()

    def ledger(self) -> Ledger:
        """What the version ledger says now, for ``SampleVersions.staleness``."""
        return self._ledger.current()

    # -- ending ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the rounds that were begun, then give back threads, links and endpoints. Idempotent."""
        refuse_inside(self._bridge, "close")
        with self._closing:
            self._close()

    def _close(self) -> None:
        if self._ended:
            return
        self._books.shut()
        self._turns.close()
        if self._leader is not None:
            self._leader.close()
        if self._barrier is not None:
            self._barrier.close()
        self._transport.close()
        for link in self._books.every():
            link.close()
        close = getattr(self._lock, "close", None)  # of a connection; who goes on to use it gets another one
        if close is not None:
            close()
        self._observers.close()
        self._bridge.close()
        self._workers.close()
        self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False

    # -- inside ----------------------------------------------------------------------------------------------

    def _check(self, engines: Sequence[EngineLink]) -> None:
        """Refuse what could not work with these engines, before anything moves."""
        quorum = self.policy.quorum_of(len(engines))
        name = self._transport.name
        far = [link.id for link in engines if not getattr(link, "in_process", True)]
        if far and not self._transport.capabilities.cross_process:
            raise SetupError(
                f"transport {name!r} reaches engines in this process only, and engine {far[0]} is in another "
                "one: use transport='collective'"
            )
        if self._transport.capabilities.in_cluster:
            apart = next((link for link in engines if not _in_cluster(link)), None)
            if apart is not None:
                raise SetupError(
                    f"transport {name!r} reaches Ray actors, and engine {apart.id} is a "
                    f"{type(apart).__name__}, not known to be one: use RayEngine(actor), or "
                    "transport='collective'"
                )
        if quorum < len(engines) and not self._transport.capabilities.survives_loss:
            raise SetupError(
                f"transport {name!r} cannot go on without a participant, so a quorum of {quorum} out of "
                f"{len(engines)} engines would be an empty promise: use "
                "Policy(on_engine_failure='fail') or a transport that survives a loss"
            )

    def _leader_of(self, ranks: TrainerRanks | None) -> Leader | None:
        if ranks is None:
            return None
        checks.kind(
            "WeightSync", "ranks", ranks, TrainerRanks, "TrainerRanks(store, 0, world_size) is needed"
        )
        if ranks.rank:
            raise SetupError(f"rank {ranks.rank} follows: give it FollowerSync(ranks, ...), rank 0 leads")
        if self.policy.when_busy not in ("wait", "block"):
            raise SetupError(
                f"Policy(when_busy={self.policy.when_busy!r}) is decided by one rank alone, and would leave "
                "the others in a wait: use 'wait' or 'block' with ranks"
            )
        return Leader(ranks)

    def _run(self, pending: Pending, weights: Weights) -> RoundResult:
        if self._barrier is not None:
            self._barrier.stopped = lambda: pending.cancelled is not None
        return self._conductor.run(pending, weights)

    def _barrier_of(self, ranks: TrainerRanks | None) -> RankBarrier | None:
        """What the clean-up of every round waits at; bounded by what one executor may take."""
        limits = self.policy.limits()
        return None if ranks is None else RankBarrier(ranks, 0.8 * limits.idle, 0.8 * limits.failed / 4)

    @contextmanager
    def _for_all_ranks(self, pending: Pending) -> Iterator[None]:
        """What keeps this rank from a hand-over keeps all of them from it."""
        try:
            yield
        except BaseException as error:
            if not pending.queued:
                self._refuse(pending.step, pending.kind, error)
            raise

    def _step_of(self, where: str, step: object, kind: str = "hand over") -> int:
        try:
            return checks.step_of(where, "step", step)
        except SetupError as error:
            self._refuse(None, kind, error)
            raise

    def _refuse(self, step: int | None, kind: str, error: BaseException) -> None:
        """Tell the other ranks, in turn: what was begun before is not disturbed."""
        leader = self._leader
        if leader is not None:
            self._turns.in_turn(lambda: leader.refuse(step, kind, error))

    def _hand_over(self, step: int, model: object) -> RoundResult:
        """Begin a round and wait for it; an interrupt at any moment leaves no running round behind."""
        refuse_inside(self._bridge, "a hand-over that is waited for")
        return self._wait_for(self._turns.pending(step), model)

    def _wait_for(self, pending: Pending, model: object) -> RoundResult:
        try:
            with self._for_all_ranks(pending):
                self._turns.enter(pending, model, snapshot=False)
            return pending.wait()
        except BaseException as error:
            if pending.queued and not pending.done:
                pending.stop_and_wait(error)
            raise


def _in_cluster(link: EngineLink) -> bool:
    """Whether an engine is in the trainer's Ray cluster for certain; one of this process is, if that is."""
    return bool(getattr(link, "in_cluster", False) or getattr(link, "in_process", False))
