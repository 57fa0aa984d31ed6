"""One round of the shared-memory transport, on the trainer's side: its ranks, its memory, and every wait.

A rank that fails, is silent or is fenced is cut off and not waited for; the others go on. What it may still
be reading is not written meanwhile: a slot of the ring that it has not let go of is replaced by other memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Generic

from ..fsm.contract import EngineLink, Port, Ticket
from ..fsm.errors import EngineSilent, PortClosed, TransportError
from ..fsm.plan import Bucket, Plan
from ..fsm.receipt import Participant
from .bell import Bell
from .receptions import Receptions
from .shm_hub import Peer, ShmHub
from .shm_inlet import NAME
from .shm_pool import M, Pool
from .version_layout import layout_of

__all__ = ["ShmRound"]

_GRACE = 1.0
"""Seconds from when a rank left until its engine must have said why. After that, nothing more will come."""

_WINDOW = 48
"""Buckets of a version that an engine which copies may be behind; it says how far it is every few of them."""

_SIGN = 0.2
"""Seconds after which an engine that only looks is told of the buckets that lie there meanwhile."""

_MOMENT = 0.2
"""Seconds for a word that is on its way on this host."""

_GLANCE = 1.0
"""Seconds after which a wait asks again how long it may take."""


class ShmRound(Generic[M]):
    """What lives as long as one round. ``end`` may be called beside everything else.

    Args:
        pool: the memory, which outlives the round.
        slots: how many buckets a ring holds at once.
        name: under which engines find the receiving half.
    """

    def __init__(self, pool: Pool[M], slots: int, name: str = NAME) -> None:
        self.bell = Bell()
        self.receptions = Receptions(self.bell)
        self.whole = False
        self._pool, self._slots, self._name = pool, slots, name
        self._ranks: dict[int, Participant] = {}
        self._hub: ShmHub | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._segment: M | None = None
        self._spares: dict[int, M] = {}
        self._untold: tuple[int, int, float] | None = None
        self._slot_size = 0
        self._out: set[Participant] = set()
        self._beats = 0
        self._patience = 0.0

    @property
    def ended(self) -> bool:
        """Whether it was cleaned or aborted."""
        return self._ended

    @property
    def hub(self) -> ShmHub:
        """The connections to the ranks."""
        if self._hub is None:
            raise PortClosed("the round ended before anybody could join")
        return self._hub

    # -- opening -----------------------------------------------------------------------------------------

    def admit(self, plan: Plan, engines: Mapping[Participant, EngineLink], folder: Path, port: Port) -> None:
        """Make the endpoint, and ask every engine to receive."""
        self._pool.begin()
        first: dict[Participant, int] = {}
        for engine in engines:
            first[engine] = len(self._ranks)
            self._ranks |= {first[engine] + rank: engine for rank in range(engine.ranks)}
        with self._lock:
            if self._ended:
                return
            alive = [segment.id for segment in self._pool.segments]
            try:
                self._hub = ShmHub(
                    folder, port.session, len(self._ranks),
                    fingerprint=plan.fingerprint, alive=alive, ring=self.bell.ring,
                )  # fmt: skip
            except OSError as error:
                why = f"there can be no socket for the round in {folder}: {error.strerror or error}"
                advice = 'set TMPDIR to a shorter path, or take transport="collective"'
                raise TransportError(f"{why}; {advice}") from error
        hub = self.hub
        for engine, link in engines.items():
            if port.closed or self._ended:
                return
            values = {"path": str(hub.path), "secret": hub.secret, "fingerprint": plan.fingerprint}
            numbers = {"first": first[engine], "ranks": engine.ranks, "rank": 0}
            self.receptions.start(engine, link, Ticket(self._name, {**values, **numbers}), port)

    def await_joined(self, port: Port) -> None:
        """Wait until every rank that counts has joined."""
        self._wait(port, "joining", self._absent, blame=False)
        for rank, peer in self.hub.members.items():
            self._pool.met(peer.process, peer.pid, self._ranks[rank].id, peer.holds)

    def take_memory(self, plan: Plan, mode: str) -> None:
        """Have the memory for this plan, and hand it to every process that has not mapped it.

        Raises:
            TransportError: there is not enough.
        """
        peers = self.hub.counting.values()
        aliased = any(peer.aliases for peer in peers)
        self.whole = mode == "publish" or (mode == "auto" and aliased)
        if self.whole:
            self._segment = self._pool.version(layout_of(plan).size, pair=aliased)
        else:
            self._slot_size = max(1, plan.largest)
            self._segment = self._pool.ring(self._slot_size * min(self._slots, len(plan.buckets)))
        self._hand_over(self._segment)

    def _hand_over(self, segment: M) -> None:
        self.hub.hand_over(segment)
        for peer in self.hub.counting.values():
            self._pool.shown(peer.process, segment)

    # -- sending -----------------------------------------------------------------------------------------

    def room(self, plan: Plan, bucket: Bucket, port: Port) -> tuple[M, int]:
        """Where ``bucket`` is to be written, when nobody reads there any more; the segment, and where in it.

        Raises:
            PortClosed: the round moved on.
        """
        segment = self._segment
        if segment is None:
            raise PortClosed("the round ended before there was memory")
        if self.whole:
            # Nothing is written where anybody reads; but words that nobody takes fill the socket.
            ahead = bucket.index - _WINDOW
            self._wait(port, f"taking bucket {ahead}", lambda: self._copying(ahead))
            return segment, layout_of(plan).starts[bucket.index]
        slots = segment.size // self._slot_size
        before, slot = bucket.index - slots, bucket.index % slots
        self._wait(port, f"letting go of bucket {before}", lambda: self._reading(before, cut=False))
        if before >= 0 and self._reading(before, cut=True):
            self._spares[slot] = self._pool.spare(self._slot_size)
            self._hand_over(self._spares[slot])
        spare = self._spares.get(slot)
        return (segment, slot * self._slot_size) if spare is None else (spare, 0)

    def show(self, bucket: int, segment: M, at: int, *, last: bool) -> None:
        """Tell every rank that counts where the bucket lies; whether it is the ``last`` one.

        Who copies a version begins at once. Who has only to look at it is told of many buckets in one word,
        because each word costs both ends more than to look.
        """
        where: dict[str, str | int] = {"segment": segment.id, "whole": self.whole}
        self.hub.tell(
            "bucket", lambda peer: not self._looks(peer), bucket=bucket, last=bucket, at=at, **where
        )
        if not self.whole:
            return
        now = time.monotonic()
        first, start, since = self._untold or (bucket, at, now)
        if last or now - since >= _SIGN:
            self.hub.tell("bucket", self._looks, bucket=first, last=bucket, at=start, **where)
            self._untold = None
        else:
            self._untold = first, start, since

    def look(self, port: Port) -> float | None:
        """Fire new losses, and note signs of life. Hands back when it wants to look again, in seconds."""
        pause = self._look(port)
        if self._signs(self._owing()):
            port.progress()
        return min(pause or _GLANCE, _GLANCE)

    # -- the end -----------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Wake everybody, tell the ranks, close everything. Idempotent."""
        with self._lock:
            self._ended = True
            hub = self._hub
        self.bell.ring()
        if hub is not None:
            hub.close(why)

    def settle(self) -> None:
        """The round ended well: whoever is done reads the ring no more."""
        if self._hub is None or self.whole or self._segment is None:
            return
        hub, ring = self._hub, self._segment
        # Their last word may be a moment behind their receipts.
        self.bell.wait(lambda: not any(map(self._may_view, hub.counting.values())), _MOMENT)
        reading = {peer.process for peer in hub.members.values() if self._may_view(peer)}
        for process in {peer.process for peer in hub.members.values()} - reading:
            self._pool.released(process, ring)

    # -- waiting -----------------------------------------------------------------------------------------

    def begin(self, port: Port) -> None:
        """A phase begins. Who gives signs of life may be at one bucket for a third of what is left."""
        self._patience = port.left / 3

    def _absent(self) -> set[int]:
        here, counting = self.hub.members, self._counting
        return {rank for rank, engine in self._ranks.items() if engine in counting and rank not in here}

    def _reading(self, bucket: int, *, cut: bool) -> set[int]:
        """The ranks that may view ``bucket``, or have yet to see it: those that were ``cut``, or count."""
        if bucket < 0:
            return set()
        counting = self.hub.counting
        return {
            rank
            for rank, peer in self.hub.members.items()
            if peer.released <= bucket and (rank not in counting) is cut and self._may_view(peer)
        }

    def _looks(self, peer: Peer) -> bool:
        """Whether its engine copies nothing, and uses what lies there."""
        return self.whole and peer.aliases

    def _copying(self, bucket: int) -> set[int]:
        """The ranks that have yet to copy this bucket of a version."""
        peers = self.hub.members
        return {rank for rank in self._reading(bucket, cut=False) if not self._looks(peers[rank])}

    def _may_view(self, peer: Peer) -> bool:
        """Whether its process may have a view of the ring: until it says that it has none, or is dead."""
        ring = self._segment.id if self._segment is not None else ""
        let_go = peer.done or (peer.keeps is not None and ring not in peer.keeps)
        return not let_go and not self._pool.dead(peer.process)

    def _owing(self) -> set[int]:
        return {rank for rank, peer in self.hub.counting.items() if not peer.done}

    def _wait(self, port: Port, doing: str, late: Callable[[], set[int]], *, blame: bool = True) -> None:
        """Wait until nobody is ``late``. Who still is when the phase ends is lost, by name.

        Args:
            port: of the phase.
            doing: what they are late with.
            late: the numbers of those ranks now.
            blame: whether the round is told whom it waits for.

        Raises:
            PortClosed: the round moved on.
            TransportError: nobody is left.
        """
        # A little before the end, so that the error says who is late, and not only that it is late.
        margin = min(0.5, port.limit / 10)
        before: set[int] = set()
        while not (self._ended or port.closed):
            noted = self.bell.rings
            pause = self._look(port)
            waiting = late()
            if (before - waiting) or self._signs(waiting):
                port.progress()
            if not waiting and self._counting:
                return
            before = waiting
            if blame:
                port.waiting_for({self._ranks[rank] for rank in waiting})
            left = port.limit - margin
            if left <= 0:
                self._lose_the_late(waiting, doing, port)
                if not self._counting:
                    raise TransportError(f"{doing}: no engine receives any more")
                continue
            self.bell.rung(noted, min(left, pause or _GLANCE, _GLANCE))
        raise PortClosed(f"{doing}: the round moved on")

    def _lose_the_late(self, ranks: Iterable[int], doing: str, port: Port) -> None:
        peers = self.hub.members
        self._lose_who_left(port)  # what it said on its way out is more than that it is late
        for rank in ranks:
            engine = self._ranks[rank]
            error = EngineSilent(f"engine {engine} is late with {doing}{_at(peers.get(rank))}")
            self.receptions.lose(engine, error, port)
        self._fence(port)

    def _signs(self, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks gave a sign of life, and has not been at its bucket for too long."""
        now, before, peers = time.monotonic(), self._beats, self.hub.counting
        awaited = [peers[rank] for rank in ranks if rank in peers]
        self._beats = sum(peer.beats for peer in awaited if now - peer.since < self._patience)
        return self._beats > before

    # -- losses ------------------------------------------------------------------------------------------

    @property
    def _counting(self) -> set[Participant]:
        return {engine for engine in self._ranks.values() if engine not in self._out}

    def _look(self, port: Port) -> float:
        """Fire new losses, and cut off whoever takes no part any more."""
        self.receptions.look(port)
        pause = self._lose_who_left(port, _GRACE)
        self._fence(port)
        return pause

    def _lose_who_left(self, port: Port, grace: float = 0.0) -> float:
        """Fire the loss of those who left ``grace`` seconds ago. Hands back when the next one is due."""
        return self.receptions.lose_who_left(self.hub.left, self._ranks, port, grace)

    def _fence(self, port: Port) -> None:
        remaining = set(port.engines)
        for rank, engine in self._ranks.items():
            if engine not in remaining or engine in self.receptions.lost:
                self._out.add(engine)
                self.hub.cut(rank, "the engine takes no part in the round any more")


def _at(peer: Peer | None) -> str:
    """What it was last heard to be doing."""
    if peer is None:
        return ": it never joined"
    if peer.at < 0:
        return ""
    return f": it has been at bucket {peer.at} for {time.monotonic() - peer.since:.3g} s"
