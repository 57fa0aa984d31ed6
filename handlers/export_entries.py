"""What an exporter finds in a module, entry by entry: a description, who holds what, and how it is read.

Entries refer to tensors, so they are made anew whenever they are needed, and never kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..fsm import checks
from ..fsm.errors import PlanError
from ..fsm.exports import Cut, ExportPlan, Slot

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "ModelAt", "persistent_buffers", "read", "world"]

Held = tuple[tuple[int, ...], tuple[Cut, ...]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a module.

    Args:
        where: how it is spread, for the outline; the same on all ranks.
        held: works out its owners, and what each of them has.
        read: gets the whole tensor, with the other ranks.
        of: the name of the same tensor that comes first; empty if this is it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: str
    held: Callable[[], Held]
    read: Callable[[], torch.Tensor]
    of: str = ""

    @property
    def line(self) -> str:
        """For the outline."""
        what = f"is {self.of!r}" if self.of else self.where
        return f"{self.name!r} {self.dtype} {self.shape} {what}"

    @property
    def slot(self) -> Slot:
        """For the plan."""
        owners, cuts = self.held()
        return Slot(self.name, self.dtype, self.shape, owners, cuts, self.of)


def read(entries: Iterable[Entry], plan: ExportPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a plan, by name; one of several names is gathered once.

    Raises:
        PlanError: there is no such name any more.
    """
    there = {entry.name: entry for entry in entries}
    shared = {slot.of for slot in plan.slots if slot.of}
    gathered: dict[str, torch.Tensor] = {}
    for slot in plan.slots:
        entry = there.get(slot.name)
        if entry is None:
            raise PlanError(
                f"the model has no {slot.name!r} any more, which it had when its export was agreed on"
            )
        tensor = gathered[slot.of] if slot.of else entry.read()
        if slot.name in shared:
            gathered[slot.name] = tensor
        yield slot.name, tensor


class ModelAt:
    """Where a model is found when it is needed. A module that is given is not kept alive.

    Args:
        where: who is given it, for messages.
        model: a module, or a function without arguments that gives one.

    Raises:
        SetupError: it is neither.
    """

    def __init__(self, where: str, model: object) -> None:
        import torch

        if isinstance(model, torch.nn.Module):
            self._find: Callable[[], Any] = weakref.ref(model)
        elif callable(model) and not isinstance(model, type):
            self._find = model
        else:
            raise checks.refusal(where, "model", model, "a module is needed, or a function that gives one")
        self._where = where

    def __call__(self) -> Any:
        """The model as it is now.

        Raises:
            PlanError: it is gone.
        """
        model = self._find()
        if model is None:
            raise PlanError(
                f"the module of this {self._where} is gone: give it a function that gives the present one"
            )
        return model


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that belong to a state dict, by name."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, buffer in each.named_buffers(recurse=False, remove_duplicate=False):
            if name not in each._non_persistent_buffers_set:  # noqa: SLF001 - torch tells it nowhere else
                yield f"{prefix}.{name}" if prefix else name, buffer


def world() -> int:
    """How many ranks there are."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
