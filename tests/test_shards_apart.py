"""Snapshots on two real ranks: FSDP1 in its forms, FSDP2 and plain modules, over gloo, on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest

from shardkit import FORMS, Pair, pair_of_ranks

SHARDED = [form for form in FORMS if form != "plain"]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two ranks for all tests of this file: to start them takes longer than any of these."""
    with pair_of_ranks() as ranks:
        yield ranks


def on_both(seen: list[dict[str, Any]], key: str) -> list[Any]:
    """What each rank saw."""
    return [each[key] for each in seen]


# -- exact ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("form", [*FORMS, "evaluated"])  # in full precision, so there are two whole copies
def test_what_is_loaded_is_what_was_saved(pair: Pair, form: str, buffers: bool) -> None:
    """Bit for bit on each rank, also where it has nothing of a parameter; and the very next pass uses it."""
    seen = pair.play("round_trip", form=form, buffers=buffers)
    for each in seen:
        assert each["first"] != each["second"], "training changed nothing, so nothing is shown"
        assert each["after"] == each["first"]
        assert ("seen" in each["names"]) is buffers
        main = form if form in ("dtensor", "plain") else "flat"
        assert main in each["forms"]
    if form == "dtensor":
        assert 0 in seen[1]["sizes"], "no rank is without a part, so that is not shown"


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_sequence_of_two_versions_equals_a_twin_that_never_kept_any(
    pair: Pair, form: str, block: bool
) -> None:
    """Train, save 2, be 1, evaluate, be 2: four times, without a reshard by hand."""
    for seen in pair.play("two_versions", form=form, block=block):
        assert len(seen["old"]) == 4
        assert all(says == seen["old"][0] for says in seen["old"]), "the old version's words changed"
        assert all(mine == twins for mine, twins in seen["new"])
        assert all(mine == twins for mine, twins in seen["losses"])
        assert seen["held"][0] == seen["held"][1]
        assert seen["new"][-1][0] != seen["old"][0], "training changed nothing, so nothing is shown"
        assert seen["versions"] == (1,)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_kept_is_no_alias(pair: Pair, form: str) -> None:
    """Not on the CPU either, where the local tensor is the live one."""
    for seen in pair.play("written_to", form=form):
        assert seen["spoiled"] != seen["before"] == seen["after"]


@pytest.mark.parametrize("form", ["original", "mixed", "plain"])
def test_a_parameter_that_was_replaced_is_kept_and_put_back(pair: Pair, form: str) -> None:
    """FSDP1 notices such a one only when it next gathers."""
    for seen in pair.play("replaced", form=form):
        assert seen["other"] != seen["one"] == seen["twin"] == seen["after"]


def test_what_is_gathered_ahead_is_not_used(pair: Pair) -> None:
    """FSDP2 would take it in the next pass."""
    for seen in pair.play("gathered_ahead"):
        assert seen["other"] != seen["one"] == seen["after"]


@pytest.mark.parametrize("form", ["dtensor"])
def test_memory_is_made_once(pair: Pair, form: str) -> None:
    """Twenty cycles of each way cost what the first one does, and closing gives all of it back."""
    for seen in pair.play("cycles", form=form):
        two = 2 * seen["one"]
        assert set(seen["words"]) == {(two, 2, 1)}
        assert set(seen["blocks"]) == {(two, 2, 1)}
        assert seen["closed"] == [(0, 0, 0)]


@pytest.mark.parametrize(
    ("form", "handler"),
    [("original", False), ("dtensor", False), ("flat", True), ("original", True), ("dtensor", True)],
)
def test_a_failed_round_is_rolled_back_to_what_is_kept(pair: Pair, form: str, handler: bool) -> None:
    """The engines that it left dirty get the published version, bit for bit; the trainer has its newest."""
    for seen in pair.play("rolled_back", form=form, handler=handler):
        assert seen["ok"] == [True, False, True], seen["why"]
        assert seen["versions"] == [0, 0]
        assert seen["dirty"], "the failed round has changed nothing, so nothing is shown"
        assert (seen["back"], seen["newest"]) == (True, True)
        assert seen["kept"] == ((0,) if handler else (1, 2))
        rounds = ["prepare", "clean", "prepare", "undo", "prepare", "clean"]
        assert seen["awaited"] == (rounds if handler else [])


# -- refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["flat", "original"])
def test_inside_summon_full_params_everything_is_refused(pair: Pair, form: str) -> None:
    """Where none of the names would be found, and nothing would be put back."""
    for seen in pair.play("summoned", form=form):
        assert len(seen["errors"]) == 3
        assert all(each.startswith("WeightsInUse: ") for each in seen["errors"]), seen["errors"]
        assert all("inside summon_full_params" in each for each in seen["errors"])
        assert seen["versions"] == (1,)
        assert seen["after"] == "no error"


@pytest.mark.parametrize("form", ["flat", "dtensor"])
def test_in_the_middle_of_a_pass_everything_is_refused(pair: Pair, form: str) -> None:
    """And when it is over nothing is."""
    for seen in pair.play("in_a_pass", form=form):
        assert len(seen["errors"]) == 2
        assert all(each.startswith("WeightsInUse: ") for each in seen["errors"]), seen["errors"]
        assert all("in the middle of a pass" in each for each in seen["errors"])
        assert seen["after"] == "no error"


DIFFERENT = {
    "unknown": ("VersionNotKept", "version 1 is not kept; kept are: none"),
    "spoiled": ("SnapshotSpoiled", "somebody wrote to it"),
    "shape": ("LayoutChanged", "its shape was (4, 4) and is (1, 2)"),
    "dtype": ("LayoutChanged", "its dtype was float32 and is float64"),
    "place": ("LayoutChanged", "and is elsewhere"),
    "parts": ("LayoutChanged", "it was made of first.weight[8, 4] where there is w[3] now"),
}


@pytest.mark.parametrize("how", DIFFERENT)
def test_what_one_rank_cannot_load_no_rank_loads(pair: Pair, how: str) -> None:
    """Each raises the same kind, the other one with the culprit's number; not a byte is written."""
    kind, text = DIFFERENT[how]
    seen = pair.play("one_rank_differs", form="dtensor", how=how)
    assert on_both(seen, "same") == [True, True]
    for word in ("error", "entered"):
        other, culprit = on_both(seen, word)
        assert culprit.startswith(f"{kind}: ")
        assert text in culprit
        assert other.startswith(f"{kind}: rank 1 of the trainer: ")
        assert text in other


def test_a_name_that_is_new_is_refused(pair: Pair) -> None:
    """As long as nothing else was said."""
    for each in on_both(pair.play("one_rank_differs", form="plain", how="name"), "error"):
        assert each.startswith("LayoutChanged: ")
        assert "'extra': in the model, but nothing is kept of them" in each


def test_an_error_that_is_none_of_ours_is_heard_of(pair: Pair) -> None:
    """The rank that has it raises the very thing."""
    seen = pair.play("one_rank_differs", form="plain", how="raises")
    other, culprit = on_both(seen, "error")
    assert culprit == "OSError: no memory"
    assert other == "RankFailed: rank 1 of the trainer failed: OSError: no memory"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", ["flat", "dtensor"])
def test_a_write_that_fails_on_one_rank_fails_on_all(pair: Pair, form: str, rank: int) -> None:
    """None hangs. A block is not entered; after a load the weights are of no version until one is loaded."""
    seen = pair.play("one_rank_cannot_write", form=form, rank=rank)
    assert on_both(seen, "back") == [True, True]
    for word in ("entered", "loaded"):
        told = on_both(seen, word)
        assert told[rank] == "OSError: the device is gone"
        assert told[1 - rank] == f"RankFailed: rank {rank} of the trainer failed: OSError: the device is gone"
    for each in seen:
        assert "the weights are of no version" in each["saved"]
        assert (each["again"], each["whole"], each["saved again"]) == ("no error", True, "no error")


def test_a_rank_that_does_not_come_is_named(pair: Pair) -> None:
    """Within the limit, also to itself when it comes; nothing is written, and both may come again."""
    first, second = pair.play("one_is_missing", form="dtensor")
    text = "BarrierTimeout: the vote on 'the load of version 1' is not passed: rank 1 missing: after 1 s"
    assert (first["error"], second["error"]) == (text, text)
    assert (first["same"], second["same"]) == (True, True)
    assert (first["after"], second["after"]) == ("no error", "no error")


def test_ranks_that_are_at_different_words_are_told(pair: Pair) -> None:
    """Both of them, and neither hangs."""
    for wrong, right in pair.play("out_of_step"):
        assert wrong.startswith("RanksDisagree: rank 1 of the trainer is at 'the load of version 1'")
        assert right == "no error"


@pytest.mark.parametrize(
    ("form", "said", "text"),
    [
        ("flat", None, "the weights are spread over 2 ranks, which have to save and load together"),
        ("dtensor", None, "the weights are spread over 2 ranks, which have to save and load together"),
        ("original", "dtensor", "'_flat_param' is part of a flat parameter of FSDP1; say form='flat'"),
        ("dtensor", "flat", "'first.weight' is a DTensor, as FSDP2 makes them; say form='dtensor'"),
        ("plain", "dtensor", "'first.weight' is a plain tensor; say form='plain'"),
    ],
)
def test_weights_of_another_form_are_not_kept(pair: Pair, form: str, said: str | None, text: str) -> None:
    """Said when a version is saved, with what to say instead."""
    for error in pair.play("alone", form=form, said=said):
        assert error.startswith("SetupError: ")
        assert text in error


@pytest.mark.parametrize("form", ["flat", "original"])
def test_a_part_without_its_unit_is_not_kept(pair: Pair, form: str) -> None:
    """What it shows of its parameters is not theirs alone."""
    for error in pair.play("inner", form=form):
        assert error.startswith("SetupError: ")
        assert "give the model as FSDP wrapped it" in error


# -- for a while ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["flat", "original", "dtensor", "plain"])
@pytest.mark.parametrize(("how", "rank"), [("error", 1), ("interrupt", 1), ("interrupt", 0), ("trains", 0)])
def test_a_block_leaves_the_weights_as_it_found_them(pair: Pair, form: str, how: str, rank: int) -> None:
    """Whatever ends it, on one rank or on both, and whatever it did to them; the very error is raised."""
    kind = {"error": "OSError", "interrupt": "KeyboardInterrupt"}.get(how)
    for number, seen in enumerate(pair.play("block_that_ends", form=form, rank=rank, how=how)):
        raises = kind is not None and number >= rank
        assert seen["what"] == (f"{kind}, the very one" if raises else "no error")
        assert (seen["same"], seen["says"], seen["loans"]) == (True, True, 0)


@pytest.mark.parametrize("form", SHARDED)
def test_a_pass_that_fails_in_a_block_keeps_nothing_from_being_put_back(pair: Pair, form: str) -> None:
    """It leaves its units in the middle of it, and for FSDP that lasts until the next pass."""
    for seen in pair.play("block_that_ends", form=form, rank=0, how="pass"):
        assert seen["what"] == "RuntimeError, another"
        assert (seen["same"], seen["says"], seen["loans"]) == (True, True, 0)


# -- out of memory, and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_shards_that_go_to_the_host_between_steps_train_as_if_they_had_stayed(pair: Pair, form: str) -> None:
    """With the optimizer's state: every loss, every word and every bit are those of a twin's."""
    for seen in pair.play("moved_to_the_host", form=form):
        assert seen["bytes"] > 0
        assert seen["gone"] == [0, 0, 0, 0]
        assert all(mine == twins for mine, twins in seen["losses"])
        assert seen["says"][0] == seen["says"][1]
        assert seen["held"][0] == seen["held"][1]
