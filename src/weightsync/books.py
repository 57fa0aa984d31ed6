"""What the trainer's side remembers of its engines between rounds, by incarnation.

A version is written down for an engine only when the engine itself confirmed a commit, under the incarnation
that confirmed it. A restarted engine is another incarnation and therefore starts with nothing: it is stale
until a round commits on it. A quarantined engine stays so until the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from .fsm.contract import EngineLink, EngineStatus
from .fsm.errors import EngineError, EngineGone, EngineSilent, SetupError
from .fsm.receipt import Participant
from .fsm.results import RoundResult
from .fsm.states import Disposition, EngineState

__all__ = ["EngineBooks", "Entry"]

_GLANCE = 0.2
"""Seconds between two looks whether a first contact is still wanted."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine as the books have it.

    Args:
        participant: its id, incarnation and ranks; None until it was reached.
        version: the version its last confirmed commit made it hold; None if it is unproven.
        told: the version it says it holds, proven to this trainer or not.
        quarantined: it was lost or torn, and no commit of it was confirmed since.
        asked: whether its incarnation is known to be the present one as of the last round.
        waited: whether it was once given the time that a first contact may take.
    """

    id: str
    participant: Participant | None = None
    stages: bool = True
    version: int | None = None
    told: int | None = None
    quarantined: bool = False
    asked: bool = False
    waited: bool = False
    error: BaseException | None = None


class EngineBooks:
    """The books of one ``WeightSync``.

    Raises:
        SetupError: no engine, or two with one name.
    """

    def __init__(self, links: Iterable[EngineLink]) -> None:
        self.links: dict[str, EngineLink] = {}
        for link in links:
            if link.id in self.links:
                raise SetupError(f"two engines are called {link.id!r}: give each an id of its own")
            self.links[link.id] = link
        if not self.links:
            raise SetupError("WeightSync needs at least one engine")
        self._entries: dict[str, Entry] = {name: Entry(name) for name in self.links}
        self._turn = threading.Lock()
        self._rounds = 0

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
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Ask the engines whose incarnation is not certain what they are, all at once.

        Args:
            limit: seconds that an engine may take.
            first: seconds for one that was never reached, and may still be starting. It gets them once, and
                ``limit`` from then on.
            spare: how many may be lost. When more are, there is no round, and ``first`` is not waited for.
            everybody: ask those who are certain, too.
            stopped: whether nobody wants to know any more.
        """
        begun = time.monotonic()
        with self._turn:
            rounds, before = self._rounds, dict(self._entries)
        names = [name for name, entry in before.items() if everybody or not entry.asked]
        asked = [(name, self._hello(name)) for name in names]

        def enough() -> bool:
            if stopped() or spare is None or time.monotonic() < begun + limit:
                return stopped()
            return sum(_failed(answer) for _, answer in asked) > spare

        for name, answer in asked:
            new = first is not None and before[name].participant is None and not before[name].waited
            mine = max(limit, first or 0.0) if new else limit
            if not _answered(answer, begun + mine, enough):
                if time.monotonic() < begun + mine:
                    continue  # it was not waited for to the end, which says nothing about it
                silent = self._unreached(name, _silent(name, mine, before[name]))
                known = replace(silent, waited=silent.waited or new)
            else:
                try:
                    known = self._heard(name, answer.result())
                except Exception as error:  # noqa: BLE001 - whatever an adapter raises, it was not reached
                    known = self._unreached(name, error)
            with self._turn:
                if self._rounds == rounds:  # else what it said is older than what the round has proved
                    self._entries[name] = known

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

    def settle(self, result: RoundResult) -> None:
        """Write down what a round decided."""
        with self._turn:
            self._rounds += 1
            for row in result.engines:
                entry = self._entries[row.engine]
                if entry.participant is not None and entry.participant.incarnation != row.incarnation:
                    continue  # it was started anew meanwhile, and has proved nothing in this life
                if row.disposition is Disposition.serving_new:
                    entry = replace(entry, version=row.version, quarantined=False)
                elif row.disposition is Disposition.quarantined:
                    entry = replace(entry, version=None, quarantined=True, asked=False)
                self._entries[row.engine] = entry

    def servable(self) -> dict[str, int]:
        """The engines a router may use, with the version each serves."""
        return {
            name: entry.version
            for name, entry in self.entries().items()
            if entry.version is not None and not entry.quarantined and entry.error is None
        }

    def _hello(self, name: str) -> Future[EngineStatus]:
        try:
            return self.links[name].hello()
        except Exception as error:  # noqa: BLE001 - a link that raises answers like one whose future fails
            failed: Future[EngineStatus] = Future()
            failed.set_exception(error)
            return failed

    def _heard(self, name: str, status: EngineStatus) -> Entry:
        entry = self._entries[name]
        if status.engine != name:
            raise EngineError(f"the link to engine {name} leads to one that calls itself {status.engine}")
        now = Participant(status.engine, status.incarnation, status.ranks)
        known = replace(
            entry, participant=now, stages=status.stages, told=status.version, asked=True, error=None
        )
        restarted = entry.participant is not None and entry.participant != now
        if restarted or (entry.version is not None and status.version != entry.version):
            known = replace(known, version=None)
        if status.state is EngineState.Quarantined:
            known = replace(known, version=None, quarantined=True)
        return known

    def _unreached(self, name: str, error: BaseException) -> Entry:
        entry = self._entries[name]
        gone = isinstance(error, EngineGone)
        return replace(entry, asked=False, error=error, version=None if gone else entry.version)


def _failed(answer: Future[EngineStatus]) -> bool:
    """Whether it is known already that there is no status."""
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


def _answered(answer: Future[EngineStatus], end: float, enough: Callable[[], bool]) -> bool:
    """Wait for the answer until ``end``. A start takes minutes, so it is looked whether to go on."""
    while not answer.done() and not enough() and (left := end - time.monotonic()) > 0:
        wait([answer], timeout=min(left, _GLANCE))
    return answer.done()


def _silent(name: str, limit: float, entry: Entry) -> EngineSilent:
    """What to do about it depends on whether it has ever been there."""
    if entry.participant is None:
        advice = "its actor may still be starting: raise Policy(first_contact=...)"
    else:
        advice = "if it is only slow, raise Policy(engine_limit=...)"
    return EngineSilent(f"engine {name} did not say hello within {limit:.3g} s; {advice}")
