"""The chaos on the lock has teeth: what fences a former owner is taken out, and a named test notices.

Each mutant (``chaosmutants.py``) is one in every process of a test run of its own. It dies by a failed
assertion; an error of the mutant itself, or of the collection, kills nothing.
"""

import pytest

from chaosmutants import MUTANTS, WORDS
from mutantrun import killed

pytestmark = [pytest.mark.mutation, pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(240)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    tests = MUTANTS[mutant][1]
    tests = f"chaos{tests}" if tests.startswith(".") else f"chaos_{tests}"
    kill = killed("chaosmutants", "CHAOSKIT_MUTANT", mutant, tests, seconds=200, WEIGHTSYNC_CHAOS_SEED="1")
    assert WORDS.get(mutant, "") in kill.output, f"it died of something else: {kill}"
    print(f"chaos > {mutant} > {kill}")  # noqa: T201 - how it was noticed
