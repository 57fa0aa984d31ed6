"""The ranks of a trainer release what they hold in every round, and no engine resumes before all have.

Ranks in threads over a store of this process, with handlers of their own; then ranks in processes, of which
one is killed or frozen in its handler.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from casekit.devicekit import FakeDevice
from casekit.levels import eventually
from casekit.rankteam import POLICY, Team, close_teams, three
from weightsync.follower import FollowerSync
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import BarrierAborted, BarrierTimeout, RankLost, SetupError
from weightsync.fsm.executors import RoundView
from weightsync.fsm.policy import Policy
from weightsync.fsm.record import Record
from weightsync.fsm.states import Disposition, EngineState, Outcome
from weightsync.handlers.cache_release import CacheRelease
from weightsync.handlers.log import StateLog
from weightsync.handlers.rank_barrier import RankBarrier, RankCall
from weightsync.handlers.ranks import TrainerRanks
from weightsync.loglint import lint
from weightsync.testing.fakes import FakeExecutor, FakeWeights, Gate
from weightsync.testing.scene import Trainer


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_teams()


def executors(*extra: tuple[int, str, Any]) -> tuple[list[str], list[list[FakeExecutor]]]:
    """Two for each of three ranks, called ``0x`` and so on, and what they do in one story."""
    story: list[str] = []
    every = [[FakeExecutor(f"{rank}{name}", story) for name in "xy"] for rank in range(3)]
    for rank, word, bent in extra:
        every[rank][1].bad[word] = bent
    return story, every


def calls(team: Team, act: str) -> list[Record]:
    """The calls of the last round that were answered."""
    last = team.trainer.records[-1].round
    return [
        each
        for each in team.trainer.records
        if each.event == "call" and each.trigger == act and each.round == last
    ]


def place(team: Team, event: str, trigger: str) -> int:
    """Where that record is among all."""
    (found,) = [
        at for at, each in enumerate(team.trainer.records) if (each.event, each.trigger) == (event, trigger)
    ]
    return found


# -- good rounds ------------------------------------------------------------------------------------------


def test_every_rank_prepares_before_an_engine_is_paused_and_releases_before_it_resumes() -> None:
    """In the order of its own handlers; between the ranks there is none."""
    story, handlers = executors()
    team = Team(handlers=handlers)
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    for rank in range(3):
        mine = [word.partition(".") for word in story if word.startswith(str(rank))]
        assert [(name[1], what) for name, _, what in mine] == [
            ("x", "prepare"), ("y", "prepare"), ("x", "clean"), ("y", "clean"),
        ]  # fmt: skip
    prepared, released = (place(team, "barrier", name) for name in ("prepared", "memory released"))
    opened = [at for at, each in enumerate(team.trainer.records) if each.trigger == "open"]
    resumed = [at for at, each in enumerate(team.trainer.records) if each.trigger == "resume"]
    assert prepared < min(opened)
    assert place(team, "call", "publish") < released < min(resumed)


def test_no_engine_resumes_while_a_rank_has_not_released() -> None:
    """However long that takes, within the bound."""
    gate = Gate()
    _, handlers = executors((2, "clean", gate))
    team = Team(handlers=handlers)
    futures = team.step(1, *three(1))
    gate.await_visitor()
    assert eventually(lambda: "t/barrier" in str(list(team.store.values)))
    assert eventually(lambda: any(key.endswith("memory released/1") for key in team.store.values))
    assert all(engine.machine.state is EngineState.Committed for engine in team.trainer.engines)
    assert not any("resume" in engine.words for engine in team.trainer.engines)
    gate.open()
    assert all(each.ok for each in team.results(futures))


def test_what_other_ranks_do_is_in_the_rounds_log_with_its_cost() -> None:
    """Under their number; and who was late at the barrier."""
    devices = [FakeDevice(100, live=10, cached=10 * (rank + 1)) for rank in range(3)]
    team = Team(handlers=[[CacheRelease(device)] for device in devices])
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    done = [each for each in team.trainer.records if each.event == "action"]
    first = {each.rank: each.bytes for each in done if (each.facts or {})["boundary"] == "Idle->Locked"}
    assert first == {None: 10, 1: 20, 2: 30}
    assert len(done) == 6
    for name in ("prepared", "memory released"):
        told = team.trainer.records[place(team, "barrier", name)]
        assert sorted((told.facts or {})["late"]) == ["0", "1", "2"]
        assert (told.facts or {})["ranks"] == 3


def test_many_rounds_leave_no_words_behind() -> None:
    """Those of a few hand-overs are kept."""
    team = Team()
    counts = []
    for number in range(1, 16):
        assert all(each.ok for each in team.results(team.step(number, *three(number))))
        counts.append(len(team.store.values))
    assert counts[10] == counts[-1]


def test_the_log_replays_and_tells_of_a_barrier_that_was_left_out(tmp_path: Path) -> None:
    """A good one has no finding; one in which the engines resumed without it has."""
    path = tmp_path / "state.jsonl"
    with StateLog(path) as log:
        own: list[Any] = [CacheRelease(FakeDevice(100)), log]
        team = Team(handlers=[own, [], []])
        assert all(each.ok for each in team.results(team.step(1, *three(1))))
    assert [str(each) for each in lint([path]).findings] == []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = {"event": "call", "trigger": "clean", "undo": "barrier"}
    kept = [line for line in lines if any(line.get(key) != value for key, value in wanted.items())]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(f"{json.dumps({**line, 'seq': at})}\n" for at, line in enumerate(kept)))
    found = lint([path]).findings
    assert any(each.promise == "P11" and "barrier" in str(each) for each in found), list(map(str, found))


def check_none_resumed(team: Team, result: Any) -> None:
    """The version is published, and no engine may map what a rank may not have let go of."""
    assert result.published == "yes"
    assert {row.disposition for row in result.engines} == {Disposition.quarantined}
    assert any("may still hold its memory" in note for note in result.notes), result.notes
    assert not calls(team, "resume")
    assert team.trainer.sync.servable() == {}


# -- what goes wrong --------------------------------------------------------------------------------------


def test_a_rank_that_cannot_prepare_fails_the_round_before_an_engine_is_told() -> None:
    """By name; what was prepared is undone on every rank, backwards."""
    story, handlers = executors((1, "prepare", OSError("no room")))
    team = Team(handlers=handlers)
    found = team.results(team.step(1, *three(1)))
    assert [each.outcome for each in found] == [Outcome.failed] * 3
    assert isinstance(found[0].error, BarrierAborted)
    assert found[0].failed_in == "Locked"
    for each in found:
        assert "'prepared'" in str(each.error)
        assert "rank 1: OSError: no room" in str(each.error)
        assert not each.unclean
    assert not any("open" in engine.words for engine in team.trainer.engines)
    undone = [word for word in story if word.endswith("undo")]
    assert [word for word in undone if word[0] == "1"] == ["1x.undo"]
    for rank in (0, 2):
        assert [word for word in undone if word[0] == str(rank)] == [f"{rank}y.undo", f"{rank}x.undo"]
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


def test_a_rank_that_cannot_release_fails_the_round_with_its_error() -> None:
    """What the engines hold and what is published stays so; what was not cleaned up is undone."""
    story, handlers = executors((2, "clean", OSError("busy")))
    team = Team(handlers=handlers)
    found = team.results(team.step(1, *three(1)))
    first = found[0]
    assert isinstance(first.error, BarrierAborted)
    assert (first.failed_in, first.published) == ("Cleaning", "yes")
    assert "barrier 'memory released'" in str(first.error)
    assert "rank 2: OSError: busy" in str(first.error)
    assert {row.disposition for row in first.engines} == {Disposition.serving_new}
    assert [word for word in story if word[0] == "2"][-2:] == ["2y.clean", "2y.undo"]
    assert not calls(team, "undo")[0].error
    team.trainer.check_released()
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


@pytest.mark.parametrize("state", ["Broadcasting", "Cleaning"])
def test_a_round_that_fails_is_undone_on_every_rank(state: str) -> None:
    """Backwards, once, and before the lock goes."""
    story, handlers = executors()
    team = Team(handlers=handlers)
    if state == "Broadcasting":
        team.trainer.transport.bad["bucket 1"] = OSError("cable")
    else:
        for engine in team.trainer.engines:
            engine.bad["commit"] = OSError("no")
    found = team.results(team.step(1, *three(1)))
    assert [each.failed_in for each in found] == [state] * 3
    for rank in range(3):
        mine = [word for word in story if word[0] == str(rank)]
        assert mine == [f"{rank}{word}" for word in ("x.prepare", "y.prepare", "y.undo", "x.undo")]
    assert place(team, "barrier", "undone") < place(team, "transition", "Unlocked")


def test_an_undo_that_fails_on_another_rank_is_told() -> None:
    """The round is unclean; the first error stays the first."""
    story, handlers = executors((1, "undo", OSError("stuck")))
    team = Team(handlers=handlers)
    team.trainer.transport.bad["bucket 1"] = OSError("cable")
    first = team.results(team.step(1, *three(1)))[0]
    assert str(first.error) == "cable"
    assert first.unclean
    assert any("rank 1: OSError: stuck" in note for note in first.notes), first.notes
    assert "1x.undo" in story


def test_a_rank_that_hangs_in_its_handler_is_named_at_the_bound() -> None:
    """It lives, so only the bound ends that; the round is over long before its deadline."""
    gate = Gate()
    story, handlers = executors((1, "clean", gate))
    policy = Policy(deadline=12.0, idle=1.0, lease=2.0)
    team = Team(policy=policy, handlers=handlers)
    futures = team.step(1, *three(1))
    first = team.results(futures[:1])[0]
    assert isinstance(first.error, BarrierTimeout)
    assert first.error.ranks == (1,)
    assert "rank 1 missing: after 0.8 s" in str(first.error)
    assert first.unclean, "it lives, and holds what it held"
    check_none_resumed(team, first)
    team.results(futures)
    held = team.results(team.step(2, *three(2)))[0]
    assert "barrier 'prepared'" in str(held.error), "its handlers are called while one of them still runs"
    gate.open()
    assert eventually(
        lambda: team.followers[0]._rounds._doing is None or team.followers[0]._rounds._doing.done()
    )
    assert all(each.ok for each in team.results(team.step(3, *three(3))))
    mine = [word.partition(".")[2] for word in story if word.startswith("1y")]
    assert mine == ["prepare", "clean", "prepare", "clean"]


@pytest.mark.parametrize("bent", ["still runs", "raises"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_engine_resumes_over_what_was_not_undone(rank: int, bent: str) -> None:
    """Another rank's clean-up has failed, and this rank's undo does not end, or raises."""
    gate = Gate()
    how: Any = gate if bent == "still runs" else OSError("stuck")
    _, handlers = executors((2, "clean", OSError("busy")), (rank, "undo", how))
    handlers[rank][1].bad["clean"] = OSError("neither")
    team = Team(handlers=handlers, policy=Policy(deadline=8.0, lease=2.0))
    futures = team.step(1, *three(1))
    first = team.results(futures[:1])[0]
    assert first.unclean
    check_none_resumed(team, first)
    gate.open()
    team.results(futures)
    for each in (handlers[2][1], handlers[rank][1]):
        each.bad.clear()
    assert eventually(
        lambda: all(each._rounds._doing is None or each._rounds._doing.done() for each in team.followers)
    )
    assert all(each.ok for each in team.results(team.step(2, *three(2))))
    assert set(team.trainer.sync.servable()) == {"a", "b"}


class Notes:
    """An executor that notes something."""

    name = "notes"

    def __init__(self, **more: Any) -> None:
        self._more = {"trigger": "x", "executor": "notes", **more}

    def prepare(self, round: RoundView) -> None:
        """Note it."""
        round.note("action", **self._more)

    def clean(self, round: RoundView) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "more", [{"facts": {"bytes": {1}}}, {"facts": {"x": b"x"}}, {"freed": torch.tensor(1)}]
)
def test_a_note_that_no_log_can_hold_is_its_handlers_error(rank: int, more: dict[str, Any]) -> None:
    """On each rank in the same words and at once; it is no vote that nobody can write."""
    handlers: list[Any] = [[], [], []]
    handlers[rank] = [Notes(**more)]
    team = Team(handlers=handlers)
    first = team.results(team.step(1, *three(1)))[0]
    assert isinstance(first.error, BarrierAborted if rank else ValueError)
    assert "notes noted 'action' with something that a log cannot hold" in str(first.error)
    handlers[rank][0]._more = {"trigger": "x", "executor": "notes", "rank": 7, "facts": {1: 0.5}}
    assert all(each.ok for each in team.results(team.step(2, *three(2))))
    (told,) = [each for each in team.trainer.records if each.event == "action"]
    assert told.facts == {"1": 0.5}


def test_a_hand_over_that_is_cancelled_does_not_wait_for_a_rank() -> None:
    """Who prepares for ever keeps nobody: the wait ends as soon as that is said, and not at its bound."""
    gate = Gate()
    _, handlers = executors((1, "prepare", gate))
    team = Team(handlers=handlers, policy=Policy(deadline=60.0, lease=2.0))
    others = [team.alone(rank, 1) for rank in (1, 2)]
    pending = team.trainer.sync.begin(1, FakeWeights(1))
    gate.await_visitor()
    pending.cancel()
    ended = [
        eventually(lambda: [each.error for each in team.trainer.records if each.undo == "barrier"], limit=5.0)
    ]
    gate.open()
    assert ended == [True]
    (error, *_) = [each.error for each in team.trainer.records if each.undo == "barrier"]
    assert error is not None
    assert error.startswith("RoundCancelled")
    results = [pending.wait(), *team.results(others)]
    assert [each.outcome for each in results] == [Outcome.failed] * 3
    assert all(each.ok for each in team.results(team.step(2, *three(2))))


def test_a_retry_has_the_other_ranks_begin_anew() -> None:
    """It is a round of its own: what the first one has prepared is undone before."""
    story, handlers = executors()
    team = Team(policy=Policy(deadline=10.0, lease=2.0, attempts=2), handlers=handlers)
    team.trainer.transport.bad["bucket 1"] = OSError("cable")
    found = team.results(team.step(1, *three(1)))
    assert all(each.ok for each in found)
    assert found[0].attempts == 2
    for rank in range(3):
        mine = [word.partition(".")[2] for word in story if word.startswith(f"{rank}x")]
        assert mine == ["prepare", "undo", "prepare", "clean"]


def test_a_rank_undoes_by_itself_when_rank_0_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody calls it any more, so it does not wait for that."""
    story, handlers = executors()
    team, gate = Team(handlers=handlers, silent=0.5), Gate()
    team.trainer.transport.bad["bucket 1"] = gate
    futures = team.step(1, *three(1))
    gate.await_visitor()
    monkeypatch.setattr(team.ranks[0], "write", lambda value, *path: None)  # it is cut off
    lost = [future.exception(20.0) for future in futures[1:]]
    assert [type(each) for each in lost] == [RankLost] * 2
    for rank in (1, 2):
        mine = [word for word in story if word[0] == str(rank)]
        assert mine[-2:] == [f"{rank}y.undo", f"{rank}x.undo"]
    gate.open()


# -- nobody to wait for -----------------------------------------------------------------------------------


def view(notes: list[Any]) -> RoundView:
    """A round as an executor sees it."""

    def note(event: str, /, **values: Any) -> None:
        notes.append((event, values))

    return RoundView(Session("r1", 1, 1), 1, 1, None, FakeWeights(1), note)


def test_without_other_ranks_it_is_one_line_in_the_log() -> None:
    """No error after the engines were loaded; no store is asked for."""
    notes: list[Any] = []
    barrier = RankBarrier()
    assert barrier.prepare(view(notes)) is None
    assert RankCall(barrier).prepare(view(notes)) is None
    RankCall(barrier).clean(view(notes))
    barrier.clean(view(notes))
    assert [(event, values["trigger"], values["facts"]) for event, values in notes] == [
        ("barrier", "prepared", {"ranks": 1}),
        ("barrier", "memory released", {"ranks": 1}),
    ]
    barrier.close()


def test_a_trainer_of_one_rank_does_not_wait() -> None:
    """With ranks or without."""
    store = Team().store
    alone = Trainer(POLICY, ranks=TrainerRanks(store, 0, 1, name="alone"))
    result = alone.hand_over(1, FakeWeights(1))
    assert result.ok
    assert [each.trigger for each in alone.records if each.event == "barrier"] == [
        "prepared",
        "memory released",
    ]
    without = Trainer(POLICY)
    assert without.hand_over(1, FakeWeights(1)).ok
    assert not [each for each in without.records if each.event == "barrier"]


def test_a_rank_above_0_has_no_observers() -> None:
    """It has no records: said when it is made."""
    team = Team()
    with pytest.raises(SetupError, match="rank 0 has the records"):
        FollowerSync(team.ranks[1], handlers=[print])  # type: ignore[list-item]


def test_a_store_that_cannot_decide_is_refused_at_set_up() -> None:
    """Before anything moves."""

    class Old:
        """Without compare_set."""

        set = get = check = delete_key = lambda *_: None

    with pytest.raises(SetupError, match="several ranks need a store with compare_set"):
        Trainer(POLICY, ranks=TrainerRanks(Old(), 0, 2))  # type: ignore[arg-type]
