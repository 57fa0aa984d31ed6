"""One lock for trainers in several processes, kept by an actor that may itself be killed."""

import os
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from weightsync.fsm.lock import Closed, Ending, Granted, LockKeeper, Ticket, Waiting
from weightsync.fsm.tickets import LockError, NotHolder, StaleEpoch, TicketClosed, UnknownTicket
from weightsync.handlers.lock import EpochNotKept
from weightsync.handlers.lock_actor import _restarted
from weightsync.handlers.ray_lock import RayLock
from weightsync.handlers.threads import spawn

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

# The actors' processes cannot import the tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = 60.0
"""Seconds after which something that should have happened never will, on a machine that is busy."""

LEASE = 2.0


@pytest.fixture
def lock() -> Iterator[RayLock]:
    """A lock of this test alone."""
    lock = RayLock(uuid.uuid4().hex, LEASE)
    yield lock
    lock.retire(force=True)


def another(lock: RayLock) -> RayLock:
    """The same lock, as another trainer has it."""
    return RayLock(lock.name, lock.lease, lock._path)


def hold(lock: LockKeeper, owner: str = "a") -> tuple[Ticket, Granted]:
    """Take the lock."""
    ticket = lock.request(owner, f"round-{owner}")
    granted = lock.wait(ticket, SOON)
    assert isinstance(granted, Granted)
    return ticket, granted


def kill_keeper(lock: RayLock) -> None:
    """SIGKILL, as the kernel does it."""
    os.kill(
        ray.get(lock._known().__ray_call__.remote(lambda self: os.getpid()), timeout=SOON), signal.SIGKILL
    )


class Holder:
    """A trainer in a process of its own."""

    def __init__(self, name: str) -> None:
        self.lock = RayLock(name, LEASE)

    def hold(self) -> int:
        """Take the lock; its epoch."""
        ticket = self.lock.request("doomed", "round-doomed")
        granted = self.lock.wait(ticket, SOON)
        assert isinstance(granted, Granted)
        return granted.epoch

    def wait(self) -> None:
        """Wait for the lock, for ever."""
        self.lock.wait(self.lock.request("doomed", "round-doomed"), 1e6)


def holder(lock: RayLock) -> Any:
    """Such a trainer."""
    made: Any = ray.remote(Holder)
    return made.options(num_cpus=0, max_concurrency=2).remote(lock.name)


class TestAKeeper:
    def test_it_grants_and_takes_back(self, lock: RayLock) -> None:
        """Each grant has a higher epoch; a release is answered with evidence, and asking again repeats it."""
        ticket, first = hold(lock)
        assert lock.lease == LEASE
        assert 0 < first.remaining <= LEASE
        assert lock.renew(ticket, first.epoch).remaining == LEASE
        closed = lock.release(ticket, first.epoch)
        assert (closed.how, closed.epoch, closed.again) == (Ending.RELEASED, first.epoch, False)
        assert lock.release(ticket, first.epoch).again
        ticket, second = hold(lock)
        assert second.epoch == first.epoch + 1
        assert lock.release(ticket, None).how is Ending.HANDED_BACK

    def test_waiters_are_served_in_order_and_at_once(self, lock: RayLock) -> None:
        """Two trainers behind a holder: each gets the lock when the one before gives it back."""
        first, granted = hold(lock)
        trainers = [another(lock) for _ in range(2)]
        tickets = [each.request(f"t{place}", "r") for place, each in enumerate(trainers)]
        waiting = trainers[1].wait(tickets[1], 0.0)
        assert isinstance(waiting, Waiting)
        assert (waiting.place, waiting.holder and waiting.holder.owner) == (2, "a")
        later = [
            spawn("wait", each.wait, ticket, SOON) for each, ticket in zip(trainers, tickets, strict=True)
        ]
        lock.release(first, granted.epoch)
        second = later[0].result(SOON)
        assert isinstance(second, Granted)
        assert second.epoch == granted.epoch + 1
        assert not later[1].done()
        trainers[0].release(tickets[0], second.epoch)
        third = later[1].result(SOON)
        assert isinstance(third, Granted)
        assert third.epoch == granted.epoch + 2

    def test_the_holders_end_comes_first(self, lock: RayLock) -> None:
        """What a waiter counts from before it asked is never later than what the keeper counts."""
        first, granted = hold(lock)
        ticket = lock.request("b", "r")
        asked = time.monotonic()
        waiting = spawn("wait", lock.wait, ticket, SOON)
        while not lock.status().waiting:
            pass
        lock.release(first, granted.epoch)
        got = waiting.result(SOON)
        assert isinstance(got, Granted)
        assert got.end(asked) <= time.monotonic() + LEASE
        assert got.end(asked) > time.monotonic()

    def test_other_names_are_other_locks(self, lock: RayLock) -> None:
        """Holding one does not keep anybody from holding another."""
        hold(lock)
        other = RayLock(uuid.uuid4().hex, LEASE)
        try:
            hold(other)
        finally:
            other.retire(force=True)

    def test_a_stranger_is_refused(self, lock: RayLock) -> None:
        """Only the holder's ticket with its epoch renews or releases; a closed one is not granted."""
        ticket, granted = hold(lock)
        waiter = lock.request("b", "r")
        with pytest.raises(StaleEpoch):
            lock.release(ticket, granted.epoch - 1)
        with pytest.raises(NotHolder):
            lock.renew(waiter, granted.epoch)
        with pytest.raises(UnknownTicket):
            lock.renew(Ticket("made up", "b", "r"), granted.epoch)
        assert lock.cancel(waiter).how is Ending.CANCELLED
        with pytest.raises(TicketClosed, match="cancelled and will not be granted"):
            lock.wait(waiter, SOON)
        assert lock.status().holder is not None

    def test_another_lease_is_refused(self, lock: RayLock) -> None:
        """Everybody who uses a lock has to count the same way."""
        lock.status()
        with pytest.raises(LockError, match="has a lease of 2 s, but is used here with 3 s"):
            RayLock(lock.name, 3.0).status()

    def test_without_ray(self, lock: RayLock, monkeypatch: pytest.MonkeyPatch) -> None:
        """A lock starts no cluster behind anybody's back."""
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(LockError, match=r"Ray is not running: ray.init\(\)"):
            lock.request("a", "r")


class TestDeath:
    def test_a_holder_that_dies_costs_at_most_one_lease(self, lock: RayLock) -> None:
        """Its lease is not renewed, and the waiter is granted the lock when it is over."""
        doomed = holder(lock)
        epoch = ray.get(doomed.hold.remote(), timeout=SOON)
        ticket = lock.request("b", "r")
        killed = time.monotonic()
        ray.kill(doomed)
        granted = lock.wait(ticket, SOON)
        assert isinstance(granted, Granted)
        assert granted.epoch == epoch + 1
        assert time.monotonic() - killed < LEASE + 1
        with pytest.raises(LockError):
            lock.release(Ticket("x", "doomed", "round-doomed"), epoch)

    def test_a_waiter_that_dies_is_not_granted_the_lock(self, lock: RayLock) -> None:
        """It is taken for dead after a lease, although it asked for ever; the next one gets its turn."""
        ticket, granted = hold(lock)
        doomed = holder(lock)
        doomed.wait.remote()
        while not lock.status().waiting:
            pass
        ray.kill(doomed)
        until = time.monotonic() + SOON
        while lock.status().waiting:
            lock.renew(ticket, granted.epoch)
            assert time.monotonic() < until
        behind = lock.request("c", "r")
        lock.release(ticket, granted.epoch)
        got = lock.wait(behind, SOON)
        assert isinstance(got, Granted)
        assert got.epoch == granted.epoch + 1

    @pytest.mark.parametrize("kept", [True, False], ids=["in a file", "by the clock"])
    def test_a_keeper_that_is_killed(self, kept: bool, tmp_path: Path) -> None:
        """Whoever waits is told at once; its successor knows no ticket, grants later, and higher epochs."""
        lock = RayLock(uuid.uuid4().hex, LEASE, tmp_path / "epoch" if kept else None)
        try:
            ticket, before = hold(lock)
            waiter = lock.request("b", "r")
            waiting = spawn("wait", lock.wait, waiter, SOON)
            killed = time.monotonic()
            kill_keeper(lock)
            with pytest.raises(
                LockError, match=r"the keeper of lock '[0-9a-f]+' died before it answered 'wait'"
            ):
                waiting.result(SOON)
            assert time.monotonic() - killed < 10
            with pytest.raises(UnknownTicket, match="the keeper restarted"):
                lock.renew(ticket, before.epoch)
            _, after = hold(another(lock), "c")
            assert after.epoch > before.epoch
            assert time.monotonic() - killed > LEASE
        finally:
            lock.retire(force=True)

    def test_a_keeper_that_was_retired(self, lock: RayLock) -> None:
        """The next one that wants the lock starts a new keeper, whose epochs are higher still."""
        _, before = hold(lock)
        lock.retire(force=True)
        until, epoch = time.monotonic() + SOON, 0
        while not epoch:
            assert time.monotonic() < until
            with suppress(LockError):  # until Ray has noticed that the name is free
                epoch = hold(lock)[1].epoch
        assert epoch > before.epoch


class Asking:
    """An actor that asks what the keeper asks, and listens to what Ray says of it."""

    def ask(self, how: str) -> tuple[bool, list[str]]:
        """Whether it was restarted, by our question or by Ray's own; and what was said."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if how == "ours":
                restarted = _restarted()
            else:
                restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        return restarted, [str(each.message) for each in said]


def test_asking_whether_it_was_restarted_is_quiet() -> None:
    """Ray complains of a property of its own, into the output of every trainer; not if we ask."""
    remote: Any = ray.remote(num_cpus=0)(Asking)
    asking = remote.remote()
    assert ray.get(asking.ask.remote("ours"), timeout=SOON) == (False, [])
    _, said = ray.get(asking.ask.remote("ray's"), timeout=SOON)
    assert any("deprecated" in each for each in said), "Ray is quiet now: ask it directly"
    ray.kill(asking)


class TestTheFile:
    def test_the_epoch_is_written_before_it_is_granted(self, tmp_path: Path) -> None:
        """The file is never behind what a trainer was told."""
        path = tmp_path / "epoch"
        lock = RayLock(uuid.uuid4().hex, LEASE, path)
        try:
            for wanted in (1, 2, 3):
                ticket, granted = hold(lock)
                assert granted.epoch == wanted
                assert f'"epoch": {wanted}' in path.read_text(encoding="utf-8")
                answer = lock.release(ticket, granted.epoch)
                assert isinstance(answer, Closed)
        finally:
            lock.retire(force=True)

    def test_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        """Whoever wants the lock is told which file, and gets it when that is put right."""
        path = tmp_path / "epoch"
        path.write_text("not an epoch", encoding="utf-8")
        lock = RayLock(uuid.uuid4().hex, LEASE, path)
        try:
            ticket = lock.request("a", "r")
            with pytest.raises(EpochNotKept, match="is not an epoch file"):
                lock.wait(ticket, SOON)
            path.unlink()
            assert isinstance(lock.wait(ticket, SOON), Granted)
        finally:
            lock.retire(force=True)
