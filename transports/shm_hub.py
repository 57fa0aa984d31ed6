"""The trainer's end of what is said beside shared memory: who is there, who let go of what, who left.

    hub                          rank               about
    challenge(nonce)
                                 join(rank, ...)    a proof that it knows the secret; plan, and what it holds
    welcome(proof, alive)                           and so does the hub; the segments that still exist
    segment(id, size, handle) + fds                 memory to map, once for each process
    bucket(bucket, last, segment, at)               the buckets from one to the other lie there
                                 released(bucket)   no view of it is left, if it was a slot of a ring
                                 taken(bucket)      it is through with this one, of a whole version
                                 beat(bucket)       it lives, and is at this bucket
                                 done               it holds every bucket, and closes its connection
    stop(why)                    left(why, holds)   an abort, by either end; what is still viewed

The endpoint is a socket in a folder of this process's own (0700), with a name that cannot be guessed. It is
there for one round, and its path goes with it, so that whoever comes late finds nothing.

One thread serves all connections; it ends with ``close``.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from ..fsm.engine_table import Session
from ..fsm.errors import PlanError, TransportError, WeightSyncError
from .packets import Packets, Value, packet_socket
from .receptions import Leave
from .shm_pool import Memory
from .switchboard import Switchboard
from .wire import Message, joining, names, proof
from .wire import field as fetch

__all__ = ["Peer", "ShmHub"]


@dataclass(slots=True, eq=False)
class Peer:
    """One receiving rank, as the hub sees it.

    Args:
        holds: the segments of which its process had views when it joined.
        released: how many buckets it has let go of.
        at: the bucket that it was last heard to be at, since ``since``.
        done: whether it holds every bucket; then it has no view of a ring.
        keeps: the segments of which its process had views when it left, if it said so.
    """

    wire: Packets
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    rank: int | None = None
    process: str = ""
    pid: int = 0
    holds: tuple[str, ...] = ()
    mapped: set[str] = field(default_factory=set)
    aliases: bool = False
    released: int = 0
    at: int = -1
    since: float = field(default_factory=time.monotonic)
    beats: int = 0
    done: bool = False
    keeps: tuple[str, ...] | None = None


@final
class ShmHub:
    """Serves the ranks of one round.

    Args:
        folder: where the endpoint is made.
        session: of the round.
        size: how many ranks there are; they are numbered from 0.
        fingerprint: of the plan that every rank must have.
        alive: the segments that there are, by name.
        ring: called whenever something changed.

    Raises:
        OSError: there can be no socket there.
    """

    def __init__(
        self,
        folder: Path,
        session: Session,
        size: int,
        *,
        fingerprint: str,
        alive: list[str],
        ring: Callable[[], None],
    ) -> None:
        self.secret = secrets.token_urlsafe(24)
        self.left: dict[int, Leave] = {}
        self.path = folder / secrets.token_hex(8)
        self._session, self._size, self._fingerprint = session, size, fingerprint
        self._alive, self._ring = alive, ring
        self._members: dict[int, Peer] = {}
        self._cut: dict[int, str] = {}
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._board = Switchboard(
                _listen(self.path, size), 2 * size + 16, admit=self._admit, greet=self._greet,
                hear=self._hear, name="weightsync-shm",
            )  # fmt: skip
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        self._board.start()

    @property
    def members(self) -> Mapping[int, Peer]:
        """The ranks that have joined, by number. A copy."""
        with self._lock:
            return dict(self._members)

    @property
    def counting(self) -> dict[int, Peer]:
        """The ranks that have joined, were not cut and have not left."""
        with self._lock:
            return {
                rank: peer
                for rank, peer in self._members.items()
                if rank not in self._cut and rank not in self.left
            }

    def hand_over(self, segment: Memory) -> None:
        """Have every rank that counts map this memory, unless its process had done so when it joined."""
        for peer in self.counting.values():
            if segment.id not in peer.mapped:
                fds, handle = segment.offer(peer.process, peer.pid)
                self._say(peer, "segment", *fds, id=segment.id, size=segment.size, handle=list(handle))
                peer.mapped.add(segment.id)

    def tell(self, kind: str, whom: Callable[[Peer], bool], **body: str | int) -> None:
        """Tell every rank that counts, and that is meant."""
        for peer in self.counting.values():
            if whom(peer):
                self._say(peer, kind, **body)

    def cut(self, rank: int, why: str) -> None:
        """Count on this rank no more: it is told, and gets nothing further. Idempotent."""
        with self._lock:
            if rank in self._cut:
                return
            self._cut[rank] = why
            peer = self._members.get(rank)
        if peer is not None:
            self._say(peer, "stop", why=why)
            peer.wire.finish()  # when it has let go of everything, it closes its end

    def close(self, why: str) -> None:
        """Tell the ranks that are still there, close every connection, end the thread. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for peer in self.counting.values():
                if not peer.done:
                    self._say(peer, "stop", why=why)
        self._board.close()
        self.path.unlink(missing_ok=True)

    def _say(self, peer: Peer, kind: str, *fds: int, **body: Value) -> None:
        try:
            peer.wire.send(kind, fds, **body)
        except OSError:
            peer.wire.shut()  # the thread reads the end of it

    # -- the thread --------------------------------------------------------------------------------------

    def _admit(self, connection: socket.socket) -> Peer:
        return Peer(Packets(connection, self._session))

    def _greet(self, peer: Peer) -> None:
        peer.wire.send("challenge", nonce=peer.nonce)

    def _hear(self, peer: Peer) -> None:
        try:
            message, fds = peer.wire.receive(once=True)
            for fd in fds:  # nobody is asked for any
                os.close(fd)
            if message is not None:
                self._heard(peer, message)
        except PlanError as error:
            self._part(peer, error)
        except (OSError, ValueError, WeightSyncError) as error:
            self._part(peer, TransportError(f"its connection failed: {error}"))
        else:
            if message is None:
                self._part(peer, TransportError("it closed its connection, or was killed"))

    def _heard(self, peer: Peer, message: Message) -> None:
        kind = message["kind"]
        if peer.rank is None:
            self._join(peer, message)
        elif kind == "released":
            self._released(peer, fetch(message, "bucket", int))
            if any(other.released < peer.released for other in self.counting.values()):
                return  # who waits for the slowest is not woken for the others
        elif kind == "taken":
            peer.released = max(peer.released, fetch(message, "bucket", int) + 1)
        elif kind == "beat":
            peer.beats += 1
            self._at(peer, fetch(message, "bucket", int))
        elif kind == "done":
            peer.done = True
        elif kind == "left":
            error = TransportError(fetch(message, "why", str))
            error.bucket = fetch(message, "bucket", int)  # type: ignore[attr-defined]
            peer.keeps = tuple(names(message, "holds"))
            self._part(peer, error)
        self._ring()

    def _released(self, peer: Peer, bucket: int) -> None:
        if bucket != peer.released:
            raise TransportError(f"it let go of bucket {bucket}, where {peer.released} is due")
        peer.released += 1

    def _at(self, peer: Peer, bucket: int) -> None:
        if bucket != peer.at:
            peer.at, peer.since = bucket, time.monotonic()

    def _join(self, peer: Peer, message: Message) -> None:
        rank, nonce = joining(message, self.secret, peer.nonce)
        with self._lock:
            welcome = 0 <= rank < self._size and rank not in self._members and rank not in self._cut
        if not welcome:
            raise TransportError(f"rank {rank} is not one that is missing")
        peer.rank, peer.pid = rank, peer.wire.process()
        if fetch(message, "fingerprint", str) != self._fingerprint:
            raise PlanError("it was opened with another plan than is being sent")
        peer.process, peer.aliases = fetch(message, "process", str), bool(message.get("aliases"))
        peer.holds, peer.mapped = tuple(names(message, "holds")), set(names(message, "mapped"))
        peer.wire.send("welcome", proof=proof(self.secret, "welcome", nonce), alive=self._alive)
        with self._lock:
            self._members[rank] = peer

    # -- ends --------------------------------------------------------------------------------------------

    def _part(self, peer: Peer, error: WeightSyncError) -> None:
        if peer.rank is not None and not peer.done:
            with self._lock:
                self.left.setdefault(peer.rank, Leave(error, time.monotonic()))
        self._board.drop(peer)
        self._ring()


def _listen(path: Path, size: int) -> socket.socket:
    listener = packet_socket()
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(size + 16)
    except BaseException:
        listener.close()
        raise
    return listener
