"""Small files that survive a crash: whole or old, one writer at a time, for its owner's eyes."""

import os
import stat
import threading
from pathlib import Path

import pytest

from weightsync.handlers import durable


def test_a_missing_file_reads_as_none(tmp_path: Path) -> None:
    """Nothing was ever written, which is no error."""
    assert durable.read(tmp_path / "none", 10) is None


def test_what_was_put_there_is_read_back(tmp_path: Path) -> None:
    """The old content is gone, and nothing is left beside the file but its guard."""
    path = tmp_path / "deep" / "er" / "file"
    for content in (b"first", b"", b"second"):
        with durable.exclusively(path):
            durable.replace(path, content)
        assert durable.read(path, 10) == content
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["file", "file.lock"]


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    """Whatever the umask, and whatever the old file allowed."""
    path = tmp_path / "file"
    path.write_text("open")
    path.chmod(0o666)
    before = os.umask(0)
    try:
        with durable.exclusively(path):
            durable.replace(path, b"closed")
    finally:
        os.umask(before)
    for name in ("file", "file.lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """The limit itself is fine, one byte more is refused."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert durable.read(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="larger than 9 bytes"):
        durable.read(path, 9)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe without a writer would block for ever; a folder has no content."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="not a regular file"):
            durable.read(tmp_path / name, 10)


def test_what_a_killed_writer_left_is_taken_away(tmp_path: Path) -> None:
    """A half-written file beside the real one does no harm and does not stay."""
    path = tmp_path / "file"
    (tmp_path / ".file.new").write_text("hal")
    with durable.exclusively(path):
        durable.replace(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert not (tmp_path / ".file.new").exists()


def test_a_link_beside_is_not_followed(tmp_path: Path) -> None:
    """Neither the new file nor the guard is written through a link that somebody has put there."""
    path, precious = tmp_path / "file", tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".file.new").symlink_to(precious)
    with durable.exclusively(path):
        durable.replace(path, b"new")
    assert precious.read_text() == "precious"
    (tmp_path / "file.lock").unlink()
    (tmp_path / "file.lock").symlink_to(precious)
    with pytest.raises(OSError, match=r"file\.lock"), durable.exclusively(path):
        pass


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out, the old content stays, and nothing is left beside it."""
    path = tmp_path / "file"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), durable.exclusively(path):
        durable.replace(path, b"new")
    assert path.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "file.lock"]


def test_content_is_forced_out_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure could leave a file that is neither old nor new, or both or none."""
    path = tmp_path / "file"
    path.write_text("old")
    seen = []

    def sync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        seen.append(("folder" if stat.S_ISDIR(found.st_mode) else found.st_size, path.read_text()))

    monkeypatch.setattr(os, "fsync", sync)
    durable.replace(path, b"12345")
    assert seen == [(5, "old"), ("folder", "12345")]


@pytest.mark.parametrize(("number", "raised"), [(22, False), (5, True)])
def test_only_a_file_system_without_folder_sync_is_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: bool
) -> None:
    """An input or output error when the folder is forced to the disk is told, with the new file in place."""
    path = tmp_path / "file"
    real = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "the folder")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    if raised:
        with pytest.raises(durable.NotForced, match="the folder, after the file was replaced"):
            durable.replace(path, b"new")
    else:
        durable.replace(path, b"new")
    assert path.read_text() == "new"


def test_a_second_writer_waits_but_not_for_ever(tmp_path: Path) -> None:
    """A writer that does not end, because it is stopped, costs the next one its patience."""
    path = tmp_path / "file"
    with (
        durable.exclusively(path),
        pytest.raises(TimeoutError, match=r"held by another writer for more than 0\.05 s"),
        durable.exclusively(path, patience=0.05),
    ):
        pass
    with durable.exclusively(path, patience=0.0):
        pass


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    """The lock is the open file's, so it works inside one process too."""
    path = tmp_path / "count"
    path.write_text("0")

    def work() -> None:
        for _ in range(20):
            with durable.exclusively(path):
                path.write_text(str(int(path.read_text()) + 1))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert path.read_text() == "80"


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The child has a copy of the descriptor; the lock ends with the block all the same."""
    path = tmp_path / "file"
    reading, writing = os.pipe()
    with durable.exclusively(path):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with durable.exclusively(path, patience=0.0):
            pass
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    """Neither by the calls that succeed nor by those that fail."""
    path = tmp_path / "file"
    os.mkfifo(tmp_path / "pipe")

    def use_all() -> None:
        with durable.exclusively(path):
            durable.replace(path, b"x")
        durable.read(path, 10)
        for wrong in ("pipe", "."):
            with pytest.raises(OSError, match="not a regular file"):
                durable.read(tmp_path / wrong, 10)
        with (
            durable.exclusively(path),
            pytest.raises(TimeoutError),
            durable.exclusively(path, patience=0.0),
        ):
            pass

    use_all()
    before = descriptors()
    for _ in range(10):
        use_all()
    assert descriptors() == before
