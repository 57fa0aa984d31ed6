"""A table that every rank of a round fills and reads, to find the others: each entry is written once."""

from __future__ import annotations

import threading
from typing import final

from ..fsm.errors import TransportError

__all__ = ["Table"]


@final
class Table:
    """Keys and values of one round. Whoever waits for a key is woken by it, or by the end of the round."""

    __slots__ = ("_changed", "_entries", "_stopped")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: dict[str, bytes] = {}
        self._stopped: str | None = None

    def put(self, key: str, value: bytes) -> None:
        """Write an entry."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def wait(self, keys: list[str], seconds: float) -> None:
        """Wait until all of ``keys`` are written, or raise TransportError; not if they are there already."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self.has(keys), seconds)
            if not self.has(keys):
                why = self._stopped or f"{', '.join(keys)} did not come in {seconds:g} s"
                raise TransportError(f"the group is not formed: {why}")

    def get(self, key: str) -> bytes:
        """An entry that was waited for."""
        return self._entries[key]

    def has(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` are written."""
        return all(key in self._entries for key in keys)

    def after(self, prefix: str) -> list[str]:
        """What follows ``prefix`` in the keys that begin with it."""
        with self._changed:
            return [key.removeprefix(prefix) for key in self._entries if key.startswith(prefix)]

    def stop(self, why: str) -> None:
        """Wake everybody; nothing is waited for any more. The first reason stays."""
        with self._changed:
            self._stopped = self._stopped or why
            self._changed.notify_all()
