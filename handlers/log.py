"""The state log: one JSON line a record, written through structlog. Nothing else imports structlog.

structlog is wrapped here and never configured: what the program around us does with its own loggers neither
changes these lines nor is changed by them. A line holds the keys of ``KEYS`` and no others, in their order;
its level (:func:`level_of`) decides how loudly a console tells it, but is no part of it.

Each line is handed to the file in one write in append mode, so that several processes can share a file, and a
killed one leaves at most its last line unfinished. It is not synced: what was written survives the process,
not a power failure.

A log that cannot be written raises once and is closed from then on. :class:`~.observers.Observers` turns that
into one error line, and the round goes on.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import structlog

from ..fsm import checks
from ..fsm.errors import SetupError
from ..fsm.record import KEYS, Record
from ..fsm.states import Outcome, State

__all__ = ["StateLog", "level_of", "tell"]

_TROUBLES = frozenset({"refused", "escalation", "undo", "cleanup"})
"""What asks for a person: an impossible fact, a lock that cannot be given back, things left over."""

_WARNINGS = frozenset({"over_budget", "escalated"})
"""What a person may want to know: something took more than it was given."""

_PATIENCE = 1.0
"""Seconds for which closing waits for a write that hangs; then the file is left to the garbage collector."""


class StateLog:
    """An observer that writes every record to a file. Safe to call from several threads.

    Args:
        path: the file. Missing folders are made; a new file belongs to its owner alone (mode 0600).
        console: also tell state changes and troubles on standard error, for people.

    Raises:
        SetupError: the file cannot be opened.
    """

    name = "state log"

    def __init__(self, path: str | os.PathLike[str], *, console: bool = False) -> None:
        checks.seen_path("StateLog", "path", path)
        checks.flag("StateLog", "console", console)
        self.path = Path(path)
        self._lines = _Lines(self.path)
        self._log = _logger(self._lines, [_in_order, structlog.processors.JSONRenderer()])
        self._console = _console() if console else None

    def __call__(self, record: Record) -> None:
        """Write ``record``.

        Raises:
            OSError: it cannot be written. Later records are let go without a word.
        """
        if self._lines.closed:
            return
        values = record.to_json()
        # structlog calls its message `event`: it is handed over as what it is, never as one of the values.
        event = values.pop("event")
        try:
            getattr(self._log, level_of(record))(event, **values)
        except Exception:
            self._lines.close()
            raise
        self._tell(record)

    def close(self) -> None:
        """Close the file; idempotent. Records that come later are let go."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a StateLog stays in its process; another process makes its own, on the same path if it likes"
        )

    def _tell(self, record: Record) -> None:
        """A line on the console. If nobody can read it any more, that is no reason to lose the log."""
        if self._console is None or not _worth_telling(record):
            return
        try:
            getattr(self._console, level_of(record))(_headline(record), **_details(record))
        except (OSError, ValueError):
            self._console = None


def tell(level: Literal["debug", "info", "warning", "error"], event: str, **values: str) -> None:
    """One structured line about this process rather than a round, on the logger ``weightsync``.

    What becomes of it is for ``logging`` to say, as of all other lines there. Empty values are left out.
    """
    render = structlog.processors.LogfmtRenderer(key_order=["event"], drop_missing=True)
    logger = _logger(logging.getLogger("weightsync"), [render])
    getattr(logger, level)(event, **{key: " ".join(value.split()) for key, value in values.items() if value})


def level_of(record: Record) -> Literal["debug", "info", "warning", "error"]:
    """How loud a record is: what happens within a state is for those who search, Failed is for everybody."""
    facts = record.facts or {}
    if record.event in _TROUBLES or facts.get("unclean") is True:
        return "error"
    failed = State.Failed.name in (record.source, record.target)
    failed = failed or facts.get("outcome") == Outcome.failed.name
    failed = failed or record.event in _WARNINGS
    if failed or record.event == "retry" or (record.event == "call" and record.error):
        return "warning"
    return "info" if record.event in ("opened", "result") or _moves(record) else "debug"


def _moves(record: Record) -> bool:
    return record.event == "transition" and record.source != record.target


def _worth_telling(record: Record) -> bool:
    return _moves(record) or record.event == "result" or level_of(record) == "error"


# -- for machines -------------------------------------------------------------------------------------------


def _logger(sink: object, processors: list[Any]) -> Any:
    """A structlog logger of its own, bound at once: whoever configures structlog later does not reach it."""
    return structlog.wrap_logger(
        sink,
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        context_class=dict,
        cache_logger_on_first_use=False,
    ).bind()


def _in_order(_: object, __: str, values: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The keys in the order in which they are written."""
    return {key: values[key] for key in KEYS if key in values}


class _Lines:
    """What structlog wraps: takes a finished line and appends it to the file, in one piece."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115 - needs an opener
        except OSError as error:
            raise SetupError(f"the state log {path} cannot be opened: {error.strerror or error}") from error
        self._start = b"" if _ends_with_a_line(path) else b"\n"
        self.closed = False
        """Whether nothing is written any more."""

    def write(self, line: str) -> None:
        """Append ``line``."""
        with self._lock:
            if self.closed:
                return
            data = memoryview(self._start + line.encode() + b"\n")
            while data:  # one write is all it takes, unless the disk fills up in the middle of the line
                written = self._file.write(data)
                if not written:
                    raise OSError(errno.EIO, "nothing was written", self._file.name)
                data = data[written:]
            self._start = b""

    debug = info = warning = error = write

    def close(self) -> None:
        """Close the file; idempotent. A write that hangs is waited for only a little while."""
        self.closed = True
        if self._lock.acquire(timeout=_PATIENCE):
            try:
                self._file.close()
            finally:
                self._lock.release()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _ends_with_a_line(path: Path) -> bool:
    """Whether a new line can simply be appended, or a killed process left half of one."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return True
        with path.open("rb") as file:
            if file.seek(0, io.SEEK_END) == 0:
                return True
            file.seek(-1, io.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:
        return True  # it may be written, but not be read: then nobody knows, and a line is a line


# -- for people ---------------------------------------------------------------------------------------------


def _console() -> Any:
    stream = sys.stderr
    colours = stream.isatty() and not os.environ.get("NO_COLOR")
    renderer = structlog.dev.ConsoleRenderer(colors=colours, sort_keys=False)
    return _logger(structlog.PrintLogger(stream), [structlog.processors.add_log_level, renderer])


_SHOWN = (
    "round", "step", "version", "trigger", "guard", "engine", "bucket", "seconds", "culprit", "error", "undo",
)  # fmt: skip


def _headline(record: Record) -> str:
    if _moves(record):
        return f"{record.source} -> {record.target}"
    if record.event == "result":
        return f"round {(record.facts or {}).get('outcome')}"
    return record.event


def _details(record: Record) -> dict[str, Any]:
    """The values a person looks for first."""
    found = {key: value for key in _SHOWN if (value := getattr(record, key)) is not None}
    return {"timestamp": time.strftime("%H:%M:%S", time.localtime(record.time)), **found}
