"""Small messages between processes of one host: a header and a body in msgpack, and descriptors beside them.

    [version, kind, round, epoch, sequence, body] checksum

The socket keeps messages apart (``SOCK_SEQPACKET``): one is sent and received whole or not at all. Nothing is
believed before it is checked: the length, the checksum, the version, every type, whose round it is, and that
none is missing or comes twice. A message of another round changes nothing; it is counted. Weights do not
travel this way, only where they are.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
import zlib
from collections.abc import Iterable
from typing import Any, final

import msgpack

from ..fsm.engine_table import Session
from ..fsm.errors import TransportError
from .wire import Message

__all__ = ["VERSION", "Packets", "Value", "packet_socket"]

VERSION = 1
"""Of the header. Two ends with different ones do not talk to each other."""

_LONGEST = 1 << 16
_SUM = struct.Struct(">I")
_MOST_FDS = 8
Value = str | int | float | bool | list[str] | list[str | int | bytes]
"""What a message may say."""


def packet_socket() -> socket.socket:
    """A socket for packets between processes of one host.

    Raises:
        OSError: this system has none of the kind.
    """
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@final
class Packets:
    """One connection, of one round. Any thread may send; one thread reads.

    Args:
        connection: of the kind that ``packet_socket`` makes.
        session: whose messages these are.
    """

    __slots__ = ("_heard", "_lock", "_said", "_session", "_socket", "stale")

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self._socket, self._session = connection, session
        self._lock = threading.Lock()
        self._said = self._heard = 0
        self.stale = 0

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def patience(self, seconds: float | None) -> None:
        """How long sending and receiving may block."""
        self._socket.settimeout(seconds)

    def process(self) -> int:
        """The process at the other end, as this one would call it; 0 if it cannot be called."""
        with contextlib.suppress(OSError, AttributeError):
            told = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return int(struct.unpack("3i", told)[0])
        return 0

    def send(self, kind: str, fds: Iterable[int] = (), **body: Value) -> None:
        """Send one message, with descriptors if there are any.

        Raises:
            OSError: the other end is gone, or has not read for as long as ``patience`` allows.
        """
        with self._lock:
            header = [VERSION, kind, self._session.round, self._session.epoch, self._said, body]
            content = msgpack.packb(header)
            if len(content) + _SUM.size > _LONGEST:
                raise OSError(f"a message of {len(content)} bytes is too long")
            handed = array.array("i", fds)
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed)] if handed else []
            self._socket.sendmsg([content, _SUM.pack(zlib.crc32(content))], beside)
            self._said += 1

    def receive(self, *, once: bool = False) -> tuple[Message | None, list[int]]:
        """The next message, a dict with its ``kind``, and its descriptors; None when the other end closed.

        What belongs to another round is passed over; with ``once``, for a thread that has others to hear, it
        is a message of kind ``stale``.

        Raises:
            TransportError: what came is no message of this kind of conversation.
            OSError: the connection broke, or nothing came in time.
        """
        while True:
            content, fds = self._read()
            try:
                if not content:
                    return None, fds
                message = self._checked(content)
            except BaseException:
                _close(fds)
                raise
            if message is not None:
                return message, fds
            _close(fds)
            if once:
                return {"kind": "stale"}, []

    def finish(self) -> None:
        """Say nothing more; the other end hears that. What it still has to say can be read. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """End the conversation: whoever reads, at either end, reads the end of it. Idempotent."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. For the thread that reads: a closed socket wakes nobody. Idempotent."""
        self.shut()
        self._socket.close()

    def _read(self) -> tuple[bytes, list[int]]:
        room = socket.CMSG_LEN(_MOST_FDS * array.array("i").itemsize)
        content, beside, flags, _ = self._socket.recvmsg(
            _LONGEST, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
        fds = array.array("i")
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            _close(fds)
            raise TransportError(f"a message of more than {_LONGEST} bytes, or with too many descriptors")
        return content, list(fds)

    def _checked(self, content: bytes) -> Message | None:
        """The message; None if it belongs to another round."""
        kind, whose, number, body = _parsed(content)
        if whose != (self._session.round, self._session.epoch):
            self.stale += 1
            return None
        if number != self._heard:
            raise TransportError(f"message {number} ({kind!r}) came where number {self._heard} was due")
        self._heard += 1
        return {**body, "kind": kind}


def _parsed(content: bytes) -> tuple[str, tuple[str, int], int, dict[str, Any]]:
    head, told = content[: -_SUM.size], content[-_SUM.size :]
    if len(told) < _SUM.size or _SUM.unpack(told)[0] != zlib.crc32(head):
        raise TransportError(f"{content[:20]!r}: its checksum is wrong")
    try:
        header = msgpack.unpackb(head, max_array_len=1024, max_map_len=64, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise TransportError(f"{content[:20]!r} is no message: {error}") from error
    match header:
        case [int(version), *_] if version != VERSION:
            raise TransportError(f"the other end speaks version {version} of this protocol, not {VERSION}")
        case [_, str(kind), str(round), int(epoch), int(number), dict(body)]:
            if all(type(key) is str for key in body):
                return kind, (round, epoch), number, body
    raise TransportError(f"{content[:20]!r} is no message")


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
