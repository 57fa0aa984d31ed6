"""The chaos on the lock has teeth: what fences a former owner is taken out, and a named test notices.

Each mutant (``chaosmutants.py``) is one in every process of a test run of its own. It dies by a failed
assertion; an error of the mutant itself, or of the collection, kills nothing.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaosmutants import MUTANTS

pytestmark = [pytest.mark.mutation, pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(240)]

TESTS = Path(__file__).parent
NOTICED = re.compile(r"^E +(AssertionError|assert |Failed: DID NOT RAISE|.*AssertionError: )", re.MULTILINE)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    case, *chosen = MUTANTS[mutant][1].split()
    paths = os.pathsep.join(filter(None, [str(TESTS / "support"), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "chaosmutants", "-p", "no:cacheprovider", "-q", "-x",
            f"{TESTS}/test_chaos{'' if case.startswith('.') else '_'}{case}", *chosen,
        ],
        env={**os.environ, "PYTHONPATH": paths, "CHAOSKIT_MUTANT": mutant, "WEIGHTSYNC_CHAOS_SEED": "1"},
        cwd=TESTS.parent, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert run.returncode == 1, f"it lives: {run.stdout[-1000:]}{run.stderr[-1000:]}"
    noticed = NOTICED.search(run.stdout)
    assert noticed is not None, f"it was not an assertion that killed it: {run.stdout[-3000:]}"
    print(f"{mutant}: {run.stdout[noticed.start() :].splitlines()[0]}")  # noqa: T201 - how it was noticed
