"""Faults to bring back into the demo's trainer of two ranks: ``pytest -p trainermutants``.

Which one is said by the environment variable ``TRAINER_MUTANT``. Each changes the product in the process of
rank 0, never a check.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weightsync.demo import grpo, peers, systems, trainers
from weightsync.handlers import fsdp_export, rank_barrier, toggle
from weightsync.handlers.exports import CachedExport
from weightsync.handlers.snapshots import Snapshots

__all__ = ["MUTANTS", "install"]

Changed: Any = setattr


def other_weights_are_sent() -> None:
    """Than the trainer has."""
    right = fsdp_export._gathered
    Changed(fsdp_export, "_gathered", lambda tensor: right(tensor) + 1e-6)


def every_round_plans_anew() -> None:
    """The plan is forgotten before the ranks agree on one."""
    right = CachedExport.standing

    def standing(self: CachedExport) -> Any:
        self.reset()
        return right(self)

    Changed(CachedExport, "standing", standing)


def a_restored_version_is_off_by_a_bit() -> None:
    """The smallest one, of one weight."""
    import torch

    right = Snapshots.version

    @contextmanager
    def version(self: Snapshots, number: int) -> Iterator[Any]:
        with right(self, number) as loaded:
            yield loaded
        with torch.no_grad():
            next(iter(self.model.parameters())).add_(1e-6)

    Changed(Snapshots, "version", version)


def each_rank_goes_over_all_samples() -> None:
    """So two ranks do the same twice."""
    Changed(grpo._Samples, "rows", lambda samples, index: samples)


def a_setting_is_not_restored() -> None:
    """When a round is over."""
    Changed(toggle.Toggle, "clean", lambda self, round: None)


def engines_resume_before_the_ranks_met() -> None:
    """Nobody waits until all have released what they hold."""
    Changed(rank_barrier.RankBarrier, "clean", lambda self, round: None)


def the_other_rank_stays() -> None:
    """Nobody has it end."""
    Changed(peers.ProcessPeer, "end", lambda self: None)
    Changed(peers.ProcessPeer, "close", lambda self, limit: None)


def notes_of_everybody_are_counted() -> None:
    """Whoever noted them."""
    Changed(
        systems.Run, "notes", lambda run, event, executor: [e for e in run.records if e["event"] == event]
    )


def ranks_are_taken_to_live() -> None:
    """Also the one that took a part of the weights with it."""
    Changed(trainers.Sharded, "_gone", lambda self: False)


_ALL = "demo_trainers.py -k all_systems"

MUTANTS = {
    each.__name__: (each, tests)
    for each, tests in (
        (other_weights_are_sent, _ALL),
        (every_round_plans_anew, _ALL),
        (a_restored_version_is_off_by_a_bit, _ALL),
        (a_setting_is_not_restored, _ALL),
        (engines_resume_before_the_ranks_met, _ALL),
        (the_other_rank_stays, _ALL),
        (notes_of_everybody_are_counted, _ALL),
        (each_rank_goes_over_all_samples, "demo_trainers.py -k ranks_gradients"),
        (ranks_are_taken_to_live, "demo_trainers.py -k rank_that_is_killed"),
    )
}


def install() -> None:
    """Bring back the one that is named."""
    MUTANTS[os.environ["TRAINER_MUTANT"]][0]()


def pytest_configure() -> None:
    """In the process of the tests."""
    install()
