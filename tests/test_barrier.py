"""A barrier over a store: all ranks pass it, or none does, and whoever is at fault is named.

The rules alone, then ranks in threads over a store of this process, then ranks in processes of their own over
a ``TCPStore`` and a ``FileStore``, which raise, come late, are killed, and share memory.
"""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from casekit.barrierside import Sides
from casekit.rankteam import DictStore
from weightsync.fsm.errors import (
    BarrierAborted,
    BarrierTimeout,
    RankError,
    RankFailed,
    RankLost,
    RoundCancelled,
    SetupError,
)
from weightsync.fsm.ranks import error_from, error_told
from weightsync.fsm.votes import Decision, Meeting, Vote, decided, missing, without
from weightsync.handlers.barrier import Barrier, Met
from weightsync.handlers.rank_store import RankStore

LONG = 10.0
"""A bound that is never reached."""


def of(epoch: int, name: str = "released", run: str = "") -> Meeting:
    """The barrier of a round."""
    return Meeting(f"r{epoch}", epoch, name, run)


# -- the rules --------------------------------------------------------------------------------------------


def test_it_is_passed_when_all_have_come_and_none_is_against_it() -> None:
    """Whoever votes against it decides alone, and is named with what it said."""
    votes = {0: Vote(0), 2: Vote(2)}
    assert decided(of(1), votes, 3) is None
    assert missing(votes, 3) == (1,)
    assert decided(of(1), {**votes, 1: Vote(1)}, 3) == Decision(passed=True)
    bad = decided(of(1), {0: Vote(0), 2: Vote(2, "OSError: no memory")}, 3)
    assert bad is not None
    error = bad.error()
    assert isinstance(error, BarrierAborted)
    assert error.ranks == (2,)
    assert str(error) == (
        "barrier 'released' of round r1 (epoch 1) is not passed: rank 2: OSError: no memory"
    )


def test_its_errors_are_those_of_ranks_and_survive_their_way() -> None:
    """Whoever catches what ranks do to each other catches these, too; the kind is told to other ranks."""
    for error in (BarrierAborted("a", [1]), BarrierTimeout("b", [2])):
        told = error_from(error_told(error))
        assert (type(told), str(told)) == (type(error), str(error))
    assert issubclass(BarrierAborted, RankFailed)
    assert issubclass(BarrierTimeout, RankLost)
    vote = Vote(1, "no", ({"bytes": 3},))
    assert Vote.from_json(vote.to_json()) == vote


# -- ranks in threads -------------------------------------------------------------------------------------


class Threads:
    """Ranks in threads."""

    def __init__(self, world: int, store: Any = None) -> None:
        self.store = store or DictStore()
        self.words = [RankStore(self.store, "t", rank, 5.0) for rank in range(world)]
        self.all = [Barrier(words, world) for words in self.words]
        self.pool = ThreadPoolExecutor(world)

    def meet(self, rank: int, meeting: Meeting, **more: Any) -> Any:
        """Begin to."""
        given = {"bound": LONG, **more}
        return self.pool.submit(self.all[rank].meet, meeting, **given)

    def await_word(self, key: str) -> None:
        """Until it is in the store."""
        begun = time.monotonic()
        while f"t/barrier/{key}" not in self.store.values:
            assert time.monotonic() - begun < LONG
            time.sleep(0)

    def close(self) -> None:
        """Give every thread back."""
        self.pool.shutdown(wait=True)
        for barrier, words in zip(self.all, self.words, strict=True):
            barrier.close()
            words.close()


@pytest.fixture
def three() -> Iterator[Threads]:
    """Three ranks."""
    threads = Threads(3)
    yield threads
    threads.close()


def found(future: Any) -> Any:
    """What it was passed with, or the error."""
    return future.exception(2 * LONG) or future.result()


def test_nobody_passes_before_the_last_one_has_come(three: Threads) -> None:
    """Then all do; rank 0 knows who was late, and what each of them said."""
    first = [three.meet(rank, of(1), told=[{"rank": rank}]) for rank in (0, 1)]
    three.await_word("r1/released/1")
    assert not any(future.done() for future in first)
    last = found(three.meet(2, of(1)))
    met = [*map(found, first), last]
    assert all(isinstance(each, Met) for each in met)
    assert sorted(met[0].late) == [0, 1, 2]
    assert met[0].late[2] == max(met[0].late.values())
    assert [vote.told for vote in met[0].votes] == [({"rank": 0},), ({"rank": 1},), ()]


def test_a_rank_that_votes_against_it_ends_the_wait_of_all(three: Threads) -> None:
    """Also if others have not come yet, and without waiting for any bound."""
    zero = three.meet(0, of(1))
    own = found(three.meet(1, of(1), error=OSError("no memory")))
    errors = [own, found(zero), found(three.meet(2, of(1)))]
    assert [type(error) for error in errors] == [BarrierAborted] * 3
    assert {str(error) for error in errors} == {
        "barrier 'released' of round r1 (epoch 1) is not passed: rank 1: OSError: no memory"
    }
    assert {error.ranks for error in errors} == {(1,)}


def test_only_rank_0_can_let_it_be_passed(three: Threads) -> None:
    """One that voted and died leaves votes of all, perhaps in a store that has outlived its run."""
    three.all[0].vote(of(1))
    errors = [found(future) for future in [three.meet(rank, of(1), bound=0.1) for rank in (1, 2)]]
    assert [type(error) for error in errors] == [BarrierTimeout] * 2
    assert {error.ranks for error in errors} == {(0,)}
    assert "rank 0 missing: it came, and has not counted after 0.1 s" in str(errors[0])


@pytest.mark.parametrize("silent", [0, 2])
def test_who_is_missing_at_the_bound_is_named_to_everybody(three: Threads, silent: int) -> None:
    """Rank 0 may be the one: then another rank counts. Who comes after that is told the same."""
    others = [rank for rank in range(3) if rank != silent]
    errors = [found(future) for future in [three.meet(rank, of(1), bound=0.1) for rank in others]]
    errors.append(found(three.meet(silent, of(1))))
    assert [type(error) for error in errors] == [BarrierTimeout] * 3
    assert {str(error) for error in errors} == {
        f"barrier 'released' of round r1 (epoch 1) is not passed: rank {silent} missing: after 0.1 s"
    }
    assert {error.ranks for error in errors} == {(silent,)}


def test_who_stops_ends_the_wait_of_all(three: Threads) -> None:
    """It raises that it was cancelled; the others are told who it was."""
    stop = threading.Event()
    waits = [three.meet(0, of(1)), three.meet(1, of(1), stopped=stop.is_set)]
    stop.set()
    assert isinstance(found(waits[1]), RoundCancelled)
    errors = [found(waits[0]), found(three.meet(2, of(1)))]
    assert [type(error) for error in errors] == [BarrierAborted] * 2
    assert {error.ranks for error in errors} == {(1,)}


def test_an_interrupt_is_raised_and_ends_the_wait_of_all(three: Threads) -> None:
    """Whatever leaves the wait, the others are not left in it."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    other = three.meet(1, of(1))
    with pytest.raises(KeyboardInterrupt):
        three.all[0].meet(of(1), bound=LONG, stopped=interrupt)
    error = found(other)
    assert isinstance(error, BarrierAborted)
    assert "rank 0: KeyboardInterrupt" in str(error)


def test_a_rank_that_is_known_to_be_gone_is_not_waited_for(three: Threads) -> None:
    """Whoever knows more than the store does says so."""

    def gone(absent: Any) -> Any:
        return without(of(1), [2], "it is dead") if 1 not in absent else None

    errors = [found(each) for each in (three.meet(0, of(1), gone=gone), three.meet(1, of(1)))]
    assert [type(error) for error in errors] == [BarrierTimeout] * 2
    assert {str(error).rpartition(": ")[2] for error in errors} == {"it is dead"}


def test_a_late_rank_of_an_old_round_pairs_with_nobody(three: Threads) -> None:
    """Its vote is of that round. Once a newer one has begun it is told that it is late, deleted or not."""
    assert isinstance(found(three.meet(0, of(1), bound=0.05)), BarrierTimeout)
    two = [three.meet(rank, of(2)) for rank in (0, 1)]
    three.await_word("r2/released/0")
    late = found(three.meet(2, of(1)))
    assert isinstance(late, BarrierAborted)
    assert "rank 2 came when the ranks were at epoch 2" in str(late)
    assert not any(future.done() for future in two)
    assert isinstance(found(three.meet(2, of(2))), Met)
    assert all(isinstance(found(future), Met) for future in two)


def test_a_barrier_of_another_name_is_another_one(three: Threads) -> None:
    """The votes at the first one of a round count for nothing at the second one."""
    waits = [three.meet(rank, of(1, "prepared")) for rank in range(3)]
    assert all(isinstance(found(future), Met) for future in waits)
    errors = [found(three.meet(rank, of(1, "released"), bound=0.05)) for rank in (0, 1)]
    assert [type(error) for error in errors] == [BarrierTimeout] * 2


def test_a_coroutine_waits_in_a_thread(three: Threads) -> None:
    """The last rank comes when another coroutine of the same loop has done something meanwhile."""

    async def course() -> tuple[Any, Any]:
        ticks = 0
        meets = asyncio.ensure_future(three.all[0].meet_async(of(1), bound=3.0))
        while ticks < 5:
            await asyncio.sleep(0.005)
            ticks += 1
        came = not meets.done()
        last = three.meet(2, of(1))
        return (await asyncio.gather(meets, return_exceptions=True))[0], came and found(last)

    other = three.meet(1, of(1))
    met, last = asyncio.run(course())
    assert isinstance(met, Met)
    assert isinstance(last, Met)
    assert isinstance(found(other), Met)


def test_an_epoch_is_compared_within_a_run(three: Threads) -> None:
    """A store outlives a trainer, and with a new lock its epochs may begin anew."""
    for meeting in (of(7, run="a"), of(1, run="b")):
        waits = [three.meet(rank, meeting) for rank in range(3)]
        assert all(isinstance(found(future), Met) for future in waits)


def test_a_wait_that_is_cancelled_leaves_no_error_that_nobody_asked_for(
    three: Threads, caplog: pytest.LogCaptureFixture
) -> None:
    """What it ended with is known: it was cancelled."""

    async def course() -> None:
        waits = asyncio.ensure_future(three.all[0].meet_async(of(1), bound=LONG))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(course())
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf"), True, "5"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_bound_that_is_no_time_is_refused(three: Threads, bound: Any, world: int) -> None:
    """Before anybody is told anything; also by a rank that has nobody to wait for."""
    barrier = three.all[0] if world > 1 else Barrier(None)
    with pytest.raises(SetupError, match="a finite number of seconds above 0 is needed"):
        barrier.meet(of(1), bound=bound)
    with pytest.raises(SetupError, match="a finite number of seconds above 0 is needed"):
        asyncio.run(barrier.meet_async(of(1), bound=bound))
    assert not three.store.values


def test_who_says_what_cannot_be_told_keeps_nobody(three: Threads) -> None:
    """It is that rank's error, and not the store's; the others hear of it at once."""
    others = [three.meet(rank, of(1)) for rank in (0, 2)]
    assert isinstance(found(three.meet(1, of(1), told=[{"bytes": {1}}])), TypeError)
    for future in others:
        assert "rank 1: TypeError: Object of type set is not JSON" in str(found(future))


@pytest.mark.parametrize("before", ["passed", "failed"])
def test_a_new_run_does_not_meet_at_what_was_decided_in_an_old_one(three: Threads, before: str) -> None:
    """Also if its rounds have the same names and epochs."""
    error = "" if before == "passed" else "OSError: old"
    waits = [three.meet(rank, of(1, run="a"), error=error) for rank in range(3)]
    assert all(isinstance(found(future), Met if before == "passed" else BarrierAborted) for future in waits)
    alone = three.meet(1, of(1, run="b"), bound=0.1)
    assert isinstance(found(alone), BarrierTimeout)
    waits = [three.meet(rank, of(1, run="c")) for rank in range(3)]
    assert all(isinstance(found(future), Met) for future in waits)


def test_a_name_with_a_slash_is_another_one(three: Threads) -> None:
    """What is a round's and what is a barrier's is not mixed up in the store."""
    one = three.meet(0, Meeting("a/b", 1, "c"), bound=0.1)
    other = [three.meet(rank, Meeting("a", 1, "b/c"), bound=0.1) for rank in (1, 2)]
    assert all(isinstance(found(future), BarrierTimeout) for future in (one, *other))


def test_what_was_said_in_old_rounds_is_deleted(three: Threads) -> None:
    """The words of two rounds are kept, and no more."""
    counts = []
    for epoch in range(1, 6):
        for name in ("prepared", "released"):
            waits = [three.meet(rank, of(epoch, name)) for rank in range(3)]
            assert all(isinstance(found(future), Met) for future in waits)
        counts.append(len(three.store.values))
    assert counts[1:] == [counts[1]] * 4
    for epoch in (1, 2):  # those of a run that is over go as well
        waits = [three.meet(rank, of(epoch, name, run="b")) for name in ("x", "y") for rank in range(3)]
        assert all(isinstance(found(future), Met) for future in waits)
    assert len(three.store.values) == counts[1]


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_see_the_same_whatever_happens(seed: int) -> None:
    """Bounds that end as the last one comes, ranks that fail, stop or stay away: one decision."""
    draw = random.Random(seed)
    threads, stops = Threads(4), [threading.Event() for _ in range(4)]
    waits = {}
    try:
        for rank in draw.sample(range(4), draw.choice([3, 4, 4, 4])):
            error = "OSError: drawn" if draw.random() < 0.1 else ""
            bound = draw.choice([0.005, 0.01, 0.02])
            waits[rank] = threads.meet(rank, of(1), bound=bound, error=error, stopped=stops[rank].is_set)
            time.sleep(draw.random() * 0.01)
            if draw.random() < 0.1:
                stops[rank].set()
        ends = [found(future) for future in waits.values()]
        decision = threads.all[0].decision(of(1))
        assert decision is not None
        for end in ends:
            assert isinstance(end, Met) is decision.passed
            assert isinstance(end, Met | RankError | RoundCancelled)
        if len(waits) < 4:
            assert not decision.passed
    finally:
        threads.close()


def test_one_rank_has_nobody_to_wait_for() -> None:
    """There is no process group, and no store is asked: it passes at once, or raises what its part raised."""
    assert not dist.is_initialized()
    for barrier in (Barrier(None), Barrier(RankStore(DictStore(), "t", 0, 1.0), 1)):
        assert barrier.alone
        assert barrier.meet(of(1), bound=LONG) == Met()
        with pytest.raises(BarrierAborted, match="rank 0: OSError: no memory"):
            barrier.meet(of(1), bound=LONG, error=OSError("no memory"))
        barrier.close()


def test_several_ranks_need_a_store_that_can_decide() -> None:
    """Said when it is made, in one line."""

    class Plain:
        """It has no compare_set."""

    with pytest.raises(SetupError, match="several ranks need a store with compare_set"):
        Barrier(None, 2)
    with pytest.raises(SetupError, match="store=<Plain>"):
        Barrier(RankStore(Plain(), "t", 0, 1.0), 2)  # type: ignore[arg-type]


def test_a_store_that_hangs_is_told(three: Threads) -> None:
    """And never waited for beyond its own bound."""
    three.store.error = OSError("connection reset")
    error = found(three.meet(1, of(1)))
    assert isinstance(error, RankLost)
    assert "OSError: connection reset" in str(error)


# -- ranks in processes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tcp() -> Iterator[str]:
    """Where a store listens, in this process: its ranks come and go."""
    stores: Any = dist
    store = stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"tcp:{store.port}"
    del store


@pytest.fixture(scope="module")
def four(tcp: str) -> Iterator[Sides]:
    """Four ranks in processes, for the tests that kill none of them."""
    sides = Sides(4, tcp)
    yield sides
    sides.end()


@pytest.mark.timeout(150)
def test_no_cache_is_mapped_before_every_rank_has_released(four: Sides, tmp_path: Path) -> None:
    """Two to four ranks, fifty orders of coming. Their devices have no room for both at a time."""
    seeds = list(range(50))
    told = four.each("rounds", path=str(tmp_path / "with"), seeds=seeds, barrier=True)
    places = [0] * 4
    for seed in seeds:
        world, rows = 2 + seed % 3, []
        for rank in range(world):
            rows.append(told[rank][places[rank]])
            places[rank] += 1
        mapped, failed = rows[0][1], rows[0][2]
        assert mapped > max(row[0] for row in rows), f"seed {seed}"
        assert failed == [], f"seed {seed}"


@pytest.mark.timeout(150)
def test_without_the_barrier_the_cache_does_not_fit(four: Sides, tmp_path: Path) -> None:
    """The same course without it fails on a device of another rank: what the test before looks at is real."""
    seeds = list(range(100, 103))
    told = four.each("rounds", path=str(tmp_path / "without"), seeds=seeds, barrier=False)
    for row in told[0]:
        assert row[2], "the cache was mapped although ranks were not done"
        assert 0 not in row[2]


@pytest.mark.timeout(60)
def test_the_event_loop_goes_on_while_a_rank_is_late(four: Sides) -> None:
    """What is late is waited for in a thread."""
    for rank in (0, 1, 2):
        four.ask(rank, "ticking", meeting=of(200), bound=LONG)
    four.ask(3, "meet", meeting=of(200), bound=LONG, delay=0.6)
    for rank in (0, 1, 2):
        how, pauses = four.answer(rank)
        assert how == "Met"
        assert len(pauses) > 10
        assert max(pauses) < sum(pauses) / 2
    assert four.answer(3)[0] == "passed"


@pytest.mark.timeout(60)
def test_a_coroutine_that_is_cancelled_leaves_nobody_in_the_wait(four: Sides) -> None:
    """It raises its cancellation; the others are told at once, and the next round finds all of them."""
    four.ask(2, "ticking", meeting=of(201), bound=LONG, cancel_after=0.1)
    for rank in (0, 1):
        four.ask(rank, "meet", meeting=of(201), bound=LONG)
    assert four.answer(2)[0] == "CancelledError"
    four.ask(3, "meet", meeting=of(201), bound=LONG)
    for rank in (0, 1, 3):
        kind, text, ranks, _ = four.answer(rank)
        assert (kind, ranks) == ("BarrierAborted", (2,)), text
    assert [each[0] for each in four.each("meet", meeting=of(202), bound=LONG)] == ["passed"] * 4


@pytest.mark.timeout(60)
def test_a_rank_that_raises_is_told_to_all_at_once(four: Sides) -> None:
    """Long before any bound."""
    for rank in range(4):
        error = "OSError: no memory" if rank == 3 else ""
        four.ask(rank, "meet", meeting=of(203), bound=LONG, error=error)
    for rank in range(4):
        kind, text, ranks, seconds = four.answer(rank)
        assert (kind, ranks) == ("BarrierAborted", (3,))
        assert text.endswith("rank 3: OSError: no memory")
        assert seconds < LONG / 2


@pytest.mark.timeout(60)
def test_a_rank_that_is_too_late_pairs_with_no_later_round(four: Sides) -> None:
    """The others name it at their bound; it comes when they have gone, and is told so."""
    for rank in (0, 1, 2):
        four.ask(rank, "meet", meeting=of(204), bound=0.5)
    for rank in (0, 1, 2):
        kind, text, ranks, seconds = four.answer(rank)
        assert (kind, ranks) == ("BarrierTimeout", (3,)), text
        assert 0.25 < seconds < LONG / 2
    for rank in (0, 1, 2):
        four.ask(rank, "meet", meeting=of(205), bound=LONG)
    assert four.each("meet", [3], meeting=of(204), bound=LONG)[0][0] in ("BarrierTimeout", "BarrierAborted")
    assert not any(pipe.poll(0.1) for pipe in four.pipes[:3])
    assert four.each("meet", [3], meeting=of(205), bound=LONG)[0][0] == "passed"
    assert [four.answer(rank)[0] for rank in (0, 1, 2)] == ["passed"] * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_rank_that_was_killed_is_missed_before_the_bound(tcp: str, tmp_path: Path, kind: str) -> None:
    """Its signs of life stop."""
    sides = Sides(3, tcp if kind == "tcp" else str(tmp_path / "store"))
    try:
        sides.ask(2, "dying", beats=4)
        told = sides.each("beating", [0, 1], meeting=of(300), silent=0.5, bound=LONG)
        for name, text, ranks, seconds in told[:1]:
            assert (name, ranks) == ("BarrierTimeout", (2,)), text
            assert "rank 2 missing: no sign of life for 0.5 s" in text
            assert seconds < LONG / 2
        assert told[1][:3] == told[0][:3]
    finally:
        sides.end()
