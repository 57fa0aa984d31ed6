"""The tensors that rounds of the kit carry, and how they are compared.

That is by bytes, worked out in another way than the library does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...fsm.plan import DTYPE_SIZES
from .peers import Content

__all__ = ["described", "dtypes", "of_dtype", "plain", "shapes"]


def plain(first: int = 1, count: int = 5) -> dict[str, torch.Tensor]:
    """One tensor of 64 bytes for each of a few numbers, filled with it: as many buckets."""
    return {f"w{number}": torch.full((16,), float(first + number)) for number in range(count)}


def shapes() -> dict[str, torch.Tensor]:
    """Tensors of every awkward kind: without elements or dimensions, not contiguous, tied, large."""
    base, tied = torch.arange(60.0), torch.rand(3, 3)
    return {
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 7),
        "transposed": base.view(6, 10).t(),
        "column": base.view(6, 10)[:, 3],
        "expanded": torch.arange(3.0).expand(5, 3),
        "channels_last": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "narrow": torch.rand(100, 100)[40:43, 7:9],
        "flag": torch.tensor([True, False, True]),
        "large": torch.rand(17, 19).t(),
        "embed": tied,
        "head": tied,
        "last": torch.rand(7, dtype=torch.float64),
    }


def dtypes(declared: frozenset[str] | None) -> list[str]:
    """The dtypes that this torch has, of those that a transport declares."""
    names = DTYPE_SIZES if declared is None else declared
    return [name for name in sorted(names) if isinstance(getattr(torch, name, None), torch.dtype)]


def of_dtype(name: str) -> torch.Tensor:
    """Every byte there is, some as numbers that are none: bytes arrive, not numbers."""
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(getattr(torch, name))


def described(state: Mapping[str, torch.Tensor]) -> Content:
    """The bytes of tensors, in logical order."""
    return {
        name: (
            str(each.dtype),
            tuple(each.shape),
            each.detach().unsqueeze(-1).view(torch.uint8).contiguous().numpy().tobytes(),
        )
        for name, each in state.items()
    }
