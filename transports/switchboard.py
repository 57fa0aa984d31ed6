"""One thread that serves all connections of a listening socket, until it is closed.

Whoever makes it says what becomes of a new connection (``admit`` gives the peer that it belongs to, and has
greeted it), and what a peer has said (``hear``, whenever there is something to read). Both run on the thread,
and so does ``drop``, which ends a connection.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, final

__all__ = ["SEND_LIMIT", "Switchboard", "Wired"]

SEND_LIMIT = 5.0
"""Seconds for a message of a few bytes to fit into a socket. Who does not read for so long is gone."""

_MOMENT = 0.01
"""Seconds to leave a knock unanswered."""


class _Wire(Protocol):
    def fileno(self) -> int:
        """For a selector."""

    def patience(self, seconds: float | None, /) -> None:
        """How long sending and receiving may block."""

    def close(self) -> None:
        """Give the socket back. Idempotent."""


class Wired(Protocol):
    """A peer, as far as serving it needs to know it."""

    @property
    def wire(self) -> _Wire:
        """Its connection."""


P = TypeVar("P", bound=Wired)


@final
class Switchboard(Generic[P]):
    """The thread, once it is started.

    Args:
        listener: the socket, which is listening.
        most: how many connections may be open; further ones are not all ours.
        admit: makes the peer of a new connection.
        greet: says the first word to it; raises OSError if it is gone already.
        hear: something came of this peer, or it closed its connection.
        name: the thread's, for stack dumps.

    Raises:
        OSError: there are no descriptors left. The listener is closed then.
    """

    def __init__(
        self,
        listener: socket.socket,
        most: int,
        *,
        admit: Callable[[socket.socket], P],
        greet: Callable[[P], None],
        hear: Callable[[P], None],
        name: str,
    ) -> None:
        self._listener, self._most = listener, most
        self._admit, self._greet, self._hear = admit, greet, hear
        self._peers: dict[int, P] = {}
        with contextlib.ExitStack() as made:  # of a descriptor too many, nothing stays
            made.callback(listener.close)
            self._selector = selectors.DefaultSelector()
            made.callback(self._selector.close)
            self._waker, self._woken = socket.socketpair()
            made.pop_all()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """From now on connections are served."""
        self._thread.start()

    def drop(self, peer: P) -> None:
        """End the connection of a peer. Idempotent."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.wire)
        self._peers.pop(id(peer), None)
        peer.wire.close()

    def close(self) -> None:
        """Close every connection and end the thread. Idempotent; not to be called on the thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._hear(key.data)
        finally:
            self._shut()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(_MOMENT)  # it went away again; or no descriptor is left, and it still knocks
            return
        if len(self._peers) >= self._most:
            connection.close()
            return
        peer = self._admit(connection)
        peer.wire.patience(SEND_LIMIT)
        self._peers[id(peer)] = peer
        self._selector.register(peer.wire, selectors.EVENT_READ, peer)
        try:
            self._greet(peer)
        except OSError:
            self.drop(peer)

    def _shut(self) -> None:
        for peer in self._peers.values():
            peer.wire.close()
        self._selector.close()
        for end in (self._listener, self._waker, self._woken):
            end.close()
