"""Whoever generates knows which version was in force, at the beginning and at the end of each segment.

The version is read where nobody can change it: inside the gate. So it is the one of the weights that were
sampled with, which these tests read themselves.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from casekit.levels import eventually
from weightsync import (
    FileLedger,
    LocalEngine,
    Policy,
    SampleVersions,
    Segment,
    VersionUnknown,
    WeightSync,
    receiver_for,
)  # fmt: skip
from weightsync.fsm.errors import EngineError
from weightsync.fsm.states import EngineState
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.segments import Running
from weightsync.handlers.threads import spawn

pytestmark = pytest.mark.timeout(60)

SOON = 20.0
MANY = 60


class Served:
    """An engine whose weights are the number of their version, and its trainer."""

    def __init__(self, ledger: Path | None = None, fault: Any = None, *, stages: bool = True) -> None:
        self.held = {"w": torch.full((1000,), -1.0)}
        self.receiver: Receiver = receiver_for(self.held, "e0", fault=fault, stages=stages)
        policy = Policy(deadline=SOON)
        self.sync = WeightSync([LocalEngine(self.receiver)], "memory", policy=policy, ledger=ledger)

    def hand_over(self, version: int) -> Any:
        """A round."""
        weights = {"w": torch.full((1000,), float(version))}
        return self.sync.begin(version, weights, version=version).wait()

    def sampled(self) -> float:
        """What a generation would see: one number, unless it is a mix."""
        (value,) = self.held["w"].unique().tolist()
        return float(value)


@pytest.fixture
def served() -> Iterator[Served]:
    """One in which version 0 is published."""
    made = Served()
    with made.sync:
        assert made.hand_over(0).ok
        yield made


def test_a_segment_has_the_version_that_it_was_generated_with(served: Served) -> None:
    """A sample that goes on after a round has two."""
    with served.receiver.segment() as first:
        assert first.began == served.sampled() == 0
    served.hand_over(1)
    with served.receiver.segment() as second:
        assert second.began == served.sampled() == 1
    sample = SampleVersions((first.done, second.done))
    life = served.receiver.status.incarnation
    assert sample.segments == (Segment("e0", life, 0, 0), Segment("e0", life, 1, 1))
    assert (sample.oldest, sample.newest, sample.mixed) == (0, 1, True)
    assert sample.staleness(served.sync.ledger()) == 1


def test_a_segment_that_is_cut_short_counts(served: Served) -> None:
    """It raised; what it made until then may be used all the same. Before it is over, it says so."""
    cut: list[Running] = []

    def generate() -> None:
        with served.receiver.segment() as running:
            cut.append(running)
            _ = running.done

    with pytest.raises(EngineError, match="segment is not over"):
        generate()
    assert cut[0].done.whole


def test_an_engine_without_weights_of_a_round_has_no_version() -> None:
    """It may generate; how old that is, nobody can say."""
    made = Served()
    with made.sync, made.receiver.segment() as running:
        pass
    assert running.done.began is None
    with pytest.raises(VersionUnknown):
        SampleVersions((running.done,)).staleness(made.sync.ledger())


def test_weights_that_are_lost_under_a_segment(served: Served) -> None:
    """It began with a version, and ended with none: what it is made of, nobody knows."""
    with served.receiver.segment() as running:
        served.held["w"] = torch.zeros(3)
        refused = served.sync.begin(1, {"w": torch.ones(1000)}).wait()
        assert not refused.ok
        assert served.receiver.state is EngineState.Quarantined
    assert (running.done.began, running.done.ended) == (0, None)
    with pytest.raises(VersionUnknown, match="when a segment ended"):
        SampleVersions((running.done,)).staleness(served.sync.ledger())


def fresh(done: list[tuple[Segment, float]], published: list[int]) -> None:
    """Each has the version of the weights that were seen in it, whole, and none fell."""
    assert len(done) >= MANY
    for segment, seen in done:
        assert (segment.began, segment.ended) == (seen, seen)
    versions = [segment.began or 0 for segment, _ in done]
    assert versions == sorted(versions)
    assert set(versions) <= set(published)


def test_threads_never_see_a_number_that_is_torn(served: Served) -> None:
    """Generating without a break while rounds commit: number and weights go together in every segment."""
    found: list[list[tuple[Segment, float]]] = [[], []]
    over = threading.Event()

    def generate(mine: list[tuple[Segment, float]]) -> None:
        while not over.is_set() or len(mine) < MANY:
            with served.receiver.segment(SOON) as running:
                seen = served.sampled()
            mine.append((running.done, seen))

    working = [spawn("generate", generate, mine) for mine in found]
    for version in range(1, 16):
        assert served.hand_over(version).ok
    over.set()
    for each, mine in zip(working, found, strict=True):
        each.result(SOON)
        fresh(mine, [*range(16)])
    ages = [SampleVersions((segment,)).staleness(served.sync.ledger()) for segment, _ in found[0]]
    assert min(ages) >= 0
    assert ages == sorted(ages, reverse=True)


def test_tasks_never_see_a_number_that_is_torn(served: Served) -> None:
    """The same for coroutines on one loop, which give others a turn in the middle of a segment."""
    found: list[tuple[Segment, float]] = []

    async def generate(over: asyncio.Event) -> None:
        while not over.is_set() or len(found) < MANY:
            async with served.receiver.segment_async(SOON) as running:
                seen = served.sampled()
                await asyncio.sleep(0)
                assert served.sampled() == seen
            found.append((running.done, seen))
            await asyncio.sleep(0)

    async def main() -> None:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(generate(over)) for _ in range(3)]
            for version in range(1, 9):
                result = await served.sync.round(version, {"w": torch.full((1000,), float(version))})
                assert result.ok
            over.set()
            await asyncio.wait(working)

    asyncio.run(main())
    fresh(found, [*range(9)])


def test_a_version_that_is_not_committed_is_seen_by_nobody(served: Served) -> None:
    """A round that fails when everything has arrived leaves the old number with the old weights."""
    broken = Served(fault=_fails_in_the_second_round())
    with broken.sync:
        assert broken.hand_over(0).ok
        assert not broken.hand_over(1).ok
        assert eventually(lambda: broken.receiver.state is EngineState.Serving)
        with broken.receiver.segment(SOON) as running:
            assert running.began == broken.sampled() == 0
        assert SampleVersions((running.done,)).staleness(broken.sync.ledger()) == 0


def _fails_in_the_second_round() -> Any:
    acked: list[int] = []

    def fault(point: str, bucket: int) -> None:
        if point == "acked":
            acked.append(bucket)
            if len(acked) == 2:
                raise RuntimeError("it fails when all is there")

    return fault


def test_a_restarted_engine_has_no_version_before_a_whole_round() -> None:
    """And says another incarnation; then the sample goes on with the new one."""
    served = Served()
    with served.sync:
        assert served.hand_over(3).ok
        with served.receiver.segment() as first:
            pass
        again = receiver_for({"w": torch.full((1000,), -1.0)}, "e0")
        with again.segment() as meanwhile:
            pass
        assert meanwhile.done.began is None
        assert meanwhile.done.incarnation != first.done.incarnation
        link: Any = served.sync._books.links["e0"]
        link.receiver = again
        assert not served.hand_over(4).ok, "it is not the engine that was meant"
        assert served.hand_over(5).ok
        with again.segment() as second:
            pass
        sample = SampleVersions((first.done, second.done))
        assert (sample.oldest, sample.newest) == (3, 5)
        assert sample.staleness(served.sync.ledger()) == 2


TRAINER = """
import json, os, signal, sys
import torch
from weightsync import LocalEngine, Policy, WeightSync, receiver_for

path, first, die = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def fault(point, bucket):
    if point == die and sync.version() == first:
        print(json.dumps({"version": receiver.version}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

receiver = receiver_for({"w": torch.zeros(4)}, "e0", fault=fault)
sync = WeightSync([LocalEngine(receiver)], "memory", policy=Policy(deadline=20.0), ledger=path)
for step in range(first + 1):
    assert sync.begin(step, {"w": torch.full((4,), float(step))}).wait().ok
with receiver.segment() as running:
    pass
print(json.dumps({"began": running.began, "ended": running.done.ended, "engine": running.done.engine,
                  "incarnation": running.done.incarnation}), flush=True)
sync.begin(99, {"w": torch.full((4,), 99.0)}).wait()
"""


@pytest.mark.parametrize("die", ["acked", "committed"])
def test_over_a_fail_over_of_the_trainer_ages_go_on(tmp_path: Path, die: str) -> None:
    """A trainer is killed in a round; the next one goes on with its ledger, and not from 1.

    A sample that the dead one's engine made stays as old as it is, and gets older.
    """
    path = tmp_path / "ledger.json"
    command = [sys.executable, "-c", TRAINER, str(path), "5", die]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    sample = SampleVersions((Segment(**lines[0]),))
    assert sample.newest == 5
    ledger = FileLedger(path).current()
    assert ledger.version == 5
    assert sample.staleness(ledger) == 0
    held = lines[1]["version"]
    assert held is not None
    assert SampleVersions((Segment("e0", "x", held, held),)).staleness(ledger) >= 0
    following = Served(path)
    with following.sync:
        assert following.sync.begin(0, {"w": torch.zeros(1000)}).wait().ok
        assert (version := following.sync.version()) is not None
        assert version > max(5, held - 1), "the next trainer takes no number that an engine may hold"
        with following.receiver.segment() as running:
            pass
        assert SampleVersions((running.done,)).staleness(following.sync.ledger()) == 0
        assert sample.staleness(following.sync.ledger()) == version - 5 > 0
