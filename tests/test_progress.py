"""A bar moves on by one for each round that succeeded, and for no other."""

import io
import logging
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from weightsync.fsm.calls import Act
from weightsync.fsm.policy import Policy
from weightsync.fsm.record import Record
from weightsync.handlers.progress import Progress
from weightsync.testing.simulation import Fault, Simulation


class Counted:
    """A bar that counts, and is false as long as it stands at nothing, like a tqdm without a total."""

    def __init__(self) -> None:
        self.count = 0

    def __bool__(self) -> bool:
        return False

    def update(self, n: int = 1, /) -> None:
        """Move on."""
        self.count += n


def records(*faults: Fault, **policy: Any) -> tuple[Record, ...]:
    """The records of a round in a simulated world."""
    simulation = Simulation(faults=list(faults), policy=Policy(deadline=4.0, lease=2.0, **policy))
    simulation.run()
    return simulation.round.records()


def count(told: tuple[Record, ...]) -> int:
    """How far a bar moves on by these records."""
    bar = Counted()
    progress = Progress(bar)
    for record in told:
        progress(record)
    return bar.count


def test_a_complete_round_moves_the_bar_by_one() -> None:
    """Once, at its end, however many buckets and engines it has."""
    assert count(records()) == 1


def test_a_partial_round_moves_the_bar_by_one() -> None:
    """The quorum has the version and it is published: that is what was asked."""
    lost = Fault(Act.open, "die", engine="e1")
    assert count(records(lost, on_engine_failure="quarantine", quorum=1)) == 1


@pytest.mark.parametrize("act", [Act.plan, Act.open, Act.broadcast, Act.commit, Act.publish])
def test_a_failed_round_does_not_move_the_bar(act: Act) -> None:
    """Wherever it failed."""
    assert count(records(Fault(act, "raise", bucket=0 if act is Act.broadcast else None))) == 0


@pytest.mark.parametrize(("outcome", "moves"), [("complete", 1), ("partial", 1), ("failed", 0), (None, 0)])
def test_it_is_the_outcome_that_counts(outcome: str | None, moves: int) -> None:
    """Also where nobody named an error; and no other record is taken for a result."""
    result = Record(time=0.0, event="result", table="t", round="r", seq=9, facts={"outcome": outcome})
    assert count((result,)) == moves
    assert count((replace(result, event="call"), replace(result, facts=None))) == 0


def test_a_round_that_published_and_then_met_an_error_does_not_move_the_bar() -> None:
    """It asks for a look, so it counts as little as it does for ``RoundResult.ok``."""
    simulation = Simulation(faults=[Fault(Act.clean, "raise")])
    result = simulation.run()
    assert (result.outcome.name, result.ok) == ("complete", False)
    assert count(simulation.round.records()) == 0


def test_a_real_tqdm_without_a_total_is_used_though_it_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked whether it is there, not whether it is true, and it stays open: it is not ours."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or it leaves a thread for the other tests to count
    with tqdm(total=0, file=io.StringIO()) as bar:
        assert not bar
        progress = Progress(bar)
        for record in records():
            progress(record)
        progress.close()
        assert bar.n == 1
        assert not bar.disable


def test_a_bar_of_its_own_is_made_when_it_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Not before the first success; it is closed at the end, and leaves no thread."""
    before = threading.active_count()
    progress = Progress()
    failed, good = records(Fault(Act.plan)), records()
    for record in failed:
        progress(record)
    assert not capsys.readouterr().err
    for record in [*good, *good]:
        progress(record)
    assert threading.active_count() <= before
    progress.close()
    progress.close()
    assert "weights handed over: 2 rounds" in capsys.readouterr().err


def test_without_tqdm_a_line_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress is told on a machine that lacks the extra."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    progress = Progress()
    for record in [*records(), *records()]:
        progress(record)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "weights handed over (1 so far)",
        "weights handed over (2 so far)",
    ]


CAUSE = "its import raised OSError: libbar.so: no such file"


def test_with_a_broken_tqdm_a_line_is_printed_and_the_cause_told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is installed and cannot be loaded: the observer is not disabled for that."""
    caplog.set_level(logging.WARNING, "weightsync")
    (tmp_path / "tqdm.py").write_text("raise OSError('libbar.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tqdm")
    progress = Progress()
    for record in records():
        progress(record)
    progress.close()
    assert capsys.readouterr().err.splitlines() == ["weights handed over (1 so far)"]
    assert caplog.messages == [f"tqdm is broken, so a line is printed for each round: {CAUSE}"]
