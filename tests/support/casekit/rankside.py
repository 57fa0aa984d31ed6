"""The ranks of a trainer in processes of their own, which raise, are killed, or are frozen."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from weightsync import FollowerSync, LocalEngine, Policy, TrainerRanks, WeightSync, receiver_for
from weightsync.fsm.executors import RoundView

__all__ = ["LIMIT", "SILENT", "Processes", "serve"]

LIMIT, SILENT = 20.0, 1.5
"""Seconds that a rank may be late, or silent."""

DEADLINE = 60.0
"""Seconds that nothing honest takes."""


class _Holds:
    """A handler of a rank; with ``holds`` it does not come to an end in the second hand-over."""

    name = "holds"

    def __init__(self, pipe: Connection, holds: bool) -> None:
        self.pipe, self.holds = pipe, holds

    def prepare(self, round: RoundView) -> None:
        """Nothing."""

    def clean(self, round: RoundView) -> None:
        """Release what is held; or say so, and never do."""
        if round.step == 2 and self.holds:
            self.pipe.send("releasing")
            threading.Event().wait(DEADLINE)


def serve(rank: int, where: str, script: dict[str, Any], pipe: Connection) -> None:
    """One rank, in a process of its own: three hand-overs, of which the script bends the second one."""
    stores: Any = dist  # which exports them, but does not say so
    if where.startswith("tcp:"):
        address = "127.0.0.1", int(where[4:]), 3
        store = stores.TCPStore(*address, is_master=rank == 0, wait_for_workers=False)
    else:
        store = stores.FileStore(where, 3)
    policy = Policy(deadline=40.0, idle=25.0, engine_limit=15.0, lease=2.0)
    ranks = TrainerRanks(store, rank, 3, limit=LIMIT, silent=SILENT)
    size = 5 if script.get("mismatch") == rank else 4
    mine, step = script.get("rank") == rank, 0
    slow = threading.Event()

    def fault(point: str, bucket: int) -> None:
        if script.get("slow") and step == 2 and point == "apply":
            slow.wait(0.5)  # by then rank 0 has said where it is
            pipe.send("sending")
            slow.wait(script["slow"])

    def model() -> Iterator[tuple[str, Any]]:
        yield "w", torch.full((4,), float(step))
        if mine and step == 2 and script.get("raises"):
            raise OSError("no memory")
        yield "head", torch.full((size,), float(step))

    held = {"w": torch.zeros(4), "head": torch.zeros(4)}
    sync: Any = (
        FollowerSync(ranks, policy=policy, handlers=[_Holds(pipe, script.get("holds") == rank)])
        if rank
        else WeightSync([LocalEngine(receiver_for(held, "e0", fault=fault))], policy=policy, ranks=ranks)
    )
    with sync:
        for step in (1, 2, 3):
            began = time.monotonic()
            try:
                result = sync.on_step_end(step, model())
                told = "ok" if result.ok else f"{type(result.error).__name__}: {result.summary()}"
                version = result.version
            except Exception as error:  # noqa: BLE001 - it is told
                told, version = f"raised {type(error).__name__}: {error}", None
            pipe.send((step, told, version, time.monotonic() - began))
            if told != "ok":
                break
    pipe.send("over")
    if rank == 0:  # which may keep the store that others still read
        pipe.poll(DEADLINE)


class Processes:
    """Three ranks in processes, and what each said."""

    def __init__(self, where: str, **script: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])  # which takes longer than anything else here
        pipes = [context.Pipe() for _ in range(3)]
        self.said: list[list[Any]] = [[], [], []]
        self.pipes = [mine for mine, _ in pipes]
        self.all = [
            context.Process(target=serve, args=(rank, where, script, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.all:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def hear(self, rank: int, until: Callable[[Any], bool], limit: float = DEADLINE) -> Any:
        """What it says, up to the word that is waited for."""
        end = time.monotonic() + limit
        while self.pipes[rank].poll(max(0.0, end - time.monotonic())):
            word = self.pipes[rank].recv()
            self.said[rank].append(word)
            if until(word):
                return word
        raise AssertionError(f"rank {rank} said no more than {self.said[rank]}")

    def step(self, rank: int, number: int) -> tuple[str, int | None, float]:
        """How this hand-over ended on that rank."""
        known = [word for word in self.said[rank] if word[0] == number]
        word = known[0] if known else self.hear(rank, lambda said: said[0] == number)
        return word[1], word[2], word[3]

    def end(self) -> None:
        """Whatever they do."""
        for process in self.all:
            if process.is_alive():
                process.kill()
            process.join(10)
