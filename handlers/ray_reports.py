"""What Ray says of an actor that cannot answer, in one line.

Its reports are for a terminal: many lines, in colours, with the traceback of the actor and advice about the
cluster. Of an error that ``__init__`` raised, the line that counts is the error's own, behind the last frame;
of a process that ended, the one behind the list of its particulars. The whole report stays the error's cause.
"""

from __future__ import annotations

import re

import ray

__all__ = ["report"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFACE = "The actor died because of an error raised in its creation task, "
_LONGEST = 300


def report(error: BaseException) -> str:
    """What became of the actor, or of what it was asked, in one short line without colours."""
    text = _COLOURS.sub("", str(error)).strip().removeprefix(_PREFACE)
    lines = [line.rstrip() for line in text.splitlines()]
    if isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
        told = f"its __init__ raised {_raised(lines)}"
    elif isinstance(error, ray.exceptions.RayTaskError):
        told = _raised(lines)
    else:
        told = " ".join([*lines[:1], *_reason(lines)]) or repr(error)
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]}..."


def _raised(lines: list[str]) -> str:
    """The error itself: what stands behind the last frame, or behind the last that is indented."""
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    behind = lines[frames[-1] + 1 :] if frames else lines
    return next(
        (line for line in behind if line and not line[0].isspace()), lines[-1] if lines else "an error"
    )


def _reason(lines: list[str]) -> list[str]:
    """The first sentence behind the particulars of a process that ended."""
    indented = [number for number, line in enumerate(lines) if line.startswith("\t")]
    behind = lines[indented[-1] + 1 :] if indented else []
    return [behind[0].partition(" Worker exit detail:")[0]] if behind else []
