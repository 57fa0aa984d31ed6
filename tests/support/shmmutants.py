"""Faults to bring back into shared memory, in a test run of its own: ``pytest -p shmmutants``.

Which one is said by the environment variable ``SHM_MUTANT``. Each changes the product, never a check.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
from pathlib import Path
from typing import Any

from weightsync.handlers import swap_sink
from weightsync.handlers.swap_sink import SwapSink
from weightsync.transports import segment, shm_inlet, shm_pool, shm_round
from weightsync.transports.packets import Packets
from weightsync.transports.shm import SharedMemoryTransport
from weightsync.transports.shm_hub import ShmHub
from weightsync.transports.shm_pool import Pool
from weightsync.transports.shm_round import ShmRound

__all__ = ["MUTANTS"]

Changed: Any = setattr
"""A method is replaced by a function of another shape, which is the point."""


def acknowledged_before_it_is_read() -> None:
    """A bucket is reported as let go of when it arrives."""
    frames, say = shm_inlet._ShmInlet._next, shm_inlet._ShmInlet._say

    def early(self: Any, wire: Any, kind: str, what: str) -> Any:
        message = frames(self, wire, kind, what)
        if kind == "bucket":
            say(self, wire, "released", bucket=message["bucket"])
        return message

    def late(self: Any, wire: Any, kind: str, **body: Any) -> None:
        if kind != "released":
            say(self, wire, kind, **body)

    Changed(shm_inlet._ShmInlet, "_next", early)
    Changed(shm_inlet._ShmInlet, "_say", late)


def done_before_it_is_let_go_of() -> None:
    """The last word is said with the last bucket, and not when the buffer is let go of."""
    say = shm_inlet._ShmInlet._say

    def hasty(self: Any, wire: Any, kind: str, **body: Any) -> None:
        if kind == "released" and body["bucket"] == len(self._plan.buckets) - 1:
            say(self, wire, "done")
        elif kind != "done":
            say(self, wire, kind, **body)

    Changed(shm_inlet._ShmInlet, "_say", hasty)


def the_slowest_reader_is_not_waited_for() -> None:
    """A slot is written as soon as its turn comes."""
    Changed(ShmRound, "_reading", lambda self, bucket, *, cut: set())


def a_fenced_reader_loses_its_slot() -> None:
    """Whoever is cut off is not taken for a reader."""
    reading = ShmRound._reading
    Changed(
        ShmRound, "_reading", lambda self, bucket, *, cut: set() if cut else reading(self, bucket, cut=cut)
    )


def what_processes_hold_is_forgotten() -> None:
    """A buffer counts as free when the round is over."""
    Changed(Pool, "shown", lambda self, process, segment: None)


def the_silent_count_as_dead() -> None:
    """Nobody asks the system."""
    Changed(shm_pool._Holder, "dead", lambda self: True)


def the_dead_hold_what_they_held() -> None:
    """Nobody notices that a process has ended."""
    Changed(shm_pool._Holder, "dead", lambda self: False)


def kept_views_are_not_noticed() -> None:
    """The slot is given back, whoever still looks at it."""
    Changed(shm_inlet._ShmInlet, "_refuse_kept", lambda self, lease, bucket: None)


def messages_of_other_rounds_count() -> None:
    """Only their number is looked at."""
    checked = Packets._checked

    def credulous(self: Packets, content: bytes) -> Any:
        whose, session = self.stale, self._session
        message = checked(self, content)
        if self.stale == whose:
            return message
        self._session = type(session)("r0", session.epoch, session.version)
        try:
            return checked(self, content) or {"kind": "beat", "bucket": -1}
        finally:
            self._session = session

    Changed(Packets, "_checked", credulous)


def anybody_may_join() -> None:
    """The proof is not compared."""
    Changed(secrets, "compare_digest", lambda one, other: True)


def letting_go_is_believed_in_any_order() -> None:
    """Once, twice or ahead of time."""

    def believed(self: ShmHub, peer: Any, bucket: int) -> None:
        peer.released = max(peer.released, bucket + 1)

    Changed(ShmHub, "_released", believed)


def the_endpoint_outlives_its_round() -> None:
    """Its path stays."""
    close = ShmHub.close

    def forgetful(self: ShmHub, why: str) -> None:
        close(self, why)
        with contextlib.suppress(OSError):
            Path(self.path).touch()

    Changed(ShmHub, "close", forgetful)


def a_full_collection_is_asked_for() -> None:
    """At the end of each round, to be on the safe side."""
    clean = SharedMemoryTransport.clean

    def thorough(self: SharedMemoryTransport) -> None:
        gc.collect()
        clean(self)

    Changed(SharedMemoryTransport, "clean", thorough)


def anybody_may_write() -> None:
    """Only the size is fixed."""
    Changed(segment, "_FUTURE_WRITE", 0)


def it_is_touched_when_it_is_used() -> None:
    """Pages come with the first copy."""
    Changed(segment, "_touch", lambda memory: None)


def signs_of_life_count_for_ever() -> None:
    """Whoever says that it lives is waited for."""
    begin = ShmRound.begin

    def endless(self: Any, port: Any) -> None:
        begin(self, port)
        self._patience = 1e9

    Changed(ShmRound, "begin", endless)


def signs_of_life_do_not_count() -> None:
    """A slow engine is a silent one."""
    Changed(shm_round.ShmRound, "_signs", lambda self, ranks: False)


def it_is_live_before_the_commit() -> None:
    """A view becomes the weights as it arrives."""
    adopt = SwapSink.adopt

    def eager(self: SwapSink, views: Any) -> None:
        adopt(self, views)
        for name, tensor in self._tensors().items():
            if name in self._adopted:
                tensor.data = self._adopted[name]

    Changed(SwapSink, "adopt", eager)


def parts_of_something_larger_are_exchanged() -> None:
    """A fused weight is torn apart."""
    Changed(swap_sink, "_overlapping", lambda extents: {})


MUTANTS: dict[str, tuple[Any, str]] = {
    "acknowledged_before_it_is_read": (
        acknowledged_before_it_is_read, "transport.py::TestOrder -k nothing_is_acknowledged",
    ),
    "done_before_it_is_let_go_of": (
        done_before_it_is_let_go_of, "transport.py::TestOrder -k nothing_is_acknowledged",
    ),
    "the_slowest_reader_is_not_waited_for": (
        the_slowest_reader_is_not_waited_for, "transport.py::TestOrder -k last_reader",
    ),
    "a_fenced_reader_loses_its_slot": (
        a_fenced_reader_loses_its_slot, "transport.py::TestLosses -k keeps_its_slot",
    ),
    "what_processes_hold_is_forgotten": (what_processes_hold_is_forgotten, "pool.py -k Ledger"),
    "the_silent_count_as_dead": (the_silent_count_as_dead, "pool.py -k silent"),
    "the_dead_hold_what_they_held": (the_dead_hold_what_they_held, "pool.py -k dead_process"),
    "kept_views_are_not_noticed": (kept_views_are_not_noticed, "transport.py::TestViews -k b35_c"),
    "anybody_may_join": (anybody_may_join, "transport.py::TestStrangers -k turned_away"),
    "letting_go_is_believed_in_any_order": (
        letting_go_is_believed_in_any_order, "transport.py::TestStrangers -k out_of_turn",
    ),
    "the_endpoint_outlives_its_round": (
        the_endpoint_outlives_its_round, "transport.py::TestStrangers -k private",
    ),
    "a_full_collection_is_asked_for": (
        a_full_collection_is_asked_for, "transport.py::TestLimits -k collection",
    ),
    "signs_of_life_count_for_ever": (
        signs_of_life_count_for_ever, "transport.py::TestLosses -k hang_is_lost",
    ),
    "signs_of_life_do_not_count": (signs_of_life_do_not_count, "transport.py::TestLosses -k slower_than"),
}  # fmt: skip
"""By name: the change, and which tests of ``test_shm_*`` must notice it."""

ELSEWHERE: dict[str, tuple[Any, str]] = {
    "messages_of_other_rounds_count": (messages_of_other_rounds_count, "packets.py -k another_round"),
    "anybody_may_write": (anybody_may_write, "segment.py -k nobody_else"),
    "it_is_touched_when_it_is_used": (it_is_touched_when_it_is_used, "segment.py -k touched"),
    "it_is_live_before_the_commit": (it_is_live_before_the_commit, "swap_sink.py -k objects_stay"),
    "parts_of_something_larger_are_exchanged": (
        parts_of_something_larger_are_exchanged, "swap_sink.py -k cannot_be_exchanged",
    ),
}  # fmt: skip
"""The same, of other test files."""

if "SHM_MUTANT" in os.environ:
    {**MUTANTS, **ELSEWHERE}[os.environ["SHM_MUTANT"]][0]()
