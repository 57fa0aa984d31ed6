"""A trainer in a process of its own, which can be met in any state of a round, and says late words later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from casekit.bench import quick
from casekit.rayside import environment
from casekit.scripts import Injected, Raise
from casekit.tensors import state
from casekit.wrapped import Steps, Tripwire
from weightsync import RayEngine, WeightSync
from weightsync.fsm.contract import Ticket as Endpoint
from weightsync.fsm.engine_table import Session
from weightsync.fsm.lock import Granted, Ticket
from weightsync.fsm.results import RoundResult
from weightsync.handlers.log import StateLog
from weightsync.joining import transport_for

from .witness import Witness

__all__ = ["STATES", "Owner", "owner"]

STATES = ("Idle", "Locked", "Broadcasting", "Awaiting", "Cleaning", "Failed")
"""Where a round can be met."""

_PATIENCE = 60.0


class Owner:
    """What runs in the process."""

    sync: WeightSync | None = None

    def become(
        self, name: str, engines: list[tuple[str, Any]], lock: tuple[Any, ...], log: Path, deadline: float
    ) -> int:
        """Be this trainer from now on. ``lock`` is what ``Witness`` takes. The process id."""
        self.end()
        self.name, self.lock = name, Witness(*lock)
        self.wire, self.hook = Tripwire(transport_for("collective")), Steps()
        self.links = [RayEngine(actor, id=each) for each, actor in engines]
        self.sync = WeightSync(
            self.links, self.wire, policy=quick(deadline=deadline, lease=self.lock.lease), lock=self.lock,
            handlers=[self.hook, StateLog(log)], owner=name,
        )  # fmt: skip
        self.last: RoundResult | None = None
        return os.getpid()

    def arm(self, where: str, action: Callable[[], None]) -> None:
        """Let something happen when the next round is in this state."""
        if where == "Failed":
            self.wire.arm("bucket_sent", Raise(Injected("sending broke")), skip=1)
        places: dict[str, Callable[[], None]] = {
            "Idle": lambda: None,  # whoever waits for the lock needs nothing to be held up by
            "Locked": lambda: self.hook.arm("prepare", action),
            "Broadcasting": lambda: self.wire.arm("bucket_sent", action, skip=1),
            "Awaiting": lambda: self.wire.arm("collect", action),
            "Cleaning": lambda: self.hook.arm("clean", action),
            "before the first bucket": lambda: self.wire.arm("broadcast", action),
            "Failed": lambda: self.hook.arm("undo", action),
        }
        places[where]()

    def round(self, number: int) -> dict[str, Any]:
        """One round with ``state(number)``; what became of it."""
        assert self.sync is not None
        self.last = result = self.sync.begin(number, state(number), snapshot=False).wait()
        return {
            "ok": result.ok, "path": result.path, "epoch": result.epoch, "error": str(result.error),
            "kind": type(result.error).__name__, "published": result.published, "notes": result.notes,
        }  # fmt: skip

    def late(self) -> dict[str, str]:
        """Say every word of the last round once more, past its machine. What each came to."""
        assert self.last is not None
        session = Session(self.last.round, self.last.epoch, self.last.version)
        ticket = Ticket(f"{session.round}-1", self.name, session.round)
        found: dict[str, str] = {}
        for link in self.links:
            for word in ("receive", "commit", "resume"):
                said = (session, Endpoint("collective", {})) if word == "receive" else (session,)
                error = getattr(link, word)(*said).exception(_PATIENCE)
                found[f"{link.id} {word}"] = type(error).__name__
        for word in ("renew", "release"):
            try:
                found[word] = getattr(self.lock, word)(ticket, session.epoch).how.name
            except Exception as error:  # noqa: BLE001 - it is what is looked for
                found[word] = type(error).__name__
        return found

    def hold(self, seconds: float) -> int:
        """Take the lock and give it back after ``seconds``; the epoch."""
        ticket = self.lock.request(self.name, f"{self.name} {time.monotonic_ns()}")
        answer = self.lock.wait(ticket, _PATIENCE)
        assert isinstance(answer, Granted)
        time.sleep(seconds)
        self.lock.release(ticket, answer.epoch)
        return answer.epoch

    def end(self) -> None:
        """Give everything back."""
        if self.sync is not None:
            self.sync.close()


def owner() -> Any:
    """Such a process, as a Ray actor that is not started again. It is no trainer before it has become one."""
    made: Any = ray.remote(Owner)
    return made.options(num_cpus=0, max_concurrency=2, runtime_env=environment()).remote()
