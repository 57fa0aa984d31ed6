"""The tests of residency and of sample versions have teeth: a fault that is brought back makes one fail.

Each mutant (``residencymutants.py``) is tried in a test run of its own, by the very tests that guard against
it. It dies by a failed assertion; an error of the mutant itself, or of the collection, kills nothing.
"""

import pytest

from mutantrun import killed
from residencymutants import MUTANTS

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(120)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    kill = killed("residencymutants", "RESIDENCY_MUTANT", mutant, MUTANTS[mutant][1])
    print(f"residency > {mutant} > {kill}")  # noqa: T201 - how it was noticed
