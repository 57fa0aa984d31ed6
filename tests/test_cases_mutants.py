"""The cases have teeth: a fault that is brought back into the product makes the case it came from fail.

Each mutant (``casemutants.py``) is tried in a test run of its own, by the very tests of the case. It dies by
a failed assertion; an error of the mutant itself, or of the collection, kills nothing.
"""

import pytest

from casemutants import MUTANTS
from mutantrun import killed

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(120)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The case notices, and says so by an assertion."""
    kill = killed("casemutants", "CASEKIT_MUTANT", mutant, f"cases_{MUTANTS[mutant][1]}", seconds=110)
    print(f"cases > {mutant} > {kill}")  # noqa: T201 - how it was noticed
