"""Where the version ledger lives: in a file, or in memory for as long as the process does.

Both keep one ``Ledger`` value and replace it by the next. The rules are the value's; what is added here is
that a change is one step for all threads, and with a file for all processes: it is read, changed and replaced
while every other writer is kept away, and the call returns when the new content is on the disk. A reader
needs no turn, since it sees the old file or the new one.

A process that is killed in the middle leaves the old file or the new. If the disk is full or the folder is
closed, the call raises ``LedgerUnavailable`` and the old file stays: a refusal like any other. One case is
none: the file was replaced, and then its folder could not be forced to the disk. ``LedgerUnsure`` is
therefore not a ``LedgerError``: the ledger has the change, and ``ask`` says so.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..fsm import checks
from ..fsm.errors import SetupError, WeightSyncError
from ..fsm.ledger import Ledger, LedgerError
from . import durable

__all__ = ["FileLedger", "LedgerUnavailable", "LedgerUnsure", "MemoryLedger"]

_LIMIT = 1 << 20
_Change = Callable[[Ledger], Ledger]


class LedgerUnavailable(LedgerError):
    """The ledger's file cannot be read or written; ``__cause__`` is the operating system's error."""


class LedgerUnsure(WeightSyncError):
    """The change is in the file, but may not outlive a power failure. Making it again helps; asking tells."""


class MemoryLedger:
    """A ledger that is forgotten with its process."""

    prompt = True
    """Its calls touch no disk, and may be made by whoever must not wait."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.name = f"memory-{secrets.token_hex(4)}"
        """How it is called in logs: the same for all rounds whose versions can be compared."""
        self._ledger = Ledger() if ledger is None else ledger
        self._turn = threading.Lock()

    def current(self) -> Ledger:
        """What the ledger says now."""
        return self._ledger

    def version(self) -> int | None:
        """The published version; None before the first."""
        return self.current().version

    def admit(self, version: int, digest: str) -> None:
        """Refuse a version that could not be published."""
        self._ledger.admit(version, digest)

    def bind(self, version: int, digest: str, epoch: int) -> None:
        """Bind the number to the bytes."""
        self._change(lambda ledger: ledger.bind(version, digest, epoch))

    def publish(self, version: int, digest: str, epoch: int) -> None:
        """Publish, unless something newer has been seen."""
        self._change(lambda ledger: ledger.publish(version, digest, epoch))

    def shut(self, epoch: int) -> None:
        """Refuse whatever this epoch may still send."""
        self._change(lambda ledger: ledger.shut(epoch))

    def ask(self, version: int, epoch: int) -> bool:
        """Is it published?"""
        return self._ledger.ask(version, epoch)

    def _change(self, change: _Change) -> None:
        with self._turn:
            self._ledger = change(self._ledger)


class FileLedger:
    """A ledger in a file that outlives its processes. No file is an empty ledger; the folder is made.

    Raises:
        SetupError: this is no path.
    """

    def __init__(self, path: str | Path) -> None:
        checks.seen_path("FileLedger", "path", path)
        # Resolved now: a later change of the working folder must not lead to another ledger, and replacing
        # a link by a file must not split the ledger in two.
        self.path = Path(path).resolve()
        self.name = durable.name_of(self.path)
        """How it is called in logs: the same for all rounds whose versions can be compared."""

    def check(self) -> None:
        """Make the folder, and see that a ledger can be kept there, before anything depends on it.

        Raises:
            SetupError: it cannot be read or written.
            LedgerCorrupt: what is there is no ledger.
        """
        try:
            self.current()
            with durable.exclusively(self.path):
                if not os.access(self.path.parent, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "is closed to this user", str(self.path.parent))
        except (OSError, LedgerUnavailable) as error:
            why = error.__cause__ or error
            raise SetupError(
                f"the version ledger {self.path} cannot be kept there ({why}): give a file in a folder that "
                "this user may write to"
            ) from why

    def current(self) -> Ledger:
        """What the ledger says now."""
        with self._named("read"):
            content = durable.read(self.path, _LIMIT)
        return Ledger() if content is None else Ledger.from_json(content, str(self.path))

    def version(self) -> int | None:
        """The published version; None before the first."""
        return self.current().version

    def admit(self, version: int, digest: str) -> None:
        """Refuse a version that could not be published."""
        self.current().admit(version, digest)

    def bind(self, version: int, digest: str, epoch: int) -> None:
        """Bind the number to the bytes; it is on the disk when this returns."""
        self._change(lambda ledger: ledger.bind(version, digest, epoch))

    def publish(self, version: int, digest: str, epoch: int) -> None:
        """Publish, unless something newer has been seen; it is on the disk when this returns."""
        self._change(lambda ledger: ledger.publish(version, digest, epoch))

    def shut(self, epoch: int) -> None:
        """Refuse whatever this epoch may still send."""
        self._change(lambda ledger: ledger.shut(epoch))

    def ask(self, version: int, epoch: int) -> bool:
        """Is it published?"""
        return self.current().ask(version, epoch)

    def _change(self, change: _Change) -> None:
        with self._named("write"), durable.exclusively(self.path):
            ledger = change(self.current())
            # Also if nothing changed: a writer that died between rename and sync left it for us to force out.
            durable.replace(self.path, ledger.to_json().encode("ascii"))

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except durable.NotForced as error:
            raise LedgerUnsure(
                f"changed the version ledger {self.path}, but may lose that: {error}"
            ) from error
        except OSError as error:
            raise LedgerUnavailable(f"cannot {what} the version ledger {self.path}: {error}") from error
