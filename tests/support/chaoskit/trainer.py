"""The trainer of a run, in a process of its own: a ``Bench``, whose rounds meet with what was drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import ray

from casekit.bench import Bench, quick
from casekit.levels import Usage, eventually, usage
from casekit.rayside import InActor, environment
from casekit.scripts import ANY, Injected, Raise, Sleep
from casekit.tensors import state
from casekit.wrapped import Steps, Tripwire
from weightsync.fsm.policy import Limits, Policy
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition
from weightsync.handlers.ledger import FileLedger
from weightsync.handlers.log import StateLog
from weightsync.joining import transport_for

from .causes import check
from .deeds import Die, Freeze, end, freeze, keeper_of
from .faults import IN_BUCKETS, Fault
from .witness import Witness

__all__ = ["LEASE", "SHORT", "Trainer", "trainer"]

LEASE = 2.0
POLICY = quick(deadline=20.0, idle=12.0, engine_limit=8.0, drain=8.0, lease=LEASE)
"""Patient with a machine that is busy."""

SILENT = quick(deadline=20.0, lease=LEASE)
"""For a round in which an engine is stopped: for longer than this waits for it."""

SHORT = quick(deadline=6.0, lease=LEASE)
"""For a round in which the trainer dies: an engine stays in its session for as long as the deadline."""

_RESTART = 8.0
"""Seconds for Ray to start another keeper, on a machine that is busy."""


class _Either(Policy):
    """One of these policies: which one may change between rounds."""

    now = POLICY

    def choose(self, policy: Policy) -> None:
        """From the next round on. A policy is frozen otherwise."""
        object.__setattr__(self, "now", policy)

    def limits(self) -> Limits:
        """Those of the present one."""
        return self.now.limits()


def _either() -> _Either:
    return _Either(**{each.name: getattr(POLICY, each.name) for each in fields(POLICY)})


class Trainer:
    """What runs in the process."""

    def become(self, engines: list[InActor], lock: tuple[Any, ...], folder: Path, log: Path) -> int:
        """Be the trainer of these engines, after the one that died. The process id."""
        self._engines, self._lock = engines, Witness(*lock)
        self._wire, self._hook = Tripwire(transport_for("collective")), Steps()
        self._fired: list[Fault] = []
        self._raised: dict[Fault, BaseException] = {}
        self._policy = _either()
        self._bench = Bench(
            engines, self._wire, policy=self._policy, handlers=[self._hook, StateLog(log)], lock=self._lock,
            rival=Witness(*lock), ledger=FileLedger(folder / "ledger.json"),
        )  # fmt: skip
        return os.getpid()

    def good(self, number: int) -> dict[str, Usage]:
        """A round in which nothing goes wrong; what all processes hold afterwards.

        The engines are asked first who they are.
        """
        self._wire.disarm()
        self._hook.disarm()
        self._bench.sync.servable()
        self._policy.choose(POLICY)
        self._bench.works(state(number))
        return {"the trainer": usage(), **{engine.name: engine.usage() for engine in self._engines}}

    def bad(self, number: int, faults: list[Fault]) -> tuple[str, list[Fault]]:
        """A round in which these go wrong; what became of it, and which of them happened."""
        self._fired.clear()
        self._raised.clear()
        kinds = {fault.kind for fault in faults}
        self._policy.choose(
            SHORT if "trainer-kill" in kinds else SILENT if "engine-stop" in kinds else POLICY
        )
        lives = {engine.name: engine.look().incarnation for engine in self._engines}
        for fault in faults:
            self._arm(fault)
        keeper = [fault for fault in faults if fault.kind.startswith("keeper")]
        kills = any(fault.kind == "keeper-kill" for fault in keeper)
        stopped = sum(fault.seconds for fault in faults if fault.kind in ("trainer-stop", "keeper-stop"))
        late = stopped + (LEASE * 7 / 3 if keeper else 0.0) + (_RESTART if kills else 0.0)
        result = self._bench.endures(state(number), more=late, free=1.5 + late)
        for fault in faults:
            if fault.kind.startswith("engine") and self._went_off(fault, lives):
                self._fired.append(fault)
        check(result, self._fired, [engine.name for engine in self._engines], self._raised)
        self._spares(result, faults)
        how = "worked" if result.ok else f"failed in {result.failed_in}: {type(result.error).__name__}"
        who = f" by {result.culprit}" if result.culprit else ""
        return f"{'>'.join(name[:2] for name in result.path)} {how}{who}", list(self._fired)

    def end(self) -> None:
        """Give everything back; fails if something is left."""
        self._bench.__exit__(None, None)

    # -- inside ----------------------------------------------------------------------------------------

    def _spares(self, result: RoundResult, faults: list[Fault]) -> None:
        """What goes wrong in the trainer alone costs no engine that stages its place."""
        if all(fault.kind in ("cancel", "trainer-raise") for fault in faults):
            lost = [
                row.engine
                for row, engine in zip(result.engines, self._engines, strict=True)
                if engine.stages and row.disposition is Disposition.quarantined
            ]
            assert not lost, f"nothing happened to {lost}, and they are quarantined: {result.summary()}"

    def _went_off(self, fault: Fault, lives: dict[str, str]) -> bool:
        engine = self._engines[fault.engine]
        if engine.look().incarnation != lives[engine.name]:
            return True  # of several faults in it, nobody knows any more
        return not engine.ask("armed", fault.point, _bucket(fault))

    def _arm(self, fault: Fault) -> None:
        if fault.kind.startswith("engine"):
            deeds: dict[str, Callable[[], None]] = {
                "engine-kill": Die(),
                "engine-stop": Freeze(fault.seconds),
                "engine-slow": Sleep(fault.seconds),
                "engine-raise": Raise(Injected(str(fault))),
            }
            self._engines[fault.engine].arm(fault.point, deeds[fault.kind], _bucket(fault))
            return
        deed = self._deed(fault)

        def go_off() -> None:
            self._fired.append(fault)
            deed()

        if fault.point in ("prepare", "clean"):
            self._hook.arm(fault.point, go_off)
        else:
            self._wire.arm(fault.point.removeprefix("transport "), go_off, skip=fault.bucket)

    def _deed(self, fault: Fault) -> Callable[[], None]:
        self._raised[fault] = Injected(str(fault))
        keeper = keeper_of(self._lock.name)
        deeds: dict[str, Callable[[], None]] = {
            "trainer-kill": Die(),
            "trainer-stop": Freeze(fault.seconds),
            "trainer-raise": Raise(self._raised[fault]),
            "cancel": self._cancel,
            "line-cut": lambda: self._cut(fault.engine),
            "keeper-kill": lambda: end(keeper),
            "keeper-stop": lambda: freeze(keeper, fault.seconds),
        }
        return deeds[fault.kind]

    def _cancel(self) -> None:
        assert eventually(lambda: self._bench.pending)
        assert self._bench.pending is not None
        self._bench.pending.cancel()

    def _cut(self, engine: int) -> None:
        """As if the host had closed the socket."""
        line = self._lock._line if engine < 0 else self._engines[engine].link._line
        if line is not None:
            line._shut()


def _bucket(fault: Fault) -> int:
    return fault.bucket if fault.point in IN_BUCKETS else ANY


def trainer() -> Any:
    """Such a process, as a Ray actor that is not started again. It is no trainer before it has become one."""
    made: Any = ray.remote(Trainer)
    return made.options(num_cpus=0, runtime_env=environment()).remote()
