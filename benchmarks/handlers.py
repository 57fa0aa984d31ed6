"""What the trainer's handlers cost, each beside what would be there without it.

    python -m benchmarks.handlers [--quick] [--check] [--objects N]

Every figure is the median of ratios, ours divided by the peer's, which are taken in turn in one run, so that
a busy machine is busy for both. ``--check`` compares them with ``handlers_budget.json`` beside this file and
ends with status 1 if one is over its budget: a full collection that comes back on the way is found like that.

* the *barrier* of two ranks in processes, beside a counter and a wait in the same store of torch;
* a round with an *export's plan* that lasts, beside one that plans anew, see ``benchmarks.exports``;
* a *snapshot* saved and put back, in copies of the same bytes by torch;
* a call over the *bridge*, beside ``asyncio.run`` for each, and beside a loop and a thread for each;
* the *light release* of what the host's allocator keeps, beside one that collects garbage first, with many
  live objects.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightsync import Snapshots
from weightsync.fsm.engine_table import Session
from weightsync.fsm.executors import RoundView
from weightsync.fsm.votes import Meeting
from weightsync.handlers.barrier import Barrier
from weightsync.handlers.bridge import LoopBridge
from weightsync.handlers.cache_release import CacheRelease
from weightsync.handlers.memories import HostCache
from weightsync.handlers.rank_store import RankStore
from weightsync.testing.fakes import FakeWeights

from . import exports
from .bridge import answer, with_a_loop_of_its_own
from .report import Figure, median, print_figures

__all__ = ["BUDGET", "bridge", "main", "over", "release", "snapshot"]

BENCH = "handlers"
BUDGET = Path(__file__).with_name("handlers_budget.json")
_PATIENCE = 120.0


def in_turn(ours: Callable[[], object], peer: Callable[[], object], turns: int) -> list[float]:
    """The ratio of what they take, so many times, one right after the other."""
    ours(), peer()  # what is made once is not measured
    return [_seconds(ours) / _seconds(peer) for _ in range(turns)]


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _figure(figure: str, peer: str, ratios: Sequence[float]) -> Figure:
    return Figure(BENCH, figure, median(ratios), "ratio", peer, len(ratios))


# -- ranks that meet ----------------------------------------------------------------------------------------


def barrier(turns: int) -> list[Figure]:
    """Of two ranks in processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    ranks = [
        context.Process(target=_rank, args=(rank, port, turns, theirs), daemon=True) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    if not pipe.poll(_PATIENCE):
        raise TimeoutError(f"the ranks said nothing for {_PATIENCE:g} s")
    ratios = pipe.recv()
    for rank in ranks:
        rank.join(_PATIENCE)
    return [_figure("a barrier with votes", "a counter and a wait in the store", ratios)]


def _rank(rank: int, port: int, turns: int, pipe: Connection) -> None:
    stores: Any = dist
    store = stores.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    words = RankStore(store, "bench", rank, _PATIENCE)
    meets, count = Barrier(words, 2), [0, 0]

    def ours() -> None:
        count[0] += 1
        meets.meet(Meeting(f"r{count[0]}", count[0], "bench"), bound=_PATIENCE)

    def bare() -> None:
        count[1] += 1
        key = f"bare/{count[1]}"
        if store.add(key, 1) == 2:
            store.set(f"{key}/all", "1")
        store.wait([f"{key}/all"])

    ratios = in_turn(ours, bare, turns)
    if rank == 0:
        pipe.send(ratios)
    bare()
    meets.close()
    words.close()


# -- plans --------------------------------------------------------------------------------------------------


def plans(rounds: int, tensors: int) -> list[Figure]:
    """Rounds with a plan that lasts, beside rounds that plan anew."""
    found = {each.figure: each.value for each in exports.figures(rounds, tensors)}
    what = "without / with a plan, "
    return [
        Figure(BENCH, f"a round with a plan, {name.removeprefix(what)}", 1 / value, "ratio",
               "the same round that plans anew", rounds)
        for name, value in found.items() if name.startswith(what)
    ]  # fmt: skip


# -- versions -----------------------------------------------------------------------------------------------


def snapshot(mib: int, turns: int) -> list[Figure]:
    """Of a plain model of so many MiB, on one thread, into memory that is there already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(mib))
    held = [each.detach() for each in model.parameters()]
    beside = [torch.empty_like(each).fill_(0.0) for each in held]

    def copied() -> None:
        for there, here in zip(beside, held, strict=True):
            there.copy_(here)

    found = []
    for verify in (False, True):
        how = "with checksums" if verify else "without checksums"
        with Snapshots(model, verify=verify) as kept:
            saved = in_turn(lambda kept=kept: kept.save(1), copied, turns)  # type: ignore[misc]
            loaded = in_turn(lambda kept=kept: kept.load(1), copied, turns)  # type: ignore[misc]
        found += [
            _figure(f"a version saved, {how}", "one copy of the bytes", saved),
            _figure(f"a version put back, {how}", "one copy of the bytes", loaded),
        ]
    torch.set_num_threads(threads)
    return found


# -- coroutines ---------------------------------------------------------------------------------------------


def bridge(calls: int, turns: int) -> list[Figure]:
    """So many calls a turn, from a thread that runs no loop."""

    def times(call: Callable[[], object]) -> Callable[[], None]:
        def several() -> None:
            for _ in range(calls):
                call()

        return several

    with LoopBridge("benchmark") as over_it:
        ours = times(lambda: over_it.call(answer, limit=10.0))
        run = in_turn(ours, times(lambda: asyncio.run(answer())), turns)
        loop = in_turn(ours, times(lambda: with_a_loop_of_its_own(close=True)), turns)
    return [
        _figure("a call over the bridge", "asyncio.run for each call", run),
        _figure("a call over the bridge", "a loop and a thread for each call", loop),
    ]


# -- memory -------------------------------------------------------------------------------------------------


def release(objects: int, turns: int) -> list[Figure]:
    """Beside so many live objects, at the end of a round."""
    live = [[number] for number in range(objects)]
    memory = HostCache()
    step, view = CacheRelease(memory), RoundView(Session("r1", 1, 1), 1, 1, None, FakeWeights(1))

    def full() -> None:
        gc.collect()
        memory.cache_release()

    ratios = in_turn(lambda: step.clean(view), full, turns)
    del live
    return [_figure("the light release", "the same after a full collection", ratios)]


# -- all of them --------------------------------------------------------------------------------------------


def over(figures: Sequence[Figure], budget: Mapping[str, float]) -> list[str]:
    """What has passed its budget, or has one and was not measured; a line each."""
    found = {f"{each.figure} / {each.peer}": each.value for each in figures}
    lines = [f"{name}: not measured" for name in budget if name not in found]
    for name, most in budget.items():
        if name in found and found[name] > most:
            lines.append(f"{name}: {found[name]:.3g}, and its budget is {most:g}")
    return lines


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; with ``--check`` the status says whether all of them keep their budgets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, and a smaller model")
    parser.add_argument("--check", action="store_true", help="fail if one is over its budget")
    parser.add_argument("--objects", type=int, default=2_000_000, help="live ones, for the release")
    options = parser.parse_args(given)
    quick = options.quick
    figures = [
        *barrier(50 if quick else 300),
        *plans(3 if quick else 10, 4 if quick else 12),
        *snapshot(32 if quick else 128, 5 if quick else 15),
        *bridge(50 if quick else 200, 5 if quick else 9),
        *release(options.objects, 5 if quick else 9),
    ]
    print_figures(figures)
    if not options.check:
        return 0
    lines = over(figures, json.loads(BUDGET.read_text()))
    for line in lines:
        print(f"over budget: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
