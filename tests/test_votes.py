"""A vote of ranks: all of them may go on, or each is told why not; no older word is taken for an answer."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from casekit.rankteam import DictStore
from weightsync.fsm.errors import (
    BarrierAborted,
    BarrierTimeout,
    LayoutChanged,
    RankFailed,
    RankLost,
    RanksDisagree,
    SetupError,
    WeightSyncError,
)
from weightsync.handlers.votes import Alone, RankVotes

PATIENCE = 30.0


class Three:
    """Three ranks in threads."""

    def __init__(self, store: DictStore | None = None, limit: float = 20.0) -> None:
        self.store = store or DictStore()
        self.ranks = [RankVotes(self.store, rank, 3, limit=limit, silent=5.0) for rank in range(3)]
        self.pool = ThreadPoolExecutor(6)

    def vote(self, rank: int, what: str = "it", error: BaseException | None = None) -> Future[None]:
        """One rank comes."""
        return self.pool.submit(self.ranks[rank].vote, what, error)

    def all(self, what: str = "it", **errors: BaseException) -> list[BaseException | None]:
        """All of them come, some with an error; what each one raises."""
        return raised([self.vote(rank, what, errors.get(f"r{rank}")) for rank in range(3)])

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def three() -> Iterator[Three]:
    """Of them."""
    team = Three()
    yield team
    team.close()


def raised(futures: list[Future[None]]) -> list[BaseException | None]:
    """What each one raised."""
    return [future.exception(PATIENCE) for future in futures]


def interrupt_at(rank: RankVotes, word: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank is interrupted, once, as soon as it finds that word in the store."""
    right = rank.read

    def interrupted(*path: object) -> Any:
        found = right(*path)
        if path[-1] == word and found is not None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(rank, "read", interrupted)


def test_a_vote_without_an_error_lets_everybody_go_on(three: Three) -> None:
    """Any number of times, one after the other."""
    for number in range(30):
        assert three.all(f"vote {number}") == [None] * 3
    assert len([key for key in three.store.values if "barrier" in key]) <= 9


def test_one_error_is_raised_on_every_rank(three: Three) -> None:
    """Its own rank raises the very object, the others the same kind with the rank's number."""
    error = LayoutChanged("'w' is gone")
    found = three.all(r2=error)
    assert found[2] is error
    for other in found[:2]:
        assert isinstance(other, LayoutChanged)
        assert str(other) == "rank 2 of the trainer: 'w' is gone"
    assert three.all() == [None] * 3


def test_of_several_errors_the_first_rank_is_told_to_those_without(three: Three) -> None:
    """The others are notes."""
    first, second = LayoutChanged("a"), OSError("b")
    found = three.all(r0=first, r1=second)
    assert found[:2] == [first, second]
    assert isinstance(found[2], LayoutChanged)
    assert found[2].__notes__ == ["rank 1: OSError: b"]


def test_an_error_that_is_none_of_ours_is_told_by_its_name(three: Three) -> None:
    """As a failure of that rank."""
    found = three.all(r0=OSError("disk"))
    assert [type(each) for each in found] == [OSError, RankFailed, RankFailed]
    assert str(found[1]) == "rank 0 of the trainer failed: OSError: disk"


def test_ranks_at_different_votes_are_told(three: Three) -> None:
    """All of them."""
    found = raised([three.vote(0, "a"), three.vote(1, "a"), three.vote(2, "b")])
    assert [type(each) for each in found] == [RanksDisagree] * 3
    assert str(found[0]) == "rank 2 of the trainer is at 'b', and rank 0 at 'a'"


def test_nobody_is_waited_for_for_ever(three: Three) -> None:
    """Neither one of the others nor rank 0; an own error goes before that."""
    for rank in three.ranks:
        rank.limit = 0.3
    found = raised([three.vote(0), three.vote(1)])
    assert [type(each) for each in found] == [BarrierTimeout] * 2
    assert str(found[0]) == "the vote on 'it' is not passed: rank 2 missing: after 0.3 s"
    error = OSError("mine")
    assert raised([three.vote(1, "it", error)]) == [error]
    assert "and the vote on it: RankLost: rank 0 of the trainer did not come to 'it'" in error.__notes__[0]


def test_who_is_late_for_a_vote_meets_the_others_at_the_next_one(three: Three) -> None:
    """The verdict it was too late for does not answer it, good or bad."""
    three.ranks[0].limit = three.ranks[1].limit = 0.3
    raised([three.vote(0), three.vote(1)])
    three.ranks[2].limit = 20.0
    late = three.vote(2)
    three.ranks[0].limit = three.ranks[1].limit = 20.0
    assert raised([three.vote(0), three.vote(1), late]) == [None] * 3


def test_who_is_late_for_a_vote_that_has_failed_is_told(three: Three) -> None:
    """At once, if it took part in the one before; and it finds the next one."""
    assert three.all("the first") == [None] * 3
    three.ranks[0].limit = 0.3
    found = raised([three.vote(0, "the second"), three.vote(1, "the second")])
    three.ranks[0].limit = 20.0
    again = [three.vote(0, "the third"), three.vote(1, "the third")]
    (late,) = raised([three.vote(2, "the second")])
    assert [str(each) for each in (*found, late)] == [str(found[0])] * 3
    assert raised([*again, three.vote(2, "the third")]) == [None] * 3


def test_an_older_run_answers_nobody() -> None:
    """Its words are all still in the store."""
    store = DictStore()
    old = Three(store)
    assert old.all() == [None] * 3
    old.close()
    new = Three(store)
    early = [new.vote(1), new.vote(2)]
    threading.Event().wait(0.2)  # long enough to take an older word for an answer
    assert not any(each.done() for each in early)
    assert raised([new.vote(0), *early]) == [None] * 3
    new.ranks[0].limit = 0.3
    assert isinstance(raised([new.vote(0)])[0], RankLost)
    new.close()


def test_who_gives_up_is_not_waited_for(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next vote the others hear of it at once, and not by their limit."""
    interrupt_at(three.ranks[1], "decision", monkeypatch)
    found = three.all("the first")
    assert [type(each) for each in found] == [type(None), KeyboardInterrupt, type(None)]
    began = time.monotonic()
    found = raised([three.vote(0, "the second"), three.vote(2, "the second")])
    assert time.monotonic() - began < three.ranks[0].limit / 2
    assert [type(each) for each in found] == [BarrierAborted] * 2
    assert str(found[0]) == "the vote after 'the first' is not passed: rank 1: KeyboardInterrupt: "
    # That rank is told as well, and then they are together again.
    assert str(raised([three.vote(1, "the second")])[0]) == str(found[0])
    assert three.all("the third") == [None] * 3


def test_rank_0_that_is_interrupted_tells_the_others(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who have come do not wait for their limit."""
    others = list[Any]()
    interrupt_at(three.ranks[0], 2, monkeypatch)
    others.append(three.vote(2))
    began = time.monotonic()
    found = raised([three.vote(0), *others])
    assert time.monotonic() - began < three.ranks[2].limit / 2
    assert isinstance(found[0], KeyboardInterrupt)
    assert isinstance(found[1], (RankFailed, RankLost))


def test_rank_0_that_gives_up_is_not_waited_for(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted when the vote is passed: the others hear of it at the next one, which it has not called."""
    interrupt_at(three.ranks[0], "decision", monkeypatch)
    found = three.all("the first")
    assert [type(each) for each in found] == [KeyboardInterrupt, type(None), type(None)]
    began = time.monotonic()
    found = raised([three.vote(1, "the second"), three.vote(2, "the second")])
    assert time.monotonic() - began < three.ranks[1].limit / 2
    assert [str(each) for each in found] == [
        "the vote after 'the first' is not passed: rank 0: KeyboardInterrupt: "
    ] * 2
    assert isinstance(raised([three.vote(0, "the second")])[0], BarrierAborted)
    assert three.all("the third") == [None] * 3


def test_a_store_that_fails_is_the_loss_of_the_others(three: Three) -> None:
    """In one line."""
    three.store.error = OSError("broken pipe")
    assert [type(each) for each in three.all()] == [RankLost] * 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((object(), 0, 2), "a store of torch.distributed is needed"),
        ((DictStore(), 2, 2), "rank 2 of 2 ranks: a number from 0 to 1 is needed"),
        ((DictStore(), 0, 0), "a whole number of at least 1 is needed"),
    ],
)
def test_what_is_handed_over_is_examined(arguments: tuple[Any, ...], text: str) -> None:
    """In one line."""
    with pytest.raises(SetupError, match=text):
        RankVotes(*arguments)
    with pytest.raises(SetupError, match="a finite number of seconds above 0 is needed"):
        RankVotes(DictStore(), 0, 1, limit=cast("float", "1"))


def test_one_rank_votes_alone() -> None:
    """By its own mind."""
    alone, error = Alone(), WeightSyncError("no")
    alone.vote("it", None)
    with pytest.raises(WeightSyncError) as found:
        alone.vote("it", error)
    assert found.value is error
    alone.close()
    single: Callable[..., None] = RankVotes(DictStore(), 0, 1).vote
    single("it", None)
