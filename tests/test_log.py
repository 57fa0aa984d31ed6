"""The state log as it is written: whole lines, in order, that replay; and never in the way of a round."""

import contextlib
import copy
import json
import logging
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

import weightsync
from weightsync.fsm.calls import Act
from weightsync.fsm.errors import SetupError
from weightsync.fsm.journal import replay
from weightsync.fsm.record import KEYS, Record
from weightsync.handlers.log import StateLog, level_of
from weightsync.handlers.observers import Observers
from weightsync.testing.simulation import Fault, Simulation

SOURCES = Path(__file__).resolve().parent.parent / "src"

FAULTS = {
    "none": [],
    "a bucket that cannot be sent": [Fault(Act.broadcast, "raise", bucket=1)],
    "a send that hangs": [Fault(Act.broadcast, "hang", bucket=1)],
    "a dead engine": [Fault(Act.commit, "die", engine="e1")],
    "an undo that raises": [Fault(Act.broadcast, "raise", bucket=0), Fault(Act.undo)],
}


def simulated(*faults: Fault) -> tuple[Record, ...]:
    """The records of a round in a simulated world."""
    simulation = Simulation(faults=list(faults))
    simulation.run()
    return simulation.round.records()


def plain(record: Record) -> dict[str, Any]:
    """A record as it comes back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(record.to_json()))
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """What a file holds, each line read strictly."""
    text = path.read_bytes().decode("ascii")
    assert text.endswith("\n")
    return [json.loads(line) for line in text[:-1].split("\n")]


def made(**values: Any) -> Record:
    """A record about which only the given values matter."""
    return Record(**{"time": 0.0, "event": "transition", "table": "t", "round": "r", "seq": 0, **values})


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_line_is_the_record_with_its_keys_in_order(faults: list[Fault], tmp_path: Path) -> None:
    """Every record is one line with the record's keys and values, and nothing that structlog adds."""
    records = simulated(*faults)
    with StateLog(tmp_path / "state.jsonl") as log:
        for record in records:
            log(record)
    written = lines(tmp_path / "state.jsonl")
    assert written == [plain(record) for record in records]
    for line in written:
        assert list(line) == [key for key in KEYS if key in line]


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_log_replays_to_the_path_of_its_round(faults: list[Fault], tmp_path: Path) -> None:
    """From the file alone comes the very path that the round took."""
    simulation = Simulation(faults=faults)
    result = simulation.run()
    with StateLog(tmp_path / "state.jsonl") as log:
        for record in simulation.round.records():
            log(record)
    steps = replay(lines(tmp_path / "state.jsonl"))
    moved = [step.after.state.name for step in steps if step.row.target is not None]
    assert ("Idle", *moved) == result.path
    assert steps[-1].after == simulation.round._snapshot.position


def test_a_new_file_and_its_folders_belong_to_their_owner(tmp_path: Path) -> None:
    """Missing folders are made, and nobody else can read the file, whatever the umask allows."""
    path = tmp_path / "runs" / "a" / "state.jsonl"
    before = os.umask(0)
    try:
        StateLog(path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_each_line_can_be_read_at_once(tmp_path: Path) -> None:
    """Nothing waits in a buffer for the next line or for the end."""
    records = simulated()
    with StateLog(tmp_path / "state.jsonl") as log:
        for count, record in enumerate(records, start=1):
            log(record)
            assert len(lines(tmp_path / "state.jsonl")) == count


def test_a_second_log_continues_the_file(tmp_path: Path) -> None:
    """What is there stays there."""
    records = simulated()
    for record in records:
        with StateLog(tmp_path / "state.jsonl") as log:
            log(record)
    assert lines(tmp_path / "state.jsonl") == [plain(record) for record in records]


def test_half_a_line_of_a_killed_process_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    """A log that ends in the middle of a line is continued on a new one."""
    path = tmp_path / "state.jsonl"
    path.write_text('{"time": 1.0, "eve')
    record = simulated()[0]
    with StateLog(path) as log:
        log(record)
        log(record)
    first, *rest = path.read_text().splitlines()
    assert first == '{"time": 1.0, "eve'
    assert [json.loads(line) for line in rest] == [plain(record)] * 2


@pytest.mark.parametrize(
    "text", ["two\nlines", "100 %s of %(it)s", "\x1b[31mred", "\ud800", "naïve ☃", "\x00"]
)
def test_a_line_stays_one_line_whatever_an_error_says(text: str, tmp_path: Path) -> None:
    """Messages come from anywhere; none of them breaks the file, and each comes back as it was."""
    with StateLog(tmp_path / "state.jsonl") as log:
        log(made(error=text))
    assert [line["error"] for line in lines(tmp_path / "state.jsonl")] == [text]


# ------------------------------------------------------------------------------------------- many who write


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    """A log may be told by several threads at once."""
    with StateLog(tmp_path / "state.jsonl") as log:

        def tell(name: str) -> None:
            for seq in range(50):
                log(made(seq=seq, owner=name * 500))

        threads = [threading.Thread(target=tell, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    written = lines(tmp_path / "state.jsonl")
    for name in "abcd":
        assert [line["seq"] for line in written if line["owner"] == name * 500] == list(range(50))


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a script with this interpreter."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        stdout=subprocess.PIPE,
        text=True,
    )


WRITER = """
    import sys
    from weightsync.fsm.record import Record
    from weightsync.handlers.log import StateLog
    with StateLog(sys.argv[1]) as log:
        for seq in range(300):
            error = sys.argv[2] * 3000
            log(Record(time=0.0, event="note", table="t", round=sys.argv[2], seq=seq, error=error))
"""


def test_two_processes_append_whole_lines_to_one_file(tmp_path: Path) -> None:
    """Each line of each process is there once, whole and in its order."""
    path = tmp_path / "state.jsonl"
    processes = [run(WRITER, path, name) for name in "ab"]
    for process in processes:
        with process:
            assert process.wait(timeout=60) == 0
    written = lines(path)
    for name in "ab":
        mine = [line for line in written if line["round"] == name]
        assert [line["seq"] for line in mine] == list(range(300))
        assert {line["error"] for line in mine} == {name * 3000}


# ---------------------------------------------------------------------------------------- what can go wrong


def test_a_log_that_cannot_be_written_raises_once(tmp_path: Path) -> None:
    """After the first error it is closed, and lets records go without a word."""
    log = StateLog("/dev/full")
    record = made()
    with pytest.raises(OSError, match="No space left"):
        log(record)
    log(record)
    log.close()


def test_a_full_disk_disables_the_log_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The other observers get everything, and the library's logger is told once."""
    seen: list[Record] = []
    observers = Observers([StateLog("/dev/full"), seen.append])
    records = simulated()
    with caplog.at_level(logging.ERROR, logger="weightsync"):
        observers.tell(records)
        assert observers.flush(10.0)
    observers.close()
    assert seen == list(records)
    assert [line.getMessage() for line in caplog.records] == [
        "observer state log is disabled: it raised OSError: [Errno 28] No space left on device"
    ]


def test_a_round_does_not_notice_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    """Weights arrive and the round is complete, with a log that could not write a single line."""
    held = {"w": torch.zeros(4)}
    link = weightsync.LocalEngine(weightsync.receiver_for(held, "e0"))
    with (
        caplog.at_level(logging.ERROR, logger="weightsync"),
        weightsync.WeightSync([link], "memory", handlers=[StateLog("/dev/full")]) as sync,
    ):
        assert sync.on_train_begin({"w": torch.ones(4)}).require().ok
        assert sync.on_step_end(1, {"w": torch.full((4,), 2.0)})
    assert held["w"].tolist() == [2.0] * 4
    assert len(caplog.records) == 1


SHORT = """
    import resource, sys
    from weightsync.fsm.record import Record
    from weightsync.handlers.log import StateLog
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    log = StateLog(sys.argv[1])
    record = Record(time=0.0, event="note", table="t", round="r", seq=0, error="x" * 300)
    log(record)
    try:
        log(record)
    except OSError as error:
        print(error.strerror)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with StateLog(sys.argv[1]) as log:
        log(record)
"""


def test_a_line_that_fits_only_in_part_is_no_success(tmp_path: Path) -> None:
    """Where room runs out in the middle of a line, that is an error; the next log starts a new line."""
    path = tmp_path / "state.jsonl"
    with run(SHORT, path) as process:
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "File too large\n")
    whole, half, later = path.read_text().splitlines()
    assert json.loads(whole) == json.loads(later)
    assert whole.startswith(half)


def test_closing_does_not_wait_for_a_write_that_hangs(tmp_path: Path) -> None:
    """A disk that hangs, here a pipe that nobody empties, keeps its own thread and nobody else."""
    fifo = tmp_path / "state.jsonl"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = StateLog(fifo)

    def tell() -> None:
        for _ in range(20):
            log(made(error="x" * 10_000))

    writing = threading.Thread(target=tell)
    writing.start()
    writing.join(0.2)
    assert writing.is_alive()
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 10.0
    read = 0
    while writing.is_alive():
        with contextlib.suppress(BlockingIOError):  # it may be empty for a moment
            read += len(os.read(reader, 1 << 16))
        writing.join(0.01)
    os.close(reader)
    log.close()
    assert read < 20 * 10_000  # what came after the close was let go


@pytest.mark.parametrize("where", ["", "a-file/state.jsonl"], ids=["a folder", "below a file"])
def test_a_path_that_cannot_be_opened_is_refused_at_set_up(where: str, tmp_path: Path) -> None:
    """Whoever mistypes the path learns it before the first round."""
    (tmp_path / "a-file").touch()
    with pytest.raises(SetupError, match=r"the state log .* cannot be opened: "):
        StateLog(tmp_path / where)


def test_a_log_closes_once_and_lets_late_records_go(tmp_path: Path) -> None:
    """Closing twice is no error, and neither is a record that comes after."""
    log = StateLog(tmp_path / "state.jsonl")
    log.close()
    log.close()
    log(made())
    assert (tmp_path / "state.jsonl").read_bytes() == b""


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_log_does_not_travel(take: Any, tmp_path: Path) -> None:
    """An open file belongs to its process, and the message says what to do instead."""
    with StateLog(tmp_path / "state.jsonl") as log, pytest.raises(TypeError, match="makes its own"):
        take(log)


# ------------------------------------------------------------------------------------- levels, and structlog


@pytest.mark.parametrize(
    ("level", "values"),
    [
        ("debug", {"source": "Broadcasting", "target": "Broadcasting", "trigger": "BucketSent"}),
        ("debug", {"event": "call", "trigger": "open"}),
        ("debug", {"event": "stale"}),
        ("info", {"event": "opened", "target": "Idle"}),
        ("info", {"source": "Idle", "target": "Locked"}),
        ("info", {"event": "result", "facts": {"outcome": "partial", "unclean": False}}),
        ("warning", {"source": "Locked", "target": "Failed"}),
        ("warning", {"source": "Failed", "target": "Failed"}),
        ("warning", {"source": "Failed", "target": "Released"}),
        ("warning", {"event": "result", "facts": {"outcome": "failed", "unclean": False}}),
        ("warning", {"event": "call", "trigger": "open", "error": "EngineSilent: no answer in time"}),
        ("warning", {"event": "retry"}),
        ("error", {"source": "Failed", "target": "Failed", "facts": {"unclean": True}}),
        ("error", {"event": "result", "facts": {"outcome": "complete", "unclean": True}}),
        ("error", {"event": "refused"}),
        ("error", {"event": "escalation"}),
        ("error", {"event": "undo", "undo": "undo of x0"}),
        ("error", {"event": "cleanup"}),
    ],
)
def test_how_loud_a_record_is(level: str, values: dict[str, Any]) -> None:
    """Steps within a state are quiet, states are heard, Failed warns, and what is left over is an error."""
    assert level_of(made(**values)) == level


@pytest.fixture
def reset() -> Iterator[None]:
    """Whatever a test does to structlog is undone."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("reset")
def test_the_programs_own_structlog_and_ours_do_not_meet(tmp_path: Path) -> None:
    """How the program configures structlog changes no line of ours, and the other way round."""

    def spoil(*_: object) -> str:
        raise AssertionError("a line of ours came through the program's own processors")

    log = StateLog(tmp_path / "state.jsonl", console=True)
    assert not structlog.is_configured()
    structlog.configure(
        processors=[spoil], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR)
    )
    structlog.contextvars.bind_contextvars(event="not ours", colour="not ours")
    record = simulated()[0]
    with log:
        log(record)
    with StateLog(tmp_path / "state.jsonl") as later:
        later(record)
    structlog.contextvars.clear_contextvars()
    assert lines(tmp_path / "state.jsonl") == [plain(record)] * 2
    assert structlog.get_config()["processors"] == [spoil]


def test_the_console_tells_state_changes_to_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each state, one for the result, none for what happens within a state; the file has all."""
    records = simulated(*FAULTS["a bucket that cannot be sent"])
    with StateLog(tmp_path / "state.jsonl", console=True) as log:
        for record in records:
            log(record)
    told = capsys.readouterr()
    assert not told.out
    shown = told.err.splitlines()
    moves = ["Idle -> Locked", "Locked -> Broadcasting", "Broadcasting -> Failed", "Failed -> Released"]
    assert [next(move for move in [*moves, "round failed"] if move in line) for line in shown] == [
        *moves,
        "round failed",
    ]
    assert "warning" in shown[2]
    assert "injected into bucket 1" in shown[2]
    assert "\x1b" not in told.err
    assert len(lines(tmp_path / "state.jsonl")) == len(records)


def test_a_console_that_is_gone_does_not_cost_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal was closed; the file goes on."""
    with (tmp_path / "terminal").open("w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        log = StateLog(tmp_path / "state.jsonl", console=True)
    records = simulated()
    with log:
        for record in records:
            log(replace(record, owner="still here"))
    assert len(lines(tmp_path / "state.jsonl")) == len(records)
