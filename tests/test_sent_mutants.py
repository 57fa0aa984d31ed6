"""The tests of what is sent, and of how it is proven, have teeth.

Each mutant (``sentmutants.py``) is tried in a test run of its own, by the very tests that guard against it.
"""

import pytest

from mutantrun import killed
from sentmutants import MUTANTS

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(150)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_is_caught(mutant: str) -> None:
    """By an assertion, in the tests that it is listed with."""
    killed("sentmutants", "SENT_MUTANT", mutant, MUTANTS[mutant][1])
