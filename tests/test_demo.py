"""The main job, in its quick size: a policy learns, and a round that failed shows why and is made up for."""

import errno
import json
import os
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.cli import main
from weightsync.demo import main as demo_main
from weightsync.demo import workers
from weightsync.demo.faults import Inject, Schedule, parse
from weightsync.demo.grpo import Settings
from weightsync.demo.hush import aside
from weightsync.demo.live import History, Lines
from weightsync.demo.main import Options, run
from weightsync.demo.options import checked
from weightsync.demo.outcome import look_lines, verdict
from weightsync.demo.place import mark_latest
from weightsync.fsm.errors import EngineError, SetupError
from weightsync.fsm.journal import replay
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition

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


def survived(said: list[str], paths: list[list[str]], steps: int) -> None:
    """Each drawn fault failed one round, whose line names the engine; all the others are clean."""
    drawn = next(line for line in said if line.startswith("drawn: ")).removeprefix("drawn: ").split(", ")
    assert len(drawn) == 3
    assert {fault.partition("@")[0] for fault in drawn} == {"engine-kill", "bucket-fail", "hang"}
    blamed = [line.split(":")[0].strip() for text in said for line in text.splitlines()[1:]]
    assert sorted(set(blamed)) == sorted({fault.split()[-1] for fault in drawn})
    failed = [number for number, path in enumerate(paths) if "Failed" in path]
    assert len(failed) >= len(drawn), said
    assert len(paths) == steps + 1
    assert all("Failed" not in path for path in paths[-steps // 10 :])


@pytest.mark.slow
def test_training_survives_drawn_faults(tmp_path: Path) -> None:
    """The reward still rises, the log names the culprits, and later rounds are clean."""
    status, said, paths = demo(tmp_path / "run", "random:1", steps=36)
    assert status == 0, said
    survived(said, paths, 36)


@pytest.mark.ray
@pytest.mark.slow
def test_drawn_faults_on_ray(tmp_path: Path, ray_cluster: None) -> None:
    """The same with processes that are really killed."""
    status, said, paths = demo(tmp_path / "run", "random:3", steps=36, threads=False)
    assert status == 0, said
    survived(said, paths, 36)


def test_faults_are_drawn_from_a_seed() -> None:
    """The same seed, the same faults; every kind and every engine; and never too late to be made up for."""
    for seed in range(50):
        drawn = parse([f"random:{seed}"], 120, 3)
        assert drawn == parse([f"random:{seed}"], 120, 3)
        assert {fault.kind for fault in drawn} == {"engine-kill", "bucket-fail", "hang"}
        assert len({fault.step for fault in drawn}) == len(drawn) == 12
        assert all(1 < fault.step <= 90 and 0 <= fault.engine < 3 for fault in drawn)
    assert parse(["random:1"], 120, 3) != parse(["random:2"], 120, 3)
    for steps, engines, why in ((10, 2, "10 steps are too few"), (120, 1, "--engines 2")):
        with pytest.raises(SetupError, match=why):
            parse(["random:1"], steps, engines)
    waiting = Schedule(parse(["random:1"], 120, 2), 120)
    first = parse(["random:1"], 120, 2)[0]
    assert waiting.due(first.step, whole=False) == []
    assert waiting.due(first.step + 1, whole=True) == [first]
    assert waiting.due(119, whole=True) == []
    assert len(waiting.missed()) == 11


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("faults", ["", "bucket-fail@5", "hang@5", "engine-kill@3 bucket-fail@4"])
def test_the_same_on_ray(
    faults: str, tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines in actors, a killed process for a killed engine, a fault while it restarts; no other output."""
    status, said, paths = demo(tmp_path / "run", *faults.split(), threads=False)
    assert status == 0, said
    assert ["Failed" in path for path in paths].count(True) >= (1 if faults else 0)
    assert "Failed" not in paths[-1]
    assert any("0 differ" in line for line in said)
    assert capsys.readouterr() == ("", "")


def test_faults_are_read(tmp_path: Path) -> None:
    """As KIND@STEP; anything else is refused in one line that says what there is."""
    assert parse(["hang@3", "no-sync"], 5) == (Inject("hang", 3),)
    for bad in ("hang", "hang@0", "hang@6", "explode@1", "hang@x", "random:", "random:x"):
        with pytest.raises(SetupError, match=r"--inject"):
            parse([bad], 5)


def test_an_earlier_run_is_left_alone(tmp_path: Path) -> None:
    """A second run into the same place takes a free name beside it."""
    (tmp_path / "run").mkdir()
    said: list[str] = []
    run(Options(steps=2, out=tmp_path / "run", threads=True, quick=True), said.append)
    assert not list((tmp_path / "run").iterdir())
    assert (tmp_path / "run-1" / "state.jsonl").is_file()


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"engines": 0}, "at least one"),
        ({"engines": 17}, "at most 16, as many as a step has prompts"),
        ({"engines": 25, "quick": False}, "at most 24, as many as a step has prompts"),
        ({"steps": 0}, "from 1 to 10000 steps"),
        ({"steps": 10_001}, "from 1 to 10000 steps"),
        ({"transport": "pigeon"}, "--transport pigeon: there are auto, memory"),
        ({"transport": "memory"}, "add --threads"),
        ({"transport": "objects", "threads": True}, "leave out --threads"),
        pytest.param(
            {"transport": "cuda_ipc"},
            "needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        ({"inject": ["rain@1"]}, "--inject rain@1"),
        ({"inject": ["hang@61"]}, "the steps 1 to 60"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    asked: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before anything is started or made."""
    monkeypatch.setattr(demo_main, "_crew", None)  # whoever starts engines now, fails otherwise
    options = Options(**{"quick": True, "out": tmp_path / "runs" / "demo", **asked})
    with pytest.raises(SetupError, match=complaint):
        run(options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "complaint"),
    [
        ("file", "is there and is no folder"),
        ("gone", "is there and is no folder"),
        ("file/runs/demo", "Not a directory"),
        ("shut/runs/demo", "cannot be made: "),
        ("new/runs/" + "x" * 300, "File name too long"),
        (".", "name a folder for this run alone"),
        ("a/..", "name a folder for this run alone"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    out: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a link to nothing, a folder that takes no other: known before Ray starts; nothing is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_main, "_crew", None)
    Path("file").touch()
    Path("gone").symlink_to("nowhere")
    Path("shut").symlink_to("/proc")  # takes no folder, not even from root
    with pytest.raises(SetupError, match=complaint) as refused:
        run(Options(out=Path(out)))
    assert str(refused.value).startswith(f"--out {Path(out)}: ")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "gone", "shut"}


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the operating system says it: root may write into any folder, but not on such a disk."""

    def mkdir(self: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(SetupError, match="cannot be made: Read-only file system"):
        run(Options(out=tmp_path / "run"))


def test_engines_that_do_not_start_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the run's own nor those that were made for it; what was there stays."""

    def crew(*_: object) -> None:
        assert (tmp_path / "old" / "new" / "run").is_dir()
        raise SetupError("Ray does not start here")

    (tmp_path / "old").mkdir()
    monkeypatch.setattr(demo_main, "_crew", crew)
    with pytest.raises(SetupError, match="does not start"):
        run(Options(out=tmp_path / "old" / "new" / "run"))
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


# ------------------------------------------------------------------------------------------- how it is judged


def history(*rewards: float, ok: bool = True, mismatches: Sequence[str] = ()) -> History:
    """What a run may have come to."""
    last = SimpleNamespace(ok=ok, path=("Idle",), round="r1")
    return History(list(rewards), [(len(rewards), last)], 0, list(mismatches))  # type: ignore[list-item]


RISING = [0.1] * 20 + [0.9] * 10


@pytest.mark.parametrize(
    ("happened", "no_sync", "status", "said"),
    [
        (history(*RISING), False, 0, "learned: the reward rose 9.0 times"),
        (history(*[0.1] * 30), False, 1, "NOT AS PROMISED: the reward went from 0.100 to 0.100"),
        (history(*[0.1] * 29), False, 0, "too short to judge whether the reward rose: 29 steps, of 30"),
        (history(0.1), False, 0, "too short to judge"),
        (history(0.1, ok=False), False, 1, "NOT AS PROMISED: the last round was not clean"),
        (history(0.1, mismatches=["other weights"]), False, 1, "NOT AS PROMISED: other weights"),
        (history(*RISING, mismatches=["other weights"]), False, 1, "NOT AS PROMISED: other weights"),
        (history(0.1), True, 1, "NOT AS PROMISED: rounds were withheld"),
        (history(*RISING), True, 1, "NOT AS PROMISED: rounds were withheld"),
    ],
)
def test_a_run_is_judged_by_what_it_can_show(
    happened: History, no_sync: bool, status: int, said: str
) -> None:
    """The reward only where there were steps enough; the weights, the last round and ``no-sync`` always."""
    lines: list[str] = []
    assert verdict(happened, enough=30, no_sync=no_sync, say=lines.append) == status
    assert any(said in line for line in lines)
    assert ("NOT AS PROMISED" in "".join(lines)) is bool(status)


@pytest.mark.parametrize("inject", [(), ("bucket-fail@3",)])
def test_a_short_run_is_not_blamed(inject: tuple[str, ...], tmp_path: Path) -> None:
    """It ends well, and says that it was too short; a failed round that was made up for is no fault of it."""
    status, said, _ = demo(tmp_path / "run", *inject, steps=5)
    assert status == 0, said
    assert any("too short to judge whether the reward rose: 5 steps, of 30" in line for line in said)


def test_a_short_run_whose_last_round_failed_is_blamed(tmp_path: Path) -> None:
    """However few its steps were."""
    status, said, _ = demo(tmp_path / "run", "bucket-fail@3", steps=3)
    assert status == 1
    assert any("the last round was not clean" in line for line in said)


def test_an_engine_that_is_down_is_said_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be armed, gives no samples for a step, or no digest: none of this ends in a traceback."""
    sample, digest = workers._LocalWorker.sample, workers._LocalWorker.digest
    calls: Counter[str] = Counter()

    def down(self: Any, what: str, number: int) -> bool:
        calls[what] += self.name == "engine-1"
        return bool(self.name == "engine-1" and calls[what] == number)

    def sampled(self: Any, *arguments: Any) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(ConnectionError("the engine\nis gone"))
        return failed if down(self, "sample", 2) else sample(self, *arguments)

    def digested(self: Any) -> str:
        if down(self, "digest", 2):
            raise EngineError("engine-1 does not answer")
        return digest(self)

    def armed(self: Any, kind: str) -> None:
        raise EngineError("engine-1 does not answer: it is restarting")

    monkeypatch.setattr(workers._LocalWorker, "sample", sampled)
    monkeypatch.setattr(workers._LocalWorker, "digest", digested)
    monkeypatch.setattr(workers._LocalWorker, "arm", armed)
    status, said, paths = demo(tmp_path / "run", "hang@3", steps=4)
    assert (status, len(paths)) == (1, 5)
    told = "\n".join(said)
    assert "engine-1 gave no samples: ConnectionError: the engine\n" in told
    assert "hang@3 is left out: engine-1 does not answer: it is restarting" in told
    assert "NOT AS PROMISED: step 1: engine engine-1 samples with what nobody knows" in told


# -------------------------------------------------------------------------------------- what it leaves behind


def test_the_newest_run_is_found_as_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run takes a name of its own, and the link; the commands that are printed show that run."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo-1"):
        said: list[str] = []
        run(Options(steps=1, threads=True, quick=True), said.append)
        assert Path("runs/latest").readlink() == Path(name)
        assert any(f"log: runs/{name}/state.jsonl (also as runs/latest)" in line for line in said)
        commands = [shlex.split(line.partition("weightsync ")[2]) for line in said if "weightsync " in line]
        assert [command[0] for command in commands] == ["log", "log", "diagram"]
        assert all(f"runs/{name}/state.jsonl" in command for command in commands)
        assert all(main(command) == 0 for command in commands)
        assert Path(f"runs/{name}/path.svg").is_file()
    assert sorted(path.name for path in Path("runs").iterdir()) == ["demo", "demo-1", "latest"]


@pytest.mark.parametrize(
    ("interpreter", "path", "program"),
    [
        (".venv/bin/python", "", ".venv/bin/weightsync"),
        (".venv/bin/python", ".venv/bin", "weightsync"),
        (".venv/bin/python", "other", ".venv/bin/weightsync"),
        ("bare/my python", "", "'{tmp}/bare/my python' -m weightsync"),
    ],
)
def test_the_commands_call_the_weightsync_that_ran(
    interpreter: str, path: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name where a shell finds that very one, by its place where not; as a module without a script."""
    monkeypatch.chdir(tmp_path)
    for folder in (".venv/bin", "other"):
        script = tmp_path / folder / "weightsync"
        script.parent.mkdir(parents=True)
        script.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / interpreter))
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    first, *_ = look_lines(Path("run"), history(0.1))[1:]
    assert first == f"  {program.format(tmp=tmp_path)} log run/state.jsonl"


def test_latest_touches_nothing_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has that name stays; no link is made beside a folder that was chosen, or where none can be."""
    monkeypatch.chdir(tmp_path)
    Path("elsewhere/run").mkdir(parents=True)
    assert mark_latest(Path("elsewhere/run")) is None
    assert [path.name for path in Path("elsewhere").iterdir()] == ["run"]
    Path("runs/latest").mkdir(parents=True)
    assert mark_latest(Path("runs/demo")) is None
    Path("runs/latest").rmdir()
    Path("runs/latest").write_text("notes")
    assert mark_latest(Path("runs/demo")) is None
    assert Path("runs/latest").read_text() == "notes"
    Path("runs/latest").unlink()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert mark_latest(Path("runs/demo")) is None
    assert not list(Path("runs").iterdir())


def test_latest_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no instant is there no link: whoever looks sees the old run or the new one."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    mark_latest(Path("runs/demo"))
    seen: list[Path] = []
    symlink_to = Path.symlink_to

    def watched(self: Path, *arguments: Any, **options: Any) -> None:
        seen.append(Path("runs/latest").readlink())
        symlink_to(self, *arguments, **options)
        seen.append(Path("runs/latest").readlink())

    monkeypatch.setattr(Path, "symlink_to", watched)
    mark_latest(Path("runs/demo-1"))
    assert (seen, Path("runs/latest").readlink()) == ([Path("demo")] * 2, Path("demo-1"))


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_pictures_are_files_like_any_other(umask: int, mode: int, tmp_path: Path) -> None:
    """Their modes follow the umask; the log and the ledger are their owner's alone."""
    before = os.umask(umask)
    try:
        run(Options(steps=1, out=tmp_path / "run", threads=True, quick=True), lambda _: None)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()}
    assert modes == {
        "reward.svg": mode, "last-round.svg": mode,
        "state.jsonl": 0o600, "ledger.json": 0o600, "ledger.json.lock": 0o600,
    }  # fmt: skip


def test_what_others_print_is_kept_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a file that is there only if they did; errors are left alone, only Ray's warnings are dropped."""
    with aside(tmp_path / "quiet.log"):
        pass
    assert not list(tmp_path.iterdir())
    warnings.simplefilter("error")  # pytest puts its own filters back
    with aside(tmp_path / "ray.log"):
        sys.stdout.write("\x1b[33m(raylet)\x1b[0m A worker died\n")
        sys.stderr.write("an error\n")
        warnings.warn_explicit("a new default", FutureWarning, "worker.py", 1, module="ray._private.worker")
        with pytest.raises(FutureWarning, match="of ours"):
            warnings.warn_explicit("of ours", FutureWarning, "x.py", 1, module="rayon")
    assert (tmp_path / "ray.log").read_text() == "(raylet) A worker died\n"
    assert capsys.readouterr() == ("", "an error\n")
    with aside(tmp_path / "missing" / "ray.log"):
        sys.stdout.write("nobody fails by it\n")
        sys.stdout.flush()
    with aside(Path("/dev/full")):
        sys.stdout.write("nor by a full disk\n")
        sys.stdout.flush()


def test_the_demos_own_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are not kept aside."""
    assert run(Options(steps=1, out=tmp_path / "run", threads=True, quick=True)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("starting 2 engines")
    assert "\n   1  0." in printed
    assert not (tmp_path / "run" / "ray.log").exists()


# ----------------------------------------------------------------------------------------------- how it looks


def a_round(engines: int, *path: str) -> RoundResult:
    """A round as far as its line needs it."""
    rows = [SimpleNamespace(disposition=Disposition.serving_new)] * (engines - 1)
    rows.append(SimpleNamespace(disposition=Disposition.quarantined))
    return SimpleNamespace(  # type: ignore[return-value]
        path=path,
        version=7,
        engines=rows,
        pause_seconds=0.0123,
        seconds={"Idle": 0.05},
        error=None,
        culprit=None,
    )


@pytest.mark.parametrize("engines", [1, 2, 3, 24])
@pytest.mark.parametrize("width", [None, 120, 80, 70])
def test_the_lines_fit_and_stand_in_columns(engines: int, width: int | None) -> None:
    """Heading and steps begin their paths at one place; where there is little room, in initials."""
    lines = Lines(engines, width)
    good = lines.step(
        3, 0.5, a_round(engines, "Idle", "Locked", "Broadcasting", "Awaiting", "Cleaning", "Released")
    )
    bad = lines.step(
        4, 1.0, a_round(engines, "Idle", "Locked", "Broadcasting", "Awaiting", "Failed", "Released")
    )
    assert good.index(" I") == bad.index(" I") == lines.header().index(" path")
    assert ("Idle>Lock" in good) is (width is None or width >= 120)
    assert ("FAILED" in bad, "F!" in bad) in {(True, False), (False, True)}
    assert max(len(line) for line in (lines.header(), good, bad)) <= (width or 120)
    assert "OUT" in bad


def test_help_tells_the_demos_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers in the help are those that the demo uses; the help itself loads nothing to know them."""
    assert main(["demo", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    full, quick = Settings(), Settings.quick()
    assert f"how many training steps ({full.steps}, with --quick {quick.steps})" in told
    assert (
        f"how many engines ({Options().engines}), at most {full.groups}, with --quick {quick.groups}" in told
    )
    assert f"({Options().out})" in told
    assert checked(Options(quick=True)) == quick
    assert checked(Options()) == full
    assert (quick.enough <= quick.steps, full.enough <= full.steps) == (True, True)
