"""One door to all formats, and the files that are kept beside the code."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, overload

from ..fsm.engine_table import ENGINE
from ..fsm.rows import Table
from ..fsm.table import ROUND
from .dot import dot
from .errors import FormatUnknown
from .markdown import markdown
from .mermaid import mermaid
from .model import Model, extract
from .overlay import Trace
from .png import png
from .svg import svg

__all__ = ["FORMATS", "checked_in", "render", "write", "write_all"]

_TEXTS: dict[str, Callable[[Model, Trace | None], str]] = {
    "dot": dot,
    "markdown": markdown,
    "mermaid": mermaid,
    "svg": svg,
}
_SUFFIXES = {
    ".dot": "dot",
    ".gv": "dot",
    ".md": "markdown",
    ".mermaid": "mermaid",
    ".mmd": "mermaid",
    ".png": "png",
    ".svg": "svg",
}
FORMATS: tuple[str, ...] = tuple(sorted({*_TEXTS, "png"}))
"""What can be asked for."""

_KEPT = (".dot", ".md", ".mmd", ".svg")
_TABLES: tuple[Table[Any, Any], ...] = (ENGINE, ROUND)


@overload
def render(table: Table[Any, Any], format: Literal["png"], trace: Trace | None = None) -> bytes: ...
@overload
def render(
    table: Table[Any, Any], format: Literal["dot", "markdown", "mermaid", "svg"], trace: Trace | None = None
) -> str: ...
@overload
def render(table: Table[Any, Any], format: str, trace: Trace | None = None) -> str | bytes: ...
def render(
    table: Table[Any, Any],
    format: str,  # noqa: A002  # the word that everybody looks for
    trace: Trace | None = None,
) -> str | bytes:
    """A picture of a table, with the path of a round laid over it if one is given.

    Raises:
        FormatUnknown: ``format`` is none of ``FORMATS``.
        DrawingToolMissing: a PNG was asked for, and what draws it is not installed.
        NoPlace: an SVG or PNG of a table that has no sheet, or does not fit it.
    """
    model = extract(table)
    if format == "png":
        return png(svg(model, trace))
    if format not in _TEXTS:
        raise FormatUnknown(f"no such format: {format!r}; there are {', '.join(FORMATS)}")
    return _TEXTS[format](model, trace)


def write(
    path: str | os.PathLike[str],
    table: Table[Any, Any],
    format: str | None = None,  # noqa: A002  # the same word again
    trace: Trace | None = None,
) -> Path:
    """Draw into a file, whose suffix says what it will hold. The file is whole or as it was before.

    Missing folders are made, once there is something to put into them.

    Raises:
        FormatUnknown: the suffix is unknown, or ``format`` says something else.
        DrawingToolMissing, NoPlace: see ``render``.
        OSError: it cannot be written there; the error names ``path``.
    """
    path = Path(path)
    wanted = _SUFFIXES.get(path.suffix.lower())
    if wanted is None:
        raise FormatUnknown(f"{path.name!r} names no format; it could end in {', '.join(sorted(_SUFFIXES))}")
    if format not in (None, wanted):
        raise FormatUnknown(f"{path.name!r} is a name for {wanted}, and {format} was asked for")
    drawn = render(table, wanted, trace)
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, drawn if isinstance(drawn, bytes) else drawn.encode())
    return path


def checked_in() -> dict[str, str]:
    """The files that lie beside the code, by name, as they should be."""
    return {
        f"{table.name}{suffix}": _TEXTS[_SUFFIXES[suffix]](extract(table), None)
        for table in _TABLES
        for suffix in _KEPT
    }


def write_all(folder: str | os.PathLike[str]) -> list[Path]:
    """Write the files of ``checked_in`` into a folder; those that are as they should be are left alone."""
    written = []
    for name, text in checked_in().items():
        path, content = Path(folder) / name, text.encode()
        if not path.is_file() or path.read_bytes() != content:
            _replace(path, content)
            written.append(path)
    return written


def _replace(path: Path, content: bytes) -> None:
    """Put ``content`` in place of what is at ``path``, in one step. Its mode is that of any new file."""
    beside = path.with_name(
        f".{uuid.uuid4().hex}"
    )  # not longer than the name itself, which may be at its limit
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        # Nobody but us knows the file beside it.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
