"""A gloo group that belongs to one round: made without torch's global world, and closed for good.

``torch.distributed`` keeps its groups in tables of the process: a default group there can be, names that
must not come twice, and a destroy that forgets some of them. Here the process group object is made by
itself, over a table of our own (``table.py``) instead of a TCP store, so that nothing of it is left in
those tables, no further socket listens, and the making of the group ends when the round does.

Facts about gloo that shape the rest:

* It receives into whatever buffer it is given and trusts its size: a smaller one kills the receiving process,
  a strided or a foreign one is filled with nonsense. So buckets travel as flat buffers of bytes, and both
  sides take their sizes from one plan.
* ``abort`` and ``shutdown`` of the process group do nothing, and to destroy it is to wait for what is under
  way: that ends with the group's own time limit, when a rank takes no part. What does end it at once is that
  a connection closes. So ``close`` closes them, by the addresses that the ranks have told each other.
* To make a group is to wait for the others to connect, and must not be disturbed: a connection that closes at
  that time leaves its other end waiting until the limit, and can kill the process. So everybody gets a moment
  to finish it, also when it is not needed any more (see ``hub.py``).
* A send that begins at the very moment when its connection closes may miss that, and hang until the limit.
  So an operation under way gets a moment to finish by itself first, and nobody ever waits for one that hangs:
  a thread of its own destroys the group then.
* Its sockets pass on to processes that are started meanwhile, which then keep them open. That a rank died is
  therefore told by its connection to the hub, which is not inherited.
* After any error the group is useless, for every rank. The next round makes a new one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..fsm.errors import TransportError
from ..fsm.plan import Plan
from .table import Table

__all__ = ["FORMING", "Group", "Operation", "patience"]

_MOMENT = 0.2
"""Seconds that an operation under way gets to finish by itself."""

FORMING = 2.0
"""Seconds that ranks get to finish making a group that is not needed any more. It takes milliseconds."""

_SETTLE = 2.0
"""Seconds for an operation to notice that its connections are closed. It takes milliseconds as well."""

_LISTENING = "listening/"
"""Begins the keys that say where a rank's gloo listens: host and port follow."""


def patience(plan: Plan) -> float:
    """Gloo's own limit in seconds, for each of its steps: the last resort, when nothing else ends a wait.

    Everybody is there when a bucket is sent, so that it takes as long as its bytes: 10 MB a second at least.
    """
    return 30.0 + plan.largest / 10e6


@final
class Operation:
    """A broadcast under way."""

    __slots__ = ("_done", "_error", "_ring")

    def __init__(self, ring: Callable[[], None]) -> None:
        self._done = threading.Event()
        self._error: TransportError | None = None
        self._ring = ring

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._done.is_set()

    @property
    def error(self) -> TransportError | None:
        """Why it failed, if it did, in gloo's words."""
        return self._error

    def settled(self, seconds: float) -> bool:
        """Wait for its end."""
        return self._done.wait(seconds)

    def finished(self, future: Any) -> None:
        """Called by torch, on a thread of gloo."""
        try:
            future.wait()
        except BaseException as error:  # noqa: BLE001 - belongs to whoever asked for the broadcast
            self._error = TransportError(str(error))  # without the frames, which would keep the buffer
        self._done.set()
        self._ring()


@final
class Group:
    """The group of one round, as one of its ranks. A thread of its own makes it; ``formed`` says when.

    Args:
        table: shared with the other ranks.
        publish: writes an entry of the table for all of them.
        name: not used before, by any round.
        rank: this one's number; 0 sends.
        host: the address at which the other ranks reach this one.
        limit: seconds after which gloo itself gives up.
        ring: called when the group is formed or cannot be, and when an operation ends.
        connected: called when it is formed.
    """

    def __init__(
        self,
        table: Table,
        publish: Callable[[str, bytes], None],
        *,
        name: str,
        rank: int,
        size: int,
        host: str,
        limit: float,
        ring: Callable[[], None],
        connected: Callable[[], None] | None = None,
    ) -> None:
        self._table, self._ring, self._connected = table, ring, connected
        self._store = _Store(table, publish, name=name, host=host, limit=limit)
        self._lock = threading.Lock()
        self._group: Any = None
        self._operation: Operation | None = None
        self._error: str | None = None
        self._closed = False
        self._forming = threading.Thread(
            target=self._form, args=(rank, size, host, limit), name="weightsync-form", daemon=True
        )
        self._forming.start()

    @property
    def formed(self) -> bool:
        """Whether every rank is connected.

        Raises:
            TransportError: that failed.
        """
        if self._error is not None:
            raise TransportError(self._error)
        return self._group is not None

    def broadcast(self, buffer: torch.Tensor) -> Operation:
        """Send ``buffer`` from rank 0, or receive into it on the others: flat, of the same size on all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._lock:
            if self._group is None:
                raise TransportError("the group is closed")
            operation = self._operation = Operation(self._ring)
            work = self._group.broadcast([buffer], options)
            work.get_future().add_done_callback(operation.finished)
        return operation

    def close(self) -> None:
        """End what is under way, and give back sockets and threads. Idempotent."""
        self._table.stop("the group was closed")
        self._forming.join(FORMING)
        with self._lock:
            self._closed = True
            group, self._group = self._group, None
            operation, self._operation = self._operation, None
        if operation is not None and not operation.settled(_MOMENT):
            _sever(self._table.after(_LISTENING))
            if not operation.settled(_SETTLE):
                # The last reference waits for the operation when it goes, so it goes elsewhere.
                last, group = [group], None
                threading.Thread(target=last.clear, name="weightsync-reaper", daemon=True).start()
        del group  # and with the last reference, its sockets and threads

    def _form(self, rank: int, size: int, host: str, limit: float) -> None:
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
            options._threads = 1  # noqa: SLF001 - buckets go one after the other
            options._timeout = timedelta(seconds=limit)  # noqa: SLF001
            group = dist.ProcessGroupGloo(self._store, rank, size, options)
        except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the group
            # Only what it says: its frames would keep the device, which listens.
            self._error = f"the group could not be formed: {error}"
        else:
            with self._lock:
                if not self._closed:
                    self._group = group
            del group
            if self._connected is not None:
                self._connected()
        self._ring()


class _Store(Store):
    """What gloo takes for a store: it writes where this rank listens, and reads the same of the others.

    Args:
        table: read from.
        publish: writes, for every rank.
        name: of the group; begins every key.
        host: the address at which this rank listens.
        limit: seconds to wait for a key.
    """

    def __init__(
        self, table: Table, publish: Callable[[str, bytes], None], *, name: str, host: str, limit: float
    ) -> None:
        super().__init__()
        self._table, self._publish = table, publish
        self._name, self._host, self._limit = name, host, limit

    # What torch calls; each means what its name says in torch.distributed.Store.

    def set(self, key: str, value: str | bytes) -> None:
        octets = value.encode() if isinstance(value, str) else bytes(value)
        port = _port(octets, self._host)
        if port is not None:
            self._publish(f"{_LISTENING}{self._host} {port}", b"")
        self._publish(f"{self._name}/{key}", octets)

    def get(self, key: str) -> bytes:
        self._table.wait([f"{self._name}/{key}"], self._limit)
        return self._table.get(f"{self._name}/{key}")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._table.wait([f"{self._name}/{key}" for key in keys], self._limit)

    def check(self, keys: list[str]) -> bool:
        return self._table.has([f"{self._name}/{key}" for key in keys])


def _port(octets: bytes, host: str) -> int | None:
    """The port in the socket address of ``host`` that gloo wrote somewhere into ``octets``."""
    if ":" in host:
        family, gap, packed = socket.AF_INET6, 4, socket.inet_pton(socket.AF_INET6, host)
    else:
        family, gap, packed = socket.AF_INET, 0, socket.inet_pton(socket.AF_INET, host)
    mark = int(family).to_bytes(2, "little")
    start = octets.find(mark)
    while start >= 0:
        place = start + 4 + gap
        if octets[place : place + len(packed)] == packed:
            return int.from_bytes(octets[start + 2 : start + 4], "big")
        start = octets.find(mark, start + 1)
    return None


def _sever(listening: list[str]) -> None:
    """Close this process's connections to, and by way of, the given listening addresses.

    The sockets are gloo's, and there is no handle to them but the process's list of descriptors. A connection
    with one of these addresses at one of its ends is the group's: only its ranks know them.
    """
    ours = set(listening)
    for duplicate in _sockets():
        with contextlib.suppress(OSError), duplicate:  # one that listens has no other end
            ends = (duplicate.getsockname(), duplicate.getpeername())
            if any(f"{end[0]} {end[1]}" in ours for end in ends if isinstance(end, tuple)):
                duplicate.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of every socket of this process: the number of the original may be another's meanwhile."""
    with contextlib.suppress(FileNotFoundError):  # without /proc, gloo's own limit has to do
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                duplicate = os.dup(int(entry.name))
                if stat.S_ISSOCK(os.fstat(duplicate).st_mode):
                    yield socket.socket(fileno=duplicate)
                else:
                    os.close(duplicate)
