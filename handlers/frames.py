"""Frames over a socket: each is one message of JSON, and the proof that both ends know a secret.

The socket keeps messages apart (``SOCK_SEQPACKET``): one is sent and received whole or not at all, so any
thread may send, and as many as like may wait for the next one, of whom it wakes one.

Only what JSON gives back as it was goes into a frame: lists, dicts by string, strings, numbers, and bytes,
which travel as ``{"b64": ...}``. Everything else is ``NotPlain``, and has to be said in another way. Nobody
can make the other end hold more than one longest frame.

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
from typing import Any

__all__ = ["LONGEST", "NotPlain", "accept_peer", "encoded", "frame_socket", "prove_to", "received"]

LONGEST = 1 << 16
"""Bytes of one frame. Words, receipts and most plans fit; what does not goes by Ray."""

_FIRST_FRAMES = 512
"""The same, for a peer that has not proved anything yet."""

_AS_THEY_ARE = (str, int, float, bool, type(None))


class NotPlain(Exception):
    """This cannot be said in a frame."""


def frame_socket() -> socket.socket:
    """A socket for frames between processes of one host.

    Raises:
        OSError: this system has none of the kind.
    """
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def encoded(message: object) -> bytes:
    """A frame.

    Raises:
        NotPlain: it would arrive as something else, or is too long.
    """
    content = json.dumps(_packed(message), separators=(",", ":")).encode("ascii")
    if len(content) > LONGEST:
        raise NotPlain(f"{len(content)} bytes are too many for one frame")
    return content


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


def received(connection: socket.socket, longest: int = LONGEST) -> list[Any] | None:
    """The next message, which is a list; None when the other end closed.

    Raises:
        ConnectionError: what came is no frame.
        OSError: the connection broke, or nothing came in time.
    """
    content = connection.recv(longest + 1)
    if not content:
        return None
    if len(content) > longest:
        raise ConnectionError(f"a frame of more than {longest} bytes is none")
    message = _parsed(content)
    if not isinstance(message, list):
        raise ConnectionError(f"{content[:40]!r} is no message")
    return message


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content, object_hook=_unpacked)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConnectionError(f"{content[:40]!r} is no message: {error}") from error


# -- who is at the other end --------------------------------------------------------------------------------


def accept_peer(connection: socket.socket, secret: bytes) -> None:
    """The engine's part.

    Raises:
        OSError: the other end does not know the secret, or says nothing in time.
    """
    nonce = secrets.token_hex(16)
    connection.sendall(encoded([nonce]))
    theirs, answer = _strings(connection, 2)
    _check(theirs, secret, "trainer", nonce)
    connection.sendall(encoded([_proof(secret, "engine", answer)]))


def prove_to(connection: socket.socket, secret: bytes) -> None:
    """The trainer's part.

    Raises:
        OSError: the other end does not know the secret, or says nothing in time.
    """
    nonce = secrets.token_hex(16)
    (asked,) = _strings(connection, 1)
    connection.sendall(encoded([_proof(secret, "trainer", asked), nonce]))
    (theirs,) = _strings(connection, 1)
    _check(theirs, secret, "engine", nonce)


def _proof(secret: bytes, who: str, nonce: str) -> str:
    return hmac.new(secret, f"{who} {nonce}".encode(errors="replace"), hashlib.sha256).hexdigest()


def _check(found: str, secret: bytes, who: str, nonce: str) -> None:
    # Strings of JSON may hold what has no encoding.
    if not hmac.compare_digest(found.encode(errors="replace"), _proof(secret, who, nonce).encode()):
        raise ConnectionError(f"this {who} does not know the secret")


def _strings(connection: socket.socket, count: int) -> list[str]:
    message = received(connection, _FIRST_FRAMES)
    if message is None:
        raise ConnectionError("it closed before it had said anything")
    if len(message) != count or not all(type(each) is str for each in message):
        raise ConnectionError("what came is no part of a greeting")
    return message
