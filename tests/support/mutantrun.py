"""A mutant in a test run of its own: which test killed it, and in which words.

It dies by a failed assertion. An error of the mutant itself, of an import or of the collection kills nothing,
nor does a run in which nothing was collected.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Kill", "killed"]

TESTS = Path(__file__).parents[1]
_FAILED = re.compile(r"^FAILED (?:tests/)?(\S+::.+?)(?: - .*)?$", re.MULTILINE)
_NOTICED = re.compile(
    r"^E +(?:AssertionError|assert |Failed: DID NOT RAISE|.*AssertionError: ).*", re.MULTILINE
)
_LINE = 160


@dataclass(frozen=True)
class Kill:
    """Who killed a mutant.

    Args:
        test: its name.
        words: the first line of what it said.
        output: all of it.
    """

    test: str
    words: str
    output: str

    def __str__(self) -> str:
        return f"{self.test}: {self.words}"


def killed(plugin: str, variable: str, mutant: str, tests: str, *, seconds: float = 110, **more: str) -> Kill:
    """Try a mutant.

    Args:
        plugin: the module of ``tests/support`` that has it.
        variable: the environment variable that names it to the plugin.
        mutant: its name.
        tests: a file without ``test_``, perhaps with a node in it, and what selects tests.
        seconds: how long the run may take.
        more: further environment variables.

    Raises:
        AssertionError: it lives.
    """
    file, *chosen = tests.split(maxsplit=2)
    paths = os.pathsep.join(filter(None, [str(TESTS / "support"), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-vv", "-x",
            f"{TESTS}/test_{file}", *chosen,
        ],
        env={**os.environ, "PYTHONPATH": paths, variable: mutant, **more},
        cwd=TESTS.parent, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert run.returncode == 1, f"it lives: {run.stdout[-1000:]}{run.stderr[-1000:]}"
    test, noticed = _FAILED.search(run.stdout), _NOTICED.search(run.stdout)
    assert test is not None, f"no test failed: {run.stdout[-3000:]}"
    assert noticed is not None, f"it was not an assertion that killed it: {run.stdout[-3000:]}"
    return Kill(test[1], noticed[0].removeprefix("E").strip()[:_LINE], run.stdout)
