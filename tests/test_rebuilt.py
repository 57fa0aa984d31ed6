"""Parameters are made again from their masters, bit for bit, or stay where they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync import NotRebuilt, Rebuilt, ResidencyError
from weightsync.fsm.errors import SetupError
from weightsync.fsm.tensors import has_memory
from weightsync.handlers import rebuilt


def pair(dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and their masters."""
    torch.manual_seed(1)
    masters = {name: torch.nn.Parameter(torch.randn(7, 5)) for name in ("a", "b")}
    masters["b"].data[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    return {name: torch.nn.Parameter(each.detach().to(dtype, copy=True)) for name, each in masters.items()}, {
        **masters
    }


def bits(tensor: torch.Tensor) -> bytes:
    """Of a NaN, too."""
    return bytes(tensor.detach().contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_comes_back_bit_for_bit_without_a_copy(dtype: torch.dtype) -> None:
    """The first cycles are proven; nothing is kept meanwhile."""
    parameters, masters = pair(dtype)
    before = {name: bits(each) for name, each in parameters.items()}
    part = Rebuilt("parameters", parameters, masters)
    for cycle in range(4):
        part.offload()
        assert not any(has_memory(each) for each in parameters.values())
        part.onload()
        assert {name: bits(each) for name, each in parameters.items()} == before
        assert part.proven == min(cycle + 1, 2)


def test_after_a_step_of_the_optimizer_it_is_what_the_new_masters_make_of_it() -> None:
    """They changed while it was gone: nothing is compared with what it was, and nothing is proven."""
    parameters, masters = pair()
    part = Rebuilt("parameters", parameters, masters)
    part.offload()
    with torch.no_grad():
        masters["a"].add_(1)
    part.onload()
    assert bits(parameters["a"]) == bits(masters["a"].to(torch.bfloat16))
    assert part.proven == 0


@pytest.mark.parametrize("proofs", [2, None])
def test_one_that_is_not_its_masters_cast_stays(proofs: int | None) -> None:
    """An optimizer that rounds in another way: one bit of one element; named, and still in memory."""
    parameters, masters = pair()
    parameters["b"].detach().view(torch.int16)[3, 3] += 1
    before = bits(parameters["b"])
    part = Rebuilt("parameters", parameters, masters, proofs=proofs)
    with pytest.raises(NotRebuilt) as caught:
        part.offload()
    assert "b is not its master cast to torch.bfloat16" in str(caught.value)
    assert part.resident()
    assert bits(parameters["b"]) == before
    assert has_memory(parameters["a"])


def test_a_zero_of_the_other_sign_is_another_number() -> None:
    """Bits are compared, not values."""
    part = Rebuilt("p", {"a": torch.zeros(2, dtype=torch.bfloat16)}, {"a": torch.tensor([0.0, -0.0])})
    with pytest.raises(NotRebuilt):
        part.offload()


def test_after_the_proofs_the_cast_is_trusted_and_costs_no_comparison() -> None:
    """``proofs=None`` trusts nothing, ever; 0 everything."""
    for proofs, refused in ((0, False), (None, True)):
        parameters, masters = pair()
        part = Rebuilt("parameters", parameters, masters, proofs=proofs)
        part.offload()
        part.onload()
        parameters["a"].data.add_(1)
        if refused:
            with pytest.raises(NotRebuilt):
                part.offload()
        else:
            part.offload()
            part.onload()
            assert bits(parameters["a"]) == bits(masters["a"].to(torch.bfloat16))


def test_one_that_comes_back_with_other_bits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same masters: whatever did that, nobody trains or sends on with it."""
    parameters, masters = pair()
    part = Rebuilt("parameters", parameters, masters)
    part.offload()
    digest = rebuilt._digest
    calls: list[int] = []

    def another(tensors: object) -> str:
        calls.append(1)
        return digest(tensors) if len(calls) != 2 else "another"  # type: ignore[arg-type]

    monkeypatch.setattr(rebuilt, "_digest", another)
    with pytest.raises(NotRebuilt, match="it has other bits than it had when it went"):
        part.onload()
    assert not part.resident()
    monkeypatch.undo()
    part.onload()
    assert part.proven == 1


def test_masters_have_to_be_there() -> None:
    """When it goes, and when it comes: the order is said, and nothing has changed."""
    parameters, masters = pair()
    part = Rebuilt("parameters", parameters, masters)
    room = masters["a"].untyped_storage().nbytes()
    masters["a"].untyped_storage().resize_(0)
    with pytest.raises(ResidencyError, match="the master of a has no memory: bring the masters into"):
        part.offload()
    assert part.resident()
    masters["a"].untyped_storage().resize_(room)
    masters["a"].data.copy_(parameters["a"].data)
    part.offload()
    masters["a"].untyped_storage().resize_(0)
    with pytest.raises(ResidencyError, match="the master of a has no memory"):
        part.onload()
    assert not part.resident()


def test_what_could_not_work_is_refused() -> None:
    """A name too few, another shape, no master of its own, or memory that others use."""
    low = torch.zeros(4, dtype=torch.bfloat16)
    for parameters, masters, line in (
        ({"a": low}, {}, "a has a parameter or a master, and not both"),
        ({"a": low}, {"a": torch.zeros(3)}, r"a has shape \(4,\), and its master \(3,\)"),
        ({"a": low}, {"a": low}, "a is its own master"),
        ({"a": low[:2]}, {"a": torch.zeros(2)}, "a shares its memory with something"),
    ):
        with pytest.raises(SetupError, match=line):
            Rebuilt("p", parameters, masters)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_every_number(numbers: list[float]) -> None:
    """Those that round, that overflow, that are none."""
    masters = {"a": torch.tensor(numbers)}
    parameters = {"a": masters["a"].to(torch.bfloat16)}
    before = bits(parameters["a"])
    part = Rebuilt("p", parameters, masters, proofs=None)
    part.offload()
    part.onload()
    assert bits(parameters["a"]) == before
    assert part.proven == 1
