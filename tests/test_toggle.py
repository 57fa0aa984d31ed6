"""A setting that is another one during a round is what it was before, on every way out of the round.

A setting of the tests, and torch's own allocator settings, which torch takes on any build; what they do to a
GPU's memory was not tried.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weightsync
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import SetupError, WeightSyncError
from weightsync.fsm.executors import Executor, RoundView
from weightsync.handlers.toggle import AllocatorSwitch, Toggle, expandable_segments
from weightsync.testing.fakes import FakeWeights


class Setting:
    """A setting of the tests."""

    name = "colour"

    def __init__(self, value: str) -> None:
        self.value = value
        self.written: list[str] = []
        self.bad: list[BaseException] = []

    def read(self) -> str:
        """What it is."""
        return self.value

    def write(self, value: str, /) -> None:
        """Make it that; or half of it, and raise."""
        self.value = value
        self.written.append(value)
        if self.bad:
            raise self.bad.pop(0)


def view(name: str = "r1") -> RoundView:
    """A round as an executor sees it."""
    return RoundView(Session(name, 1, 1), 1, 1, None, FakeWeights(1))


class Sees:
    """An executor that looks at the setting in a round, and may fail."""

    name = "sees"

    def __init__(self, setting: Setting, fails: str = "") -> None:
        self.setting, self.fails = setting, fails
        self.seen: list[str] = []

    def prepare(self, round: RoundView) -> None:
        """Look."""
        self._look("prepare")

    def clean(self, round: RoundView) -> None:
        """Look."""
        self._look("clean")

    def _look(self, where: str) -> None:
        self.seen.append(self.setting.value)
        if self.fails == where:
            raise OSError(where)


def hand_over(*handlers: Executor, fault: Any = None) -> tuple[weightsync.RoundResult, list[Any]]:
    """One round with one engine of this process."""
    records: list[Any] = []
    link = weightsync.LocalEngine(weightsync.receiver_for({"w": torch.zeros(3)}, "e0", fault=fault))
    with weightsync.WeightSync([link], "memory", handlers=[*handlers, records.append]) as sync:
        return sync.on_train_begin([("w", torch.ones(3))]), records


def broken(point: str, bucket: int) -> None:
    """A fault that lets every bucket fail where it is applied."""
    if point == "apply":
        raise RuntimeError(f"bucket {bucket} cannot be applied")


@pytest.mark.parametrize("way", ["good", "prepare", "bucket", "clean"])
def test_it_is_what_it_was_on_every_way_out(way: str) -> None:
    """And the other one in between; both stand in the log."""
    setting = Setting("red")
    sees = Sees(setting, way)
    result, records = hand_over(sees, Toggle(setting, "blue"), Sees(setting, way),
                                fault=broken if way == "bucket" else None)  # fmt: skip
    assert result.ok is (way == "good")
    assert not result.unclean
    assert setting.value == "red"
    if way != "prepare":
        assert setting.written == ["blue", "red"]
        noted = [record for record in records if record.event == "action"]
        assert [(r.undo, r.trigger, (r.facts or {})["value"]) for r in noted] == [
            ("colour", "set", "blue"),
            ("colour", "restored", "red"),
        ]


def test_what_it_is_already_is_left_alone() -> None:
    """It is not changed, and nothing is written when it is restored."""
    setting = Setting("blue")
    toggle = Toggle(setting, "blue")
    undo = toggle.prepare(view())
    undo()
    toggle.prepare(view())
    toggle.clean(view())
    assert setting.written == []


@pytest.mark.parametrize("way", ["good", "clean", "bucket"])
def test_two_toggles_of_one_setting_end_with_what_it_was(way: str) -> None:
    """Forwards on the good way, backwards on the others, and half of each if a clean-up fails."""
    setting = Setting("red")
    sees = Sees(setting, way)
    result, _ = hand_over(Toggle(setting, "blue"), sees, Toggle(setting, "green"), Sees(setting),
                          fault=broken if way == "bucket" else None)  # fmt: skip
    assert result.ok is (way == "good")
    assert not result.unclean
    assert setting.value == "red"
    assert sees.seen[0] == "blue"
    assert "green" in setting.written


def test_two_toggles_in_rounds_beside_each_other_count() -> None:
    """The first one to end leaves the setting to the other one, and the last one restores what it was."""
    setting = Setting("red")
    first, second = Toggle(setting, "blue"), Toggle(setting, "blue")
    first.prepare(view("r1"))
    second.prepare(view("r2"))
    first.clean(view("r1"))
    assert setting.value == "blue"
    second.clean(view("r2"))
    assert setting.value == "red"


def test_two_toggles_that_cannot_both_be_right_are_told() -> None:
    """The round that runs has what it was promised; the other one fails before it changes anything."""
    setting = Setting("red")
    first, second = Toggle(setting, "blue"), Toggle(setting, "green")
    first.prepare(view("r1"))
    with pytest.raises(
        WeightSyncError, match="colour is 'blue' for round r1 and cannot be 'green' beside it"
    ):
        second.prepare(view("r2"))
    assert setting.value == "blue"
    first.clean(view("r1"))
    assert setting.value == "red"
    second.prepare(view("r2"))()
    assert setting.written == ["blue", "red", "green", "red"]


def test_switches_that_are_equal_are_one_setting() -> None:
    """``expandable_segments()`` in two places is torch's one setting."""
    assert Toggle(expandable_segments(), False)._shared is Toggle(expandable_segments(), True)._shared
    assert Toggle(Setting("red"), "x")._shared is not Toggle(Setting("red"), "x")._shared


def test_one_that_cannot_be_changed_is_restored_and_fails_the_round() -> None:
    """It may be half changed. The first error stays the first."""
    setting = Setting("red")
    setting.bad = [OSError("half"), OSError("stuck")]
    result, _ = hand_over(Toggle(setting, "blue"))
    assert isinstance(result.error, OSError)
    assert str(result.error) == "half"
    assert result.error.__notes__ == ["and colour could not be restored: OSError: stuck"]
    assert result.failed_in == "Locked"


def test_what_could_not_be_restored_is_still_owed() -> None:
    """The next round restores what was there before the first one, and not what that left over."""
    setting = Setting("red")
    toggle = Toggle(setting, "blue")
    undo = toggle.prepare(view())
    assert undo is not None
    setting.bad = [OSError("stuck")]
    with pytest.raises(OSError, match="stuck"):
        undo()
    setting.value = "blue"
    again = toggle.prepare(view())
    assert again is not None
    again()
    assert setting.value == "red"


def test_a_setting_that_does_not_take_is_told() -> None:
    """Whatever it says, it is read again."""

    class Stuck(Setting):
        """It stays what it is once it was changed."""

        def write(self, value: str, /) -> None:
            """Once."""
            if not self.written:
                super().write(value)

    result, _ = hand_over(Toggle(Stuck("red"), "blue"))
    assert isinstance(result.error, WeightSyncError)
    assert "colour is 'blue' after it was restored to 'red'" in str(result.error)


def test_what_is_no_setting_is_refused_at_set_up() -> None:
    """With what is needed in its place."""
    with pytest.raises(SetupError, match="something with name, read and write is needed"):
        Toggle("expandable_segments", during=False)  # type: ignore[arg-type]


# -- torch's own ------------------------------------------------------------------------------------------


@pytest.fixture
def restored() -> Iterator[None]:
    """Torch's settings are this process's."""
    switch: Any = expandable_segments()
    before = switch._get()
    yield
    switch._set(before)


@pytest.mark.usefixtures("restored")
def test_torchs_own_setting_is_changed_and_restored() -> None:
    """As torch itself tells it; the other settings stay."""
    switch: Any = AllocatorSwitch("expandable_segments")
    switch._set("max_split_size_mb:128,expandable_segments:True")
    toggle = Toggle(switch, during=False)
    undo = toggle.prepare(view())
    assert undo is not None
    assert switch.read() is False
    assert "max_split_size_mb:128" in switch._get()
    undo()
    assert switch.read() is True
    assert sorted(switch._get().split(",")) == ["expandable_segments:True", "max_split_size_mb:128"]


@pytest.mark.usefixtures("restored")
def test_a_torch_that_tells_nothing_is_believed_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.9 what the environment said and what was written is all there is to know."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    core: Any = vars(torch)["_C"]
    monkeypatch.delattr(core, "_accelerator_getAllocatorSettings", raising=False)
    written: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", written.append)
    monkeypatch.setattr(AllocatorSwitch, "_line", None)
    switch = AllocatorSwitch("expandable_segments")
    assert switch.read() is True
    switch.write(False)
    assert switch.read() is False
    assert AllocatorSwitch("expandable_segments").read() is False, "another switch of the same setting"
    assert written == ["expandable_segments:False"]


@pytest.mark.slow
def test_torch_says_what_the_environment_said() -> None:
    """In a process that was started with the setting."""
    code = "from weightsync.handlers.toggle import *; print(expandable_segments().read())"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip
    assert run.stdout.split() == ["True"]
