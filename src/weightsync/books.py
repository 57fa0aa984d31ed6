"""What the trainer's side remembers of its engines between rounds, by incarnation.

A version is written down for an engine only when the engine itself confirmed a commit, under the incarnation
that confirmed it. A restarted engine is another incarnation and therefore starts with nothing: it is stale
until a round commits on it. A quarantined engine stays so until the same, and rests between the rounds that
fail to bring it back (``fsm/recovery.py``).

Engines come and go between rounds: who is added or removed is so from the next round on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from .asking import ask, awake
from .entries import Entry, learnt, rests
from .fsm.contract import EngineLink
from .fsm.errors import (
    EngineRefused,
    EngineResting,
    EngineTaken,
    EngineUnknown,
    SetupError,
)
from .fsm.receipt import Participant
from .fsm.recovery import Backoff, Care
from .fsm.results import EngineRow, RoundResult
from .fsm.states import Disposition

__all__ = ["EngineBooks", "Entry"]


class EngineBooks:
    """The books of one ``WeightSync``.

    Args:
        links: to the engines.
        backoff: how long an engine rests that did not come back; None: it never rests.
        now: the time; only differences mean anything.

    Raises:
        SetupError: no engine, or two with one name.
    """

    def __init__(
        self,
        links: Iterable[EngineLink],
        backoff: Backoff | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links: dict[str, EngineLink] = {}
        self.wakes: frozenset[str] = frozenset()
        """Engines that rounds wake themselves, so that they may be asleep before one."""
        self._backoff, self.now = backoff, now
        for link in links:
            if link.id in self.links:
                raise SetupError(f"two engines are called {link.id!r}: give each an id of its own")
            self.links[link.id] = link
        if not self.links:
            raise SetupError("WeightSync needs at least one engine")
        self._entries: dict[str, Entry] = {name: Entry(name) for name in self.links}
        self._turn = threading.Lock()
        self._rounds = self._questions = 0
        self._answered: dict[str, int] = {}
        """The number of the last question that an engine has answered."""
        self._epochs: set[int] = set()
        self._running: Callable[[], int] | None = None
        self._wanted: dict[str, EngineLink] = self.links
        self._new: set[str] = set()
        """Who was added since the last round, also by a link that was there before."""
        self._retired: list[EngineLink] = []
        """Links of those who were removed, to be closed when no round can need them."""
        self._left: dict[str, Participant] = {}
        """Quarantined engines that were removed: if they come back in the same life, they still are."""
        self._shut = False

    # -- who belongs to it -----------------------------------------------------------------------------------

    @property
    def wanted(self) -> Mapping[str, EngineLink]:
        """The engines of the next round."""
        return self._wanted

    def add(self, link: EngineLink) -> None:
        """Have this engine from the next round on.

        Raises:
            SetupError: there is one of that name, or it is too late.
        """
        with self._turn:
            if self._shut:
                raise SetupError(f"this WeightSync is closed: engine {link.id!r} cannot be added")
            if link.id in self._wanted:
                raise SetupError(f"there is an engine called {link.id!r}: give the new one an id of its own")
            self._wanted = {**self._wanted, link.id: link}
            self._new.add(link.id)

    def remove(self, name: str) -> None:
        """Do without this engine from the next round on; it is not servable from now on.

        Raises:
            SetupError: there is no such engine, or no other.
        """
        with self._turn:
            if name not in self._wanted:
                raise SetupError(f"no engine is called {name!r}; there are: {', '.join(self._wanted)}")
            if len(self._wanted) == 1:
                raise SetupError(f"{name!r} is the last engine: close the WeightSync instead")
            self._retired.append(self._wanted[name])
            self._wanted = {each: link for each, link in self._wanted.items() if each != name}

    def shut(self) -> None:
        """Nobody is added any more."""
        with self._turn:
            self._shut = True

    def every(self) -> list[EngineLink]:
        """All links that were not handed back, each of them once."""
        with self._turn:
            links = [*self.links.values(), *self._wanted.values(), *self._retired]
        return list({id(link): link for link in links}.values())

    def take_in(self) -> list[EngineLink]:
        """Before a round: who was added is in now, who was removed is out, and its link is handed back.

        Whoever was added has proved nothing, also if it was there before.
        """
        with self._turn:
            wanted = self._wanted
            if wanted is self.links:
                return []
            staying = {name for name in wanted if name in self._entries and name not in self._new}
            for name, entry in self._entries.items():
                if name not in staying:
                    tainted = entry.participant if entry.quarantined else entry.former
                    self._left |= {} if tainted is None else {name: tainted}
            entries = {
                name: self._entries[name]
                if name in staying
                else Entry(name, former=self._left.pop(name, None))
                for name in wanted
            }
            kept = {id(link) for link in wanted.values()}
            gone = {id(link): link for link in self._retired if id(link) not in kept}
            self.links, self._entries, self._new, self._retired = wanted, entries, set(), []
        return list(gone.values())

    # -- asking ----------------------------------------------------------------------------------------------

    def entries(self) -> Mapping[str, Entry]:
        """A copy of the books."""
        with self._turn:
            return dict(self._entries)

    def refresh(
        self,
        limit: float,
        *,
        first: float | None = None,
        spare: int | None = None,
        everybody: bool = False,
        without: Collection[str] = (),
        stopped: Callable[[], bool] = lambda: False,
        before_a_round: bool = False,
    ) -> set[str]:
        """Ask the engines whose incarnation is not certain what they are, all at once.

        Args:
            limit: seconds that an engine may take.
            first: seconds for one that was never reached, and may still be starting. It gets them once, and
                ``limit`` from then on.
            spare: how many may be lost. When more are, there is no round, and ``first`` is not waited for.
            everybody: ask those who are certain, too.
            without: nobody asks these.
            stopped: whether nobody wants to know any more.
            before_a_round: then those that rounds wake may be asleep.

        Returns:
            Whose answer was written down. It is not if a round was over before it came, if there is another
            link to that engine by now, or if somebody asked later and was answered sooner.
        """
        with self._turn:
            self._questions += 1
            question, rounds, links = self._questions, self._rounds, self.links
            before = dict(self._entries)
        doubtful = [name for name, entry in before.items() if everybody or not entry.asked]
        asked = {name: links[name] for name in doubtful if name not in without}
        starting = [name for name, entry in before.items() if entry.participant is None and not entry.waited]
        heard = set()
        for said in ask(asked, limit, first=first, starting=starting, spare=spare, stopped=stopped):
            name, ranks = said.name, getattr(asked[said.name], "ranks", None)
            told = awake(said) if before_a_round and name in self.wakes else said
            with self._turn:
                # Else what it said is older than what a round has proved, or it is another's by now.
                present = self._rounds == rounds and self.links is links
                if present and self._answered.get(name, 0) < question:
                    self._entries[name] = learnt(self._entries[name], told, ranks, self._ours)
                    self._answered[name] = question
                    heard.add(name)
        return heard

    def vouched(self, limit: float) -> dict[str, int]:
        """The engines a router may use, each of which was asked just now.

        An answer that is not taken, because a round was over before it came, says nothing of what the engine
        is since then. Whoever gave it is asked again, and left out when the time is over.

        Args:
            limit: seconds for all of it.
        """
        end = time.monotonic() + limit
        resting = self.resting(0)
        heard = self.refresh(limit, everybody=True, without=resting)
        while time.monotonic() < end and not set(self.links) <= (settled := heard | set(resting)):
            heard |= self.refresh(
                limit, everybody=True, without=settled, stopped=lambda: time.monotonic() >= end
            )
        return {name: version for name, version in self.servable().items() if name in heard}

    # -- before a round --------------------------------------------------------------------------------------

    def resting(self, quorum: int, *, apart: bool = False) -> dict[str, BaseException]:
        """Who is left out of a round of all, and why: nobody, if the others would be fewer than the quorum.

        With ``apart`` these are all the quarantined ones, which come back by rounds of their own.
        """
        with self._turn:
            entries, now = dict(self._entries), self.now()
        out: dict[str, BaseException] = {
            name: rests(entry, now)
            for name, entry in entries.items()
            if entry.quarantined and (apart or entry.care.left(now))
        }
        return out if len(entries) - len(out) >= quorum else {}

    def behind(self, version: int | None) -> list[str]:
        """Who does not hold this version for certain, and may be tried now."""
        with self._turn:
            entries, now = dict(self._entries), self.now()
        return [
            name
            for name, entry in entries.items()
            if (entry.quarantined or entry.version != version) and not entry.care.left(now)
        ]

    def recovering(self) -> dict[str, int]:
        """The quarantined engines, and how often a round was to bring each back."""
        return {name: entry.care.tries for name, entry in self.entries().items() if entry.quarantined}

    def newest_epoch(self) -> int:
        """The highest epoch that an engine has seen, of those that were reached."""
        return max((entry.seen for entry in self.entries().values() if entry.error is None), default=0)

    def taken(self, epoch: int) -> None:
        """The lock has granted this epoch last: who has seen a higher one is another lock's."""
        with self._turn:
            for name, entry in self._entries.items():
                if entry.error is None and entry.seen > epoch:
                    error = EngineTaken(
                        f"engine {name} has seen epoch {entry.seen}, of a trainer with another lock, whose "
                        f"session may be open; this lock is at epoch {epoch}: use one lock for all trainers. "
                        "If that trainer is gone, retire this lock (RayLock.retire): the next one is above"
                    )
                    self._entries[name] = replace(entry, error=error, asked=False, seen=0)
                elif entry.seen:
                    self._entries[name] = replace(entry, seen=0)  # compared: what follows are our own rounds

    def refusal(self, names: Collection[str]) -> BaseException | None:
        """Why no round can be run with one of these: what it says, or that it was never there."""
        for name, entry in self.entries().items():
            if name not in names:
                continue
            if isinstance(entry.error, EngineRefused):
                return entry.error
            if entry.error is not None and entry.participant is None:
                why = f"{type(entry.error).__name__}: {entry.error}"
                unknown = EngineUnknown(f"engine {name} was never reached: {why}")
                unknown.__cause__ = entry.error
                return unknown
        return None

    def roster(self) -> dict[Participant, EngineLink]:
        """Whom the next round asks for. An engine that was never reached is incarnation ``?``."""
        return {
            entry.participant or Participant(name, "?"): self.links[name]
            for name, entry in self._entries.items()
        }

    def unreachable(self) -> dict[Participant, BaseException]:
        """The engines that did not say hello, and why."""
        return {
            entry.participant or Participant(name, "?"): entry.error
            for name, entry in self._entries.items()
            if entry.error is not None
        }

    def newest(self) -> int | None:
        """The highest version that an engine says it holds: of an earlier trainer, perhaps."""
        return max((e.told for e in self._entries.values() if e.told is not None), default=None)

    def tainted(self) -> frozenset[Participant]:
        """The quarantined engines of the roster."""
        return frozenset(
            entry.participant or Participant(name, "?")
            for name, entry in self._entries.items()
            if entry.quarantined
        )

    def inplace(self) -> frozenset[Participant]:
        """The engines of the roster that load in place."""
        return frozenset(e.participant for e in self._entries.values() if e.participant and not e.stages)

    def begun(self, epoch: Callable[[], int]) -> None:
        """A round of ours begins, and is going to have this epoch."""
        with self._turn:
            self._note_epoch()
            self._running = epoch

    def _note_epoch(self) -> None:
        if self._running is not None:
            self._epochs.add(self._running())
            self._running = None

    def _ours(self, epoch: int) -> bool:
        return epoch in self._epochs or (self._running is not None and self._running() == epoch)

    def settle(self, result: RoundResult) -> None:
        """Write down what a round decided."""
        with self._turn:
            self._rounds += 1
            self._note_epoch()
            self._epochs.add(result.epoch)
            for row in result.engines:
                entry = self._entries.get(row.engine)
                if entry is None:
                    continue  # it was removed meanwhile
                if entry.participant is not None and entry.participant.incarnation != row.incarnation:
                    continue  # it was started anew meanwhile, and has proved nothing in this life
                self._entries[row.engine] = self._settled(entry, row, result.epoch)
            proven = [entry.epoch for entry in self._entries.values() if entry.version is not None]
            self._epochs = {epoch for epoch in self._epochs if epoch > min(proven, default=result.epoch)}

    def _settled(self, entry: Entry, row: EngineRow, epoch: int) -> Entry:
        if row.disposition is Disposition.serving_new:
            return replace(
                entry, version=row.version, epoch=epoch, quarantined=False, elsewhere=False, care=Care()
            )
        if row.disposition is not Disposition.quarantined or isinstance(row.error, EngineResting):
            return entry
        care = entry.care
        if entry.quarantined and self._backoff is not None:
            care = care.failed(self.now(), self._backoff)
        return replace(entry, version=None, quarantined=True, asked=False, care=care)

    def servable(self) -> dict[str, int]:
        """The engines a router may use, with the version each serves."""
        return {
            name: entry.version
            for name, entry in self.entries().items()
            if entry.version is not None and entry.error is None
            if not (entry.quarantined or entry.elsewhere)
            if name in self._wanted and name not in self._new
        }
