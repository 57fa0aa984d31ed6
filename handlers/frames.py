"""Frames over a socket: JSON with its length before it, and the proof that both ends know a secret.

Only what JSON gives back as it was goes into a frame: lists, dicts by string, strings, numbers, and bytes,
which travel as ``{"b64": ...}``. Everything else is ``NotPlain``, and has to be said in another way. The
length is checked before anything is set aside for the content, so nobody can make the other end hold more
than one longest frame.

A connection begins with a greeting, in which both ends prove that they know a secret:

    engine                trainer
    [nonce]
                          [proof over it, nonce]
    [proof over that]

Whatever is wrong with what arrived is a ``ConnectionError``: the conversation cannot go on.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import socket
from typing import Any, final

__all__ = ["LONGEST", "Frames", "NotPlain", "accept_peer", "encoded", "prove_to"]

LONGEST = 1 << 16
"""Bytes of one frame. Words, receipts and most plans fit; what does not goes by Ray."""

_FIRST_FRAMES = 512
"""The same, for a peer that has not proved anything yet."""

_HEAD = 4
_AS_THEY_ARE = (str, int, float, bool, type(None))


class NotPlain(Exception):
    """This cannot be said in a frame."""


def encoded(message: object) -> bytes:
    """A frame.

    Raises:
        NotPlain: it would arrive as something else, or is too long.
    """
    content = json.dumps(_packed(message), separators=(",", ":")).encode("ascii")
    if len(content) > LONGEST:
        raise NotPlain(f"{len(content)} bytes are too many for one frame")
    return len(content).to_bytes(_HEAD, "big") + content


def _packed(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [_packed(each) for each in value]
    if kind is dict and "b64" not in value and all(type(key) is str for key in value):
        return {key: _packed(each) for key, each in value.items()}
    if kind is bytes:
        return {"b64": base64.b64encode(value).decode("ascii")}
    raise NotPlain(f"a {kind.__name__} is no plain value")


def _unpacked(found: dict[str, Any]) -> Any:
    return base64.b64decode(found["b64"], validate=True) if found.keys() == {"b64"} else found


@final
class Frames:
    """What arrives at one end, cut into messages. For the one thread that reads."""

    __slots__ = ("_longest", "_rest", "_socket")

    def __init__(self, connection: socket.socket, longest: int = LONGEST) -> None:
        self._socket, self._longest, self._rest = connection, longest, b""

    def read(self) -> list[Any] | None:
        """Read once, and hand out what is complete; None when the other end closed.

        Raises:
            ConnectionError: what came is no frame, or the end came in the middle of one.
            OSError: the connection broke, or nothing came in time.
        """
        data = self._socket.recv(LONGEST)
        if not data:
            if self._rest:
                raise ConnectionError("it closed in the middle of a frame")
            return None
        self._rest += data
        messages = []
        while (end := self._end()) is not None:
            messages.append(_parsed(self._rest[_HEAD:end]))
            self._rest = self._rest[end:]
        return messages

    def one(self) -> list[Any]:
        """The one message that is due, which is a list; nothing may follow it yet.

        Raises:
            OSError: as ``read``; or something else came.
        """
        while True:
            messages = self.read()
            if messages is None:
                raise ConnectionError("it closed before it had said anything")
            if messages:
                if len(messages) > 1 or self._rest or not isinstance(messages[0], list):
                    raise ConnectionError("it speaks out of turn")
                found: list[Any] = messages[0]
                return found

    def trusted(self) -> None:
        """The other end has proved who it is, and may send whole frames."""
        self._longest = LONGEST

    def _end(self) -> int | None:
        """Where the first frame ends, if it is complete."""
        if len(self._rest) < _HEAD:
            return None
        length = int.from_bytes(self._rest[:_HEAD], "big")
        if not 0 < length <= self._longest:
            raise ConnectionError(f"a frame of {length} bytes is none")
        end = _HEAD + length
        return end if len(self._rest) >= end else None


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content, object_hook=_unpacked)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConnectionError(f"{content[:40]!r} is no message: {error}") from error


# -- who is at the other end --------------------------------------------------------------------------------


def accept_peer(connection: socket.socket, secret: bytes) -> Frames:
    """The engine's part: hands back the frames of a peer that knows the secret.

    Raises:
        OSError: it does not, or it says nothing in time.
    """
    frames, nonce = Frames(connection, _FIRST_FRAMES), secrets.token_hex(16)
    connection.sendall(encoded([nonce]))
    theirs, answer = _strings(frames.one(), 2)
    _check(theirs, secret, "trainer", nonce)
    connection.sendall(encoded([_proof(secret, "engine", answer)]))
    frames.trusted()
    return frames


def prove_to(connection: socket.socket, secret: bytes) -> Frames:
    """The trainer's part.

    Raises:
        OSError: the other end does not know the secret, or says nothing in time.
    """
    frames, nonce = Frames(connection, _FIRST_FRAMES), secrets.token_hex(16)
    (asked,) = _strings(frames.one(), 1)
    connection.sendall(encoded([_proof(secret, "trainer", asked), nonce]))
    (theirs,) = _strings(frames.one(), 1)
    _check(theirs, secret, "engine", nonce)
    frames.trusted()
    return frames


def _proof(secret: bytes, who: str, nonce: str) -> str:
    return hmac.new(secret, f"{who} {nonce}".encode(), hashlib.sha256).hexdigest()


def _check(found: str, secret: bytes, who: str, nonce: str) -> None:
    if not hmac.compare_digest(found.encode(), _proof(secret, who, nonce).encode()):
        raise ConnectionError(f"this {who} does not know the secret")


def _strings(message: list[Any], count: int) -> list[str]:
    if len(message) != count or not all(type(each) is str for each in message):
        raise ConnectionError("what came is no part of a greeting")
    return message
