"""Parts of a trainer that fail when they are told to: a transport, an executor, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weightsync.fsm.contract import Capabilities, EngineLink, Port, Transport, Weights
from weightsync.fsm.executors import RoundView, Undo
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Participant

__all__ = ["Bar", "Steps", "Tripwire"]


class Tripwire:
    """A transport around another one. ``arm`` lets one of its methods raise, before or after its work."""

    def __init__(self, transport: Transport) -> None:
        self._inner = transport
        self._armed: dict[tuple[str, str], Callable[[], None]] = {}
        self._skip = 0

    def arm(self, method: str, action: Callable[[], None], when: str = "before", skip: int = 0) -> None:
        """Let something go wrong, once: ``before`` the work of a method, or ``after`` it.

        The methods of the ports that it is given can be armed as well; ``skip`` so many calls go well before.
        """
        self._armed[method, when] = action
        self._skip = skip

    def disarm(self) -> bool:
        """Nothing more goes wrong. Whether something had not gone off."""
        armed = bool(self._armed)
        self._armed.clear()
        return armed

    @property
    def name(self) -> str:
        """As the engines know it."""
        return self._inner.name

    @property
    def capabilities(self) -> Capabilities:
        """Those of the transport inside."""
        return self._inner.capabilities

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Make endpoints."""
        self._around("open", plan, weights, engines, _Watched(port, self))

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Send."""
        self._around("broadcast", plan, weights, _Watched(port, self))

    def collect(self, plan: Plan, port: Port) -> None:
        """Wait for the receipts."""
        self._around("collect", plan, _Watched(port, self))

    def clean(self) -> None:
        """The good end."""
        self._around("clean")

    def abort(self) -> None:
        """The bad end."""
        self._around("abort")

    def close(self) -> None:
        """Give everything back."""
        self._inner.close()

    def _around(self, method: str, *args: Any) -> None:
        self._go_off(method, "before")
        getattr(self._inner, method)(*args)
        self._go_off(method, "after")

    def _go_off(self, method: str, when: str) -> None:
        if (method, when) not in self._armed:
            return
        if self._skip:
            self._skip -= 1
            return
        self._armed.pop((method, when))()


class _Watched:
    """A port whose calls can be armed as well, under their names."""

    def __init__(self, port: Port, wire: Tripwire) -> None:
        self._port, self._wire = port, wire

    def __getattr__(self, name: str) -> Any:
        self._wire._go_off(name, "before")
        return getattr(self._port, name)


class Steps:
    """An executor. ``arm`` lets one of its three steps raise; what it did is in ``done``."""

    def __init__(self, name: str = "hook", done: list[str] | None = None) -> None:
        self.name = name
        self.done: list[str] = [] if done is None else done
        self._armed: dict[str, Callable[[], None]] = {}

    def arm(self, step: str, action: Callable[[], None]) -> None:
        """Let something go wrong, once: in ``prepare``, ``clean`` or ``undo``."""
        self._armed[step] = action

    def disarm(self) -> None:
        """Nothing more goes wrong."""
        self._armed.clear()

    def prepare(self, round: RoundView) -> Undo:
        """Get ready."""
        self._step("prepare")
        return lambda: self._step("undo")

    def clean(self, round: RoundView) -> None:
        """The good end."""
        self._step("clean")

    def _step(self, step: str) -> None:
        action = self._armed.pop(step, None)
        if action is not None:
            action()
        self.done.append(f"{self.name}.{step}")


class Bar:
    """A progress bar that says what it was told."""

    def __init__(self) -> None:
        self.moves: list[int] = []

    def update(self, n: int = 1, /) -> None:
        """Move on."""
        self.moves.append(n)
