"""What the trainer's process knows of the side that it plays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Absent", "Side", "Spec"]


class Absent(Exception):
    """What a contestant needs is not there: it is left out, which is no failure."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a trainer's process is told at its start; the fields are those of ``Contestant``."""

    name: str
    side: str
    transport: str
    verify: str
    aliases: bool
    stages: bool
    ray: bool
    bucket: int
    layout: str
    engines: int


class Side(Protocol):
    """One way to hand weights over, on the trainer's side. Its engines' processes are below this one."""

    def hand_over(self, step: int) -> None:
        """Hand the weights over; returns when every engine has them."""

    def engines(self) -> list[tuple[int, dict[str, int]]]:
        """Each engine's process, and what memory it had before its weights."""

    def checksums(self) -> list[int]:
        """What each engine has now."""

    def close(self) -> None:
        """End the engines' processes."""
