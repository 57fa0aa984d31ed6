"""What must not type-check does not: mypy complains in exactly the lines that say so.

The other files of this folder are never run. They are full of mistakes, each with the comment that has mypy
overlook it, so that the type check of all tests stays clean; were a mistake to become possible, mypy would
report its comment as unused. Here the comments are taken away, and each must have stood for an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OVERLOOK = re.compile(r"  # type: ignore\[([a-z-]+)\]$")
ERROR = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<code>[a-z-]+)\]$")
MISTAKEN = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))

Mistake = tuple[str, int, str]


def marked(path: Path) -> set[Mistake]:
    """(file, line, code) of every mistake that a file says it contains."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return {(path.name, number, found[1]) for number, line in lines if (found := OVERLOOK.search(line))}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> set[Mistake]:
    """What mypy says of these files without the comments."""
    folder = tmp_path_factory.mktemp("mistaken")
    for path in MISTAKEN:
        lines = path.read_text(encoding="utf-8").splitlines()
        (folder / path.name).write_text("\n".join(OVERLOOK.sub("", line) for line in lines) + "\n")
    files = [str(folder / path.name) for path in MISTAKEN]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-error-summary", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    errors = [ERROR.match(line) for line in done.stdout.splitlines() if ": note: " not in line]
    assert all(errors), done.stdout
    return {(Path(found["file"]).name, int(found["line"]), found["code"]) for found in errors if found}


@pytest.mark.parametrize("path", MISTAKEN, ids=lambda path: path.stem)
def test_every_mistake_is_noticed(path: Path, reported: set[Mistake]) -> None:
    """No more and no fewer errors than the file has mistakes, each of the kind that is meant."""
    assert {mistake for mistake in reported if mistake[0] == path.name} == marked(path)
    assert len(marked(path)) > 15
