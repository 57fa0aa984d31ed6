"""A shard with its memory, as each form of parameters is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..fsm.shards import Shard

if TYPE_CHECKING:
    import torch

__all__ = ["Holding", "bytes_of"]


@dataclass(frozen=True, slots=True)
class Holding:
    """A shard and its memory: the very memory that the model computes with, or gathers from."""

    shard: Shard
    tensor: torch.Tensor


def bytes_of(tensor: torch.Tensor) -> int:
    """How many it has."""
    return tensor.numel() * tensor.element_size()
