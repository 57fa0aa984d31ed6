"""The board of the object store transport: where buckets are shown, and who let go of which is kept.

A trainer cannot be called by its engines, since it may be a driver. So there is one small actor beside it,
which the trainer and every receiving rank call, and which calls nobody:

    trainer              board              rank
    begin(round, ...)                                   these are the ranks, by key
    show(round, k, refs)                                bucket k lies in the store
                                            take(k)     lets go of all before k, and waits for k
    watch(round, seen)                                  waits until somebody let go, or left
    cut(round, keys)                                    these take no part any more
                                            leave()     lets go of everything
    end(round, why)                                     everybody is woken, everything forgotten

Only the board holds the references of a round, each until every rank that counts let go of its bucket. A rank
that has got a reference is another holder of it, which Ray counts. So the memory of a bucket is free when
everybody let go, and is not a moment earlier, also if a rank that was cut still reads it.

Every call may come late, twice, or after its round is over, and does no harm then. This module is what the
actor's process imports: no torch, and no Ray either. References are lists, so that Ray does not look
into them on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OVER", "Board", "Key", "Seen", "Shown"]

Key = tuple[str, int]
"""A rank: the key of its engine's ticket, and its number there."""

Seen = tuple[int, dict[Key, tuple[int, bool]]]
"""What a watch gives: how often something changed; and of each rank, before which bucket it let go of all,
and whether it counts."""

Shown = tuple[str, Any]
"""What a take gives: ``""`` and the bucket; or why there will be none, and None."""

OVER = "its round is over"


@dataclass(slots=True)
class _Rank:
    done: int = 0
    cut: str = ""
    taken: bool = False


@dataclass(slots=True)
class _Round:
    session: list[Any]
    ranks: dict[Key, _Rank]
    frames: dict[int, list[Any]] = field(default_factory=dict)
    changes: int = 1  # nobody has seen anything yet
    over: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self) -> None:
        """Forget what nobody waits for, and wake everybody."""
        counting = [rank.done for rank in self.ranks.values() if not rank.cut]
        needed = {} if self.over or not counting else self.frames
        self.frames = {index: refs for index, refs in needed.items() if index >= min(counting)}
        self.changes += 1
        before, self.changed = self.changed, asyncio.Event()
        before.set()

    async def until(self, ready: Callable[[], object]) -> None:
        """Sleep until it is ``ready``."""
        while not ready():
            await self.changed.wait()


class Board:
    """What runs in the actor, on one event loop: nothing here needs a lock."""

    def __init__(self) -> None:
        self._rounds: dict[str, _Round] = {}
        self._of: dict[Key, str] = {}

    async def begin(self, name: str, session: list[Any], engines: Mapping[str, int]) -> None:
        """A round with these engines: the key of each, and how many ranks it has."""
        ranks = {(key, rank): _Rank() for key, count in engines.items() for rank in range(count)}
        self._rounds[name] = _Round(session, ranks)
        self._of |= dict.fromkeys(ranks, name)

    async def show(self, name: str, index: int, refs: list[Any]) -> None:
        """A bucket lies in the store, under the one reference in this list."""
        round = self._rounds.get(name)
        if round is not None:
            round.frames[index] = refs
            round.change()

    async def watch(self, name: str, seen: int) -> Seen | None:
        """What has become of the ranks, as soon as it is not what was seen; None when the round is over."""
        round = self._rounds.get(name)
        if round is None:
            return None
        await round.until(lambda: round.changes != seen or round.over)
        ranks = {key: (rank.done, not rank.cut) for key, rank in round.ranks.items()}
        return None if round.over else (round.changes, ranks)

    async def cut(self, name: str, keys: list[str], why: str) -> None:
        """The engines with these keys get no further bucket, and are not waited for."""
        round = self._rounds.get(name)
        if round is not None:
            for (key, _), rank in round.ranks.items():
                if key in keys:
                    rank.cut = rank.cut or why
            round.change()

    async def end(self, name: str, why: str) -> None:
        """The round is over."""
        round = self._rounds.pop(name, None)
        if round is not None:
            for key in round.ranks:
                self._of.pop(key, None)
            round.over = why
            round.change()

    # -- the ranks -------------------------------------------------------------------------------------------

    async def enter(self, key: str, number: int) -> Shown:
        """Begin to receive, which is done once; gives the session that the ticket is for."""
        round = self._rounds.get(self._of.get((key, number), ""))
        if round is None:
            return f"this ticket leads nowhere: {OVER}, or it never had such a rank", None
        rank = round.ranks[key, number]
        if rank.taken:
            return "it receives already; a ticket is good for one reception", None
        rank.taken = True
        return rank.cut, round.session

    async def take(self, key: str, number: int, index: int) -> Shown:
        """Let go of all buckets before this one, and wait for it: the session, the number, the reference."""
        round = self._rounds.get(self._of.get((key, number), ""))
        if round is None:
            return OVER, None
        rank = round.ranks[key, number]
        self._let_go(round, rank, index)
        await round.until(lambda: rank.cut or round.over or index in round.frames)
        why = rank.cut or round.over
        return (why, None) if why else ("", [round.session, index, round.frames[index]])

    async def leave(self, key: str, number: int, done: int, why: str) -> None:
        """A rank let go of everything, and takes nothing any more; it had applied so many buckets."""
        round = self._rounds.get(self._of.get((key, number), ""))
        if round is not None:
            rank = round.ranks[key, number]
            rank.cut = rank.cut or why
            self._let_go(round, rank, done)
            round.change()

    async def held(self) -> tuple[int, int]:
        """For tests: how many rounds are open, and how many buckets are shown in them."""
        return len(self._rounds), sum(len(round.frames) for round in self._rounds.values())

    def _let_go(self, round: _Round, rank: _Rank, index: int) -> None:
        if index > rank.done:
            rank.done = index
            round.change()
