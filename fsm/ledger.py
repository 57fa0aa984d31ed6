"""The ledger as a value: which version is published, and which bytes a number stands for.

A version is *published* when every remaining engine has confirmed that it holds it. From then on the ledger
says so, over restarts too, and four rules hold:

* **Versions never fall.** A number below the published one is refused. 0 is a real version; an empty ledger
  has published nothing.
* **A number stands for one set of bytes.** When a round enters Cleaning, engines start to commit, so its
  number is *bound* to its digest even if it is never published. From then on the same number with other
  bytes is refused, and so is every lower one, because an engine may already hold the bound version. The same
  number with the same digest is welcome: a retry, or an engine that catches up. A digest may be of a part of
  the bytes (``sampling.py``), the same part for the same number: then other bytes under one number are
  noticed where they are sampled. Digests of different parts cannot be compared, so they are refused, too.
* **A late publication is refused like a late frame.** Every change carries the epoch of its round. One that
  is older than an epoch which the ledger has seen changes nothing. ``shut`` makes it see an epoch as over,
  for a publication that was asked for, never answered and given up.
* **Saying the same again is harmless.** A publication that is already there is confirmed, not refused.

``admit`` asks the first two questions before the lock is taken; ``bind`` and ``publish`` ask all of them.
Everything here is pure: a method returns the next ledger or raises, and then nothing has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from .errors import LedgerError
from .sampling import part_of

__all__ = [
    "Ledger",
    "LedgerCorrupt",
    "LedgerError",
    "LedgerKeeper",
    "StaleVersion",
    "VersionBound",
]

_SCHEMA = 1
_KEYS = {"schema", "version", "epoch", "digest", "fence", "bound"}


class StaleVersion(LedgerError):
    """A version below one that engines may already hold, or a change of a round that is over."""


class VersionBound(LedgerError):
    """The version's number already stands for other bytes."""


class LedgerCorrupt(LedgerError):
    """What was read is not a ledger."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is published. ``epoch`` published it; ``fence`` is the lowest epoch that may still change it."""

    version: int | None = None
    epoch: int = 0
    digest: str | None = None
    bound: Mapping[int, str] = field(default_factory=dict)
    fence: int = 0

    def __post_init__(self) -> None:
        bound = {number: digest for number, digest in self.bound.items() if number >= (self.version or 0)}
        if self.version is not None and self.digest is not None:
            bound[self.version] = self.digest
        object.__setattr__(self, "bound", MappingProxyType(bound))

    def __reduce__(self) -> tuple[Callable[..., Ledger], tuple[Any, ...]]:
        """A read-only mapping does not pickle by itself, and a ledger may be sent to another process."""
        return Ledger, (self.version, self.epoch, self.digest, dict(self.bound), self.fence)

    @property
    def newest(self) -> int | None:
        """The highest version that an engine may hold."""
        return max(self.bound, default=None)

    def admit(self, version: int, digest: str) -> None:
        """Refuse a round that could not end well, before it takes the lock."""
        if type(version) is not int or version < 0:
            raise LedgerError(f"a version is a whole number from 0 up, not {version!r}")
        if not digest:
            raise LedgerError(f"version {version} has an empty digest")
        newest = self.newest
        if newest is not None and version < newest:
            state = "published" if newest == self.version else "bound (engines may hold it)"
            raise StaleVersion(
                f"version {version} is too low: {newest} is {state}; use {newest} with its bytes or go higher"
            )
        known = self.bound.get(version, digest)
        if known != digest:
            raise VersionBound(
                f"version {version} stands for the bytes {known}, {_other(known, digest)}; give these a "
                "higher number"
            )

    def bind(self, version: int, digest: str, epoch: int) -> Ledger:
        """Note that engines are about to commit: from now on the number stands for these bytes."""
        self._check(version, digest, epoch)
        # Lower numbers are refused by their number alone, so their digests are not needed any more.
        return replace(self, bound={version: digest}, fence=max(self.fence, epoch))

    def publish(self, version: int, digest: str, epoch: int) -> Ledger:
        """Compare and set: publish, unless something newer has been seen."""
        if (version, digest, epoch) == (self.version, self.digest, self.epoch):
            return self
        self._check(version, digest, epoch)
        return Ledger(version, epoch, digest, {version: digest}, max(self.fence, epoch))

    def shut(self, epoch: int) -> Ledger:
        """Refuse every further change by this epoch or an older one."""
        return replace(self, fence=max(self.fence, epoch + 1))

    def ask(self, version: int, epoch: int) -> bool:
        """Did the round of this epoch, or a later one, publish this version?

        Raises:
            StaleVersion: a later round has published a higher version, and whether this one ever was
                published is not known any more.
        """
        if self.version is not None and self.version > version and self.epoch > epoch:
            raise StaleVersion(
                f"whether version {version} (epoch {epoch}) was published is not known any more: "
                f"version {self.version} (epoch {self.epoch}) is"
            )
        return self.version == version and self.epoch >= epoch

    def _check(self, version: int, digest: str, epoch: int) -> None:
        if epoch < self.fence:
            raise StaleVersion(
                f"version {version} comes from epoch {epoch}, which is over: only {self.fence} or later may "
                f"change the ledger"
            )
        self.admit(version, digest)

    def to_json(self) -> str:
        """One line of text, the same for the same ledger."""
        record = {
            "schema": _SCHEMA,
            "version": self.version,
            "epoch": self.epoch,
            "digest": self.digest,
            "fence": self.fence,
            "bound": {str(version): self.bound[version] for version in sorted(self.bound)},
        }
        return json.dumps(record) + "\n"

    @staticmethod
    def from_json(text: str | bytes, source: str = "this text") -> Ledger:
        """Read ``to_json`` back. Refuses everything else, naming ``source``."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _corrupt(source, f"not JSON ({error})") from error
        if not isinstance(record, dict) or "schema" not in record:
            raise _corrupt(source, "it has no schema number")
        if record["schema"] != _SCHEMA:
            raise _corrupt(source, f"its schema is {record['schema']!r}, this version reads {_SCHEMA}")
        if record.keys() != _KEYS:
            raise _corrupt(source, f"its keys are {', '.join(sorted(record))}")
        return _restored(record, source)


def _restored(record: dict[str, Any], source: str) -> Ledger:
    version, digest, epoch, fence = (record[key] for key in ("version", "digest", "epoch", "fence"))
    bound = _bound(record["bound"], source)
    if not _is_count(epoch) or not _is_count(fence) or epoch > fence:
        raise _corrupt(source, f"epoch {epoch!r} and fence {fence!r} do not go together")
    if version is None:
        if digest is not None or epoch:
            raise _corrupt(source, "it has a digest or an epoch but no version")
    elif not _is_count(version) or not isinstance(digest, str) or not digest:
        raise _corrupt(source, f"version {version!r} and digest {digest!r} do not go together")
    elif min(bound, default=-1) < version or bound.get(version, digest) != digest:
        raise _corrupt(source, f"version {version} is published, but other versions are bound")
    return Ledger(version, epoch, digest, bound, fence)


def _bound(record: object, source: str) -> dict[int, str]:
    bound: dict[int, str] = {}
    for key, digest in record.items() if isinstance(record, dict) else [("", record)]:
        if not (key.isascii() and key.isdecimal() and isinstance(digest, str) and digest):
            raise _corrupt(source, f"{key!r}: {digest!r} binds no version to a digest")
        bound[int(key)] = digest
    return bound


def _other(known: str, digest: str) -> str:
    """In which way a digest is another one."""
    if part_of(known) == part_of(digest):
        return f"not {digest}"
    return f"and {digest} is of another part of them, so nobody can tell whether they are the same"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _corrupt(source: str, why: str) -> LedgerCorrupt:
    return LedgerCorrupt(
        f"{source} is not a version ledger: {why}; restore it from a copy, or start a new one"
    )


class LedgerKeeper(Protocol):
    """Where a ledger lives. Each call refuses with a ``LedgerError``, and then nothing has changed."""

    def current(self) -> Ledger:
        """What the ledger says now."""
        ...

    def version(self) -> int | None:
        """The published version; None before the first."""
        ...

    def admit(self, version: int, digest: str) -> None:
        """Refuse a version that could not be published, before anything moves."""
        ...

    def bind(self, version: int, digest: str, epoch: int) -> None:
        """Bind the number to the bytes, durably, before the first engine commits."""
        ...

    def publish(self, version: int, digest: str, epoch: int) -> None:
        """Publish, durably."""
        ...

    def shut(self, epoch: int) -> None:
        """Refuse whatever this epoch may still send."""
        ...

    def ask(self, version: int, epoch: int) -> bool:
        """Is it published?"""
        ...
