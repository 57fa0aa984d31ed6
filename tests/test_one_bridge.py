"""There is one way from synchronous code to coroutines: no other module makes an event loop or waits for one.

A second bridge is how descriptors leak, one loop at a time. Awaiting, and handing something to a loop that
runs, is no bridge: nobody waits.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BRIDGE = "handlers/bridge_loop.py"
FOLDERS = ("fsm", "handlers", "transports", "diagrams", "src/weightsync")

MAKES_OR_WAITS = frozenset({
    "new_event_loop", "run_until_complete", "run_forever", "get_event_loop", "set_event_loop",
    "SelectorEventLoop", "ProactorEventLoop", "AbstractEventLoopPolicy", "Runner", "EventLoop",
})  # fmt: skip
"""What nobody else names."""
OF_OTHERS = frozenset({"uvloop", "nest_asyncio", "asgiref", "anyio", "trio"})
"""What nobody imports: each of them makes loops of its own."""


def bridges(text: str) -> list[str]:
    """What in a module makes a loop or waits for one, with its line."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in MAKES_OR_WAITS:
            found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.Attribute) and node.attr == "run" and named(node.value) == "asyncio":
            found.append(f"{node.lineno}: asyncio.run")
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == "asyncio":
                found += [f"{node.lineno}: {name}" for name in names & (MAKES_OR_WAITS | {"run"})]
            found += [f"{node.lineno}: {top}" for top in {(node.module or "").partition(".")[0]} & OF_OTHERS]
        elif isinstance(node, ast.Import):
            tops = {alias.name.partition(".")[0] for alias in node.names}
            found += [f"{node.lineno}: {top}" for top in tops & OF_OTHERS]
            found += [f"{node.lineno}: asyncio as {alias.asname}" for alias in node.names if hidden(alias)]
        elif isinstance(node, ast.Attribute) and waits_elsewhere(node):
            found.append(f"{node.lineno}: run_coroutine_threadsafe(...).result()")
    return sorted(found)


def named(node: ast.expr) -> str:
    """A bare name; empty if it is none."""
    return node.id if isinstance(node, ast.Name) else ""


def hidden(alias: ast.alias) -> bool:
    """Whether asyncio gets another name, under which nobody would look for it."""
    return alias.name == "asyncio" and alias.asname is not None


def waits_elsewhere(node: ast.Attribute) -> bool:
    """Whether somebody sends a coroutine to a loop that runs, and waits for it there and then."""
    if node.attr != "result" or not isinstance(node.value, ast.Call):
        return False
    asked = node.value.func
    return "run_coroutine_threadsafe" in (named(asked), getattr(asked, "attr", ""))


def modules() -> list[str]:
    """All of the library."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted({str(path.resolve().relative_to(ROOT)) for path in paths})


def test_no_other_module_makes_a_loop_or_waits_for_one() -> None:
    """The bridge's own one does, which shows that the search finds something."""
    found = {module: bridges((ROOT / module).read_text(encoding="utf-8")) for module in modules()}
    assert found.pop(BRIDGE), "the bridge is gone, or is not seen"
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio\nasyncio.run(f())",
        "from asyncio import run",
        "import asyncio as aio\naio.run(f())",
        "import asyncio\nasyncio.new_event_loop()",
        "from asyncio import new_event_loop as made",
        "loop.run_until_complete(f())",
        "with asyncio.Runner() as runner: runner.run(f())",
        "class L(asyncio.SelectorEventLoop): pass",
        "asyncio.get_event_loop().run_until_complete(f())",
        "asyncio.run_coroutine_threadsafe(f(), loop).result()",
        "import uvloop",
        "from asgiref.sync import async_to_sync",
    ],
)
def test_each_way_to_make_another_one_is_noticed(text: str) -> None:
    """The search can fail."""
    assert bridges(text)


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio\nasyncio.get_running_loop().create_future()",
        "asyncio.run_coroutine_threadsafe(f(), loop)",
        "await asyncio.to_thread(f)",
        "self.run(f)",
        "def f(loop: asyncio.AbstractEventLoop): ...",
    ],
)
def test_what_is_no_bridge_is_let_through(text: str) -> None:
    """To await, and to send to a loop that runs."""
    assert bridges(text) == []
