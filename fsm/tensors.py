"""What a tensor is to the wire: a name, a dtype, a shape and a number of bytes.

Dtypes go by the names that torch prints, without the prefix. Their sizes stand here, so that a description
from somebody else can be checked before a byte is allocated for it. ``diff`` compares what is to be sent with
what an engine holds, before anything is sent: a size on which two sides disagree is, further down, a killed
process or silently wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .errors import PlanError

__all__ = [
    "CASTS",
    "DTYPE_SIZES",
    "Mismatch",
    "TensorSpec",
    "Tie",
    "advice",
    "check_specs",
    "check_ties",
    "diff",
    "spec",
    "summary",
]

DTYPE_SIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # two numbers an element
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes an element. Each is a power of two, so that an offset aligned to the largest suits them all."""

CASTS = (
    "bfloat16", "float16", "float32", "float64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""The dtypes of numbers with a fraction, each of which can be written as any other one."""

_MOST_DIMENSIONS = 64
_SHOWN = 5
_LONGEST = 1 << 63


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. ``nbytes`` follows from shape and dtype, whatever the storage behind it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class Tie:
    """A further name of the tensor called ``of``: sent once, held under both."""

    name: str
    of: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One name on which sender and engine disagree. None is the side that lacks it."""

    name: str
    sent: TensorSpec | None
    held: TensorSpec | None

    def __str__(self) -> str:
        if self.sent is None:
            return f"tensor {self.name!r}: the engine holds {self.held}, but nothing is sent for it"
        if self.held is None:
            return f"tensor {self.name!r}: {self.sent} is sent, but the engine does not hold it"
        return f"tensor {self.name!r}: {self.sent} is sent, but the engine holds {self.held}"


def spec(name: str, dtype: str, shape: Iterable[int]) -> TensorSpec:
    """Describe a tensor; the bytes are worked out."""
    return _spec(name, dtype, shape if isinstance(shape, tuple) else tuple(shape))


@lru_cache(maxsize=1 << 16)
def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """A model is described anew in every round, and the description is the same."""
    return TensorSpec(name, dtype, tuple(shape), math.prod(shape) * _itemsize(name, dtype))


def has_memory(tensor: Any) -> bool:
    """Whether there is memory for every element of ``tensor``, which tells its strides as torch's do.

    A storage can be resized to nothing under its tensors. To read such a tensor ends the process, or hands
    out what happens to lie there; to write it ends the process.
    """
    if 0 in tensor.shape:
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
    end: int = (last + 1) * tensor.element_size()
    room: int = tensor.untyped_storage().nbytes()
    return room >= end


def advice(mismatches: Iterable[Mismatch]) -> str:
    """What helps if they differ in the dtype alone, as when one side trains in more digits; else nothing."""
    held = set()
    for each in mismatches:
        if each.sent is None or each.held is None or each.sent.shape != each.held.shape:
            return ""
        if each.sent.dtype not in CASTS or each.held.dtype not in CASTS:
            return ""
        held.add(each.held.dtype)
    return f"; Policy(cast={held.pop()!r}) sends numbers as the engine holds them" if len(held) == 1 else ""


def summary(lines: Sequence[str]) -> str:
    """The first of what is wrong with many tensors, in one line."""
    shown = "; ".join(lines[:_SHOWN])
    return shown if len(lines) <= _SHOWN else f"{shown}; and {len(lines) - _SHOWN} more"


def check_specs(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Refuse descriptions that contradict themselves, and names that come twice."""
    given: object = specs  # the caller may not be type-checked
    if not isinstance(given, Sequence) or isinstance(given, str):
        kind = type(given).__name__
        raise PlanError(f"tensors come in an order that is the same everywhere: as a list, not as a {kind}")
    seen: set[str] = set()
    for each in specs:
        _check_spec(each)
        if each.name in seen:
            raise PlanError(f"two tensors are named {each.name!r}; each name may come once")
        seen.add(each.name)
    return tuple(specs)


def check_ties(ties: Iterable[Tie], specs: Sequence[TensorSpec]) -> tuple[Tie, ...]:
    """Refuse ties to what is not sent, and names that mean two things."""
    ties = tuple(ties)
    names = {each.name for each in specs}
    taken = set(names)
    for tie in ties:
        if tie.of not in names:
            raise PlanError(
                f"{tie.name!r} is tied to {tie.of!r}, which is not among the tensors that are sent"
            )
        if tie.name in taken:
            raise PlanError(f"{tie.name!r} is tied to {tie.of!r}, but names another tensor already")
        taken.add(tie.name)
    return ties


def diff(
    sent: Sequence[TensorSpec], held: Sequence[TensorSpec], *, ties: Sequence[Tie] = ()
) -> tuple[Mismatch, ...]:
    """Compare what is sent with what an engine holds: a line for each name that is missing or different.

    Of tied names an engine may hold all, or only some if it ties them too; at least one must be there.
    """
    offered = {each.name: each for each in check_specs(sent)}
    holds = {each.name: each for each in check_specs(held)}
    names = {each.name: [each.name] for each in sent}
    for tie in check_ties(ties, sent):
        names[tie.of].append(tie.name)
        offered[tie.name] = offered[tie.of]
    absent = [
        Mismatch(each.name, each, None)
        for each in sent
        if not any(name in holds for name in names[each.name])
    ]
    different = [
        Mismatch(name, each, holds[name])
        for name, each in offered.items()
        if name in holds and (each.dtype, each.shape) != (holds[name].dtype, holds[name].shape)
    ]
    unfed = [Mismatch(each.name, None, each) for each in held if each.name not in offered]
    return (*absent, *different, *unfed)


def _check_spec(each: TensorSpec) -> None:
    itemsize = _itemsize(each.name, each.dtype)
    if len(each.shape) > _MOST_DIMENSIONS or not all(
        type(length) is int and 0 <= length < _LONGEST for length in each.shape
    ):
        raise PlanError(f"tensor {each.name!r}: {each.shape} is not a shape")
    expected = math.prod(each.shape) * itemsize
    if type(each.nbytes) is not int or each.nbytes != expected:
        raise PlanError(f"tensor {each.name!r}: {each} takes {expected} bytes, not {each.nbytes}")


def _itemsize(name: str, dtype: str) -> int:
    size = DTYPE_SIZES.get(dtype)
    if size is None:
        raise PlanError(f"tensor {name!r}: no such dtype: {dtype!r}; known are {', '.join(DTYPE_SIZES)}")
    return size
