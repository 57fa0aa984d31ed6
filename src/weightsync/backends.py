"""Optional back ends: what can be used by name here, found when it is asked for and not before.

A back end is named in a table of the library, or by an entry point of another package. To import this module,
or to list names, imports none of them. When one is asked for, what it needs is imported, and then itself, and
what that raises is judged (``fsm/imports.py``):

* what is **absent** is quiet: one event at level debug;
* what is **broken** is one structured warning a process, with its cause and the place. It is never one of
  Python's own, which ``-W error`` would make fatal;
* whoever asks for either gets an error that names it, the others, and what was raised, as ``__cause__``;
* a **mistake** in its own code is raised as it is.

``Backends(mode=...)`` is ``"warn"`` as a rule. ``"quiet"`` writes no warning. ``"strict"`` raises where the
other two would look for something else that can be used.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata, util
from typing import Any, Literal

from .fsm import checks
from .fsm.errors import BackendUnavailable, SetupError, WeightSyncError
from .fsm.imports import Standing, Verdict, judged, said

__all__ = ["Backend", "Backends", "Mode"]

_LOGGER = logging.getLogger("weightsync")

Mode = Literal["quiet", "warn", "strict"]

_READY = Verdict(Standing.ready)


@dataclass(frozen=True, slots=True)
class Backend:
    """What can be asked for by its name.

    Args:
        name: by which it is asked for.
        module: where it is; one that begins with a dot is the library's.
        attribute: what to call there, without arguments, to have one.
        needs: packages that may be missing, by the names they are imported under.
        purpose: what it is for.
        source: the package whose entry point names it; empty for the library's own.
        fault: of an entry point that names nothing which could be called, why; otherwise empty.
    """

    name: str
    module: str
    attribute: str
    needs: tuple[str, ...] = ()
    purpose: str = ""
    source: str = ""
    fault: str = ""

    @property
    def path(self) -> str:
        """The module, by its full name."""
        return f"{__package__}{self.module}" if self.module.startswith(".") else self.module


@dataclass(slots=True)
class _Known:
    """The back ends of one registry, and what became of those that were asked for."""

    table: dict[str, Backend]
    found: dict[str, list[Backend]] | None = None
    verdicts: dict[str, tuple[Verdict, Any]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


class Backends:
    """The back ends of one kind.

    Args:
        kind: what they are, in messages.
        table: those of the library.
        group: the entry points that name those of others.
        mode: how loud a broken one is, and whether anything may be used in its place.
        also: further names that whoever asks may give, for messages.

    Raises:
        SetupError: there is no such mode.
    """

    def __init__(
        self,
        kind: str,
        table: Iterable[Backend],
        *,
        group: str | None = None,
        mode: Mode = "warn",
        also: tuple[str, ...] = (),
    ) -> None:
        if mode not in ("quiet", "warn", "strict"):
            raise checks.refusal("Backends", "mode", mode, "'quiet', 'warn' or 'strict' is needed")
        self.kind, self.mode = kind, mode
        self._group, self._also = group, also
        self._known = _Known({each.name: each for each in table})

    # -- by name ---------------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """All that can be asked for; those of the library first. Nothing is imported."""
        others = sorted(name for name in self._others() if not self._is_ours(name))
        return (*self._also, *self._known.table, *others)

    def all(self) -> list[Backend]:
        """All back ends, those that a name stands for twice included. Nothing is imported."""
        return [*self._known.table.values(), *(each for found in self._others().values() for each in found)]

    def get(self, name: str) -> Callable[[], Any]:
        """What makes the one called so.

        Raises:
            BackendUnavailable: it is absent or broken; what its import raised is the cause.
            SetupError: none is called so, or two packages bring one of that name.
            Exception: a mistake in its own code, as it was raised.
        """
        verdict, made = self._asked(name)
        if verdict.standing is not Standing.ready:
            raise self._unavailable(name, verdict) from verdict.cause
        make: Callable[[], Any] = made
        return make

    def find(self, name: str) -> Callable[[], Any] | None:
        """The same for whoever can do without it: None if it is absent or broken. Raises that if strict.

        Raises:
            BackendUnavailable: it is, and the mode is ``"strict"``.
            SetupError: none is called so.
            Exception: a mistake in its own code, as it was raised.
        """
        verdict, made = self._asked(name)
        if verdict.standing is Standing.ready:
            make: Callable[[], Any] = made
            return make
        if self.mode == "strict":
            raise self._unavailable(name, verdict) from verdict.cause
        return None

    def verdict(self, name: str) -> Verdict:
        """How it is with the one called so; it is imported to find out. Mistakes are raised."""
        return self._asked(name)[0]

    def made(self, name: str) -> Any:
        """The one called so, made by calling what makes it.

        Raises:
            BackendUnavailable: it is absent or broken, or what it needs cannot be had, such as a device.
            SetupError: none is called so, or there is nothing to call.
            Exception: a mistake in its own code, as it was raised, with a note of whose it is.
        """
        make, of = self.get(name), self._of(name)
        if not callable(make):
            raise SetupError(f"{of} names a {type(make).__name__}, which cannot be called to make one")
        try:
            return make()
        except WeightSyncError:
            raise
        except OSError as error:
            raise BackendUnavailable(f"{of} cannot be made here: {said(error)}") from error
        except Exception as error:
            error.add_note(f"raised while {of} was made")
            raise

    def shadowed(self, backend: Backend) -> str:
        """Why one of another package's cannot be reached by its name; empty if it can be."""
        if not backend.source:
            return ""
        if self._is_ours(backend.name):
            return "the name is the library's own"
        rivals = sorted({each.source for each in self._others()[backend.name] if each is not backend})
        return f"the name is brought by {' and '.join(rivals)} as well" if rivals else ""

    def lacking(self, backend: Backend) -> list[str]:
        """The packages it needs that cannot be found. Nothing is imported."""
        return [] if backend.source else [need for need in backend.needs if not there(need)]

    # -- finding ---------------------------------------------------------------------------------------------

    def _others(self) -> dict[str, list[Backend]]:
        """Those of other packages, read once."""
        with self._known.lock:
            if self._known.found is None:
                found: dict[str, list[Backend]] = {}
                for point in _points(self._group) if self._group else ():
                    found.setdefault(point.name, []).append(_of(point))
                self._known.found = found
            return self._known.found

    def _is_ours(self, name: str) -> bool:
        """Whether nobody else's can have this name."""
        return name in self._also or name in self._known.table

    def _called(self, name: str) -> Backend:
        if (ours := self._known.table.get(name)) is not None:
            return ours  # a name of the library's is nobody else's
        found = self._others().get(name, [])
        if not found:
            raise SetupError(f"no {self.kind} is called {name!r}; there are: {', '.join(self.names())}")
        if len(found) > 1:
            sources = " and ".join(sorted(each.source for each in found))
            raise SetupError(f"{self.kind} {name!r} is brought by {sources}: uninstall all of these but one")
        return found[0]

    def _asked(self, name: str) -> tuple[Verdict, Any]:
        backend = self._called(name)
        if name not in self._known.verdicts:
            found = _load(backend)  # without the lock: what it imports may ask for a back end itself
            with self._known.lock:
                if self._known.verdicts.setdefault(name, found) is found:
                    self._tell(backend, found[0])
        return self._known.verdicts[name]

    # -- telling ---------------------------------------------------------------------------------------------

    def _unavailable(self, name: str, verdict: Verdict) -> BackendUnavailable:
        backend = self._called(name)
        what = {
            Standing.absent: f"cannot be used here, as {verdict.reason}",
            Standing.broken: f"is broken: {'' if backend.fault else 'its import raised '}{verdict.reason}",
        }[verdict.standing]
        where = f", at {verdict.where}" if verdict.where else ""
        others = ", ".join(each for each in self.names() if each != name)
        return BackendUnavailable(f"{self._of(name)} {what}{where}; others are: {others}")

    def _of(self, name: str) -> str:
        """Which one, and whose."""
        source = self._called(name).source
        return f"{self.kind} {name!r} of {source}" if source else f"{self.kind} {name!r}"

    def _tell(self, backend: Backend, verdict: Verdict) -> None:
        """One event a process and back end, whoever asks and however often."""
        if verdict.standing is Standing.ready:
            return
        loud = verdict.standing is Standing.broken and self.mode != "quiet"
        level: Literal["warning", "debug"] = "warning" if loud else "debug"
        once = (os.getpid(), backend.path, backend.attribute, level)
        if once in _TOLD or not _LOGGER.isEnabledFor(getattr(logging, level.upper())):
            return
        _TOLD.add(once)
        from .handlers.log import tell

        cause = verdict.cause
        error = type(cause).__name__ if cause else ""
        tell(
            level, f"{self.kind} is {verdict.standing}", backend=backend.name, error=error,
            message=said(cause).removeprefix(f"{error}: ") if cause else verdict.reason, where=verdict.where,
        )  # fmt: skip


_TOLD: set[tuple[int, str, str, str]] = set()
"""What this process has been told. It holds for all registries, and a forked child begins anew."""


def _points(group: str) -> list[metadata.EntryPoint]:
    """The entry points of a group. A package whose papers cannot be read costs a line, and only its own."""
    try:
        return list(metadata.entry_points(group=group))
    except Exception:  # noqa: BLE001 - whatever a stranger wrote there; one of them has to be left out
        return [point for dist in _distributions() for point in _points_of(dist, group)]


def _distributions() -> Iterator[metadata.Distribution]:
    """Each package once, as it comes first on the path."""
    seen = set[str]()
    for dist in metadata.distributions():
        name = str(dist.name).lower().replace("-", "_")
        if name not in seen:
            seen.add(name)
            yield dist


def _points_of(dist: metadata.Distribution, group: str) -> list[metadata.EntryPoint]:
    try:
        return [point for point in dist.entry_points if point.group == group]
    except Exception as error:  # noqa: BLE001 - it is told
        once = (os.getpid(), str(dist.name), group, "warning")
        if once not in _TOLD:
            _TOLD.add(once)
            from .handlers.log import tell

            tell(
                "warning", "entry points cannot be read", package=str(dist.name), error=type(error).__name__,
                message=said(error),
            )  # fmt: skip
        return []


def _of(point: metadata.EntryPoint) -> Backend:
    """What an entry point names. What may be missing are the packages that its own may be installed with."""
    dist = point.dist
    needs = [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in (dist.requires or [])] if dist else []
    names = point.pattern.match(point.value)
    module, attribute = (names["module"], names["attr"] or "") if names else ("", "")
    return Backend(
        name=point.name,
        module=module,
        attribute=attribute,
        needs=tuple(sorted({need.replace("-", "_") for need in needs})),
        source=(dist.name if dist else "") or "an unnamed package",
        fault="" if attribute else f"its entry point says {point.value!r}, where 'module:name' is needed",
    )


def _load(backend: Backend) -> tuple[Verdict, Any]:
    """Import it, and judge what that raises."""
    if backend.fault:
        return Verdict(Standing.broken, backend.fault), None
    path = backend.path
    try:
        # What the library's own need is often imported in the middle of a round only. That is too late.
        for need in () if backend.source else backend.needs:
            importlib.import_module(need)
        module = importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == path and not backend.source:
            return Verdict(Standing.absent, "it is not part of this version", cause=error), None
        found = judged(
            error,
            path,
            backend.needs,
            there=there,
            mine=partial(_is_in, path.partition(".")[0]),
            hidden=__name__,
        )
        if found is None:
            raise
        return found, None
    try:
        for part in backend.attribute.split("."):
            module = getattr(module, part)
    except AttributeError as error:
        if not backend.source:
            raise
        reason = f"AttributeError: {error}, which its entry point names"
        return Verdict(Standing.broken, reason, getattr(error.obj, "__file__", "") or "", error), None
    return _READY, module


def there(package: str) -> bool:
    """Whether a package can be found. Nothing is imported, unless it is a part of another one."""
    try:
        return util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _is_in(package: str, file: str) -> bool:
    """Whether a file is of a package."""
    try:
        spec = util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    folders = list(spec.submodule_search_locations or ())
    return file == spec.origin or any(file.startswith(folder + os.sep) for folder in folders)
