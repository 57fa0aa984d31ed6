"""The transport that is taken when none is named: by where the engines are, round by round.

* all of them in this process: ``memory``;
* all of them on this host: ``shm``;
* otherwise: ``collective``, which reaches engines on other hosts only if it is told the trainer's address,
  and so has to be named for that.

A link says where its engine is (``in_process``, ``nearby``), and an actor is known to be on this host when it
has said hello. Nothing of a transport that is not needed is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import final

from .fsm.contract import Capabilities, EngineLink, Port, Transport, Weights
from .fsm.errors import SetupError
from .fsm.plan import Plan
from .fsm.receipt import Participant

__all__ = ["CANDIDATES", "AutoTransport", "choose"]

CANDIDATES = ("memory", "shm", "collective")
"""What is chosen from."""


def choose(engines: Iterable[EngineLink]) -> str:
    """The name of the transport that suits these engines."""
    links = list(engines)
    if all(getattr(link, "in_process", False) for link in links):
        return "memory"
    return "shm" if all(map(_nearby, links)) else "collective"


def _nearby(link: EngineLink) -> bool:
    return bool(getattr(link, "in_process", False) or getattr(link, "nearby", False))


@final
class AutoTransport:
    """Hands each round to the transport that suits its engines.

    Args:
        make: makes a transport by its name.
        needs_all: whether every engine must take part; a collective cannot go on without one.
        strict: whether nothing is to be taken in the place of a transport that cannot be made here.
    """

    def __init__(self, make: Callable[[str], Transport], *, needs_all: bool, strict: bool = False) -> None:
        self._make, self._needs_all, self._strict = make, needs_all, strict
        self._made: dict[str, Transport] = {}
        self._chosen: Transport | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """That of the transport in use, or ``"auto"`` before there is one."""
        return "auto" if self._chosen is None else self._chosen.name

    @property
    def capabilities(self) -> Capabilities:
        """What at least one of them can do; ``open`` refuses what the chosen one cannot."""
        return Capabilities(stages=True, aliases=True, cross_host=True, survives_loss=True, dtypes=None)

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Choose, and open that one.

        Raises:
            SetupError: the engines are on several hosts, and the policy goes on without a lost one.
        """
        name = choose(engines.values())
        chosen = self._take(name)
        if not (self._needs_all or chosen.capabilities.survives_loss):
            far = next((link.id for link in engines.values() if not _nearby(link)), "of another system")
            raise SetupError(
                f"engine {far} is not known to be on this host, so the transport would be {chosen.name!r}, "
                'which cannot go on without a lost engine: leave on_engine_failure="quarantine" out, or name '
                "a transport that can"
            )
        chosen.open(plan, weights, engines, port)

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """As the chosen one does."""
        self._now().broadcast(plan, weights, port)

    def collect(self, plan: Plan, port: Port) -> None:
        """As the chosen one does."""
        self._now().collect(plan, port)

    def clean(self) -> None:
        """As the chosen one does."""
        self._now().clean()

    def abort(self) -> None:
        """As every one that was made does."""
        for made in self._all():
            made.abort()

    def close(self) -> None:
        """As every one that was made does."""
        for made in self._all():
            made.close()

    def _take(self, name: str) -> Transport:
        with self._lock:
            if name not in self._made:
                try:
                    self._made[name] = self._make(name)
                except SetupError:  # this system has no shared memory of the kind, or lacks a package
                    if name != "shm" or self._strict:
                        raise
                    name = "collective"
                    self._made.setdefault(name, self._make(name))
            chosen = self._chosen = self._made.pop(name)
            unused, self._made = list(self._made.values()), {name: chosen}
        for made in unused:  # the engines have moved, and seldom do
            made.close()
        return chosen

    def _now(self) -> Transport:
        if self._chosen is None:
            raise SetupError("no round was opened")
        return self._chosen

    def _all(self) -> list[Transport]:
        with self._lock:
            return list(self._made.values())
