"""Handlers written as coroutines: ``async def prepare``, ``clean`` and undo, and observers that await.

The round calls them on its threads, so they go over the bridge of their ``WeightSync``, each with a limit.
What a round no longer waits for is cancelled as soon as it is known to have failed, and an undo that comes
too late for it is done at once: nobody else would do it.

That a step has to be awaited is known before it is called if it is a coroutine function, or an object whose
call is one. A decorator or a lambda may hide it; so what a step or an undo hands back is looked at, too, and
awaited if it can be. Nothing that was made to be awaited is dropped.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ..fsm import checks
from ..fsm.errors import RoundCancelled, SetupError
from ..fsm.executors import RoundView, Undo
from ..fsm.record import Record
from ..fsm.states import State
from .bridge import BridgeCall, LoopBridge
from .inside import step_of
from .threads import spawn

__all__ = [
    "AsyncExecutor", "AsyncObserver", "Awaiting", "AwaitingObserver",
    "executes_on_a_loop", "observes_on_a_loop",
]  # fmt: skip

_LOGGER = logging.getLogger("weightsync")
_SAYS = frozenset({"after_ranks", "engines", "wakes"})


class Awaiting(Protocol):
    """An executor of which some steps, or all, are coroutine functions. So may be the undo."""

    @property
    def name(self) -> str:
        """For the log and for errors."""

    def prepare(
        self, round: RoundView
    ) -> Callable[[], object] | Awaitable[Callable[[], object] | None] | None:
        """As an executor's."""

    def clean(self, round: RoundView) -> Awaitable[None] | None:
        """As an executor's."""


class AwaitingObserver(Protocol):
    """An observer that is a coroutine function."""

    def __call__(self, record: Any, /) -> Awaitable[None]:
        """Take note of ``record``."""


def executes_on_a_loop(handler: object) -> bool:
    """Whether one of its steps is known to make a coroutine."""
    return any(observes_on_a_loop(getattr(handler, step, None)) for step in ("prepare", "clean"))


def observes_on_a_loop(handler: object) -> bool:
    """Whether it is known that to call it makes a coroutine."""
    called = getattr(handler, "__call__", None)  # noqa: B004 - whether it can be called is not the question
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


class AsyncExecutor:
    """An executor of the user's, of which any step may make a coroutine; an observer, to hear of the end.

    Where it stands among others, and which engines it moves, it says as the handler does.

    Args:
        handler: the user's.
        bridge: of the ``WeightSync``, which closes it.
        limit: seconds for each step.
    """

    def __init__(self, handler: Awaiting, bridge: LoopBridge, limit: float) -> None:
        self.name = handler.name
        self._handler, self._bridge, self._limit = handler, bridge, limit
        self._lock = threading.Lock()
        self._running: dict[str, BridgeCall[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in _SAYS:
            raise AttributeError(name)
        return getattr(self._handler, name)

    def prepare(self, round: RoundView) -> Undo | None:
        """As the handler does, and its undo over the bridge as well.

        Raises:
            SetupError: what it hands back is no undo.
        """
        with step_of(self._bridge):
            undo = self._do(self._handler.prepare, round)
        if undo is not None and not callable(undo):
            raise SetupError(
                f"{self.name}.prepare handed {checks.shown(undo)} back: what undoes it is needed, or None"
            )
        return None if undo is None else lambda: self._undo(undo)

    def clean(self, round: RoundView) -> None:
        """As the handler does."""
        with step_of(self._bridge):
            self._do(self._handler.clean, round)

    def __call__(self, record: Record) -> None:
        """A round that has failed waits for none of its steps any more. Its undo is another matter."""
        if record.event == "transition" and record.target == State.Failed.name:
            self.give_up(record.round)

    def give_up(self, round: str) -> None:
        """End the step that runs for this round, if one does."""
        with self._lock:
            call = self._running.pop(round, None)
        if call is not None:
            call.cancel(
                RoundCancelled(f"the round has failed and waits no longer for {call.name} of {self.name}")
            )

    def _do(self, step: Callable[[RoundView], Any], round: RoundView) -> Any:
        work: Callable[..., Any] = step
        args: tuple[Any, ...] = (round,)
        if not observes_on_a_loop(step):
            made = step(round)
            if not inspect.isawaitable(made):
                return made
            work, args = self._wait_for(made, getattr(step, "__name__", "step")), ()
        which = round.session.round
        call = self._bridge.begin(work, *args, limit=self._limit, unclaimed=self._too_late)
        with self._lock:
            self._running[which] = call
        try:
            return call.result()
        finally:
            with self._lock:
                self._running.pop(which, None)

    def _undo(self, undo: Callable[[], object]) -> None:
        with step_of(self._bridge):
            if observes_on_a_loop(undo):
                self._bridge.call(undo, limit=self._limit)  # type: ignore[arg-type]
            elif inspect.isawaitable(made := undo()):
                self._bridge.call(self._wait_for(made, "undo"), limit=self._limit)

    def _wait_for(self, made: Awaitable[Any], step: str) -> Callable[[], Awaitable[Any]]:
        """A coroutine function that awaits what was made, and has a name for errors."""

        async def wait() -> Any:
            return await made

        wait.__qualname__ = f"{self.name}.{step}"
        return wait

    def _too_late(self, undo: Undo | None) -> None:
        """On the loop's thread, which may not wait."""
        if undo is not None:
            spawn(f"weightsync-undo-{self.name}", self._undo_late, undo)

    def _undo_late(self, undo: Undo) -> None:
        try:
            self._undo(undo)
        except BaseException as error:  # noqa: BLE001 - the round has gone on, and nobody is there to be told
            what = f"{type(error).__name__}: {error}"
            _LOGGER.error("%s came too late for its round, and its undo raised %s", self.name, what)  # noqa: TRY400


class AsyncObserver:
    """An observer that is a coroutine function, or whose call is one.

    Args:
        handler: the user's.
        bridge: of the ``WeightSync``, which closes it.
        limit: seconds for each record; one that takes longer disables it, as whatever it raises does.
    """

    def __init__(self, handler: AwaitingObserver, bridge: LoopBridge, limit: float) -> None:
        self.name = getattr(handler, "name", None) or getattr(handler, "__name__", type(handler).__name__)
        self._handler, self._bridge, self._limit = handler, bridge, limit

    def __call__(self, record: Record) -> None:
        """Tell it, and wait until it has taken note."""
        with step_of(self._bridge):  # what waits there for a round keeps the loop from its handlers
            self._bridge.call(self._handler, record, limit=self._limit)

    def close(self) -> None:
        """As the handler does, if it does."""
        close = getattr(self._handler, "close", None)
        if close is not None and observes_on_a_loop(close):
            # On a thread of its own: whoever closes may run an event loop, which stands still for it anyway.
            spawn(
                f"weightsync-close-{self.name}", lambda: self._bridge.call(close, limit=self._limit)
            ).result()
        elif callable(close):
            close()
