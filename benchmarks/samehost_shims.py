"""verl's ``bucketed_weight_transfer.py`` by itself: as published, with no more of verl than it asks for.

To import it the ordinary way would import Ray, vLLM's adapters, a web server and whatever else the packages
above it name in their ``__init__``. So those packages are stood in for by empty ones that have their folders;
the modules that the file itself asks for are the real ones, with two exceptions:

* the platform is one for CPUs, which verl lets everybody set, and does not have itself;
* of ``verl.workers.rollout.utils``, which starts with the web server, there is the one function that is asked
  for, compiled from its own source.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from .samehost_side import Absent

__all__ = ["VERSION", "function_of", "transfer_module"]

VERSION = "0.9.1"
_PACKAGES = ("verl", "verl.utils", "verl.plugin", "verl.workers", "verl.workers.rollout")
_FILE = Path("workers", "rollout", "vllm_rollout", "bucketed_weight_transfer.py")


class _Device:
    """What is called on ``torch.cuda``; a CPU has nothing to wait for and nothing to give back."""

    @staticmethod
    def synchronize() -> None:
        """Nothing is under way."""

    @staticmethod
    def empty_cache() -> None:
        """Nothing is cached."""


class CpuPlatform:
    """The part of verl's ``PlatformBase`` that a transfer by shared memory asks."""

    device_name = "cpu"
    device_module = _Device

    def current_device(self) -> int:
        return 0

    def is_ipc_supported(self) -> bool:
        return False


def transfer_module() -> Any:
    """The module with ``BucketedWeightSender`` and ``BucketedWeightReceiver``.

    Raises:
        Absent: verl is not installed here, or it is another version.
    """
    try:
        found = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise Absent("verl is not installed in this environment") from None
    if found != VERSION:
        raise Absent(f"verl {found} is installed, and {VERSION} is what is compared with")
    root = Path(str(importlib.metadata.distribution("verl").locate_file("verl")))
    _stand_in(root)
    platform = importlib.import_module("verl.plugin.platform")
    platform.set_platform(CpuPlatform())
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", root / _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _stand_in(root: Path) -> None:
    for name in _PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    name = "ensure_async_iterator"
    utils = types.ModuleType("verl.workers.rollout.utils")
    setattr(utils, name, function_of(root / "workers" / "rollout" / "utils.py", name))
    sys.modules[utils.__name__] = utils


def function_of(path: Path, name: str) -> Any:
    """One function of a file, compiled from its source; the rest of the file is not run."""
    body = ast.parse(path.read_text(encoding="utf-8"), str(path)).body
    wanted = [
        each for each in body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name
    ]  # fmt: skip
    if not wanted:
        raise Absent(f"{path} has no function {name}")
    names: dict[str, Any] = {}
    exec(compile(ast.Module([wanted[-1]], []), str(path), "exec"), names)
    return names[name]
