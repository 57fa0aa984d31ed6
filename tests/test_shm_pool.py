"""Who may still read a buffer: it is not written again before everybody who could has said so, or is dead."""

import itertools
import os
import subprocess
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightsync.fsm.errors import TransportError
from weightsync.transports.segment import Segment
from weightsync.transports.shm_pool import Pool


def child() -> "subprocess.Popen[bytes]":
    """A process that does nothing."""
    return subprocess.Popen(["sleep", "600"])


def test_two_buffers_take_turns() -> None:
    """As long as everybody swaps, two are enough."""
    pool = Pool(4, Segment)
    seen = []
    held: list[str] = []
    for _ in range(6):
        pool.met("p", os.getpid(), "e0", held)
        segment = pool.version(4096, pair=True)
        pool.shown("p", segment)
        held = [segment.id]
        seen.append(segment.id)
    assert len(set(seen)) == 2
    assert all(one != other for one, other in itertools.pairwise(seen))
    pool.close()


def test_an_engine_that_is_silent_keeps_its_buffer() -> None:
    """Another one is taken, within the bound; then it is said who has them."""
    pool = Pool(3, Segment)
    stuck = pool.version(4096)
    pool.met("p", os.getpid(), "stuck", [])
    pool.shown("p", stuck)
    held: list[str] = []
    for _ in range(4):
        pool.met("q", os.getpid(), "well", held)
        segment = pool.version(4096)
        assert segment is not stuck
        pool.shown("q", segment)
        held = [segment.id]
    pool.met("r", os.getpid(), "hoarder", [each.id for each in pool.segments])
    words = "all 5 buffers that there may be are in use by hoarder, stuck, well"
    while len(pool.segments) < 5:  # one for each of them, and two more
        pool.shown("r", pool.version(4096))
    pool.shown("r", pool.segments[-1])
    with pytest.raises(TransportError, match=words):
        pool.version(4096)
    pool.close()


def test_a_dead_process_holds_nothing() -> None:
    """Killed, and not before it is dead: the system says so."""
    pool, process = Pool(1, Segment), child()
    segment = pool.version(4096)
    pool.met("p", process.pid, "e0", [])
    pool.shown("p", segment)
    assert pool.holding(segment) == ["e0"]
    assert pool.version(4096) is not segment
    process.kill()
    process.wait()
    assert pool.holding(segment) == []
    assert segment in (pool.version(4096), pool.version(4096))
    pool.close()


def test_a_process_of_which_nothing_is_known_counts_as_alive() -> None:
    """In another namespace it has no number here."""
    pool = Pool(1, Segment)
    pool.met("p", 0, "e0", [])
    segment = pool.version(4096)
    pool.shown("p", segment)
    assert pool.holding(segment) == ["e0"]
    assert pool.version(4096) is not segment
    pool.close()


def test_another_model_has_other_buffers() -> None:
    """Those that nobody needs any more are given back."""
    pool = Pool(2, Segment)
    small = pool.version(4096)
    large = pool.version(8192)
    assert large.size == 8192
    assert small.fd == -1, "it was kept"
    assert pool.segments == [large]
    pool.close()
    assert pool.segments == []


def test_a_pair_is_made_at_once() -> None:
    """So that the second version does not find out that there is no memory for it."""
    pool = Pool(2, Segment)
    pool.version(4096, pair=True)
    assert len(pool.segments) == 2
    pool.close()


def test_descriptors_of_the_dead_are_closed() -> None:
    """Engines come and go."""
    before = len(list(os.scandir("/proc/self/fd")))
    pool = Pool(2, Segment)
    for number in range(3):
        process = child()
        pool.met(str(number), process.pid, "e0", [])
        process.kill()
        process.communicate()
        pool.holding(pool.version(4096))
    pool.close()
    assert len(list(os.scandir("/proc/self/fd"))) == before


@dataclass
class Reader:
    """A process as it really is: which segments anything in it has a view of."""

    process: "subprocess.Popen[bytes]"
    views: set[str] = field(default_factory=set)


class Ledger(RuleBasedStateMachine):
    """Rounds in which readers keep, drop and swap as they like, stop talking, or die.

    The one law: what is written is viewed by nobody who lives. A reclaim that breaks it is *stranded*.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(5, Segment)
        self.readers: dict[str, Reader] = {}
        self.last: Segment | None = None
        self.stranded: list[str] = []

    @rule(name=st.sampled_from("abc"))
    def begins(self, name: str) -> None:
        """A new life."""
        if name not in self.readers:
            self.readers[name] = Reader(child())

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def a_round(self, data: st.DataObject) -> None:
        """Some of them join, a version is written and shown, and each of them swaps, or does not."""
        joining = data.draw(st.sets(st.sampled_from(sorted(self.readers))))
        self.pool.begin()
        for name in joining:
            reader = self.readers[name]
            self.pool.met(f"{name}{reader.process.pid}", reader.process.pid, name, sorted(reader.views))
        try:
            self.last = self.pool.version(4096)
        except TransportError:
            return
        self.stranded += [name for name, each in self.readers.items() if self.last.id in each.views]
        for name in joining:
            reader = self.readers[name]
            self.pool.shown(f"{name}{reader.process.pid}", self.last)
            match data.draw(st.sampled_from(["swaps", "aborts", "keeps both", "is stopped in the middle"])):
                case "swaps":
                    reader.views = {self.last.id}
                case "keeps both" | "is stopped in the middle":
                    reader.views.add(self.last.id)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        """With all its views."""
        reader = self.readers.pop(data.draw(st.sampled_from(sorted(self.readers))))
        reader.process.kill()
        reader.process.communicate()

    @invariant()
    def nothing_is_stranded(self) -> None:
        """The law."""
        assert self.stranded == []

    def teardown(self) -> None:
        """End what was begun."""
        for reader in self.readers.values():
            reader.process.kill()
            reader.process.communicate()
        self.pool.close()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_engines_that_came_to_different_versions_all_swap_to_the_next() -> None:
    """One after the other was added: each holds a buffer, and still there is one for the next version."""
    pool = Pool(4, Segment)
    held: dict[str, list[str]] = {}
    for number in range(7):
        held[f"p{number}"] = []
        pool.begin()
        pool.met(f"p{number}", os.getpid(), f"e{number}", [])
        segment = pool.version(4096)
        pool.shown(f"p{number}", segment)
        held[f"p{number}"] = [segment.id]
        pool.begin()
        for process, holds in held.items():
            pool.met(process, os.getpid(), process, holds)
        segment = pool.version(4096)
        for process, holds in held.items():
            pool.shown(process, segment)
            held[process] = [segment.id] if number % 2 else holds
    pool.close()
