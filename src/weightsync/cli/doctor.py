"""``weightsync doctor``: what is usable here, and why the rest is not. Nothing is imported to find out."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING

from ..columns import Column, grid
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

_TRANSPORTS = {
    "memory": (("torch", "xxhash"), "engines in this process"),
    "collective": (("torch", "numpy", "xxhash"), "engines in processes of their own (gloo)"),
    "shm": (("torch", "numpy", "xxhash", "msgpack"), "engines in processes of this host, by shared memory"),
    "cuda_ipc": (
        ("torch", "numpy", "xxhash", "msgpack"),
        "engines on GPUs of this host, by CUDA IPC; not run on a GPU so far",
    ),
    "objects": (("torch", "numpy", "xxhash", "ray"), "engines in Ray actors, by Ray's object store"),
}


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
        "that is needed is missing.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    found = list(findings())
    columns = [
        Column("", [each.what for each in found]),
        Column("", [each.verdict for each in found], colour=_colour),
        Column("", [each.version for each in found]),
        Column("", [each.note for each in found], least=20),
    ]
    show(grid(columns, width(), paint()))
    return 1 if any(each.verdict == "MISSING" for each in found) else 0


def findings() -> Iterator[Finding]:
    """What there is, in the order in which it is needed."""
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
    for name, (packages, purpose) in _TRANSPORTS.items():
        lacking = [package for package in packages if not _version(package)]
        if not _there(f"weightsync.transports.{name}"):
            yield Finding(f"transport {name}", "no", "", "not part of this version")
        elif lacking:
            yield Finding(f"transport {name}", "no", "", f"needs {', '.join(lacking)}")
        elif name == "cuda_ipc" and _no_gpu():
            yield Finding(f"transport {name}", "no", "", _no_gpu())
        else:
            yield Finding(f"transport {name}", "ok", "", purpose)


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
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _there(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _colour(verdict: str) -> str:
    return {"ok": "green", "MISSING": "alarm"}.get(verdict, "yellow")
