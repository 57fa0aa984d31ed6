"""Progress: a bar moves on by one for each round that did what was asked, and for no other.

It watches the result of each round, so a failed one, or one that is retried, does not move it. Any object
with ``update(n)`` is a bar, such as a ``tqdm``. Without one, a ``tqdm`` is made at the first success, or,
where tqdm is not installed, a line is printed for each.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any, Protocol

from ..fsm import checks
from ..fsm.record import Record
from ..fsm.states import Outcome

__all__ = ["Bar", "Progress"]

_LOGGER = logging.getLogger("weightsync")

_GOOD = frozenset({Outcome.complete.name, Outcome.partial.name})


class Bar(Protocol):
    """What can be moved on."""

    def update(self, n: int = 1, /) -> object:
        """Move on by ``n``."""


class Progress:
    """An observer that advances a bar by one for each successful round.

    Args:
        bar: a bar of yours, which is never closed here; by default one is made when it is first needed.

    Raises:
        SetupError: this is no bar.
    """

    name = "progress"

    def __init__(self, bar: Bar | None = None) -> None:
        if bar is not None and not checks.has(bar, ("update",)):
            raise checks.refusal("Progress", "bar", bar, "a bar with update(n) is needed, such as a tqdm")
        # Asked with `is`: a tqdm without a total counts as false.
        self._own = bar is None
        self._bar = bar

    def __call__(self, record: Record) -> None:
        """Move on if ``record`` is the result of a round that succeeded."""
        if not _succeeded(record):
            return
        if self._bar is None:
            self._bar = _made()
        self._bar.update(1)

    def close(self) -> None:
        """Close a bar that was made here; idempotent."""
        close = getattr(self._bar, "close", None)
        if self._own and callable(close):
            close()
            self._bar = None


def _succeeded(record: Record) -> bool:
    """Whether this is a round's last word, and a good one: the same question as ``RoundResult.ok``."""
    facts = record.facts or {}
    return record.event == "result" and facts.get("outcome") in _GOOD and record.error is None


def _made() -> Bar:
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm
    except (ImportError, OSError) as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != "tqdm":
            what = f"{type(error).__name__}: {error}"
            _LOGGER.warning("tqdm is broken, so a line is printed for each round: its import raised %s", what)
        return _Printed()

    class Quiet(tqdm):  # type: ignore[misc]
        """Without the thread that tqdm keeps for bars that stand still: this one is told when it moves."""

        monitor_interval = 0

    bar: Bar = Quiet(desc="weights handed over", unit=" rounds")
    return bar


class _Printed:
    """A bar for those who have none: a line on standard error for each step."""

    def __init__(self) -> None:
        self._count = 0

    def update(self, n: int = 1, /) -> None:
        """Count, and say so."""
        self._count += n
        print(f"weights handed over ({self._count} so far)", file=sys.stderr, flush=True)  # noqa: T201 - its purpose
