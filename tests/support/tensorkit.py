"""Tensors of every dtype and every layout, of random bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weightsync.fsm.plan import DTYPE_SIZES

__all__ = ["DTYPES", "LAYOUTS", "laid_out", "octets"]

DTYPES = [name for name in DTYPE_SIZES if hasattr(torch, name)]
"""Those that this torch has, of those that plans know."""

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda t: torch.stack([t, t, t], dim=-1)[..., 1],
    "reversed": lambda t: t.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "offset": lambda t: torch.cat([t[:1], t])[1:],
}


def laid_out(layout: str, dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits with the strides of a layout, NaNs and odd bools included, for three dimensions.

    It is made with integers: torch cannot rearrange every dtype.
    """
    kind: torch.dtype = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (count * kind.itemsize,), generator=torch.Generator().manual_seed(seed))
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(kind.itemsize, kind)
    return LAYOUTS[layout](bits.to(torch.uint8).view(integer).view(shape)).view(kind)


def octets(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in logical order, worked out another way than the library does."""
    return bytes(tensor.detach().unsqueeze(-1).view(torch.uint8).contiguous().view(-1).numpy())
