"""The allocator's unused memory goes back before an engine needs it: named, in order, measured, and no more.

On a fake device that counts, on the host's real memory, and in rounds whose log has what it cost. The actions
for CUDA are torch's, and were not run.
"""

import gc
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from casekit.devicekit import FakeDevice
from weightsync import timeline
from weightsync.cli import main
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import MemoryShort, SetupError
from weightsync.fsm.executors import RoundView
from weightsync.fsm.record import Record
from weightsync.fsm.releases import ACTIONS, Action, Boundary, Level
from weightsync.fsm.round import Round
from weightsync.fsm.states import Outcome, State
from weightsync.handlers.cache_release import CacheRelease
from weightsync.handlers.log import StateLog, level_of
from weightsync.handlers.memories import CudaCache, HostCache
from weightsync.testing.fakes import FakeWeights

LIGHT = (Action.cache_release,)


class Notes:
    """What an executor has noted."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def __call__(self, event: str, /, **values: Any) -> None:
        """Note."""
        self.all.append({"event": event, **values})

    def of(self, event: str) -> list[dict[str, Any]]:
        """Those of this kind."""
        return [each for each in self.all if each["event"] == event]


def view(notes: Notes) -> RoundView:
    """A round as an executor sees it."""
    return RoundView(Session("r1", 1, 1), 1, 1, None, FakeWeights(1), notes)


def round_of(*handlers: Any, fault: Any = None) -> tuple[weightsync.RoundResult, list[Record]]:
    """A real round of one engine of this process, and its records."""
    records: list[Record] = []
    link = weightsync.LocalEngine(weightsync.receiver_for({"w": torch.zeros(3)}, "e0", fault=fault))
    with weightsync.WeightSync([link], "memory", handlers=[*handlers, records.append]) as sync:
        result = sync.on_train_begin([("w", torch.ones(3))])
    return result, records


# -- what is done -----------------------------------------------------------------------------------------


def test_by_default_it_is_light_at_both_boundaries() -> None:
    """One action, named, before engines are paused and before they resume."""
    release = CacheRelease(FakeDevice(100))
    assert release.actions(Boundary.prepare) == release.actions(Boundary.clean) == LIGHT
    assert [str(boundary) for boundary in Boundary] == ["Idle->Locked", "Awaiting->Cleaning"]


def test_no_level_has_a_garbage_collection_in_it() -> None:
    """Nor anything that a memory would have to do one for; each level has what the one below it has."""
    assert {action.name for action in Action} == {"synchronize", "collect_exports", "cache_release"}
    levels = [ACTIONS[level] for level in Level]
    for lower, higher in pairwise(levels):
        assert set(lower) < set(higher)
        assert higher[-1] is Action.cache_release


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name)
def test_actions_are_done_in_their_order(level: Level) -> None:
    """Only these, at the boundary that they are for."""
    device = FakeDevice(100)
    release = CacheRelease(device, before=level.name, after="none")
    release.prepare(view(Notes()))
    assert device.done == [action.name for action in ACTIONS[level]]
    release.clean(view(Notes()))
    assert device.done == [action.name for action in ACTIONS[level]]


def test_the_cost_of_each_action_is_noted_and_adds_up() -> None:
    """Seconds, and bytes before and after, whose difference is what was freed."""
    notes, device = Notes(), FakeDevice(100, live=10, cached=30, pending=20, shown=5)
    CacheRelease(device, before="aggressive").prepare(view(notes))
    assert [each["trigger"] for each in notes.all] == [action.name for action in ACTIONS[Level.aggressive]]
    for each in notes.all:
        told = each["facts"]
        assert each["event"] == "action"
        assert each["seconds"] >= 0
        assert told["bytes_before"] - each["freed"] == told["bytes_after"]
        assert (told["boundary"], told["memory"]) == ("Idle->Locked", "fake:0")
    assert [each["freed"] for each in notes.all] == [0, 0, 55]
    assert device.held().reserved == device.held().live == 10


def test_an_action_over_its_budget_is_a_warning_and_no_error() -> None:
    """The others within theirs are none."""
    notes, device = Notes(), FakeDevice(100)
    device.slow = lambda action: time.sleep(0.01) if action == "synchronize" else None
    budgets = {"synchronize": 0.001, "cache_release": 30.0}
    CacheRelease(device, before="sync", budgets=budgets).prepare(view(notes))
    (warned,) = notes.of("over_budget")
    assert warned["trigger"] == "synchronize"
    assert warned["seconds"] > warned["facts"]["budget"] == 0.001
    assert device.done == ["synchronize", "cache_release"]


# -- what the other side needs ----------------------------------------------------------------------------


def test_without_the_hand_over_the_other_side_cannot_map() -> None:
    """With the light one it can."""
    device = FakeDevice(100, live=20, cached=60)
    assert device.map(50) == 30
    CacheRelease(device).prepare(view(Notes()))
    assert device.map(50) == 0


def test_live_memory_fails_in_any_case_and_is_named() -> None:
    """With the bytes that are used here and lacking there; what was handed back stays so."""
    device = FakeDevice(100, live=60, cached=30)
    assert device.map(50) == 40
    release = CacheRelease(device, lacking=lambda: device.map(50))
    with pytest.raises(MemoryShort, match=r"Idle->Locked: 10 bytes are lacking.*uses 60 bytes of fake:0"):
        release.prepare(view(Notes()))
    assert device.cached == 0


def test_only_what_the_other_side_lacks_escalates_and_only_once() -> None:
    """Light first; then everything, once, which the log says with the reason."""
    notes, device = Notes(), FakeDevice(100, live=20, cached=30, pending=25, shown=5)
    CacheRelease(device, lacking=lambda: device.map(75)).prepare(view(notes))
    assert device.done == ["cache_release", "synchronize", "collect_exports", "cache_release"]
    (escalated,) = notes.of("escalated")
    assert escalated["facts"] == {"boundary": "Idle->Locked", "lacking": 25, "level": "light"}
    assert device.mapped == 75


@pytest.mark.parametrize("level", ["light", "aggressive"])
def test_there_is_no_second_escalation(level: str) -> None:
    """What the aggressive level cannot free, it cannot free the next time."""
    device, asked = FakeDevice(100, live=90), list[int]()

    def lacking() -> int:
        asked.append(1)
        return 5

    with pytest.raises(MemoryShort):
        CacheRelease(device, before=level, lacking=lacking).prepare(view(Notes()))
    assert device.done.count("collect_exports") == 1
    assert len(asked) <= 2


def test_nobody_who_has_enough_is_escalated_for() -> None:
    """Nor is anything done if nothing is to be done."""
    device = FakeDevice(100, pending=10)
    CacheRelease(device, before="light", lacking=lambda: 0).prepare(view(Notes()))
    CacheRelease(device, before="none").prepare(view(Notes()))
    assert device.done == ["cache_release"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"before": "full"}, "before='full'"),
        ({"after": "gc"}, "'none', 'light', 'sync', 'aggressive'"),
        ({"budgets": {"gc": 1.0}}, "actions are called synchronize, collect_exports, cache_release"),
        ({"budgets": {"synchronize": -1.0}}, "budgets"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_at_set_up(given: dict[str, Any], text: str) -> None:
    """In one line that says what to give instead."""
    with pytest.raises(SetupError, match=text):
        CacheRelease(FakeDevice(1), **given)


# -- in rounds --------------------------------------------------------------------------------------------


class Collected(AssertionError):
    """A full garbage collection on the path of a round."""


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """``gc.collect`` is forbidden: who calls it in a round is told the state in which that was."""
    state, fire = [State.Idle.name], Round.fire

    def collect(*_: Any) -> int:
        raise Collected(f"gc.collect was called in {state[0]}")

    def fired(self: Round, *args: Any, **more: Any) -> Any:
        taken = fire(self, *args, **more)
        state[0] = self.state.name
        return taken

    monkeypatch.setattr(Round, "fire", fired)
    monkeypatch.setattr(gc, "collect", collect)


@pytest.mark.usefixtures("no_collection")
def test_a_round_does_without_a_garbage_collection() -> None:
    """At every level, on the host's real memory, before and after."""
    for level in Level:
        result, _ = round_of(CacheRelease(HostCache(), before=level.name, after=level.name))
        assert result.ok, result.error


@pytest.mark.parametrize(
    ("method", "state"), [("prepare", "Locked"), ("clean", "Cleaning")], ids=["prepare", "clean"]
)
@pytest.mark.usefixtures("no_collection")
def test_one_that_is_slipped_in_is_found_with_the_state(
    monkeypatch: pytest.MonkeyPatch, method: str, state: str
) -> None:
    """The guard has teeth: what once came back in an unrelated change would not do so here."""
    boundary = {"prepare": Boundary.prepare, "clean": Boundary.clean}[method]
    device = FakeDevice(100)
    release = CacheRelease(device)
    real = release._release

    def ritual(where: Boundary, round: RoundView) -> None:
        if where is boundary:
            gc.collect()
        real(where, round)

    monkeypatch.setattr(release, "_release", ritual)
    result, _ = round_of(release)
    assert isinstance(result.error, Collected)
    assert str(result.error) == f"gc.collect was called in {state}"


def test_the_log_of_a_round_has_what_it_did() -> None:
    """In the state it was in, under the executor's name, and with no key that a log does not know."""
    device = FakeDevice(100, live=10, cached=40)
    result, records = round_of(CacheRelease(device, budgets={"cache_release": 1e-9}))
    assert result.ok
    done = [record for record in records if record.event == "action"]
    assert [(r.undo, r.trigger, r.bytes) for r in done] == [
        ("cache_release", "cache_release", 40),
        ("cache_release", "cache_release", 0),
    ]
    assert [(r.facts or {})["boundary"] for r in done] == ["Idle->Locked", "Awaiting->Cleaning"]
    warned = [record for record in records if record.event == "over_budget"]
    assert len(warned) == 2
    assert {level_of(record) for record in warned} == {"warning"}
    assert [level_of(record) for record in done] == ["debug"] * 2
    names = [record.event if record.event != "call" else f"call {record.trigger}" for record in records]
    assert names.index("action") < names.index("call prepare") < names.index("call open")
    assert names.index("call publish") < len(names) - 1 - names[::-1].index("action")
    assert len(names) - 1 - names[::-1].index("action") < names.index("call resume")


def test_the_time_line_of_a_round_tells_what_was_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the time that it took."""
    path = tmp_path / "state.jsonl"
    device = FakeDevice(100, cached=40)
    with StateLog(path) as log:
        result, _ = round_of(CacheRelease(device), log)
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["log", str(path), "--round", result.round]) == 0
    lines = capsys.readouterr().out.splitlines()
    freed = [line for line in lines if "action cache_release cache_release (" in line]
    assert ["(40 bytes freed)" in line for line in freed] == [True, False]
    assert all(re.search(r"freed\) +\d", line) for line in freed)


def test_what_comes_into_memory_is_told_as_taken() -> None:
    """And not as less than nothing that was freed."""
    record = Record(0.0, "action", "", "r", 0, trigger="onload", undo="residency", bytes=-7)
    assert timeline._what(record) == "action onload residency (7 bytes taken)"


def test_memory_that_is_short_fails_the_round_before_an_engine_is_told() -> None:
    """The engine goes on with what it has."""
    result, records = round_of(CacheRelease(FakeDevice(100, live=90), lacking=lambda: 7))
    assert result.outcome is Outcome.failed
    assert isinstance(result.error, MemoryShort)
    assert result.failed_in == "Locked"
    assert not any(record.trigger == "open" for record in records)


def test_what_cannot_be_logged_is_the_executors_error() -> None:
    """And never the end of the loop that moves the round."""

    class Odd:
        """It notes what no log takes."""

        name = "odd"

        def __init__(self, event: str, value: object) -> None:
            self.event, self.value = event, value

        def prepare(self, round: RoundView) -> None:
            """Note."""
            round.note(self.event, trigger="x", executor=self.name, facts={"value": self.value})

        def clean(self, round: RoundView) -> None:
            """Nothing."""

    result, _ = round_of(Odd("transition", 1))
    assert isinstance(result.error, ValueError)
    assert "an executor can note action, barrier, escalated, over_budget" in str(result.error)
    result, _ = round_of(Odd("action", object()))
    assert isinstance(result.error, ValueError)


async def _nothing() -> int:
    return 0


@pytest.mark.parametrize("lacking", [lambda: None, _nothing, lambda: "5", lambda: 0.5])
def test_what_lacks_no_number_of_bytes_is_refused_in_one_line(lacking: Any) -> None:
    """Nobody can tell what it means; and a coroutine that nobody awaits has asked nobody."""
    release = CacheRelease(FakeDevice(100), lacking=lacking)
    view = RoundView(Session("r1", 1, 1), 1, 1, None, FakeWeights(1))
    with pytest.raises(SetupError, match="a function that returns a whole number of bytes is needed"):
        release.prepare(view)


# -- the host, and what a collection would cost -----------------------------------------------------------


@pytest.fixture
def many_objects() -> Iterator[list[Any]]:
    """Two million live objects that a full collection has to look at."""
    gc.disable()  # making them would run dozens of collections
    try:
        held: list[Any] = [[] for _ in range(2_000_000)]
        gc.enable()
        yield held
    finally:
        gc.enable()


def test_a_light_release_is_far_cheaper_than_a_collection(many_objects: list[Any]) -> None:
    """With two million live objects; the best of three of each, as a ratio."""
    notes = Notes()
    device = FakeDevice(100, cached=50)
    for _ in range(3):
        CacheRelease(device, after="none").prepare(view(notes))
        CacheRelease(HostCache(), after="none").prepare(view(notes))
    full = []
    for _ in range(3):
        began = time.perf_counter()
        gc.collect()
        full.append(time.perf_counter() - began)
    light = min(each["seconds"] for each in notes.all)
    host = min(each["seconds"] for each in notes.all if each["facts"]["memory"] == "host")
    assert len(many_objects) == 2_000_000
    assert light < 0.01
    assert min(full) > 5 * light
    assert min(full) > host


def test_the_host_gives_memory_back_that_was_freed() -> None:
    """Real pages: many small blocks are freed below one that is kept, and stay until they are trimmed."""
    memory = HostCache()
    blocks = [torch.ones(8_000, dtype=torch.uint8) for _ in range(6_000)]
    kept = torch.ones(8_000, dtype=torch.uint8)
    full = memory.held().reserved
    del blocks
    memory.cache_release()
    assert memory.held().reserved < full - 20_000_000
    assert kept.sum() == 8_000
    memory.synchronize()
    memory.collect_exports()


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Any) -> None:
    """Then the log says nothing of bytes, and nothing is trimmed."""
    memory = HostCache()
    memory._statm, memory._trim = tmp_path / "none", None
    memory.cache_release()
    assert memory.held().reserved == 0


def test_the_gpu_is_asked_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which functions of torch are called, in which order. What they do was not run on a GPU."""
    called: list[str] = []

    def says(name: str) -> Any:
        def called_so(*_: Any) -> int:
            called.append(name)
            return 0

        return called_so

    for name in ("synchronize", "ipc_collect", "empty_cache", "memory_reserved", "memory_allocated"):
        assert callable(getattr(torch.cuda, name))
        monkeypatch.setattr(torch.cuda, name, says(name))
    CacheRelease(CudaCache("cuda:1"), before="aggressive").prepare(view(Notes()))
    done = [name for name in called if not name.startswith("memory")]
    assert done == ["synchronize", "ipc_collect", "empty_cache"]
