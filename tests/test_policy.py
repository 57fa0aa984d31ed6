"""Policies: what a user decides, refused early if no round could work with it, and the limits that follow."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightsync.fsm.errors import SetupError
from weightsync.fsm.policy import Policy

SECONDS = st.floats(min_value=1e-3, max_value=1e6)


@pytest.mark.parametrize("name", ["every", "attempts", "bucket_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_counts_are_whole_numbers_from_one(name: str, value: Any) -> None:
    """True is no count, and 1.0 is a fraction."""
    with pytest.raises(SetupError, match=rf"Policy\({name}=.*whole number of at least 1"):
        Policy(**{name: value})


@pytest.mark.parametrize("name", ["deadline", "lease", "idle", "engine_limit", "drain", "first_contact"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "60", True])
def test_limits_are_finite_seconds(name: str, value: Any) -> None:
    """There is no limit of infinity, and none in the past."""
    with pytest.raises(SetupError, match=rf"Policy\({name}=.*finite number of seconds above 0"):
        Policy(**{name: value})


@pytest.mark.parametrize("name", ["on_engine_failure", "when_busy", "verify"])
def test_choices_are_named_in_the_refusal(name: str) -> None:
    """Whoever mistypes one is told what there is."""
    wrong: Any = {name: "perhaps"}
    with pytest.raises(SetupError, match=rf"Policy\({name}='perhaps'\): choose from '\w+', '\w+'"):
        Policy(**wrong)


@pytest.mark.parametrize("quorum", [0, -1, 0.0, 1.5, -0.5, math.nan, True, "half", None])
def test_a_quorum_is_a_fraction_or_a_count(quorum: Any) -> None:
    """Nobody, more than everybody and nonsense are refused."""
    with pytest.raises(SetupError, match="quorum"):
        Policy(quorum=quorum)


@pytest.mark.parametrize(
    ("quorum", "engines", "expected"),
    [
        (0.5, 1, 1), (0.5, 2, 1), (0.5, 3, 2), (0.5, 4, 2), (1.0, 5, 5), (0.01, 3, 1), (0.1, 10, 1),
        (0.3, 10, 3), (1, 4, 1), (3, 4, 3), (4, 4, 4), (0.7, 10, 7), (0.9999999, 3, 3),
    ],
)  # fmt: skip
def test_a_quorum_is_rounded_up_and_at_least_one(quorum: float, engines: int, expected: int) -> None:
    """A fraction that comes out whole stays what it is, whatever binary floating point makes of it."""
    assert Policy(on_engine_failure="quarantine", quorum=quorum).quorum_of(engines) == expected


def test_a_quorum_of_more_than_there_are_is_refused() -> None:
    """It would be an engine's death that decides, not the policy."""
    with pytest.raises(SetupError, match=r"quorum=3.*more engines than the 2"):
        Policy(on_engine_failure="quarantine", quorum=3).quorum_of(2)


def test_without_quarantine_everybody_is_the_quorum() -> None:
    """Whatever the quorum says."""
    assert Policy(quorum=1).quorum_of(7) == 7


LIMIT = st.none() | SECONDS


@given(deadline=SECONDS, idle=LIMIT, engine=LIMIT, drain=LIMIT, lease=SECONDS)
@example(deadline=350132.2767724191, idle=262600.0, engine=210080.0, drain=None, lease=1.0)
def test_limits_leave_time_for_each_other(
    deadline: float, idle: float | None, engine: float | None, drain: float | None, lease: float
) -> None:
    """The good path and Failed fit into the deadline; a silent engine is lost before its state is."""
    limits = Policy(deadline=deadline, idle=idle, engine_limit=engine, drain=drain, lease=lease).limits()
    assert limits.forward + limits.failed <= deadline * (1 + 1e-9)
    assert 0 < limits.engine < limits.idle <= limits.forward
    assert 0 < limits.release <= min(limits.lease / 2, deadline / 8)
    assert limits.lease == lease
    assert 0 < limits.drain < limits.pausing <= limits.forward * (1 + 1e-9)
    assert limits.idle <= limits.pausing
    assert limits.drain <= drain if drain is not None else limits.drain >= limits.engine
    if idle is not None:
        assert limits.idle <= idle
    if engine is not None:
        assert limits.engine <= engine


def test_the_defaults_are_the_documented_ones() -> None:
    """A minute for a round, a quarter of it without progress, a sixth for an engine, ten seconds of lease.

    A third for generations that still run, and five minutes for an engine that starts.
    """
    limits = Policy().limits()
    assert (limits.forward, limits.idle, limits.engine) == (45.0, 15.0, 10.0)
    assert (limits.drain, limits.pausing, limits.first_contact) == (20.0, 25.0, 300.0)
    assert (limits.failed, limits.release, limits.lease) == (15.0, 5.0, 10.0)
