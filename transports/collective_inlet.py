"""The receiving half of the collective transport: one rank of an engine, for one session.

A rank joins the trainer's hub, makes its side of the group when it is told that all are there, and then
takes part in one broadcast after the other: it says that it is ready, waits for the word, and receives into
a buffer of its own, which it hands out and uses again for the next bucket.

Whatever ends it, an error of the engine too, closes its side of the group, so that nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from ..fsm.contract import Bucketful, Inlet, Ticket
from ..fsm.engine_table import Session
from ..fsm.errors import PlanError, TransportError
from ..fsm.plan import Plan
from .bell import Bell
from .gloo import FORMING, Group, patience
from .spoke import Spoke

__all__ = ["NAME", "collective_inlet"]

NAME = "collective"


@dataclass(frozen=True, slots=True)
class _Seat:
    """What a ticket says, checked."""

    rank: int
    size: int
    host: str = ""
    port: int = 0
    secret: str = ""


def collective_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The receiving half for one rank of an engine.

    An engine of several ranks puts the number of each, from 0, into the ticket's values as ``rank``.

    Raises:
        PlanError: the sender has another plan.
        TransportError: the ticket does not say what it has to.
    """
    fingerprint = ticket.values.get("fingerprint")
    if fingerprint != plan.fingerprint:
        raise PlanError(
            f"the sender's plan ({str(fingerprint)[:12]}) is not the one that was opened "
            f"({plan.fingerprint[:12]}); nothing was received"
        )
    return _CollectiveInlet(_seat(ticket, plan), session, plan, limit)


def _seat(ticket: Ticket, plan: Plan) -> _Seat:
    def value(name: str, kind: type[int | str]) -> Any:
        found = ticket.values.get(name)
        if type(found) is not kind:
            raise TransportError(f"the ticket's {name!r} is {found!r}, not a {kind.__name__}")
        return found

    rank, size = value("first", int) + value("rank", int), value("size", int)
    if not 0 < rank < size:
        raise TransportError(f"the ticket is for rank {rank}, and there are ranks 1 to {size - 1}")
    if not plan.largest:
        return _Seat(rank, size)
    return _Seat(rank, size, value("host", str), value("port", int), value("secret", str))


@final
class _CollectiveInlet:
    def __init__(self, seat: _Seat, session: Session, plan: Plan, limit: float) -> None:
        self._seat, self._session, self._plan, self._limit = seat, session, plan, limit
        self._bell = Bell()
        self._spoke = Spoke(seat.rank, limit, self._bell.ring)
        self._lock = threading.Lock()
        self._forming = self._closing = self._complete = False

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """The buckets in order; each is valid until the next one is asked for."""
        if not self._plan.largest:
            nothing = torch.empty(0, dtype=torch.uint8)
            yield (Bucketful(bucket.index, nothing) for bucket in self._plan.buckets)
            return
        spoke, seat, group = self._spoke, self._seat, None
        try:
            spoke.join(seat.host, seat.port, seat.secret, self._plan.fingerprint)
            self._wait("group", lambda: spoke.forming)
            group = self._group()
            self._wait("group", lambda: spoke.formed and group.formed)
            yield self._frames(group)
            if self._complete:
                spoke.done()
            else:
                spoke.leave("it stopped before the last bucket")
        except BaseException as error:
            if group is not None:  # the others can still be connecting
                self._bell.wait(lambda: spoke.formed or spoke.stopped, FORMING)
            spoke.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            if group is not None:
                group.close()
            spoke.close()

    def close(self) -> None:
        """Stop: no further bucket comes, and whoever waits for one is woken."""
        with self._lock:
            self._closing = True
            forming = self._forming and not self._spoke.formed
        if not forming:  # otherwise the receiving thread leaves as soon as it may
            self._spoke.leave("it was told to stop receiving")
            self._spoke.stop("it was told to stop receiving")
        self._bell.ring()

    def _group(self) -> Group:
        spoke, seat, session = self._spoke, self._seat, self._session
        with self._lock:
            if self._closing:
                raise TransportError(f"rank {spoke.rank} makes no group: it was told to stop receiving")
            self._forming = True
        return Group(
            spoke.table, spoke.publish, name=f"{session.round}/{session.epoch}", rank=seat.rank,
            size=seat.size, host=spoke.host, limit=patience(self._plan), ring=self._bell.ring,
            connected=spoke.connected,
        )  # fmt: skip

    def _frames(self, group: Group) -> Iterator[Bucketful]:
        buffer = torch.empty(self._plan.largest, dtype=torch.uint8)
        for bucket in self._plan.buckets:
            view = buffer[: bucket.nbytes]
            if bucket.nbytes:
                self._receive(group, bucket.index, view)
            yield Bucketful(bucket.index, view)
        self._complete = True

    def _receive(self, group: Group, bucket: int, view: torch.Tensor) -> None:
        spoke, what = self._spoke, f"bucket {bucket}"
        spoke.ready(bucket)  # which also says that the view of the bucket before is not needed any more
        self._wait(what, lambda: spoke.going >= bucket)
        operation = group.broadcast(view)
        self._wait(what, lambda: operation.done)
        if operation.error is not None:
            why = spoke.stopped or operation.error
            raise TransportError(f"rank {spoke.rank} did not get {what}: {why}") from operation.error

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + self._limit
        while True:
            noted = self._bell.rings
            if ready():
                return
            why = self._spoke.stopped or ("it was told to stop receiving" if self._closing else None)
            if why:
                raise TransportError(f"rank {self._spoke.rank} gets no {what}: {why}")
            if not self._bell.rung(noted, end - time.monotonic()):
                raise TransportError(
                    f"rank {self._spoke.rank} waited {self._limit:g} s for its {what}, and nothing came"
                )
