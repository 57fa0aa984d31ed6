"""Parts go and come back: the very tensors, with the bits that are promised; their memory is really free."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casekit.levels import generates
from tensorkit import DTYPES, LAYOUTS, laid_out, octets
from weightsync import CalledPart, Gated, HostCopy, ResidencyError, Scratch, receiver_for
from weightsync.fsm.errors import EngineSilent, SetupError
from weightsync.fsm.tensors import has_memory
from weightsync.handlers.threads import spawn

SOON = 10.0


def trained(steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with state, which are the same for the same number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Some steps."""
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Bit for bit."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class TestHostCopy:
    def test_training_goes_on_as_if_nothing_had_been(self) -> None:
        """Parameters, buffers and optimizer state go and come back in each step."""
        model, optimizer = trained()
        parts = [HostCopy("parameters", model), HostCopy("optimizer", optimizer)]
        twin, others = trained()
        for _ in range(3):
            for part in parts:
                size = part.nbytes()
                assert size > 0
                part.offload()
                assert not part.resident()
                assert part.nbytes() == size
            assert all(not each.untyped_storage().nbytes() for each in model.parameters())
            for part in parts:
                part.onload()
                assert part.resident()
            train(model, optimizer, 1)
            train(twin, others, 1)
            assert same(model, twin)

    @pytest.mark.filterwarnings("ignore:ComplexHalf")
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_bit_of_every_kind(self, dtype: str, layout: str) -> None:
        """With strides and NaNs; views of one memory count and travel once."""
        tensor = laid_out(layout, dtype, 2, 3, 4)
        stride, bits = tensor.stride(), octets(tensor.clone())  # numpy would keep it from going
        part = HostCopy("some", [tensor, tensor[:1]])
        assert part.nbytes() == tensor.untyped_storage().nbytes()
        part.offload()
        assert not has_memory(tensor)
        part.onload()
        assert (tensor.stride(), octets(tensor.clone())) == (stride, bits)

    def test_the_hosts_memory_is_used_again(self) -> None:
        """And let go of when there is less to keep."""
        tensors = [torch.ones(4), torch.ones(8)]
        part = HostCopy("some", lambda: tensors)
        part.offload()
        first = [each.data_ptr() for each in part._copies]
        part.onload()
        part.offload()
        assert [each.data_ptr() for each in part._copies] == first
        part.onload()
        tensors.pop()
        part.offload()
        assert [each.data_ptr() for each in part._copies] == first[:1]
        part.onload()
        assert tensors[0].tolist() == [1.0] * 4

    def test_twice_is_once(self) -> None:
        """What has gone is not copied again from where nothing is."""
        tensor = torch.arange(4)
        part = HostCopy("some", [tensor])
        part.onload()
        part.offload()
        part.offload()
        part.onload()
        part.onload()
        assert tensor.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("what", ["shared", "numpy"])
    def test_memory_that_cannot_go_is_refused_and_nothing_is_gone(self, what: str) -> None:
        """Shared with a process, or somebody else's: before anything else is touched."""
        other = torch.ones(3).share_memory_() if what == "shared" else torch.from_numpy(torch.ones(3).numpy())
        tensors = [torch.ones(4), other]
        part = HostCopy("some", tensors)
        with pytest.raises(ResidencyError, match=r"some: a tensor of shape \(3,\) lies in memory that is sh"):
            part.offload()
        assert part.resident()
        assert all(each.sum() == each.numel() for each in tensors)

    def test_a_copy_that_fails_takes_nothing_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each is copied before the first one goes."""
        tensors = [torch.ones(4), torch.ones(8)]
        part = HostCopy("some", tensors)
        monkeypatch.setattr(part, "_keep", failing(part._keep))
        with pytest.raises(MemoryError):
            part.offload()
        assert part.resident()
        assert all(has_memory(each) for each in tensors)

    def test_one_that_cannot_come_back_is_not_half_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has no memory, keeps what it was, and comes back later."""
        tensors = [torch.arange(4), torch.arange(8)]
        part = HostCopy("some", tensors)
        part.offload()
        with monkeypatch.context() as broken:
            broken.setattr(part, "_fill", failing(part._fill, RuntimeError("out of memory")))
            with pytest.raises(ResidencyError, match="some cannot be brought back: out of memory"):
                part.onload()
        assert not part.resident()
        assert not any(has_memory(each) for each in tensors)
        part.onload()
        assert [each.tolist() for each in tensors] == [[*range(4)], [*range(8)]]

    def test_it_knows_its_memory(self) -> None:
        """Also a view of it; so that a round is not robbed of what it sends."""
        tensor = torch.ones(8)
        part = HostCopy("some", [tensor])
        assert part.shares([torch.ones(2), tensor[2:]])
        assert not part.shares([torch.ones(2), tensor.clone()])

    @given(st.lists(st.booleans(), max_size=12))
    def test_any_order_of_going_and_coming(self, moves: list[bool]) -> None:
        """Whatever is asked how often: it is there or not as was said last, and the same when it is."""
        tensor = torch.arange(6)
        part = HostCopy("some", [tensor, torch.empty(0)])
        for comes in moves:
            (part.onload if comes else part.offload)()
            assert part.resident() is comes is has_memory(tensor)
        part.onload()
        assert tensor.tolist() == [*range(6)]

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_gpus_memory_is_free_for_another_process(self) -> None:  # pragma: no cover - needs a GPU
        """The driver has it back, and the bits come again."""
        tensor = torch.arange(1 << 26, device="cuda")
        part, free = HostCopy("some", [tensor]), torch.cuda.mem_get_info()[0]
        part.offload()
        assert torch.cuda.mem_get_info()[0] - free >= part.nbytes()
        part.onload()
        assert torch.equal(tensor, torch.arange(1 << 26, device="cuda"))


def failing(work: Callable[..., Any], error: BaseException | None = None) -> Callable[..., Any]:
    """Does it, and raises then."""

    def broken(*args: Any) -> None:
        work(*args)
        raise error or MemoryError("no more")

    return broken


def test_scratch_comes_back_as_zeros() -> None:
    """Nobody finds in a cache what was computed with other weights."""
    tensor = torch.ones(100)
    part = Scratch("cache", {"k": tensor})
    part.offload()
    assert tensor.untyped_storage().nbytes() == 0
    part.onload()
    assert tensor.tolist() == [0.0] * 100


class TestCalledPart:
    def test_it_says_what_was_done_last_or_what_a_function_says(self) -> None:
        """One that raised is where it was."""
        calls: list[str] = []
        part = CalledPart("weights", on=lambda: calls.append("on"), off=lambda: calls.append("off"), nbytes=7)
        assert (part.resident(), part.nbytes()) == (True, 7)
        part.offload()
        assert not part.resident()
        part.onload()
        assert part.resident()
        assert calls == ["off", "on"]
        broken = CalledPart("w", on=print, off=failing(print), nbytes=lambda: 3, resident=True)
        with pytest.raises(MemoryError):
            broken.offload()
        assert (broken.resident(), broken.nbytes()) == (True, 3)
        there = [True]
        asked = CalledPart("w", on=print, off=there.clear, resident=lambda: bool(there))
        asked.offload()
        assert not asked.resident()

    def test_a_coroutine_is_refused(self) -> None:
        """It would be called, and never awaited."""

        async def wake() -> None:
            await asyncio.sleep(0)

        with pytest.raises(
            SetupError, match=r"CalledPart\(on=<function>\): a function is needed, which retur"
        ):
            CalledPart("w", on=wake, off=print)


class TestGated:
    def test_nobody_generates_while_it_is_gone(self) -> None:
        """Also when two parts are: until the last one has come."""
        held, cache = {"w": torch.ones(4)}, torch.ones(8)
        receiver = receiver_for(held, "e0")
        weights = Gated(HostCopy("weights", held), receiver)
        scratch = Gated(Scratch("cache", [cache]), receiver)
        assert (weights.engine, weights.name, weights.nbytes(), weights.resident()) == (
            "e0",
            "weights",
            16,
            True,
        )
        scratch.offload()
        weights.offload()
        assert not weights.resident()
        assert not generates(receiver.gate)
        weights.onload()
        assert not generates(receiver.gate)
        scratch.onload()
        assert generates(receiver.gate)
        assert held["w"].tolist() == [1.0] * 4

    def test_it_goes_when_generations_have_ended_or_not_at_all(self) -> None:
        """Nothing is taken from under one."""
        held = {"w": torch.ones(4)}
        receiver = receiver_for(held, "e0")
        inside, leave = threading.Event(), threading.Event()

        def generate() -> float:
            with receiver.gate.admit():
                inside.set()
                assert leave.wait(SOON)
                return float(held["w"].sum())

        generating = spawn("generate", generate)
        assert inside.wait(SOON)
        with pytest.raises(EngineSilent):
            Gated(HostCopy("weights", held), receiver, limit=0.01).offload()
        assert generates(receiver.gate)
        going = spawn("going", Gated(HostCopy("weights", held), receiver, limit=SOON).offload)
        while not receiver.gate.holds:
            pass
        assert has_memory(held["w"])
        leave.set()
        assert generating.result(SOON) == 4.0
        going.result(SOON)
        assert not has_memory(held["w"])

    def test_one_that_cannot_go_holds_nobody(self) -> None:
        """Generation goes on with it."""
        receiver = receiver_for({"w": torch.ones(4)}, "e0")
        broken = CalledPart("w", on=print, off=failing(print))
        with pytest.raises(MemoryError):
            Gated(broken, receiver).offload()
        assert generates(receiver.gate)
