"""The kit itself: what a user sees of it when something is missing, excused or broken."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.fsm.contract import InletFactory, Transport
from weightsync.fsm.errors import SetupError
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


class Mistaken(Mine):
    """Returns the class, and calls what it should return."""

    def transport(self) -> Any:
        """Forgets to call it."""
        return MemoryTransport

    def inlet(self) -> Any:
        """Calls it too early."""
        return memory_inlet()  # type: ignore[call-arg]


class Lacking(EngineConformance):
    """An engine that is told by its test what it is, and what can be done to it."""

    def __init__(self, subject: Any, *can: str) -> None:
        self.subject, self.can = subject, frozenset(can)  # type: ignore[misc]

    def engine(self) -> Any:
        """Whatever it is."""
        return self.subject


def run(suite: Any) -> None:
    """The first check of a suite."""
    next(iter(suite.checks()))(suite)


def test_a_class_in_place_of_a_transport_is_told() -> None:
    """The most common slip; and None, of whoever forgot to return anything."""
    mistaken = Mistaken()
    with pytest.raises(SetupError) as caught:
        run(mistaken)
    assert str(caught.value) == (
        "Mistaken.transport() returned the class MemoryTransport: call it, as in `return MemoryTransport()`"
    )
    mistaken.transport = lambda: None  # type: ignore[method-assign]
    with pytest.raises(SetupError, match=r"^Mistaken.transport\(\) returned None, which has no name, cap"):
        run(mistaken)


def test_an_inlet_that_is_called_instead_of_returned_is_told() -> None:
    """Its own TypeError would say nothing about that."""
    mistaken = Mistaken()
    mistaken.transport = MemoryTransport  # type: ignore[method-assign]
    with pytest.raises(SetupError, match=r"^Mistaken.inlet\(\) raised .* return the function itself, and"):
        run(mistaken)
    mistaken.inlet = lambda: None  # type: ignore[method-assign]
    with pytest.raises(SetupError, match=r"^Mistaken.inlet\(\) returned None, which is no receiving half"):
        run(mistaken)


def test_what_is_no_engine_is_told() -> None:
    """A class, and a subject that lacks what the suite needs, or says it can do."""
    with pytest.raises(
        SetupError, match=r"^Lacking.engine\(\) returned the class object: call it, as in `re"
    ):
        run(Lacking(object))
    subject = SimpleNamespace(link=None, another_link=None, tensors=None, admits=None, generating=None)
    with pytest.raises(SetupError, match=r"which has no close: it needs them all$"):
        run(Lacking(subject))
    with pytest.raises(SetupError, match=r"which has no close, kill: it needs them all$"):
        run(Lacking(subject, "kill"))


def test_a_word_in_can_that_nobody_knows_is_refused() -> None:
    """Otherwise the checks that it was to ask for would just never run."""
    with pytest.raises(SetupError) as caught:
        Lacking(None, "kil", "restart").checks()
    assert str(caught.value) == (
        "Lacking.can says 'kil': it has to be a set of 'kill' and 'restart', or of one of them, or empty"
    )
    suite = Lacking(None)
    suite.can = "kill"  # type: ignore[assignment,misc]
    with pytest.raises(SetupError, match=r"^Lacking.can says 'kill': it has to be a set"):
        suite.checks()


def test_pytest_shows_one_line_for_it() -> None:
    """It is found while tests are collected, where a traceback through pytest would hide it."""
    with pytest.raises(pytest.fail.Exception, match=r"^Lacking.can says 'kil'") as caught:
        Lacking(None, "kil").pytest_generate_tests(SimpleNamespace(fixturenames=["check"]))
    assert not caught.value.pytrace


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
