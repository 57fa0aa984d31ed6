"""How weights are gathered for a hand-over: the plan as a value, and whether all ranks may use it again.

A trainer whose weights are spread over its ranks has to plan how to gather them. Planning is slow and is done
by all ranks together: a rank that plans while another one goes on with an old plan waits for ever. So a rank
says first, without a collective, where it *stands*: by the *outline* of what it has now, and by that of which
its plan was made. ``decide`` takes all standings and says one thing to all ranks: make the plan anew, or use
it again.

* An outline has lines that all ranks share, and lines of the rank's own. If shared lines differ, the ranks
  are not one trainer, and nothing is planned.
* A plan belongs to a *key*, the digest of all ranks' outlines together. It is used again only if every rank
  has the plan of one key, and that is the key of now.
* If all ranks have changed, or one has no plan, all of them make it anew.
* If some have changed since the plan of one key was made, and others have not, nothing is planned: a rank
  that has changed alone is a mistake, and to plan with it might never end.

The plan is plain values: names, dtypes, shapes, who holds which part. It refers to no tensor and no module;
those are looked up by name when they are read. What carries all this out is ``handlers/exports.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .errors import PlanMismatch
from .lines import named, parting

__all__ = [
    "Cut", "Decision", "ExportPlan", "Exporter", "Outline", "Planned", "Slot", "Standing", "decide",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that one rank holds.

    Args:
        rank: of the trainer.
        offset: where it begins, a number for each dimension. A single one counts elements, in their order.
        size: how much it is, in the same way.
    """

    rank: int
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One entry of a plan.

    Args:
        dtype: empty if it is known only when it is read.
        owners: the ranks that hold some of it.
        cuts: which of it; empty if each owner holds all of it, or if only the exporter knows.
        of: the entry that it is another name of; empty if it is none.
        live: whether it is worked out from the values of each hand-over, as a scale is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ()
    of: str = ""
    live: bool = False


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What is gathered, in this order, and from where. ``hash`` is of all of it."""

    slots: tuple[Slot, ...]
    key: str
    hash: str

    @classmethod
    def sealed(cls, slots: Iterable[Slot], key: str) -> ExportPlan:
        """Add what follows from the rest."""
        slots = tuple(slots)
        return cls(slots, key, _digest([asdict(slot) for slot in slots]))


@dataclass(frozen=True, slots=True)
class Outline:
    """What a plan is made of, as far as a rank sees it by itself. Values of tensors are no part of it.

    Args:
        world: how many ranks gather together.
        shared: lines that are the same on all of them.
        own: lines that may differ from rank to rank.
    """

    world: int
    shared: tuple[str, ...]
    own: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """All that has to be the same everywhere, a line each, to be compared."""
        return [f"world {self.world}", *self.shared]

    @property
    def common(self) -> str:
        """The digest of that."""
        return _digest(self.lines)

    @property
    def mark(self) -> str:
        """The digest of everything."""
        return _digest([self.lines, self.own])

    def change_to(self, now: Outline) -> str:
        """The first line that is another one now."""
        for before, after in ((self.lines, now.lines), (self.own, now.own)):
            found = parting(before, after)
            if found is not None:
                return f"{found.one} is now {found.other}"
        return ""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands.

    Args:
        common: the digest of what it has to share with the others.
        mark: of its whole outline.
        key: of its plan; empty if it has none.
        planned: the mark of the outline of which that was made.
        change: in what it has changed since; empty if it has not.
    """

    common: str
    mark: str
    key: str = ""
    planned: str = ""
    change: str = ""

    def to_json(self) -> dict[str, str]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Standing:
        """Read ``to_json`` back."""
        return cls(**told)


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do: ``build`` the plan of this key, or use the one that they have."""

    build: bool
    key: str

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Decision:
        """Read ``to_json`` back."""
        return cls(**told)


def decide(standings: Mapping[int, Standing]) -> Decision:
    """The one thing that all ranks do.

    Args:
        standings: of every rank, by its number. What they share has been compared.

    Raises:
        PlanMismatch: some have changed and others have not.
    """
    key = _digest([standings[rank].mark for rank in sorted(standings)])
    keys = {each.key for each in standings.values()}
    if keys == {key}:
        return Decision(build=False, key=key)
    changed = sorted(rank for rank, each in standings.items() if each.mark != each.planned)
    if "" in keys or len(keys) > 1 or len(changed) in (0, len(standings)):
        return Decision(build=True, key=key)
    others = sorted(set(standings) - set(changed))
    raise PlanMismatch(
        f"{named(changed)} of the trainer changed since the export plan was made ("
        f"{standings[changed[0]].change}), and {named(others)} did not: change all of them, or, if it is "
        "meant to be so, call reset() of the export on every rank"
    )


class Exporter(Protocol):
    """Knows how the weights of one kind of trainer are gathered. It keeps no tensor and no module."""

    @property
    def lasting(self) -> bool:
        """Whether a plan may be used again. If not, all ranks plan in every hand-over."""

    def outline(self) -> Outline:
        """What a plan would be made of now. Quick, and without a collective."""

    def plan(self) -> Sequence[Slot]:
        """Plan. With all ranks: collectives are fine here."""

    def tensors(self, plan: ExportPlan) -> Iterator[tuple[str, Any]]:
        """The tensors as they are now, whole, by name, in one order on all ranks. With all ranks."""

    def forget(self) -> None:
        """Drop whatever was kept beside the plan."""


class Planned(Protocol):
    """A source of weights that has to be agreed on by all ranks before it is read."""

    def standing(self) -> tuple[Outline, Standing]:
        """What this rank has now, and where it stands. Without a collective."""

    def settle(self, decision: Decision) -> None:
        """What all ranks do; the source is read next."""


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode("ascii")).hexdigest()
