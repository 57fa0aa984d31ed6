"""What the core costs: the machine, the driver, and an empty round over Ray beside the frame of the field.

    python -m benchmarks.core [--rounds N] [--no-ray]

The *frame of the field* is what trainers do around the bytes today, written as fast as it goes: take a lock,
pause both engines, begin, hand over the metadata of 290 tensors, end, resume, give the lock back; no bytes,
no receipts, no commit. Ours is a whole round of 290 tensors without elements, with pause, receipts, digests,
commit, publication and resume. Both run in turn, in one process, against actors of the same cluster.
"""

from __future__ import annotations

import argparse
import time

from weightsync.fsm import events as e
from weightsync.fsm.calls import Act
from weightsync.fsm.facts import opening
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.round import Identity, Round
from weightsync.testing.simulation import Fault, Simulation

from .report import Figure, median, print_figures

BENCH = "core"


def machine() -> Figure:
    """Events a second through ``Round.fire``: table, ``transitions``, record and commit."""
    engines = [Participant("e1"), Participant("e2")]
    good: list[e.Event] = [
        e.LockGranted(1),
        e.Prepared(Expectation("plan", 1, 1, 8)),
        *(e.BucketSent(index) for index in range(8)),
        e.AllSent(),
        e.EngineLost(engines[0]),
        e.Cancelled(),
        e.EngineReverted(engines[1]),
        e.Cleaned(),
        e.Unlocked(),
    ]
    rates = []
    for _ in range(200):
        facts = opening(round="r", version=1, roster=engines, quorum=1)
        opened = Round.open(facts, Identity(), at=0.0, wall=0.0)
        begun = time.perf_counter()
        for event in good:
            opened.fire(event, at=0.0, wall=0.0)
        rates.append(len(good) / (time.perf_counter() - begun))
    return Figure(BENCH, "machine events", median(rates), "events/s", "", len(rates))


def faulty_round() -> Figure:
    """Wall time an event of a whole faulty round on a hand-turned clock, partners included."""
    costs = []
    for seed in range(100):
        simulation = Simulation(faults=[Fault(Act.broadcast, "raise", bucket=1)], seed=seed)
        begun = time.perf_counter()
        simulation.run()
        events = sum(record.event == "transition" for record in simulation.round.records())
        costs.append((time.perf_counter() - begun) / events * 1e3)
    return Figure(BENCH, "faulty round, wall time per event", median(costs), "ms", "", len(costs))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="counted rounds of each side over Ray")
    parser.add_argument("--no-ray", action="store_true", help="only what needs no cluster")
    arguments = parser.parse_args()
    figures = [machine(), faulty_round()]
    if not arguments.no_ray:
        from .empty_round import measure

        figures += measure(arguments.rounds)
    print_figures(figures)


if __name__ == "__main__":
    main()
