"""Models that FSDP wrapped in unusual ways, on two real ranks: an export of one is right, or refused.

The scenes are played in two processes (``fsdpodd.py``); the tests look at what they brought.
"""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fsdpodd import SCENES, serve
from fsdpside import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes for all of the tests below."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = Ranks(port, tuple(SCENES), serve)
    yield found
    found.end()


def said(ranks: Ranks, scene: str) -> list[dict[str, Any]]:
    """What both ranks said of a scene."""
    found = ranks.said(scene)
    assert all(isinstance(each, dict) for each in found), found
    return found


@pytest.mark.parametrize("scene", ["two-places", "two-places-orig"])
def test_a_unit_at_two_places_comes_under_both_names(ranks: Ranks, scene: str) -> None:
    """Whole under each, gathered once, before and after its values changed."""
    for rank in said(ranks, scene):
        assert rank["wrong"] == [[], []]
        assert rank["of"] == {"b.weight": "a.weight", "b.bias": "a.bias"}


@pytest.mark.parametrize("scene", ["inside", "inside-orig"])
def test_a_part_of_a_unit_is_refused(ranks: Ranks, scene: str) -> None:
    """Only this rank's piece of it could be read; the model as FSDP wrapped it is fine."""
    for rank in said(ranks, scene):
        for told in rank["refused"]:
            assert told.startswith("PlanError: '"), told
            assert told.endswith(
                "is part of an FSDP unit that is around this module: give the exporter the model as FSDP "
                "wrapped it"
            ), told
        assert rank["whole"] == []


@pytest.mark.parametrize("scene", ["buffers", "buffers-orig"])
def test_buffers_of_mixed_precision_come_as_a_state_dict_has_them(ranks: Ranks, scene: str) -> None:
    """A forward pass casts them, and neither what comes nor the plan is another one then."""
    for rank in said(ranks, scene):
        assert rank["cast"] == ["torch.bfloat16"]
        assert rank["wrong"] == [[], [], []]
        assert rank["dtypes"] == [
            "inner.1.running_var torch.float32",
            "inner.fine torch.float64",
            "norm.running_var torch.float32",
        ]
        assert rank["builds"] == 1


def test_both_kinds_of_units_may_be_in_one_model(ranks: Ranks) -> None:
    """Each is gathered in its own way."""
    for rank in said(ranks, "both-kinds"):
        assert rank == {"wrong": [[], []], "builds": 1}


def test_a_hand_over_inside_of_a_pass_is_refused_and_the_pass_goes_on(ranks: Ranks) -> None:
    """Of FSDP2, whose parameters are gathered just then; afterwards it is fine."""
    for rank in said(ranks, "in-a-pass"):
        assert len(rank["refused"]) == 2
        for told in rank["refused"]:
            assert told.startswith("PlanError: FSDP2: "), told
            assert "is in the middle of a pass: let it end first, and hand the weights over out" in told
        assert rank["grads"]
        assert rank["after"] == []
