"""A trainer of several ranks: they agree before the lock is asked for, and all hear how a hand-over ended.

The rules alone, then ranks in threads over a store of this process, then ranks in processes of their own that
raise, are killed, or are frozen.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from casekit.levels import eventually
from casekit.rankside import LIMIT, SILENT, Processes
from casekit.rankteam import DictStore, Team, close_teams, three
from weightsync.follower import FollowerSync
from weightsync.fsm.errors import (
    EngineAsleep,
    PlanMismatch,
    RaisedElsewhere,
    RankError,
    RankFailed,
    RankLost,
    RanksDisagree,
    SetupError,
    SyncFailed,
)
from weightsync.fsm.policy import LORA, Policy
from weightsync.fsm.ranks import (
    Pulses,
    Report,
    difference,
    disagreement,
    error_from,
    error_told,
    result_from,
    result_told,
)
from weightsync.fsm.states import Outcome
from weightsync.handlers.ranks import TrainerRanks
from weightsync.testing.fakes import FakeWeights, Gate
from weightsync.testing.scene import PATIENCE, Trainer
from weightsync.transports.weights import TorchWeights


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_teams()


# -- the rules --------------------------------------------------------------------------------------------


def report(rank: int, **values: Any) -> Report:
    """Of a rank that is where it should be."""
    usual = {"world": 3, "run": "r", "call": f"c{rank}", "step": 4, "kind": "hand over", "fingerprint": "f"}
    return Report(rank, **{**usual, **values})


def test_reports_that_say_the_same_agree() -> None:
    """They also survive their way."""
    reports = {rank: report(rank) for rank in range(3)}
    assert disagreement(reports) is None
    assert all(Report.from_json(json.loads(json.dumps(r.to_json()))) == r for r in reports.values())


@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        ({"error": "OSError: gone"}, RankFailed, "rank 2 failed in its part of step 4: OSError: gone"),
        ({"step": 5}, RanksDisagree, "step is 4 on rank 0, and 5 on rank 2"),
        ({"world": 4}, RanksDisagree, "world is 3 on rank 0, and 4 on rank 2"),
        ({"kind": "catch up"}, RanksDisagree, "kind is hand over on rank 0, and catch up on rank 2"),
        ({"fingerprint": "g"}, PlanMismatch, "do not bring the same tensors: rank 0 and rank 2"),
    ],
)
def test_what_differs_is_named(bad: dict[str, Any], kind: type[Exception], text: str) -> None:
    """With the ranks, in one line."""
    error = disagreement({0: report(0), 1: report(1), 2: report(2, **bad)})
    assert type(error) is kind
    assert text in str(error)
    assert "\n" not in str(error)


def test_the_first_tensor_that_differs_is_named() -> None:
    """Or that one is missing, or that it is no tensor."""
    reports = {0: report(0), 1: report(1, fingerprint="g"), 2: report(2, fingerprint="g")}
    same, other = ["'a' f (1,)", "'b' f (2,)"], ["'a' f (1,)", "'b' f (3,)"]
    text = str(difference(reports, {0: same, 1: other, 2: other}))
    assert text.endswith(
        "rank 0 differs from ranks 1, 2; tensor 1 is 'b' f (2,) on rank 0, and 'b' f (3,) on rank 1"
    )
    assert "and missing on rank 1" in str(difference(reports, {0: same, 1: same[:1], 2: other}))
    assert "differ in bucket_bytes" in str(difference(reports, {0: same, 1: same, 2: same}))


def test_a_rank_is_silent_when_its_beats_stop() -> None:
    """The same beat again is none; who never beats is silent from the beginning on."""
    pulses = Pulses([1, 2], now=0.0)
    for now in (1.0, 2.0, 3.0):
        pulses.heard(1, ["beat", now], now)
        pulses.heard(2, ["beat", 1.0], now)
        pulses.heard(2, None, now)
    assert pulses.silent(3.0, 2.5) == []
    assert pulses.silent(3.5, 2.5) == [2]
    assert pulses.silent(9.0, 2.5) == [1, 2]


def test_errors_of_ours_keep_their_kind() -> None:
    """Others are told."""
    for error in (PlanMismatch("a"), RankLost("b"), EngineAsleep("c")):
        found = error_from(error_told(error))
        assert (type(found), str(found)) == (type(error), str(error))
    told = error_from(error_told(OSError("disk")))
    assert (type(told), str(told)) == (RaisedElsewhere, "rank 0 raised OSError: disk")


# -- ranks in threads -------------------------------------------------------------------------------------


def no_lock_was_asked_for(team: Team) -> None:
    """Nor was any engine told anything, nor a round opened."""
    assert team.trainer.lock.status().epoch == 0
    assert team.trainer.records == []
    assert team.trainer.engines[0].words == []


def test_every_rank_gets_the_result() -> None:
    """Of good rounds and of bad ones; the error is told, with the state and the culprit."""
    team = Team()
    for number in range(1, 12):
        first, *others = team.results(team.step(number, *three(number)))
        assert first.ok
        assert [each.version for each in others] == [number - 1] * 2
        for each in others:
            assert (each.round, each.outcome, each.path) == (first.round, first.outcome, first.path)
            assert [row.engine for row in each.engines] == ["a", "b"]
    team.trainer.engines[1].bad["bucket 1"] = OSError("lost")
    first, *others = team.results(team.step(12, *three(12)))
    assert first.outcome is Outcome.failed
    for each in others:
        assert (each.outcome, each.failed_in, each.culprit) == (first.outcome, first.failed_in, "b")
        with pytest.raises(SyncFailed, match="rank 0 raised OSError: lost"):
            each.require()
    numbers = {int(key.split("/")[2]) for key in team.store.values if key.endswith("/outcome")}
    assert min(numbers) > 1, "what was said long ago is kept for ever"


def test_plans_that_differ_are_refused_on_every_rank_before_the_lock() -> None:
    """The ranks and the first tensor that differs, in one line."""
    team = Team()
    odd = FakeWeights(1)
    odd.content["w1"] = b"!" * 32
    found = team.results(team.step(1, FakeWeights(1), FakeWeights(1), odd))
    assert [type(each) for each in found] == [PlanMismatch] * 3
    (line,) = {str(each) for each in found}
    assert line == (
        "the trainer's ranks do not bring the same tensors at step 1: rank 0 differs from rank 2; tensor 1 "
        "is 'w1' uint8 (64,) on rank 0, and 'w1' uint8 (32,) on rank 2"
    )
    no_lock_was_asked_for(team)
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


def test_ranks_that_select_otherwise_are_refused() -> None:
    """Even if their selections come to the same tensors: what an engine is asked for differs."""
    team, model = Team(), {"a.lora_A": torch.ones(3)}
    some = TorchWeights.of(model, only=LORA)
    found = team.results(team.step(1, TorchWeights.of(model), TorchWeights.of(model), some))
    assert [type(each) for each in found] == [PlanMismatch] * 3
    assert "rank 0 differs from rank 2; their tensors are the same, so the policies differ in" in str(
        found[0]
    )
    no_lock_was_asked_for(team)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_raises_in_its_part_fails_all_of_them(rank: int) -> None:
    """It raises its own error, the others are told which rank it was; nobody waits for the lock."""
    team = Team()
    weights, error = three(1), OSError("no memory")
    weights[rank].bad["materialize"] = error
    found = team.results(team.step(1, *weights))
    assert found[rank] is error
    for other in {0, 1, 2} - {rank}:
        assert isinstance(found[other], RankFailed)
        assert f"rank {rank} failed in its part of step 1: OSError: no memory" in str(found[other])
    no_lock_was_asked_for(team)
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_in_its_part_fails_all_of_them(rank: int) -> None:
    """After the limit, on each of them; the next hand-over finds them in step."""
    team = Team(limit=0.5)
    weights, gate = three(1), Gate()
    weights[rank].bad["materialize"] = gate
    found = team.results(team.step(1, *weights))
    assert all(isinstance(each, RankError) for each in found)
    assert f"rank {rank}" in str(found[2])
    no_lock_was_asked_for(team)
    gate.open()
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


def test_a_rank_that_does_not_come_is_lost_to_the_others() -> None:
    """Named, after the limit."""
    team = Team(limit=0.4)
    found = team.results(team.step(1, *three(1)[:2]))
    assert [type(each) for each in found] == [RankLost, RankLost]
    assert "rank 2 of the trainer: not at the hand-over of step 1 after 0.4 s" in str(found[0])
    assert str(found[1]) == str(found[0])
    no_lock_was_asked_for(team)


def test_rank_0_that_does_not_come_is_lost_as_well() -> None:
    """The others wait for twice the limit, in case it waits for one of them."""
    team = Team(limit=0.2, silent=0.5)
    with pytest.raises(RankLost, match="rank 0 of the trainer: gave no verdict on the hand-over of step 1"):
        team.followers[0].on_step_end(1, FakeWeights(1))


def test_an_error_of_rank_0_that_is_no_result_is_every_ranks() -> None:
    """A refusal of an engine, for example: its kind and its text."""
    team = Team()
    team.trainer.engines[1].asleep = True
    found = team.results(team.step(1, *three(1)))
    assert [type(each) for each in found] == [EngineAsleep] * 3
    assert len({str(each) for each in found}) == 1


def test_a_rank_that_falls_silent_cancels_the_round() -> None:
    """With its number, the round and the state; the engines serve the old weights, and the lock is free."""
    team = Team(silent=0.4)
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    gate = Gate()
    team.trainer.transport.bad["bucket 1"] = gate
    team.ranks[2].beat = lambda number, where=None: None  # type: ignore[method-assign]
    found = team.results(team.step(2, *three(2)))
    assert isinstance(found[0].error, RankLost)
    assert found[0].failed_in == "Broadcasting"
    assert "rank 2 of the trainer: no sign of life for 0.4 s" in str(found[0].error)
    assert f"(Broadcasting of round {found[0].round})" in str(found[0].error)
    assert [str(each.error) for each in found[1:]] == [str(found[0].error)] * 2
    team.trainer.check_released()


def test_a_rank_that_is_lost_too_late_to_stop_the_round_is_told_all_the_same() -> None:
    """The version is published, and the result is not ok."""
    team, gate = Team(silent=0.4), Gate()
    team.trainer.engines[0].bad["commit"] = gate
    team.ranks[2].beat = lambda number, where=None: None  # type: ignore[method-assign]
    futures = team.step(1, *three(1))
    gate.await_visitor()
    waited, cancel = threading.Event(), team.trainer.sync._turns._unfinished[0].cancel

    def told(error: BaseException | None = None) -> None:
        cancel(error)
        waited.set()

    team.trainer.sync._turns._unfinished[0].cancel = told  # type: ignore[method-assign]
    assert waited.wait(PATIENCE)
    gate.open()
    found = team.results(futures)
    assert [each.outcome for each in found] == [Outcome.complete] * 3
    assert [each.ok for each in found] == [False] * 3
    assert all(isinstance(each.error, RankLost) and each.failed_in == "Cleaning" for each in found)


def test_a_follower_that_fails_while_it_waits_cancels_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt, for example: it is that rank's own, and the others are told."""
    team, gate = Team(), Gate()
    team.trainer.transport.bad["bucket 1"] = gate
    look, follower = team.ranks[1].look, team.ranks[1]

    def interrupted(number: int, what: str) -> Any:
        if what == "outcome" and gate.reached.is_set():
            monkeypatch.setattr(follower, "look", look)
            raise KeyboardInterrupt
        return look(number, what)

    monkeypatch.setattr(follower, "look", interrupted)
    first, interrupt, third = team.results(team.step(1, *three(1)))
    assert isinstance(interrupt, KeyboardInterrupt)
    assert isinstance(first.error, RankFailed)
    assert "rank 1 has given up the hand-over of step 1: KeyboardInterrupt" in str(first.error)
    assert str(third.error) == str(first.error)
    team.trainer.check_released()


def test_rank_0_that_dies_in_a_round_is_lost_with_the_round_and_its_state() -> None:
    """Nobody waits for the outcome for longer than a rank may be silent."""
    team, gate = Team(silent=1.0), Gate()
    team.trainer.transport.bad["bucket 1"] = gate
    futures = team.step(1, *three(1))
    gate.await_visitor()
    assert eventually(lambda: (team.ranks[0].said("beat", 0) or [0, None])[1] is not None)
    team.ranks[0].beat = lambda number, where=None: None  # type: ignore[method-assign]
    found = team.results(futures[1:])
    assert [type(each) for each in found] == [RankLost] * 2
    assert "rank 0 of the trainer: no sign of life for 1 s at step 1" in str(found[0])
    assert "; it was last heard of in " in str(found[0])
    assert str(found[0]).rpartition(" of round ")[2] == team.trainer.records[0].round
    gate.open()
    team.results(futures)


def test_rank_0_that_closes_leaves_nobody_in_a_wait() -> None:
    """It says so, and the others need not wait for the limit."""
    team = Team()
    waiting = team.pool.submit(team.followers[0].on_step_end, 1, FakeWeights(1))
    assert eventually(lambda: team.ranks[1].said("report", 1) is not None)
    team.trainer.sync.close()
    assert "rank 0 has closed its WeightSync" in str(waiting.exception(PATIENCE))


def test_what_rank_0_cannot_begin_no_rank_begins() -> None:
    """A model that is none, for example."""
    team = Team()
    waiting = team.pool.submit(team.followers[0].on_step_end, 1, FakeWeights(1))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, it is told
        team.trainer.sync.on_step_end(1, object())
    error = waiting.exception(PATIENCE)
    assert isinstance(error, RankFailed)
    assert f"rank 0 failed in its part of step 1: {type(caught.value).__name__}" in str(error)


def test_ranks_at_different_steps_are_refused() -> None:
    """One of them has missed one."""
    team = Team()
    found = team.results([
        team.pool.submit(team.trainer.sync.on_step_end, 2, FakeWeights(1)),
        *(team.pool.submit(each.on_step_end, 1, FakeWeights(1)) for each in team.followers),
    ])  # fmt: skip
    assert [type(each) for each in found] == [RanksDisagree] * 3
    assert "step is 2 on rank 0, and 1 on rank" in str(found[1])


def test_catching_up_is_done_by_all_ranks() -> None:
    """And who does something else is told."""
    policy = Policy(deadline=10.0, on_engine_failure="quarantine", quorum=1)
    team = Team(policy)
    team.trainer.engines[1].bad["bucket 1"] = OSError("lost")
    team.results(team.step(1, *three(1)))
    syncs: list[Any] = [team.trainer.sync, *team.followers]
    found = team.results([team.pool.submit(sync.catch_up, 1, FakeWeights(1)) for sync in syncs])
    assert [(each.version, len(each.engines)) for each in found] == [(0, 1)] * 3
    assert result_from(json.loads(json.dumps(result_told(found[0])))).version == 0


def test_steps_without_a_hand_over_are_passed_by() -> None:
    """By every rank alike."""
    policy = Policy(deadline=10.0, every=2)
    team = Team(policy)
    assert team.results(team.step(1, *three(1))) == [None] * 3
    assert [each.version for each in team.results(team.step(2, *three(2)))] == [0] * 3


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_store_that_does_not_answer_is_a_loss_within_a_bound(how: str) -> None:
    """Its keeper may be frozen, or dead: nobody waits in it."""
    team = Team(silent=0.3)
    if how == "hangs":
        team.store.gate = Gate()
    else:
        team.store.error = ConnectionError("reset by peer")
    began = time.monotonic()
    found = team.results(team.step(1, *three(1)))
    assert time.monotonic() - began < 5.0
    assert [type(each) for each in found] == [RankLost] * 3
    assert all("the store of the trainer's ranks" in str(each) for each in found)
    if team.store.gate is not None:
        team.store.gate.open()


def test_two_that_say_they_are_one_rank_are_refused() -> None:
    """Who came first finds the other one in its place."""
    team = Team(silent=0.4)
    waiting = team.pool.submit(team.followers[0].on_step_end, 1, FakeWeights(1))
    assert eventually(lambda: team.ranks[1].said("report", 1) is not None)
    again = FollowerSync(TrainerRanks(team.store, 1, 3, limit=0.2, silent=0.4, name="t"))
    with pytest.raises(RankLost), again:
        again.on_step_end(1, FakeWeights(1))
    assert "somebody else reports as rank 1" in str(waiting.exception(PATIENCE))


def test_an_older_rank_0_does_not_say_a_word() -> None:
    """Neither does the newer one hear it."""
    team = Team(silent=0.4)
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    newer = TrainerRanks(team.store, 0, 3, silent=0.4, name="t")
    assert newer.open() == 1
    before = dict(team.store.values)
    with pytest.raises(SetupError, match="another rank 0 has begun a run"):
        team.trainer.sync.on_step_end(2, FakeWeights(2))
    assert team.store.values == before
    newer.close()


def test_ranks_that_do_not_fit_together_are_refused_at_set_up() -> None:
    """In one line each."""
    store = DictStore()
    with pytest.raises(SetupError, match="rank 3 of 3"):
        TrainerRanks(store, 3, 3)
    with pytest.raises(SetupError, match="silent"):
        TrainerRanks(store, 0, 3, silent=0.0)
    with pytest.raises(SetupError, match="rank 0 leads"):
        FollowerSync(TrainerRanks(store, 0, 3))
    with pytest.raises(SetupError, match="rank 1 follows"):
        Trainer(ranks=TrainerRanks(store, 1, 3))
    with pytest.raises(SetupError, match="decided by one rank alone"):
        Trainer(Policy(when_busy="skip"), ranks=TrainerRanks(store, 0, 3))
    follower = FollowerSync(TrainerRanks(store, 1, 3))
    follower.close()
    with pytest.raises(SetupError, match="closed"):
        follower.on_train_begin(FakeWeights(1))


# -- ranks in processes -----------------------------------------------------------------------------------


@pytest.fixture(params=["file", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store: a file, or a port of this host."""
    if request.param == "file":
        return str(tmp_path / "store")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp:{listener.getsockname()[1]}"


@pytest.fixture
def start() -> Iterator[Callable[..., Processes]]:
    """Starts them, and ends them."""
    started: list[Processes] = []

    def begin(where: str, **script: Any) -> Processes:
        started.append(Processes(where, **script))
        return started[-1]

    yield begin
    for each in started:
        each.end()


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(150)
class TestProcesses:
    def test_good_rounds(self, start: Callable[..., Processes], where: str) -> None:
        """Every rank gets every version."""
        team = start(where)
        for number in (1, 2, 3):
            assert [team.step(rank, number)[:2] for rank in range(3)] == [("ok", number - 1)] * 3

    def test_a_rank_raises_in_its_part(self, start: Callable[..., Processes], tmp_path: Path) -> None:
        """It has its own error; the others name it."""
        team = start(str(tmp_path / "store"), rank=2, raises=True)
        assert "raised OSError: no memory" in team.step(2, 2)[0]
        for rank in (0, 1):
            told, _, took = team.step(rank, 2)
            assert told == "raised RankFailed: rank 2 failed in its part of step 2: OSError: no memory"
            assert took < LIMIT

    def test_plans_that_differ(self, start: Callable[..., Processes], tmp_path: Path) -> None:
        """One line, the same on all of them."""
        team = start(str(tmp_path / "store"), mismatch=1)
        (line,) = {team.step(rank, 1)[0] for rank in range(3)}
        assert line == (
            "raised PlanMismatch: the trainer's ranks do not bring the same tensors at step 1: rank 0 "
            "differs from rank 1; tensor 1 is 'head' float32 (4,) on rank 0, and 'head' float32 (5,) on "
            "rank 1"
        )

    @pytest.mark.parametrize(
        ("where", "rank", "how"),
        [
            ("file", 2, signal.SIGKILL), ("tcp", 2, signal.SIGSTOP),
            ("tcp", 0, signal.SIGKILL), ("file", 0, signal.SIGSTOP),
        ],
        indirect=["where"],
    )  # fmt: skip
    def test_a_rank_is_killed_or_frozen_in_a_round(
        self, start: Callable[..., Processes], where: str, rank: int, how: signal.Signals
    ) -> None:
        """The others know within a bound, and say which rank, which round and which state."""
        team = start(where, slow=3 * SILENT)
        team.hear(0, lambda word: word == "sending")
        pid = team.all[rank].pid
        assert pid is not None
        os.kill(pid, how)
        for other in {0, 1, 2} - {rank}:
            told, _, took = team.step(other, 2)
            assert "RankLost" in told, told
            assert took < 4 * SILENT + 6.0
            assert f"rank {rank} of the trainer" in told or "the store of the trainer's ranks" in told, told
            assert " of round " in told or "the store" in told, told
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            told, _, _ = team.step(rank, 2)
            assert told != "ok", "who was frozen was not told"

    @pytest.mark.parametrize(
        ("where", "how"), [("tcp", signal.SIGKILL), ("file", signal.SIGSTOP)], indirect=["where"]
    )
    def test_a_rank_is_killed_or_frozen_before_it_has_released(
        self, start: Callable[..., Processes], where: str, how: signal.Signals
    ) -> None:
        """The engines do not resume on a good way: the round fails, long before its limit, with the rank."""
        team = start(where, holds=2)
        team.hear(2, lambda word: word == "releasing")
        pid = team.all[2].pid
        assert pid is not None
        os.kill(pid, how)
        for rank in (0, 1):
            told, _, took = team.step(rank, 2)
            assert told.startswith("BarrierTimeout"), told
            assert "barrier 'memory released' of round" in told
            assert "rank 2 missing: no sign of life" in told
            assert took < 4 * SILENT + 6.0
