"""The plan as a value: tensors, buckets, and for each byte of a bucket where it belongs.

``plan.py`` makes plans; this module writes them down and reads them back. Whoever receives one allocates
buffers and copies bytes by it, so ``from_json`` believes nothing: types, sizes against shapes, the order of
buckets, each piece inside its bucket and beside the others, each byte of each tensor covered once, and the
fingerprint over all of it. A bucket may hold padding, but less than a page in one place, so that its size is
bounded by what it carries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from .errors import PlanError
from .tensors import TensorSpec, Tie, check_specs, check_ties

__all__ = ["ALIGN_LIMIT", "Bucket", "Piece", "Plan"]

_SCHEMA = 1

ALIGN_LIMIT = 4096
"""The widest alignment, a page; and so the most padding that a plan from elsewhere may have in one place."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of tensor number ``tensor``, at ``offset`` in the bucket."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def nbytes(self) -> int:
        """How many bytes that is."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """One unit of transfer. ``nbytes`` is its size on the wire, with the padding between pieces."""

    index: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What travels and how.

    ``nbytes`` counts the tensors' bytes, without padding. A ``partial`` plan is not all that an engine holds:
    what it does not name stays as it is.
    """

    tensors: tuple[TensorSpec, ...]
    ties: tuple[Tie, ...]
    buckets: tuple[Bucket, ...]
    nbytes: int
    fingerprint: str
    partial: bool = False

    @classmethod
    def sealed(
        cls,
        tensors: tuple[TensorSpec, ...],
        ties: tuple[Tie, ...],
        buckets: tuple[Bucket, ...],
        *,
        partial: bool = False,
    ) -> Plan:
        """Add what follows from the rest."""
        plan = cls(tensors, ties, buckets, sum(each.nbytes for each in tensors), "", partial)
        return replace(plan, fingerprint=hashlib.sha256(_canonical(plan)).hexdigest())

    @property
    def largest(self) -> int:
        """The size of the largest bucket: what a buffer for any of them needs."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every name with its description, further names last."""
        named = {each.name: each for each in self.tensors}
        return (*self.tensors, *(replace(named[tie.of], name=tie.name) for tie in self.ties))

    def to_json(self) -> str:
        """Everything in one line."""
        return json.dumps({**_record(self), "nbytes": self.nbytes, "fingerprint": self.fingerprint})

    @staticmethod
    def from_json(text: str | bytes, *, bucket_bytes: int | None = None) -> Plan:
        """Read a plan from elsewhere, or raise ``PlanError``. ``bucket_bytes`` is the reader's own limit."""
        plan = _read(text)
        if bucket_bytes is not None and plan.largest > bucket_bytes:
            raise PlanError(
                f"the plan has a bucket of {plan.largest} bytes, but this side allows {bucket_bytes}: "
                f"set Policy(bucket_bytes={plan.largest})"
            )
        return plan


def _record(plan: Plan) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "tensors": [[each.name, each.dtype, list(each.shape), each.nbytes] for each in plan.tensors],
        "ties": [[tie.name, tie.of] for tie in plan.ties],
        "buckets": [
            [bucket.nbytes, [[each.tensor, each.start, each.stop, each.offset] for each in bucket.pieces]]
            for bucket in plan.buckets
        ],
        **({"partial": True} if plan.partial else {}),
    }


def _canonical(plan: Plan) -> bytes:
    """The bytes that the fingerprint is taken of: the same on every machine and with every hash seed."""
    return json.dumps(_record(plan), separators=(",", ":")).encode("ascii")


def _read(text: str | bytes) -> Plan:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"this is not a plan: not JSON ({error})") from error
    if not isinstance(record, dict) or record.get("schema") != _SCHEMA:
        raise PlanError(f"this is not a plan of schema {_SCHEMA}")
    tensors = tuple(
        TensorSpec(name, dtype, _integers(shape), nbytes)
        for name, dtype, shape, nbytes in _rows(record, "tensors", (str, str, list, int))
    )
    ties = tuple(Tie(name, of) for name, of in _rows(record, "ties", (str, str)))
    buckets = tuple(
        Bucket(index, nbytes, tuple(Piece(*_integers(piece, 4)) for piece in pieces))
        for index, (nbytes, pieces) in enumerate(_rows(record, "buckets", (int, list)))
    )
    check_ties(ties, check_specs(tensors))
    _check_buckets(tensors, buckets)
    partial = record.get("partial", False)
    if not isinstance(partial, bool):
        raise PlanError(f"this is not a plan: {partial!r:.80} does not say whether it is partial")
    plan = Plan.sealed(tensors, ties, buckets, partial=partial)
    if (plan.nbytes, plan.fingerprint) != (record.get("nbytes"), record.get("fingerprint")):
        raise PlanError("the plan's size or fingerprint does not match what is in it")
    return plan


def _rows(record: dict[str, Any], key: str, types: tuple[type, ...]) -> list[Any]:
    rows = record.get(key)
    if not isinstance(rows, list):
        raise PlanError(f"this is not a plan: it has no list of {key}")
    for row in rows:
        if not isinstance(row, list) or [type(value) for value in row] != list(types):
            raise PlanError(f"this is not a plan: {row!r:.80} does not belong among its {key}")
    return rows


def _integers(values: object, count: int | None = None) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise PlanError(f"this is not a plan: {values!r:.80} are not whole numbers from 0 up")
    if count is not None and len(values) != count:
        raise PlanError(f"this is not a plan: {values!r:.80} are not {count} numbers")
    return tuple(values)


def _check_buckets(tensors: Sequence[TensorSpec], buckets: Sequence[Bucket]) -> None:
    if not buckets:
        raise PlanError("the plan has no bucket; even an empty model has one")
    for bucket in buckets:
        if tensors and not bucket.pieces:
            raise PlanError(f"bucket {bucket.index} holds nothing")
        for piece in bucket.pieces:
            _check_piece(tensors, bucket, piece)
        _check_room(bucket)
    _check_coverage(tensors, buckets)


def _check_piece(tensors: Sequence[TensorSpec], bucket: Bucket, piece: Piece) -> None:
    where = f"bucket {bucket.index}, {piece}"
    if piece.tensor >= len(tensors):
        raise PlanError(f"{where}: there are only {len(tensors)} tensors")
    tensor = tensors[piece.tensor]
    if not piece.start <= piece.stop <= tensor.nbytes:
        raise PlanError(f"{where}: tensor {tensor.name!r} has {tensor.nbytes} bytes")
    if piece.nbytes == 0 and tensor.nbytes > 0:
        raise PlanError(f"{where}: carries nothing of tensor {tensor.name!r}")
    if piece.offset + piece.nbytes > bucket.nbytes:
        raise PlanError(f"{where}: the bucket has only {bucket.nbytes} bytes")


def _check_room(bucket: Bucket) -> None:
    """Pieces lie beside each other, with no more than padding between them and none at the end."""
    end = 0
    for piece in sorted((each for each in bucket.pieces if each.nbytes), key=attrgetter("offset")):
        if piece.offset < end:
            raise PlanError(f"bucket {bucket.index}, {piece}: overlaps the piece before, which ends at {end}")
        if piece.offset - end >= ALIGN_LIMIT:
            raise PlanError(f"bucket {bucket.index}, {piece}: leaves a hole from {end} on")
        end = piece.offset + piece.nbytes
    if bucket.nbytes != end:
        raise PlanError(f"bucket {bucket.index} has {bucket.nbytes} bytes, but its pieces end at {end}")


def _check_coverage(tensors: Sequence[TensorSpec], buckets: Sequence[Bucket]) -> None:
    """Each byte of each tensor is in exactly one piece, and a tensor without bytes has exactly one."""
    covered: list[int | None] = [None] * len(tensors)
    for piece in (piece for bucket in buckets for piece in bucket.pieces):
        so_far = covered[piece.tensor]
        if (so_far or 0) != piece.start or (so_far is not None and piece.nbytes == 0):
            name = tensors[piece.tensor].name
            raise PlanError(f"{piece}: of tensor {name!r}, bytes 0 to {so_far or 0} are covered so far")
        covered[piece.tensor] = piece.stop
    for tensor, so_far in zip(tensors, covered, strict=True):
        if so_far != tensor.nbytes:
            raise PlanError(
                f"tensor {tensor.name!r}: only {so_far or 0} of {tensor.nbytes} bytes are in a bucket"
            )
