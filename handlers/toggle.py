"""Toggles: a setting of the process that is another one during a round, and what it was before after it.

    Toggle(expandable_segments(), during=False)

What it was is read, not assumed, and restored on every way out: by the undo when the round fails, by the
clean-up when it does not. If it could not be restored, it is still owed: the next round restores what was
there before the first one, and not what was left over. Several toggles of one setting, in one round or in
rounds of several ``WeightSync``s, count: it is restored by the last of them, in whatever order they end.

``expandable_segments`` of torch's CUDA allocator is here because engines that map memory by IPC cannot map
such segments. The setting is read and written through torch, which takes it on any build; what it does to an
allocator **was not tried on a GPU**.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

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


@dataclass(frozen=True, slots=True)
class _User:
    """A toggle, for the time of a round."""

    toggle: int
    round: str
    during: Any


class _Setting:
    """A setting that several toggles may change, in one round or in rounds of several ``WeightSync``s.

    It is what the last of its users wants, and what it was before when it has none.
    """

    def __init__(self, switch: Switch) -> None:
        self.switch, self.lock = switch, threading.RLock()
        self.before: Any = _Nothing
        self.users: list[_User] = []
        self.written = False

    def enter(self, user: _User) -> None:
        """One more. What it was is read before the first one changes it.

        Raises:
            WeightSyncError: a round that runs has it at another value.
        """
        for other in self.users:
            if other.round != user.round and not _same(other.during, user.during):
                raise WeightSyncError(
                    f"{self.switch.name} is {other.during!r} for round {other.round} and cannot be "
                    f"{user.during!r} beside it: let rounds with different settings wait for each other"
                )
        if self.before is _Nothing:
            self.before = self.switch.read()
        self.users.append(user)

    def leave(self, user: _User) -> Any:
        """One less; what it has to be now, or nothing if that is what it is."""
        if user in self.users:
            self.users.remove(user)
        if self.before is _Nothing:
            return _Nothing
        wanted = self.users[-1].during if self.users else self.before
        owed = self.written and not self.users
        if not owed and _same(self.switch.read(), wanted):
            self.settled()
            return _Nothing
        return wanted

    def settled(self) -> None:
        """It is what it has to be."""
        if not self.users:
            self.before, self.written = _Nothing, False


_SETTINGS: weakref.WeakValueDictionary[Hashable, _Setting] = weakref.WeakValueDictionary()
_GUARD = threading.Lock()


def _setting_of(switch: Switch) -> _Setting:
    """Of this process: switches that are equal are one."""
    key: Hashable = switch if isinstance(switch, Hashable) else id(switch)
    with _GUARD:
        found = _SETTINGS.get(key)
        if found is None:
            found = _SETTINGS[key] = _Setting(switch)
        return found


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


class Toggle:
    """An executor that changes a setting for the time of a round.

    Args:
        switch: the setting. Several toggles of one switch, or of switches that are equal, share it.
        during: what it is in a round.

    Raises:
        SetupError: ``switch`` is none.
    """

    def __init__(self, switch: Switch, during: object) -> None:
        if not checks.has(switch, ("read", "write")) or not hasattr(switch, "name"):
            raise checks.refusal("Toggle", "switch", switch, "something with name, read and write is needed")
        self.name = switch.name
        self._switch, self._during = switch, during
        self._shared = _setting_of(switch)

    def prepare(self, round: RoundView) -> Undo:
        """Change it; the undo restores it.

        Raises:
            WeightSyncError: another round that runs has it at another value.
        """
        view, shared = round, self._shared
        with shared.lock:
            shared.enter(self._user(view))
            try:
                if not _same(self._switch.read(), self._during):
                    shared.written = True
                    self._set(self._during, "set", view)
            except BaseException as error:
                self._restore_beside(error, view)
                raise
        return lambda: self._restore(view)

    def clean(self, round: RoundView) -> None:
        """Restore it."""
        self._restore(round)

    def _user(self, view: RoundView) -> _User:
        return _User(id(self), view.session.round, self._during)

    def _restore(self, view: RoundView) -> None:
        """What another one still wants stays; what it was comes back with the last one."""
        shared = self._shared
        with shared.lock:
            wanted = shared.leave(self._user(view))
            if wanted is _Nothing:
                return
            self._set(wanted, "restored", view)
            if not _same(left := self._switch.read(), wanted):
                raise WeightSyncError(f"{self.name} is {left!r} after it was restored to {wanted!r}")
            shared.settled()

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
    """One yes-or-no setting of torch's allocator; the others stay as they are. Those of one name are equal.

    Args:
        name: as in ``PYTORCH_CUDA_ALLOC_CONF``.
    """

    _line: ClassVar[str | None] = None
    """What was written last in this process, where torch does not tell."""

    def __init__(self, name: str) -> None:
        import torch

        checks.text("AllocatorSwitch", "name", name)
        self.name = name
        core: Any = vars(torch)["_C"]  # private there, and the only place where it can be read
        self._get: Callable[[], str] | None = getattr(core, "_accelerator_getAllocatorSettings", None)
        self._set: Callable[[str], object] | None = getattr(core, "_accelerator_setAllocatorSettings", None)
        if self._get is None or self._set is None:  # before torch 2.9: what was written is all that is known
            self._get, self._set = None, vars(torch.cuda.memory)["_set_allocator_settings"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllocatorSwitch) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def read(self) -> bool:
        """Whether it is on; a setting that nobody has made is off."""
        return self._settings().get(self.name, "False") == "True"

    def write(self, value: bool, /) -> None:  # noqa: FBT001 - it is the value of the setting
        """Turn it on or off."""
        settings = {**self._settings(), self.name: str(value)}
        line = ",".join(f"{name}:{each}" for name, each in settings.items())
        if self._set is not None:
            self._set(line)
        if self._get is None:
            AllocatorSwitch._line = line

    def _settings(self) -> dict[str, str]:
        known = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") if self._line is None else self._line
        line = known if self._get is None else self._get()
        pairs = [each.partition(":") for each in line.split(",") if each]
        return {name.strip(): value.strip() for name, _, value in pairs}


def expandable_segments() -> Switch:
    """Of torch's CUDA allocator. ``Toggle(expandable_segments(), during=False)``."""
    return AllocatorSwitch("expandable_segments")
