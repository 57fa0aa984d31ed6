"""The keeper of a lock as a Ray actor: a ``LockBook``, and time.

What takes time (waiting, the disk) is on one event loop. What does not is done by whoever asks, on that loop
or on a thread of the line, one at a time: nothing in the book waits for anything. Waiters are woken by what
happens, and by the next lease in the book that runs out; nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ray

from ..fsm.lock import (
    Closed,
    Granted,
    LockBook,
    LockError,
    LockStatus,
    Notice,
    Ticket,
    TicketClosed,
    Waiting,
    answer_to,
)
from .line_server import LineServer
from .lock import EpochFile, Refusals, clock_epoch
from .lock_line import carrier

__all__ = ["LockActor"]

_LOGGER = logging.getLogger("weightsync")
_Move = Callable[[LockBook, float], tuple[LockBook, tuple[Notice, ...]]]


class LockActor:
    """The keeper. Made by ``RayLock``. Words come by Ray on its loop, and over the line on threads."""

    def __init__(self, lease: float, path: str | None) -> None:
        self._epochs = None if path is None else EpochFile(path)
        self._claimed = path is None
        # A file is read by whoever first wants the lock, who is then told if it cannot be. Until then the
        # book is at its ceiling, and grants nothing.
        epoch = clock_epoch() if path is None else 0
        not_before = time.monotonic() + lease if _restarted() else -math.inf
        book = LockBook.restore(epoch, lease=lease, not_before=not_before)
        self._book = book if path is None else replace(book, ceiling=epoch)
        self._disk = asyncio.Lock()
        self._news = asyncio.Event()
        self._waiters = 0
        self._turn = threading.RLock()
        self._refusals = Refusals()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: LineServer | None = None

    async def line(self) -> list[Any] | None:
        """Where trainers on this host find the line."""
        if self._line is None:
            try:
                self._loop = asyncio.get_running_loop()
                self._line = LineServer(carrier(self, self._loop), prompt=True)
            except OSError as error:
                _LOGGER.debug("line: there can be none here, questions come by Ray: %s", error)
                return None
        return self._line.offer

    async def outcome(self, token: str) -> Any:
        """What a question over the line came to, if that cannot be told there."""
        if self._line is None:
            raise LockError("nothing was asked over a line here")
        return self._line.outcome(token)

    async def lease(self) -> float:
        """Seconds for which a grant is good without a renewal."""
        return self._book.lease

    async def request(self, ticket: Ticket) -> None:
        """Join the queue."""
        self._move(lambda book, now: book.request(ticket, now))

    async def enter(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Join the queue, and wait."""
        await self.request(ticket)
        return await self.wait(ticket, limit)

    async def wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Answer when the lock is this ticket's, or after ``limit`` seconds."""
        with self._awaited():
            return await self._wait(ticket, limit)

    async def _wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        asked = time.monotonic()
        while True:
            # Read before the book reads it: what is counted twice would end the holder's lease too late.
            waited = time.monotonic() - asked
            answer = self._ask(ticket, lambda book, now: book.poll(ticket.id, now))
            if isinstance(answer, Granted):
                return replace(answer, waited=waited)
            if isinstance(answer, Closed):
                raise TicketClosed(f"{ticket} is {answer.how.value} and will not be granted; request anew")
            if self._book.exhausted():
                await self._reserve()
            elif waited < limit:
                await self._something(limit - waited)
            else:
                assert isinstance(answer, Waiting)
                return answer

    async def renew(self, ticket: Ticket, epoch: int) -> Notice:
        """Count the lease anew."""
        return self.renewed(ticket, epoch)

    async def release(self, ticket: Ticket, epoch: int) -> Notice:
        """Give the lock back."""
        return self.released(ticket, epoch)

    async def cancel(self, ticket: Ticket) -> Notice:
        """Give up a request."""
        return self.cancelled(ticket)

    async def status(self) -> LockStatus:
        """Who holds the lock and who waits."""
        self._move(LockBook.expire)
        return replace(self._book.status(time.monotonic()), refused=self._refusals.count)

    # -- at once, from any thread ----------------------------------------------------------------------

    def granted(self, ticket: Ticket, *, join: bool) -> Granted | None:
        """The grant of this ticket, if nothing has to be waited for."""
        if join:
            self._move(lambda book, now: book.request(ticket, now))
        answer = self._ask(ticket, lambda book, now: book.poll(ticket.id, now))
        return answer if isinstance(answer, Granted) else None

    def renewed(self, ticket: Ticket, epoch: int) -> Notice:
        """Count the lease anew."""
        return self._ask(ticket, lambda book, now: book.renew(ticket.id, epoch, now))

    def released(self, ticket: Ticket, epoch: int) -> Notice:
        """Give the lock back."""
        answer = self._ask(ticket, lambda book, now: book.release(ticket.id, epoch, now))
        with self._turn:
            self._refusals.released(answer, epoch)
        return answer

    def cancelled(self, ticket: Ticket) -> Notice:
        """Give up a request."""
        with self._turn, self._refusals.watched():
            return answer_to(ticket.id, self._move(lambda book, now: book.cancel(ticket, now)))

    # -- inside ----------------------------------------------------------------------------------------

    def _ask(self, ticket: Ticket, move: _Move) -> Notice:
        with self._turn:
            # What time brings stays, even if the move itself is refused.
            self._move(LockBook.expire)
            with self._refusals.watched():
                self._book.recognise(ticket)
                return answer_to(ticket.id, self._move(move))

    def _move(self, move: _Move) -> tuple[Notice, ...]:
        with self._turn:
            self._book, notices = move(self._book, time.monotonic())
            # Who comes to wait after this will look at the book as it is now.
            ring = self._waiters and any(isinstance(notice, Granted | Closed) for notice in notices)
        if not ring:
            return notices
        if self._loop is None:  # everything is on it
            self._ring()
        else:  # it comes after whatever the loop is doing, so nobody who has looked misses it
            self._loop.call_soon_threadsafe(self._ring)
        return notices

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[None]:
        """Somebody waits for news, from before the first look on."""
        with self._turn:
            self._waiters += 1
        try:
            yield
        finally:
            with self._turn:
                self._waiters -= 1

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _something(self, limit: float) -> None:
        """Wait until something happens, or the next lease in the book is over."""
        expiry = self._book.next_expiry()
        pause = limit if expiry is None else min(limit, max(0.0, expiry - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), pause)

    async def _reserve(self) -> None:
        """Have the next epoch in the file. The loop goes on meanwhile, with renewals and releases."""
        async with self._disk:
            if self._epochs is None or not self._book.exhausted():
                return
            if not self._claimed:
                epoch = await asyncio.to_thread(self._epochs.claim)
                with self._turn:
                    self._book = replace(self._book, epoch=epoch, ceiling=epoch)
                self._claimed = True
            epoch = self._book.epoch + 1
            await asyncio.to_thread(self._epochs.reserve, epoch)
            with self._turn:
                self._book = replace(self._book, ceiling=epoch)


def _restarted() -> bool:
    """Whether this is not the keeper's first life.

    Ray's answer goes by a property of its own that it deprecates, and it says so to whoever reads its output.
    No other public answer does without a dashboard.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
