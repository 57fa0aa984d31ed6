"""From what a user writes to the part it names. Heavy parts are imported here, when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from .fsm.contract import Executor, Observer, Transport, Weights
from .fsm.errors import SetupError
from .fsm.ledger import LedgerKeeper
from .fsm.lock import LockKeeper
from .handlers.ledger import FileLedger, MemoryLedger
from .handlers.lock import LocalLock, clock_epoch

__all__ = ["TRANSPORTS", "ledger_for", "lock_for", "sort_handlers", "transport_for", "weights_for"]

TRANSPORTS = ("memory", "collective")
"""The transports that can be named."""


def transport_for(transport: str | Transport) -> Transport:
    """The transport called so, or the object itself.

    Raises:
        SetupError: no transport is called so.
    """
    if not isinstance(transport, str):
        return transport
    if transport == "memory":
        from .transports.memory import MemoryTransport

        return MemoryTransport()
    if transport == "collective":
        from .transports.collective import CollectiveTransport

        return CollectiveTransport()
    raise SetupError(f"no transport is called {transport!r}; there are: {', '.join(TRANSPORTS)}")


def lock_for(lock: LockKeeper | str | None, lease: float) -> LockKeeper:
    """The keeper itself; the Ray actor of that name; or a lock of this process alone."""
    if lock is None:
        return LocalLock(lease=lease, epoch=clock_epoch())  # engines may remember an earlier trainer
    if isinstance(lock, str):
        from .handlers.ray_lock import RayLock

        return RayLock(lock, lease=lease)
    return lock


def ledger_for(ledger: LedgerKeeper | str | Path | None) -> LedgerKeeper:
    """The keeper itself; a file; or this process's memory."""
    if ledger is None:
        return MemoryLedger()
    if isinstance(ledger, (str, Path)):
        return FileLedger(ledger)
    return ledger


def weights_for(model: object, *, snapshot: bool) -> Weights:
    """The tensors of ``model`` as transports read them; with ``snapshot`` a private copy, if possible."""
    if all(hasattr(model, name) for name in ("materialize", "plan", "digest")):
        copy = getattr(model, "snapshot", None)
        return cast("Weights", copy() if snapshot and callable(copy) else model)
    from .transports.weights import TorchWeights

    weights = TorchWeights.of(cast("Any", model))
    return weights.snapshot() if snapshot else weights


def sort_handlers(handlers: Iterable[object]) -> tuple[tuple[Executor, ...], tuple[Observer, ...]]:
    """Executors and observers, each in the order given; one object may be both.

    Raises:
        SetupError: something that is neither.
    """
    executors: list[Executor] = []
    observers: list[Observer] = []
    for handler in handlers:
        executes = hasattr(handler, "prepare") and hasattr(handler, "clean")
        if executes:
            executors.append(cast("Executor", handler))
        if callable(handler):
            observers.append(cast("Observer", handler))
        elif not executes:
            raise SetupError(
                f"{handler!r} is no handler: an executor has prepare and clean, an observer is called with "
                "records"
            )
    return tuple(executors), tuple(observers)
