"""Where a ledger lives: memory, or a file that several processes share and that outlives each of them."""

import os
import selectors
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from weightsync.fsm.ledger import Ledger, LedgerCorrupt, LedgerError, LedgerKeeper, StaleVersion, VersionBound
from weightsync.handlers import durable
from weightsync.handlers.ledger import FileLedger, LedgerUnavailable, LedgerUnsure, MemoryLedger

SOURCES = Path(__file__).resolve().parent.parent / "src"
PATIENCE = 30.0
"""Seconds until another process that should have answered counts as hanging."""


@pytest.fixture(params=["memory", "file"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerKeeper:
    """One of each kind, empty."""
    return MemoryLedger() if request.param == "memory" else FileLedger(tmp_path / "ledger.json")


@contextmanager
def another_process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a script with this interpreter; whatever happens, it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that another process prints, with a deadline."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(PATIENCE), "the other process says nothing"
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    """Let another process go on that waits for a line."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


# --------------------------------------------------------------------------------------------- both kinds


def test_it_keeps_what_was_published(ledger: LedgerKeeper) -> None:
    """From nothing to a version, through a binding."""
    assert ledger.version() is None
    assert ledger.current() == Ledger()
    ledger.admit(0, "zero")
    ledger.bind(0, "zero", 1)
    assert ledger.version() is None
    assert not ledger.ask(0, 1)
    ledger.publish(0, "zero", 1)
    assert ledger.version() == 0
    assert ledger.ask(0, 1)
    assert ledger.current() == Ledger().publish(0, "zero", 1)


def test_a_refusal_changes_nothing(ledger: LedgerKeeper) -> None:
    """The rules are those of the value."""
    ledger.publish(3, "three", 7)
    before = ledger.current()
    with pytest.raises(StaleVersion):
        ledger.admit(2, "two")
    with pytest.raises(VersionBound):
        ledger.bind(3, "other", 8)
    with pytest.raises(StaleVersion):
        ledger.publish(4, "four", 6)
    assert ledger.current() == before


def test_what_was_given_up_cannot_arrive_later(ledger: LedgerKeeper) -> None:
    """``shut`` is kept like everything else."""
    ledger.shut(7)
    with pytest.raises(StaleVersion):
        ledger.publish(3, "three", 7)
    ledger.publish(3, "three", 8)


def test_a_ledger_in_memory_may_start_anywhere() -> None:
    """For tests, and for trainers that keep the value themselves."""
    ledger: LedgerKeeper = MemoryLedger(Ledger().publish(1, "one", 1))
    assert ledger.version() == 1


def test_threads_do_not_lose_each_other_s_changes(ledger: LedgerKeeper) -> None:
    """Each version is published by one thread only, though all try."""

    def publish(name: str) -> int:
        mine = 0
        for version in range(20):
            try:
                ledger.publish(version, name, 1)
                mine += 1
            except (StaleVersion, VersionBound):
                pass
        return mine

    with ThreadPoolExecutor(4) as pool:
        published = list(pool.map(publish, "abcd", timeout=PATIENCE))
    assert sum(published) == 20
    assert ledger.version() == 19


# ----------------------------------------------------------------------------------------------- the file


def test_another_life_reads_what_the_first_wrote(tmp_path: Path) -> None:
    """The folder is made, the file is for its owner only, and nothing else is left but the writers' guard."""
    path = tmp_path / "runs" / "a" / "ledger.json"
    FileLedger(path).bind(3, "three", 7)
    FileLedger(str(path)).publish(3, "three", 7)
    assert FileLedger(path).ask(3, 7)
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["ledger.json", "ledger.json.lock"]


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    """A ledger that is only looked at makes neither folder nor file."""
    ledger = FileLedger(tmp_path / "runs" / "ledger.json")
    ledger.admit(0, "zero")
    assert ledger.version() is None
    assert list(tmp_path.iterdir()) == []


def test_a_change_of_the_working_folder_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path means the folder in which the ledger was made."""
    monkeypatch.chdir(tmp_path)
    ledger = FileLedger("ledger.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ledger.publish(1, "one", 1)
    assert (tmp_path / "ledger.json").exists()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Two names of one ledger do not become two ledgers."""
    real, name = tmp_path / "real.json", tmp_path / "name.json"
    FileLedger(real).publish(1, "one", 1)
    name.symlink_to(real)
    FileLedger(name).publish(2, "two", 2)
    assert name.is_symlink()
    assert FileLedger(real).version() == 2


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\x00\xff", b" " * (1 << 20)])
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    """Nothing is guessed and nothing overwritten: the file may be all there is to repair it from."""
    path = tmp_path / "ledger.json"
    path.write_bytes(content)
    ledger = FileLedger(path)
    with pytest.raises(LedgerCorrupt, match=r"ledger\.json is not a version ledger"):
        ledger.current()
    with pytest.raises(LedgerCorrupt):
        ledger.publish(1, "one", 1)
    assert path.read_bytes() == content


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    """The operating system's error is the cause."""
    (tmp_path / "ledger.json").mkdir()
    with pytest.raises(LedgerUnavailable, match=r"cannot read the version ledger .*ledger\.json") as caught:
        FileLedger(tmp_path / "ledger.json").current()
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_in_the_folder_s_place_is_named(tmp_path: Path) -> None:
    """Nowhere to write is a typed error, too."""
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(LedgerUnavailable, match="version ledger"):
        FileLedger(tmp_path / "runs" / "ledger.json").publish(1, "one", 1)


def test_an_error_after_the_rename_leaves_the_question_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no refusal, for the publication is there; saying it again makes it durable."""
    ledger = FileLedger(tmp_path / "ledger.json")

    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "_sync_folder", fail)
        for _ in range(2):
            with pytest.raises(LedgerUnsure, match=r"may lose that: .*Input/output error") as caught:
                ledger.publish(1, "one", 1)
            assert not isinstance(caught.value, LedgerError)
            assert ledger.ask(1, 1)
    ledger.publish(1, "one", 1)


# --------------------------------------------------------------------------------- real processes and limits

REFUSED = """
    import sys
    from weightsync.handlers.ledger import FileLedger, LedgerUnavailable
    try:
        FileLedger(sys.argv[1]).publish(2, "two", 2)
    except LedgerUnavailable as error:
        print(type(error.__cause__).__name__)
"""


def test_a_full_disk_leaves_the_old_ledger(tmp_path: Path) -> None:
    """A write that finds no room, here a limit on file sizes, is a typed error."""
    path = tmp_path / "ledger.json"
    FileLedger(path).publish(1, "one", 1)
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
    with another_process(limit + textwrap.dedent(REFUSED), path) as process:
        assert line(process) == "OSError"
    assert FileLedger(path).version() == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ledger.json", "ledger.json.lock"]


def test_a_closed_folder_leaves_the_old_ledger() -> None:
    """Somebody without the right to write there is refused; the superuser puts that right down first."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "runs", "ledger.json")
        FileLedger(path).publish(1, "one", 1)
        for file in path.parent.iterdir():
            file.chmod(0o666)
        path.parent.chmod(0o555)
        anybody = "import os\nfrom weightsync.handlers import ledger\nos.getuid() or os.setuid(65534)\n"
        with another_process(anybody + textwrap.dedent(REFUSED), path) as process:
            assert line(process) == "PermissionError"
        assert FileLedger(path).version() == 1
        path.parent.chmod(0o755)


COMPETITOR = """
    import sys
    from weightsync.fsm.ledger import StaleVersion, VersionBound
    from weightsync.handlers.ledger import FileLedger
    ledger = FileLedger(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    mine = []
    while (version := (ledger.version() or 0) + 1) <= int(sys.argv[3]):
        try:
            ledger.publish(version, sys.argv[2], 1)
        except (StaleVersion, VersionBound):
            continue
        mine.append(version)
    print(*mine, flush=True)
"""


def test_two_processes_do_not_publish_the_same_number(tmp_path: Path) -> None:
    """Both go for each next version; one of them gets it, the other is refused, and none is lost."""
    path = tmp_path / "ledger.json"
    last = 60
    with another_process(COMPETITOR, path, "a", last) as a, another_process(COMPETITOR, path, "b", last) as b:
        assert line(a) == line(b) == "ready"
        go(a)
        go(b)
        by_a, by_b = (set(map(int, line(each).split())) for each in (a, b))
    assert not by_a & by_b
    assert by_a | by_b == set(range(1, last + 1))
    assert FileLedger(path).version() == last


HOLDER = """
    import sys, time
    from pathlib import Path
    from weightsync.handlers import durable
    path = Path(sys.argv[1])
    with durable.exclusively(path):
        path.with_name(".ledger.json.new").write_text("half of i")
        print("holding", flush=True)
        time.sleep(600)
"""


@pytest.mark.chaos
def test_a_writer_that_is_killed_lets_go(tmp_path: Path) -> None:
    """SIGKILL in the middle of a change: the old ledger stands, and the next writer has its turn at once."""
    path = tmp_path / "ledger.json"
    ledger = FileLedger(path)
    ledger.publish(1, "one", 1)
    with another_process(HOLDER, path) as process:
        assert line(process) == "holding"
        with pytest.raises(TimeoutError), durable.exclusively(path, patience=0.0):
            pass
        assert ledger.version() == 1, "a reader needs no turn"
        process.kill()
        process.wait(PATIENCE)
        began = time.monotonic()
        ledger.publish(2, "two", 2)
    assert time.monotonic() - began < durable.PATIENCE / 2
    assert FileLedger(path).version() == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ledger.json", "ledger.json.lock"]


WRITER = """
    import sys
    from weightsync.handlers.ledger import FileLedger
    ledger = FileLedger(sys.argv[1])
    version = ledger.version() or 0
    while True:
        version += 1
        ledger.bind(version, f"v{version}", version)
        ledger.publish(version, f"v{version}", version)
        print(version, flush=True)
"""


@pytest.mark.chaos
def test_a_writer_killed_at_any_moment_leaves_a_whole_ledger(tmp_path: Path) -> None:
    """Whatever it said it had published is published, and it was killed at most one step later."""
    path = tmp_path / "ledger.json"
    for told in (1, 2, 7):
        with another_process(WRITER, path) as process:
            for _ in range(told):
                line(process)
            process.kill()
            assert process.stdout is not None
            said = [int(each) for each in process.stdout.read().split()]
            version = FileLedger(path).version()
            assert version is not None
            assert version >= max(said, default=told)
            assert FileLedger(path).current().digest == f"v{version}"
