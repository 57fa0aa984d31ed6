"""The main job, in its quick size: a policy learns, and a round that failed shows why and is made up for."""

import json
from pathlib import Path

import pytest

from weightsync.demo.faults import Inject, parse
from weightsync.demo.main import Options, run
from weightsync.fsm.errors import SetupError
from weightsync.fsm.journal import replay

FAULTS = ["engine-kill@5", "bucket-fail@5", "hang@5"]


def demo(
    out: Path, *inject: str, steps: int = 30, threads: bool = True
) -> tuple[int, list[str], list[list[str]]]:
    """Run it; its exit status, what it said, and the paths of its rounds, replayed from the log."""
    said: list[str] = []
    options = Options(steps=steps, out=out, inject=inject, threads=threads, quick=True)
    status = run(options, said.append)
    rounds: dict[str, list[dict[str, object]]] = {}
    for text in (out / "state.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(text)
        rounds.setdefault(record["round"], []).append(record)
    paths = []
    for records in rounds.values():
        states = [step.after.state.name for step in replay(records)]
        paths.append([name for index, name in enumerate(states) if index == 0 or states[index - 1] != name])
    return status, said, paths


def test_a_policy_learns(tmp_path: Path) -> None:
    """Every round is clean, every engine samples with the trainer's very weights, the pictures are there."""
    status, said, paths = demo(tmp_path / "run")
    assert status == 0, said
    assert len(paths) == 31
    assert all("Failed" not in path and path[-1] == "Released" for path in paths)
    assert any("digests compared" in line and line.endswith("62, 0 differ") for line in said)
    assert {"reward.svg", "last-round.svg", "state.jsonl", "ledger.json"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_training_survives_a_fault(fault: str, tmp_path: Path) -> None:
    """The round fails and is released, the log names the culprit, and a later round is clean again."""
    status, said, paths = demo(tmp_path / "run", fault)
    assert status == 0, said
    assert paths[5][-2:] == ["Failed", "Released"]
    assert "Failed" not in paths[-1]
    assert any("engine-1: " in line for line in said)
    assert (tmp_path / "run" / "failed-round.svg").is_file()


def test_without_rounds_the_engines_do_not_learn(tmp_path: Path) -> None:
    """What engines know came by rounds: when they are withheld, the reward stays flat, and status is 1."""
    status, said, paths = demo(tmp_path / "run", "no-sync")
    assert (status, len(paths)) == (1, 1)
    assert any("NOT AS PROMISED" in line and "rounds were withheld" in line for line in said)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_same_on_ray(fault: str | None, tmp_path: Path, ray_cluster: None) -> None:
    """Engines in actors, the collective transport, a killed process for a killed engine."""
    status, said, paths = demo(tmp_path / "run", *([fault] if fault else []), threads=False)
    assert status == 0, said
    assert ["Failed" in path for path in paths].count(True) >= (1 if fault else 0)
    assert "Failed" not in paths[-1]
    assert any("0 differ" in line for line in said)


def test_faults_are_read(tmp_path: Path) -> None:
    """As KIND@STEP; anything else is refused in one line that says what there is."""
    assert parse(["hang@3", "no-sync"], 5) == (Inject("hang", 3),)
    for bad in ("hang", "hang@0", "hang@6", "explode@1", "hang@x"):
        with pytest.raises(SetupError, match=r"--inject"):
            parse([bad], 5)


def test_an_earlier_run_is_left_alone(tmp_path: Path) -> None:
    """A second run into the same place takes a free name beside it."""
    (tmp_path / "run").mkdir()
    said: list[str] = []
    run(Options(steps=2, out=tmp_path / "run", threads=True, quick=True), said.append)
    assert not list((tmp_path / "run").iterdir())
    assert (tmp_path / "run-1" / "state.jsonl").is_file()


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Before anything is started."""
    with pytest.raises(SetupError, match="at least one"):
        run(Options(engines=0, threads=True, out=tmp_path / "run"))
    with pytest.raises(SetupError, match="add --threads"):
        run(Options(transport="memory", out=tmp_path / "run"))
