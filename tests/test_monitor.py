"""The health monitor pauses for a round, and is told to watch again exactly once, however the round ends."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import weightsync
from weightsync.fsm.calls import Act
from weightsync.fsm.contract import Weights
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import SetupError
from weightsync.fsm.executors import Executor, RoundView, Undo
from weightsync.fsm.policy import Policy
from weightsync.fsm.record import Record
from weightsync.fsm.states import EngineState
from weightsync.handlers.monitor import HealthWatch
from weightsync.testing.fakes import FakeWeights
from weightsync.testing.scene import PATIENCE, Trainer, close_all
from weightsync.testing.simulation import Fault, Simulation

KINDS = ("raise", "hang", "lost", "die")


class Monitor:
    """A monitor that writes down what it is told, and objects to whatever it is told to object to."""

    def __init__(self, *objects: str) -> None:
        self.told: list[str] = []
        self._objects = objects

    def pause(self) -> None:
        """Stop watching."""
        self._hear("updating")

    def resume(self) -> None:
        """Watch again."""
        self._hear("watch again")

    def _hear(self, word: str) -> None:
        self.told.append(word)
        if word in self._objects:
            raise RuntimeError(f"the monitor objects: {word}")


def view(round: str = "r1") -> RoundView:
    """A round as an executor sees it."""
    weights = cast("Weights", SimpleNamespace(source=None))
    return RoundView(Session(round, 1, 1), step=1, attempt=1, plan=None, weights=weights)


def result(round: str = "r1") -> Record:
    """The last word of a round."""
    return Record(time=0.0, event="result", table="t", round=round, seq=9)


def watch(*objects: str) -> tuple[Monitor, HealthWatch]:
    """A monitor, and the handler around it."""
    monitor = Monitor(*objects)
    return monitor, HealthWatch(monitor.pause, monitor.resume)


@pytest.mark.parametrize("cleaned", [True, False], ids=["cleaned", "never came to it"])
def test_each_end_of_a_round_is_told_once(cleaned: bool) -> None:
    """When its result is there, and not before: while it cleans up, engines are paused."""
    monitor, handler = watch()
    handler.prepare(view())
    assert monitor.told == ["updating"]
    if cleaned:
        handler.clean(view())
    handler(result("another round"))
    assert monitor.told == ["updating"]
    handler(result())
    handler(result())
    handler.close()
    assert monitor.told == ["updating", "watch again"]


def test_every_round_has_its_own_end() -> None:
    """The second round pauses again, and its end is not mistaken for the first one's."""
    monitor, handler = watch()
    for name in ("r1", "r2"):
        handler.prepare(view(name))
        handler.clean(view(name))
        handler(result(name))
    assert monitor.told == ["updating", "watch again"] * 2


def replayed(handler: HealthWatch, records: tuple[Record, ...]) -> None:
    """Have a handler live through a round as its executor and observer, by what the round's records say."""
    for record in records:
        if record.event == "call" and record.trigger == "prepare" and record.error is None:
            handler.prepare(view(record.round))
        elif record.event == "call" and record.trigger == "clean" and record.error is None:
            handler.clean(view(record.round))
        handler(record)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", list(Act), ids=lambda act: act.name)
def test_whatever_goes_wrong_in_a_round_it_is_told_once(act: Act, kind: Any) -> None:
    """A fault of each kind in each act: as often as the monitor paused, it is told to watch again."""
    simulation = Simulation(faults=[Fault(act, kind), Fault(Act.broadcast, "raise", bucket=2)])
    simulation.run()
    monitor, handler = watch()
    records = simulation.round.records()
    replayed(handler, records)
    prepared = any(record.trigger == "prepare" and record.error is None for record in records)
    assert monitor.told == (["updating", "watch again"] if prepared else [])


def test_a_monitor_that_cannot_pause_is_told_to_watch_again() -> None:
    """It may have stopped before it complained; the error is its own."""
    monitor, handler = watch("updating")
    with pytest.raises(RuntimeError, match="objects: updating"):
        handler.prepare(view())
    handler(result())
    assert monitor.told == ["updating", "watch again"]


@pytest.mark.parametrize("objects", [("watch again",), ("updating", "watch again")])
def test_a_monitor_that_objects_to_watching_again_is_not_asked_twice(
    objects: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The objection is logged in one line, and the next round is told as any other."""
    monitor, handler = watch(*objects)
    for name in ("r1", "r2"):
        with pytest.raises(RuntimeError) if "updating" in objects else nullcontext():
            handler.prepare(view(name))
        handler(result(name))
        handler.close()
    assert monitor.told == ["updating", "watch again"] * 2
    line = "the health monitor does not watch again: it raised RuntimeError: the monitor objects: watch again"
    assert [record.getMessage() for record in caplog.records] == [line] * 2


def test_closing_pays_what_is_owed() -> None:
    """If no result will come any more, the end is the end."""
    monitor, handler = watch()
    handler.prepare(view())
    handler.close()
    handler.close()
    assert monitor.told == ["updating", "watch again"]


def test_a_pause_that_outlasts_its_round_is_ended_when_it_is_over() -> None:
    """Told in the other order, the monitor would stay paused for ever."""
    told: list[str] = []
    go_on, begun = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert go_on.wait(30)
        told.append("updating")

    handler = HealthWatch(pause, lambda: told.append("watch again"))
    preparing = threading.Thread(target=handler.prepare, args=(view(),))
    preparing.start()
    assert begun.wait(30)
    handler(result())
    handler.close()
    assert told == []
    go_on.set()
    preparing.join()
    assert told == ["updating", "watch again"]


# ------------------------------------------------------------------------------------ in rounds that are real


class Spoiler:
    """An executor that fails where it is told to."""

    name = "spoiler"

    def __init__(self, where: str) -> None:
        self._where = where

    def prepare(self, round: RoundView) -> Undo:
        """Get ready."""
        self._spoil("prepare")
        return lambda: self._spoil("undo")

    def clean(self, round: RoundView) -> None:
        """Clean up."""
        self._spoil("clean")

    def _spoil(self, here: str) -> None:
        if self._where == here:
            raise RuntimeError(f"spoilt: {here}")


def broken(point: str, bucket: int) -> None:
    """A fault that lets every bucket fail where it is applied."""
    if point == "apply":
        raise RuntimeError(f"bucket {bucket} cannot be applied")


@pytest.mark.parametrize("where", ["nowhere", "prepare", "clean", "undo", "bucket"])
@pytest.mark.parametrize("first", [True, False], ids=["listed first", "listed last"])
def test_in_a_real_round_it_is_told_once(where: str, first: bool) -> None:
    """Good or bad, before or after the other executor: paused once, watching again once."""
    monitor, handler = watch()
    handlers: list[Executor] = [handler, Spoiler(where)]
    if not first:
        handlers.reverse()
    fault: Callable[[str, int], None] | None = broken if where in ("undo", "bucket") else None
    link = weightsync.LocalEngine(weightsync.receiver_for({"w": torch.zeros(3)}, "e0", fault=fault))
    with weightsync.WeightSync([link], "memory", handlers=handlers) as sync:
        outcome = sync.on_train_begin({"w": torch.ones(3)})
        assert outcome.ok is (where == "nowhere")
        never = where == "prepare" and not first
        assert monitor.told == ([] if never else ["updating", "watch again"])


@pytest.mark.parametrize("bad", [None, "bucket 1", "commit"])
def test_it_is_told_to_watch_again_when_the_engines_are_resumed_and_the_lock_is_free(bad: str | None) -> None:
    """From Locked on it knows, before an engine is paused; it hears of the end when that is the end."""
    story: list[tuple[str, object]] = []
    trainer: Trainer | None = None

    def look(word: str) -> None:
        assert trainer is not None
        states = {engine.machine.state for engine in trainer.engines}
        story.append((word, (trainer.lock.status().holder is not None, states)))

    trainer = Trainer(handlers=[HealthWatch(lambda: look("updating"), lambda: look("watch again"))])
    try:
        for _ in range(2):
            if bad is not None:
                trainer.engines[1].bad[bad] = OSError(bad)
            trainer.hand_over(1, FakeWeights(1))
            trainer.sync._observers.flush(PATIENCE)
        free = {EngineState.Serving}
        assert story == [("updating", (True, free)), ("watch again", (False, free))] * 2
    finally:
        close_all()


def test_a_round_that_brings_an_engine_back_is_told_as_well() -> None:
    """Its engines are paused like any others."""
    monitor, handler = watch()
    policy = Policy(deadline=5.0, on_engine_failure="quarantine", quorum=1, catch_up="apart")
    trainer = Trainer(policy, handlers=[handler])
    try:
        trainer.engines[1].bad["bucket 1"] = OSError("lost")
        trainer.hand_over(1, FakeWeights(1))
        trainer.sync._observers.flush(PATIENCE)
        assert trainer.sync.servable() == {"a": 0, "b": 0}
        assert monitor.told == ["updating", "watch again"] * 2
    finally:
        close_all()


@pytest.mark.parametrize("which", ["pause", "resume"])
def test_a_coroutine_function_is_refused(which: str) -> None:
    """It would be called and never awaited; a handler may be one."""

    async def tells() -> None:
        """Does nothing, and needs a loop for it."""

    functions: dict[str, Any] = {"pause": int, "resume": int, which: tells}
    with pytest.raises(
        SetupError, match=rf"HealthWatch\({which}=.*: a plain function is needed; for a coroutine"
    ):
        HealthWatch(**functions)
