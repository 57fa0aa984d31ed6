"""A plan that comes from elsewhere is believed in nothing."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.fsm.layout import Bucket, Piece, Plan
from weightsync.fsm.plan import PlanError, Tie, make_plan, spec

PLAN = make_plan(
    [
        spec("large", "float32", (10,)),
        spec("empty", "int8", (0, 3)),
        spec("small", "bfloat16", (3,)),
        spec("scalar", "float64", ()),
    ],
    bucket_bytes=32,
    align=8,
    ties=[Tie("tied", "small")],
)
"""Buckets: large[0:32]; large[32:40] empty small[0:6]@8 scalar[0:8]@16."""

Record = dict[str, Any]


def record() -> Record:
    """The plan as it is written, to be tampered with."""
    return json.loads(PLAN.to_json())  # type: ignore[no-any-return]


def resealed(changed: Record) -> str:
    """Give a record the fingerprint and size that go with it, so that only the other checks can refuse it."""
    from weightsync.fsm.tensors import TensorSpec

    try:
        plan = Plan.sealed(
            tuple(TensorSpec(n, d, tuple(s), b) for n, d, s, b in changed["tensors"]),
            tuple(Tie(*tie) for tie in changed["ties"]),
            tuple(
                Bucket(index, size, tuple(Piece(*piece) for piece in pieces))
                for index, (size, pieces) in enumerate(changed["buckets"])
            ),
        )
    except (TypeError, ValueError, KeyError, AttributeError):
        return json.dumps(changed)
    return json.dumps({**changed, "nbytes": plan.nbytes, "fingerprint": plan.fingerprint})


def at(*path: int | str) -> Callable[[Any], Callable[[Record], None]]:
    """Put a value at a place of the record."""

    def put(value: Any) -> Callable[[Record], None]:
        def change(changed: Record) -> None:
            place: Any = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value

        return change

    return put


def test_the_plan_under_test_is_read_back() -> None:
    """Before anything is wrong with it."""
    assert Plan.from_json(resealed(record())) == PLAN
    assert [len(bucket.pieces) for bucket in PLAN.buckets] == [1, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("schema")(2), "not a plan of schema 1"),
        (at("schema")(None), "not a plan of schema 1"),
        (at("tensors")(None), "no list of tensors"),
        (at("tensors", 0)("large"), "does not belong among its tensors"),
        (at("tensors", 0, 0)(7), "does not belong among its tensors"),
        (at("tensors", 0, 3)(40.0), "does not belong among its tensors"),
        (at("tensors", 0, 3)(True), "does not belong among its tensors"),
        (at("tensors", 0, 3)(44), "takes 40 bytes, not 44"),
        (at("tensors", 0, 2)([11]), "takes 44 bytes, not 40"),
        (at("tensors", 0, 2)([-10]), "not whole numbers from 0 up"),
        (at("tensors", 0, 2)([[10]]), "not whole numbers from 0 up"),
        (at("tensors", 0, 1)("float99"), "no such dtype: 'float99'"),
        (at("tensors", 2, 0)("large"), "two tensors are named 'large'"),
        (at("ties", 0, 1)("nobody"), "'tied' is tied to 'nobody'"),
        (at("ties", 0)(["tied"]), "does not belong among its ties"),
        (at("buckets")([]), "the plan has no bucket"),
        (at("buckets")({}), "no list of buckets"),
        (at("buckets", 0)([32]), "does not belong among its buckets"),
        (at("buckets", 0, 1)([]), "bucket 0 holds nothing"),
        (at("buckets", 0, 1, 0)([0, 0, 32]), "are not 4 numbers"),
        (at("buckets", 0, 1, 0)(None), "not whole numbers from 0 up"),
        (at("buckets", 0, 1, 0, 0)(4), "there are only 4 tensors"),
        (at("buckets", 0, 1, 0, 1)(-1), "not whole numbers from 0 up"),
        (at("buckets", 0, 1, 0, 2)(31.5), "not whole numbers from 0 up"),
        (at("buckets", 0, 0)(31), "the bucket has only 31 bytes"),
        (at("buckets", 0, 0)(33), "has 33 bytes, but its pieces end at 32"),
        (at("buckets", 0, 1, 0, 2)(41), "tensor 'large' has 40 bytes"),
        (at("buckets", 1, 1, 0, 1)(41), "tensor 'large' has 40 bytes"),
        (at("buckets", 1, 1, 0, 1)(40), "carries nothing of tensor 'large'"),
        (at("buckets", 1, 1, 0, 1)(36), "bytes 0 to 32 are covered so far"),
        (at("buckets", 1, 1, 0, 1)(31), "overlaps the piece before"),
        (at("buckets", 1, 1, 2, 3)(4), "overlaps the piece before"),
        (at("buckets", 1, 1, 3, 3)(17), "the bucket has only 24 bytes"),
        (at("buckets", 1, 1, 0)([0, 32, 36, 0]), "only 36 of 40 bytes are in a bucket"),
        (at("buckets", 1)([0, [[1, 0, 0, 0]]]), "only 32 of 40 bytes are in a bucket"),
        (lambda r: r["buckets"][1][1].pop(1), "tensor 'empty': only 0 of 0 bytes"),
        (lambda r: r["buckets"][1][1].append([1, 0, 0, 0]), "of tensor 'empty', bytes 0 to 0 are covered"),
        (
            lambda r: r["buckets"].append([32, [[0, 0, 32, 0]]]),
            "of tensor 'large', bytes 0 to 40 are covered",
        ),
        (lambda r: r["buckets"].reverse(), "of tensor 'large', bytes 0 to 0 are covered"),
        (at("buckets", 1)([4112, [[0, 32, 40, 0], [3, 0, 8, 4104]]]), "leaves a hole from 8 on"),
    ],
)
def test_every_size_and_offset_is_checked(change: Callable[[Record], None], message: str) -> None:
    """Even with a fingerprint that goes with the lie."""
    changed = record()
    change(changed)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(resealed(changed))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["nbytes", "fingerprint"])
@pytest.mark.parametrize("value", [None, 0, "0" * 64])
def test_size_and_fingerprint_are_worked_out_again(key: str, value: object) -> None:
    """What stands there must be what follows from the rest."""
    with pytest.raises(PlanError, match="size or fingerprint does not match"):
        Plan.from_json(json.dumps({**record(), key: value}))


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe\x00", "[" * 100_000, "null", "[]", "7"])
def test_what_is_no_plan_is_refused(text: str | bytes) -> None:
    """With one clear error."""
    with pytest.raises(PlanError, match="this is not a plan"):
        Plan.from_json(text)


def test_a_bucket_above_the_reader_s_own_limit_is_refused() -> None:
    """A reader whose buffers are smaller says so before it allocates, and what it would need."""
    assert Plan.from_json(PLAN.to_json(), bucket_bytes=32) == PLAN
    with pytest.raises(PlanError, match=r"a bucket of 32 bytes, but .* 31: set Policy\(bucket_bytes=32\)"):
        Plan.from_json(PLAN.to_json(), bucket_bytes=31)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 50) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.data(), ANYTHING)
def test_any_tampering_is_refused_or_gives_a_sound_plan(data: st.DataObject, value: object) -> None:
    """Whatever is put in any place: a ``PlanError``, or a plan that writes and reads itself."""
    changed = record()
    place: Any = changed
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(place[key], list | dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = value
    try:
        plan = Plan.from_json(resealed(changed))
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
