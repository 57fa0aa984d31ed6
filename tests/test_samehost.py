"""The benchmark of one host: what it hands over, what it measures, what follows from it, and a run of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import samehost, samehost_runs, samehost_trainer
from benchmarks.samehost_field import CONTESTANTS, GIB, TARGETS, VERL, Contestant, chosen, waves
from benchmarks.samehost_layouts import LAYOUTS, MIB, checksum, renew, tensors
from benchmarks.samehost_meter import Cost, Stopwatch, Unit, forget_peak, memory_of, tree
from benchmarks.samehost_report import Judged, Verdict, figures, judge, row_of, status, table
from benchmarks.samehost_runs import Cell, Course, Run, Sample, Stopped, run_cell
from benchmarks.samehost_shims import function_of, transfer_module
from benchmarks.samehost_side import Absent, Side, Spec

from casekit.levels import eventually

TINY = LAYOUTS["tiny"]


class TestLayouts:
    @pytest.mark.parametrize(
        ("name", "count", "nbytes", "embedding"),
        [("smol", 272, 269_030_016, 56_623_104), ("qwen", 290, 988_065_536, 272_269_312)],
    )
    def test_they_are_those_of_the_checkpoints(
        self, name: str, count: int, nbytes: int, embedding: int
    ) -> None:
        """By the number of tensors and bytes, and the largest tensor."""
        layout = LAYOUTS[name]
        shapes = dict(layout.shapes())
        assert (layout.count, layout.nbytes) == (count, nbytes)
        assert len(shapes) == count
        rows, columns = shapes["model.embed_tokens.weight"]
        assert rows * columns * 2 == embedding

    def test_the_tensors_are_as_large_as_it_says(self) -> None:
        """In bf16, and other bytes for another seed."""
        held = tensors(TINY, seed=1)
        assert sum(each.nbytes for each in held.values()) == TINY.nbytes
        assert {each.dtype for each in held.values()} == {torch.bfloat16}
        assert checksum(held) == checksum(tensors(TINY, seed=1)) != checksum(tensors(TINY, seed=2))

    def test_every_byte_changes_with_every_step(self) -> None:
        """So that whoever missed a piece of a round is found out."""
        held = tensors(TINY, seed=1)
        for step in range(300):
            before = {name: each.clone().view(torch.uint8) for name, each in held.items()}
            renew(held, step)
            assert all((each.view(torch.uint8) != before[name]).all() for name, each in held.items())

    def test_a_checksum_notices_one_bit_and_a_swap(self) -> None:
        """It is of names and bytes."""
        held = tensors(TINY, seed=1)
        whole = checksum(held)
        first, second = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
        assert checksum({**held, first: held[second], second: held[first]}) != whole
        renamed = {name.replace("norm.weight", "norm.scale"): each for name, each in held.items()}
        assert checksum(renamed) != whole
        held[first].view(torch.uint8)[-1, -1] ^= 1
        assert checksum(held) != whole


BURNING = """
import subprocess, sys, time
if sys.argv[1:]:
    below = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=0, stdout=1)
    sys.exit(below.wait())
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
burn(0.6)
print(flush=True)
sys.stdin.readline()
burn(0.2)
print(flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def burning() -> Iterator[subprocess.Popen[str]]:
    """A process below one below this one, that has computed for 0.6 s, and does for 0.2 s when it is told."""
    with subprocess.Popen(
        [sys.executable, "-c", BURNING, BURNING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate("\n", timeout=30)


class TestMeter:
    def test_the_whole_tree_counts_from_the_start_of_the_watch(self, burning: subprocess.Popen[str]) -> None:
        """A grandchild's work during the watch, and not what it did before."""
        assert burning.stdin is not None
        assert burning.stdout is not None
        burning.stdout.readline()
        watch = Stopwatch(burning.pid)
        burning.stdin.write("\n")
        burning.stdin.flush()
        burning.stdout.readline()
        cost = watch.stop()
        assert 0.2 <= cost.cpu < 0.5
        assert cost.wall > 0

    def test_a_tree_has_what_is_below_and_no_others(self, burning: subprocess.Popen[str]) -> None:
        """Seen from the process in the middle and from this one."""
        assert burning.stdout is not None
        burning.stdout.readline()
        assert len(tree(burning.pid)) == 2
        assert tree(burning.pid) < tree(os.getpid())
        assert os.getpid() not in tree(burning.pid)

    def test_a_peak_can_be_forgotten(self) -> None:
        """And what was used since is seen; a share is no more than all."""
        large = torch.ones(64 * MIB, dtype=torch.uint8)
        with_it = memory_of(os.getpid())
        del large
        assert with_it["peak"] >= with_it["now"] > with_it["share"] > 64 * MIB

        def forgotten() -> bool:
            forget_peak([os.getpid()])
            return memory_of(os.getpid())["peak"] < with_it["peak"] - 32 * MIB

        assert eventually(forgotten), "the kernel may give memory back a moment later"

    def test_the_unit_copies_all_of_it(self) -> None:
        """Every tensor, into memory of its own."""
        held = tensors(TINY, seed=1)
        unit = Unit(held)
        renew(held, 1)
        assert unit.copy().cpu > 0
        copies = dict(zip(held, (into for into, _ in unit._pairs), strict=True))
        assert checksum(copies) == checksum(held)


def run_of(name: str, cpu: float, units: tuple[float, ...] = (1.0, 2.0, 1.0), wall: float = 3.0) -> Run:
    """A run with ``cpu`` memcpys in every turn."""
    samples = [Sample(Cost(unit, unit), Cost(cpu * unit, wall * unit)) for unit in units]
    return Run(name, samples, {"trainer": TINY.nbytes, "engine": 2 * TINY.nbytes, "all": 3 * TINY.nbytes})


def verdicts(engines: int, **cpu: float) -> dict[str, Verdict]:
    """What is judged of these figures, by the words."""
    names = {"swap": "publish and swap", "ring": "ring", "large": VERL[0], "small": VERL[1]}
    cell = Cell(TINY, engines, [run_of(names[name], value) for name, value in cpu.items()])
    return {
        each.target.text(engines): each.verdict for each in judge(cell, {each.name for each in CONTESTANTS})
    }


class TestReport:
    def test_ratios_are_taken_turn_by_turn(self) -> None:
        """And then the median: a slow minute, which slows both, changes nothing."""
        slow = run_of("ring", 2.5, units=(2.0, 40.0, 4.0))
        odd = Sample(Cost(1.0, 1.0), Cost(99.0, 99.0))
        row = row_of(replace(slow, samples=[*slow.samples, odd, slow.samples[0]]), TINY.nbytes)
        assert (row.cpu, row.wall, row.unit, row.n) == (2.5, 3.0, 40.0, 5)
        assert row.memory == {"trainer": 1.0, "engine": 2.0, "all": 3.0}

    def test_four_targets_are_judged_with_four_engines(self) -> None:
        """Against verl as it is configured by default, and the limit itself is reached."""
        assert verdicts(4, swap=1.25, ring=5.75, large=34.5, small=1.0) == {
            "publish and swap: at most 1.25 memcpys": Verdict.REACHED,
            "ring: at most 5.75 memcpys": Verdict.REACHED,
            "publish and swap: at least 20x less CPU than verl as it is configured": Verdict.REACHED,
            "ring: at least 6x less CPU than verl as it is configured": Verdict.REACHED,
        }
        assert set(verdicts(4, swap=1.26, ring=5.76, large=25.1, small=41.0).values()) == {Verdict.MISSED}

    @pytest.mark.parametrize(("engines", "limit"), [(1, "2.30"), (2, "3.45"), (8, "10.35")])
    def test_two_are_with_any_other_number(self, engines: int, limit: str) -> None:
        """One copy in and one out for each engine, and fifteen percent."""
        found = verdicts(engines, swap=1.3, ring=2.2)
        assert found == {
            "publish and swap: at most 1.25 memcpys": Verdict.MISSED,
            f"ring: at most {limit} memcpys": Verdict.REACHED,
        }

    def test_without_a_peer_or_a_contestant_a_target_is_open(self) -> None:
        """It is not reached by silence."""
        assert list(verdicts(4, swap=1.0).values()) == [
            Verdict.REACHED, Verdict.OPEN, Verdict.OPEN, Verdict.OPEN
        ]  # fmt: skip
        assert not list(judge(Cell(TINY, 4, []), {"collective"}))

    def test_the_exit_status_says_the_worst(self) -> None:
        """A failure and a miss come before what is open."""
        judged = {each: Judged("tiny", 1, TARGETS[0], 1.0, each) for each in Verdict}
        reached, missed, open_ = judged.values()
        assert status([], []) == status([reached], []) == 0
        assert status([reached, missed, open_], []) == status([reached], ["ring: it broke"]) == 1
        assert status([reached, open_], []) == 2

    def test_the_table_has_a_row_for_each_contestant_and_a_dash_for_who_is_missing(self) -> None:
        """CPU, wall and memory; and how far the unit wandered."""
        cells = [Cell(TINY, 1, [run_of("ring", 2.0)]), Cell(TINY, 2, [run_of(VERL[0], 22.0)])]
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(cells).splitlines()[2:]]
        rows = {line[0]: line[1:] for line in lines}
        assert rows["torch copy_: slowest / fastest"] == ["2.00", "2.00", "", "", "", "", ""]
        assert rows["ring"] == ["2.00", "-", "3.00", "-", "-", "-", "-"]
        assert rows[VERL[0]] == ["-", "22.00", "-", "3.00", "1.00", "2.00", "3.00"]
        assert len({len(line) for line in table(cells).splitlines()[2:]}) == 1

    def test_every_figure_is_a_ratio(self) -> None:
        """No seconds leave the benchmark."""
        found = figures([Cell(TINY, 2, [run_of("ring", 2.0)])])
        assert [(each.value, each.unit, each.n) for each in found] == [
            (2.0, "memcpys", 3), (3.0, "ratio", 3),
            (1.0, "models", 3), (2.0, "models", 3), (3.0, "models", 3),
        ]  # fmt: skip
        assert found[0].figure == "tiny, 2 engines, ring: CPU"


class TestField:
    def test_words_choose_contestants(self) -> None:
        """Without a word it is everybody, and each is called otherwise."""
        assert chosen([]) == list(CONTESTANTS)
        assert {each.side for each in chosen(["verl", "gloo"])} == {"verl", "gloo"}
        assert len({each.name for each in CONTESTANTS}) == len(CONTESTANTS)

    def test_targets_are_of_contestants_without_verification(self) -> None:
        """And their peers are in the field."""
        by_name = {each.name: each for each in CONTESTANTS}
        assert {by_name[each.name].verify for each in TARGETS} == {"off"}
        assert {by_name[peer].side for each in TARGETS for peer in each.peers} == {"verl"}

    def test_a_wave_takes_what_fits(self) -> None:
        """In order; who does not fit even alone is left out."""
        names = [Contestant(name, "gloo") for name in "abcd"]
        need = dict(zip(names, (5.0, 4.0, 11.0, 2.0), strict=True))
        groups, left = waves(need, 10.0)
        assert ([[each.name for each in group] for group in groups], left) == (
            [["a", "b"], ["d"]], [names[2]]
        )  # fmt: skip

    def test_more_engines_need_more_memory(self) -> None:
        """A model and an interpreter each, at least."""
        for each in CONTESTANTS:
            assert each.need(GIB, 2) - each.need(GIB, 1) >= 0.3 * GIB


class TestShims:
    def test_one_function_of_a_file_is_compiled_and_the_rest_is_not_run(self, tmp_path: Path) -> None:
        """Whatever the file imports need not be there."""
        path = tmp_path / "utils.py"
        path.write_text("import no_such_package\ndef double(n):\n    return 2 * n\n")
        assert function_of(path, "double")(4) == 8
        with pytest.raises(Absent, match="has no function triple"):
            function_of(path, "triple")

    def test_another_verl_is_not_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Figures are of the version that is named."""
        monkeypatch.setattr(metadata, "version", lambda name: "0.1.0")
        with pytest.raises(Absent, match=r"verl 0\.1\.0 is installed"):
            transfer_module()


class FakeSide:
    """A side whose engines have what it is told."""

    def __init__(self, model: dict[str, torch.Tensor], engines: list[dict[str, torch.Tensor]]) -> None:
        self.model, self.held = model, engines
        self.last = len(engines)

    def hand_over(self, step: int) -> None:
        """Copy."""
        for engine in self.held[: self.last]:
            for name, each in self.model.items():
                engine[name].copy_(each)

    def engines(self) -> list[tuple[int, dict[str, int]]]:
        """No processes."""
        return []

    def checksums(self) -> list[int]:
        """As they are."""
        return [checksum(each) for each in self.held]

    def close(self) -> None:
        """Nothing."""


SPEC = Spec(
    "x", "gloo", "", "off", aliases=False, stages=False, ray=False, bucket=0, layout="tiny", engines=2
)


def test_a_round_is_good_if_every_engine_has_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that got nothing this time is found out."""
    sides: list[FakeSide] = []

    def side_of(spec: Spec, model: dict[str, torch.Tensor]) -> Side:
        sides.append(FakeSide(model, [tensors(TINY, seed) for seed in (5, 6)]))
        return sides[0]

    monkeypatch.setattr(samehost_trainer, "side_of", side_of)
    trainer = samehost_trainer.Trainer(SPEC)
    assert trainer.round(1)["good"]
    sides[0].last = 1
    assert not trainer.round(2)["good"]


class FakeEntrant:
    """A contestant that does what its name says."""

    turns: list[tuple[str, int]]
    ended: list[str]

    def __init__(self, contestant: Contestant, layout: str, engines: int) -> None:
        self.name = contestant.name

    def ready(self) -> None:
        """At once."""
        if self.name == "absent":
            raise Stopped("no such transport", absent=True)

    def turn(self, step: int) -> Cost:
        """Always the same."""
        self.turns.append((self.name, step))
        if self.name == "failing" and step == 2:
            raise Stopped("wrong bytes")
        return Cost(2.0, 2.0)

    def memory(self) -> dict[str, int]:
        """Always the same."""
        return {"trainer": 1, "engine": 1, "all": 2}

    def ask(self, *order: object) -> dict[str, Any]:
        """To forget its peak."""
        return {}

    def end(self) -> None:
        """Note it."""
        self.ended.append(self.name)


def test_who_is_absent_or_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns, in an order that moves on; warm-up does not count; everybody is ended."""
    FakeEntrant.turns, FakeEntrant.ended = [], []
    monkeypatch.setattr(samehost_runs, "Entrant", FakeEntrant)
    told: list[str] = []
    names = ("absent", "good", "failing", "other")
    course = Course([Contestant(name, "gloo") for name in names], rounds=3, warm_up=1, tell=told.append)
    cell = run_cell(course, TINY, 2)
    assert [(run.name, len(run.samples)) for run in cell.runs] == [("good", 3), ("other", 3)]
    assert course.absent == {"absent": "no such transport"}
    assert course.failed == ["tiny, N = 2, failing: wrong bytes"]
    assert told == ["skipped: absent: no such transport", "FAILED: tiny, N = 2, failing: wrong bytes"]
    assert FakeEntrant.turns == [
        ("good", 0), ("failing", 0), ("other", 0),
        ("failing", 1), ("other", 1), ("good", 1),
        ("other", 2), ("good", 2), ("failing", 2),
        ("other", 3), ("good", 3),
    ]  # fmt: skip
    assert sorted(FakeEntrant.ended) == sorted(names)
    run_cell(course, TINY, 4)
    assert "absent" not in FakeEntrant.ended[len(names) :]


@pytest.mark.slow
def test_a_small_run_measures_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and gloo, one engine each: the table, the figures, and the report in a folder."""
    words = ["--layouts", "tiny", "--engines", "1", "--rounds", "1", "--warm-up", "1"]
    assert samehost.main([*words, "--only", "gloo", "collective", "--write", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| collective " in printed
    assert "| gloo, tensor by tensor " in printed
    told = json.loads((tmp_path / "samehost.json").read_text())
    found = {each["figure"]: each["value"] for each in told["figures"]}
    assert found["tiny, 1 engines, collective: CPU"] > 0
    assert found["tiny, 1 engines, gloo, tensor by tensor: wall"] > 0
    assert (tmp_path / "samehost.md").read_text() in printed
