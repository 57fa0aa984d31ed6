"""Receipts: the proof of a receiving rank that it holds the bytes of one round and let go of the sender's.

A receipt is made in one place only, by an engine session that has reached Acked (:mod:`.engine`), and
travels unchanged. The sender's side has no way to construct one: ``Receipt(...)`` raises, and there is
nothing to call it with. Pickle and JSON carry it, because a receipt has to cross a process boundary; the
round compares each one with its own round, epoch, membership and plan, so that a replayed or foreign
receipt proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

from .errors import ReceiptRefused
from .sampling import WHOLE, part_of

__all__ = ["Expectation", "Participant", "Receipt"]


@dataclass(frozen=True, slots=True, order=True)
class Participant:
    """One engine as a member of a round: its name, which life of it, and how many ranks it has."""

    id: str
    incarnation: str = "0"
    ranks: int = 1

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a good receipt of a round must say: the plan's fingerprint, its counts, and the digest.

    ``digest`` is the digest of the tensors' content as the sender knows it, or empty when the round does
    not verify content.
    """

    fingerprint: str
    tensors: int
    bytes: int
    buckets: int
    digest: str = ""


class _Seal:
    """The token that only :meth:`Receipt._sealed` holds."""


_SEAL: Final = _Seal()


@final
class Receipt:
    """The proof of one receiving rank. Immutable; equality is by value."""

    __slots__ = (
        "bytes", "digest", "engine", "epoch", "fingerprint", "incarnation", "rank", "round", "tensors",
    )  # fmt: skip

    round: str
    epoch: int
    engine: str
    incarnation: str
    rank: int
    fingerprint: str
    tensors: int
    bytes: int
    digest: str

    def __new__(cls, seal: object = None, /, **values: Any) -> Self:
        """Refuse whoever has no seal."""
        if seal is not _SEAL:
            raise TypeError("a receipt is made only by a receiving rank that reached Acked")
        return super().__new__(cls)

    # The type checker reads this signature: without the seal, which nobody else has, no call is well typed.
    def __init__(self, seal: _Seal, /, **values: Any) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, values[name])

    @classmethod
    def _sealed(cls, **values: Any) -> Receipt:
        """Make one. Called by the Acked state of an engine session, and by the two carriers below."""
        return cls(_SEAL, **values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a receipt cannot be changed ({name})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a receipt cannot be changed ({name})")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(tuple(self.to_json().items()))

    def __repr__(self) -> str:
        return f"Receipt({', '.join(f'{key}={value!r}' for key, value in self.to_json().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _carried, (self.to_json(),)

    def to_json(self) -> dict[str, Any]:
        """The receipt as plain values, in the order of its fields."""
        return {name: getattr(self, name) for name in sorted(self.__slots__)}

    @property
    def participant(self) -> tuple[str, str]:
        """(engine, incarnation): whom it speaks for."""
        return self.engine, self.incarnation

    def mismatch(self, round: str, epoch: int, expected: Expectation) -> str | None:
        """Why this receipt does not prove what ``expected`` asks for, or None when it does."""
        wanted = {
            "round": round,
            "epoch": epoch,
            "fingerprint": expected.fingerprint,
            "tensors": expected.tensors,
            "bytes": expected.bytes,
        }
        if expected.digest:
            wanted["digest"] = expected.digest
        for name, value in wanted.items():
            found = getattr(self, name)
            if found != value:
                where = f"{self.engine} rank {self.rank}"
                return (
                    _no_part(where, name, found, value) or f"{where}: {name} is {found!r}, expected {value!r}"
                )
        return None


def _no_part(where: str, name: str, found: Any, wanted: Any) -> str | None:
    """Why a digest of everything is no answer to a question for a part of it."""
    if name != "digest" or not found or part_of(found) != WHOLE or part_of(wanted) == WHOLE:
        return None
    return (
        f"{where}: digest {found!r} is of everything, expected {wanted!r}, of {part_of(wanted)}: the "
        f"engine's weightsync is too old for that; update it, or use Policy(verify='full')"
    )


def _carried(values: Mapping[str, Any]) -> Receipt:
    """Rebuild a receipt that crossed a process boundary; sizes and types are checked, content is not."""
    if set(values) != set(Receipt.__slots__):
        raise ReceiptRefused(f"not a receipt: fields {sorted(values)}")
    for name, kind in (
        ("round", str),
        ("epoch", int),
        ("engine", str),
        ("incarnation", str),
        ("rank", int),
        ("fingerprint", str),
        ("tensors", int),
        ("bytes", int),
        ("digest", str),
    ):
        if type(values[name]) is not kind:
            raise ReceiptRefused(f"not a receipt: {name} is {values[name]!r}")
    return Receipt._sealed(**values)
