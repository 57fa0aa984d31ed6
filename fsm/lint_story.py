"""What a log has said of one round so far: the ground on which the linter's rules stand.

A story takes the log at its word. It does not ask the table what a fact should have led to: a log of a table
that is wrong replays well, and must be found out all the same. A transition *claims* what it lists in its
``facts``; rules look at each claim before the story takes it in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .record import Record
from .states import Lock, Publication, State

__all__ = ["EVIDENCE", "FORWARD", "RANK", "SENDING", "SETS", "Place", "Story", "key_of", "told_of"]

Place = tuple[str, int]
"""A file, and a line in it, counted from 1."""

SETS = ("lost", "members", "acks", "evicted", "committed", "reverted", "quarantined")
"""The facts that are sets of engines."""

EVIDENCE = frozenset({"Unlocked", "LockRefused", "LeaseLost"})
"""What proves that the lock is not held."""

RANK = {state.name: state.rank for state in State}
SENDING = frozenset({State.Locked.name, State.Broadcasting.name, State.Awaiting.name})
FORWARD = SENDING | {State.Idle.name, State.Cleaning.name}
_NOTHING: frozenset[str] = frozenset()
_TAKEN = ("VersionBound:", "StaleVersion:")


def told_of(record: Record) -> Mapping[str, Any]:
    """What a record lists in its ``facts``."""
    return record.facts or {}


def key_of(record: Record) -> str:
    """Under which word rules ask for a record: its trigger, ``call act``, or what kind it is."""
    if record.event == "transition":
        return str(record.trigger)
    return f"call {record.trigger}" if record.event == "call" else record.event


def _ids(values: Any) -> frozenset[str]:
    return frozenset(value["id"] for value in values)


@dataclass(slots=True, eq=False)
class Story:
    """One round, from its first record on. Engines are named by their ids, which differ within a roster."""

    round: str
    opened: Place
    owner: str
    step: int | None
    attempt: int
    version: int | None
    run: str
    lock_name: str
    ledger_name: str
    limits: Mapping[str, float]
    roster: Mapping[str, Mapping[str, Any]]
    quorum: int
    inplace: frozenset[str]
    tainted: frozenset[str]

    state: str = State.Idle.name
    epoch: int | None = None
    sets: dict[str, frozenset[str]] = field(default_factory=lambda: dict.fromkeys(SETS, _NOTHING))
    plan: Mapping[str, Any] | None = None
    sent: int = 0
    all_sent: bool = False
    decided: bool = False
    publication: str = Publication.no.name
    lock: str = Lock.asked.name
    evidence: str | None = None
    settled: bool = False
    unclean: bool = False
    troubled: bool = False
    result: bool = False
    outcome: str | None = None
    taken: bool = False  # whether its number was somebody else's when it came to use it

    entered: set[str] = field(default_factory=set)
    heard: set[str] = field(default_factory=set)  # the kinds of calls that were answered, well or not
    done: set[str] = field(default_factory=set)  # those that were answered well
    answered: set[tuple[str, str]] = field(default_factory=set)  # the same, with the engine
    runs: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # of an executor: prepared in any case, else well
    resumed: set[str] = field(default_factory=set)
    prepared: list[str] = field(default_factory=list)  # executors, in their order
    owing: list[str] = field(default_factory=list)  # those whose preparation has to be undone, or cleaned
    order: list[str] = field(default_factory=list)  # those of them whose undo was not even tried
    cleaned: set[str] = field(default_factory=set)
    forward: float = 0.0  # seconds in the states before Failed, those that were left

    place: Place = ("", 0)  # of the last record
    granted: Place | None = None
    granted_at: float = 0.0
    holds: bool = False  # whether it was granted in time, so that it worked under the lock
    free_at: float = 0.0  # until when it needed the lock, as far as it is known
    ended: bool = False
    bound: bool = False
    before: Story | None = None  # the round before it of the same trainer
    ahead: Story | None = None  # a round with a higher epoch that was granted before
    late: Place | None = None  # where it published after a round with a higher epoch

    @classmethod
    def of(cls, record: Record, place: Place) -> Story:
        """The story that begins with this record.

        Raises:
            KeyError, TypeError, ValueError: it does not say how the round was opened.
        """
        told = told_of(record)
        words = {name: told.get(name, "") for name in ("run", "lock", "ledger")}
        limits = told.get("limits", {})
        if not all(isinstance(word, str) for word in words.values()) or not isinstance(limits, dict):
            raise TypeError(f"it is no setting: {words}, {limits}")
        return cls(
            round=record.round,
            opened=place,
            owner=record.owner or "",
            step=record.step,
            attempt=record.attempt or 1,
            version=record.version,
            run=words["run"],
            lock_name=words["lock"] or f"of {record.owner}",
            ledger_name=words["ledger"] or f"of {record.owner}",
            limits={name: float(value) for name, value in limits.items()},
            roster={value["id"]: value for value in told["roster"]},
            quorum=int(told["quorum"]),
            inplace=_ids(told["inplace"]),
            tainted=_ids(told["tainted"]),
            place=place,
        )

    # -- what follows --------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether it is Released."""
        return self.state == State.Released.name

    def after(self, record: Record, name: str) -> frozenset[str]:
        """A set of engines as it is after the record."""
        told = told_of(record)
        return _ids(told[name]) if name in told else self.sets[name]

    def remaining(self, record: Record) -> frozenset[str]:
        """Who takes part after the record."""
        out = self.after(record, "evicted") | self.after(record, "quarantined")
        return self.after(record, "members") - out

    def missing(self, record: Record) -> frozenset[str]:
        """Who takes part after the record and has not confirmed its commit."""
        return self.remaining(record) - self.after(record, "committed")

    @property
    def open(self) -> frozenset[str]:
        """Who has not said what it is."""
        known = ("evicted", "quarantined", "committed", "reverted")
        return self.sets["members"].difference(*(self.sets[name] for name in known))

    def disposition(self, engine: str) -> str:
        """What an engine is by its own word, and by nothing else."""
        within = {name: engine in self.sets[name] for name in SETS}
        if within["evicted"] or within["quarantined"] or within["lost"]:
            return "quarantined"
        if within["committed"]:
            return "serving_new"
        if engine in self.tainted:
            return "quarantined"
        return "serving_old" if not within["members"] or within["reverted"] else "quarantined"

    @property
    def digest(self) -> str | None:
        """What the version's number stands for."""
        plan = self.plan or {}
        return plan.get("digest") or plan.get("fingerprint")

    # -- taking in -------------------------------------------------------------------------------------------

    def take(self, record: Record, place: Place) -> None:
        """Take the record in, as it is."""
        self.place = place
        if record.event == "transition":
            self._move(record, place)
        elif record.event == "call":
            self._called(record)
        elif record.event in ("undo", "cleanup"):
            self.troubled = True
        elif record.event == "result":
            self.result, self.outcome = True, told_of(record).get("outcome")
            self.taken = str(record.error).startswith(_TAKEN)

    def _move(self, record: Record, place: Place) -> None:
        told, left = told_of(record), self.state
        for name in SETS:
            if name in told:
                self.sets[name] = _ids(told[name])
        for name in ("plan", "sent", "decided", "publication", "lock", "settled", "unclean"):
            if name in told:
                setattr(self, name, told[name])
        if record.trigger == "LockGranted" and self.granted is None:
            self.epoch, self.granted, self.granted_at = record.epoch, place, record.time
            self.holds = record.target == State.Locked.name
        self.all_sent = self.all_sent or record.trigger == "AllSent"
        if self.lock == Lock.gone.name and self.evidence is None:
            self.evidence = record.trigger
        if not self.settled or "settled" in told:
            self.free_at = record.time
        self.state = str(record.target)
        self.entered.add(self.state)
        if self.state != left and left in FORWARD:
            self.forward += record.seconds or 0.0

    def _called(self, record: Record) -> None:
        act, who = str(record.trigger), str(record.undo)
        self.heard.add(act)
        self.runs[act, who] += act == "prepare" or record.error is None
        if act == "undo" and who in self.order:
            self.order.remove(who)
        if record.error is not None:
            return
        self.done.add(act)
        self.answered.add((act, str(record.engine)))
        if act == "prepare":
            self.prepared.append(who)
            if told_of(record).get("owes"):
                self.owing.append(who)
                self.order.append(who)
        elif act == "clean":
            self.cleaned.add(who)
            self.order = [each for each in self.order if each != who]
        if act in ("clean", "undo") and who in self.owing:
            self.owing.remove(who)
        elif act == "resume":
            self.resumed.add(str(record.engine))
