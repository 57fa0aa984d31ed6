"""The trainer's end of what is said beside a collective: who is there, who is ready, who left.

A collective knows its ranks by number, blocks until each of them takes part, and says of one that does not
only that something timed out. So every rank keeps a connection to the trainer as well. Over it the ranks
find each other, say that they are ready for a bucket, and are told to go ahead; a rank that fails says why,
and one that is killed is noticed at once, because its connection closes.

    hub                    rank                     about
    challenge(nonce)
                           join(rank, nonce, ...)   a proof that it knows the secret, and its plan
    welcome(proof)                                  and so does the hub
    form                                            all are there: make the group
                           set(key, value)          how to connect to this rank
    set(key, value)                                 the same of all ranks, when everybody has said it
    formed                 connected                made its side of the group; and everybody has
                           ready(bucket)            let go of the bucket before, and waits for this one
    go(bucket)                                      everybody is ready: it is sent now
                           done                     holds every bucket, and closes its connection
    stop(why)              left(why)                an abort, by either end

To make the group cannot be broken off without harm (``gloo.py`` says why). So no rank begins before all is
known that it needs, and when a round ends meanwhile, the ranks get a moment to finish it all the same.

One thread serves all connections; it ends with ``close``.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from ..fsm.errors import PlanError, SetupError, TransportError, WeightSyncError
from .receptions import Leave
from .switchboard import Switchboard
from .table import Table
from .wire import Message, Wire, joining, proof
from .wire import field as fetch

__all__ = ["Hub"]


@dataclass(slots=True, eq=False)
class _Peer:
    wire: Wire
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    rank: int | None = None
    ready: int = -1
    done: bool = False


@final
class Hub:
    """Serves the ranks of one round.

    Args:
        address: the address to listen at; the port is chosen by the system.
        size: how many ranks there are, the trainer's rank 0 included.
        fingerprint: of the plan that every rank must have.
        ring: called whenever something changed.
    """

    def __init__(self, address: str, size: int, fingerprint: str, ring: Callable[[], None]) -> None:
        self.secret = secrets.token_urlsafe(24)
        self.table = Table()
        self.left: dict[int, Leave] = {}
        self.formed = False
        self._size, self._fingerprint, self._ring = size, fingerprint, ring
        listener = _listen(address, size)
        # Noted now: whoever asks later may do so beside an abort, which closes the socket.
        host, port, *_ = listener.getsockname()
        self.host, self.port = str(host), int(port)
        self._members: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._kept: list[tuple[str, bytes]] = []
        self._entered: set[int] = set()
        self._connected: set[int] = set()
        self._closed = False
        self._board = Switchboard(
            listener, 2 * size + 16, admit=self._admit, greet=self._greet, hear=self._hear,
            name="weightsync-hub",
        )  # fmt: skip
        self._board.start()

    def absent(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank in range(1, self._size) if rank not in self._members]

    def unconnected(self) -> list[int]:
        """The ranks that have not made their side of the group."""
        return [rank for rank in range(1, self._size) if rank not in self._connected]

    def late(self, bucket: int) -> list[int]:
        """The ranks that are not ready for ``bucket``."""
        return [rank for rank, peer in sorted(self._members.items()) if peer.ready < bucket]

    @property
    def forming(self) -> bool:
        """Whether ranks are connecting to each other, all of them still there."""
        given = len(self._entered) == self._size
        return given and not (self.formed or self._closed or self.left)

    def tell(self, kind: str, **values: str | int) -> None:
        """Tell every rank that is there."""
        for peer in list(self._members.values()):
            if peer.rank not in self.left:
                try:
                    peer.wire.send(kind, **values)
                except OSError:
                    peer.wire.shut()  # the thread reads the end of it

    def publish(self, key: str, value: bytes) -> None:
        """Write an entry of the trainer's rank."""
        self._enter(0, key, value)

    def connected(self) -> None:
        """The trainer's rank has made its side of the group."""
        self._connect(0)
        self._ring()

    def close(self, why: str) -> None:
        """Tell the ranks that are still there, close every connection, end the thread. Idempotent."""
        self.table.stop(why)
        with self._lock:  # the table goes to everybody or to nobody
            self._closed = True
            self.tell("stop", why=why)
        self._board.close()

    # -- the thread --------------------------------------------------------------------------------------

    def _admit(self, connection: socket.socket) -> _Peer:
        return _Peer(Wire(connection))

    def _greet(self, peer: _Peer) -> None:
        peer.wire.send("challenge", nonce=peer.nonce)

    def _hear(self, peer: _Peer) -> None:
        try:
            messages = peer.wire.receive()
            for message in messages or ():
                self._heard(peer, message)
        except PlanError as error:
            self._part(peer, error)
        except (OSError, ValueError, WeightSyncError) as error:
            self._part(peer, TransportError(f"its connection failed: {error}"))
        else:
            if messages is None:
                self._part(peer, TransportError("it closed its connection, or was killed"))

    def _heard(self, peer: _Peer, message: Message) -> None:
        kind = message["kind"]
        if peer.rank is None:
            self._join(peer, message)
        elif kind == "set":
            self._enter(peer.rank, fetch(message, "key", str), bytes.fromhex(fetch(message, "value", str)))
        elif kind == "ready":
            peer.ready = fetch(message, "bucket", int)
        elif kind == "connected":
            self._connect(peer.rank)
        elif kind == "done":
            peer.done = True
        elif kind == "left":
            self._part(peer, TransportError(fetch(message, "why", str)))
        self._ring()

    def _join(self, peer: _Peer, message: Message) -> None:
        rank, nonce = joining(message, self.secret, peer.nonce)
        if not 0 < rank < self._size or rank in self._members:
            raise TransportError(f"rank {rank} is not one that is missing")
        peer.rank = rank
        if fetch(message, "fingerprint", str) != self._fingerprint:
            raise PlanError("it was opened with another plan than is being sent")
        peer.wire.send("welcome", proof=proof(self.secret, "welcome", nonce))
        self._members[rank] = peer

    def _enter(self, rank: int, key: str, value: bytes) -> None:
        """Keep an entry, and give out all that are kept as soon as every rank has made one."""
        with self._lock:
            self._kept.append((key, value))
            self._entered.add(rank)
            if len(self._entered) == self._size and not self._closed:
                kept, self._kept = self._kept, []
                for name, entry in kept:
                    self.table.put(name, entry)
                    self.tell("set", key=name, value=entry.hex())

    def _connect(self, rank: int) -> None:
        with self._lock:
            self._connected.add(rank)
            if len(self._connected) == self._size:
                self.formed = True
                self.tell("formed")

    # -- ends --------------------------------------------------------------------------------------------

    def _part(self, peer: _Peer, error: WeightSyncError) -> None:
        if peer.rank is not None and not peer.done:
            self.left.setdefault(peer.rank, Leave(error, time.monotonic()))
            self.table.stop(f"rank {peer.rank} left: {error}")
        self._board.drop(peer)
        self._ring()


def _listen(address: str, size: int) -> socket.socket:
    """A listening socket at one interface, never at all of them."""
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, 0), family=family, backlog=size + 16)
    host = listener.getsockname()[0].partition("%")[0]
    if ipaddress.ip_address(host).is_unspecified:
        listener.close()
        raise SetupError(f"{address} stands for every interface: give the address that engines can reach")
    return listener
