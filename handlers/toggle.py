"""Toggles: a setting of the process that is another one during a round, and what it was before after it.

    Toggle(expandable_segments(), during=False)

What it was is read, not assumed, and restored on every way out: by the undo when the round fails, by the
clean-up when it does not. If it could not be restored, it is still owed: the next round restores what was
there before the first one, and not what was left over.

``expandable_segments`` of torch's CUDA allocator is here because engines that map memory by IPC cannot map
such segments. The setting is read and written through torch, which takes it on any build; what it does to an
allocator **was not tried on a GPU**.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..fsm import checks
from ..fsm.errors import WeightSyncError
from ..fsm.executors import RoundView, Undo

__all__ = ["AllocatorSwitch", "Switch", "Toggle", "expandable_segments"]


class Switch(Protocol):
    """A setting of the process."""

    @property
    def name(self) -> str:
        """For the log and for errors."""

    def read(self) -> Any:
        """What it is."""

    def write(self, value: Any, /) -> None:
        """Make it that."""


class _Nothing:
    """Nothing is owed."""


class Toggle:
    """An executor that changes a setting for the time of a round.

    Args:
        switch: the setting.
        during: what it is in a round.

    Raises:
        SetupError: ``switch`` is none.
    """

    def __init__(self, switch: Switch, during: object) -> None:
        if not checks.has(switch, ("read", "write")) or not hasattr(switch, "name"):
            raise checks.refusal("Toggle", "switch", switch, "something with name, read and write is needed")
        self.name = switch.name
        self._switch, self._during = switch, during
        self._before: Any = _Nothing

    def prepare(self, round: RoundView) -> Undo | None:
        """Change it; the undo restores it."""
        view = round
        if self._before is _Nothing:
            self._before = self._switch.read()
        if self._before == self._during == self._switch.read():
            self._before = _Nothing
            return None
        try:
            self._set(self._during, "set", view)
        except BaseException as error:
            self._restore_beside(error, view)
            raise
        return lambda: self._restore(view)

    def clean(self, round: RoundView) -> None:
        """Restore it."""
        self._restore(round)

    def _restore(self, view: RoundView) -> None:
        if self._before is _Nothing:
            return
        self._set(self._before, "restored", view)
        if (left := self._switch.read()) != self._before:
            raise WeightSyncError(f"{self.name} is {left!r} after it was restored to {self._before!r}")
        self._before = _Nothing

    def _restore_beside(self, error: BaseException, view: RoundView) -> None:
        """It may be half changed; whatever comes of this, the first error stays the first."""
        try:
            self._restore(view)
        except Exception as later:  # noqa: BLE001 - it is told with the first one
            error.add_note(f"and {self.name} could not be restored: {type(later).__name__}: {later}")

    def _set(self, value: object, what: str, view: RoundView) -> None:
        began = time.monotonic()
        self._switch.write(value)
        seconds = time.monotonic() - began
        view.note("action", trigger=what, executor=self.name, seconds=round(seconds, 6),
                   facts={"value": str(value)})  # fmt: skip


class AllocatorSwitch:
    """One yes-or-no setting of torch's allocator; the others stay as they are.

    Args:
        name: as in ``PYTORCH_CUDA_ALLOC_CONF``.
    """

    def __init__(self, name: str) -> None:
        import torch

        checks.text("AllocatorSwitch", "name", name)
        self.name = name
        core: Any = vars(torch)["_C"]  # private there, and the only place where it can be read
        self._get: Callable[[], str] | None = getattr(core, "_accelerator_getAllocatorSettings", None)
        self._set: Callable[[str], object] | None = getattr(core, "_accelerator_setAllocatorSettings", None)
        if self._get is None or self._set is None:  # before torch 2.9: what was written is all that is known
            self._get, self._set = None, vars(torch.cuda.memory)["_set_allocator_settings"]
        self._line = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")

    def read(self) -> bool:
        """Whether it is on; a setting that nobody has made is off."""
        return self._settings().get(self.name, "False") == "True"

    def write(self, value: bool, /) -> None:  # noqa: FBT001 - it is the value of the setting
        """Turn it on or off."""
        settings = {**self._settings(), self.name: str(value)}
        line = ",".join(f"{name}:{each}" for name, each in settings.items())
        if self._set is not None:
            self._set(line)
        self._line = line

    def _settings(self) -> dict[str, str]:
        line = self._line if self._get is None else self._get()
        pairs = [each.partition(":") for each in line.split(",") if each]
        return {name.strip(): value.strip() for name, _, value in pairs}


def expandable_segments() -> Switch:
    """Of torch's CUDA allocator. ``Toggle(expandable_segments(), during=False)``."""
    return AllocatorSwitch("expandable_segments")
