"""What libraries make of a trainer's module when they wrap it: other names, and the units of FSDP1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["all_units", "cleaned", "dtype_name", "dtype_of", "flat_units"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def cleaned(name: str) -> str:
    """A name without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def dtype_of(tensor: torch.Tensor) -> str:
    """As plans call it."""
    return dtype_name(tensor.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """The same of one without a tensor."""
    return str(dtype).removeprefix("torch.")


def flat_units(module: torch.nn.Module, *, again: bool = False) -> Iterator[tuple[str, Any]]:
    """The units of FSDP1 that have parameters, each with its name; the root's is empty.

    Args:
        module: where they are.
        again: whether a unit that has several names comes once under each.
    """
    for name, each in all_units(module, again=again):
        if each._handle is not None:  # noqa: SLF001 - torch names it no other way
            yield name, each


def all_units(module: torch.nn.Module, *, again: bool = False) -> Iterator[tuple[str, Any]]:
    """The same with those that have no parameters of their own."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, each in module.named_modules(remove_duplicate=not again):
        if isinstance(each, FullyShardedDataParallel):
            yield cleaned(f"{name}.").rstrip("."), each
