"""A rank's report and what becomes of it: nothing is published as if all were well for who does not wait.

Ranks in threads over a store of this process.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from casekit.levels import eventually
from casekit.rankteam import DictStore, Team, close_teams, three
from weightsync.follower import FollowerSync
from weightsync.fsm.errors import RankFailed, RankLost, SetupError
from weightsync.fsm.states import Outcome
from weightsync.handlers.ranks import TrainerRanks
from weightsync.testing.fakes import FakeWeights, Gate
from weightsync.testing.scene import PATIENCE


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_teams()


class SlowReports:
    """A store that takes a report, and says so when its gate is open."""

    def __init__(self, store: DictStore, gate: Gate, key: str) -> None:
        self._store, self._gate, self._key = store, gate, key

    def set(self, key: str, value: str, /) -> None:
        """Write."""
        self._store.set(key, value)
        if key == self._key:
            self._gate.pass_through()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_report_that_the_store_took_and_did_not_answer_is_taken_back() -> None:
    """The rank raises, and rank 0 finds its report: nobody gets a good result for it."""
    team, gate = Team(silent=0.4), Gate()
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    team.ranks[1]._store = SlowReports(team.store, gate, "t/report/1")
    others = [team.alone(1, 2)]
    (late,) = team.results(others)
    gate.open()
    first, third = team.results([team.alone(0, 2), team.alone(2, 2)])
    assert isinstance(late, RankLost)
    assert not getattr(first, "ok", False), "a report that its rank does not stand by was taken"
    assert "rank 1 has given up the hand-over of step 2: RankLost: the store" in str(first)
    assert str(third) == str(first)


def test_an_interrupt_right_after_the_report_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no moment in which a report stands and nobody answers for it."""
    team = Team()
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    arrive = team.ranks[1].arrive

    def interrupted(*args: Any) -> Any:
        arrive(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(team.ranks[1], "arrive", interrupted)
    first, interrupt, third = team.results(team.step(2, *three(2)))
    assert isinstance(interrupt, KeyboardInterrupt)
    for each in (first, third):
        text = str(getattr(each, "error", each))
        assert "rank 1 has given up the hand-over of step 2: KeyboardInterrupt" in text, text
    assert all(each.ok for each in team.results(team.step(3, *three(3))))


def test_who_dies_right_after_its_report_is_missed_in_a_short_round_too() -> None:
    """The round does not begin without it: no engine is paused, and nothing is published."""
    team = Team(silent=0.5)
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    weights = FakeWeights(2)
    team.ranks[1].arrive(2, "hand over", lambda: weights.plan(team.followers[0].policy.bucket_bytes))
    began = time.monotonic()
    first, third = team.results([team.alone(0, 2), team.alone(2, 2)])
    assert time.monotonic() - began < PATIENCE / 2
    assert (first.outcome, first.published) == (third.outcome, third.published) == (Outcome.failed, "no")
    assert first.failed_in == "Locked"
    assert isinstance(first.error, RankLost)
    assert "rank 1" in str(first.error)
    assert "no sign of life for 0.5 s" in str(first.error)
    assert all(each.ok for each in team.results(team.step(3, *three(3))))


def second(team: Team, **options: Any) -> tuple[TrainerRanks, FollowerSync]:
    """Another process that takes itself for rank 1."""
    ranks = TrainerRanks(team.store, 1, 3, name="t", silent=1.0, **options)
    return ranks, FollowerSync(ranks, policy=team.followers[0].policy)


def test_a_report_in_the_place_of_one_that_was_met_is_no_good_result() -> None:
    """Of two that take themselves for one rank, rank 0 has met one, and the other one waits as well."""
    team, gate = Team(), Gate()
    team.trainer.transport.bad["bucket 1"] = gate
    futures = team.step(1, *three(1))
    gate.await_visitor()
    ranks, follower = second(team, limit=0.2)
    weights = FakeWeights(1)
    ranks.arrive(1, "hand over", lambda: weights.plan(follower.policy.bucket_bytes))
    gate.open()
    found = team.results(futures)
    assert [each.ok for each in found] == [False] * 3, "rank 0 is fine, and its rank is not"
    assert "somebody else reports as rank 1 in the hand-over of step 1" in str(found[0].error)
    follower.close()


def test_who_finds_another_one_in_its_place_takes_both_reports_back() -> None:
    """Rank 0 has met the other one, and its result is not that of all."""
    team = Team()
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    waiting = team.alone(1, 2)
    assert eventually(lambda: (team.ranks[0].said("report", 1) or {}).get("step") == 2)
    ranks, follower = second(team)
    weights = FakeWeights(2)
    ranks.arrive(2, "hand over", lambda: weights.plan(follower.policy.bucket_bytes))
    (error,) = team.results([waiting])
    assert isinstance(error, SetupError)
    found = team.results([team.alone(0, 2), team.alone(2, 2)])
    assert [type(each) for each in found] == [RankFailed] * 2, found
    assert "rank 1 has given up the hand-over of step 2: SetupError: somebody else reports" in str(found[0])
    follower.close()


@pytest.mark.parametrize("name", ["on_step_end", "catch_up"])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_none_on_a_follower_is_heard_of_by_all(name: str, *, first: bool) -> None:
    """As one of rank 0 is, whoever comes first, also at the first hand-over; the next one is good."""
    team = Team(limit=6.0)
    syncs: list[Any] = [team.trainer.sync, *team.followers]
    wrong = team.pool.submit(getattr(syncs[1], name), -1, FakeWeights(1)) if first else None
    waiting = [team.pool.submit(getattr(syncs[rank], name), 1, FakeWeights(1)) for rank in (0, 2)]
    if wrong is None:
        assert eventually(lambda: team.ranks[0].said("report", 2) is not None)
        wrong = team.pool.submit(getattr(syncs[1], name), -1, FakeWeights(1))
    found = team.results([*waiting, wrong])
    assert [type(each) for each in found] == [RankFailed, RankFailed, SetupError]
    assert f"rank 1 failed in its part of step 1: SetupError: {name}(step=-1)" in str(found[0])
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_a_step_that_is_none_on_every_rank_costs_no_other_hand_over(order: tuple[int, ...]) -> None:
    """All make the same mistake, and come again: rank 0 first, who finds what the others said last."""
    team, looks = Team(limit=8.0), list[int]()
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    syncs: list[Any] = [team.trainer.sync, *team.followers]
    for rank in order:
        with pytest.raises(SetupError):
            syncs[rank].on_step_end(-1, FakeWeights(2))
    reported = team.ranks[0].reported

    def seen(rank: int) -> Any:
        looks.append(rank)
        return reported(rank)

    team.ranks[0].reported = seen  # type: ignore[method-assign]
    rank_0 = team.alone(0, 2)
    assert eventually(lambda: len(looks) > 2)
    found = team.results([rank_0, team.alone(1, 2), team.alone(2, 2)])
    assert [getattr(each, "ok", each) for each in found] == [True] * 3
    assert all(each.ok for each in team.results(team.step(3, *three(3))))


def come(team: Team, step: int) -> list[Any]:
    """Ranks 1 and 2 are there."""
    waiting = [team.alone(1, step), team.alone(2, step)]
    assert eventually(lambda: (team.ranks[0].said("report", 1) or {}).get("step") == step)
    return waiting


def test_a_bad_step_of_a_follower_takes_no_later_answer_from_it() -> None:
    """Of several calls it is one; a refusal of rank 0 that comes later is for the next."""
    team = Team(limit=8.0)
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    with pytest.raises(SetupError):
        team.followers[0].on_step_end(-1, FakeWeights(2))
    waiting = come(team, 2)
    assert all(each.ok for each in team.results([team.alone(0, 2), *waiting]))
    waiting = come(team, 3)
    with pytest.raises(SetupError):
        team.trainer.sync.on_step_end(-1, FakeWeights(3))
    assert [type(each) for each in team.results(waiting)] == [RankFailed] * 2
