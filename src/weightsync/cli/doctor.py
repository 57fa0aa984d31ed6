"""``weightsync doctor``: what is usable here, and why the rest is not.

Nothing is imported to find out, so what is there counts as usable. ``--load`` imports the transports as well.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING

from ..backends import Backend, Backends
from ..columns import Column, grid
from ..fsm.imports import Standing, Verdict, said
from ..transport_backends import transports
from .terminal import paint, show, width

if TYPE_CHECKING:
    from .terminal import Commands

__all__ = ["NEEDED", "USEFUL", "add", "run"]

NEEDED = {
    "torch": "tensors, and collectives",
    "ray": "engines in actors, a lock for a whole cluster",
    "numpy": "what torch and Ray exchange tensors through",
    "structlog": "the state log",
    "transitions": "the compiled machine",
    "xxhash": "digests of tensors",
    "msgpack": "messages beside shared memory",
}
"""Packages without which a part of the library does not work."""

USEFUL = {"tqdm": ("progress", "a progress bar"), "resvg-py": ("png", "diagrams as PNG")}
"""Packages that an extra brings: its name, and what they are for."""

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""What a driver for a GPU makes: CUDA, ROCm, and CUDA in WSL."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    verdict: str
    version: str
    note: str


def add(commands: Commands) -> None:
    """Describe it."""
    parser = commands.add_parser(
        "doctor",
        help="say what is usable here, and why the rest is not",
        description="Say what is usable on this machine, and why the rest is not. Exit status 1 if something "
        "that is needed is missing, or broken.",
    )
    parser.add_argument(
        "--load",
        action="store_true",
        help="import each transport as well, which takes a while and finds what is there and broken",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    found = list(findings(load=arguments.load))
    columns = [
        Column("", [each.what for each in found]),
        Column("", [each.verdict for each in found], colour=_colour),
        Column("", [each.version for each in found]),
        Column("", [each.note for each in found], least=20),
    ]
    show(grid(columns, width(), paint()))
    return 1 if any(each.verdict in ("MISSING", "BROKEN") for each in found) else 0


def findings(*, load: bool = False) -> Iterator[Finding]:
    """What there is, in the order in which it is needed; with ``load``, what can be imported as well."""
    from .. import __version__

    yield Finding("weightsync", "ok", __version__, "")
    yield Finding("python", "ok", platform.python_version(), platform.platform())
    for name, purpose in NEEDED.items():
        version = _version(name)
        missing = f"pip install {name}: {purpose}"
        yield Finding(name, "ok" if version else "MISSING", version or "", purpose if version else missing)
    for name, (extra, purpose) in USEFUL.items():
        version = _version(name)
        missing = f"pip install {name}, or the extra {extra}: {purpose}"
        yield Finding(name, "ok" if version else "no", version or "", purpose if version else missing)
    backends = transports()
    for backend in backends.all():
        yield _backend(backends, backend, load=load)


def _backend(backends: Backends, backend: Backend, *, load: bool) -> Finding:
    """A transport, and what keeps it from being used as far as that can be seen."""
    what = f"transport {backend.name}"
    if backend.source:
        return _of_others(backends, backend, load=load)
    if not _there(backend.path):
        return Finding(what, "no", "", "not part of this version")
    lacking = [package for package in backend.needs if not _version(package)]
    if lacking:
        return Finding(what, "no", "", f"needs {', '.join(lacking)}")
    if backend.name == "cuda_ipc" and _no_gpu():
        return Finding(what, "no", "", _no_gpu())
    try:
        if load and (verdict := backends.verdict(backend.name)).standing is not Standing.ready:
            return _told(what, "", verdict)
    except SystemExit as end:  # of something that it needs; a mistake of the library's own is raised
        return Finding(what, "BROKEN", "", said(end))
    return Finding(what, "ok", "", backend.purpose)


def _of_others(backends: Backends, backend: Backend, *, load: bool) -> Finding:
    """One that another package brings. Mistakes in it are told, and not raised."""
    what, version = f"transport {backend.name}", _dated(backend.source)
    note = f"brought by {backend.source}"
    if shadow := backends.shadowed(backend):
        return Finding(what, "no", version, f"{note}, and not to be reached: {shadow}")
    if backend.fault:
        return Finding(what, "BROKEN", version, f"{note}: {backend.fault}")
    if not load:
        return Finding(what, "ok", version, f"{note}; not imported to find out (--load)")
    try:
        verdict = backends.verdict(backend.name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one line of the table, and the others follow
        return Finding(what, "BROKEN", version, f"{note}: {said(error)}")
    return (
        Finding(what, "ok", version, note)
        if verdict.standing is Standing.ready
        else _told(what, version, verdict)
    )


def _told(what: str, version: str, verdict: Verdict) -> Finding:
    where = f", at {verdict.where}" if verdict.where else ""
    standing = "BROKEN" if verdict.standing is Standing.broken else "no"
    return Finding(what, standing, version, f"{verdict.reason}{where}")


def _no_gpu() -> str:
    """Why nothing here can run on a GPU, as far as it can be known without torch."""
    if (_version("torch") or "").endswith("+cpu"):
        return "this torch is built without CUDA"
    if not any(map(_device, _DEVICES)):
        return "no GPU is to be seen here"
    return ""


def _device(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - one question, of a path that is no folder's


def _version(name: str) -> str | None:
    """The version of a package; None if it cannot be imported."""
    if not _there(name.replace("-", "_")):
        return None
    return _dated(name)


def _dated(name: str) -> str:
    try:
        return metadata.version(name) or "unknown"
    except metadata.PackageNotFoundError:
        return "unknown"


def _there(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _colour(verdict: str) -> str:
    return {"ok": "green", "MISSING": "alarm", "BROKEN": "alarm"}.get(verdict, "yellow")
