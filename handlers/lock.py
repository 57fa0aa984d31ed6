"""The lock kept in this process: a ``LockBook``, a condition to wait on, and a file for the epoch.

The book decides, this module waits. All calls may come from any thread. A waiter sleeps until the book gives
it the lock, until the next lease in the book runs out, or until it is time to tell the book that it is still
there; nothing polls. A holder that dies costs the others what is left of its lease.

With a ``path``, the epoch goes on above every earlier one after a restart. It is written before it is
granted: whoever wants the lock reserves the next epoch in the file first, usually while somebody else still
holds, so that neither a hand-over nor a renewal waits for the disk. The file also names the keeper. One that
finds another keeper's name there has been replaced, as happens to a process that was stopped and continues
after its successor has started: it grants nothing any more.

Only the threads of one process are kept apart, not two processes with the same path. For trainers in several
processes the keeper is an actor.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..fsm import checks
from ..fsm.lock import (
    DEFAULT_LEASE,
    Closed,
    Ending,
    Granted,
    LockBook,
    LockError,
    LockStatus,
    Notice,
    Renewed,
    Ticket,
    TicketClosed,
    Waiting,
    answer_to,
)
from . import durable

__all__ = ["EpochFile", "EpochNotKept", "LocalLock", "Refusals", "clock_epoch"]

_LOGGER = logging.getLogger("weightsync")

_SCHEMA = 1
_LIMIT = 4096
_YEAR_2026 = 1_767_225_600.0
_Move = Callable[[LockBook, float], tuple[LockBook, tuple[Notice, ...]]]


def clock_epoch() -> int:
    """An epoch above every earlier one, for a keeper without a memory: milliseconds since 2026.

    Grants, which count by one, cannot have used up what the clock has gone on since.
    """
    return max(0, int((time.time() - _YEAR_2026) * 1000))


class Refusals:
    """Counts what a keeper refuses, and logs it. Called with the book's lock held."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Whatever is refused inside is counted, logged, and raised."""
        try:
            yield
        except LockError as error:
            self._refused(str(error))
            raise

    def released(self, answer: Notice, asked: int) -> None:
        """The answer to a release: one that came after the grant had ended gave nothing back."""
        if isinstance(answer, Closed) and answer.how is not Ending.RELEASED:
            self._refused(
                f"{answer.ticket} gives epoch {asked} back too late: it is {answer.how.value}, and whoever "
                f"holds the lock now keeps it"
            )

    def _refused(self, why: str) -> None:
        self.count += 1
        _LOGGER.warning("lock: refused: %s", why)


class EpochNotKept(LockError):
    """The epoch cannot be read from or written to its file, so nothing can be granted."""


class EpochFile:
    """The highest epoch that was ever handed out, and the keeper that may hand out the next."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self._keeper = secrets.token_hex(8)

    def claim(self) -> int:
        """Become the keeper of this file. Returns the epoch to go on above."""
        try:
            with durable.exclusively(self.path):
                epoch, _ = self._read()
                self._write(epoch)
        except OSError as error:
            raise EpochNotKept(f"cannot keep the lock's epoch in {self.path}: {error}") from error
        return epoch

    def reserve(self, epoch: int) -> None:
        """Write down an epoch that is about to be granted."""
        try:
            with durable.exclusively(self.path):
                _, keeper = self._read()
                if keeper != self._keeper:
                    raise EpochNotKept(
                        f"this keeper of the lock was replaced by another one that uses {self.path}; "
                        f"it grants nothing any more"
                    )
                self._write(epoch)
        except OSError as error:
            raise EpochNotKept(f"cannot write epoch {epoch} of the lock to {self.path}: {error}") from error

    def _read(self) -> tuple[int, str]:
        content = durable.read(self.path, _LIMIT)
        if content is None:
            return 0, ""
        try:
            match json.loads(content):
                case {"schema": 1, "epoch": int(epoch), "keeper": str(keeper)} if (
                    type(epoch) is int and epoch >= 0
                ):
                    return epoch, keeper
        except (ValueError, RecursionError):
            pass
        raise EpochNotKept(
            f"{self.path} is not an epoch file of schema {_SCHEMA}; restore it, or remove it if no engine "
            f"that has seen an epoch is still running"
        )

    def _write(self, epoch: int) -> None:
        record = {"schema": _SCHEMA, "epoch": epoch, "keeper": self._keeper}
        durable.replace(self.path, json.dumps(record).encode() + b"\n")


class LocalLock:
    """A ``LockKeeper`` for the threads of this process.

    Leases run on ``now``. With a clock that is turned by hand, ``expire`` makes the lock look at it. Without
    a file, ``epoch`` is what the grants begin above: by default ``clock_epoch()``, since engines and a ledger
    remember an earlier life of this trainer.

    Raises:
        SetupError: one of these is of the wrong kind.
        EpochNotKept: the file cannot be kept.
    """

    def __init__(
        self,
        lease: float = DEFAULT_LEASE,
        *,
        path: str | Path | None = None,
        epoch: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        checks.seconds("LocalLock", "lease", lease)
        if epoch is not None:
            checks.step_of("LocalLock", "epoch", epoch)
        checks.called("LocalLock", "now", now)
        if path is not None:
            checks.seen_path("LocalLock", "path", path)
        self._now = now
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._refusals = Refusals()
        self._epochs = None if path is None else EpochFile(path)
        own = f"local-{secrets.token_hex(4)}"
        self.name = own if self._epochs is None else durable.name_of(self._epochs.path)
        """How it is called in logs: the same for all rounds whose epochs can be compared."""
        if self._epochs is not None:
            epoch = self._epochs.claim()
        elif epoch is None:
            epoch = clock_epoch()
        self._book = replace(
            LockBook.restore(epoch, lease=lease), ceiling=None if self._epochs is None else epoch
        )

    @property
    def lease(self) -> float:
        """Seconds for which a grant is good without a renewal."""
        return self._book.lease

    def request(self, owner: str, round: str, *, ticket_id: str | None = None) -> Ticket:
        """Join the queue."""
        ticket = Ticket(ticket_id or secrets.token_hex(8), owner, round)
        with self._changed:
            self._move(lambda book, now: book.request(ticket, now))
        return ticket

    def enter(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Join the queue with this ticket, and wait."""
        self.request(ticket.owner, ticket.round, ticket_id=ticket.id)
        return self.wait(ticket, limit)

    def wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Block until the lock is this ticket's, for ``limit`` seconds at most."""
        asked = self._now()
        # The limit is real waiting, whatever clock the leases run on.
        end = time.monotonic() + limit
        while True:
            with self._changed:
                # Read before the book reads it: what is counted twice would end the holder's lease too late.
                waited = self._now() - asked
                answer = self._poll(ticket)
                left = end - time.monotonic()
                if isinstance(answer, Granted):
                    return replace(answer, waited=waited)
                reserved = not self._book.exhausted()
                if reserved and left <= 0:
                    return answer
                if reserved:
                    self._changed.wait(min(left, self._pause()))
            if not reserved:
                self._reserve()

    def renew(self, ticket: Ticket, epoch: int) -> Renewed:
        """Count the lease anew."""
        with self._changed:
            answer = self._ask(ticket, lambda book, now: book.renew(ticket.id, epoch, now))
        assert isinstance(answer, Renewed)
        return answer

    def release(self, ticket: Ticket, epoch: int | None) -> Closed:
        """Give the lock back. The answer is evidence that this ticket does not hold it."""
        if epoch is None:
            return self.cancel(ticket)
        with self._changed:
            answer = self._ask(ticket, lambda book, now: book.release(ticket.id, epoch, now))
            self._refusals.released(answer, epoch)
        assert isinstance(answer, Closed)
        return answer

    def cancel(self, ticket: Ticket) -> Closed:
        """Give up a request: a waiting ticket leaves the queue, a grant that crossed is handed back."""
        with self._changed, self._refusals.watched():
            answer = answer_to(ticket.id, self._move(lambda book, now: book.cancel(ticket, now)))
        assert isinstance(answer, Closed)
        return answer

    def status(self) -> LockStatus:
        """Who holds the lock and who waits."""
        with self._changed:
            self._move(LockBook.expire)
            return replace(self._book.status(self._now()), refused=self._refusals.count)

    def expire(self) -> None:
        """Look at the clock: needed only after turning one by hand."""
        with self._changed:
            self._move(LockBook.expire)

    # Everything below is called with the condition held, except _reserve.

    def _poll(self, ticket: Ticket) -> Granted | Waiting:
        answer = self._ask(ticket, lambda book, now: book.poll(ticket.id, now))
        if isinstance(answer, Closed):
            raise TicketClosed(f"{ticket} is {answer.how.value} and will not be granted; request anew")
        assert isinstance(answer, Granted | Waiting)
        return answer

    def _ask(self, ticket: Ticket, move: _Move) -> Notice:
        # What time brings stays, even if the move itself is refused.
        self._move(LockBook.expire)
        with self._refusals.watched():
            self._book.recognise(ticket)
            return answer_to(ticket.id, self._move(move))

    def _move(self, move: _Move) -> tuple[Notice, ...]:
        self._book, notices = move(self._book, self._now())
        if any(isinstance(notice, Granted | Closed) for notice in notices):
            self._changed.notify_all()
        return notices

    def _pause(self) -> float:
        """How long to sleep: to the next expiry, but not so long that this waiter is taken for dead."""
        expiry = self._book.next_expiry()
        longest = self._book.lease / 3
        return longest if expiry is None else min(longest, max(0.0, expiry - self._now()))

    def _reserve(self) -> None:
        """Have the next epoch in the file. Takes its own lock: a slow disk must not delay a renewal."""
        assert self._epochs is not None
        with self._writing:
            # Only this method raises the ceiling, so the epoch cannot pass it meanwhile.
            if self._book.exhausted():
                epoch = self._book.epoch + 1
                self._epochs.reserve(epoch)
                with self._changed:
                    self._book = replace(self._book, ceiling=epoch)
