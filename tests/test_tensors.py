"""What a tensor is to the wire, and what an engine holds instead."""

import math

import pytest
import torch

from weightsync.fsm.errors import PlanError
from weightsync.fsm.tensors import DTYPE_SIZES, Mismatch, TensorSpec, Tie, check_specs, check_ties, diff, spec

EMBED, HEAD, NORM = (
    spec("embed", "bfloat16", (8, 4)),
    spec("head", "bfloat16", (8, 4)),
    spec("norm", "float32", ()),
)


def test_bytes_follow_from_shape_and_dtype() -> None:
    """A scalar is one element, and a dimension of 0 leaves nothing."""
    assert spec("embed", "bfloat16", [8, 4]) == TensorSpec("embed", "bfloat16", (8, 4), 64)
    assert NORM.nbytes == 4
    assert spec("empty", "float64", (0, 5)).nbytes == 0
    assert str(EMBED) == "bfloat16 (8, 4)"


def test_sizes_are_those_of_torch() -> None:
    """Every name in the table that this torch knows has torch's size, and all its plain dtypes are there."""
    for name, size in DTYPE_SIZES.items():
        dtype = getattr(torch, name, None)
        assert dtype is None or dtype.itemsize == size, name
    plain = {str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)}
    names = {name.removeprefix("torch.") for name in plain}
    unknown = {name for name in names if not name.startswith(("q", "bits", "int", "uint", "float4"))}
    assert unknown <= DTYPE_SIZES.keys()


def test_sizes_are_powers_of_two() -> None:
    """Alignment relies on it."""
    assert all(math.log2(size).is_integer() for size in DTYPE_SIZES.values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (TensorSpec("x", "float32", (2,), 4), r"tensor 'x': float32 \(2,\) takes 8 bytes, not 4"),
        (TensorSpec("x", "float32", (2,), 8.0), "takes 8 bytes, not 8.0"),  # type: ignore[arg-type]
        (TensorSpec("x", "float32", (-2,), -8), "is not a shape"),
        (TensorSpec("x", "float32", (True,), 4), "is not a shape"),
        (TensorSpec("x", "float32", (1,) * 65, 4), "is not a shape"),
        (TensorSpec("x", "float32", (1 << 63,), 1 << 65), "is not a shape"),
        (TensorSpec("x", "torch.float32", (2,), 8), "no such dtype: 'torch.float32'; known are bool,"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(wrong: TensorSpec, message: str) -> None:
    """The message names the tensor."""
    with pytest.raises(PlanError, match=message) as caught:
        check_specs([wrong])
    assert "'x'" in str(caught.value)


def test_a_name_may_come_once() -> None:
    """Two tensors under one name would be one of them, by chance."""
    with pytest.raises(PlanError, match="two tensors are named 'embed'"):
        check_specs([EMBED, NORM, EMBED])


@pytest.mark.parametrize("unordered", [{EMBED, NORM}, {"embed": EMBED}, iter([EMBED]), "embed"])
def test_tensors_without_an_order_are_refused(unordered: object) -> None:
    """A set is in another order in another process; a name is no list of tensors."""
    with pytest.raises(PlanError, match="an order that is the same everywhere"):
        check_specs(unordered)  # type: ignore[arg-type]


def test_ties_lead_to_tensors_that_are_sent() -> None:
    """A further name must be new, and its tensor known; a tie to a tie is written as one to the tensor."""
    assert check_ties([Tie("head", "embed")], [EMBED]) == (Tie("head", "embed"),)
    with pytest.raises(PlanError, match="'head' is tied to 'wte', which is not among the tensors"):
        check_ties([Tie("head", "wte")], [EMBED])
    with pytest.raises(PlanError, match="'third' is tied to 'head', which is not among"):
        check_ties([Tie("head", "embed"), Tie("third", "head")], [EMBED])
    for ties in ([Tie("norm", "embed")], [Tie("head", "embed"), Tie("head", "norm")]):
        with pytest.raises(PlanError, match="but names another tensor already"):
            check_ties(ties, [EMBED, NORM])


def test_the_same_tensors_do_not_differ() -> None:
    """In any order: tensors are known by their names."""
    assert diff([EMBED, NORM], [NORM, EMBED]) == ()
    assert diff([], []) == ()


def test_every_disagreement_has_its_line() -> None:
    """The tensor is named with both descriptions; same bytes with another dtype are another tensor."""
    sent = [spec("shape", "float32", (8,)), spec("dtype", "float32", (4,)), spec("more", "int8", ()), NORM]
    held = [NORM, spec("shape", "float32", (4,)), spec("dtype", "int32", (4,)), spec("less", "bool", (2, 0))]
    assert sorted(map(str, diff(sent, held))) == [
        "tensor 'dtype': float32 (4,) is sent, but the engine holds int32 (4,)",
        "tensor 'less': the engine holds bool (2, 0), but nothing is sent for it",
        "tensor 'more': int8 () is sent, but the engine does not hold it",
        "tensor 'shape': float32 (8,) is sent, but the engine holds float32 (4,)",
    ]


def test_a_shape_that_only_looks_the_same_differs() -> None:
    """A scalar is not a vector of one, and a transposed matrix is another one."""
    for sent, held in [((), (1,)), ((2, 3), (3, 2)), ((0, 3), (0, 4))]:
        found = diff([spec("x", "float32", sent)], [spec("x", "float32", held)])
        assert found == (Mismatch("x", spec("x", "float32", sent), spec("x", "float32", held)),)


def test_an_engine_may_hold_any_of_the_tied_names() -> None:
    """Both of them, or only one because it ties them as well; but it must hold one, and hold it right."""
    ties = [Tie("head", "embed")]
    for held in ([EMBED, HEAD], [EMBED], [HEAD]):
        assert diff([EMBED], held, ties=ties) == ()
    assert diff([EMBED], [], ties=ties) == (Mismatch("embed", EMBED, None),)
    wrong = spec("head", "float32", (8, 4))
    assert diff([EMBED], [EMBED, wrong], ties=ties) == (Mismatch("head", EMBED, wrong),)


def test_without_the_tie_the_second_name_gets_nothing() -> None:
    """No name that the engine holds is left without data in silence."""
    assert diff([EMBED], [EMBED, HEAD]) == (Mismatch("head", None, HEAD),)
