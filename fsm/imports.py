"""What became of the import of an optional back end: whose fault it is that it raised.

* **absent**: a package that it needs is not installed. Nobody wanted it, and nobody is to be told.
* **broken**: what it needs is there, and does not work: a symbol is missing, a native library cannot be
  loaded, something raises. Whoever asks for it is told, with the cause.
* a **mistake**: its own code is wrong. That is nobody's missing package, and is never taken for one.

Nothing is imported here; the error tells.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Standing", "Verdict", "judged", "said"]


class Standing(StrEnum):
    """How it is with a back end."""

    ready = "ready"
    absent = "absent"
    broken = "broken"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a back end.

    Args:
        standing: how it is.
        reason: in one line; empty if it is ready.
        where: the first place outside of its own package that the error came through.
        cause: what was raised.
    """

    standing: Standing
    reason: str = ""
    where: str = ""
    cause: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    package: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def judged(
    error: Exception,
    module: str,
    needs: Collection[str],
    *,
    there: Callable[[str], bool],
    mine: Callable[[str], bool],
    hidden: str = "",
) -> Verdict | None:
    """What an error says that the import of ``module`` raised; None if it is a mistake in its own package.

    Args:
        error: what was raised.
        module: the back end's own.
        needs: the packages that may be missing, by the names they are imported under.
        there: whether a package can be found.
        mine: whether a file is of the back end's own package.
        hidden: a module through which it was imported, which is no place to name.
    """
    own = _top(module)
    lacks = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if lacks in needs and not there(lacks):
        return Verdict(Standing.absent, f"{lacks} is not installed", cause=error)
    places = [place for place in _places(error) if place.package != hidden]
    if _mistaken(error, own, module, places, mine):
        return None
    outside = next((place for place in places if _top(place.package) != own), None)
    where = str(outside or "") or _named(error)
    return Verdict(Standing.broken, said(error), where, error)


def said(error: BaseException) -> str:
    """An error in one line that can be printed, also if it cannot say anything itself."""
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001 - it is a stranger's code, too
        text = f"(its text raised {type(another).__name__})"
    line = " ".join(f"{type(error).__name__}: {text}".split())
    return "".join(each if each.isprintable() else "?" for each in line).removesuffix(":")


def _mistaken(
    error: Exception, own: str, module: str, places: list[_Place], mine: Callable[[str], bool]
) -> bool:
    """Whether the package of the back end is wrong in itself."""
    if isinstance(error, SyntaxError):
        return mine(error.filename or "")  # it was raised by nothing that runs: the error alone says where
    if isinstance(error, ImportError):
        asked = error.name or ""
        return _top(asked) == own and not (isinstance(error, ModuleNotFoundError) and asked == module)
    if isinstance(error, (OSError, RuntimeError, Warning)) and not isinstance(error, RecursionError):
        return False  # what a library, a device or a filter of warnings says on purpose
    if isinstance(error, AttributeError) and isinstance(error.obj, types.ModuleType):
        return (
            _top(error.obj.__name__) == own
        )  # a symbol that a package does not have (any more) is its fault
    return not places or _top(places[-1].package) == own


def _places(error: Exception) -> Iterator[_Place]:
    """Where it came through, outermost first, without the machinery of imports."""
    at = error.__traceback__
    while at is not None:
        package = str(at.tb_frame.f_globals.get("__name__", ""))
        if _top(package) != "importlib" and "frozen importlib" not in at.tb_frame.f_code.co_filename:
            yield _Place(package, at.tb_frame.f_code.co_filename, at.tb_lineno)
        at = at.tb_next


def _named(error: Exception) -> str:
    """The place that an error itself names: that of a native library comes through no code of Python."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    return str(getattr(error, "path", None) or getattr(error, "filename", None) or "")


def _top(name: str) -> str:
    return name.partition(".")[0]
