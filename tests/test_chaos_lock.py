"""Owners of one lock that die or freeze in any state of a round, and a keeper that dies under them.

Real processes: each owner is an actor, and so are the engines and the keeper. The lease is two seconds.
"""

import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray

from casekit.bench import Bench, quick
from casekit.engines import Look
from casekit.levels import eventually
from casekit.rayside import InActor
from casekit.tensors import NAMES, same, state
from chaoskit.deeds import Hold, freeze, frozen, keeper_of, thaw
from chaoskit.owner import STATES, owner
from chaoskit.witness import Witness, grants, paths
from weightsync import RayLock
from weightsync.fsm.lock import Granted, LockError, Ticket
from weightsync.fsm.states import EngineState
from weightsync.handlers.threads import spawn

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(120)]

PATIENCE = 60.0
LEASE = 2.0
DEADLINE = 6.0
"""Of an owner's round; an engine leaves the pause by itself as soon."""

SLACK = 1.5
"""Seconds for which a machine that is busy may keep a word or a thread waiting."""


class Place:
    """One lock, its witness, and engines that are new."""

    def __init__(self, folder: Path, engines: list[InActor]) -> None:
        self.folder, self.engines = folder, engines
        self.name, self.file = f"chaos-{uuid.uuid4().hex[:8]}", folder / "grants"
        self.hold = Hold(folder)
        self.mine: tuple[Ticket, Granted] | None = None
        for engine, stages in zip(engines, (True, False), strict=True):
            engine.fresh(stages=stages)

    @property
    def lock(self) -> tuple[Any, ...]:
        """What ``Witness`` takes."""
        return self.name, LEASE, self.file

    def bench(self) -> Bench:
        """The next trainer, in this process, which the checks of every case look after."""
        return Bench(
            self.engines, "collective", policy=quick(deadline=8.0, lease=LEASE), lock=Witness(*self.lock),
            rival=RayLock(self.name, LEASE),
        )  # fmt: skip

    def become(
        self,
        trainer: Any,
        name: str,
        engines: Sequence[InActor],
        kept: Path | None = None,
        deadline: float = DEADLINE,
    ) -> int:
        """Let a process be a trainer; its log is ``NAME.jsonl``. Its process id."""
        handles = [(engine.name, engine.actor) for engine in engines]
        log = self.folder / f"{name}.jsonl"
        return int(ask(trainer.become.remote(name, handles, (*self.lock, kept), log, deadline)))

    def begin(self, trainer: Any, name: str, where: str, engines: Sequence[InActor]) -> Any:
        """Let it come to this state of a round, and stay there; the round's future."""
        ask(trainer.arm.remote(where, self.hold))
        self.mine = take(Witness(*self.lock)) if where == "Idle" else None
        running = trainer.round.remote(1)
        if where == "Idle":
            assert eventually(lambda: RayLock(self.name, LEASE).status().waiting, PATIENCE)
            return running
        self.hold.reached(lambda: ended(running))
        log = self.folder / f"{name}.jsonl"  # written on a thread of its own
        assert eventually(lambda: log.read_bytes() and paths(log)[-1][-1] == where, PATIENCE)
        if where in ("Broadcasting", "Awaiting"):
            point = "applied" if where == "Broadcasting" else "acked"
            assert eventually(lambda: all(each.count(point) for each in engines), PATIENCE)
        return running

    def looks(self) -> list[Look]:
        """What the engines are now."""
        return [engine.look() for engine in self.engines]

    def leave_the_pause(self, published: bool, limit: float) -> None:
        """Each engine does so by itself, and is what the table makes of it."""

        def left() -> bool:
            return not any(each.look().in_session for each in self.engines)

        assert eventually(left, limit), f"{[each.look() for each in self.engines]}"
        for engine, stages in zip(self.engines, (True, False), strict=True):
            look = engine.look()
            torn = not stages and not published and engine.count("apply") > 0
            expected = EngineState.Quarantined if torn else EngineState.Serving
            assert (look.state, look.paused) == (expected, torn), f"{engine.name} is {look}"
            assert look.version == (0 if published else None)


def ask(reference: Any) -> Any:
    """Its answer."""
    return ray.get(reference, timeout=PATIENCE)


def ended(reference: Any) -> str:
    """What it came to; empty while it is under way."""
    done, _ = ray.wait([reference], timeout=0)
    return str(ask(reference)) if done else ""


def take(lock: RayLock, owner: str = "somebody else", limit: float = PATIENCE) -> tuple[Ticket, Granted]:
    """Hold the lock. A keeper that cannot be reached is asked again: another one is being started."""
    end = time.monotonic() + limit
    while True:
        try:
            ticket = lock.request(owner, f"round of {owner}")
            answer = lock.wait(ticket, limit)
        except LockError:
            if time.monotonic() > end:
                raise
        else:
            assert isinstance(answer, Granted), f"{owner} did not get the lock within {limit:g} s: {answer}"
            return ticket, answer


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[list[InActor]]:
    """Two engines; as they are used here, the first stages, and the second loads in place."""
    engines = [InActor(f"k{number}", seed=number + 1) for number in range(2)]
    yield engines
    for engine in engines:
        ray.kill(engine.actor)


@pytest.fixture
def place(tmp_path: Path, actors: list[InActor]) -> Iterator[Place]:
    """A lock of this test alone."""
    place = Place(tmp_path, actors)
    yield place
    RayLock(place.name, LEASE).retire(force=True)


@pytest.fixture(scope="module")
def spares(ray_cluster: None) -> Iterator[list[Any]]:
    """A process that is ready to be killed."""
    ready = [owner()]
    yield ready
    for trainer in ready:
        ray.kill(trainer)


@pytest.mark.parametrize("where", STATES)
def test_an_owner_is_killed(where: str, place: Place, spares: list[Any]) -> None:
    """SIGKILL in each state: the next one gets the lock within one lease, and nobody stays paused."""
    doomed = spares.pop() if spares else owner()
    process = place.become(doomed, "doomed", place.engines)
    running = place.begin(doomed, "doomed", where, place.engines)
    heir = RayLock(place.name, LEASE)
    os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    if place.mine is not None:  # who waits behind a dead waiter gets its turn as soon
        behind = heir.request("heir", "its round")
        heir.release(place.mine[0], place.mine[1].epoch)
        assert isinstance(heir.wait(behind, PATIENCE), Granted)
    else:
        behind, _ = take(heir, "heir")
    took = time.monotonic() - killed
    assert took < LEASE + SLACK, f"the next owner got the lock after {took:.2f} s"
    heir.cancel(behind)
    with pytest.raises(ray.exceptions.RayActorError):
        ask(running)
    path = paths(place.folder / "doomed.jsonl")[-1]
    assert path[-1] == where, "it was killed elsewhere"
    place.leave_the_pause(where == "Cleaning", DEADLINE + SLACK)
    with place.bench() as bench:
        assert bench.works().epoch > 1
    assert [each.owner for each in grants(place.file)][-1] == "trainer"
    spares.append(owner())  # for the next test; while a process starts, everything else here is slow


@pytest.fixture(scope="module")
def sleeper(actors: list[InActor]) -> Iterator[Any]:
    """One process for all owners that are frozen: it lives on."""
    trainer = owner()
    yield trainer
    ray.kill(trainer)


def renews(rival: Witness, ticket: Ticket, epoch: int) -> bool:
    """Whether the lock is still the rival's."""
    try:
        rival.renew(ticket, epoch)
    except LockError:
        return False
    return True


@pytest.mark.parametrize("where", STATES)
def test_an_owner_is_frozen(where: str, place: Place, sleeper: Any) -> None:
    """SIGSTOP in each state, SIGCONT when another trainer has had its round: it can do nothing any more."""
    process = place.become(sleeper, "sleeper", place.engines)
    running = place.begin(sleeper, "sleeper", where, place.engines)
    freeze(process)
    try:
        assert eventually(lambda: frozen(process), PATIENCE)
        if place.mine is not None:
            Witness(*place.lock).release(place.mine[0], place.mine[1].epoch)
        with place.bench() as bench:
            waited = bench.works().seconds["Idle"]
            assert waited < LEASE + SLACK, f"the next owner got the lock after {waited:.2f} s"
            rival = Witness(*place.lock)
            ticket, granted = take(rival)
            before, refused = bench.looks(), [ask(each.actor.refused.remote()) for each in place.engines]
            counted = rival.status().refused
            place.hold.let_go()
            thaw(process)
            told = ask(running)
            assert renews(rival, ticket, granted.epoch), "a late release took the lock from its holder"
            assert told["path"][-1] == "Released"
            assert not told["ok"], told
            assert told["published"] == ("yes" if where == "Cleaning" else "no")
            late = ask(sleeper.late.remote())
            assert late.pop("release") in ("EXPIRED", "ABANDONED", "UnknownTicket", "StaleEpoch"), late
            assert late.pop("renew") in ("NotHolder", "UnknownTicket", "StaleEpoch"), late
            assert set(late.values()) == {"StaleSession"}, late
            now = [ask(each.actor.refused.remote()) for each in place.engines]
            assert all(more >= less + 3 for more, less in zip(now, refused, strict=True)), "not counted"
            assert rival.status().refused >= counted + 2, "the keeper does not count what it refuses"
            holder = rival.status().holder
            assert holder is not None, "a late release took the lock from its holder"
            assert (holder.owner, holder.epoch) == ("somebody else", granted.epoch)
            rival.release(ticket, granted.epoch)
            rival.close()
            for name, look in bench.looks().items():
                was = before[name]
                assert (look.version, look.state, look.paused) == (was.version, was.state, was.paused)
                assert same(look.tensors, was.tensors), f"a late frame reached {name}"
            bench.works()
    finally:
        thaw(process)
    grants(place.file)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_b09_b_a_trainer_stops_before_the_first_bucket(
    how: signal.Signals, place: Place, spares: list[Any]
) -> None:
    """PrimeIntellect-ai/prime-rl#2230, #3016: the engines have paused for it, and no bucket ever comes.

    Each leaves the pause by its own limit, with the weights it had; what loads in place is whole as well.
    """
    doomed = spares[0] if how is signal.SIGSTOP else spares.pop()
    process = place.become(doomed, "doomed", place.engines)
    assert ask(doomed.round.remote(1))["ok"]
    ask(doomed.arm.remote("before the first bucket", place.hold))
    running = doomed.round.remote(2)
    place.hold.reached()
    assert [(look.paused, look.version) for look in place.looks()] == [(True, 0)] * 2
    os.kill(process, how)
    try:
        assert eventually(lambda: not any(look.in_session for look in place.looks()), DEADLINE + SLACK)
        for look in place.looks():
            assert (look.state, look.paused, look.version) == (EngineState.Serving, False, 0)
            assert same(look.tensors, state(1))
        assert [engine.count("frame") for engine in place.engines] == [len(NAMES)] * 2, "a bucket was sent"
    finally:
        place.hold.let_go()
        if how is signal.SIGSTOP:
            thaw(process)
    if how is signal.SIGKILL:
        spares.append(owner())
        with pytest.raises(ray.exceptions.RayActorError):
            ask(running)
    else:
        assert not ask(running)["ok"], "it went on as if nothing had been"
    with place.bench() as bench:
        bench.works()


class TestAKeeperThatDies:
    """The lock's own process is killed in the middle of a round."""

    @pytest.mark.parametrize("where", ["Locked", "Broadcasting", "Awaiting", "Cleaning"])
    def test_in_each_state(self, where: str, place: Place, sleeper: Any) -> None:
        """The round fails and says why; the next keeper's epochs are higher, and it waits for the old lease.

        In turn its epochs come from a file and from the clock.
        """
        kept = place.folder / "epoch" if where in ("Locked", "Awaiting") else None
        lock = (*place.lock, kept)
        place.become(sleeper, "sleeper", place.engines, kept, deadline=16.0)
        running = place.begin(sleeper, "sleeper", where, place.engines)
        os.kill(keeper_of(place.name), signal.SIGKILL)
        killed = time.monotonic()
        heir = Witness(*lock)
        ticket, granted = take(heir, "heir")
        heir.release(ticket, granted.epoch)
        heir.close()
        place.hold.let_go()
        told = ask(running)
        assert told["path"][-2:] == ("Failed", "Released"), told
        assert told["kind"] == "LeaseEnded", told
        assert "the lease on the lock ended before it was renewed: " in told["error"], told
        whys = ("the keeper restarted", "died before it answered", "did not answer renew within")
        assert any(why in told["error"] for why in whys), told
        first, *_, last = grants(place.file)
        assert last.epoch == granted.epoch > first.epoch == told["epoch"]
        assert last.start - killed > LEASE, "the old lease was not left to run out"
        with Bench(
            place.engines, "collective", policy=quick(deadline=8.0, lease=LEASE), lock=Witness(*lock),
            rival=RayLock(place.name, LEASE, kept),
        ) as bench:  # fmt: skip
            assert bench.works().epoch > granted.epoch
        grants(place.file)


def test_trainers_with_other_locks_do_not_wait_for_each_other(place: Place, sleeper: Any) -> None:
    """While one lock is held in the middle of a round, a trainer with another name has all its rounds."""
    place.become(sleeper, "sleeper", place.engines[:1])
    running = place.begin(sleeper, "sleeper", "Awaiting", place.engines[:1])
    other = RayLock(f"{place.name}-other", LEASE)
    try:
        with Bench(
            place.engines[1:], "collective", policy=quick(deadline=8.0, lease=LEASE), lock=other,
            rival=RayLock(other.name, LEASE),
        ) as bench:  # fmt: skip
            for _ in range(5):
                bench.works()
            held = RayLock(place.name, LEASE).status().holder
            assert held is not None
            assert held.owner == "sleeper"
            place.hold.let_go()
            assert ask(running)["ok"]
            bench.works()
    finally:
        other.retire(force=True)


def test_trainers_with_one_lock_take_turns(place: Place, sleeper: Any) -> None:
    """Three trainers in two processes: whoever asked first is first, and nobody overlaps."""
    place.become(sleeper, "sleeper", place.engines)
    first, running = Witness(*place.lock), None
    mine = take(first, "first")
    waits: dict[str, tuple[Ticket, Future[Any]]] = {}
    for count, name in enumerate(("before", "sleeper", "behind"), start=1):
        if name == "sleeper":
            running = sleeper.round.remote(1)
        else:
            ticket = first.request(name, f"round of {name}")
            waits[name] = ticket, spawn(name, Witness(*place.lock).wait, ticket, PATIENCE)
        assert eventually(lambda: len(first.status().waiting) == count, PATIENCE)  # noqa: B023 - at once
    first.release(mine[0], mine[1].epoch)
    for ticket, waiting in waits.values():
        first.release(ticket, waiting.result(PATIENCE).epoch)
    assert ask(running)["ok"]
    assert [each.owner for each in grants(place.file)] == ["first", "before", "sleeper", "behind"]
