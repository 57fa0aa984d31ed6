"""A trainer of several ranks that are not where each other thinks: late, gone, of another run, out of step.

Ranks in threads over a store of this process.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from casekit.levels import eventually
from casekit.rankteam import Team, close_teams, three
from weightsync.follower import FollowerSync
from weightsync.fsm.errors import (
    PlanError,
    RankFailed,
    RankLost,
    RanksDisagree,
    RoundCancelled,
    SetupError,
    WeightSyncError,
)
from weightsync.fsm.ledger import StaleVersion, VersionBound
from weightsync.fsm.policy import Policy
from weightsync.fsm.ranks import Report, Verdict, error_from, error_told
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, Outcome
from weightsync.handlers.ranks import TrainerRanks
from weightsync.testing.fakes import FakeWeights, Gate
from weightsync.testing.scene import PATIENCE, close_all


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_teams()


def reported(team: Team, *ranks: int) -> bool:
    """Whether they have."""
    return eventually(lambda: all(team.ranks[0].said("report", rank) is not None for rank in ranks))


# -- who has given up -------------------------------------------------------------------------------------


def test_what_the_other_ranks_have_given_up_is_not_begun() -> None:
    """Rank 0 comes when they are gone: it is told, and no lock was asked for. The next step finds all."""
    team = Team(limit=0.2, silent=0.3)
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    gone = team.results([team.alone(1, 2), team.alone(2, 2)])
    assert [type(each) for each in gone] == [RankLost] * 2
    (error,) = team.results([team.alone(0, 2)])
    assert isinstance(error, RankLost)
    text = "has given up the hand-over of step 2: RankLost: rank 0 of the trainer: gave no verdict"
    assert text in str(error)
    assert team.trainer.lock.status().epoch == 1
    for rank in team.ranks:
        rank.limit = 20.0
    assert all(each.ok for each in team.results(team.step(3, *three(3))))


def test_a_rank_that_gives_up_in_the_round_stops_it() -> None:
    """Also when it is lost to rank 0, and rank 0 is not to it."""
    team, gate = Team(silent=1.0), Gate()
    team.trainer.transport.bad["bucket 1"] = gate
    said = team.ranks[1].said
    team.ranks[1].said = lambda what, rank: None if what == "beat" else said(what, rank)  # type: ignore[method-assign]
    first, second, third = team.results(team.step(1, *three(1)))
    assert isinstance(second, RankLost)
    assert first.outcome is Outcome.failed
    assert isinstance(first.error, RankLost)
    assert "rank 1 has given up the hand-over of step 1" in str(first.error)
    assert str(third.error) == str(first.error)
    team.trainer.check_released()


def test_rank_0_looks_once_more_before_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gave up when it was too late to stop the round makes it not ok for anybody.

    Nobody knows whether it has let go of its memory, so no engine resumes over that.
    """
    team, gate = Team(silent=40.0), Gate()  # nobody looks at anybody for ten seconds
    team.trainer.engines[0].bad["commit"] = gate
    look = team.ranks[1].look

    def interrupted(number: int, what: str) -> Any:
        if what == "outcome" and gate.reached.is_set():
            monkeypatch.setattr(team.ranks[1], "look", look)
            raise KeyboardInterrupt
        return look(number, what)

    monkeypatch.setattr(team.ranks[1], "look", interrupted)
    futures = team.step(1, *three(1))
    assert isinstance(futures[1].exception(PATIENCE), KeyboardInterrupt)
    gate.open()
    first, _, third = team.results(futures, PATIENCE + 40.0)  # who does not look is told by the silence
    assert (first.outcome, first.ok) == (third.outcome, third.ok) == (Outcome.failed, False)
    assert (first.published, len(first.serving(Disposition.quarantined))) == ("yes", 2)
    assert isinstance(first.error, RankFailed)
    assert "rank 1 has given up the hand-over of step 1: KeyboardInterrupt" in str(first.error)


def test_who_gives_up_when_it_is_told_sees_the_outcome_or_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks once more after it has taken its report back; rank 0 does after it has told."""
    team = Team(silent=60.0)
    look, told = team.ranks[1].look, list[Any]()

    def lost(number: int, what: str) -> Any:
        found = look(number, what)
        if what == "outcome" and found is not None and not told:
            told.append(found)
            raise RankLost("the store of the trainer's ranks did not answer")
        return found

    monkeypatch.setattr(team.ranks[1], "look", lost)
    results = team.results(team.step(1, *three(1)))
    assert told
    assert all(each.ok for each in results)

    post = team.ranks[0].post

    def gone(number: int, what: str, value: Any) -> None:
        post(number, what, value)
        if what == "outcome":
            team.ranks[2].say("fail", [team.ranks[2].said("report", 2)["call"], "RankLost: too late"])

    monkeypatch.setattr(team.ranks[0], "post", gone)
    first, *_ = team.results(team.step(2, *three(2)))
    assert "not every rank may know this result: rank 2 has given up" in first.notes[-1]


def test_a_rank_that_leaves_tells_the_others() -> None:
    """Nobody waits for its limit."""
    team = Team()
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    with pytest.raises(OSError, match="disk"), team.followers[1]:
        raise OSError("disk")
    began = time.monotonic()
    found = team.results(team.step(2, *three(2))[:2])
    assert time.monotonic() - began < team.ranks[0].limit / 2
    assert [type(each) for each in found] == [RankLost] * 2
    text = "rank 2 of the trainer: it has closed its FollowerSync before the hand-over of step 2"
    assert text in str(found[0])


# -- how long is waited -----------------------------------------------------------------------------------


def test_a_rank_waits_for_rank_0_as_long_as_it_beats() -> None:
    """An engine may load for longer than the rounds of the policy take."""
    policy = Policy(deadline=0.4, lease=0.1, first_contact=30.0)
    team, gate = Team(policy, limit=0.3, silent=1.0), Gate()
    team.trainer.engines[1].bad["hello"] = gate
    futures = team.step(1, *three(1))
    gate.await_visitor()
    time.sleep(2.5)  # longer than all rounds, their leases and the limit
    assert not any(each.done() for each in futures)
    gate.open()
    assert not any(isinstance(each, RankLost) for each in team.results(futures))


def test_an_interrupt_is_noticed_while_the_ranks_meet() -> None:
    """By rank 0 before its limit, and by those who are there already."""
    team = Team(limit=8.0)
    waiting = team.alone(1, 1)
    assert reported(team, 1)
    pending = team.trainer.sync.begin(1, FakeWeights(1))
    began = time.monotonic()
    pending.cancel()
    found = team.results([team.pool.submit(pending.wait), waiting])
    assert [type(each) for each in found] == [RoundCancelled] * 2
    assert "the hand-over of step 1 was cancelled while the ranks met" in str(found[0])
    assert time.monotonic() - began < team.ranks[0].limit / 2


# -- another run ------------------------------------------------------------------------------------------


def test_a_second_run_takes_no_word_of_the_first() -> None:
    """In one store, under one name; whoever of its ranks comes first. The old words are forgotten."""
    old = Team(silent=0.4)
    for number in (1, 2):
        assert all(each.ok for each in old.results(old.step(number, *three(number))))
    close_all()
    for follower in old.followers:
        follower.close()
    run = old.store.values["t/run"]
    new = Team(silent=0.4, store=old.store)
    early = [new.alone(1, 1), new.alone(2, 1)]
    assert eventually(lambda: new.ranks[0].said("beat", 1) and new.ranks[0].said("beat", 2))
    time.sleep(0.5)
    assert not any(each.done() for each in early), "the first run has answered the second"
    futures = [new.alone(0, 1), *early]
    assert eventually(lambda: all(each.done() for each in futures)), "they do not find the second run"
    found = new.results(futures)
    assert all(each.ok for each in found)
    assert len({each.round for each in found}) == 1
    assert new.store.values["t/run"] != run
    assert not [key for key in new.store.values if run.decode().strip('"') in key], "the old words are kept"


def test_what_a_rank_of_an_older_run_reported_is_no_report() -> None:
    """Rank 0 of the new run waits for the one of now."""
    old = Team(limit=0.2, silent=0.4)
    old.results([old.alone(0, 1), old.alone(1, 1)])
    old.ranks[2].find_run()
    old.ranks[2].arrive(1, "hand over", lambda: FakeWeights(1).plan(1))
    new = Team(limit=4.0, silent=2.0, store=old.store)  # a busy machine may keep rank 1 waiting, too
    found = new.results([new.alone(0, 1), new.alone(1, 1)])
    assert "rank 2 of the trainer: not at the hand-over of step 1" in str(found[0])
    assert str(found[1]) == str(found[0])


def test_what_an_older_run_refused_is_no_answer_to_who_comes_before_rank_0() -> None:
    """Or whoever is started again first would fail with the error that ended the run before, for ever."""
    old = Team(limit=0.2, silent=0.4)
    old.results([old.alone(0, 5), old.alone(1, 5)])
    new = Team(limit=20.0, silent=2.0, store=old.store)
    early = new.alone(1, 1)
    assert eventually(lambda: new.ranks[0].said("beat", 1)), "it does not wait"
    assert all(each.ok for each in new.results([early, new.alone(0, 1), new.alone(2, 1)]))


def test_a_rank_that_was_started_again_joins_the_run_that_goes_on() -> None:
    """Its count is rank 0's, wherever that is."""
    team = Team(silent=0.4)
    for number in range(1, 12):
        assert all(each.ok for each in team.results(team.step(number, *three(number))))
    team.followers[1]._rounds.close()
    team.ranks[2].close()
    team.ranks[2] = TrainerRanks(team.store, 2, 3, limit=20.0, silent=0.4, name="t")
    team.followers[1] = FollowerSync(team.ranks[2])
    assert all(each.ok for each in team.results(team.step(12, *three(12))))


def test_the_store_does_not_grow() -> None:
    """Neither with good hand-overs nor with refused ones."""
    team = Team(silent=0.4)
    sizes = []
    for number in range(1, 41):
        weights = three(number)
        if number % 2:
            weights[number % 3].bad["materialize"] = OSError("no memory")
        team.results(team.step(number, *weights))
        sizes.append(len(team.store.values))
    assert max(sizes[-5:]) <= max(sizes[12:20])


# -- out of step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1])
def test_who_misses_a_hand_over_finds_the_next_one(missing: int) -> None:
    """It is one that fails, with a name, and no more."""
    team = Team(limit=0.2, silent=0.3)
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    found = team.results([team.alone(rank, 2) for rank in {0, 1, 2} - {missing}])
    assert [type(each) for each in found] == [RankLost] * 2
    for rank in team.ranks:
        rank.limit = 20.0
    for number in (3, 4):
        assert all(each.ok for each in team.results(team.step(number, *three(number))))


def test_who_comes_late_is_told_what_became_of_its_step() -> None:
    """At once; and the next step finds it."""
    team = Team(limit=0.2, silent=0.4)
    found = team.results([team.alone(0, 1), team.alone(1, 1)])
    for rank in team.ranks:
        rank.limit = 20.0
    (late,) = team.results([team.alone(2, 1)])
    assert str(late) == str(found[0]) == str(found[1])
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


def test_who_is_ahead_waits_for_the_others() -> None:
    """They are refused, and come to it."""
    team = Team()
    ahead = team.alone(2, 2)
    assert reported(team, 2)
    found = team.results([team.alone(0, 1), team.alone(1, 1)])
    assert [type(each) for each in found] == [RanksDisagree] * 2
    assert not ahead.done()
    assert all(each.ok for each in team.results([team.alone(0, 2), team.alone(1, 2), ahead]))


@pytest.mark.parametrize("how", ["on_step_end", "begin", "catch_up", "round", "version"])
def test_a_step_that_is_none_is_heard_of_by_all(how: str) -> None:
    """On rank 0, by every form; the next one is good."""
    team = Team()
    sync: Any = team.trainer.sync
    name = "catch_up" if how == "catch_up" else "on_step_end"
    waiting = [team.pool.submit(getattr(each, name), 1, FakeWeights(1)) for each in team.followers]
    assert reported(team, 1, 2)
    forms: dict[str, Any] = {
        "round": lambda: asyncio.run(sync.round("1", FakeWeights(1))),
        "version": lambda: sync.begin(1, FakeWeights(1), version=-1),
    }
    with pytest.raises(SetupError):
        forms.get(how, lambda: getattr(sync, how)("1", FakeWeights(1)))()
    found = team.results(waiting)
    assert [type(each) for each in found] == [RankFailed] * 2
    assert "rank 0 failed in its part" in str(found[0])
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


def test_what_cannot_begin_leaves_alone_what_waits_before_it() -> None:
    """It is refused in its turn."""
    team = Team(limit=8.0)
    first = team.trainer.sync.begin(1, FakeWeights(1))
    with pytest.raises(PlanError):
        team.trainer.sync.begin(2, object())
    others = [team.alone(1, 1), team.alone(2, 1)]
    found = team.results([*others, team.pool.submit(first.wait)])
    assert [type(each) for each in found] == [RoundResult] * 3
    found = team.results([team.alone(1, 2), team.alone(2, 2)])
    assert [type(each) for each in found] == [RankFailed] * 2
    assert all(each.ok for each in team.results(team.step(3, *three(3))))


def test_two_threads_of_one_rank_come_one_after_the_other() -> None:
    """Neither takes the place of the other's report."""
    team = Team()
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    weights, gate = FakeWeights(2), Gate()
    weights.bad["materialize"] = gate
    one = team.pool.submit(team.followers[0].on_step_end, 2, weights)
    gate.await_visitor()
    two = team.alone(1, 3)
    others = team.pool.submit(team.followers[1].on_step_end, 2, FakeWeights(2))
    assert eventually(lambda: team.ranks[0].said("report", 2)["step"] == 2)
    pending = team.trainer.sync.begin(2, FakeWeights(2))
    gate.open()
    assert pending.wait().ok
    assert [each.ok for each in team.results([one, others])] == [True] * 2
    assert all(each.ok for each in team.results([team.alone(0, 3), two, team.alone(2, 3)]))


# -- the rules --------------------------------------------------------------------------------------------


def test_a_verdict_answers_the_calls_it_names_and_refuses_a_step() -> None:
    """A good one answers nobody else."""
    report = Report(1, 3, "r", "c1", 4, "hand over")
    error = error_told(RankLost("gone"))
    assert Verdict(4, "hand over", ("c1",)).answers(report)
    assert not Verdict(4, "hand over", ("c2",)).answers(report)
    assert Verdict(9, "catch up", ("c1",), error).answers(report)
    assert Verdict(4, "hand over", (), error).answers(report)
    assert Verdict(None, "hand over", (), error).answers(report)
    assert not Verdict(4, "catch up", (), error).answers(report)
    assert not Verdict(3, "hand over", ("c2",), error).answers(report)
    assert Verdict(5, "hand over", ("c2",), error).answers(report)
    assert Verdict(5, "catch up", (), error_told(RanksDisagree("no"))).answers(report)


def test_errors_of_the_ledger_keep_their_kind_and_a_users_are_told() -> None:
    """Wherever in the library they are."""
    for error in (StaleVersion("a"), VersionBound("b")):
        assert type(error_from(error_told(error))) is type(error)

    class Mine(WeightSyncError):
        def __init__(self) -> None:
            super().__init__("mine")

    assert str(error_from(error_told(Mine()))) == "rank 0 raised Mine: mine"
