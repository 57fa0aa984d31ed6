"""Small messages over a socket: JSON objects, one a line, and the proof that a peer knows the round's secret.

Nothing is believed before it is checked: a line has a longest length, a message is an object with a ``kind``,
and its fields are fetched with their type. Weights do not travel this way.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
from typing import Any, TypeVar, final

from ..fsm.errors import TransportError

__all__ = ["Message", "Wire", "field", "joining", "names", "proof"]

_LONGEST = 1 << 16
"""Bytes of one line. The longest message carries an address."""

_MOST_NAMES = 64

Message = dict[str, Any]
Value = TypeVar("Value", str, int)


def proof(secret: str, *parts: object) -> str:
    """What only somebody who knows ``secret`` can say about ``parts``."""
    text = json.dumps([str(part) for part in parts])
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def joining(message: Message, secret: str, nonce: str) -> tuple[int, str]:
    """The rank that wants to join, and its own nonce; ``nonce`` is the one that it was sent.

    Raises:
        TransportError: it does not prove that it knows the secret.
    """
    rank = field(message, "rank", int)
    if not secrets.compare_digest(field(message, "proof", str), proof(secret, "join", rank, nonce)):
        raise TransportError("somebody without the round's secret tried to join")
    return rank, field(message, "nonce", str)


def field(message: Message, name: str, kind: type[Value]) -> Value:
    """A field of a message, if it has that type."""
    value = message.get(name)
    if type(value) is not kind:
        raise TransportError(f"a message of kind {message.get('kind')!r} has no {kind.__name__} {name!r}")
    return value


def names(message: Message, name: str) -> list[str]:
    """A field of a message that is a list of a few names."""
    found = message.get(name)
    if not isinstance(found, list) or len(found) > _MOST_NAMES or not all(type(one) is str for one in found):
        raise TransportError(f"a message of kind {message.get('kind')!r} has no list of names {name!r}")
    return found


@final
class Wire:
    """One connection. Any thread may send; one thread reads."""

    __slots__ = ("_lock", "_rest", "_socket")

    def __init__(self, connection: socket.socket) -> None:
        # The messages are short, and somebody waits for each of them.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lock = threading.Lock()
        self._rest = b""

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    @property
    def host(self) -> str:
        """The address of this end, as the other end can reach it."""
        return str(self._socket.getsockname()[0])

    def patience(self, seconds: float | None) -> None:
        """How long sending and receiving may block."""
        self._socket.settimeout(seconds)

    def send(self, kind: str, **values: str | int) -> None:
        """Send one message, or raise OSError."""
        line = json.dumps({"kind": kind, **values}, separators=(",", ":")).encode("ascii") + b"\n"
        with self._lock:
            self._socket.sendall(line)

    def receive(self) -> list[Message] | None:
        """Read once, and hand out the messages that are complete; None when the other end closed.

        Raises:
            TransportError: what came is no message.
            OSError: the connection broke, or nothing came in time.
        """
        data = self._socket.recv(_LONGEST)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            raise TransportError(f"a line of more than {_LONGEST} bytes is no message")
        return [_parsed(line) for line in lines]

    def shut(self) -> None:
        """End the conversation: whoever reads, at either end, reads the end of it. Idempotent."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. For the thread that reads: a closed socket wakes nobody. Idempotent."""
        self.shut()
        self._socket.close()


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TransportError(f"{line[:40]!r} is no message: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise TransportError(f"{line[:40]!r} is no message")
    return message
