"""The plan: which bytes of which tensor travel in which bucket, and where in it.

A plan is metadata only, made once per layout and agreed on before anything moves. Sender and engines compare
its *fingerprint*, a digest of everything in it, so that they cannot disagree on a name, a dtype, a shape, an
offset or the size of a message and find out from wrong numbers. Each bucket says for each of its bytes where
they belong; nothing rests on two sides going through names in the same order.

How buckets are filled:

* Tensors keep the order in which they are given. A set has none that two processes share, so it is refused.
* Nothing is dropped. A scalar is its one element; a tensor without elements has a piece without bytes, at
  offset 0, where any dtype may start; a model without tensors is one empty bucket.
* A tensor goes into one bucket, unless it is larger than a bucket. Then it is split over several of its own,
  between elements if a bucket holds at least one, and the last of them is filled up with what follows.
* An atomic group shares one bucket, at the place of its first member. One that cannot is refused here, and
  the message names a limit that suffices for all groups.
* A partial plan has some of the tensors of a model. It says so, and an engine checks what is sent without
  asking for the rest.
* A piece starts at a multiple of ``align``, or of its element if the limit is below ``align``. The padding
  between pieces counts, and no bucket is larger than the limit.

The values themselves, and how they are written and read back, are in ``layout.py``; what describes a tensor
is in ``tensors.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .errors import PlanError
from .layout import ALIGN_LIMIT, Bucket, Piece, Plan
from .tensors import DTYPE_SIZES, Mismatch, TensorSpec, Tie, check_specs, check_ties, diff, spec

__all__ = [
    "ALIGN_LIMIT",
    "BUCKET_LIMIT",
    "DTYPE_SIZES",
    "USUAL_BUCKET",
    "Bucket",
    "Mismatch",
    "Piece",
    "Plan",
    "PlanError",
    "TensorSpec",
    "Tie",
    "diff",
    "make_plan",
    "spec",
]

USUAL_BUCKET = 64 << 20
"""Bytes; what a refusal suggests. Larger buckets cost memory and are hardly faster."""

BUCKET_LIMIT = 1 << 20
"""More buckets than this are a mistake in ``bucket_bytes``: describing them takes longer than sending."""


def make_plan(
    specs: Sequence[TensorSpec],
    *,
    bucket_bytes: int,
    ties: Iterable[Tie] = (),
    groups: Iterable[Collection[str]] = (),
    align: int = 64,
    partial: bool = False,
) -> Plan:
    """Lay tensors out in buckets of at most ``bucket_bytes``.

    Args:
        specs: the tensors, in the order in which they are sent
        bucket_bytes: the most that one bucket may hold
        ties: further names of some of them
        groups: names of tensors that must arrive together; a tied name stands for its tensor
        align: a power of two; the boundary at which pieces start inside a bucket
        partial: whether engines hold more than this, which is to stay as it is

    Raises:
        PlanError: with what does not fit, and what to do
    """
    tensors = check_specs(specs)
    ties = check_ties(ties, tensors)
    if type(align) is not int or align not in {1 << bit for bit in range(ALIGN_LIMIT.bit_length())}:
        raise PlanError(f"align is a power of two up to {ALIGN_LIMIT}, not {align!r}")
    together = _members(tensors, ties, groups)
    _check_limit(tensors, together, bucket_bytes, align)
    packer = _Packer(tensors, bucket_bytes, _step(bucket_bytes, align))
    for unit in _units(len(tensors), together):
        packer.add(unit)
    return Plan.sealed(tensors, ties, packer.finish(), partial=partial)


class _Packer:
    """Fills one bucket after the other."""

    def __init__(self, tensors: Sequence[TensorSpec], limit: int, align: int) -> None:
        self._tensors, self._limit, self._align = tensors, limit, align
        self._buckets: list[Bucket] = []
        self._pieces: list[Piece] = []
        self._used = 0

    def add(self, unit: tuple[int, ...]) -> None:
        pieces, end = _laid_out(self._tensors, unit, self._used, self._align)
        if end > self._limit:
            if self._used:
                self._next_bucket()
            pieces, end = _laid_out(self._tensors, unit, 0, self._align)
        if end > self._limit:
            self._split(*unit)
        else:
            self._pieces += pieces
            self._used = end

    def finish(self) -> tuple[Bucket, ...]:
        if self._pieces or not self._buckets:
            self._next_bucket()
        return tuple(self._buckets)

    def _split(self, index: int) -> None:
        tensor = self._tensors[index]
        itemsize = DTYPE_SIZES[tensor.dtype]
        step = self._limit - self._limit % itemsize or self._limit
        for start in range(0, tensor.nbytes, step):
            if start:
                self._next_bucket()
            stop = min(start + step, tensor.nbytes)
            self._pieces.append(Piece(index, start, stop, 0))
            self._used = stop - start

    def _next_bucket(self) -> None:
        self._buckets.append(Bucket(len(self._buckets), self._used, tuple(self._pieces)))
        self._pieces, self._used = [], 0


def _laid_out(
    tensors: Sequence[TensorSpec], unit: Iterable[int], used: int, align: int
) -> tuple[list[Piece], int]:
    """Whole tensors one after the other, from ``used`` on, and where they end."""
    pieces = []
    for index in unit:
        tensor = tensors[index]
        if tensor.nbytes == 0:
            pieces.append(Piece(index, 0, 0, 0))
            continue
        step = max(align, DTYPE_SIZES[tensor.dtype])
        offset = -(-used // step) * step
        used = offset + tensor.nbytes
        pieces.append(Piece(index, 0, tensor.nbytes, offset))
    return pieces, used


def _members(
    tensors: tuple[TensorSpec, ...], ties: tuple[Tie, ...], groups: Iterable[Collection[str]]
) -> list[tuple[int, ...]]:
    """The groups by their tensors' numbers, in the tensors' order."""
    number = {each.name: index for index, each in enumerate(tensors)}
    number |= {tie.name: number[tie.of] for tie in ties}
    taken: set[int] = set()
    together = []
    for group in groups:
        if isinstance(group, str):
            raise PlanError(f"a group is a collection of names, not the one name {group!r}")
        for name in sorted(group):
            if name not in number:
                raise PlanError(f"a group names {name!r}, which is not among the tensors sent")
        members = tuple(sorted({number[name] for name in group}))
        for index in members:
            if index in taken:
                raise PlanError(f"tensor {tensors[index].name!r} is in two groups; join them into one")
        taken.update(members)
        if members:
            together.append(members)
    return sorted(together)


def _units(count: int, together: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What is laid out in one go: each group at the place of its first member, the rest one by one."""
    grouped = {index for members in together for index in members}
    alone = [(index,) for index in range(count) if index not in grouped]
    return sorted([*together, *alone])


def _step(bucket_bytes: int, align: int) -> int:
    """The alignment in use: below ``align`` bytes a bucket has no room for padding to it."""
    return align if bucket_bytes >= align else 1


def _check_limit(
    tensors: tuple[TensorSpec, ...], together: list[tuple[int, ...]], bucket_bytes: int, align: int
) -> None:
    """Refuse a limit that is too small, naming one that suffices for every group."""
    tight = max((_laid_out(tensors, members, 0, 1)[1] for members in together), default=0)
    roomy = max((_laid_out(tensors, members, 0, align)[1] for members in together), default=0)
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        enough = max(USUAL_BUCKET, roomy)
        raise PlanError(
            f"a bucket holds at least 1 byte, not {bucket_bytes!r}: set Policy(bucket_bytes={enough})"
        )
    for members in together:
        _, need = _laid_out(tensors, members, 0, _step(bucket_bytes, align))
        if need > bucket_bytes:
            names = ", ".join(tensors[index].name for index in members[:4])
            more = f" and {len(members) - 4} more" if len(members) > 4 else ""
            enough = tight if bucket_bytes < align and tight < align else roomy
            raise PlanError(
                f"the atomic group of {names}{more} needs {need} bytes in one bucket, and a bucket holds "
                f"{bucket_bytes}: set Policy(bucket_bytes={enough})"
            )
    total = sum(each.nbytes for each in tensors)
    if total // bucket_bytes > BUCKET_LIMIT:
        enough = max(USUAL_BUCKET, roomy, -(-total // BUCKET_LIMIT))
        raise PlanError(
            f"{total} bytes in buckets of {bucket_bytes} are more than {BUCKET_LIMIT} buckets: "
            f"set Policy(bucket_bytes={enough})"
        )
