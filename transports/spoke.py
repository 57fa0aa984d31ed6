"""A receiving rank's end of what is said beside a collective; the other end is ``hub.py``."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import final

from ..fsm.errors import TransportError, WeightSyncError
from .table import Table
from .wire import Message, Wire, field, proof

__all__ = ["Spoke"]


@final
class Spoke:
    """One rank's connection to the trainer. ``join`` opens it; a thread reads it until ``close``.

    Args:
        rank: the number that the ticket gives.
        limit: seconds for the trainer to answer.
        ring: called whenever something changed.
    """

    def __init__(self, rank: int, limit: float, ring: Callable[[], None]) -> None:
        self.rank = rank
        self.table = Table()
        self.forming = False
        self.formed = False
        self.going = -1
        self._limit, self._ring = limit, ring
        self._stopped: str | None = None
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._thread: threading.Thread | None = None

    @property
    def stopped(self) -> str | None:
        """Why there will be no further word from the trainer, if so."""
        return self._stopped

    @property
    def host(self) -> str:
        """This end's address, by the way that leads to the trainer."""
        return self._joined().host

    def join(self, host: str, port: int, secret: str, fingerprint: str) -> None:
        """Connect, and have both ends prove that they know the secret.

        Raises:
            TransportError: nobody answers there, or not the sender of the ticket; or ``stop`` was called.
        """
        try:
            wire = Wire(socket.create_connection((host, port), timeout=self._limit))
        except OSError as error:
            raise TransportError(
                f"rank {self.rank} cannot reach the trainer at {host}:{port}: {error}"
            ) from error
        with self._lock:
            self._wire = wire
        if self._stopped:  # it came too early to find a connection
            wire.shut()
        try:
            waiting = self._shake_hands(wire, secret, fingerprint)
        except OSError as error:
            raise TransportError(f"rank {self.rank} could not join: {error}") from error
        wire.patience(None)
        self._thread = threading.Thread(
            target=self._read, args=(wire, waiting), name="weightsync-spoke", daemon=True
        )
        self._thread.start()

    def publish(self, key: str, value: bytes) -> None:
        """Write an entry of the table, for every rank; it comes back with those of the others."""
        self._say("set", key=key, value=value.hex())

    def connected(self) -> None:
        """This rank has made its side of the group. Whether the trainer hears it, others will tell."""
        with contextlib.suppress(TransportError):
            self._say("connected")

    def ready(self, bucket: int) -> None:
        """This rank let go of the bucket before and waits for ``bucket``."""
        self._say("ready", bucket=bucket)

    def done(self) -> None:
        """This rank holds every bucket, which stays true if the trainer does not hear it."""
        with contextlib.suppress(TransportError):
            self._say("done")

    def leave(self, why: str) -> None:
        """This rank goes before it is done. Says so if it still can."""
        with contextlib.suppress(TransportError):
            self._say("left", why=why[:500])

    def stop(self, why: str) -> None:
        """Wake whoever waits here; nothing is waited for any more. From any thread; idempotent."""
        self._stopped = self._stopped or why
        self.table.stop(self._stopped)
        with self._lock:
            wire = self._wire
        if wire is not None:
            wire.shut()
        self._ring()

    def close(self) -> None:
        """Close the connection, and end the thread."""
        self.stop("the connection to the trainer is closed")
        if self._thread is not None:
            self._thread.join()
        if self._wire is not None:
            self._wire.close()

    def _shake_hands(self, wire: Wire, secret: str, fingerprint: str) -> list[Message]:
        """Hands back what came after the welcome in the same moment."""
        challenge, *early = _next(wire, "challenge")
        nonce = secrets.token_hex(16)
        wire.send(
            "join", rank=self.rank, nonce=nonce, fingerprint=fingerprint,
            proof=proof(secret, "join", self.rank, field(challenge, "nonce", str)),
        )  # fmt: skip
        if early:
            raise TransportError("the trainer spoke out of turn")
        welcome, *waiting = _next(wire, "welcome")
        if not secrets.compare_digest(field(welcome, "proof", str), proof(secret, "welcome", nonce)):
            raise TransportError("somebody without the round's secret answers at the trainer's address")
        return waiting

    def _read(self, wire: Wire, messages: list[Message] | None) -> None:
        why = "the trainer closed its connection, or was killed"
        try:
            while messages is not None:
                for message in messages:
                    self._heard(message)
                self._ring()
                messages = wire.receive()
        except (OSError, ValueError, WeightSyncError) as error:
            why = f"the connection to the trainer failed: {error}"
        self._stopped = self._stopped or why
        self.table.stop(self._stopped)
        self._ring()

    def _heard(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "set":
            self.table.put(field(message, "key", str), bytes.fromhex(field(message, "value", str)))
        elif kind == "form":
            self.forming = True
        elif kind == "formed":
            self.formed = True
        elif kind == "go":
            self.going = field(message, "bucket", int)
        elif kind == "stop":
            self._stopped = self._stopped or field(message, "why", str)

    def _joined(self) -> Wire:
        if self._wire is None:
            raise TransportError(f"rank {self.rank} has not joined")
        return self._wire

    def _say(self, kind: str, **values: str | int) -> None:
        try:
            self._joined().send(kind, **values)
        except OSError as error:
            raise TransportError(f"rank {self.rank} lost the trainer: {self._stopped or error}") from error


def _next(wire: Wire, kind: str) -> list[Message]:
    """Read until a message came; it is the first of what is handed back, and of that kind."""
    while True:
        messages = wire.receive()
        if messages is None:
            raise TransportError(
                "the trainer closed its connection: its round is over, or it refuses this rank"
            )
        if messages:
            if messages[0]["kind"] != kind:
                raise TransportError(f"the trainer says {messages[0]['kind']!r}, where {kind!r} is due")
            return messages
