"""What a rank holds, as a value: what fits, and in which words it is said what does not."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.fsm.errors import LayoutChanged, SetupError
from weightsync.fsm.shards import Form, Layout, Shard


def shard(name: str = "w", **how: Any) -> Shard:
    """One."""
    return replace(Shard(name, Form.plain, "float32", (2,), 8, "here", ("w[4]",), 2), **how)


def layout(*shards: Shard) -> Layout:
    """Of these."""
    return Layout(shards)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "form": (
        {"form": Form.dtensor},
        "its form was a plain tensor and is a DTensor, as FSDP2 makes them",
    ),
    "dtype": ({"dtype": "int8"}, "its dtype was float32 and is int8"),
    "shape": ({"shape": (1, 2)}, "its shape was (2,) and is (1, 2)"),
    "place": ({"place": "there"}, "its place was here and is there"),
    "ranks": ({"ranks": 4}, "its ranks was 2 and is 4"),
    "parts": ({"parts": ("w[3]",)}, "it was made of w[4] where there is w[3] now"),
    "more parts": ({"parts": ("w[4]", "v[1]")}, "it was made of nothing where there is v[1] now"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_difference_is_told(what: str) -> None:
    """With what it was and what it is; and it is another fingerprint."""
    changed, text = CHANGES[what]
    one, other = layout(shard("v"), shard()), layout(shard("v"), shard(**changed))
    with pytest.raises(LayoutChanged) as raised:
        one.fitting(other, strict=True)
    assert str(raised.value) == f"'w' is not what was kept: {text}"
    assert one.fingerprint != other.fingerprint
    assert one.fitting(layout(shard("v"), shard()), strict=True) == ("v", "w")


def test_names_are_told_up_to_three() -> None:
    """Of what is missing, and of what is new."""
    one, many = layout(shard()), layout(shard(), *(shard(name) for name in "edcba"))
    with pytest.raises(
        LayoutChanged, match=r"^'a', 'b', 'c' and 2 more: kept, but not in the model any more$"
    ):
        many.fitting(one, strict=True)
    with pytest.raises(LayoutChanged, match=r"^'a', 'b', 'c' and 2 more: in the model, but nothing is kept"):
        one.fitting(many, strict=True)
    assert many.fitting(one, strict=False) == one.fitting(many, strict=False) == ("w",)


def test_nothing_in_common_is_refused_in_any_case() -> None:
    """A load of nothing at all is no load."""
    with pytest.raises(LayoutChanged, match="nothing of what is kept is in the model"):
        layout(shard("a")).fitting(layout(shard("b")), strict=False)


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.lists(st.sampled_from("abcdef"), unique=True))
def test_what_fits_is_what_is_in_both(kept: list[str], there: list[str]) -> None:
    """In the order in which it is kept, whatever the order in the model is."""
    one, other = layout(*map(shard, kept)), layout(*map(shard, there))
    both = tuple(name for name in kept if name in there)
    for strict in (False, True):
        if both and (not strict or set(kept) == set(there)):
            assert one.fitting(other, strict=strict) == both
        else:
            with pytest.raises(LayoutChanged):
                one.fitting(other, strict=strict)


def test_sums() -> None:
    """Bytes of all, and over how many ranks."""
    two = layout(shard(), shard("v", nbytes=3, ranks=1))
    assert (two.nbytes, two.ranks) == (11, 2)
    assert layout().ranks == 1


def test_plain_ones_may_be_among_sharded_ones() -> None:
    """But not alone, and no other sharded ones."""
    flat, tensor, plain = shard(form=Form.flat), shard(form=Form.dtensor), shard("p")
    layout(flat, plain).expect(Form.flat)
    layout(flat, tensor).expect(None)
    for shards, form, text in (
        ((flat, tensor), Form.flat, "'w' is a DTensor, as FSDP2 makes them; say form='dtensor'"),
        ((plain,), Form.flat, "'p' is a plain tensor; say form='plain'"),
        ((plain, flat), Form.plain, "'w' is part of a flat parameter of FSDP1; say form='flat'"),
    ):
        with pytest.raises(SetupError, match=text):
            layout(*shards).expect(form)
    with pytest.raises(SetupError, match="the model has no parameters"):
        layout().expect(None)
