"""The plan: every byte of every tensor in one place, groups together, and a fingerprint over all of it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightsync.fsm.plan import (
    BUCKET_LIMIT,
    DTYPE_SIZES,
    USUAL_BUCKET,
    Bucket,
    Piece,
    Plan,
    PlanError,
    TensorSpec,
    Tie,
    make_plan,
    spec,
)
from weightsync.fsm.policy import Policy

MIB = 1 << 20
SOURCES = Path(__file__).resolve().parent.parent / "src"


def floats(name: str, count: int) -> TensorSpec:
    """A vector of four-byte numbers."""
    return spec(name, "float32", (count,))


def layout(plan: Plan) -> list[list[str]]:
    """What lies where, to read: ``name[start:stop]@offset`` for each bucket."""
    return [
        [f"{plan.tensors[p.tensor].name}[{p.start}:{p.stop}]@{p.offset}" for p in bucket.pieces]
        for bucket in plan.buckets
    ]


def advised(error: PlanError) -> Policy:
    """The policy that a message advises, taken from its words: an option that exists, with a value."""
    found = re.search(r"Policy\((\w+)=(\d+)\)", str(error))
    assert found is not None, f"no advice in: {error}"
    advice: dict[str, Any] = {found[1]: int(found[2])}
    return Policy(**advice)


# -------------------------------------------------------------------------------------------------- lay-out


def test_tensors_share_a_bucket_in_their_order() -> None:
    """Each starts at the next multiple of the alignment; the size ends with the last byte."""
    plan = make_plan([floats("b", 3), floats("a", 1), floats("c", 20)], bucket_bytes=1024)
    assert layout(plan) == [["b[0:12]@0", "a[0:4]@64", "c[0:80]@128"]]
    assert (plan.buckets[0].nbytes, plan.largest, plan.nbytes) == (208, 208, 96)


def test_a_full_bucket_is_followed_by_the_next() -> None:
    """What fits to the last byte fits."""
    plan = make_plan([floats("a", 16), floats("b", 16), floats("c", 1)], bucket_bytes=128)
    assert layout(plan) == [["a[0:64]@0", "b[0:64]@64"], ["c[0:4]@0"]]
    assert [bucket.index for bucket in plan.buckets] == [0, 1]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tensor_larger_than_a_bucket_is_split(place: int) -> None:
    """First, in the middle or last: 3 MiB go through buckets of 1 MiB, and nothing has to fit."""
    specs = [floats("small", 5), floats("other", 7)]
    specs.insert(place, floats("large", 3 * MIB // 4))
    plan = make_plan(specs, bucket_bytes=MIB)
    large = [p for bucket in plan.buckets for p in bucket.pieces if plan.tensors[p.tensor].name == "large"]
    assert [(p.start, p.stop) for p in large] == [(0, MIB), (MIB, 2 * MIB), (2 * MIB, 3 * MIB)]
    assert plan.largest == MIB


def test_the_rest_of_a_split_tensor_leaves_room() -> None:
    """The bucket with its last piece is filled up with what follows."""
    plan = make_plan([floats("large", 40), floats("next", 2)], bucket_bytes=128)
    assert layout(plan) == [["large[0:128]@0"], ["large[128:160]@0", "next[0:8]@64"]]


def test_a_tensor_is_split_between_elements() -> None:
    """A bucket of 10 bytes takes two numbers of four; one of 3 bytes cannot even hold one of them."""
    numbers = [floats("x", 5)]
    assert layout(make_plan(numbers, bucket_bytes=10)) == [["x[0:8]@0"], ["x[8:16]@0"], ["x[16:20]@0"]]
    assert [p.stop for b in make_plan(numbers, bucket_bytes=3).buckets for p in b.pieces][:3] == [3, 6, 9]


def test_nothing_is_dropped() -> None:
    """Scalars, tensors without elements and odd sizes all have their piece."""
    specs = [
        spec("scalar", "int64", ()),
        spec("empty", "float32", (0, 7)),
        spec("odd", "bool", (3, 5)),
        spec("eight", "float8_e4m3fn", (1, 1)),
        spec("complex", "complex128", (2,)),
    ]
    plan = make_plan(specs, bucket_bytes=1 << 10, align=1)
    assert layout(plan) == [
        ["scalar[0:8]@0", "empty[0:0]@0", "odd[0:15]@8", "eight[0:1]@23", "complex[0:32]@32"]
    ]
    assert plan.nbytes == 56


def test_an_empty_model_is_one_empty_bucket() -> None:
    """There is always something to send and to prove."""
    plan = make_plan([], bucket_bytes=1)
    assert plan.buckets == (Bucket(0, 0, ()),)
    assert (plan.nbytes, plan.largest) == (0, 0)
    only_empty = make_plan([spec("empty", "int8", (0,))], bucket_bytes=1)
    assert only_empty.buckets == (Bucket(0, 0, (Piece(0, 0, 0, 0),)),)


def test_mixed_dtypes_keep_their_order_and_alignment() -> None:
    """Nothing is regrouped by dtype, and every piece can be viewed as what it is."""
    dtypes = ["bfloat16", "float32", "bfloat16", "float64", "int8", "complex128", "bfloat16"]
    specs = [spec(f"t{i}", dtype, (3,)) for i, dtype in enumerate(dtypes)]
    plan = make_plan(specs, bucket_bytes=1 << 20, align=1)
    pieces = plan.buckets[0].pieces
    assert [piece.tensor for piece in pieces] == list(range(7))
    for piece, dtype in zip(pieces, dtypes, strict=True):
        assert piece.offset % DTYPE_SIZES[dtype] == 0


def test_a_bucket_below_the_alignment_still_works() -> None:
    """There is no room for padding to 64 bytes in 16, so elements are aligned to themselves."""
    plan = make_plan([floats("a", 1), spec("b", "int8", (1,)), floats("c", 2)], bucket_bytes=16)
    assert layout(plan) == [["a[0:4]@0", "b[0:1]@4", "c[0:8]@8"]]
    bytes_alone = [spec(name, "int8", (1,)) for name in "abc"]
    assert layout(make_plan(bytes_alone, bucket_bytes=3)) == [["a[0:1]@0", "b[0:1]@1", "c[0:1]@2"]]


def test_ties_are_carried_but_not_sent_twice() -> None:
    """The further name is in the plan, its bytes are not."""
    plan = make_plan([floats("embed", 4)], bucket_bytes=64, ties=[Tie("head", "embed")])
    assert plan.nbytes == 16
    assert plan.ties == (Tie("head", "embed"),)
    assert plan.specs() == (floats("embed", 4), floats("head", 4))


# --------------------------------------------------------------------------------------------------- groups


def test_a_group_shares_a_bucket() -> None:
    """At the place of its first member; what lies between comes after it."""
    specs = [floats("a", 20), floats("q", 8), floats("x", 8), floats("kv", 8)]
    apart = make_plan(specs, bucket_bytes=128, align=4)
    assert layout(apart)[0] == ["a[0:80]@0", "q[0:32]@80"]
    together = make_plan(specs, bucket_bytes=128, align=4, groups=[["kv", "q"]])
    assert layout(together) == [["a[0:80]@0"], ["q[0:32]@0", "kv[0:32]@32", "x[0:32]@64"]]


def test_a_group_may_be_a_set() -> None:
    """Its members are laid out in the tensors' order, so a set's own does not matter."""
    specs = [floats(name, 2) for name in "abcdefgh"]
    plans = {make_plan(specs, bucket_bytes=64, align=1, groups=[set(names)]) for names in ("hcea", "aceh")}
    assert len(plans) == 1
    assert layout(plans.pop())[0][:4] == ["a[0:8]@0", "c[0:8]@8", "e[0:8]@16", "h[0:8]@24"]


def test_a_tied_name_stands_for_its_tensor_in_a_group() -> None:
    """Naming both is the same as naming one."""
    specs, ties = [floats("a", 2), floats("b", 2)], [Tie("c", "a")]
    plan = make_plan(specs, bucket_bytes=128, ties=ties, groups=[["c", "a", "b"]])
    assert layout(plan) == [["a[0:8]@0", "b[0:8]@64"]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["a", "nobody"]], "a group names 'nobody', which is not among the tensors sent"),
        ([["a", "b"], ["b"]], "tensor 'b' is in two groups; join them into one"),
        (["ab"], "a group is a collection of names, not the one name 'ab'"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups: Sequence[Sequence[str]], message: str) -> None:
    """By name, at set-up."""
    with pytest.raises(PlanError, match=message):
        make_plan([floats("a", 1), floats("b", 1)], bucket_bytes=64, groups=groups)


def test_a_group_that_does_not_fit_is_refused_with_advice_that_works() -> None:
    """The message names the group, what it needs, and an option; setting that option helps."""
    specs = [floats("q", 100), floats("x", 1), floats("kv", 100), floats("m", 300), floats("n", 300)]
    groups = [["q", "kv"], ["m", "n"]]
    with pytest.raises(PlanError, match="the atomic group of q, kv needs 848 bytes in one bucket") as caught:
        make_plan(specs, bucket_bytes=500, groups=groups)
    policy = advised(caught.value)
    make_plan(specs, bucket_bytes=policy.bucket_bytes, groups=groups)


@pytest.mark.parametrize(("limit", "last", "enough"), [(4, 4, 12), (4, 100, 228), (64, 8, 136)])
def test_the_advice_is_not_more_than_needed(limit: int, last: int, enough: int) -> None:
    """Below the alignment elements may touch; from it on the padding between them counts."""
    specs = [floats("a", 1), floats("b", 1), spec("c", "int8", (last,))]
    with pytest.raises(PlanError) as caught:
        make_plan(specs, bucket_bytes=limit, groups=[["a", "b", "c"]])
    assert advised(caught.value).bucket_bytes == enough
    assert make_plan(specs, bucket_bytes=enough, groups=[["a", "b", "c"]]).largest == enough
    with pytest.raises(PlanError):
        make_plan(specs, bucket_bytes=enough - 1, groups=[["a", "b", "c"]])


def test_a_long_group_is_named_by_its_first_members() -> None:
    """The message stays one line."""
    specs = [floats(f"expert{i}", 10) for i in range(9)]
    names = [each.name for each in specs]
    for count, words in (
        (4, "expert2, expert3 needs"),
        (5, "expert3 and 1 more needs"),
        (9, "and 5 more needs"),
    ):
        with pytest.raises(PlanError, match=words):
            make_plan(specs, bucket_bytes=30, groups=[names[:count]])


def test_a_group_of_one_is_not_split() -> None:
    """Whoever names a tensor as a group wants it whole."""
    with pytest.raises(PlanError, match="the atomic group of a needs 400 bytes"):
        make_plan([floats("a", 100)], bucket_bytes=100, groups=[["a"]])


# --------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, None, "64"])
def test_a_limit_that_is_none_is_refused_with_advice_that_works(limit: int) -> None:
    """Zero, negative or no number; what the message advises is a policy that exists and works."""
    specs = [floats("a", 3), floats("b", 3)]
    with pytest.raises(PlanError, match="a bucket holds at least 1 byte") as caught:
        make_plan(specs, bucket_bytes=limit, groups=[["a", "b"]])
    make_plan(specs, bucket_bytes=advised(caught.value).bucket_bytes, groups=[["a", "b"]])


def test_more_buckets_than_anybody_wants_are_refused_with_advice_that_works() -> None:
    """A limit given in MiB by mistake does not make a million descriptions."""
    specs = [spec("large", "int8", (64 * BUCKET_LIMIT * 2,))]
    with pytest.raises(PlanError, match="more than 1048576 buckets") as caught:
        make_plan(specs, bucket_bytes=64)
    assert make_plan(specs, bucket_bytes=advised(caught.value).bucket_bytes).largest == USUAL_BUCKET
    enormous = spec("enormous", "int8", ((1 << 47) + 1,))
    with pytest.raises(PlanError, match="more than 1048576 buckets") as caught:
        make_plan([enormous], bucket_bytes=64)
    assert advised(caught.value).bucket_bytes == (1 << 27) + 1


def test_the_usual_bucket_is_the_policy_s() -> None:
    """What a refusal suggests is what a policy starts from."""
    assert Policy().bucket_bytes == USUAL_BUCKET


@pytest.mark.parametrize("align", [0, 3, -4, 8192, True, 4.0])
def test_an_alignment_is_a_power_of_two(align: int) -> None:
    """Up to a page."""
    with pytest.raises(PlanError, match="align is a power of two up to 4096"):
        make_plan([], bucket_bytes=64, align=align)


def test_names_that_come_twice_are_refused() -> None:
    """Among tensors, and between tensors and ties."""
    with pytest.raises(PlanError, match="two tensors are named 'a'"):
        make_plan([floats("a", 1), floats("a", 1)], bucket_bytes=64)
    with pytest.raises(PlanError, match="'a' is tied to 'a', but names another tensor already"):
        make_plan([floats("a", 1)], bucket_bytes=64, ties=[Tie("a", "a")])


# ---------------------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_does_not_depend_on_the_process() -> None:
    """Other hash seeds, same plan, even with names that no encoding knows."""
    script = (
        "from weightsync.fsm.plan import make_plan, spec, Tie\n"
        "names = ['wte', 'h.0.q', 'h.0.kv', '\\u03b1', '\\ud800', '']\n"
        "plan = make_plan([spec(n, 'bfloat16', (5, i)) for i, n in enumerate(names)], bucket_bytes=100,\n"
        "    align=2, groups=[{'h.0.q', 'h.0.kv'}], ties=[Tie('lm_head', 'wte')])\n"
        "print(plan.fingerprint)\n"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SOURCES)},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(prints) == 1
    assert re.fullmatch("[0-9a-f]{64}\n", prints.pop())


def test_the_fingerprint_is_kept_over_releases() -> None:
    """Trainer and engine may be of different releases: this one changes only with the schema."""
    plan = make_plan([floats("a", 3), spec("b", "int8", ())], bucket_bytes=8, ties=[Tie("c", "a")])
    assert plan.fingerprint == "1fa31f74720586ecaa34f7b6a480acb566d877a3c1684dc4a74ad15371f48398"


def test_the_fingerprint_sees_every_difference() -> None:
    """Order, names, dtypes, shapes, ties, groups, limit and alignment: no two of these are the same plan."""
    a, b, c = floats("a", 2), floats("b", 2), spec("c", "int8", (8,))
    plans = [
        make_plan([a, b, c], bucket_bytes=24, align=8),
        make_plan([b, a, c], bucket_bytes=24, align=8),
        make_plan([a, b], bucket_bytes=24, align=8),
        make_plan([a, b, spec("d", "int8", (8,))], bucket_bytes=24, align=8),
        make_plan([a, b, spec("c", "uint8", (8,))], bucket_bytes=24, align=8),
        make_plan([a, b, spec("c", "int8", (2, 4))], bucket_bytes=24, align=8),
        make_plan([a, b, c], bucket_bytes=24, align=8, ties=[Tie("e", "a")]),
        make_plan([a, b, c], bucket_bytes=24, align=8, ties=[Tie("e", "b")]),
        make_plan([a, b, c], bucket_bytes=24, align=8, groups=[["a", "c"]]),
        make_plan([a, b, c], bucket_bytes=16, align=8),
        make_plan([a, b, c], bucket_bytes=1024, align=64),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)


# ------------------------------------------------------------------------------------------------ any model

NAMES = st.text(max_size=6)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(
    st.builds(spec, NAMES, st.sampled_from(sorted(DTYPE_SIZES)), SHAPES),
    max_size=12,
    unique_by=lambda s: s.name,
)
LIMITS = st.integers(1, 300) | st.just(1 << 20)
ALIGNS = st.sampled_from([1, 2, 8, 64, 4096])


def check(plan: Plan, limit: int, align: int) -> None:
    """Every byte once, nothing above the limit, everything aligned, nothing overlapping."""
    covered: list[list[int]] = [[] for _ in plan.tensors]
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert bucket.nbytes <= limit
        used: set[int] = set()
        for piece in bucket.pieces:
            itemsize = DTYPE_SIZES[plan.tensors[piece.tensor].dtype]
            assert piece.offset % itemsize == 0
            assert piece.start % itemsize == 0 or limit < itemsize
            if limit >= align:
                assert piece.offset % align == 0
            taken = set(range(piece.offset, piece.offset + piece.nbytes))
            assert not taken & used
            used |= taken
            covered[piece.tensor] += range(piece.start, piece.stop)
        assert bucket.nbytes == max(used, default=-1) + 1
    for tensor, seen in zip(plan.tensors, covered, strict=True):
        assert seen == list(range(tensor.nbytes))
    appear = [piece.tensor for bucket in plan.buckets for piece in bucket.pieces]
    assert set(appear) == set(range(len(plan.tensors)))


@given(SPECS, LIMITS, ALIGNS)
@example([], 1, 1)
def test_any_model_is_covered_exactly_once(specs: list[TensorSpec], limit: int, align: int) -> None:
    """Whatever the tensors and however small the limit; the order is that of the tensors."""
    plan = make_plan(specs, bucket_bytes=limit, align=align)
    check(plan, limit, align)
    assert plan.tensors == tuple(specs)
    assert plan.nbytes == sum(each.nbytes for each in specs)
    order = [piece.tensor for bucket in plan.buckets for piece in bucket.pieces]
    assert order == sorted(order)
    assert make_plan(list(specs), bucket_bytes=limit, align=align) == plan


@given(SPECS, LIMITS, ALIGNS, st.data())
def test_groups_are_together_or_refused_with_advice_that_works(
    specs: list[TensorSpec], limit: int, align: int, data: st.DataObject
) -> None:
    """All members in one bucket, each in one piece; the advice is minimal help, but it always helps."""
    names = [each.name for each in specs]
    shuffled = data.draw(st.permutations(names))
    cut = data.draw(st.integers(0, len(names)))
    end = data.draw(st.integers(cut, len(names)))
    groups = [shuffled[:cut], shuffled[cut:end]]
    try:
        plan = make_plan(specs, bucket_bytes=limit, align=align, groups=groups)
    except PlanError as error:
        limit = advised(error).bucket_bytes
        plan = make_plan(specs, bucket_bytes=limit, align=align, groups=groups)
    check(plan, limit, align)
    for group in groups:
        members = {names.index(name) for name in group}
        homes = [
            (bucket.index, piece.tensor)
            for bucket in plan.buckets
            for piece in bucket.pieces
            if piece.tensor in members
        ]
        assert len(homes) == len(members)
        assert len({bucket for bucket, _ in homes}) <= 1


@given(SPECS, LIMITS, ALIGNS)
def test_every_plan_survives_being_written(specs: list[TensorSpec], limit: int, align: int) -> None:
    """What was written passes all checks of the reader and is the same plan."""
    ties = [Tie(f"tied {each.name} ", each.name) for each in specs[::3]]
    plan = make_plan(specs, bucket_bytes=limit, align=align, ties=ties)
    assert Plan.from_json(plan.to_json(), bucket_bytes=limit) == plan
    assert Plan.from_json(plan.to_json().encode()) == plan


@given(SPECS, SPECS, LIMITS, LIMITS)
def test_fingerprints_are_equal_for_equal_plans_only(
    specs: list[TensorSpec], others: list[TensorSpec], limit: int, other_limit: int
) -> None:
    """Two plans that agree on the fingerprint agree on everything."""
    plan, other = make_plan(specs, bucket_bytes=limit), make_plan(others, bucket_bytes=other_limit)
    assert (plan == other) == (plan.fingerprint == other.fingerprint)


def test_what_is_written_is_plain_json() -> None:
    """Readable by anything, with the schema in it."""
    record = json.loads(make_plan([floats("a", 1)], bucket_bytes=4).to_json())
    assert record["schema"] == 1
    assert record["tensors"] == [["a", "float32", [1], 4]]
    assert record["buckets"] == [[4, [[0, 0, 4, 0]]]]
