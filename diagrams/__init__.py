"""Pictures of the tables and of the paths that rounds took through them.

The table that runs is the table that is drawn: one model is extracted from it, and all formats are emitted
from that model. The files in this folder are generated; a test fails when they are not what the tables say.
"""

from __future__ import annotations

from .errors import DrawingToolMissing, FormatUnknown, NoPlace
from .overlay import Step, Trace, read_trace
from .render import FORMATS, checked_in, render, write, write_all

__all__ = [
    "FORMATS",
    "DrawingToolMissing",
    "FormatUnknown",
    "NoPlace",
    "Step",
    "Trace",
    "checked_in",
    "read_trace",
    "render",
    "write",
    "write_all",
]
