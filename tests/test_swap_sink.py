"""A commit that exchanges memory: what is exchanged, what is copied, and what is never written."""

import gc
import os
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from weightsync import LocalEngine, Policy, SetupError, WeightSync, receiver_for
from weightsync.fsm.errors import EngineError
from weightsync.fsm.plan import Plan
from weightsync.handlers.sink import InPlaceSink, StagingSink
from weightsync.handlers.swap_sink import SwapSink
from weightsync.transports.segment import Mapped, Segment
from weightsync.transports.shm import SharedMemoryTransport
from weightsync.transports.version_layout import layout_of
from weightsync.transports.weights import TorchWeights


def plan_of(tensors: Mapping[str, Tensor], bucket_bytes: int = 1 << 20) -> Plan:
    """The plan that sends these."""
    return TorchWeights.of(dict(tensors)).plan(bucket_bytes)


class Memory:
    """A version in a segment, as the transport shows it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.plan = plan_of(tensors)
        layout = layout_of(self.plan)
        self._segment = Segment(layout.size)
        self.mapped = Mapped(os.dup(self._segment.fd), layout.size)
        writable = torch.from_numpy(self._segment.octets)
        for name, view in layout.views(0, writable).items():
            view.copy_(tensors[name])

    def views(self) -> dict[str, Tensor]:
        """Whole tensors, in memory that cannot be written."""
        layout = layout_of(self.plan)
        return layout.views(0, self.mapped.lease(0, layout.size)[0])


def state(value: float) -> dict[str, Tensor]:
    """Two tensors and one without elements."""
    return {"a": torch.full((4, 3), value), "b": torch.full((5,), value), "none": torch.empty(0, 2)}


def handed_over(sink: SwapSink, memory: Memory) -> None:
    """One session, up to its commit."""
    sink.check(memory.plan)
    sink.open(memory.plan)
    sink.adopt(memory.views())
    sink.commit(memory.plan)


def written(sink: SwapSink, tensors: Mapping[str, Tensor]) -> None:
    """The same by a transport that has it write."""
    plan = plan_of(tensors)
    sink.check(plan)
    into = sink.open(plan)
    for name, tensor in tensors.items():
        into[name].copy_(tensor)
    sink.commit(plan)


def places(held: Mapping[str, Tensor]) -> dict[str, int]:
    """Where each tensor lies."""
    return {name: tensor.data_ptr() for name, tensor in held.items()}


class TestAliases:
    """Views of the trainer's memory become the weights."""

    def test_nothing_is_copied_and_objects_stay(self) -> None:
        """The very memory that was shown, under the very same tensors."""
        model = nn.Linear(3, 4)
        before, parameter = {k: v.clone() for k, v in model.state_dict().items()}, model.weight
        sink = SwapSink(model, aliases=True)
        new = {name: torch.randn_like(tensor) for name, tensor in before.items()}
        memory = Memory(new)
        sink.check(memory.plan)
        sink.open(memory.plan)
        views = memory.views()
        sink.adopt(views)
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before), "live too early"
        sink.commit(memory.plan)
        assert model.weight is parameter
        assert places(model.state_dict()) == places(views)
        assert torch.equal(
            model(torch.ones(3)), nn.functional.linear(torch.ones(3), new["weight"], new["bias"])
        )

    def test_a_version_is_let_go_of_at_the_next_commit(self) -> None:
        """And no sooner; one that was not committed, when the next session opens."""
        held = state(0.0)
        sink = SwapSink(held, aliases=True)
        one, two, three = (Memory(state(value)) for value in (1.0, 2.0, 3.0))
        handed_over(sink, one)
        assert one.mapped.leased
        two_open = sink.open(two.plan)
        sink.adopt(two.views())
        del two_open
        gc.collect()
        assert two.mapped.leased
        handed_over(sink, three)
        gc.collect()
        assert [memory.mapped.leased for memory in (one, two, three)] == [False, False, True]
        assert torch.equal(held["a"], torch.full((4, 3), 3.0))

    def test_what_cannot_be_exchanged_is_copied(self) -> None:
        """Strides stay, and so does what is a part of something larger."""
        fused = torch.zeros(6, 2)
        held = {"t": torch.zeros(3, 4).t(), "q": fused[:3], "k": fused[3:], "w": torch.zeros(7)}
        before = places(held)
        new = {name: torch.randn(tensor.shape) for name, tensor in held.items()}
        handed_over(SwapSink(held, aliases=True), Memory(new))
        assert all(torch.equal(held[name], new[name]) for name in new)
        assert {name for name in held if places(held)[name] == before[name]} == {"t", "q", "k"}
        assert held["t"].stride() == (1, 4)
        assert torch.equal(fused, torch.cat([new["q"], new["k"]]))

    def test_ties_stay_ties(self) -> None:
        """One tensor under two names, and two tensors that the trainer ties."""
        shared = torch.zeros(4)
        held = {"a": shared, "b": shared, "c": torch.zeros(4)}
        sent = torch.arange(4.0)
        source = {"a": sent, "b": sent, "c": sent}
        handed_over(SwapSink(held, aliases=True), Memory(source))
        assert held["a"] is held["b"]
        assert all(torch.equal(tensor, sent) for tensor in held.values())
        assert len(set(places(held).values())) == 1

    def test_shared_memory_is_never_written(self) -> None:
        """The next version comes by a transport that copies: it gets memory of its own."""
        held = state(0.0)
        sink = SwapSink(held, aliases=True)
        memory = Memory(state(1.0))
        handed_over(sink, memory)
        for value in (2.0, 3.0, 4.0):
            written(sink, state(value))  # a write to what is shared would end this process
            assert torch.equal(held["a"], torch.full((4, 3), value))
        gc.collect()
        assert not memory.mapped.leased
        held["a"].add_(1.0)
        handed_over(sink, memory)
        assert torch.equal(held["a"], torch.full((4, 3), 1.0))

    def test_an_engine_that_replaced_its_tensor_itself(self) -> None:
        """What it holds is looked at anew, and not what was once put there."""
        held = state(0.0)
        sink = SwapSink(held, aliases=True)
        handed_over(sink, Memory(state(1.0)))
        held["a"].data = torch.zeros(3, 4).t()
        handed_over(sink, Memory(state(2.0)))
        assert held["a"].stride() == (1, 4)
        assert torch.equal(held["a"], torch.full((4, 3), 2.0))


class TestSwaps:
    """Two memories of the engine's own take turns."""

    def test_two_memories_take_turns(self) -> None:
        """Nothing is copied at the commit, and nothing new is allocated."""
        held = {"a": torch.zeros(64), "b": torch.zeros(8)}
        sink = SwapSink(held, aliases=False)
        seen = []
        for value in (1.0, 2.0, 3.0, 4.0):
            written(sink, {name: torch.full_like(tensor, value) for name, tensor in held.items()})
            assert held["a"].tolist() == [value] * 64
            seen.append(held["a"].data_ptr())
        assert seen[0] == seen[2]
        assert seen[1] == seen[3]
        assert len(set(seen)) == 2

    def test_an_aborted_session_leaves_the_weights(self) -> None:
        """They were written nowhere near."""
        held = {"a": torch.zeros(4)}
        sink = SwapSink(held, aliases=False)
        plan = plan_of({"a": torch.ones(4)})
        sink.check(plan)
        sink.open(plan)["a"].fill_(9.0)
        assert held["a"].tolist() == [0.0] * 4
        written(sink, {"a": torch.ones(4)})
        assert held["a"].tolist() == [1.0] * 4

    def test_names_that_only_the_trainer_ties(self) -> None:
        """Both names get it, and the engine's tensors share memory from then on, as the trainer's do."""
        held = {"a": torch.zeros(4), "b": torch.zeros(4)}
        sink = SwapSink(held, aliases=False)
        for value in (1.0, 2.0, 3.0):
            sent = torch.full((4,), value)
            source = TorchWeights.of({"a": sent, "b": sent})
            plan = source.plan(1 << 20)
            sink.check(plan)
            sink.open(plan)["a"].copy_(sent)
            sink.commit(plan)
            assert held["a"].tolist() == held["b"].tolist() == [value] * 4


@pytest.mark.parametrize("name", ["swaps", "aliases"])
def test_it_always_stages(name: str) -> None:
    """Anything else is refused with what to leave out."""
    for other in ({"stages": False}, {"staged_on": "cpu"}):
        with pytest.raises(SetupError, match=rf"receiver_for\({name}=True\).*leave stages and staged_on out"):
            receiver_for({"a": torch.zeros(2)}, "e", **{name: True}, **other)  # type: ignore[arg-type]


@pytest.fixture
def engines() -> list[LocalEngine]:
    """One that aliases, one that swaps, one that copies."""
    return [
        LocalEngine(receiver_for(state(9.0), "aliases", aliases=True)),
        LocalEngine(receiver_for(state(9.0), "swaps", swaps=True)),
        LocalEngine(receiver_for(state(9.0), "copies")),
    ]


def test_all_kinds_in_one_round(engines: list[LocalEngine]) -> None:
    """They get the same version by the same buffer, each in its own way; by any transport."""
    for transport in (SharedMemoryTransport(), "memory", "collective", SharedMemoryTransport(mode="ring")):
        with WeightSync(engines, transport, policy=Policy(deadline=20)) as sync:
            for step in range(1, 4):
                result = sync.on_step_end(step, state(float(step)))
                assert result is not None
                assert result.require().ok
                for engine in engines:
                    held = engine.receiver._sink.live(plan_of(state(0.0)))
                    assert held["a"].unique().tolist() == [float(step)]


class TestSharedStorage:
    """Names that are one memory, whichever of them is sent."""

    @pytest.mark.parametrize("how", ["aliases", "swaps"])
    def test_a_name_that_is_not_sent_goes_along(self, how: str) -> None:
        """Tied by their storage, as different tensors; the trainer has the one name only."""
        emb = nn.Parameter(torch.zeros(6, 2))
        held = {"emb.weight": emb, "head.weight": nn.Parameter(emb.data), "b": nn.Parameter(torch.zeros(3))}
        sink = SwapSink(held, aliases=how == "aliases")
        for value in (1.0, 2.0, 3.0, 4.0):
            new = {"emb.weight": torch.full((6, 2), value), "b": torch.full((3,), value)}
            handed_over(sink, Memory(new)) if how == "aliases" else written(sink, new)
            assert held["head.weight"].data_ptr() == held["emb.weight"].data_ptr()
            assert held["head.weight"].unique().tolist() == [value]

    @pytest.mark.parametrize("how", ["aliases", "swaps"])
    def test_a_part_of_another_tensor_is_written_where_it_lies(self, how: str) -> None:
        """Neither is exchanged, so that both stay what they are to each other."""
        a = torch.zeros(8)
        held = {"a": a, "b": a[:4], "c": torch.zeros(2)}
        sink = SwapSink(held, aliases=how == "aliases")
        source = TorchWeights.of({"a": torch.arange(8.0), "c": torch.ones(2)})
        plan = source.plan(1 << 20)
        sink._checked = (
            plan.fingerprint,
        )  # a plan that leaves a part out is partial, which is checked elsewhere
        for value in (1.0, 2.0):
            into = sink.open(plan)
            into["a"].fill_(value)
            into["c"].fill_(value)
            sink.commit(plan)
            assert held["a"].data_ptr() == held["b"].data_ptr() == a.data_ptr()
            assert held["b"].tolist() == [value] * 4


class TestServedAnew:
    """Another sink over weights that lie in memory that nobody may write."""

    def test_one_that_exchanges_takes_them_over(self) -> None:
        """It sees where they lie, and writes nowhere there."""
        held = state(0.0)
        memory = Memory(state(1.0))
        handed_over(SwapSink(held, aliases=True), memory)
        for aliases in (True, False):
            sink = SwapSink(held, aliases=aliases)
            for value in (2.0, 3.0):
                written(sink, state(value))
                assert torch.equal(held["a"], torch.full((4, 3), value))
            handed_over(SwapSink(held, aliases=True), memory)

    @pytest.mark.parametrize("make", [StagingSink, InPlaceSink])
    def test_one_that_would_write_there_refuses(self, make: type[StagingSink] | type[InPlaceSink]) -> None:
        """In one line, in the place of the end of the process."""
        held = state(0.0)
        memory = Memory(state(1.0))
        handed_over(SwapSink(held, aliases=True), memory)
        with pytest.raises(
            EngineError, match="'a': it lies in memory that was handed over with aliases=True"
        ):
            make(held).check(memory.plan)
        for name in ("a", "b"):
            held[name].data = held[name].clone()
        make(held).check(memory.plan)
