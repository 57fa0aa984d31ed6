"""The demo with a trainer of two ranks: FSDP spreads the policy, and each system around a round has its work.

Rank 0 is in this process, the other one in a process or an actor of its own. Whatever a run says of itself is
held against what its log has.
"""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from select import select
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weightsync.cli import main
from weightsync.demo import main as demo_main
from weightsync.demo import systems
from weightsync.demo.faults import Inject, parse
from weightsync.demo.grpo import Learner, Settings, Share, derive_seed, rollout
from weightsync.demo.main import Options, run
from weightsync.fsm.errors import RankLost, SetupError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Neither a process nor a process group."""
    yield
    assert not [each for each in multiprocessing.active_children() if each.name.startswith("demo-rank")]
    assert not dist.is_initialized()


class Ran:
    """A run, as it told of itself, and as its log has it."""

    def __init__(self, out: Path, form: str, *inject: str, steps: int, threads: bool = True) -> None:
        self.said: list[str] = []
        asked = Options(
            steps=steps, out=out, inject=inject, threads=threads, quick=True, trainer=form
        )  # fmt: skip
        self.status = run(asked, self.said.append)
        text = (out / "state.jsonl").read_text(encoding="utf-8")
        self.records: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def row(self, name: str) -> str:
        """One line of the table."""
        (found,) = [line for line in self.said if line.startswith(f"  {name}  ")]
        return found.removeprefix(f"  {name}").strip()

    def rewards(self) -> list[float]:
        """Of each step."""
        return [float(line.split()[1]) for line in self.said if re.match(r" +\d+  [01]\.\d{3} ", line)]

    def count(self, event: str, executor: str, **wanted: object) -> int:
        """Such notes of the log."""
        return len(self.notes(event, executor, **wanted))

    def notes(self, event: str, executor: str, **wanted: object) -> list[dict[str, Any]]:
        """Such notes of the log."""
        of = {"event": event, "undo": executor, **wanted}
        return [each for each in self.records if all(each.get(name) == value for name, value in of.items())]

    def told_as_logged(self, rounds: int, published: int) -> None:
        """Each line of the table has the figures of the log, and those that such a run has to have."""
        assert self.row("export plan").startswith(
            f"built 1+1, used again {rounds - 1}+{rounds - 1}, 0 object"
        )
        assert "the same plan on 2 ranks" in self.row("export plan")
        for name in ("prepared", "memory released"):
            count = self.count("barrier", "barrier", trigger=name)
            assert count >= published, self.row("rank barrier")
            assert f"{name} {count} times" in self.row("rank barrier")
        released = self.notes("action", "cache_release")
        ranks = [sum((each.get("rank") or 0) == rank for each in released) for rank in (0, 1)]
        assert min(ranks) >= 2 * published
        seconds, freed = (sum(each.get(name) or 0 for each in released) for name in ("seconds", "bytes"))
        wanted = f"{ranks[0]}+{ranks[1]} actions, {seconds * 1e3:.1f} ms and {freed / 1e6:.1f} MB handed back"
        assert self.row("cache release").startswith(wanted)
        assert seconds > 0
        turned = self.count("action", "automatic_gc", trigger="set")
        assert turned >= 2 * published
        assert self.row("toggle") == f"automatic gc off {turned} times, restored {turned} times"
        calls, heard = re.fullmatch(
            r"(\d+\+\d+) coroutine calls, on at most 1 loop a rank; the service heard (\d+)",
            self.row("loop bridge"),
        ).groups()  # type: ignore[union-attr]
        assert sum(map(int, calls.split("+"))) == int(heard) >= 4 * published
        same = f"all ranks were told the same in {rounds} of {rounds} rounds"
        assert self.row("ledger") == f"versions 0 to {published - 1}; {same}"
        segments, fresh, oldest = re.fullmatch(
            r"(\d+) segments, (\d+) of the published version, the oldest (\d+) behind", self.row("samples")
        ).groups()  # type: ignore[union-attr]
        assert 0 < int(fresh) <= int(segments)
        assert (int(oldest) > 0) == (fresh != segments)
        gone, back = (self.count("action", "residency", trigger=word) for word in ("offload", "onload"))
        assert gone == back >= 2 * (published - 1), self.row("residency")
        assert self.row("residency").startswith(f"the optimizer gone {gone} times and back {back} times, ")
        assert "2 of 2 exact" in self.row("snapshots")
        assert self.row("snapshots").startswith(f"from v{published - 1} to v0 and back")


@pytest.mark.slow
def test_all_systems_in_one_run(tmp_path: Path) -> None:
    """Two ranks hand over to two engines: each system did its part in each round, on each rank.

    And the policy learns step by step what it learns on one rank.
    """
    ran = Ran(tmp_path / "run", "fsdp2", steps=10)
    assert ran.status == 0, ran.said
    assert any(line.endswith("22, 0 differ") for line in ran.said), ran.said
    ran.told_as_logged(rounds=11, published=11)
    assert ran.row("rollback") == "kept the weights of 11 rounds, until 11 were published"
    assert ran.row("back ends").startswith("memory carried the rounds; usable: memory, collective, shm")
    assert ran.count("barrier", "barrier") == 22
    assert not [each for each in multiprocessing.active_children() if each.name.startswith("demo-rank")]
    plain = Ran(tmp_path / "plain", "plain", steps=10)
    assert not any(line.startswith("what the systems") for line in plain.said)
    assert ran.rewards() == pytest.approx(plain.rewards(), abs=0.02)
    assert ran.rewards()[-1] > 1.5 * ran.rewards()[0]


@pytest.mark.slow
def test_faults_of_an_engine_and_of_a_rank(tmp_path: Path) -> None:
    """Each fails its round and no other. Nothing of what the ranks keep, hold or agreed on is lost by it."""
    ran = Ran(tmp_path / "run", "fsdp1", "bucket-fail@2", "rank-fail@4", steps=6)
    assert ran.status == 0, ran.said
    assert any(line.endswith(", 0 differ") for line in ran.said), ran.said
    ran.told_as_logged(rounds=7, published=5)
    assert ran.row("rollback") == "kept the weights of 7 rounds, until 5 were published"
    assert "undone 2 times" in ran.row("rank barrier")
    failed = [line for line in ran.said if "FAILED" in line]
    assert len(failed) == 2, ran.said
    assert "engine-1: RuntimeError: injected" in failed[0]
    assert "rank 1: RuntimeError: injected: rank 1 cannot prepare" in failed[1]
    assert "old old" in failed[1]


def test_a_rank_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    """In one line, at once: a part of the weights is gone. The round is over, and so is every process."""
    with pytest.raises(RankLost, match="and its part of the weights with it at step 2: ") as lost:
        Ran(tmp_path / "run", "fsdp1", "rank-kill@2", steps=2)
    assert "\n" not in str(lost.value)
    records = [json.loads(line) for line in (tmp_path / "run" / "state.jsonl").read_text().splitlines()]
    assert [each["target"] for each in records if each["event"] == "transition"][-2:] == [
        "Failed",
        "Released",
    ]


@pytest.mark.ray
@pytest.mark.slow
def test_the_same_on_ray(tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The other rank and the engines in actors, one of which is killed; no other output."""
    ran = Ran(tmp_path / "run", "fsdp2", "engine-kill@2", steps=6, threads=False)
    assert ran.status == 0, ran.said
    assert any(line.endswith(", 0 differ") for line in ran.said), ran.said
    failed = {each["round"] for each in ran.records if each.get("target") == "Failed"}
    assert failed
    ran.told_as_logged(rounds=7, published=7 - len(failed))
    assert ran.row("back ends").startswith("shm carried the rounds")
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------------------------------- what is judged


def test_a_table_without_looks_says_so() -> None:
    """Nothing is made up for a run that did not come so far."""
    from weightsync.demo.live import History

    empty = systems.Run([], History(), (), (), (), "memory", None)
    assert systems._snapshots(empty) == "none was looked at"
    assert systems._barrier(empty) == "; the longest wait 0.0 ms"


# ---------------------------------------------------------------------------------------- how it is learned


def gradients(learner: Learner, settings: Settings, groups: int) -> list[torch.Tensor]:
    """Of one update on the same samples."""
    from weightsync.demo.policy import Policy

    engine = Policy(settings.shape, 9)
    prompts = learner.prompts(1)[:groups]
    learner.learn([rollout(engine, prompts, 3, derive_seed(1), version=0, engine="a")])
    return [each.grad.clone() for each in learner.model.parameters() if each.grad is not None]


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_the_ranks_gradients_have_the_mean_of_all(groups: int) -> None:
    """Also where the samples cannot be divided evenly: no sample weighs more than another."""
    settings = replace(Settings.quick(), minibatches=1, largest_gradient=1e9)
    alone = gradients(Learner(settings), settings, groups)
    shares = [gradients(Learner(settings, share=Share(rank, 2)), settings, groups) for rank in (0, 1)]
    assert alone
    for whole, first, second in zip(alone, *shares, strict=True):
        assert not torch.equal(first, second)
        torch.testing.assert_close((first + second) / 2, whole, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"trainer": "fsdp3"}, "--trainer fsdp3: there are plain, fsdp1, fsdp2"),
        ({"inject": ["rank-fail@2"]}, "--inject rank-fail@2: the trainer has one rank; add --trainer"),
        ({"inject": ["rank-kill@2"], "trainer": "plain"}, "the trainer has one rank"),
        ({"inject": ["rank-kill@99"], "trainer": "fsdp2"}, "the run has the steps 1 to 60"),
        ({"transport": "memory", "trainer": "fsdp2"}, "add --threads"),
    ],
)
def test_what_does_not_go_together_is_refused(
    asked: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before anything is started or made."""
    monkeypatch.setattr(demo_main, "_crew", None)
    monkeypatch.setattr(demo_main, "_trainer", None)
    with pytest.raises(SetupError, match=complaint):
        run(Options(**{"quick": True, "out": tmp_path / "runs" / "demo", **asked}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("there", "complaint"),
    [("is_initialized", "a process group of its own"), ("is_gloo_available", "no gloo")],
)
def test_ranks_that_could_not_meet_are_refused(
    there: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is a rank of something else, and a torch without the means."""
    with monkeypatch.context() as patch:
        patch.setattr(dist, there, lambda: there == "is_initialized")
        with pytest.raises(SetupError, match=complaint):
            run(Options(quick=True, out=tmp_path / "run", trainer="fsdp2"))
    assert not list(tmp_path.iterdir())


def test_a_fault_of_a_rank_is_read() -> None:
    """As those of engines are; none is drawn, since not every trainer has ranks."""
    assert parse(["rank-fail@3"], 5) == (Inject("rank-fail", 3),)
    assert {fault.kind for fault in parse(["random:1"], 120)} == {"engine-kill", "bucket-fail", "hang"}


def test_the_command_line_hands_it_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And refuses it with status 2."""
    assert main(["demo", "--trainer", "fsdp9", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "weightsync: --trainer fsdp9: there are plain, fsdp1, fsdp2\n"


# ---------------------------------------------------------------------------------------- how it is left


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """A terminal sends it to all of them; the demo ends as it does without ranks, whose last word is none."""
    command = [sys.executable, "-m", "weightsync", "demo", "--threads", "--quick", "--steps", "500"]
    with subprocess.Popen(
        [*command, "--trainer", "fsdp2", "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        assert demo.stderr is not None
        assert any("step  reward" in line for line in demo.stdout)
        os.killpg(demo.pid, signal.SIGINT)
        told = demo.stderr.read()  # until the last process that has it is gone
        demo.stdout.read()
        assert demo.wait() == 130
    assert told == "weightsync: interrupted\n"
    for pid in running(demo.pid):  # of multiprocessing, which looks after what others have left
        with suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as process:
            assert select([process], [], [], 10.0)[0], f"process {pid} is left"
    assert not running(demo.pid)


def running(session: int) -> list[int]:
    """What runs in a session."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = each.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(each.parent.name))
    return found
