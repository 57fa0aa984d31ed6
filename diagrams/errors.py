"""What can go wrong while drawing."""

from __future__ import annotations

from ..fsm.errors import WeightSyncError

__all__ = ["DrawingToolMissing", "FormatUnknown", "NoPlace"]


class DrawingToolMissing(WeightSyncError):
    """A picture of dots was asked for, and what makes it is not installed, or cannot work here."""


class FormatUnknown(WeightSyncError):
    """Nothing here is drawn in that format, or a file's name says another one."""


class NoPlace(WeightSyncError):
    """A state or a move has no place on the hand-made sheet of its table."""
