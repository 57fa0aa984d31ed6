"""Receipts: made in one place, carried unchanged, and worth nothing elsewhere."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import ReceiptRefused
from weightsync.fsm.explore import receipts
from weightsync.fsm.receipt import Expectation, Participant, Receipt, _carried

PLAN = Expectation("plan", tensors=2, bytes=9, buckets=1)
SESSION = Session("r", 7, 1)
VALUES = {
    "bytes": 9, "digest": "", "engine": "a", "epoch": 7, "fingerprint": "plan", "incarnation": "1", "rank": 0,
    "round": "r", "tensors": 2,
}  # fmt: skip


def real(engine: str = "a") -> Receipt:
    """The receipt of an engine rank that was run to Acked."""
    (receipt,) = receipts(Participant(engine, "1"), SESSION, PLAN, size=9)
    return receipt


UNTYPED: Any = Receipt
"""The type checker refuses each of these calls; here it is made to look away."""


# -- no way to make one -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        UNTYPED,
        lambda: UNTYPED(**VALUES),
        lambda: UNTYPED(object(), **VALUES),
        lambda: UNTYPED(None, **VALUES),
        lambda: UNTYPED(Receipt, **VALUES),
    ],
    ids=["empty", "values", "some token", "no token", "the class as token"],
)
def test_the_sender_has_no_constructor(make: Callable[[], Receipt]) -> None:
    """Whoever did not receive cannot say so."""
    with pytest.raises(TypeError, match="only by a receiving rank that reached Acked"):
        make()


def test_a_receipt_without_a_rank_behind_it_is_empty() -> None:
    """Going round the constructor gives something that cannot even be read, let alone prove anything."""
    with pytest.raises(AttributeError):
        repr(object.__new__(Receipt))


@pytest.mark.parametrize("name", [*sorted(VALUES), "colour"])
def test_a_receipt_cannot_be_changed(name: str) -> None:
    """Nothing can be set, deleted or added."""
    receipt = real()
    with pytest.raises(AttributeError, match="cannot be changed"):
        setattr(receipt, name, 0)
    with pytest.raises(AttributeError, match="cannot be changed"):
        delattr(receipt, name)
    assert receipt == real()


# -- carried unchanged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_carries_it(protocol: int) -> None:
    """To another process and back, whatever the protocol."""
    assert pickle.loads(pickle.dumps(real(), protocol)) == real()


def test_json_carries_it() -> None:
    """As plain values, in the order of their names; what they cannot carry is refused."""
    assert list(real().to_json().items()) == list(VALUES.items())
    assert _carried(json.loads(json.dumps(real().to_json()))) == real()


def test_a_copy_is_the_same() -> None:
    """Copying is one more way of carrying."""
    assert copy.copy(real()) == real() == copy.deepcopy(real())


@pytest.mark.parametrize(
    "forged",
    [
        {},
        {name: value for name, value in VALUES.items() if name != "digest"},
        VALUES | {"colour": "blue"},
        VALUES | {"bytes": "9"},
        VALUES | {"bytes": 9.0},
        VALUES | {"tensors": True},
        VALUES | {"rank": None},
        VALUES | {"round": 7},
        VALUES | {"digest": b""},
    ],
    ids=["empty", "one short", "one more", "text", "float", "bool", "none", "number", "bytes"],
)
def test_what_does_not_look_like_one_is_refused(forged: dict[str, Any]) -> None:
    """Names and types are checked before anything is believed."""
    with pytest.raises(ReceiptRefused, match="not a receipt"):
        _carried(forged)


def test_equality_is_by_value() -> None:
    """Receipts of the same bytes are equal and hash alike; others are not, and nothing else is one."""
    assert real() == real()
    assert len({real(), real(), real("b")}) == 2
    assert real() != real("b")
    assert real() != VALUES
    assert repr(real()) == (
        "Receipt(bytes=9, digest='', engine='a', epoch=7, fingerprint='plan', incarnation='1', rank=0, "
        "round='r', tensors=2)"
    )


# -- what it proves -----------------------------------------------------------------------------------------


def test_it_speaks_for_one_life_of_one_engine() -> None:
    """An earlier life of the same engine is somebody else."""
    assert real().participant == ("a", "1")
    assert str(Participant("a", "1")) == "a"


def test_a_receipt_that_matches_has_nothing_to_complain_about() -> None:
    """The digest counts if one is expected."""
    assert real().mismatch("r", 7, PLAN) is None


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (("other", 7, PLAN), "a rank 0: round is 'r', expected 'other'"),
        (("r", 8, PLAN), "a rank 0: epoch is 7, expected 8"),
        (("r", 7, replace(PLAN, fingerprint="x")), "a rank 0: fingerprint is 'plan', expected 'x'"),
        (("r", 7, replace(PLAN, tensors=3)), "a rank 0: tensors is 2, expected 3"),
        (("r", 7, replace(PLAN, bytes=8)), "a rank 0: bytes is 9, expected 8"),
        (("r", 7, replace(PLAN, digest="x")), "a rank 0: digest is '', expected 'x'"),
    ],
)
def test_a_mismatch_is_named(asked: tuple[str, int, Expectation], complaint: str) -> None:
    """Who, which rank, what it says, and what it should say."""
    assert real().mismatch(*asked) == complaint
