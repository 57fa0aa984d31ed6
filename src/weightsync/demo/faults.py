"""What can be made to go wrong in a demo, written as ``KIND@STEP``, and how an engine is made to do it.

    engine-kill@5   SIGKILL of an engine's process while it applies a bucket of step 5's round
    bucket-fail@5   an engine raises while it applies a bucket
    hang@5          an engine hangs while it applies a bucket, for longer than the trainer waits
    no-sync         rounds are withheld after the first one: the engines never learn

In threads there is no process to kill: there ``engine-kill`` makes an engine raise as if it were gone.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..fsm.errors import SetupError

__all__ = ["Arming", "Inject", "parse", "withheld"]

Kind = Literal["engine-kill", "bucket-fail", "hang"]
KINDS: tuple[Kind, ...] = ("engine-kill", "bucket-fail", "hang")
NO_SYNC = "no-sync"
_WRITTEN = re.compile(r"(?P<kind>[a-z-]+)@(?P<step>\d+)")


@dataclass(frozen=True, slots=True)
class Inject:
    """One fault, in the round of one step, on the last engine."""

    kind: Kind
    step: int


def parse(written: Sequence[str], steps: int) -> tuple[Inject, ...]:
    """The faults that were asked for; ``no-sync`` is not among them, see :func:`withheld`.

    Raises:
        SetupError: something that is no fault, or a step the run does not have.
    """
    found = []
    for text in written:
        if text == NO_SYNC:
            continue
        match = _WRITTEN.fullmatch(text)
        kind = next((kind for kind in KINDS if match and match["kind"] == kind), None)
        if match is None or kind is None:
            known = ", ".join(f"{kind}@STEP" for kind in KINDS)
            raise SetupError(f"--inject {text}: there are {known} and {NO_SYNC}")
        step = int(match["step"])
        if not 1 <= step <= steps:
            raise SetupError(f"--inject {text}: the run has the steps 1 to {steps}")
        found.append(Inject(kind, step))
    return tuple(found)


def withheld(written: Sequence[str]) -> bool:
    """Whether rounds are to be withheld after the first one."""
    return NO_SYNC in written


class Arming:
    """The fault hook of an engine's receiver: armed once, it goes off at the next bucket that is applied.

    Args:
        hang: seconds that a hang lasts.
        own_process: whether the engine has a process of its own that may be killed.
    """

    def __init__(self, hang: float, *, own_process: bool) -> None:
        self._hang = hang
        self._own_process = own_process
        self._kind: Kind | None = None

    def arm(self, kind: Kind) -> None:
        """Go off at the next bucket."""
        self._kind = kind

    def __call__(self, point: str, bucket: int) -> None:
        """Called by the receiver at each of its points."""
        if point != "apply" or self._kind is None:
            return
        kind, self._kind = self._kind, None
        actions: dict[Kind, Callable[[int], None]] = {
            "engine-kill": self._kill,
            "bucket-fail": _fail,
            "hang": self._wait,
        }
        actions[kind](bucket)

    def _kill(self, bucket: int) -> None:
        if not self._own_process:
            raise ConnectionResetError(f"injected: the engine is gone at bucket {bucket}")
        os.kill(os.getpid(), signal.SIGKILL)

    def _wait(self, bucket: int) -> None:
        threading.Event().wait(self._hang)
        raise TimeoutError(f"injected: bucket {bucket} hung for {self._hang:g} s")


def _fail(bucket: int) -> None:
    raise RuntimeError(f"injected: bucket {bucket} could not be applied")
