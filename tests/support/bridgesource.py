"""Reads, without importing it, what a stand-in for Megatron-Bridge has to be like.

Of each function that matters: its arguments with their defaults, and the calls in it that matter, in the
order in which they first come. The recording beside this file names the version and the wheel that it was
read from; ``python -m bridgesource WHEEL`` writes it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FAKE", "RECORDING", "of_sources", "of_wheel"]

HERE = Path(__file__).parent
FAKE, RECORDING = HERE / "fakebridge.py", HERE / "bridge_source.json"

_FOLDER = "megatron/bridge/models/conversion/"
_FILES = ("auto_bridge.py", "model_bridge.py", "param_mapping.py", "mapping_registry.py", "utils.py")

_FUNCTIONS = (
    "AutoBridge.export_hf_weights", "AutoBridge.get_conversion_tasks", "AutoBridge._model_bridge",
    "MegatronModelBridge.mapping_registry", "MegatronModelBridge._unwrap_name",
    "MegatronModelBridge._megatron_global_param_names_all_pp_ranks",
    "MegatronModelBridge.build_conversion_tasks", "MegatronModelBridge.stream_weights_megatron_to_hf",
    "MegatronParamMapping.broadcast_from_pp_rank", "DirectMapping.megatron_to_hf",
    "MegatronMappingRegistry.megatron_to_hf_lookup", "persistent_buffers",
    "get_module_and_param_from_name", "get_model_bridge",
)  # fmt: skip
_CLASSES = ("WeightConversionTask", "HFWeightTuple")
_CALLS = {
    "all_gather_object", "broadcast", "broadcast_from_pp_rank", "build_adapter_conversion_tasks",
    "build_conversion_tasks", "get_model_bridge", "get_module_and_param_from_name", "mapping_registry",
    "megatron_to_hf", "megatron_to_hf_lookup", "named_parameters", "stream_weights_megatron_to_hf",
    "HFWeightTuple", "WeightConversionTask", "_megatron_global_param_names_all_pp_ranks", "_unwrap_name",
}  # fmt: skip


def of_sources(texts: Mapping[str, str]) -> dict[str, Any]:
    """What matters of these modules."""
    found: dict[str, Any] = {}
    for text in texts.values():
        for node in ast.parse(text).body:
            for name, each in _named(node):
                if name in _FUNCTIONS and isinstance(each, ast.FunctionDef):
                    found[name] = {"arguments": _arguments(each), "calls": _calls(each)}
                elif name in _CLASSES and isinstance(each, ast.ClassDef):
                    found[name] = {"fields": _fields(each)}
    return dict(sorted(found.items()))


def of_wheel(path: Path) -> dict[str, Any]:
    """The same of a wheel, which is read and not installed; with its version and its digest."""
    with zipfile.ZipFile(path) as wheel:
        texts = {name: wheel.read(_FOLDER + name).decode() for name in _FILES}
    return {
        "package": "megatron-bridge", "version": path.name.split("-")[1], "wheel": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "found": of_sources(texts),
    }  # fmt: skip


def _named(node: ast.stmt) -> list[tuple[str, ast.stmt]]:
    if not isinstance(node, ast.ClassDef):
        return [(getattr(node, "name", ""), node)]
    inner = [(f"{node.name}.{getattr(each, 'name', '')}", each) for each in node.body]
    return [(node.name, node), *inner]


def _arguments(function: ast.FunctionDef) -> str:
    """As they are written, without their types."""
    given = function.args
    for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]:
        each.annotation = None
    return ast.unparse(given)


def _calls(function: ast.FunctionDef) -> list[str]:
    found: list[tuple[int, int, str]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in _CALLS:
                found.append((node.lineno, node.col_offset, name))
    return list(dict.fromkeys(name for _, _, name in sorted(found)))


def _fields(kind: ast.ClassDef) -> list[str]:
    """Names, and defaults where there are some."""
    return [
        ast.unparse(each.target) + (f" = {ast.unparse(each.value)}" if each.value else "")
        for each in kind.body
        if isinstance(each, ast.AnnAssign)
    ]


if __name__ == "__main__":
    RECORDING.write_text(json.dumps(of_wheel(Path(sys.argv[1])), indent=2) + "\n", encoding="utf-8")
