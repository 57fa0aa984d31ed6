"""The tests of turns, membership, refusals and ranks have teeth: a fault that is brought back makes one fail.

Each mutant (``membermutants.py``) is tried in a test run of its own, by the very tests that guard against it.
It dies by a failed assertion; an error of the mutant itself, or of the collection, kills nothing.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from membermutants import MUTANTS

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(150)]

TESTS = Path(__file__).parent
NOTICED = re.compile(r"^E +(AssertionError|assert |Failed: DID NOT RAISE)", re.MULTILINE)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    chosen = MUTANTS[mutant][1].split(maxsplit=2)
    paths = os.pathsep.join(filter(None, [str(TESTS / "support"), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "membermutants", "-p", "no:cacheprovider", "-q", "-x",
            f"{TESTS}/test_{chosen[0]}", *chosen[1:],
        ],
        env={**os.environ, "PYTHONPATH": paths, "MEMBERS_MUTANT": mutant},
        cwd=TESTS.parent, capture_output=True, text=True, timeout=140, check=False,
    )  # fmt: skip
    assert run.returncode == 1, f"it lives: {run.stdout[-1000:]}{run.stderr[-1000:]}"
    noticed = NOTICED.search(run.stdout)
    assert noticed is not None, f"it was not an assertion that killed it: {run.stdout[-3000:]}"
    print(f"{mutant}: {run.stdout[noticed.start() :].splitlines()[0]}")  # noqa: T201 - how it was noticed
