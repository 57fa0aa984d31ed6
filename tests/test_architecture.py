"""Imports point inwards, nothing forms a circle, and what is costly is loaded late.

The four folders are layers: `fsm` knows nobody, the other three know `fsm` and themselves, and only the face
in `src/weightsync` knows them all. The first half of this file reads the sources, the second half watches an
interpreter import them.
"""

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
FACE = PurePosixPath("src/weightsync")
LONGEST_MODULE = 420


@dataclass(frozen=True)
class Layer:
    """What the modules of one folder may import, besides the standard library."""

    knows: frozenset[str]
    """Folders, under their names inside the library."""

    uses: frozenset[str] = frozenset()
    """Packages of others."""


LAYERS = {
    "fsm": Layer(knows=frozenset({"fsm"})),
    "transports": Layer(
        knows=frozenset({"transports", "fsm"}), uses=frozenset({"msgpack", "numpy", "torch", "xxhash"})
    ),
    "handlers": Layer(knows=frozenset({"handlers", "fsm"}), uses=frozenset({"ray", "torch", "tqdm"})),
    "diagrams": Layer(knows=frozenset({"diagrams", "fsm"})),
}

ALSO_IN = {
    PurePosixPath("transports/object_store.py"): frozenset({"ray"}),
    PurePosixPath("handlers/slots.py"): frozenset({"xxhash"}),  # of whole copies
}
"""Packages that one module may use beside those of its layer."""

ONLY_IN = {
    "structlog": PurePosixPath("handlers/log.py"),
    "transitions": PurePosixPath("fsm/_machine.py"),
}
"""Packages that one module hides from the rest of its layer."""


# ---------------------------------------------------------------------------------------- reading the sources


@dataclass(frozen=True)
class Import:
    """One name that a module asks for, with dots from the top; None if it lies above the library."""

    target: str | None
    line: int


def sources(folder: PurePosixPath) -> list[PurePosixPath]:
    """All modules below a folder, relative to the root; links are not followed, so each is listed once."""
    found = []
    for directory, folders, files in os.walk(ROOT / folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        here = PurePosixPath(Path(directory).relative_to(ROOT))
        found += [here / name for name in files if name.endswith(".py")]
    return sorted(found)


def layered() -> list[PurePosixPath]:
    """All modules of the four folders."""
    return [module for layer in LAYERS for module in sources(PurePosixPath(layer))]


def read(module: PurePosixPath) -> str:
    """The text of a module."""
    return (ROOT / module).read_text(encoding="utf-8")


def dotted(module: PurePosixPath) -> str:
    """The name under which a module of a folder is imported."""
    parts = ("weightsync", *module.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: PurePosixPath, text: str) -> Iterator[Import]:
    """Whatever a module imports, anywhere in it: at its top, in a function, or for the type checker alone."""
    folder = module.parent.relative_to(FACE) if module.is_relative_to(FACE) else module.parent
    package = ("weightsync", *folder.parts)
    for node in ast.walk(ast.parse(text, str(module))):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(package):
                yield Import(None, node.lineno)
                continue
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)


def complaint(module: PurePosixPath, wanted: Import) -> str | None:
    """What is wrong with an import by a module of a layer, or None."""
    layer = LAYERS[module.parts[0]]
    if wanted.target is None:
        return "a relative import that leaves the library"
    top, _, rest = wanted.target.partition(".")
    inner = rest.partition(".")[0]
    if top == "weightsync":
        if inner in layer.knows:
            return None
        return f"{module.parts[0]} may not know {inner if inner in LAYERS else 'the face'}"
    if top in ONLY_IN:
        return None if module == ONLY_IN[top] else f"{top} is for {ONLY_IN[top]} alone"
    if top in sys.stdlib_module_names or top in layer.uses | ALSO_IN.get(module, frozenset()):
        return None
    return f"the bare name of a layer: {top}" if top in LAYERS else f"a package of others: {top}"


def complaints(module: PurePosixPath, text: str) -> list[str]:
    """All that is wrong with the imports of one module, ready to be clicked on."""
    found = ((wanted.line, complaint(module, wanted)) for wanted in imports(module, text))
    return sorted({f"{module}:{line}: {what}" for line, what in found if what})


def circle(texts: dict[PurePosixPath, str]) -> list[str]:
    """The modules of one circle of imports among the given ones, first and last the same; empty if none."""
    names = {dotted(module) for module in texts}
    graph: dict[str, set[str]] = {}
    for module, text in texts.items():
        wanted = [found.target for found in imports(module, text) if found.target]
        # `from a.b import c` means the module a.b.c if there is one, and the contents of a.b otherwise.
        known = {name if name in names else name.rpartition(".")[0] for name in wanted} & names
        graph[dotted(module)] = known
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_it_may_know(layer: str) -> None:
    """Every import of every module of a folder is allowed to that folder."""
    found = [line for module in sources(PurePosixPath(layer)) for line in complaints(module, read(module))]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("module", sources(FACE), ids=str)
def test_the_face_leaves_hidden_packages_to_the_modules_that_hide_them(module: PurePosixPath) -> None:
    """What one module of a layer hides from the others, it hides from the face as well."""
    wanted = {found.target.partition(".")[0] for found in imports(module, read(module)) if found.target}
    assert not wanted & ONLY_IN.keys()


@pytest.mark.parametrize("layer", LAYERS)
def test_the_modules_of_a_layer_form_no_circle(layer: str) -> None:
    """Modules can be read in some order in which each needs only those before it, type hints included."""
    found = circle({module: read(module) for module in sources(PurePosixPath(layer))})
    assert not found, " -> ".join(found)


def test_no_module_is_too_long_to_be_read_in_one_go() -> None:
    """A module that outgrows the limit is two modules."""
    lengths = {module: read(module).count("\n") for module in [*layered(), *sources(FACE)]}
    found = [f"{module}: {length} lines" for module, length in lengths.items() if length > LONGEST_MODULE]
    assert not found, "\n".join(["", *found])


def test_contributors_are_told_the_length_that_is_allowed() -> None:
    """In the words of the guide, the number of the test above."""
    guide = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert f"`tests/test_architecture.py` allows a module {LONGEST_MODULE} lines" in guide


@pytest.mark.parametrize("layer", LAYERS)
def test_the_face_links_to_each_layer(layer: str) -> None:
    """A layer is part of the library by a relative link, which survives a clone and a move."""
    link = ROOT / FACE / layer
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", layer)
    assert (link / "__init__.py").is_file()


def test_the_tests_are_no_package() -> None:
    """Tests import the library as its users do, and never one another."""
    assert not [str(module) for module in sources(PurePosixPath("tests")) if module.name == "__init__.py"]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("fsm/a.py", "import torch"),
        ("fsm/a.py", "def f():\n    import ray.actor"),
        ("fsm/a.py", "from transitions import Machine"),
        ("fsm/a.py", "from ..transports import memory"),
        ("fsm/a.py", "from .. import handlers"),
        ("fsm/a.py", "from weightsync.diagrams.model import Node"),
        ("fsm/a.py", "from ..cli import main"),
        ("fsm/a.py", "import weightsync"),
        ("fsm/a.py", "from ...somewhere import thing"),
        ("fsm/a.py", "import fsm.table"),
        ("fsm/_machine.py", "import structlog"),
        ("transports/a.py", "from ..handlers.lease import Lease"),
        ("transports/a.py", "import ray"),
        ("transports/deep/a.py", "from ...handlers import lease"),
        ("handlers/a.py", "from ..transports import Transport"),
        ("handlers/a.py", "import structlog"),
        ("handlers/a.py", "if TYPE_CHECKING:\n    from .. import WeightSync"),
        ("diagrams/a.py", "from ..handlers import log"),
        ("diagrams/a.py", "import transitions"),
    ],
)
def test_a_forbidden_import_is_noticed(module: str, text: str) -> None:
    """The check of the layers can fail: it does, once, for each way to break them."""
    assert len(complaints(PurePosixPath(module), text)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("fsm/a.py", "from __future__ import annotations\nimport os.path, enum"),
        ("fsm/a.py", "from . import b\nfrom .b import c"),
        ("fsm/deep/a.py", "from .. import b\nfrom ..b import c\nfrom ...fsm import d"),
        ("fsm/_machine.py", "import transitions\nfrom transitions.core import Machine"),
        ("transports/a.py", "import numpy, torch.distributed"),
        ("transports/object_store.py", "import ray, numpy"),
        ("transports/a.py", "from ..fsm import plan\nfrom .base import Plan"),
        ("handlers/a.py", "import ray, torch, tqdm"),
        ("handlers/a.py", "from ..fsm.states import State\nfrom .log import StateLog"),
        ("handlers/log.py", "import structlog"),
        ("diagrams/a.py", "from weightsync.fsm.table import ROWS\nfrom ..fsm import states"),
    ],
)
def test_an_allowed_import_is_let_through(module: str, text: str) -> None:
    """The check of the layers can pass: each layer may use what it is given."""
    assert complaints(PurePosixPath(module), text) == []


def test_a_circle_is_noticed() -> None:
    """The check for circles can fail, also where one half of the circle is for the type checker alone."""
    half, other = PurePosixPath("fsm/a.py"), PurePosixPath("fsm/b.py")
    late = "if TYPE_CHECKING:\n    from .a import A"
    assert circle({half: "from . import b", other: ""}) == []
    assert set(circle({half: "from . import b", other: late})) == {"weightsync.fsm.a", "weightsync.fsm.b"}


def test_an_import_from_the_own_package_is_a_circle() -> None:
    """The package collects its modules; a module that asks the package for a name closes a circle."""
    package, module = PurePosixPath("fsm/__init__.py"), PurePosixPath("fsm/a.py")
    assert circle({package: "from .a import A", module: "from . import A"})


# ------------------------------------------------------------------------------------ watching an interpreter

COSTLY = ("ray", "structlog", "torch")


def run(code: str, folder: Path) -> str:
    """What a fresh interpreter, started in a folder, prints as the last line of its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rpartition("\n")[2]


def test_importing_the_library_loads_nothing_costly(tmp_path: Path) -> None:
    """Who draws a diagram or reads a log waits neither for torch nor for Ray."""
    code = f"""
import sys, weightsync, weightsync.fsm
print([name for name in {COSTLY} if name in sys.modules])
"""
    assert run(code, tmp_path) == "[]"


def test_asking_for_help_loads_nothing_costly(tmp_path: Path) -> None:
    """The command line answers at once; a subcommand loads what it needs when it runs."""
    code = f"""
import contextlib, sys
from weightsync.cli import main
sys.argv = ["weightsync", "--help"]
with contextlib.suppress(SystemExit):
    main()
print()
print([name for name in {COSTLY} if name in sys.modules])
"""
    assert run(code, tmp_path) == "[]"


def test_every_module_is_loaded_under_one_name() -> None:
    """Even from the root, where `import fsm` would find a folder, no module of ours is loaded twice.

    A second name would make a second set of classes, and comparing one with the other would be false.
    """
    code = f"""
import importlib, os, pkgutil, sys
import weightsync
for found in pkgutil.walk_packages(weightsync.__path__, "weightsync."):
    if not found.name.endswith(".__main__"):
        importlib.import_module(found.name)
files = {{}}
for name, module in list(sys.modules.items()):
    path = getattr(module, "__file__", None) or ""  # some modules of torch make one up
    path = os.path.realpath(path) if os.path.isabs(path) else ""
    if path.startswith({str(ROOT)!r} + os.sep) and not path.startswith(sys.prefix + os.sep):
        files.setdefault(path, set()).add(name)
print(sorted(name for names in files.values() for name in names
             if len(names) > 1 or not name.startswith("weightsync")))
"""
    assert run(code, ROOT) == "[]"
