"""Records: one shape, one list of keys, plain values."""

import json
from dataclasses import fields
from typing import Any

import pytest

from weightsync.fsm.calls import Act
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.record import KEYS, SCHEMA, Record, plain
from weightsync.fsm.states import State
from weightsync.testing.simulation import Fault, Simulation


def test_a_line_holds_what_the_record_says_in_the_order_of_the_keys() -> None:
    """A key that says nothing is left out; zero and the empty string say something."""
    record = Record(5.0, "call", "digest", "r", 3, trigger="plan", version=0, seconds=0.0, error="")
    assert record.to_json() == {
        "time": 5.0, "event": "call", "schema": SCHEMA, "table": "digest", "round": "r", "seq": 3,
        "version": 0, "trigger": "plan", "seconds": 0.0, "error": "",
    }  # fmt: skip
    assert list(record.to_json()) == [key for key in KEYS if key in record.to_json()]


def test_there_is_one_list_of_keys() -> None:
    """A field is a key and a key is a field."""
    assert sorted(KEYS) == sorted(field.name for field in fields(Record))
    assert len(set(KEYS)) == len(KEYS)


def test_a_record_is_a_value() -> None:
    """It cannot be changed, and may be kept in a set although it holds a dict."""
    record = Record(5.0, "note", "digest", "r", 3, facts={"sent": 1})
    with pytest.raises(AttributeError):
        record.seq = 4  # type: ignore[misc]
    assert {record, Record(5.0, "note", "digest", "r", 3, facts={"sent": 1})} == {record}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        ("text", "text"),
        (State.Locked, "Locked"),
        (Participant("b", "1", 2), {"id": "b", "incarnation": "1", "ranks": 2}),
        (frozenset({Participant("b"), Participant("a")}), [plain(Participant("a")), plain(Participant("b"))]),
        ((1, State.Idle), [1, "Idle"]),
        (
            Expectation("f", 1, 2, 3, "d"),
            {"fingerprint": "f", "tensors": 1, "bytes": 2, "buckets": 3, "digest": "d"},
        ),
        (ValueError("why"), "ValueError: why"),
        (1 + 2j, "(1+2j)"),
    ],
)
def test_plain_values_are_what_json_can_hold(value: Any, expected: Any) -> None:
    """Sets come out sorted, so that two lines for one thing are equal."""
    assert plain(value) == expected
    json.dumps(plain(value))


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Fault(Act.commit, "hang", "e1"),),
        (Fault(Act.undo, "raise"), Fault(Act.broadcast, "raise", bucket=1)),
    ],
)
def test_every_record_of_a_round_is_one_line_of_json(faults: tuple[Fault, ...]) -> None:
    """Whatever happens: no newline, no key that is not on the list, and numbers without gaps."""
    simulation = Simulation(faults=faults)
    simulation.run()
    for number, record in enumerate(simulation.round.records()):
        line = json.dumps(record.to_json())
        assert "\n" not in line
        assert set(json.loads(line)) <= set(KEYS)
        assert record.seq == number
