"""The receiving half of the object store transport: one rank of an engine, for one session.

A rank asks the trainer's board for one bucket after the other. To ask for the next one says that it let go
of the one before. It gets a reference, and reads the bucket where it lies in the store of its node: a
read-only array, which many ranks see at once and none can write (``shield.py``). Whoever keeps a view of it
keeps its memory, too, and finds the same bytes in it for as long as it likes; but the store has that much
less room.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..fsm.contract import Bucketful, Inlet, Ticket
from ..fsm.engine_table import Session
from ..fsm.errors import PlanError, SetupError, StaleSession, TransportError
from ..fsm.plan import Plan
from .bell import Bell
from .board import Key
from .octets import Octets
from .shield import MARGIN, shielded

if TYPE_CHECKING:
    from .object_store import BoardLink

__all__ = ["NAME", "WINDOW", "framed", "objects_inlet", "window"]

NAME = "objects"

WINDOW = 2
"""How many buckets are in the store at a time: one is put while the other is read."""


def framed(nbytes: int) -> int:
    """The bytes of the object that a bucket of so many lies in: with margins, so that a shield covers it."""
    return nbytes + 2 * MARGIN if nbytes else 0


def window(plan: Plan) -> int:
    """The bytes that are in the store at a time: the most that neighbouring buckets have together."""
    sizes = [framed(bucket.nbytes) for bucket in plan.buckets]
    return max((sum(sizes[first : first + WINDOW]) for first in range(len(sizes))), default=0)


def objects_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The receiving half for one rank of an engine, in a process that is in the trainer's Ray cluster.

    Raises:
        PlanError: the sender has another plan.
        SetupError: this process is not in a Ray cluster.
        TransportError: the ticket does not say what it has to, or leads nowhere; or the store is too small.
    """
    fingerprint = ticket.values.get("fingerprint")
    if fingerprint != plan.fingerprint:
        raise PlanError(
            f"the sender's plan ({str(fingerprint)[:12]}) is not the one that was opened "
            f"({plan.fingerprint[:12]}); nothing was received"
        )
    board, key, rank = (ticket.values.get(name) for name in ("board", "key", "rank"))
    if not isinstance(board, str) or not isinstance(key, str) or type(rank) is not int:
        raise TransportError("the ticket says nothing of a board, a key and a rank, so it leads nowhere")
    try:
        from .object_store import board_called, check_ready, check_room
    except ImportError as error:
        raise SetupError(f"transport 'objects' needs Ray in the engine's process: {error}") from error
    check_ready("the receiving half of transport 'objects'")
    check_room(window(plan))
    return _ObjectsInlet(board_called(board), (key, rank), session, plan, limit)


@final
class _ObjectsInlet:
    def __init__(self, board: BoardLink, key: Key, session: Session, plan: Plan, limit: float) -> None:
        self._board, self._key, self._rank = board, key, key[1]
        self._session, self._plan, self._limit = session, plan, limit
        self._bell = Bell()
        self._closed = ""
        self._done = 0

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """The buckets in order; each is valid until the next one is asked for."""
        self._check(self._ask("first bucket", "enter"))
        frames = self._frames()
        try:
            yield frames
        finally:
            frames.close()  # which lets go of the bucket that it gave last
            self.close()

    def close(self) -> None:
        """Stop: no further bucket comes. What was handed out stays valid."""
        self._closed = self._closed or "it stopped receiving"
        self._board.tell("leave", *self._key, self._done, self._closed)
        self._bell.ring()

    def _frames(self) -> Generator[Bucketful, None, None]:
        for bucket in self._plan.buckets:
            refs = self._take(bucket.index)
            whole = self._view(refs, bucket.index) if refs else _nothing()
            if whole.nbytes != framed(bucket.nbytes):
                raise TransportError(
                    f"bucket {bucket.index} arrived with {whole.nbytes} bytes, not {framed(bucket.nbytes)}"
                )
            with shielded(whole):
                yield Bucketful(bucket.index, whole[MARGIN:-MARGIN] if refs else whole)
            del refs, whole
            self._done = bucket.index + 1

    def _view(self, refs: list[Any], index: int) -> Octets:
        from .object_store import fetch

        try:
            return fetch(refs, self._limit, lambda: self._closed)
        except TransportError as error:
            raise TransportError(f"rank {self._rank} gets no bucket {index}: {error}") from error

    def _take(self, index: int) -> list[Any]:
        """Let go of the bucket before, and wait for this one."""
        what = f"bucket {index}"
        session, number, refs = self._ask(what, "take", index)
        self._check(session)
        if number != index:
            raise TransportError(f"rank {self._rank} asked for {what}, and was shown bucket {number}")
        return list(refs)

    def _ask(self, what: str, method: str, *values: Any) -> Any:
        answer = self._board.call(method, *self._key, *values)
        answer.add_done_callback(lambda _: self._bell.ring())
        self._wait(answer, what)
        why, shown = answer.result()
        if why:
            raise TransportError(f"rank {self._rank} gets no {what}: {why}")
        return shown

    def _wait(self, answer: Future[Any], what: str) -> None:
        end = time.monotonic() + self._limit
        while True:
            noted = self._bell.rings
            if self._closed:
                raise TransportError(f"rank {self._rank} gets no {what}: {self._closed}")
            if answer.done():
                return
            if not self._bell.rung(noted, end - time.monotonic()):
                raise TransportError(
                    f"rank {self._rank} waited {self._limit:g} s for {what}, and nothing came"
                )

    def _check(self, told: Any) -> None:
        mine = self._session
        if told != [mine.round, mine.epoch, mine.version]:
            raise StaleSession(
                f"rank {self._rank} refuses a bucket of {told}: its session is round {mine.round} (epoch "
                f"{mine.epoch})"
            )


def _nothing() -> Octets:
    nothing = np.empty(0, dtype=np.uint8)
    nothing.flags.writeable = False
    return nothing
