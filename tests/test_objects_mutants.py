"""The tests of the object store transport have teeth: a fault that is brought back makes one fail.

Each mutant (``objectsmutants.py``) is tried in a test run of its own, by the tests that guard against it.
It dies by a failed assertion; an error of the mutant itself, or of the collection, kills nothing.
"""

import pytest

from mutantrun import killed
from objectsmutants import MUTANTS

pytestmark = [pytest.mark.mutation, pytest.mark.ray, pytest.mark.timeout(200)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    kill = killed("objectsmutants", "OBJECTS_MUTANT", mutant, MUTANTS[mutant][1], seconds=180)
    print(f"objects > {mutant} > {kill}")  # noqa: T201 - how it was noticed
