"""The command line: what it answers, how it ends, and that it never ends in a traceback."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weightsync
from weightsync.cli import check, doctor, main
from weightsync.cli import log as log_command
from weightsync.diagrams import checked_in
from weightsync.fsm.calls import Act
from weightsync.fsm.search import Exploration
from weightsync.handlers.log import StateLog
from weightsync.testing.simulation import Fault, Simulation

ROOT = Path(__file__).resolve().parent.parent
Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the terminal that the tests run in shows in their output."""
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of three rounds, r1 to r3, of which the second one failed."""
    path = tmp_path_factory.mktemp("runs") / "state.jsonl"
    earlier = None
    with StateLog(path) as log:
        for faults in ([], [Fault(Act.broadcast, "raise", bucket=1)], []):
            simulation = Simulation(faults=faults, earlier=earlier)
            simulation.run()
            simulation.settle()
            earlier = simulation
            for record in simulation.round.records():
                log(record)
    return path


@pytest.fixture
def spoilt(state: Path, tmp_path: Path) -> Path:
    """The same log with a line of garbage and half a line at its end."""
    path = tmp_path / "spoilt.jsonl"
    first, *rest = state.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, b"garbage\n", *rest, rest[0][:40]]))
    return path


def command(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """The command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **options.pop("env", {})}
    environment.pop("PYTHONUNBUFFERED", None)  # what is buffered fails later, and has to fail as well
    argv = [sys.executable, "-m", "weightsync", *map(str, arguments)]
    return subprocess.Popen(argv, env=environment, **options)


# ------------------------------------------------------------------------------------- help, and its absence


def test_help_begins_with_the_usage_and_lists_every_command(capsys: Printed) -> None:
    """And asking for it is no error."""
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: weightsync ")
    for name in ("demo", "log", "diagram", "check", "doctor"):
        assert re.search(rf"^    {name} ", printed, re.MULTILINE)
        assert main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: weightsync {name} ")


def test_the_version_is_that_of_the_library(capsys: Printed) -> None:
    """On standard output, for scripts."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"weightsync {weightsync.__version__}\n"


def test_without_an_argument_list_it_takes_that_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """As the installed command calls it."""
    monkeypatch.setattr(sys, "argv", ["weightsync", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("weightsync ")


READING = """
import sys
from weightsync.cli import main
status = [main(["log", sys.argv[1]]), main(["diagram"]), main(["doctor"])]
print(*sorted({"ray", "structlog", "tqdm", "torch", "xxhash"} & sys.modules.keys()), file=sys.stderr)
"""


def test_reading_logs_and_drawing_load_nothing_costly(state: Path) -> None:
    """Neither does the doctor, who only looks whether it is there."""
    done = subprocess.run(
        [sys.executable, "-c", READING, state],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == b"\n"


# fmt: off
BAD: dict[str, tuple[str, str]] = {
    "no command":          ("", "the following arguments are required: COMMAND (see: weightsync --help)"),
    "no such command":     ("paint", "argument COMMAND: invalid choice: 'paint' (choose from"),
    "no such option":      ("log x --nope", "unrecognized arguments: --nope"),
    "a log not there":     ("log {tmp}/missing", "{tmp}/missing cannot be read: No such file or directory"),
    "a folder":            ("log {tmp}", "{tmp} cannot be read: Is a directory"),
    "a round not there":   ("log {state} --round q", "has no round 'q'; it has r1, r2, r3"),
    "a round not clear":   ("log {state} --round r", "'r' is the beginning of 3 rounds: r1, r2, r3"),
    "no width":            ("log {state} --width 7", "argument --width: '7': a whole number from 20 is"),
    "no number":           ("demo --engines two", "argument --engines: 'two': a whole number from 1 is"),
    "no format":           ("diagram --format oil", "no such format: 'oil'"),
    "no ending":           ("diagram --output {tmp}/picture", "'picture' names no format"),
    "another ending":      ("diagram --output {tmp}/a.svg --format dot", "'a.svg' is a name for svg"),
    "a folder in a file":  ("diagram --output {state}/x/a.svg", "{state}/x: Not a directory"),
    "no place":            ("diagram --output /proc/a.svg", "weightsync: /proc/a.svg: "),
    "a folder as a file":  ("diagram --output {tmp}/new/.svg/a --format svg", "'a' names no format"),
    "no such transport":   ("demo --transport pigeon", "--transport pigeon: there are auto, memory"),
    "too many engines":    ("demo --engines 25", "--engines 25: at most 24"),
    "a file for a folder": ("demo --out {state}", "--out {state}: is there and is no folder"),
    "a round of no log":   ("diagram --round r1", "--round needs the log it is in: --trace FILE"),
    "another machine":     ("diagram --table engine --trace {state}", "has no transition of round r3"),
    "two things at once":  ("diagram --write a --check", "--check: not allowed with argument --write"),
    "a game too few":      ("check --seeds 0", "argument --seeds: '0': a whole number from 1 is needed"),
    "games of nothing":    ("check --seed 4", "--seed 4 is the first of some games: say how many"),
    "games and depth":     ("check --seeds 3 --deep", "--seeds plays games instead of exploring: leave"),
    "a log and games":     ("check {state} --seeds 3", "FILE is linted, and --seeds is for an exploration"),
    "a log not there, 2":  ("check {tmp}/missing", "No such file or directory"),
    "a fault not known":   ("demo --threads --inject rain", "--inject rain: there are"),
}
# fmt: on


@pytest.mark.parametrize(("arguments", "complaint"), BAD.values(), ids=BAD)
def test_a_question_that_makes_no_sense_gets_one_line(
    arguments: str, complaint: str, state: Path, tmp_path: Path, capsys: Printed
) -> None:
    """On standard error, with exit status 2, and nothing else."""
    names = {"state": state, "tmp": tmp_path}
    assert main(arguments.format(**names).split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("weightsync: ")
    assert complaint.format(**names) in line
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    """A command that needs a package says which; a part of the library that is missing is another matter."""

    def missing(name: str) -> Any:
        def run(arguments: object) -> int:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return run

    monkeypatch.setattr(log_command, "run", missing("torch.nn"))
    assert main(["log", "x"]) == 2
    assert (
        capsys.readouterr().err == "weightsync: torch.nn is not installed; `weightsync doctor` says what is\n"
    )
    monkeypatch.setattr(log_command, "run", missing("weightsync.lost"))
    with pytest.raises(ModuleNotFoundError):
        main(["log", "x"])


def test_ctrl_c_is_said_and_ends_with_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """130, as a shell expects it."""

    def run(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(log_command, "run", run)
    assert main(["log", "x"]) == 130
    assert capsys.readouterr().err == "weightsync: interrupted\n"


INTERRUPTED = """
import signal, sys
from weightsync.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been started with the signal ignored
sys.exit(main(["log", sys.argv[1]]))
"""


def test_a_real_interrupt_ends_the_process_without_a_traceback(tmp_path: Path) -> None:
    """Sent to a process that waits for the rest of a log."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, fifo],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            with fifo.open("wb"):  # opens when the other side does
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, b"", b"weightsync: interrupted\n")


# ------------------------------------------------------------------------------------------------------- log


def test_log_shows_a_table_and_a_summary(state: Path, capsys: Printed) -> None:
    """One line for each round, then all of them together."""
    assert main(["log", str(state)]) == 0
    heading, *rounds, gap, summary = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "round", "step", "version", "epoch", "path", "outcome", "seconds", "pause", "engines", "error",
    ]  # fmt: skip
    assert [line.split()[0] for line in rounds] == ["r1", "r2", "r3"]
    assert "Idle>Locked>Broadcasting>Failed!>Released" in rounds[1]
    assert rounds[1].endswith("Injected: injected into bucket 1")
    assert gap == ""
    assert summary.startswith("3 rounds: 2 complete, 1 failed; ")


def test_log_names_the_lines_it_could_not_read(spoilt: Path, capsys: Printed) -> None:
    """At the end; the rest is shown, and that is a success."""
    assert main(["log", str(spoilt)]) == 0
    printed = capsys.readouterr().out
    total = len(spoilt.read_bytes().splitlines())
    assert printed.endswith(
        f"2 of {total} lines could not be read:\n  line 2: not JSON: Expecting value at place 1\n"
        f"  line {total}: cut off after 40 bytes, at the end of the file\n"
    )
    assert "\nr2 " in printed


def test_log_can_show_only_what_failed(state: Path, capsys: Printed) -> None:
    """Also where nothing did."""
    assert main(["log", str(state), "--failed"]) == 0
    printed = capsys.readouterr().out
    assert "\nr2 " in printed
    assert "\n1 round: 1 failed;" in printed
    assert "\nr1 " not in printed


def test_log_says_so_if_nothing_failed(state: Path, tmp_path: Path, capsys: Printed) -> None:
    """An empty table is one line."""
    path = tmp_path / "good.jsonl"
    path.write_text("".join(line for line in state.open() if '"r1"' in line))
    assert main(["log", str(path), "--failed"]) == 0
    assert capsys.readouterr().out == "0 rounds: none; 0.000 s in rounds\n"


def test_log_shows_one_round_as_a_time_line(state: Path, capsys: Printed) -> None:
    """Asked for by its id."""
    assert main(["log", str(state), "--round", "r2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("round r2: step 2, version 1, epoch 2, attempt 1\n")
    assert "\nFailed        ...." in printed
    assert re.search(
        r"^!  \+\d\.\d{4}  Failed        TransportFailed .*Injected: injected into", printed, re.MULTILINE
    )


def test_log_speaks_json(spoilt: Path, capsys: Printed) -> None:
    """All rounds with their numbers, the totals, and the bad lines."""
    assert main(["log", str(spoilt), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["round"] for row in told["rounds"]] == ["r1", "r2", "r3"]
    failed = told["rounds"][1]
    assert (failed["outcome"], failed["failed_in"], failed["bucket"]) == ("failed", "Broadcasting", 1)
    assert failed["engines"] == {"e0": "serving_old", "e1": "serving_old"}
    assert told["totals"]["outcomes"] == {"complete": 2, "failed": 1}
    assert [bad["line"] for bad in told["bad_lines"]] == [2, told["lines"]]
    assert told["bad"] == 2


def test_log_speaks_json_of_one_round(state: Path, capsys: Printed) -> None:
    """Its row, and its records as they stand in the file."""
    assert main(["log", str(state), "--json", "--round", "r2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["round"]["round"] == "r2"
    assert told["records"] == [json.loads(line) for line in state.open() if json.loads(line)["round"] == "r2"]


@pytest.mark.parametrize(
    "content", [b"", b"no log\n", bytes(range(256)) * 9], ids=["empty", "text", "binary"]
)
def test_log_fails_if_nothing_can_be_read(content: bytes, tmp_path: Path, capsys: Printed) -> None:
    """Exit status 1, and one line that says why."""
    path = tmp_path / "state.jsonl"
    path.write_bytes(content)
    assert main(["log", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(
        r"weightsync: \S+ is (empty|no state log: none of \d+ lines is a record; .+)\n", printed.err
    )


@pytest.mark.parametrize(
    ("terminal", "variable", "painted"),
    [
        (True, "LANG=C", True),
        (True, "NO_COLOR=1", False),
        (True, "NO_COLOR=", True),
        (True, "TERM=dumb", False),
        (False, "LANG=C", False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    *,
    terminal: bool,
    variable: str,
    painted: bool,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Printed,
) -> None:
    """Not for files, nor for those who said no."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv(*variable.split("=", maxsplit=1))
    assert main(["log", str(state)]) == 0
    printed = capsys.readouterr().out
    assert ("\x1b[" in printed) is painted
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in printed.splitlines()) <= 120


@pytest.mark.parametrize("how", ["--width", "COLUMNS"])
def test_a_width_can_be_asked_for(
    how: str, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """By option, or as the shell does."""
    monkeypatch.setenv("COLUMNS", "50" if how == "COLUMNS" else "200")
    assert main(["log", str(state), *(["--width", "50"] if how == "--width" else [])]) == 0
    assert "I>L>B>A>C>R" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ where output goes


def test_a_reader_that_leaves_early_is_no_error(state: Path, tmp_path: Path) -> None:
    """As in ``weightsync log FILE | head -1``: no traceback, whatever is left to print."""
    path = tmp_path / "long.jsonl"
    opened = json.loads(state.read_text().splitlines()[0])
    path.write_text("".join(f"{json.dumps({**opened, 'round': f'n{n}'})}\n" for n in range(2000)))
    with command("log", path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"round ")
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_full_disk_is_told_in_one_line(state: Path) -> None:
    """Also where the output is so short that it is written at the very end."""
    with (
        open("/dev/full", "wb") as full,  # noqa: PTH123 - a device
        command("log", state, stdout=full, stderr=subprocess.PIPE) as process,
    ):
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (2, b"weightsync: No space left on device\n")


def test_an_output_that_cannot_write_a_letter_gets_an_escape(state: Path, tmp_path: Path) -> None:
    """A log holds any text; a terminal may be limited to ASCII."""
    path = tmp_path / "state.jsonl"
    path.write_text(state.read_text().replace('"r1"', '"\\u2603\\ud800"'))
    with command("log", path, stdout=-1, stderr=-1, env={"PYTHONIOENCODING": "ascii"}) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert b"\n\\u2603\\ud800" in out


@pytest.mark.parametrize(
    "arguments", [["log", "{}"], ["diagram"], ["diagram", "--format", "png"], ["doctor"]]
)
def test_without_any_output_there_is_no_error(arguments: list[str], state: Path) -> None:
    """Run as ``weightsync ... >&-``, by something that wants nothing but the exit status."""
    if "png" in arguments:
        pytest.importorskip("resvg_py")
    given = " ".join(arguments).format(state)
    shell = f"exec {sys.executable} -m weightsync {given} >&-"
    done = subprocess.run(
        ["sh", "-c", shell],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


# --------------------------------------------------------------------------------------------------- diagram


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "round.mmd"),
        (["--format", "mermaid", "--table", "engine"], "engine.mmd"),
        (["--format", "dot"], "round.dot"),
        (["--format", "svg"], "round.svg"),
        (["--format", "markdown"], "round.md"),
    ],
)
def test_diagram_prints_a_table(arguments: list[str], name: str, capsys: Printed) -> None:
    """The same as the file of that name, with a line end."""
    assert main(["diagram", *arguments]) == 0
    assert capsys.readouterr().out.rstrip("\n") == checked_in()[name].rstrip("\n")


def test_diagram_writes_a_file_with_a_path_on_it(state: Path, tmp_path: Path, capsys: Printed) -> None:
    """In a format that the name says, in folders that are made, with the last round or the one asked for."""
    bare, last, second = (tmp_path / "a" / name for name in ("bare.svg", "last.svg", "second.svg"))
    assert main(["diagram", "--output", str(bare)]) == 0
    assert main(["diagram", "--output", str(last), "--trace", str(state)]) == 0
    assert main(["diagram", "--output", str(second), "--trace", str(state), "--round", "r2"]) == 0
    assert capsys.readouterr().out == ""
    assert "r3: " in last.read_text()
    assert "r2: " in second.read_text()
    assert "r3: " not in bare.read_text()


def test_diagram_writes_and_checks_the_files_beside_the_code(tmp_path: Path, capsys: Printed) -> None:
    """A file that was changed or is missing is drift, and named."""
    folder = tmp_path / "diagrams"
    assert main(["diagram", "--write", str(folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(checked_in())
    assert main(["diagram", "--check", str(folder)]) == 0
    assert main(["diagram", "--write", str(folder)]) == 0
    assert capsys.readouterr().out == ""
    (folder / "round.mmd").write_text("something else")
    (folder / "engine.dot").unlink()
    assert main(["diagram", "--check", str(folder)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{folder / 'engine.dot'} is not what the tables say",
        f"{folder / 'round.mmd'} is not what the tables say",
        f"write them anew: weightsync diagram --write {folder}",
    ]


def test_diagram_checks_the_librarys_own_files_by_default() -> None:
    """Those that lie beside the code that draws them."""
    parser = importlib.import_module("weightsync.cli")._parser()
    folder = parser.parse_args(["diagram", "--check"]).check
    assert (folder / "render.py").is_file()


def test_diagram_makes_a_png_for_a_file_but_not_for_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Nobody wants to see its bytes."""
    pytest.importorskip("resvg_py")
    assert main(["diagram", "--format", "png"]) == 0
    assert capsysbinary.readouterr().out.startswith(b"\x89PNG")
    assert main(["diagram", "--output", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["diagram", "--format", "png"]) == 2
    printed = capsysbinary.readouterr()
    assert printed.out == b""
    assert printed.err == b"weightsync: a PNG is not for a terminal: --output FILE, or into a pipe\n"


# ----------------------------------------------------------------------------------------------------- check


@pytest.fixture
def no_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The composed system is left out: `test_composed.py` explores it."""
    monkeypatch.setattr("weightsync.testing.composed.WORLDS", ())


@pytest.mark.usefixtures("no_worlds")
def test_check_explores_the_tables(capsys: Printed) -> None:
    """The round with both quorums and both kinds of engine: no promise is broken."""
    assert main(["check"]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert total.startswith("in all: 0 states")
    assert len(lines) == 4
    assert all(re.search(r": \d+ positions, .* 0 promises broken \(\d+\.\d s\)$", line) for line in lines)


@pytest.mark.usefixtures("no_worlds")
def test_check_fails_if_a_promise_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    """And shows the way there."""
    found: Exploration[str] = Exploration({"start": None, "end": ("start", "stumbled")}, str)
    found.blame(["balance"], "end")
    monkeypatch.setattr(check, "_explorations", lambda: [("a walk", lambda: found)])
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("a walk: 2 positions, ")
    assert "1 promises broken" in printed
    assert "balance" in printed
    assert "stumbled -> end" in printed


def test_check_replays_a_log(state: Path, capsys: Printed) -> None:
    """Every round comes out as the log says, and keeps its promises."""
    assert main(["check", str(state)]) == 0
    assert (
        capsys.readouterr().out == "3 of 3 rounds replay to what the log says and keep P1-P12; 0 not over\n"
    )


def test_check_of_a_log_that_ends_in_the_middle_of_a_round(
    state: Path, tmp_path: Path, capsys: Printed
) -> None:
    """It is right as far as it goes, and says that a round is not over."""
    path = tmp_path / "state.jsonl"
    path.write_text("".join([line for line in state.open() if '"r1"' in line][:9]))
    assert main(["check", str(path)]) == 0
    assert (
        capsys.readouterr().out == "1 of 1 rounds replay to what the log says and keep P1-P12; 1 not over\n"
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("Cleaning", "Released"), "record 28: target is Cleaning, replay gives Released"),
        (("LockGranted", "LockMelted"), ":2: P5: round r1: LockMelted in Idle cannot tell what is epoch"),
        (('"table": "', '"table": "x'), ":1: replay: made by schema 1 and table x"),
        (('"quorum": 2', '"quorum": "two"'), ":1: replay: round r1: the opening is incomplete"),
        (('"ranks": 1', '"ranks": []'), ":1: replay: round r1: "),
        (('"seq": 3,', '"seq": 4,'), ":4: replay: round r1: record 3 is missing"),
    ],
    ids=["another state", "another event", "another table", "no quorum", "no ranks", "another number"],
)
def test_check_finds_a_log_that_was_changed(
    change: tuple[str, str], complaint: str, state: Path, tmp_path: Path, capsys: Printed
) -> None:
    """It names the line and what is wrong, the promise first if one is broken."""
    path = tmp_path / "state.jsonl"
    old, new = change
    lines = [line.replace(new, old) if change == ("Cleaning", "Released") else line for line in state.open()]
    if change != ("Cleaning", "Released"):
        lines = [line.replace(old, new) if '"round": "r1"' in line else line for line in lines]
    path.write_text("".join(lines))
    assert main(["check", str(path)]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}:")
    assert complaint in first
    assert "rounds replay to what the log says" in last


def test_check_counts_a_bad_line_as_a_finding(spoilt: Path, capsys: Printed) -> None:
    """Nobody knows what stood there."""
    assert main(["check", str(spoilt)]) == 1
    assert "could not be read:\n  line 2: not JSON" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- doctor


def test_doctor_says_what_there_is(capsys: Printed) -> None:
    """Everything that is needed is here, or these tests would not run."""
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("weightsync", "python", *doctor.NEEDED, "transport memory", "transport collective"):
        assert re.search(rf"^{name} +ok", printed, re.MULTILINE), name


def test_doctor_says_what_is_missing_and_what_for(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    """A package that is needed fails it, and takes its transports along; an extra does not."""
    gone = {"torch", "tqdm"}
    there = doctor._there
    monkeypatch.setattr(doctor, "_there", lambda name: name not in gone and there(name))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^torch +MISSING +pip install torch: tensors", printed, re.MULTILINE)
    assert re.search(
        r"^tqdm +no +pip install tqdm, or the extra progress: a progress bar", printed, re.MULTILINE
    )
    assert re.search(r"^transport memory +no +needs torch$", printed, re.MULTILINE)
    gone.remove("torch")
    gone.add("weightsync.transports.memory")
    assert main(["doctor"]) == 0
    assert re.search(
        r"^transport memory +no +not part of this version$", capsys.readouterr().out, re.MULTILINE
    )


def test_doctor_knows_a_package_that_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lies on the path without having been installed."""
    monkeypatch.setattr(doctor, "_there", lambda name: True)
    assert doctor._version("a-folder-on-the-path") == "unknown"


def test_doctor_looks_for_what_the_library_depends_on() -> None:
    """Its lists are those of the project's own description."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", each, maxsplit=1)[0] for each in requirements}

    assert names(project["dependencies"]) <= doctor.NEEDED.keys()
    extras = project["optional-dependencies"]
    for name, (extra, _) in doctor.USEFUL.items():
        assert name in names(extras[extra])


# ------------------------------------------------------------------------------------------------------ demo


@dataclass(frozen=True)
class Options:
    """Stands in for the demo's own options."""

    engines: int = 2
    steps: int = 9
    transport: str | None = None
    out: Path = Path("runs")
    inject: tuple[str, ...] = ()
    seed: int = 0
    threads: bool = False
    quick: bool = False


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], {}),
        (["--engines", "3", "--steps", "5", "--seed", "-1"], {"engines": 3, "steps": 5, "seed": -1}),
        (["--inject", "a@1", "--inject", "b@2"], {"inject": ["a@1", "b@2"]}),
        (
            ["--threads", "--quick", "--transport", "memory", "--out", "x"],
            {"threads": True, "quick": True, "transport": "memory", "out": Path("x")},
        ),
    ],
)
def test_demo_hands_its_options_on(
    arguments: list[str], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those that were given: what is left out is the demo's to decide; its status is ours."""
    seen: list[Options] = []

    def run(options: Options, *, width: int | None) -> int:
        seen.append(options)
        assert width is None  # nobody looks
        return 1

    demo = ModuleType("weightsync.demo.main")
    vars(demo).update(Options=Options, run=run)
    monkeypatch.setitem(sys.modules, "weightsync.demo.main", demo)
    assert main(["demo", *arguments]) == 1
    assert [asdict(options) for options in seen] == [asdict(Options(**asked))]


def test_the_demo_itself_takes_these_options() -> None:
    """Each option of the command line is one of the demo's."""
    parser = importlib.import_module("weightsync.cli")._parser()
    given = ["--engines=1", "--steps=1", "--transport=memory", "--out=x", "--inject=no-sync", "--seed=1"]
    asked = vars(parser.parse_args(["demo", *given, "--threads", "--quick"]))
    asked.pop("run")
    importlib.import_module("weightsync.demo.main").Options(**asked)
