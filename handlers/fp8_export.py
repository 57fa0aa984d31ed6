"""Matrices as numbers of eight bits, with a scale for each block: another exporter's tensors, made smaller.

    export = CachedExport(Fp8Exporter(FsdpExporter(model), only=("*.mlp.*.weight",)))

Which tensors are made so, their shapes and those of their scales follow from the layout, and are a part of
the plan. The scales themselves follow from the values: they are *live*, worked out in every hand-over
together with the numbers that they belong to, and never kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from ..fsm import checks
from ..fsm.exports import Exporter, ExportPlan, Outline, Slot
from .wrapped import dtype_of

if TYPE_CHECKING:
    import torch

__all__ = ["Fp8Exporter"]

_DTYPE = "float8_e4m3fn"
_LARGEST = 448.0
"""Of that dtype."""

_WIDER = ("float64", "float32", "bfloat16", "float16")


class Fp8Exporter:
    """Brings each chosen matrix as ``name`` in float8_e4m3fn and ``name`` + ``suffix`` in float32.

    A number is the product of the two: of an element, and of the scale of its block.

    Args:
        exporter: whose tensors they are.
        only: patterns of names; of what matches one, the matrices of floating-point numbers are chosen.
        block: rows and columns that share a scale; blocks at the edges are smaller.
        suffix: of the names of scales.

    Raises:
        SetupError: something of the wrong kind.
    """

    def __init__(
        self,
        exporter: Exporter,
        *,
        only: Sequence[str] = ("*.weight",),
        block: tuple[int, int] = (128, 128),
        suffix: str = "_scale_inv",
    ) -> None:
        if not checks.has(exporter, ("outline", "plan", "tensors", "forget")):
            raise checks.refusal("Fp8Exporter", "exporter", exporter, "an exporter is needed")
        patterns = checks.patterns("Fp8Exporter", "only", only)
        given: object = block
        if not isinstance(given, tuple) or len(given) != 2:
            raise checks.refusal("Fp8Exporter", "block", block, "two whole numbers are needed: (128, 128)")
        for size in block:
            checks.whole("Fp8Exporter", "block", size)
        checks.text("Fp8Exporter", "suffix", suffix)
        self._exporter, self._block, self._suffix = exporter, block, suffix
        self._chosen, self._patterns = re.compile("|".join(map(translate, patterns)) or r"(?!)"), patterns
        self._inner: tuple[Slot, ...] = ()

    @property
    def lasting(self) -> bool:
        """As the exporter that it stands on."""
        return self._exporter.lasting

    def outline(self) -> Outline:
        """That of the exporter, and how its tensors are made smaller."""
        outline = self._exporter.outline()
        how = f"{_DTYPE} in blocks of {self._block} of {self._patterns} with {self._suffix!r}"
        return replace(outline, shared=(*outline.shared, how))

    def plan(self) -> Sequence[Slot]:
        """Each chosen matrix is followed by its scales."""
        self._inner = tuple(self._exporter.plan())
        slots, first = list[Slot](), dict[tuple[str, bool], str]()
        for slot in self._inner:
            # Of the names of one tensor, some may be chosen and others not: then they are two.
            chosen = self._is_chosen(slot.name, slot.dtype, slot.shape)
            before = first.setdefault((slot.of or slot.name, chosen), slot.name)
            named = self._named(slot, "" if before == slot.name else before)
            slots += self._smaller(named) if chosen else [named]
        return slots

    def tensors(self, plan: ExportPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """With scales of the values as they are now."""
        of = {slot.name: slot.of for slot in self._inner if slot.of}
        several = set(of.values())
        made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor of several names stays one
        for name, tensor in self._exporter.tensors(ExportPlan.sealed(self._inner, plan.key)):
            dtype = dtype_of(tensor)
            if not self._is_chosen(name, dtype, tuple(tensor.shape)):
                yield name, tensor
                continue
            first = of.get(name, name)
            numbers, scales = made[first] if first in made else _made(tensor, self._block)
            if first in several:
                made[first] = numbers, scales
            yield name, numbers
            yield name + self._suffix, scales

    def forget(self) -> None:
        """Drop the plan of the exporter that it stands on."""
        self._inner = ()
        self._exporter.forget()

    def _smaller(self, slot: Slot) -> list[Slot]:
        """Its numbers and their scales."""
        of = slot.of and slot.of + self._suffix
        blocks = tuple(-(-size // step) for size, step in zip(slot.shape, self._block, strict=True))
        scales = Slot(slot.name + self._suffix, "float32", blocks, slot.owners, of=of, live=True)
        return [replace(slot, dtype=_DTYPE, live=True), scales]

    def _named(self, slot: Slot, of: str) -> Slot:
        """The same as another name of that one. If it is none any more, its owners are those of the first."""
        if of == slot.of:
            return slot
        held = next((each for each in self._inner if each.name == slot.of), slot)
        return replace(slot, of=of, owners=held.owners, cuts=held.cuts)

    def _is_chosen(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and 0 not in shape and dtype in _WIDER and self._chosen.match(name) is not None


def _made(tensor: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and their scales, in blocks that are filled up with zeros.

    A number that is none, or infinite, has no part in the scale of its block, and comes as none.
    """
    import torch
    from torch.nn.functional import pad

    (rows, columns), (tall, wide) = tensor.shape, block
    with torch.no_grad():
        full = pad(tensor.detach().float(), (0, -columns % wide, 0, -rows % tall))
        blocks = full.view(full.shape[0] // tall, tall, full.shape[1] // wide, wide)
        finite = blocks.isfinite()
        scales = blocks.where(finite, 0.0).abs().amax(dim=(1, 3)) / _LARGEST
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        near = (blocks / scales[:, None, :, None]).clamp(-_LARGEST, _LARGEST).where(finite, torch.nan)
        scaled: Any = near.view(full.shape)[:rows, :columns]
        return scaled.to(getattr(torch, _DTYPE)).contiguous(), scales
