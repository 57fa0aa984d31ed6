"""Memory without a name: who may write it, who still sees it, and what is refused."""

import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from weightsync.fsm.errors import TransportError
from weightsync.testing.engine_process import gauge
from weightsync.transports import segment as module
from weightsync.transports.segment import Mapped, Segment, available_memory, refuse_without_room


def both(size: int = 4096) -> tuple[Segment, Mapped]:
    """The writer's end and a reader's."""
    segment = Segment(size)
    return segment, Mapped(os.dup(segment.fd), size)


def test_a_reader_sees_what_is_written() -> None:
    """Without a copy, at once."""
    segment, mapped = both()
    view, _ = mapped.lease(64, 16)
    segment.octets[64:80] = 7
    assert view.tolist() == [7] * 16


def test_a_lease_lives_as_long_as_anything_made_of_it() -> None:
    """Views of views, parameters and arrays count; a copy does not."""
    _, mapped = both()
    view, lease = mapped.lease(0, 64)
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.data = view[16:32].view(torch.float32)
    array, copy = view.numpy()[3:5], view.clone()
    del view
    gc.collect()
    assert mapped.leased
    del array
    assert mapped.leased
    parameter.data = torch.zeros(4)
    assert (mapped.leased, lease(), copy.numel()) == (False, None, 64)


def test_leases_are_told_apart() -> None:
    """One that is over does not end another one."""
    _, mapped = both()
    first, one = mapped.lease(0, 64)
    second, two = mapped.lease(64, 64)
    del first
    assert [one() is None, two() is None, second.numel()] == [True, False, 64]


def test_a_lease_of_nothing() -> None:
    """Has no bytes, and is a lease all the same."""
    _, mapped = both()
    view, lease = mapped.lease(4096, 0) if mapped.size > 4096 else mapped.lease(0, 0)
    assert view.numel() == 0
    assert lease() is not None


@pytest.mark.parametrize(("start", "size"), [(-1, 8), (0, 4097), (4096, 1), (4000, 97), (0, -1)])
def test_a_lease_outside_is_refused(start: int, size: int) -> None:
    """Sizes are checked before memory is."""
    _, mapped = both()
    with pytest.raises(TransportError, match="are not in a segment of 4096"):
        mapped.lease(start, size)


def test_the_mapping_outlives_its_writer_and_both_ends() -> None:
    """As long as there is a view, there is memory."""
    segment, mapped = both()
    segment.octets[:4] = 9
    view, _ = mapped.lease(0, 4)
    segment.close()
    del segment, mapped
    gc.collect()
    assert view.tolist() == [9] * 4


def test_nothing_is_left_of_it() -> None:
    """No descriptor, no mapping, no name."""
    before, mappings = gauge()[0], _mappings()
    for _ in range(20):
        segment, mapped = both(1 << 16)
        mapped.lease(0, 8)
        segment.close()
        segment.close()
        del segment, mapped
    gc.collect()
    assert gauge()[0] == before
    assert _mappings() == mappings


def test_nobody_else_can_write_or_resize_it() -> None:
    """The system refuses both, whoever has the descriptor."""
    segment = Segment(4096)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(segment.fd, 4096)
    for size in (0, 8192):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(segment.fd, size)


LIAR = """
import os, sys, torch
from weightsync.transports.segment import Mapped, Segment
segment = Segment(4096)
view, _ = Mapped(os.dup(segment.fd), 4096).lease(0, 64)
print("reads", int(view[0]), flush=True)
view[0] = 1
print("still alive", flush=True)
"""


def test_whoever_writes_through_a_lease_ends_his_process() -> None:
    """And nobody else's: SIGSEGV, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", LIAR], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.stdout == "reads 0\n", run.stderr
    assert run.returncode == -signal.SIGSEGV


def test_without_memfd_a_file_without_a_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems, and sandboxes that forbid it."""

    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    segment, mapped = both()
    assert str(Path(f"/proc/self/fd/{segment.fd}").readlink()).endswith("(deleted)"), "it has a name"
    segment.octets[:] = 3
    view, _ = mapped.lease(0, 4096)
    assert view.unique().tolist() == [3]


def test_a_small_dev_shm_is_told_with_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has to be a file, its room is taken before anything is written."""

    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match=r"4\.0 MiB does not fit into /dev/shm.*--shm-size"):
        Segment(4 << 20)


def test_too_little_memory_is_told_with_the_size() -> None:
    """And not found out by the system, which kills."""
    room = available_memory()
    assert room is not None
    with pytest.raises(TransportError, match=r"two buffers: \d+.\d MiB are needed, and \d+.\d MiB of memory"):
        refuse_without_room(room * 2, "two buffers")
    with pytest.raises(TransportError, match="are needed"):
        Segment(room * 2)


def test_a_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container has less than its host."""
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    monkeypatch.setattr(module, "_control_groups", lambda: [tmp_path])
    assert available_memory() == 600000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\nactive_file 50000\n")
    assert available_memory() == 850000, "files that are in memory for convenience give way"
    (tmp_path / "memory.max").write_text("max")
    unlimited = available_memory()
    assert unlimited is not None
    assert unlimited > 600000


def test_an_announcement_that_is_not_true_is_refused() -> None:
    """Before it is mapped: to read beyond the end would end the process."""
    segment = Segment(4096)
    before = gauge()[0]
    for size in (8192, 100, 0, -1):
        with pytest.raises(TransportError, match="was announced, and there are 4096"):
            Mapped(os.dup(segment.fd), size)
    assert gauge()[0] == before


def test_it_is_touched_when_it_is_made() -> None:
    """A page that is there costs a copy; one that is not costs many."""
    segment = Segment(8 << 20)
    before = _faults()
    segment.octets[:] = 1
    assert _faults() - before < 64, "pages were not there"
    assert int(np.count_nonzero(segment.octets)) == 8 << 20


def _mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:weightsync")


def _faults() -> int:
    return int(Path("/proc/self/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[7])
