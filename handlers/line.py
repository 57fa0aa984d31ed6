"""A trainer's end of the line: words to an actor on the same host, beside Ray.

A word is written by whoever says it, without ever waiting: if the socket is full, or the word is no plain
value, it is not taken, and goes by Ray. One thread a line reads the answers, and notices when the line breaks
or the actor's process ends, whichever it can see first: a process that the actor has forked may keep its end
of the socket open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from .frames import NotPlain, encoded, frame_socket, prove_to, received
from .line_server import here
from .threads import OwnThread

__all__ = ["Broken", "Done", "Kept", "Line", "connect"]

_LOGGER = logging.getLogger("weightsync")
_GREETING = 2.0
"""Seconds to get through to an actor. After that, its words go by Ray."""

_ENDING = 1.0
"""Seconds for a process to end whose connections are closed already."""

Done = Callable[[Any, Exception | None], None]
"""Takes what a word came to: a value, or ``Kept``, or ``Broken``. Must not wait."""


class Kept(Exception):
    """The answer waits at the actor, under a token: it is an error, or no plain value."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.token = token


class Broken(Exception):
    """The line broke before an answer came. ``gone`` says whether the actor's process is known to be over."""

    def __init__(self, why: str, *, gone: bool) -> None:
        super().__init__(why)
        self.gone = gone


def connect(offer: Any) -> Line | None:
    """A line to the actor that made this offer; None if there can be none."""
    try:
        host, boot, path, secret = offer
        if [host, boot] != here() or not boot or not Path(path).exists():
            _LOGGER.debug("line: the actor is on another host; its words go by Ray")
            return None
        return _connected(path, secret)
    except (OSError, TypeError, ValueError) as error:
        _LOGGER.debug("line: there is none, words go by Ray: %s", error)
        return None


def _connected(path: str, secret: bytes) -> Line:
    connection = frame_socket()
    try:
        connection.settimeout(_GREETING)
        connection.connect(path)
        prove_to(connection, secret)
        connection.settimeout(None)
        return Line(connection)
    except BaseException:
        connection.close()
        raise


@final
class Line:
    """One connection to an actor. Any thread may ask; a thread of its own reads.

    Args:
        connection: to an actor that has proved who it is.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._turn = threading.Lock()
        self._pending: dict[int, Done] = {}
        self._number = 0
        self._over = False
        self._mine = os.getpid()
        self._forgotten: weakref.finalize[..., Any] | None = None
        self._process = _process_of(connection)
        self._poll = select.poll()
        for number in (connection.fileno(), self._process):
            if number is not None:
                self._poll.register(number, select.POLLIN)
        OwnThread(self._read, name="weightsync-line").start()

    @property
    def over(self) -> bool:
        """Whether it broke or was closed."""
        return self._over

    def ask(self, said: list[Any], done: Done) -> bool:
        """Say a word; ``done`` gets the answer, on the thread that reads. False if it was not said."""
        with self._turn:
            self._number += 1
            number = self._number
            try:
                frame = encoded([number, said])
            except NotPlain:
                return False
            if self._over:
                return False
            self._pending[number] = done
            if self._sent(frame):
                return True
            del self._pending[number]
            return False

    def end_with(self, owner: object) -> None:
        """Close it when ``owner`` is forgotten: one that nobody closes leaves nothing behind either."""
        self._forgotten = weakref.finalize(owner, self.close)

    def close(self) -> None:
        """End the conversation; whoever waits for an answer is told so. Idempotent."""
        if os.getpid() != self._mine:  # a forked child ends nothing of its parent's
            return
        with self._turn:
            self._over = True
            self._shut()

    # -- inside ----------------------------------------------------------------------------------------------

    def _sent(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # it is full, or broken, which the reading thread sees as well
            return False
        return True

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        why = "the other end closed it"
        try:
            while self._wait() and (message := received(self._socket)) is not None:
                self._heard(message)
        except (OSError, ValueError) as error:
            why = str(error)
        with self._turn:
            closed, self._over = self._over, True
            pending, self._pending = self._pending, {}
            self._socket.close()
        if self._forgotten is not None:
            self._forgotten.detach()
        # Whoever closed it does not wait to know what became of the actor.
        broken = Broken(why, gone=bool(pending) and not closed and self._ended(_ENDING))
        if self._process is not None:
            os.close(self._process)
        for done in pending.values():
            done(None, broken)

    def _wait(self) -> bool:
        """Wait for something to read. False if the process is over and has left nothing."""
        if self._process is None:
            return True
        mine = self._socket.fileno()
        return any(number == mine for number, _ in self._poll.poll())

    def _ended(self, seconds: float) -> bool:
        if self._process is None:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _heard(self, message: list[Any]) -> None:
        match message:
            case [int(number), bool(ok), found]:
                with self._turn:
                    done = self._pending.pop(number, None)
            case _:
                raise ConnectionError("what came is no answer")
        if done is None:
            raise ConnectionError(f"what came answers no word: {number}")
        if ok:
            done(found, None)
        else:
            done(None, Kept(str(found)))


def _process_of(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the process at the other end is over, where there is one."""
    with contextlib.suppress(OSError, AttributeError):
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        process, _, _ = struct.unpack("3i", told)
        if process > 0:
            return os.pidfd_open(process)
    return None
