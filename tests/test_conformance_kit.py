"""The kit itself: what a user sees of it when something is missing, excused or broken."""

import subprocess
import sys

import pytest

from weightsync.fsm.contract import InletFactory, Transport
from weightsync.testing.conformance import (
    ENGINE_CHECKS,
    TRANSPORT_CHECKS,
    EngineConformance,
    Rule,
    TransportConformance,
    Violation,
)
from weightsync.testing.conformance.rules import holding
from weightsync.transports.memory import MemoryTransport, memory_inlet

RULE = Rule("a-rule", "Something is so.", "Make it so.")


class Mine(TransportConformance):
    """A suite that is told what it needs."""

    excused = {"declares": "it is shy"}  # noqa: RUF012 - as a user writes it

    def transport(self) -> Transport:
        """What is tested."""
        return MemoryTransport()

    def inlet(self) -> InletFactory:
        """Its other half."""
        return memory_inlet


def test_a_violation_says_everything() -> None:
    """The rule, what was seen, what the contract says, and what to do; a test that meets it fails."""
    error = RULE.broken("it was otherwise")
    assert str(error) == "a-rule: it was otherwise. The contract: Something is so. What to do: Make it so."
    assert isinstance(error, AssertionError)


def test_what_is_raised_breaks_the_rule_at_hand() -> None:
    """An error in a check is a violation with that error as its cause; a violation keeps its own rule."""
    with pytest.raises(Violation, match="a-rule: doing so: OSError: no") as caught, holding(RULE, "doing so"):
        raise OSError("no")
    assert isinstance(caught.value.__cause__, OSError)
    other = Rule("other", "", "")
    with pytest.raises(Violation) as kept, holding(RULE, "doing so"):
        raise other.broken("x")
    assert kept.value.rule is other


def test_a_suite_without_a_subject_says_what_is_missing() -> None:
    """The first thing that a user sees who forgot something."""
    with pytest.raises(NotImplementedError, match=r"give it transport\(\)"):
        TransportConformance().transport()
    with pytest.raises(NotImplementedError, match=r"give it inlet\(\)"):
        TransportConformance().inlet()
    with pytest.raises(NotImplementedError, match=r"give it engine\(\)"):
        EngineConformance().engine()


def test_a_check_that_is_excused_is_skipped_with_its_reason() -> None:
    """It shows in the report; the others are run."""
    mine = Mine()
    checks = {check.name: check for check in mine.checks()}
    with pytest.raises(pytest.skip.Exception, match="it is shy"):
        mine.test_it_keeps_the_contract(checks["declares"])
    mine.test_it_keeps_the_contract(checks["good-round"])


def test_checks_that_need_more_are_left_out() -> None:
    """Threads cannot be killed; and an engine says itself what can be done to it."""
    assert {check.needs for check in TRANSPORT_CHECKS} == {"", "processes"}
    assert {check.needs for check in Mine().checks()} == {""}
    assert {check.needs for check in ENGINE_CHECKS} == {"", "kill", "restart"}
    assert {check.needs for check in EngineConformance().checks()} == {""}


def test_names_are_unique_and_every_check_has_a_sentence() -> None:
    """A check can be selected by its name."""
    for checks in (TRANSPORT_CHECKS, ENGINE_CHECKS):
        names = [check.name for check in checks]
        assert len(names) == len(set(names))
        assert all(check.about.endswith(".") for check in checks)


def test_the_kit_is_there_without_pytest() -> None:
    """Whoever has another test runner imports nothing of this one."""
    code = "import sys, weightsync.testing.conformance; print('pytest' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
