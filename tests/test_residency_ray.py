"""An engine in a process of its own that is put to sleep and woken by the rounds, and says what it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from casekit.levels import eventually
from casekit.rayside import environment
from weightsync import (
    CalledPart,
    Gated,
    HostCopy,
    Policy,
    RayEngine,
    RayReceiver,
    Residency,
    SampleVersions,
    Scratch,
    Segment,
    VersionUnknown,
    WeightSync,
    offload,
    onload,
    ray_engine,
    shift,
)  # fmt: skip
from weightsync.fsm.errors import EnginePaused

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(120)]

PATIENCE = 60.0


@ray_engine(num_cpus=0, max_restarts=1, runtime_env=environment())
class Rollout(RayReceiver):
    """An engine whose weights and cache can go. After a restart both are there, and of no version."""

    def __init__(self) -> None:
        held, keys = {"w": torch.full((64,), -1.0)}, torch.ones(32)
        self.held, self.keys = held, keys
        weights = HostCopy("weights", held)
        self.weightsync_serve(held, id="r", asleep=lambda: not weights.resident())
        assert self.weightsync_receiver is not None
        cache = Scratch("cache", [keys])
        self.parts = {part.name: Gated(part, self.weightsync_receiver) for part in (weights, cache)}

    def move(self, name: str, comes: bool) -> None:
        """Bring a part, or let it go."""
        part = self.parts[name]
        (part.onload if comes else part.offload)()

    def there(self) -> dict[str, bool]:
        """Which parts are."""
        return {name: part.resident() for name, part in self.parts.items()}

    def sample(self) -> tuple[Segment, float]:
        """One segment, and the weights it was made with."""
        assert self.weightsync_receiver is not None
        with self.weightsync_receiver.segment(0.5) as running:
            value = float(self.held["w"].unique().item())
        return running.done, value


@pytest.fixture
def actor(ray_cluster: None) -> Iterator[Any]:
    """One."""
    make: Any = Rollout
    made = make.remote()
    yield made
    ray.kill(made)


def asked(reference: Any) -> Any:
    """The answer."""
    return ray.get(reference, timeout=PATIENCE)


def part(actor: Any, name: str, **more: Any) -> CalledPart:
    """A part of the actor's."""
    return CalledPart(
        name, on=lambda: asked(actor.move.remote(name, True)),
        off=lambda: asked(actor.move.remote(name, False)),
        resident=lambda: bool(asked(actor.there.remote())[name]), **more,
    )  # fmt: skip


def test_rounds_wake_an_engine_in_another_process_and_samples_say_their_versions(actor: Any) -> None:
    """Weights, update, cache; asleep in between, and never served from then. A restart is seen."""
    moments = torch.ones(16)
    optimizer = HostCopy("optimizer", [moments])
    weights, cache = part(actor, "weights", engine="r"), part(actor, "cache")
    residency = Residency(before=[offload(optimizer), onload(weights)], after=[onload(cache)])
    records: list[Any] = []
    sample = SampleVersions()
    policy = Policy(deadline=30.0)
    engine = RayEngine(actor, id="r")
    with WeightSync([engine], policy=policy, handlers=[residency, records.append]) as sync:
        for step in range(3):
            shift(offload(cache), offload(weights), onload(optimizer))
            assert sync.servable() == {}
            with pytest.raises(EnginePaused, match="it has no memory for its cache, weights"):
                asked(actor.sample.remote())
            result = sync.begin(step, {"w": torch.full((64,), float(step))}).wait()
            assert result.ok, result.summary()
            segment, value = asked(actor.sample.remote())
            assert (segment.began, segment.ended, value) == (step, step, step)
            sample = sample.plus(segment)
        moved = [(each.trigger, each.facts["part"]) for each in records if each.event == "action"]
        assert moved == [("offload", "optimizer"), ("onload", "weights"), ("onload", "cache")] * 3
        assert sample.staleness(sync.ledger()) == 2
        ray.kill(actor, no_restart=False)
        assert eventually(lambda: reborn(actor, sample.segments[0].incarnation), PATIENCE)
        segment, value = asked(actor.sample.remote())
        assert (segment.began, value) == (None, -1.0)
        assert segment.incarnation != sample.segments[0].incarnation
        with pytest.raises(VersionUnknown):
            sample.plus(segment).staleness(sync.ledger())
        assert not sync.begin(3, {"w": torch.full((64,), 3.0)}).wait().ok, "another life than was meant"
        assert sync.begin(4, {"w": torch.full((64,), 4.0)}).wait().ok
        segment, value = asked(actor.sample.remote())
        assert value == 4.0
        sample = sample.plus(segment)
        assert sample.oldest == 0
        assert sample.staleness(sync.ledger()) == sample.newest == sync.version()


def reborn(actor: Any, before: str) -> bool:
    """Whether it answers again, in another life."""
    try:
        segment, _ = asked(actor.sample.remote())
    except ray.exceptions.RayError:
        return False
    return bool(segment.incarnation != before)
