"""Bytes of tensors go into buckets and come out of them, whatever the strides on either side."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorkit import DTYPES, LAYOUTS, laid_out, octets
from weightsync.fsm.contract import Bucketful
from weightsync.fsm.errors import PlanError, TransportError
from weightsync.fsm.layout import Bucket, Piece, Plan
from weightsync.fsm.plan import make_plan, spec
from weightsync.transports.digest import digest_of
from weightsync.transports.octets import flat, read, write
from weightsync.transports.packing import pack, unpack


def numbers(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, the odd ones included: NaNs with a payload, bools of value 7."""
    return laid_out("contiguous", dtype, *shape, seed=seed)


def moved(plan: Plan, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    """Every bucket packed and unpacked, by way of a buffer with rubbish in it."""
    for bucket in plan.buckets:
        buffer = np.full(bucket.nbytes, 0xAB, dtype=np.uint8)
        pack(plan, bucket, source, buffer)
        unpack(plan, Bucketful(bucket.index, torch.from_numpy(buffer)), target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS)
def test_values_land_by_logical_order(dtype: str, here: str, there: str) -> None:
    """Any dtype, any strides on either side: every bit arrives, and the destination keeps its strides."""
    source, target = laid_out(here, dtype, 3, 4, 5), laid_out(there, dtype, 3, 4, 5, seed=1)
    before = (target.data_ptr(), target.stride())
    plan = make_plan([spec("w", dtype, (3, 4, 5))], bucket_bytes=1 << 10)
    moved(plan, {"w": source}, {"w": target})
    assert octets(target) == octets(source)
    assert (target.data_ptr(), target.stride()) == before


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row of a column": lambda t: t[1:2, ::9],
    "an element": lambda t: t[1, 3:4:2],
    "a scalar": lambda t: t[1, 3],
    "nested": lambda t: t[None, 1:2, None, 3::9],
    "without elements": lambda t: t[1:1, ::2],
}
"""Views that count as contiguous although an element's neighbour in memory is not theirs."""


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "uint8", "complex64"])
@pytest.mark.parametrize("view", STEPS)
def test_one_row_has_its_bytes_whatever_its_steps(dtype: str, view: str) -> None:
    """What is read is the row's own, what is written changes nothing beside it."""
    base, other = numbers(dtype, 3, 8), numbers(dtype, 3, 8, seed=1)
    source, target = STEPS[view](base), STEPS[view](other)
    assert source.is_contiguous()
    own = flat(source)
    assert own is not None
    assert bytes(own) == octets(source)
    assert digest_of([spec("w", dtype, source.shape)], {"w": source}) == digest_of(
        [spec("w", dtype, source.shape)], {"w": source.clone()}
    )
    expected = other.clone()
    STEPS[view](expected).copy_(source)
    moved(make_plan([spec("w", dtype, source.shape)], bucket_bytes=3), {"w": source}, {"w": target})
    assert octets(target) == octets(source)
    assert octets(other) == octets(expected)


@pytest.mark.parametrize("limit", [1, 3, 7, 16, 50])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128"])
def test_a_tensor_larger_than_a_bucket_is_split_and_put_together(dtype: str, limit: int) -> None:
    """Also where a bucket ends in the middle of an element, of a row, and of a strided tensor."""
    source, target = laid_out("transposed", dtype, 5, 2, 3), laid_out("sliced", dtype, 5, 2, 3, seed=1)
    plan = make_plan([spec("w", dtype, (5, 2, 3))], bucket_bytes=limit)
    assert len(plan.buckets) > 1
    moved(plan, {"w": source}, {"w": target})
    assert octets(target) == octets(source)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    cut=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)
def test_any_range_of_bytes_can_be_read_and_written(
    shape: list[int], order: random.Random, cut: tuple[int, int]
) -> None:
    """A range is the same bytes in a strided tensor as in a contiguous one, and nothing beside it changes."""
    axes = list(range(len(shape)))
    order.shuffle(axes)
    back = [axes.index(axis) for axis in range(len(axes))]
    strided = numbers("int32", *shape).permute(axes).contiguous().permute(back)
    total = strided.numel() * 4
    low, high = sorted((cut[0] % (total + 1), cut[1] % (total + 1)))
    whole = octets(strided)
    piece = np.zeros(high - low, dtype=np.uint8)
    read(strided, low, high, piece)
    assert piece.tobytes() == whole[low:high]
    write(strided, low, high, np.full(high - low, 0x5A, dtype=np.uint8))
    assert octets(strided) == whole[:low] + b"\x5a" * (high - low) + whole[high:]


def test_expanded_views_can_be_sent_but_not_received() -> None:
    """One row repeated is sent as all of its rows; as a destination its rows would be one memory."""
    source = torch.arange(3.0).expand(4, 3)
    plan = make_plan([spec("w", "float32", (4, 3))], bucket_bytes=64)
    target = torch.zeros(4, 3)
    moved(plan, {"w": source}, {"w": target})
    assert torch.equal(target, source)
    with pytest.raises(PlanError, match="'w' is an expanded view"):
        moved(plan, {"w": target}, {"w": torch.zeros(3).expand(4, 3)})


def test_a_scalar_and_an_empty_tensor_travel() -> None:
    """A scalar is its one element, and a tensor without elements is there, though it has no bytes."""
    source = {"s": torch.tensor(2.5), "e": torch.zeros(0, 3)}
    plan = make_plan([spec("s", "float32", ()), spec("e", "float32", (0, 3))], bucket_bytes=64)
    target = {"s": torch.tensor(0.0), "e": torch.zeros(0, 3)}
    moved(plan, source, target)
    assert target["s"].item() == 2.5


def test_parameters_are_written_in_place() -> None:
    """A parameter that wants gradients is no obstacle, and stays the same object."""
    target = torch.nn.Parameter(torch.zeros(2, 2))
    plan = make_plan([spec("w", "float32", (2, 2))], bucket_bytes=64)
    moved(plan, {"w": torch.nn.Parameter(torch.ones(2, 2))}, {"w": target})
    assert target.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert target.requires_grad


def test_what_arrives_may_be_any_buffer() -> None:
    """Bytes, memory views and tensors are all unpacked, read-only ones and strided destinations included."""
    plan = make_plan([spec("w", "int16", (2, 3))], bucket_bytes=64)
    data = np.arange(6, dtype=np.int16).tobytes()
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for received in (data, bytearray(data), memoryview(data), tensor):
        target = torch.zeros(3, 2, dtype=torch.int16).t()
        unpack(plan, Bucketful(0, received), {"w": target})
        assert target.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_buffer_of_another_size_is_refused() -> None:
    """Nothing is unpacked from a bucket that is not as large as planned, or that is not in the plan."""
    plan = make_plan([spec("w", "int16", (2, 3))], bucket_bytes=64)
    target = torch.zeros(2, 3, dtype=torch.int16)
    with pytest.raises(TransportError, match="bucket 0 arrived with 11 bytes, not 12"):
        unpack(plan, Bucketful(0, bytes(11)), {"w": target})
    with pytest.raises(TransportError, match="bucket 1 arrived, but the plan has only 1"):
        unpack(plan, Bucketful(1, bytes(12)), {"w": target})


@pytest.mark.parametrize(
    "other", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6), None]
)
def test_a_tensor_that_is_not_what_the_plan_says_is_refused(other: torch.Tensor | None) -> None:
    """On either side, by name, even if it has the right number of bytes."""
    plan = make_plan([spec("w", "float32", (2, 3))], bucket_bytes=64)
    tensors = {} if other is None else {"w": other}
    with pytest.raises(PlanError, match="'w'"):
        pack(plan, plan.buckets[0], tensors, np.zeros(24, dtype=np.uint8))
    with pytest.raises(PlanError, match="'w'"):
        unpack(plan, Bucketful(0, bytes(24)), tensors)


def test_padding_is_not_written_to_anything() -> None:
    """Bytes between pieces belong to nobody."""
    specs = (spec("a", "uint8", (3,)), spec("b", "uint8", (2,)))
    plan = Plan.sealed(specs, (), (Bucket(0, 10, (Piece(0, 0, 3, 0), Piece(1, 0, 2, 8))),))
    target = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.uint8)}
    unpack(plan, Bucketful(0, bytes(range(1, 11))), target)
    assert (target["a"].tolist(), target["b"].tolist()) == ([1, 2, 3], [9, 10])


def test_a_contiguous_tensor_is_its_own_bytes() -> None:
    """No copy is made of what lies in order in memory already; anything else has no such view."""
    tensor = torch.zeros(4, 4)
    view = flat(tensor)
    assert view is not None
    view[:4] = np.frombuffer(np.float32(7.0).tobytes(), dtype=np.uint8)
    assert tensor[0, 0] == 7.0
    assert flat(tensor.t()) is None
