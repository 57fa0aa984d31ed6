"""The tests of the demo's trainer of two ranks have teeth: a fault that is brought back makes one fail.

Each mutant (``trainermutants.py``) is tried in a test run of its own, by the very tests that guard
against it.
"""

import pytest

from mutantrun import killed
from trainermutants import MUTANTS

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(150)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    kill = killed("trainermutants", "TRAINER_MUTANT", mutant, MUTANTS[mutant][1], seconds=140)
    print(f"trainers > {mutant} > {kill}")  # noqa: T201 - how it was noticed
