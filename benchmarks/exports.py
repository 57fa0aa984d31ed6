"""What planning an export once is worth: rounds of two trainer ranks with a plan that lasts, and with none.

    python -m benchmarks.exports [--rounds N] [--tensors N]

Both ranks are processes over gloo, and hand over to an engine in memory. The *stub* planner asks the other
ranks for an object for each tensor, which costs 50 ms each, as it may on many hosts; the *FSDP* planner is
the real one, which asks nobody. The medians leave the first round out, in which each of them plans.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from weightsync import (
    CachedExport,
    FollowerSync,
    FsdpExporter,
    LocalEngine,
    Policy,
    TrainerRanks,
    WeightSync,
    receiver_for,
)
from weightsync.fsm.exports import Exporter, ExportPlan, Outline, Slot

from .report import Figure, median, print_figures

__all__ = ["figures"]

BENCH = "exports"
OBJECT_SECONDS = 0.05


class Stub:
    """Plans by a collective of objects for each tensor, which takes its time."""

    lasting = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def outline(self) -> Outline:
        """Names and shapes."""
        lines = [f"{name} {tuple(each.shape)}" for name, each in self._tensors.items()]
        return Outline(dist.get_world_size(), tuple(lines))

    def plan(self) -> Sequence[Slot]:
        """By asking."""
        for name in self._tensors:
            time.sleep(OBJECT_SECONDS)
            dist.all_gather_object([None] * dist.get_world_size(), name)
        return [Slot(name, str(each.dtype), tuple(each.shape)) for name, each in self._tensors.items()]

    def tensors(self, plan: ExportPlan) -> Iterator[tuple[str, Any]]:
        """As they are."""
        return ((slot.name, self._tensors[slot.name]) for slot in plan.slots)

    def forget(self) -> None:
        """Nothing is kept."""


def figures(rounds: int, tensors: int) -> list[Figure]:
    """Seconds of a round for each planner, with a plan and without, and their ratio."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    ranks = [
        context.Process(target=_rank, args=(rank, port, rounds, tensors, theirs), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    if not pipe.poll(600):
        raise TimeoutError("the ranks of the trainer said nothing for ten minutes")
    found: dict[str, list[list[float]]] = pipe.recv()
    for rank in ranks:
        rank.join(60)
    return [each for planner, seconds in found.items() for each in _of(planner, *seconds, n=rounds)]


def _of(planner: str, cached: list[float], uncached: list[float], *, n: int) -> list[Figure]:
    slow, fast = median(uncached[1:]), median(cached[1:])
    return [
        Figure(BENCH, f"round with a plan, {planner}", fast, "s", "", n),
        Figure(BENCH, f"round without, {planner}", slow, "s", "", n),
        Figure(BENCH, f"without / with a plan, {planner}", slow / fast, "x", "", n),
    ]


def _rank(rank: int, port: int, rounds: int, tensors: int, pipe: Connection) -> None:
    from torch.distributed.fsdp import fully_shard

    stores: Any = dist
    store = stores.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=stores.PrefixStore("group", store), rank=rank, world_size=2)
    named = {f"w{number}": torch.zeros(256) for number in range(tensors)}
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(tensors)))
    like = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    fully_shard(model)
    made: dict[str, tuple[Exporter, dict[str, torch.Tensor]]] = {
        "stub of 50 ms an object": (Stub(named), {name: each.clone() for name, each in named.items()}),
        "FSDP2": (FsdpExporter(model), like),
    }
    found = {
        planner: [
            _rounds(
                TrainerRanks(store, rank, 2, name=f"{planner} {lasts}"), exporter, held, rounds, lasts=lasts
            )
            for lasts in (True, False)
        ]
        for planner, (exporter, held) in made.items()
    }
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _rounds(
    ranks: TrainerRanks, exporter: Exporter, held: dict[str, torch.Tensor], rounds: int, *, lasts: bool
) -> list[float]:
    """Seconds of each, after a first one; if it does not last, the plan is forgotten before each."""
    export, policy = CachedExport(exporter), Policy(deadline=60.0)
    sync: Any = (
        FollowerSync(ranks, policy=policy)
        if ranks.rank
        else WeightSync([LocalEngine(receiver_for(held, "e"))], "memory", policy=policy, ranks=ranks)
    )
    seconds = []
    with sync:
        for step in range(1, rounds + 2):
            if not lasts:
                export.reset()
            begun = time.perf_counter()
            sync.on_step_end(step, export).require()
            seconds.append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tensors", type=int, default=12)
    options = parser.parse_args()
    print_figures(figures(options.rounds, options.tensors))


if __name__ == "__main__":
    main()
