"""The lock kept by a Ray actor, for trainers in several processes or on several hosts.

``RayLock`` is how a trainer's thread talks to it. All trainers that use one name share one keeper, which is
made by whoever comes first and outlives its trainer; other names are other locks. A wait is cut into
questions of a third of a lease, so that a trainer that dies while it waits is soon taken for dead. On the
keeper's own host they are asked over a line (``line.py``), and by Ray from everywhere else.

A keeper that dies is started again by Ray, on any host. Until then, calls end in ``LockError``; afterwards
the former holder's lease is left to run out before anybody is granted the lock, under an epoch above every
earlier one. For the epoch the keeper needs a memory: a file that is written before each grant and can be
read wherever the keeper may be started, or else the clock: then epochs begin at the milliseconds since
2026, far above what grants could have used up.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from ..fsm import checks
from ..fsm.errors import SetupError
from ..fsm.lock import (
    DEFAULT_LEASE,
    Closed,
    Granted,
    LockError,
    LockStatus,
    Renewed,
    Ticket,
    Waiting,
)
from .futures import begun, copy
from .line import Broken, Kept, Line, connect
from .lock_actor import LockActor
from .lock_line import WORDS, answered, asked
from .ray_reports import report
from .threads import spawn

__all__ = ["RayLock"]

_NAMESPACE = "weightsync"


class RayLock:
    """A ``LockKeeper`` shared by every trainer of the Ray cluster that names it. Every method may block.

    Args:
        name: which lock; other names are other locks.
        lease: seconds for which a grant is good without a renewal; the same for all who use the lock.
        path: a file that keeps the epoch over restarts of the keeper, on storage that every node sees.
        patience: seconds to wait for the keeper beyond what was asked for, by whoever waits in a method. It
            takes some to start. Where a round asks with ``begin``, the round's own limits hold.

    Raises:
        SetupError: one of these is of the wrong kind.
    """

    def __init__(
        self,
        name: str,
        lease: float = DEFAULT_LEASE,
        path: str | Path | None = None,
        *,
        patience: float = 30.0,
    ) -> None:
        checks.text("RayLock", "name", name)
        checks.seconds("RayLock", "lease", lease)
        checks.seconds("RayLock", "patience", patience)
        if path is not None:
            checks.seen_path("RayLock", "path", path)
        self.name, self._lease, self._patience = name, lease, patience
        self._actor = f"lock-{name}"
        self._path = None if path is None else str(Path(path).absolute())
        self._first = threading.Lock()
        self._keeper: Any = None
        self._line: Line | None = None

    @property
    def lease(self) -> float:
        """Seconds for which a grant is good without a renewal."""
        return self._lease

    def request(self, owner: str, round: str, *, ticket_id: str | None = None) -> Ticket:
        """Join the queue."""
        ticket = Ticket(ticket_id or secrets.token_hex(8), owner, round)
        self._ask("request", ticket)
        return ticket

    def enter(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Join the queue and wait, in one question to the keeper."""
        began = time.monotonic()
        self._known()  # a keeper that starts only now takes its time, which is not the lease's
        before = time.monotonic() - began
        stand = max(0.0, min(limit, self._lease / 3))
        answer = self._ask("enter", ticket, stand, limit=stand)
        if isinstance(answer, Granted):
            return replace(answer, waited=before + answer.waited)
        assert isinstance(answer, Waiting)
        return answer

    def wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Block until the lock is this ticket's, for ``limit`` seconds at most."""
        began = time.monotonic()
        while True:
            # The keeper answers for a dead trainer, too, but no longer than it was last asked to.
            before = time.monotonic() - began
            stand = max(0.0, min(limit - before, self._lease / 3))
            answer = self._ask("wait", ticket, stand, limit=stand)
            if isinstance(answer, Granted):
                return replace(answer, waited=before + answer.waited)
            assert isinstance(answer, Waiting)
            if before + stand >= limit:
                return answer

    def renew(self, ticket: Ticket, epoch: int) -> Renewed:
        """Count the lease anew."""
        answer = self._ask("renew", ticket, epoch)
        assert isinstance(answer, Renewed)
        return answer

    def release(self, ticket: Ticket, epoch: int | None) -> Closed:
        """Give the lock back. The answer is evidence that this ticket does not hold it."""
        if epoch is None:
            return self.cancel(ticket)
        answer = self._ask("release", ticket, epoch)
        assert isinstance(answer, Closed)
        return answer

    def cancel(self, ticket: Ticket) -> Closed:
        """Give up a request: a waiting ticket leaves the queue, a grant that crossed is handed back."""
        answer = self._ask("cancel", ticket)
        assert isinstance(answer, Closed)
        return answer

    def begin(self, word: str, ticket: Ticket, *args: float) -> Future[Any] | None:
        """Ask as the method of that name does, without waiting: the future gets what it returns or raises.

        None if there is no line to the keeper. The methods make one.
        """
        line, keeper = self._line, self._keeper
        asking = asked(line, word, ticket, *args) if line is not None and keeper is not None else None
        if asking is None:
            return None
        answer = begun()

        def done(replied: Future[Any]) -> None:
            try:
                answer.set_result(answered(replied.result(), ticket))
            except Kept as kept:  # a refusal, most likely; exceptions travel by Ray
                token = kept.token
                fetching = spawn(
                    "weightsync-lock",
                    self._by_ray,
                    word,
                    lambda: keeper.outcome.remote(token),
                    self._patience,
                )
                fetching.add_done_callback(lambda fetched: copy(fetched, answer))
            except Broken as broken:
                self._keeper = None
                trouble = self._trouble(word, broken)
                trouble.__cause__ = broken
                answer.set_exception(trouble)
            except BaseException as error:  # noqa: BLE001 - it goes to whoever asked
                answer.set_exception(error)

        asking.add_done_callback(done)
        return answer

    def status(self) -> LockStatus:
        """Who holds the lock and who waits."""
        answer = self._ask("status")
        assert isinstance(answer, LockStatus)
        return answer

    def close(self) -> None:
        """Close the connection to the keeper. Whoever asks again gets another one."""
        with self._first:
            self._keeper, line, self._line = None, self._line, None
        if line is not None:
            line.close()

    def check(self) -> None:
        """See that there can be a keeper, before anything depends on it.

        Raises:
            SetupError: Ray does not run in this process.
        """
        if not ray.is_initialized():
            raise SetupError(f"lock {self.name!r} is kept by a Ray actor, and Ray is not running: ray.init()")

    def retire(self, *, force: bool = False) -> None:
        """End the keeper, for everybody who uses this lock; it lasts as long as the cluster otherwise.

        The next keeper knows nothing of this one's grants, but its epochs are above them all.

        Args:
            force: also while somebody holds the lock, or when the keeper does not answer. The next keeper may
                then grant it at once: only for those who know that the holder is gone.

        Raises:
            LockError: the lock is held, or its keeper does not say whether it is.
        """
        if not force and (holder := self.status().holder) is not None:
            raise LockError(
                f"lock {self.name!r} is held by {holder.owner}: retire it when that is over, or, if you know "
                "that it is gone, with force=True"
            )
        self.close()
        with contextlib.suppress(ValueError):  # there is none
            ray.kill(ray.get_actor(self._actor, namespace=_NAMESPACE))

    # -- inside ----------------------------------------------------------------------------------------

    def _ask(self, word: str, *args: Any, limit: float = 0.0) -> Any:
        keeper, patience = self._known(), limit + self._patience
        asking = self.begin(word, *args) if word in WORDS else None
        if asking is None:
            return self._by_ray(word, lambda: getattr(keeper, word).remote(*args), patience)
        try:
            return asking.result(timeout=patience)
        except TimeoutError as error:
            raise self._trouble(word, error) from error

    def _by_ray(self, word: str, ask: Callable[[], Any], patience: float) -> Any:
        try:
            return _answer(ask(), patience)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LockError):
                raise error.cause from error
            raise self._trouble(word, error) from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            if isinstance(error, ray.exceptions.RayActorError):
                self._keeper = None  # if Ray does not start it again, the next call does
            raise self._trouble(word, error) from error

    def _trouble(self, word: str, error: Exception) -> LockError:
        if isinstance(error, TimeoutError) and not isinstance(error, ray.exceptions.RayTaskError):
            what = f"did not answer {word!r} in time"
        elif isinstance(error, Broken) and not error.gone:
            what = f"lost its line before it answered {word!r}: {error}"
        elif isinstance(error, Broken | ray.exceptions.RayActorError):
            what = f"died before it answered {word!r}; it is started again, and whoever waited asks anew"
        else:
            what = f"failed at {word!r}: {report(error)}"
        return LockError(f"the keeper of lock {self.name!r} {what}")

    def _known(self) -> Any:
        with self._first:
            if self._keeper is None:
                keeper = self._found()
                self._check(keeper)
                self._connect(keeper)
                self._keeper = keeper
            return self._keeper

    def _connect(self, keeper: Any) -> None:
        """Make a line, if there can be one."""
        before, self._line = self._line, None
        if before is not None:
            before.close()
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            offer = _answer(keeper.line.remote(), self._patience)
            self._line = None if offer is None else connect(offer)
        if self._line is not None:
            self._line.end_with(self)

    def _found(self) -> Any:
        if not ray.is_initialized():
            raise LockError(f"lock {self.name!r} is kept by a Ray actor, and Ray is not running: ray.init()")
        actor: Any = ray.remote(LockActor)
        return actor.options(
            name=self._actor, namespace=_NAMESPACE, get_if_exists=True, lifetime="detached", max_restarts=-1,
            num_cpus=0,
        ).remote(self._lease, self._path)  # fmt: skip

    def _check(self, keeper: Any) -> None:
        try:
            # Asking again is harmless: a keeper that has just died may be there again in a moment.
            asking = keeper.lease.options(max_task_retries=-1).remote()
            lease = _answer(asking, self._patience)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self._trouble("lease", error) from error
        if lease != self._lease:
            raise LockError(
                f"lock {self.name!r} has a lease of {lease:g} s, but is used here with {self._lease:g} s: "
                f"use the same one, or another name"
            )


def _answer(asked: Any, limit: float) -> Any:
    """Wait for an answer. In an async actor ``ray.get`` complains, also in threads that may well wait."""
    return asked.future().result(timeout=limit)
