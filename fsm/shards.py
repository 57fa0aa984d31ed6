"""What a rank holds of the trainer's weights, as a value: the shards, their forms, and where each belongs.

A *shard* is a tensor in this rank's memory: a whole parameter, its part of one, or its part of several that
FSDP1 has made one flat parameter of. Its *place* says which part that is, and its *parts* what it is made of.
Bytes fit only where names, dtypes, shapes, places and parts are all the same; a shape alone does not say it:
two ranks that swapped their halves hold the same shapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from .errors import LayoutChanged, SetupError
from .lines import parting

__all__ = ["Form", "Layout", "Shard"]

_SHOWN = 3


class Form(Enum):
    """How a parameter lies in memory. The name is what a user writes."""

    flat = "part of a flat parameter of FSDP1"
    dtensor = "a DTensor, as FSDP2 makes them"
    plain = "a plain tensor"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of them.

    Args:
        name: of the parameter or buffer, without what wrappers add to it; of a flat one, its unit's.
        form: how it lies in memory.
        dtype: its name.
        shape: here, on this rank.
        nbytes: here, too.
        place: which part this rank has.
        parts: what it is part of, or made of.
        ranks: over how many ranks it is spread.
    """

    name: str
    form: Form
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: str = ""
    parts: tuple[str, ...] = ()
    ranks: int = 1

    def difference(self, now: Shard) -> str:
        """What of this one, which is kept, is not as it is now; empty if nothing is."""
        for what in ("form", "dtype", "shape", "place", "ranks"):
            mine, other = getattr(self, what), getattr(now, what)
            if mine != other:
                return f"its {what} was {_told(mine)} and is {_told(other)}"
        found = parting(self.parts, now.parts)
        return "" if found is None else f"it was made of {found.one} where there is {found.other} now"


@dataclass(frozen=True, slots=True)
class Layout:
    """All shards of a rank, in the model's order."""

    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        """How much they take."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def ranks(self) -> int:
        """Over how many ranks these weights are spread."""
        return max((shard.ranks for shard in self.shards), default=1)

    @property
    def fingerprint(self) -> str:
        """Of everything in it."""
        lines = [
            [each.name, each.form.name, each.dtype, each.shape, each.place, each.parts, each.ranks]
            for each in self.shards
        ]
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:32]

    def expect(self, form: Form | None) -> None:
        """Refuse weights of another form than the user has said. Plain ones may be among sharded ones.

        Raises:
            SetupError: they are of another one; or there are none.
        """
        if not self.shards:
            raise SetupError("Snapshots: the model has no parameters, so there is nothing to keep")
        if form is None:
            return
        other = next((each for each in self.shards if each.form not in (form, Form.plain)), None)
        if other is None and all(each.form is not form for each in self.shards):
            other = self.shards[0]
        if other is not None:
            raise SetupError(
                f"Snapshots(form={form.name!r}): {other.name!r} is {other.form.value}; say "
                f"form={other.form.name!r}, or leave it to the model"
            )

    def fitting(self, now: Layout, *, strict: bool) -> tuple[str, ...]:
        """The names of what is kept here and may be written to a model of the layout ``now``.

        Args:
            now: what the model is.
            strict: whether each name has to be in both.

        Raises:
            LayoutChanged: something does not fit; the message names it.
        """
        here = {each.name: each for each in now.shards}
        kept = {each.name: each for each in self.shards}
        if strict:
            _refuse(kept.keys() - here.keys(), "kept, but not in the model any more")
            _refuse(here.keys() - kept.keys(), "in the model, but nothing is kept of them")
        both = tuple(name for name in kept if name in here)
        for name in both:
            difference = kept[name].difference(here[name])
            if difference:
                raise LayoutChanged(f"{name!r} is not what was kept: {difference}")
        if not both:
            raise LayoutChanged("nothing of what is kept is in the model")
        return both


def _refuse(names: Iterable[str], why: str) -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise LayoutChanged(f"{', '.join(map(repr, found[:_SHOWN]))}{more}: {why}")


def _told(value: object) -> str:
    return value.value if isinstance(value, Form) else str(value)
