"""The lock kept in this process: threads that wait, leases that run out, epochs that outlive it."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from weightsync.fsm.lock import (
    Closed,
    Ending,
    Granted,
    LockKeeper,
    NotHolder,
    StaleEpoch,
    Ticket,
    TicketClosed,
    UnknownTicket,
    Waiting,
)
from weightsync.handlers.lock import EpochFile, EpochNotKept, LocalLock

Value = TypeVar("Value")

PATIENCE = 20.0
"""Seconds until a thread that should have returned counts as hanging."""


class Clock:
    """Turned by hand; notices when another thread looks at it."""

    def __init__(self, tick: float = 0.0) -> None:
        self.time = 100.0
        self.tick = tick
        self.looks = 0
        self.read_elsewhere = threading.Event()

    def __call__(self) -> float:
        """The time, which then goes on by one tick."""
        time_now = self.time
        self.looks += 1
        self.time += self.tick
        if threading.current_thread() is not threading.main_thread():
            self.read_elsewhere.set()
        return time_now


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that are not waited for if the test has failed already."""
    pool = ThreadPoolExecutor()
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def acquire(lock: LocalLock, owner: str, limit: float = PATIENCE) -> tuple[Ticket, Granted]:
    """Request and wait until it is granted."""
    ticket = lock.request(owner, "1")
    answer = lock.wait(ticket, limit)
    assert isinstance(answer, Granted)
    return ticket, answer


def result(future: Future[Value]) -> Value:
    """What a thread returned, with a deadline."""
    return future.result(PATIENCE)


def test_it_is_a_lock_keeper() -> None:
    """The type checker agrees that this is the face that an actor has, too."""
    keeper: LockKeeper = LocalLock(lease=5.0, epoch=0)
    assert keeper.lease == 5.0


def test_a_free_lock_is_granted_with_a_whole_lease() -> None:
    """Nobody has to wait for a lock that nobody holds."""
    clock = Clock()
    lock = LocalLock(lease=2.0, epoch=0, now=clock)
    ticket = lock.request("a", "round 1")
    assert lock.wait(ticket, 0.0) == Granted(1, 2.0, ticket)


def test_a_held_lock_makes_wait_return_after_the_limit() -> None:
    """The answer says who holds the lock; a limit of 0 only looks."""
    lock = LocalLock(epoch=0)
    acquire(lock, "a")
    ticket = lock.request("b", "2")
    began = time.monotonic()
    answer = lock.wait(ticket, 0.1)
    assert isinstance(answer, Waiting)
    assert answer.holder is not None
    assert (answer.holder.owner, answer.place) == ("a", 1)
    assert time.monotonic() - began >= 0.1
    assert isinstance(lock.wait(ticket, 0.0), Waiting)


def test_a_release_wakes_the_waiter_at_once() -> None:
    """A waiter sleeps until it is its turn and does not poll."""
    lock = LocalLock(epoch=0)
    first, granted = acquire(lock, "a")
    second = lock.request("b", "2")
    with threads() as pool:
        future = pool.submit(lock.wait, second, PATIENCE)
        began = time.monotonic()
        assert lock.release(first, granted.epoch) == Closed(Ending.RELEASED, 1, first)
        answer = result(future)
    assert isinstance(answer, Granted)
    assert answer.epoch == 2
    assert time.monotonic() - began < PATIENCE / 4


def test_an_answer_says_how_long_the_question_stood() -> None:
    """A holder that waited long still knows its whole lease: it counts from before it asked."""
    clock = Clock()
    lock = LocalLock(lease=2.0, epoch=0, now=clock)
    first, granted = acquire(lock, "a")
    second = lock.request("b", "2")
    clock.read_elsewhere.clear()
    with threads() as pool:
        future = pool.submit(lock.wait, second, PATIENCE)
        assert clock.read_elsewhere.wait(PATIENCE)
        asked = clock.time
        clock.time += 1.5
        lock.release(first, granted.epoch)
        answer = result(future)
    assert isinstance(answer, Granted)
    assert (answer.remaining, answer.waited) == (2.0, 1.5)
    assert answer.end(asked) == clock.time + lock.lease


def test_the_holder_stops_before_the_keeper_while_time_goes_on() -> None:
    """Between any two looks at the clock time passes; none of it is counted in the holder's favour."""
    clock = Clock(tick=0.25)
    lock = LocalLock(lease=60.0, epoch=0, now=clock)
    ticket = lock.request("a", "1")
    asked = clock()
    answer = lock.wait(ticket, PATIENCE)
    assert isinstance(answer, Granted)
    assert lock._book.holder is not None
    assert answer.end(asked) <= lock._book.holder.until
    asked = clock()
    renewed = lock.renew(ticket, answer.epoch)
    assert lock._book.holder is not None
    assert answer.end(asked) <= renewed.end(asked) <= lock._book.holder.until


def test_a_dead_holder_costs_one_lease() -> None:
    """The waiter is granted when the lease is over, without anybody's help."""
    lock = LocalLock(lease=0.3, epoch=0)
    began = time.monotonic()
    dead, _ = acquire(lock, "a")
    _, granted = acquire(lock, "b")
    assert granted.epoch == 2
    assert 0.3 <= time.monotonic() - began < PATIENCE / 2
    with pytest.raises(NotHolder, match="it is expired, epoch 1"):
        lock.renew(dead, 1)


def test_turning_the_clock_expires_the_holder() -> None:
    """With a clock turned by hand, ``expire`` makes sleeping waiters look at it."""
    clock = Clock()
    lock = LocalLock(lease=60.0, epoch=0, now=clock)
    acquire(lock, "a")
    clock.time += 30
    second = lock.request("b", "2")
    with threads() as pool:
        future = pool.submit(lock.wait, second, PATIENCE)
        clock.time += 30
        lock.expire()
        answer = result(future)
    assert isinstance(answer, Granted)
    assert answer.epoch == 2


def test_a_blocked_waiter_is_not_taken_for_dead() -> None:
    """Waiting inside the keeper is a sign of life, for as long as it takes."""
    lock = LocalLock(lease=0.3, epoch=0)
    first, granted = acquire(lock, "a")
    second = lock.request("b", "2")
    pace = threading.Event()
    with threads() as pool:
        future = pool.submit(lock.wait, second, PATIENCE)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            lock.renew(first, granted.epoch)
            pace.wait(0.02)
        lock.release(first, granted.epoch)
        assert isinstance(result(future), Granted)


def test_cancelling_wakes_the_one_who_waits() -> None:
    """Another thread may give up the request; the waiter learns that it is over."""
    lock = LocalLock(epoch=0)
    acquire(lock, "a")
    second = lock.request("b", "2")
    with threads() as pool:
        future = pool.submit(lock.wait, second, PATIENCE)
        assert lock.cancel(second) == Closed(Ending.CANCELLED, None, second)
        with pytest.raises(TicketClosed, match=r"of b \(round 2\) is cancelled and will not be granted"):
            result(future)


def test_a_request_whose_answer_got_lost_can_be_cancelled() -> None:
    """Whoever picks the ticket's id before it asks can close it without having got the ticket."""
    lock = LocalLock(epoch=0)
    lock.request("a", "1", ticket_id="mine")
    assert lock.cancel(Ticket("mine", "a", "1")).how is Ending.HANDED_BACK
    assert lock.status().holder is None


def test_a_cancel_may_overtake_its_request() -> None:
    """The request is closed when it arrives, and nobody is left holding the lock."""
    lock = LocalLock(epoch=0)
    assert lock.release(Ticket("mine", "a", "1"), None).how is Ending.CANCELLED
    ticket = lock.request("a", "1", ticket_id="mine")
    with pytest.raises(TicketClosed):
        lock.wait(ticket, PATIENCE)
    assert lock.status().holder is None


def test_strangers_are_refused() -> None:
    """Neither another's name on a ticket nor a stale epoch gives the lock back."""
    lock = LocalLock(epoch=0)
    ticket, granted = acquire(lock, "a")
    with pytest.raises(NotHolder, match="was not issued"):
        lock.release(Ticket(ticket.id, "b", ticket.round), granted.epoch)
    with pytest.raises(UnknownTicket):
        lock.release(Ticket("forged", "b", "2"), granted.epoch)
    with pytest.raises(StaleEpoch):
        lock.release(ticket, granted.epoch - 1)
    holder = lock.status().holder
    assert holder is not None
    assert holder.owner == "a"


def test_a_refused_question_still_lets_time_pass() -> None:
    """An expired holder makes room also when the question that noticed it is refused."""
    clock = Clock()
    lock = LocalLock(lease=2.0, epoch=0, now=clock)
    first, granted = acquire(lock, "a")
    clock.time += 1.0
    second = lock.request("b", "2")
    clock.time += 1.0
    with pytest.raises(NotHolder):
        lock.renew(first, granted.epoch)
    assert lock._book.holder is not None
    assert lock._book.holder.ticket == second


def test_status_tells_what_is_true_now() -> None:
    """A lease that has run out is not shown as held, though nobody has asked since."""
    clock = Clock()
    lock = LocalLock(lease=2.0, epoch=0, now=clock)
    acquire(lock, "a")
    clock.time += 2.0
    assert lock.status().holder is None


def test_a_waiter_sleeps_to_the_next_expiry() -> None:
    """Neither past it, nor so long that it would itself be taken for dead; and it does not spin."""
    clock = Clock()
    lock = LocalLock(lease=60.0, epoch=0, now=clock)
    assert lock._pause() == 20.0
    acquire(lock, "a")
    assert lock._pause() == 20.0
    clock.time += 59.5
    assert lock._pause() == 0.5
    second = lock.request("b", "2")
    with threads() as pool:
        before = clock.looks
        assert isinstance(result(pool.submit(lock.wait, second, 0.2)), Waiting)
    assert clock.looks - before < 20


def test_many_threads_take_turns_in_the_order_of_their_requests() -> None:
    """Nobody overtakes, nobody starves, and never do two hold the lock."""
    lock = LocalLock(epoch=0)
    asking = threading.Lock()
    asked: list[str] = []
    got: list[str] = []
    inside = itertools.count()

    def trainer(name: str) -> None:
        for _ in range(25):
            with asking:
                ticket = lock.request(name, "1")
                asked.append(ticket.id)
            answer = lock.wait(ticket, PATIENCE)
            assert isinstance(answer, Granted)
            before = next(inside)
            got.append(ticket.id)
            assert next(inside) == before + 1, "two holders"
            lock.release(ticket, answer.epoch)

    with threads() as pool:
        for future in [pool.submit(trainer, name) for name in "abcd"]:
            result(future)
    assert got == asked
    assert lock.status().epoch == 100


# ------------------------------------------------------------------------------------------ epochs in a file


def test_epochs_go_on_in_the_next_life(tmp_path: Path) -> None:
    """A keeper that starts again grants above everything that was ever granted."""
    path = tmp_path / "runs" / "lock.json"
    for life in range(3):
        lock = LocalLock(path=path)
        ticket, granted = acquire(lock, "a")
        assert granted.epoch == 2 * life + 1
        lock.release(ticket, granted.epoch)
        acquire(lock, "b")


def test_an_epoch_is_written_before_it_is_granted(tmp_path: Path) -> None:
    """At no moment does anybody hold an epoch that the file does not know."""
    path = tmp_path / "lock.json"
    lock = LocalLock(path=path)
    seen = 0
    for _ in range(5):
        ticket, granted = acquire(lock, "a")
        seen = granted.epoch
        assert EpochFile(path).claim() >= seen
        lock.release(ticket, granted.epoch)
        lock = LocalLock(path=path)
    assert seen == 5


def test_a_waiter_reserves_while_the_lock_is_held(tmp_path: Path) -> None:
    """A release hands over without touching the disk: the next epoch is in the file already."""
    folder = tmp_path / "runs"
    lock = LocalLock(path=folder / "lock.json")
    first, granted = acquire(lock, "a")
    second = lock.request("b", "2")
    assert isinstance(lock.wait(second, 0.0), Waiting)
    with broken(folder):
        lock.release(first, granted.epoch)
        answer = lock.wait(second, 0.0)
    assert isinstance(answer, Granted)
    assert answer.epoch == 2


@contextmanager
def broken(folder: Path) -> Iterator[None]:
    """A folder that cannot be used for a while."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("in the way")
    yield
    folder.unlink()
    aside.rename(folder)


def test_nothing_is_granted_that_cannot_be_written(tmp_path: Path) -> None:
    """The waiter gets the error; holder and renewals are not disturbed, and it goes on when the disk does."""
    folder = tmp_path / "runs"
    lock = LocalLock(path=folder / "lock.json")
    first, granted = acquire(lock, "a")
    with broken(folder):
        second = lock.request("b", "2")
        with pytest.raises(EpochNotKept, match=r"cannot write epoch 2 of the lock to .*lock\.json"):
            lock.wait(second, PATIENCE)
        lock.renew(first, granted.epoch)
        lock.release(first, granted.epoch)
        assert lock.status().holder is None
        with pytest.raises(EpochNotKept):
            lock.wait(second, PATIENCE)
    answer = lock.wait(second, PATIENCE)
    assert isinstance(answer, Granted)
    assert answer.epoch == 2


def test_a_replaced_keeper_grants_nothing(tmp_path: Path) -> None:
    """A keeper that wakes up after its successor has started is told so; the successor goes on."""
    path = tmp_path / "lock.json"
    old = LocalLock(path=path)
    ticket, granted = acquire(old, "a")
    new = LocalLock(path=path)
    old.release(ticket, granted.epoch)
    with pytest.raises(EpochNotKept, match="was replaced by another one"):
        acquire(old, "a")
    _, granted = acquire(new, "b")
    assert granted.epoch == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text("7"),
        lambda path: path.write_text('{"schema": 2, "epoch": 1, "keeper": "k"}'),
        lambda path: path.write_text('{"schema": 1, "epoch": true, "keeper": "k"}'),
        lambda path: path.write_text('{"schema": 1, "epoch": -1, "keeper": "k"}'),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[" * 4000),
        lambda path: path.write_text(" " * 5000),
        lambda path: path.mkdir(),
    ],
)
def test_an_unreadable_epoch_is_not_taken_for_zero(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    """Starting again at 1 would let old frames pass; the error names the file, which is left alone."""
    path = tmp_path / "lock.json"
    spoil(path)
    with pytest.raises(EpochNotKept, match=r"lock\.json"):
        LocalLock(path=path)
    assert path.exists()


def test_what_is_refused_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A release that comes after its lease has ended, a renewal of it, and a stranger's; each is a line."""
    clock = Clock()
    lock = LocalLock(10.0, epoch=0, now=clock)
    late = lock.request("late", "r1")
    granted = lock.wait(late, 0.0)
    assert isinstance(granted, Granted)
    clock.time += 10.0
    after = lock.request("after", "r2")
    with caplog.at_level(logging.WARNING, "weightsync"):
        assert lock.release(late, granted.epoch).how is Ending.EXPIRED
        with pytest.raises(NotHolder):
            lock.renew(late, granted.epoch)
        with pytest.raises(StaleEpoch):
            lock.release(after, granted.epoch)
    status = lock.status()
    assert status.holder is not None
    assert (status.holder.owner, status.refused) == ("after", 3)
    assert [record.getMessage().startswith("lock: refused: ") for record in caplog.records] == [True] * 3
