"""Ours: a ``WeightSync`` and engines with a ``Receiver`` in processes of their own, through the public names.

Engines are reached over a pipe each, in the plain words that Ray actors are told as well; so no contestant
waits for a cluster, and nothing but the transport differs between them. A transport that needs Ray has Ray
actors. What is timed is a whole round: lock, pause, plan, transfer, receipts, commit, publication, resume.
"""

from __future__ import annotations

import inspect
import logging
import os
from concurrent.futures import Future
from typing import Any

import torch

from weightsync import Policy, RayEngine, SetupError, WeightSync, ray_engine, receiver_for
from weightsync.fsm.contract import EngineLink, EngineStatus, Ticket
from weightsync.fsm.engine import Answer
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import PlanUnknown
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Expectation, Receipt
from weightsync.handlers.futures import again, then
from weightsync.handlers.words import read_answer, say, word
from weightsync.joining import TRANSPORTS

from .samehost_engines import EngineProcess
from .samehost_layouts import LAYOUTS, checksum, tensors
from .samehost_meter import own_memory
from .samehost_side import Absent, Spec

__all__ = ["Ours", "options", "policy_of"]


def options(spec: Spec) -> dict[str, Any]:
    """What ``receiver_for`` is told of the engine."""
    options: dict[str, Any] = {}
    if not spec.aliases:  # whoever swaps at the commit has the old weights until then, and stages by nature
        options["stages"] = spec.stages
    if "aliases" in inspect.signature(receiver_for).parameters:
        if spec.transport == "shm":  # no other transport has views to sample with
            options["aliases"] = spec.aliases
    elif spec.aliases:
        raise Absent("receiver_for has no aliases=True here")
    return options


class Engine:
    """An engine: a model, and what receives for it."""

    def __init__(self, spec: Spec, number: int) -> None:
        self._own = own_memory()
        self._held = tensors(LAYOUTS[spec.layout], seed=100 + number)
        self._receiver = receiver_for(self._held, f"engine-{number}", **options(spec))

    def own(self) -> dict[str, int]:
        return self._own

    def say(self, said: list[Any]) -> object:
        return say(self._receiver, said)

    def checksum(self) -> int:
        return checksum(self._held)


class PipeEngine:
    """The link to an engine's process."""

    in_process = False

    def __init__(self, process: EngineProcess, number: int) -> None:
        self.id = f"engine-{number}"
        self._process = process
        self._sent: set[tuple[str, str]] = set()

    def hello(self) -> Future[EngineStatus]:
        return self._ask("hello", None)

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        def ask(layout: Plan | str) -> Future[None]:
            return self._ask("open", session, incarnation, layout, expected, limit)

        known = (incarnation, plan.fingerprint)
        if known in self._sent:
            return again(ask(plan.fingerprint), PlanUnknown, lambda: ask(plan))
        self._sent.add(known)
        return ask(plan)

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        return self._ask("receive", session, ticket)

    def commit(self, session: Session) -> Future[None]:
        return self._ask("commit", session)

    def abort(self, session: Session) -> Future[Answer]:
        return self._ask("abort", session)

    def resume(self, session: Session) -> Future[None]:
        return self._ask("resume", session)

    def close(self) -> None:
        """The process is ended by whoever started it."""

    def _ask(self, name: str, session: Session | None, *rest: object) -> Future[Any]:
        said = word(name, None, session, *rest)
        return then(self._process.ask("say", said), lambda told: read_answer(name, told))


class _Pipes:
    """Engines in processes of ours."""

    def __init__(self, spec: Spec) -> None:
        self._processes = [EngineProcess(Engine, spec, number) for number in range(spec.engines)]
        for process in self._processes:
            process.ready()
        self.links: list[EngineLink] = [
            PipeEngine(process, number) for number, process in enumerate(self._processes)
        ]
        self.pids = [process.pid for process in self._processes]

    def all(self, question: str) -> list[Any]:
        return [each.result() for each in [process.ask(question) for process in self._processes]]

    def close(self) -> None:
        for process in self._processes:
            process.close()


class _Actors:
    """Engines in Ray actors, on a cluster of their own."""

    def __init__(self, spec: Spec) -> None:
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        import ray

        from .samehost_actor import Actor

        self._ray = ray
        room = int(4 * LAYOUTS[spec.layout].nbytes + (256 << 20))
        ray.init(
            num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            object_store_memory=room,
        )  # fmt: skip
        self._actors = [ray_engine(num_cpus=0)(Actor).remote(spec, number) for number in range(spec.engines)]
        self.pids: list[int] = ray.get([actor.pid.remote() for actor in self._actors])
        self.links: list[EngineLink] = [
            RayEngine(actor, id=f"engine-{number}") for number, actor in enumerate(self._actors)
        ]

    def all(self, question: str) -> list[Any]:
        found: list[Any] = self._ray.get([getattr(actor, question).remote() for actor in self._actors])
        return found

    def close(self) -> None:
        self._ray.shutdown()


def policy_of(spec: Spec) -> Policy:
    """What ``spec`` asks for; whatever of it this version of the library does not have, is absent."""
    if spec.transport not in TRANSPORTS:
        raise Absent(f"there is no transport {spec.transport!r} here, only {', '.join(TRANSPORTS)}")
    options(spec)
    try:
        return Policy(deadline=120, verify=spec.verify, raise_on_failure=True)  # type: ignore[arg-type]
    except SetupError as error:
        raise Absent(str(error)) from error


class Ours:
    """The trainer's side."""

    def __init__(self, spec: Spec, model: dict[str, torch.Tensor]) -> None:
        policy = policy_of(spec)
        self._model = model
        self._reached: _Pipes | _Actors = (_Actors if spec.ray else _Pipes)(spec)
        self._sync = WeightSync(self._reached.links, spec.transport, policy=policy)

    def hand_over(self, step: int) -> None:
        result = self._sync.on_step_end(step, self._model)
        assert result is not None
        assert result.ok

    def engines(self) -> list[tuple[int, dict[str, int]]]:
        return list(zip(self._reached.pids, self._reached.all("own"), strict=True))

    def checksums(self) -> list[int]:
        return self._reached.all("checksum")

    def close(self) -> None:
        self._sync.close()
        self._reached.close()
