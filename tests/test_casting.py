"""Numbers that are sent as another dtype: cast on the way into the bucket, and digested as they are sent."""

import random
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorkit import DTYPES, LAYOUTS, laid_out, octets
from weightsync.engine import receiver_for
from weightsync.fsm.contract import Bucketful
from weightsync.fsm.errors import PlanError, SetupError
from weightsync.fsm.plan import make_plan, spec
from weightsync.fsm.policy import Policy
from weightsync.fsm.sampling import WHOLE, Part
from weightsync.fsm.tensors import CASTS
from weightsync.handlers.local_engine import LocalEngine
from weightsync.sync import WeightSync
from weightsync.testing.fakes import FakeWeights
from weightsync.transports import octets as octets_of
from weightsync.transports.digest import digest, digest_of
from weightsync.transports.octets import Cast, read
from weightsync.transports.packing import pack, unpack
from weightsync.transports.weights import TorchWeights, tensors_of

BLOCK = octets_of._BLOCK
TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective"])


def kind(name: str) -> torch.dtype:
    """The dtype of that name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What can be compared; no number of 8 bits can be."""
    return tensor.to(torch.float64)


# -- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("source", CASTS)
def test_any_number_is_cast_as_torch_casts_it(source: str, target: str, layout: str) -> None:
    """Of random bits, with any strides, in buckets that split it; it stays as it is on the trainer's side."""
    tensor = laid_out(layout, source, 4, 3, 5)
    before = octets(tensor)
    weights = TorchWeights.of({"w": tensor}, cast=target)
    wanted = tensor.contiguous().to(kind(target)) if source != target else tensor
    for limit in (1, 7, 16, 1 << 10):
        plan = weights.plan(limit)
        assert [each.dtype for each in plan.tensors] == [target]
        found = torch.zeros(4 * 3 * 5 * kind(target).itemsize, dtype=torch.uint8).view(kind(target))
        found = found.view(4, 3, 5)
        for bucket in plan.buckets:
            buffer = np.full(bucket.nbytes, 0xAB, dtype=np.uint8)
            pack(plan, bucket, tensors_of(weights), buffer)
            unpack(plan, Bucketful(bucket.index, torch.from_numpy(buffer)), {"w": found})
        assert torch.equal(as_numbers(found).nan_to_num(), as_numbers(wanted).nan_to_num())
        assert torch.equal(as_numbers(found).isnan(), as_numbers(wanted).isnan())
        assert weights.digest() == digest(plan, {"w": found})
    assert octets(tensor) == before


def by_blocks_only() -> AbstractContextManager[object]:
    """As on a processor whose steps are other ones."""
    return mock.patch.object(octets_of, "_by_steps", return_value=False)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3), order=st.randoms(use_true_random=False),
    cut=st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30)), shift=st.integers(0, 3),
    dtypes=st.tuples(st.sampled_from(CASTS), st.sampled_from(CASTS)), by_blocks=st.booleans(),
)  # fmt: skip
def test_any_range_has_the_bytes_of_the_whole(
    shape: list[int],
    order: random.Random,
    cut: tuple[int, int],
    shift: int,
    dtypes: tuple[str, str],
    *,
    by_blocks: bool,
) -> None:
    """Wherever a range begins and whatever it is read into, also in the middle of a number; NaNs as well.

    Also on a machine where a few numbers by themselves would turn out otherwise than in a block.
    """
    axes = list(range(len(shape)))
    order.shuffle(axes)
    bits = torch.tensor([order.randrange(256) for _ in range(257)], dtype=torch.uint8)
    size = torch.Size(shape).numel() * kind(dtypes[0]).itemsize
    line = bits.repeat(size // 257 + 1)[:size].view(kind(dtypes[0]))
    tensor = line.view([shape[axis] for axis in axes]).permute(
        [axes.index(axis) for axis in range(len(axes))]
    )
    cast = Cast(tensor, kind(dtypes[1]))
    whole = octets(cast.made())
    low, high = sorted(each % (len(whole) + 1) for each in cut)
    buffer = np.full(high - low + 4, 0xAB, dtype=np.uint8)
    with by_blocks_only() if by_blocks else nullcontext():
        read(cast, low, high, buffer[shift : shift + high - low])
    assert buffer[shift : shift + high - low].tobytes() == whole[low:high]
    assert (buffer[:shift] == 0xAB).all()
    assert (buffer[shift + high - low :] == 0xAB).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "nan"), [("float32", 0), ("float32", 0x7F800001), ("float16", 0), ("float16", 0x7C01)]
)
def test_large_tensors_have_one_digest_however_they_are_read(
    dtype: str, nan: int, *, transposed: bool
) -> None:
    """Of any part and in any buckets, the digest is that of the bytes which arrive; NaNs, too."""
    tensor, target = torch.randn(3, BLOCK).to(kind(dtype)), "bfloat16" if dtype == "float32" else "float32"
    bits = tensor.view(torch.int32 if dtype == "float32" else torch.int16)
    bits[:, ::3] |= nan
    source = tensor.t().contiguous().t() if transposed else tensor
    weights = TorchWeights.of({"w": source}, cast=target)
    for limit in (10_000, 1 << 20):
        plan = weights.plan(limit)
        found = torch.zeros(3, BLOCK, dtype=kind(target))
        for bucket in plan.buckets:
            buffer = np.zeros(bucket.nbytes, dtype=np.uint8)
            pack(plan, bucket, tensors_of(weights), buffer)
            unpack(plan, Bucketful(bucket.index, buffer), {"w": found})
        for part in (WHOLE, *(Part(turn, 5) for turn in range(5))):
            assert weights.digest(part) == digest(plan, {"w": found}, part)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - set(CASTS)))
def test_what_has_no_fraction_stays_as_it_is(dtype: str) -> None:
    """Whole numbers, bools, complex and packed ones."""
    tensor = laid_out("sliced", dtype, 2, 3, 4)
    weights = TorchWeights.of({"w": tensor}, cast="bfloat16")
    assert weights.plan(64).tensors == (spec("w", dtype, (2, 3, 4)),)
    assert tensors_of(weights)["w"] is weights.tensors["w"]
    assert weights.digest() == TorchWeights.of({"w": tensor}).digest()


def test_scalars_and_tensors_without_elements_are_cast_too() -> None:
    """The one element, and the name of the dtype."""
    weights = TorchWeights.of({"s": torch.tensor(1.5), "e": torch.zeros(0, 3)}, cast="float16")
    plan = weights.plan(64)
    assert [(each.dtype, each.nbytes) for each in plan.tensors] == [("float16", 2), ("float16", 0)]
    buffer = np.zeros(2, dtype=np.uint8)
    pack(plan, plan.buckets[0], tensors_of(weights), buffer)
    assert buffer.view(np.float16).tolist() == [1.5]
    copy = {"s": torch.tensor(1.5, dtype=torch.float16), "e": torch.zeros(0, 3, dtype=torch.float16)}
    assert weights.digest() == digest_of(plan.tensors, copy)


def test_a_tied_tensor_stays_one() -> None:
    """It is sent once, cast."""
    shared = torch.nn.Parameter(torch.ones(4))
    weights = TorchWeights.of({"a": shared, "b": shared}, cast="bfloat16")
    assert [(tie.name, tie.of) for tie in weights.plan(64).ties] == [("b", "a")]
    assert weights.plan(64).nbytes == 8


def test_a_snapshot_is_the_cast_copy() -> None:
    """Half the memory, of the numbers as they were; its digest is the one that was sent."""
    tensor = torch.arange(100.0)
    weights = TorchWeights.of({"w": tensor, "n": torch.ones(2, dtype=torch.int64)}, cast="bfloat16")
    before, copy = weights.digest(), weights.snapshot()
    tensor.zero_()
    assert {name: each.dtype for name, each in copy.tensors.items()} == {
        "w": torch.bfloat16,
        "n": torch.int64,
    }
    assert copy.tensors["w"].tolist() == torch.arange(100.0).to(torch.bfloat16).tolist()
    assert copy.digest() == before
    assert copy.plan(64) is weights.plan(64)


def test_a_tensor_that_changed_its_dtype_meanwhile_is_not_cast_in_silence() -> None:
    """A cast is only what was asked for; anything else is another plan."""
    plan = make_plan([spec("w", "bfloat16", (4,))], bucket_bytes=64)
    with pytest.raises(PlanError, match=r"'w' is float32 .* but the plan says bfloat16"):
        pack(plan, plan.buckets[0], {"w": torch.zeros(4)}, np.zeros(8, dtype=np.uint8))


def test_a_cast_has_no_copy_of_its_own() -> None:
    """Beside the tensor and the buffer there is a block of memory, however large the tensor is."""
    code = """
import resource, numpy as np, torch
from weightsync.transports.octets import Cast, read
tensor = torch.ones(64 << 20)
into = np.zeros(128 << 20, dtype=np.uint8)
into[::4096] = 1
read(Cast(tensor[:100_000], torch.bfloat16), 0, 200_000, into[:200_000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read(Cast(tensor, torch.bfloat16), 0, into.size, into)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 8 << 10, "kibibytes"


# -- rounds -----------------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    """Layers, a counter and a tied head."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.head = torch.nn.Linear(300, 80, dtype=dtype), torch.nn.Linear(80, 300, dtype=dtype)
        self.register_buffer("count", torch.tensor(seed))


@TRANSPORTS
@pytest.mark.parametrize("stages", [True, False])
def test_engines_of_a_smaller_dtype_get_the_numbers_as_theirs(transport: str, *, stages: bool) -> None:
    """They hold what torch would have cast, the result counts the bytes that were sent, and it goes on so."""
    engine = Small(torch.bfloat16)
    links = [LocalEngine(receiver_for(engine, "a", stages=stages))]
    with WeightSync(links, transport, policy=Policy(deadline=30, cast="bfloat16", verify_turns=3)) as sync:
        for step in range(1, 5):
            model = Small(torch.float32, seed=step)
            result = sync.on_step_end(step, model) if step % 2 else sync.begin(step, model).wait()
            assert result is not None
            result.require()
            assert [row.bytes for row in result.engines] == [2 * (2 * 300 * 80 + 380) + 8]
            for name, tensor in model.state_dict().items():
                wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
                assert torch.equal(engine.state_dict()[name], wanted), name


def test_an_engine_of_the_old_dtype_refuses() -> None:
    """In one line, before a byte moves."""
    engine = Small(torch.float32)
    with WeightSync(
        [LocalEngine(receiver_for(engine, "a"))], policy=Policy(deadline=30, cast="float16")
    ) as sync:
        result = sync.on_step_end(1, Small(torch.float32, 1))
        assert result is not None
        assert isinstance(result.error, PlanError)
        assert "'first.weight': float16 (80, 300) is sent, but the engine holds float32" in str(result.error)


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["int8", "bfloat17", "complex64", "float4_e2m1fn_x2", 16, torch.int32])
def test_only_what_numbers_can_be_cast_to_is_taken(value: Any) -> None:
    """Where it is set, and with what there is."""
    with pytest.raises(SetupError, match=r"Policy\(cast=.*choose from 'bfloat16', 'float16'"):
        Policy(cast=value)
    with pytest.raises(SetupError, match=r"TorchWeights.of\(cast=.*choose from 'bfloat16', 'float16'"):
        TorchWeights.of({}, cast=value)


def test_weights_of_another_kind_are_not_left_as_they_are_in_silence() -> None:
    """They make their own plan, so the policy cannot be kept."""
    engine = LocalEngine(receiver_for({"w": torch.zeros(1)}, "a"))
    with (
        WeightSync([engine], policy=Policy(deadline=20, cast="bfloat16")) as sync,
        pytest.raises(SetupError, match=r"Policy\(cast='bfloat16'\) is for tensors, and a FakeWeights makes"),
    ):
        sync.on_step_end(1, FakeWeights())


@pytest.mark.parametrize("read_before", [False, True])
def test_torch_weights_take_what_the_policy_says(*, read_before: bool) -> None:
    """Once: what they were made with themselves is not changed, and a contradiction is refused."""
    source = {"a": torch.ones(3), "b": torch.ones(2)}
    given_to = TorchWeights.of(source if read_before else (lambda: source), groups=[{"a", "b"}])
    weights = given_to.such("float16", ("b",))
    assert (weights.ready, weights.source) == (read_before, given_to.source)
    assert weights.plan(64).tensors == (spec("b", "float16", (2,)),)
    assert TorchWeights.of(weights, cast="float16", only=["b"]) is weights
    assert TorchWeights.of(weights) is weights
    assert given_to.plan(128).nbytes == 20
    with pytest.raises(
        SetupError, match="were made with cast='float16' and only=\\('b',\\), and cast='float32'"
    ):
        TorchWeights.of(weights, cast="float32")


def test_torchs_own_dtype_will_do() -> None:
    """A newcomer has it at hand; anything else is refused with what there is."""
    assert Policy(cast=torch.bfloat16) == Policy(cast="bfloat16")  # type: ignore[arg-type]
    assert TorchWeights.of({"w": torch.ones(1)}, cast=torch.float16).plan(64).tensors[0].dtype == "float16"  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"Policy\(cast='int8'\): choose from 'bfloat16'"):
        Policy(cast=torch.int8)  # type: ignore[arg-type]


def test_who_holds_another_dtype_is_told_what_helps() -> None:
    """A trainer in float32 and engines in bfloat16 are what everybody begins with."""
    engine = receiver_for({"w": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(1)}, "e")
    with WeightSync([LocalEngine(engine)], "memory", policy=Policy(deadline=30)) as sync:
        failed = sync.on_train_begin({"w": torch.ones(2), "n": torch.zeros(1)})
        assert str(failed.error).endswith("; Policy(cast='bfloat16') sends numbers as the engine holds them")
        other = sync.on_step_end(1, {"w": torch.ones(3), "n": torch.zeros(1)})
        assert other is not None
        assert "cast" not in str(other.error)
