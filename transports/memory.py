"""The transport for engines in the trainer's own process: one shared buffer, which every engine reads.

Two buffers take turns. While the engines read bucket k, the sender packs bucket k + 1 into the other one; it
packs bucket k + 2 when each engine that remains has let go of bucket k.

**A bucket's data is valid until the next bucket is asked for**, or until the reader leaves: after that its
memory belongs to somebody else. ``MemoryTransport(checked=True)`` overwrites it with 0xFF at that moment, so
that a test of an engine that keeps a view finds rubbish instead of, mostly, the right numbers.

An engine that is fenced is not waited for. Nor is it shown new bytes: if it still holds a view, the sender
leaves that buffer to it and takes a fresh one, at most one for each such engine.

A ticket is the key of an entry in a table of this process. It cannot be guessed, and it is gone when the
round is over, so that an engine that comes late finds nothing; one that was let in finds the session on
every frame.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import final

from ..fsm import checks
from ..fsm.contract import Bucketful, Capabilities, EngineLink, Inlet, Port, Ticket, Weights
from ..fsm.engine_table import Session
from ..fsm.errors import PlanError, PortClosed, StaleSession, TransportError
from ..fsm.plan import Plan
from ..fsm.receipt import Participant
from .bell import Bell
from .buffers import Pair
from .channel import Channel, Frame, Reader
from .packing import pack
from .receptions import Receptions
from .standing import Standing
from .weights import tensors_of

__all__ = ["MemoryTransport", "memory_inlet"]

_NAME = "memory"
_OVER = "the round is over"


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """What a ticket leads to: the channel, and the readers that its engine may be, one a rank."""

    session: Session
    fingerprint: str
    channel: Channel
    readers: tuple[Reader, ...]


_endpoints: dict[str, _Endpoint] = {}
"""By key. Single operations on it are atomic, and nothing else is done with it."""


class _Round:
    """What lives as long as one round."""

    def __init__(self, checked: bool, buffers: Pair) -> None:  # noqa: FBT001 - private
        self.bell = Bell()
        self.channel = Channel(self.bell.ring, checked=checked)
        self.receptions = Receptions(self.bell)
        self.buffers = buffers
        self._readers: dict[Participant, tuple[Reader, ...]] = {}
        self._keys: list[str] = []
        self._released = 0
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether it was cleaned or aborted."""
        return self._ended.is_set()

    def admit(self, engine: Participant, session: Session, fingerprint: str) -> Ticket:
        """An endpoint for ``engine``, and the ticket to it."""
        readers = tuple(self.channel.add(f"engine {engine} rank {rank}") for rank in range(engine.ranks))
        key = secrets.token_urlsafe(24)
        self._readers[engine] = readers
        self._keys.append(key)
        _endpoints[key] = _Endpoint(session, fingerprint, self.channel, readers)
        return Ticket(_NAME, {"key": key, "rank": 0})

    def fence(self, port: Port) -> None:
        """Stop counting on the engines that take no part any more."""
        remaining = port.engines
        for engine, readers in self._readers.items():
            if engine not in remaining or engine in self.receptions.lost:
                for reader in readers:
                    if reader.cut is None:
                        self.channel.cut(reader, "the engine takes no part in the round any more")

    def holding(self, readers: Collection[Reader]) -> list[Participant]:
        """Whose readers these are."""
        return [engine for engine, own in self._readers.items() if any(reader in readers for reader in own)]

    def moved(self) -> bool:
        """Whether any engine let go of something since this was asked last."""
        before, self._released = self._released, self.channel.released
        return self._released != before

    def end(self, why: str) -> None:
        """Wake everybody; nobody finds an endpoint any more."""
        self._ended.set()
        for key in self._keys:
            _endpoints.pop(key, None)
        self.channel.stop(why)
        self.bell.ring()


@final
class MemoryTransport:
    """Sends to engines in this process.

    Args:
        checked: overwrite each bucket when the last engine let go of it, to find engines that keep a view.
    """

    def __init__(self, *, checked: bool = False) -> None:
        checks.flag("MemoryTransport", "checked", checked)
        self._checked = checked
        self._standing = Standing[_Round]()

    @property
    def name(self) -> str:
        """``"memory"``."""
        return _NAME

    @property
    def capabilities(self) -> Capabilities:
        """Everything but aliases and other hosts."""
        return Capabilities(
            stages=True, aliases=False, cross_host=False, survives_loss=True, dtypes=None, cross_process=False
        )

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Make an endpoint for each engine, and start the receiving halves."""
        round = _Round(self._checked, self._standing.buffers(plan.largest))
        self._standing.open(round)
        with suppress(PortClosed):
            for engine, link in engines.items():
                if port.closed or round.ended:
                    break
                ticket = round.admit(engine, port.session, plan.fingerprint)
                round.receptions.start(engine, link, ticket, port)
            round.receptions.look(port)
        if port.closed or round.ended:
            round.end(_OVER)  # the abort may have come before there was anything to abort

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Show every bucket to every engine that remains.

        Raises:
            PlanError: a tensor is no longer what the plan says.
            TransportError: no engine remains, or one holds a bucket until the phase is over.
        """
        round = self._standing.at(port)
        if round is None:
            return
        with suppress(PortClosed):
            for bucket in plan.buckets:
                if not _room(round, bucket.index, port):
                    return
                pack(plan, bucket, tensors_of(weights), round.buffers.octets(bucket.index, bucket.nbytes))
                data = round.buffers.tensor(bucket.index, bucket.nbytes)
                round.channel.publish(Frame(port.session, bucket.index, data))
                port.bucket_sent(bucket.index)
            port.all_sent()

    def collect(self, plan: Plan, port: Port) -> None:
        """Wait for the receipts."""
        round = self._standing.at(port)
        if round is None:
            return
        with suppress(PortClosed):
            round.receptions.collect(port, lambda: round.ended)

    def clean(self) -> None:
        """Remove the endpoints; keep the buffers for the next round if nobody holds them."""
        round = self._standing.end(_OVER)
        if round is not None and round.channel.idle:
            self._standing.keep(round.buffers)

    def abort(self) -> None:
        """Wake sender and engines, and remove the endpoints."""
        self._standing.end("the sender aborted the round")

    def close(self) -> None:
        """Give the buffers back."""
        self.abort()
        self._standing.keep(None)


def _room(round: _Round, index: int, port: Port) -> bool:
    """Wait until the memory for bucket ``index`` is free; False if the round moved on.

    When every engine has left, there is nothing to send, and soon a word on why.
    """
    before = index - 2
    while not (round.ended or port.closed):
        noted = round.bell.rings
        round.receptions.look(port)
        round.fence(port)
        if round.moved():
            port.progress()
        readers = round.channel.readers_of(before)
        if not readers and round.channel.read:
            if round.channel.kept(before):
                round.buffers.abandon(index)
            return True
        port.waiting_for(round.holding(readers))
        if not round.bell.rung(noted, port.limit) and not port.closed:
            names = ", ".join(reader.name for reader in readers)
            why = f"{names} did not let go of bucket {before}" if names else "no engine receives any more"
            raise TransportError(f"bucket {index} cannot be sent: {why}")
    return False


# -- the receiving half -----------------------------------------------------------------------------------


def memory_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The receiving half for one rank of an engine in this process.

    Raises:
        TransportError: the ticket leads nowhere: the round is over, or was never one of this process.
        StaleSession: the ticket belongs to another session.
        PlanError: the sender has another plan.
    """
    endpoint = _endpoints.get(str(ticket.values.get("key")))
    if endpoint is None:
        raise TransportError(
            "this ticket leads nowhere: its round is over, or its sender is in another process"
        )
    rank = ticket.values.get("rank", 0)
    if type(rank) is not int or not 0 <= rank < len(endpoint.readers):
        raise TransportError(
            f"this ticket is for {len(endpoint.readers)} ranks, and none of them is {rank!r}"
        )
    if endpoint.session != session:
        raise StaleSession(_stale(endpoint.readers[rank], endpoint.session, session))
    if endpoint.fingerprint != plan.fingerprint:
        raise PlanError(f"{endpoint.readers[rank].name} was opened with another plan than is being sent")
    return _MemoryInlet(endpoint.channel, endpoint.readers[rank], session, plan, limit)


def _stale(reader: Reader, theirs: Session, mine: Session) -> str:
    return (
        f"{reader.name} refuses a frame of round {theirs.round} (epoch {theirs.epoch}): its session is round "
        f"{mine.round} (epoch {mine.epoch})"
    )


class _MemoryInlet:
    def __init__(self, channel: Channel, reader: Reader, session: Session, plan: Plan, limit: float) -> None:
        self._channel, self._reader = channel, reader
        self._session, self._plan, self._limit = session, plan, limit

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """The buckets in order; each is valid until the next one is asked for."""
        self._channel.enter(self._reader)
        try:
            yield self._frames()
        finally:
            self._channel.let_go(self._reader)
            self.close()

    def close(self) -> None:
        """Stop: no further bucket comes. What was handed out stays valid until the context is left."""
        self._channel.cut(self._reader, "it stopped receiving")

    def _frames(self) -> Iterator[Bucketful]:
        for bucket in self._plan.buckets:
            frame = self._channel.take(self._reader, bucket.index, self._limit)
            if frame.session != self._session or frame.index != bucket.index:
                raise StaleSession(_stale(self._reader, frame.session, self._session))
            yield Bucketful(frame.index, frame.data)
            del frame
        self._channel.let_go(self._reader)
