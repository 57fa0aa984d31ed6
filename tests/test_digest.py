"""The digest says whether two sides hold the same numbers under the same names."""

import subprocess
import sys

import pytest
import torch

from weightsync.fsm.errors import PlanError
from weightsync.fsm.plan import Plan, Tie, make_plan, spec
from weightsync.transports.digest import digest


def planned(tensors: dict[str, torch.Tensor], bucket_bytes: int = 1 << 20) -> Plan:
    """The plan for some tensors."""
    specs = [spec(name, str(each.dtype).removeprefix("torch."), each.shape) for name, each in tensors.items()]
    return make_plan(specs, bucket_bytes=bucket_bytes)


def of(tensors: dict[str, torch.Tensor]) -> str:
    """Their digest."""
    return digest(planned(tensors), tensors)


STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(2, 3) + 1}


def test_equal_content_has_equal_digests() -> None:
    """Copies agree, and the digest is 32 hexadecimal digits."""
    assert of(STATE) == of({name: each.clone() for name, each in STATE.items()})
    assert len(of(STATE)) == 32


def test_strides_make_no_difference() -> None:
    """An engine whose parameters lie transposed in memory holds the same numbers."""
    strided = {name: each.t().contiguous().t() for name, each in STATE.items()}
    assert not strided["a"].is_contiguous()
    assert of(strided) == of(STATE)


def test_large_strided_tensors_are_digested_in_chunks() -> None:
    """A tensor that is larger than the scratch memory has the digest of its contiguous copy."""
    large = torch.arange(3_000_000, dtype=torch.float32).view(1000, 3000)
    assert of({"w": large.t()}) == of({"w": large.t().contiguous()})


def test_buckets_make_no_difference() -> None:
    """Content has no buckets: the digest is the same for any limit."""
    assert digest(planned(STATE, 8), STATE) == digest(planned(STATE, 1 << 20), STATE)


@pytest.mark.parametrize(
    "other",
    [
        {"a": STATE["b"], "b": STATE["a"]},
        {"a": STATE["a"], "c": STATE["b"]},
        {"b": STATE["b"], "a": STATE["a"]},
        {"a": STATE["a"].view(3, 2), "b": STATE["b"]},
        {"a": STATE["a"].view(torch.int32), "b": STATE["b"]},
        {"a": STATE["a"] + torch.finfo(torch.float32).eps, "b": STATE["b"]},
        {"a": STATE["a"]},
        STATE | {"c": torch.zeros(0)},
        {},
    ],
    ids=["swapped", "renamed", "reordered", "shape", "dtype", "one bit", "fewer", "one more", "none"],
)
def test_any_difference_changes_it(other: dict[str, torch.Tensor]) -> None:
    """Names, order, dtypes, shapes, bytes: nothing of it may differ unnoticed."""
    assert of(other) != of(STATE)


def test_further_names_are_not_in_it() -> None:
    """A tie is sent once, and an engine may hold it under one name or several."""
    plan = planned(STATE)
    tied = Plan.sealed(plan.tensors, (Tie("c", "a"),), plan.buckets)
    assert digest(tied, STATE) == of(STATE)


def test_odd_values_are_told_apart_by_their_bits() -> None:
    """-0 and 0 are different bytes, and a NaN is equal to itself."""
    assert of({"x": torch.tensor([0.0])}) != of({"x": torch.tensor([-0.0])})
    assert of({"x": torch.tensor([float("nan")])}) == of({"x": torch.tensor([float("nan")])})


def test_a_missing_tensor_is_named() -> None:
    """What is in the plan has to be there."""
    with pytest.raises(PlanError, match="'b'"):
        digest(planned(STATE), {"a": STATE["a"]})


def test_a_tensor_that_gave_its_memory_away_is_named() -> None:
    """To read it would end the process."""
    gone = torch.zeros(4096)
    gone.untyped_storage().resize_(4)
    with pytest.raises(PlanError, match="'b': its memory was given away"):
        of({"a": STATE["a"], "b": gone})


def test_other_processes_agree() -> None:
    """The digest does not depend on the process, its hash seed, or what it computed before."""
    code = """
import torch
from weightsync.transports.weights import TorchWeights
print(TorchWeights.of({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(2, 3) + 1}).digest())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == of(STATE)
