"""Ranks that meet at a barrier, each in a process of its own, over a real store."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import multiprocessing
import os
import random
import struct
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weightsync.fsm.errors import RankError, RoundCancelled
from weightsync.fsm.ranks import Pulses
from weightsync.fsm.votes import Decision, Meeting, without
from weightsync.handlers.barrier import Barrier
from weightsync.handlers.rank_store import RankStore

__all__ = ["PARAMETERS", "SharedBudget", "Side", "Sides"]

DEADLINE = 110.0
"""Seconds that nothing honest takes."""

CAPACITY, PARAMETERS, CACHE = 100, 60, 80
"""What a device has, what a rank of the trainer holds on it, and what the engine's cache takes there."""


class SharedBudget:
    """The memory of some devices, which all processes take from."""

    def __init__(self, path: Path, devices: int) -> None:
        # Whoever comes first makes it, and nobody empties it: another rank may have mapped it already.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        self._file.truncate(8 * devices)
        self._map = mmap.mmap(self._file.fileno(), 8 * devices)
        self.devices = devices

    @contextmanager
    def _used(self) -> Iterator[list[int]]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            used = list(struct.unpack(f"{self.devices}q", self._map[:]))
            yield used
            self._map[:] = struct.pack(f"{self.devices}q", *used)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def take(self, device: int, amount: int) -> bool:
        """Whether it is to be had; then it is taken."""
        with self._used() as used:
            if used[device] + amount > CAPACITY:
                return False
            used[device] += amount
            return True

    def give(self, device: int, amount: int) -> None:
        """Give back."""
        with self._used() as used:
            used[device] -= amount


class Side:
    """What one rank can be asked to do; runs in its process."""

    def __init__(self, rank: int, world: int, where: str) -> None:
        stores: Any = dist
        if where.startswith("tcp:"):
            store = stores.TCPStore("127.0.0.1", int(where[4:]), is_master=False, wait_for_workers=False)
        else:
            store = stores.FileStore(where, world)
        self.rank, self.world = rank, world
        self.words = RankStore(store, "side", rank, 10.0)

    def barrier(self, world: int | None = None) -> Barrier:
        """Of the first ``world`` ranks."""
        return Barrier(self.words, world or self.world)

    def meet(self, meeting: Meeting, delay: float = 0.0, **more: Any) -> Any:
        """Come after ``delay`` seconds; what became of it."""
        time.sleep(delay)
        return self._told(lambda: self.barrier().meet(meeting, **more))

    def _told(self, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            met = call()
        except (RankError, RoundCancelled) as error:
            ranks = getattr(error, "ranks", None)
            return type(error).__name__, str(error), ranks, time.monotonic() - began
        return "passed", "", tuple(met.late), time.monotonic() - began

    def ticking(self, meeting: Meeting, cancel_after: float | None = None, **more: Any) -> Any:
        """Meet in a coroutine, beside one that ticks; what became of it, and the pauses between its ticks."""
        pauses: list[float] = []

        async def tick() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.005)
                now = time.monotonic()
                pauses.append(now - last)
                last = now

        async def both() -> Any:
            ticker = asyncio.ensure_future(tick())
            meets = asyncio.ensure_future(self.barrier().meet_async(meeting, **more))
            if cancel_after is not None:
                await asyncio.sleep(cancel_after)
                meets.cancel()
            found = (await asyncio.gather(meets, return_exceptions=True))[0]
            ticker.cancel()
            return type(found).__name__

        return asyncio.run(both()), pauses

    def beating(self, meeting: Meeting, silent: float, bound: float) -> Any:
        """Meet, and listen to the beats of those that are missing."""
        pulses = Pulses(range(self.world), time.monotonic())

        def gone(absent: Collection[int]) -> Decision | None:
            for rank in absent:
                pulses.heard(rank, self.words.read("beat", rank), time.monotonic())
            lost = [rank for rank in pulses.silent(time.monotonic(), silent) if rank in absent]
            return without(meeting, lost, f"no sign of life for {silent:g} s") if lost else None

        return self._told(lambda: self.barrier().meet(meeting, bound=bound, gone=gone))

    def dying(self, beats: int) -> None:
        """Give signs of life, and be killed."""
        for beat in range(beats):
            self.words.write(beat, "beat", self.rank)
            time.sleep(0.05)
        os._exit(9)

    def rounds(self, path: str, seeds: list[int], *, barrier: bool) -> list[tuple[float, float, list[int]]]:
        """One round a seed: release, meet, and as rank 0 have the cache mapped on every device.

        Of each: when this rank had released, when rank 0 mapped, and on which devices that failed.
        """
        found = []
        for seed in seeds:
            world = 2 + seed % (self.world - 1)
            budget = SharedBudget(Path(f"{path}-{seed}"), self.world)
            self._meet(self.world, seed, "filled", done=budget.take(self.rank, PARAMETERS))
            if self.rank < world:
                found.append(self._round(budget, world, seed, barrier=barrier))
        return found

    def _meet(self, world: int, seed: int, name: str, *, done: bool) -> None:
        assert done
        if self.rank < world:
            self.barrier(world).meet(Meeting(f"r{seed}", seed + 1, name), bound=DEADLINE)

    def _round(
        self, budget: SharedBudget, world: int, seed: int, *, barrier: bool
    ) -> tuple[float, float, list[int]]:
        delays = random.Random(seed).sample([0.0, 0.004, 0.008, 0.02], world)
        if barrier:
            time.sleep(delays[self.rank])
        elif self.rank:  # the schedule that it is for: rank 0 is the first
            self._meet(world, seed, "mapped", done=True)
        budget.give(self.rank, PARAMETERS)
        released, mapped, failed = time.monotonic(), 0.0, list[int]()
        if barrier:
            self._meet(world, seed, "memory released", done=True)
        if self.rank == 0:
            mapped = time.monotonic()
            failed = [device for device in range(world) if not budget.take(device, CACHE)]
            if not barrier:
                self._meet(world, seed, "mapped", done=True)
        return released, mapped, failed


def serve(rank: int, world: int, where: str, pipe: Connection) -> None:
    """Do what is asked for."""
    side = Side(rank, world, where)
    pipe.send("ready")
    while True:
        word, given = pipe.recv()
        try:
            pipe.send(getattr(side, word)(**given))
        except Exception as error:  # noqa: BLE001 - it is told
            pipe.send(error)


class Sides:
    """Ranks in processes."""

    def __init__(self, world: int, where: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])  # torch is imported once
        self.pipes, self.all = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, world, where, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.all.append(process)
        for rank in range(world):
            assert self.answer(rank) == "ready"

    def ask(self, rank: int, word: str, **given: Any) -> None:
        """Have it do something."""
        self.pipes[rank].send((word, given))

    def answer(self, rank: int) -> Any:
        """What came of it."""
        assert self.pipes[rank].poll(DEADLINE), f"rank {rank} did not answer"
        answer = self.pipes[rank].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def each(self, word: str, ranks: Collection[int] | None = None, **given: Any) -> list[Any]:
        """Have all of these do the same."""
        ranks = range(len(self.all)) if ranks is None else ranks
        for rank in ranks:
            self.ask(rank, word, **given)
        ready, told = set(ranks), dict[int, Any]()
        while ready:  # whoever raises is heard first: the others may be waiting for it
            heard = wait([self.pipes[rank] for rank in ready], timeout=DEADLINE)
            assert heard, f"ranks {sorted(ready)} did not answer"
            for rank in [rank for rank in ready if self.pipes[rank] in heard]:
                ready.remove(rank)
                told[rank] = self.answer(rank)
        return [told[rank] for rank in ranks]

    def end(self) -> None:
        """Whatever they do."""
        for process in self.all:
            if process.is_alive():
                process.kill()
            process.join(10)
