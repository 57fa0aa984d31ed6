"""Where each case stands is true: the tests that the table names are there, and there are no others."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from casekit.table import CASES, Case, faults

pytestmark = pytest.mark.timeout(120)

TESTS = Path(__file__).parent

PARTS = {
    "B01": "i ii iii iv", "B03": "a b c", "B05": "a b c", "B08": "a b c d", "B09": "a b", "B11": "a b",
    "B14": "a b", "B15": "killed frozen", "B18": "all", "B20": "before after", "B22": "threads tasks another",
    "B26": "all", "B27": "all", "B29": "a b c d e", "B31": "all", "B33": "first middle last limits advice",
    "B34": "thirty with", "B35": "a b c", "B38": "guards executors ports engines undoes observers",
    "B39": "a b c d", "B42": "a b", "B44": "installed import, one",
}  # fmt: skip
"""The 22, each with what it asks for."""

NAMED = re.compile(r"def test_\w*b\d\d_")
KIT = re.compile(r"\b(Bench|bench|collective)\(")


def files() -> list[Path]:
    """Those in which a test is named by a case."""
    return [path for path in sorted(TESTS.glob("test_*.py")) if NAMED.search(path.read_text())]


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> list[str]:
    """What pytest has found in this run, if that is a run of all; or else finds in those files."""
    option = request.config.option
    named = request.config.args_source is request.config.ArgsSource.ARGS
    if not named and not option.keyword and option.markexpr in ("", "not mutation"):
        return [item.nodeid.removeprefix("tests/") for item in request.session.items]
    return found_in(files())


def found_in(paths: list[Path]) -> list[str]:
    """The tests in these files, found by another pytest."""
    support = os.pathsep.join(filter(None, [str(TESTS / "support"), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    found = subprocess.run(
        [*command, "--import-mode=importlib", *map(str, paths)], cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": support}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return [line.removeprefix("tests/") for line in found.stdout.splitlines() if "::" in line]


def with_the_kit() -> Iterator[str]:
    """The tests in whose text, or in whose fixtures' names, a ``Bench`` is made."""
    for path in files():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.Module):
                owner = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and KIT.search(
                        ast.get_source_segment(text, each) or ""
                    ):
                        yield f"{path.name}::{owner}{each.name}"


@pytest.mark.slow
def test_every_case_stands_where_the_table_says(collected: list[str]) -> None:
    """All 22 are in it; what it names is there; what a case names is in it, and has the shared checks."""
    assert len(collected) > 250, f"too few tests were found: {collected[-5:]}"
    assert list(faults(CASES, PARTS, collected, with_the_kit())) == []


THERE = {"f.py::test_b01_x[one-two]", "f.py::test_b01_y", "f.py::test_other"}
GOOD = {"B01": Case("", {"i first": ("f.py::test_b01_x[two]",), "ii": ("f.py::test_b01_y",)})}


@pytest.mark.parametrize(
    ("cases", "line"),
    [
        ({}, "B01 is missing"),
        ({**GOOD, "B02": Case("", {})}, "B02 is no case"),
        ({"B01": Case("", {**GOOD["B01"].parts, "ii": ()})}, "B01 ii has no test"),
        (
            {"B01": Case("", {"i": ("f.py::test_b01_x", "f.py::test_b01_y")})},
            "B01 ii is neither tested nor awaited",
        ),
        (
            {"B01": Case("", {**GOOD["B01"].parts, "i": ("f.py::test_b01_x[three]",)})},
            "B01 i: there is no test f.py::test_b01_x[three]",
        ),
        (
            {"B01": Case("", {**GOOD["B01"].parts, "iii": ("f.py::test_other",)})},
            "B01 iii: f.py::test_other is not named by the case",
        ),
        (
            {"B01": Case("", {"i": ("f.py::test_b01_x",)}, {"ii": "issue 7: later"})},
            "f.py::test_b01_y is not in the table, under B01",
        ),
        ({"B01": Case("", GOOD["B01"].parts, {"iii": "soon"})}, "B01 iii does not say what it lands with"),
    ],
)
def test_a_table_that_is_wrong_in_one_place_is_noticed(cases: dict[str, Case], line: str) -> None:
    """By one line, which names the place."""
    kit = {each.partition("[")[0] for each in THERE}
    assert list(faults(GOOD, {"B01": "i ii"}, THERE, kit)) == []
    assert line in list(faults(cases, {"B01": "i ii"}, THERE, kit))


def test_a_case_without_the_shared_checks_is_noticed() -> None:
    """Its test would look at less than every other one."""
    line = "f.py::test_b01_y runs no round that the kit looks at"
    assert list(faults(GOOD, {"B01": "i ii"}, THERE, {"f.py::test_b01_x"})) == [line]
