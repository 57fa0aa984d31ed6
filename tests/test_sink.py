"""Buckets go beside the live weights or right into them, and never into anything else."""

import pytest
import torch
from torch import nn

from casekit.tensors import given_away
from weightsync.fsm.errors import EngineError, PlanError
from weightsync.fsm.plan import Plan, Tie, make_plan, spec
from weightsync.handlers.sink import InPlaceSink, StagingSink

Sinks = type[StagingSink] | type[InPlaceSink]
BOTH = pytest.mark.parametrize("kind", [StagingSink, InPlaceSink])


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def plan_of(*tensors: tuple[str, torch.Tensor], ties: tuple[Tie, ...] = ()) -> Plan:
    """A plan for these tensors."""
    specs = [spec(name, str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors]
    return make_plan(specs, bucket_bytes=1 << 20, ties=ties)


def fill(sink: StagingSink | InPlaceSink, plan: Plan, value: float) -> None:
    """Write one number everywhere, as a session would."""
    with torch.no_grad():
        for tensor in sink.open(plan).values():
            tensor.fill_(value)


class TestManifest:
    def test_a_module_holds_every_name_of_its_state(self) -> None:
        """Both names of a tied pair, and persistent buffers, belong to it."""
        held = {each.name: each for each in StagingSink(Tied()).manifest()}
        assert held == {
            "embed.weight": spec("embed.weight", "float32", (3, 2)),
            "head.weight": spec("head.weight", "float32", (3, 2)),
        }
        norm = {each.name for each in StagingSink(nn.BatchNorm1d(2)).manifest()}
        assert "num_batches_tracked" in norm

    def test_a_mapping_holds_its_names(self) -> None:
        """Tensors by name do as well as a module."""
        sink = StagingSink({"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.tensor(1)})
        assert sink.manifest() == (spec("a", "bfloat16", (2,)), spec("b", "int64", ()))


class TestStaging:
    def test_the_live_weights_stay_until_the_commit(self) -> None:
        """Bit for bit, whatever is written to the staged ones."""
        live = torch.arange(4.0)
        plan = plan_of(("a", live))
        sink = StagingSink({"a": live})
        fill(sink, plan, 9)
        assert live.tolist() == [0, 1, 2, 3]
        sink.commit(plan)
        assert live.tolist() == [9, 9, 9, 9]

    def test_a_commit_keeps_identity_strides_and_storage(self) -> None:
        """A transposed parameter is still that parameter, transposed, at its place in memory."""
        model = nn.Linear(2, 3, bias=False)
        model.weight = nn.Parameter(torch.zeros(2, 3).t())
        before = (id(model.weight), model.weight.stride(), model.weight.data_ptr())
        sink = StagingSink(model)
        plan = plan_of(("weight", model.weight))
        staged = sink.open(plan)["weight"]
        staged.copy_(torch.arange(6.0).view(3, 2))
        sink.commit(plan)
        assert (id(model.weight), model.weight.stride(), model.weight.data_ptr()) == before
        assert model.weight.requires_grad
        assert model.weight.tolist() == [[0, 1], [2, 3], [4, 5]]

    def test_staged_tensors_are_used_again(self) -> None:
        """The second session allocates nothing."""
        live = torch.zeros(4)
        plan = plan_of(("a", live))
        sink = StagingSink({"a": live})
        first = sink.open(plan)["a"].data_ptr()
        assert sink.open(plan)["a"].data_ptr() == first
        sink.release()
        assert sink._staged == {}

    def test_a_model_that_changed_its_shape_is_staged_anew(self) -> None:
        """What is held is read when the session opens."""
        held = {"a": torch.zeros(4)}
        sink = StagingSink(held)
        sink.open(plan_of(("a", held["a"])))
        held["a"] = torch.zeros(2, 2)
        assert sink.open(plan_of(("a", held["a"])))["a"].shape == (2, 2)

    def test_weights_made_for_inference_alone_are_written(self) -> None:
        """A model that was made in inference mode can be updated like any other."""
        with torch.inference_mode():
            live = torch.zeros(2)
        sink = StagingSink({"a": live})
        plan = plan_of(("a", live))
        fill(sink, plan, 1)
        sink.commit(plan)
        assert live.tolist() == [1, 1]


class TestInPlace:
    def test_what_is_written_is_live(self) -> None:
        """The sink hands out the very tensors that the engine samples with."""
        live = torch.zeros(2)
        sink = InPlaceSink({"a": live})
        assert not sink.stages
        assert sink.open(plan_of(("a", live)))["a"] is live


class TestTies:
    """The head is the embedding, on one side, on the other, or on both."""

    @BOTH
    def test_what_both_sides_tie_stays_one_storage(self, kind: Sinks) -> None:
        """An engine that ties as the trainer does has one storage after the round, with the new values."""
        model = Tied()
        plan = plan_of(("embed.weight", torch.zeros(3, 2)), ties=(Tie("head.weight", "embed.weight"),))
        sink = kind(model)
        sink.check(plan)
        fill(sink, plan, 7)
        sink.commit(plan)
        assert model.head.weight is model.embed.weight
        assert model.head.weight.eq(7).all()

    @BOTH
    def test_what_only_the_trainer_ties_is_written_to_every_name(self, kind: Sinks) -> None:
        """An engine that keeps the head apart gets it, in each of two rounds."""
        held = {"embed.weight": torch.zeros(3, 2), "head.weight": torch.zeros(3, 2)}
        plan = plan_of(("embed.weight", torch.zeros(3, 2)), ties=(Tie("head.weight", "embed.weight"),))
        sink = kind(held)
        sink.check(plan)
        for value in (5, 6):
            fill(sink, plan, value)
            sink.commit(plan)
            assert held["embed.weight"].eq(value).all()
            assert held["head.weight"].eq(value).all()

    @BOTH
    def test_what_only_the_engine_ties_need_be_sent_once(self, kind: Sinks) -> None:
        """A trainer that lists the pair under one name brings data for the other as well."""
        model = Tied()
        plan = plan_of(("head.weight", torch.zeros(3, 2)))
        sink = kind(model)
        sink.check(plan)
        fill(sink, plan, 3)
        sink.commit(plan)
        assert model.embed.weight.eq(3).all()

    @BOTH
    def test_two_tensors_for_one_are_refused(self, kind: Sinks) -> None:
        """Sending two contents for what the engine ties would leave it with the one that came last."""
        plan = plan_of(("embed.weight", torch.zeros(3, 2)), ("head.weight", torch.zeros(3, 2)))
        with pytest.raises(PlanError, match=r"'head.weight': the engine ties it to 'embed.weight', but both"):
            kind(Tied()).check(plan)

    def test_an_engine_may_hold_the_further_name_only(self) -> None:
        """A tied name stands for its tensor."""
        held = {"head.weight": torch.zeros(3, 2)}
        plan = plan_of(("embed.weight", torch.zeros(3, 2)), ties=(Tie("head.weight", "embed.weight"),))
        sink = StagingSink(held)
        sink.check(plan)
        fill(sink, plan, 2)
        sink.commit(plan)
        assert held["head.weight"].eq(2).all()
        assert sink.live(plan) == {"embed.weight": held["head.weight"]}


class TestCheck:
    """Refused when the session is opened, naming the tensor and both descriptions."""

    @BOTH
    @pytest.mark.parametrize(
        ("sent", "line"),
        [
            (torch.zeros(8), r"tensor 'a': float32 \(8,\) is sent, but the engine holds float32 \(4,\)"),
            (torch.zeros(2), r"tensor 'a': float32 \(2,\) is sent, but the engine holds float32 \(4,\)"),
            (
                torch.zeros(4, dtype=torch.int32),
                r"tensor 'a': int32 \(4,\) is sent, but the engine holds float32 \(4,\)",
            ),
        ],
    )
    def test_a_tensor_that_is_something_else(self, kind: Sinks, sent: torch.Tensor, line: str) -> None:
        """Another shape, smaller or larger, or as many bytes of another dtype."""
        with pytest.raises(PlanError, match=line):
            kind({"a": torch.zeros(4)}).check(plan_of(("a", sent)))

    @BOTH
    def test_a_name_too_many_or_too_few(self, kind: Sinks) -> None:
        """What is sent for nobody, and what nothing is sent for, are both named."""
        sink = kind({"a": torch.zeros(4), "b": torch.zeros(1)})
        with pytest.raises(PlanError, match=r"'c': float32 \(4,\) is sent, but the engine does not hold it"):
            sink.check(plan_of(("a", torch.zeros(4)), ("b", torch.zeros(1)), ("c", torch.zeros(4))))
        with pytest.raises(
            PlanError, match=r"'b': the engine holds float32 \(1,\), but nothing is sent for it"
        ):
            sink.check(plan_of(("a", torch.zeros(4))))

    def test_long_lists_are_cut(self) -> None:
        """One line says the first few and how many more there are."""
        held = {f"t{number}": torch.zeros(1) for number in range(9)}
        with pytest.raises(PlanError, match=r"'t4'.*; and 4 more$"):
            StagingSink(held).check(plan_of())

    @BOTH
    def test_tensors_that_cannot_be_written_are_refused(self, kind: Sinks) -> None:
        """An expanded view has no memory for its elements, a meta tensor has none at all."""
        expanded = torch.zeros(1).expand(4)
        with pytest.raises(
            EngineError, match=r"'a': the engine holds an expanded view.*make it contiguous first"
        ):
            kind({"a": expanded}).check(plan_of(("a", expanded)))
        meta = torch.zeros(4, device="meta")
        with pytest.raises(EngineError, match=r"'a': the engine has no memory for it \(device meta\)"):
            kind({"a": meta}).check(plan_of(("a", meta)))

    @BOTH
    def test_tensors_whose_memory_was_given_away_are_refused(self, kind: Sinks) -> None:
        """To write one would end the process. An engine that got it back is served."""
        held = {"a": torch.zeros(4), "b": torch.zeros(2, 3).t()}
        plan, sink = plan_of(*held.items()), kind(held)
        sink.check(plan)
        for name, tensor in held.items():
            storage = tensor.untyped_storage()
            room = storage.nbytes()
            for left in (0, room - 1):
                storage.resize_(left)
                with pytest.raises(
                    EngineError, match=f"'{name}': the engine has no memory for it, its storage"
                ):
                    sink.check(plan)
            storage.resize_(room)
        sink.check(plan)
        fill(sink, plan, 3)
        sink.commit(plan)
        assert held["b"].eq(3).all()

    def test_less_memory_at_the_same_place_is_noticed(self) -> None:
        """Where a tensor was found good there may be less of it now. Nearly all of these come back there."""
        kept = []
        for _ in range(30):
            live = torch.zeros(1 << 12)
            plan, sink, storage = plan_of(("a", live)), StagingSink({"a": live}), live.untyped_storage()
            sink.check(plan)
            place, less = live.data_ptr(), live.nbytes - 1
            storage.resize_(less)
            for _ in range(20):  # each time it moves
                if live.data_ptr() != place:
                    storage.resize_(less)
            with pytest.raises(EngineError, match="its storage was resized"):
                sink.check(plan)
            kept.append(live)

    def test_memory_that_was_given_away_during_the_session_is_not_written(self) -> None:
        """The commit says so, and the engine's process lives."""
        held = {"a": torch.zeros(4)}
        plan, sink = plan_of(*held.items()), StagingSink(held)
        sink.check(plan)
        fill(sink, plan, 3)
        why = "'a': the engine gave its memory away during the session"
        with given_away(held["a"], held["a"].nbytes - 1), pytest.raises(EngineError, match=why):
            sink.commit(plan)

    @pytest.mark.parametrize("name", ["embed", "head"])
    def test_nor_is_it_where_names_are_brought_up_to_date_in_place(self, name: str) -> None:
        """What only the trainer ties is copied from one name to the other at the commit."""
        held = {"embed": torch.zeros(4), "head": torch.zeros(4)}
        plan, sink = plan_of(("embed", torch.zeros(4)), ties=(Tie("head", "embed"),)), InPlaceSink(held)
        sink.check(plan)
        fill(sink, plan, 3)
        why = "'embed': the engine gave its memory away during the session"
        with given_away(held[name], held[name].nbytes - 1), pytest.raises(EngineError, match=why):
            sink.commit(plan)

    def test_scalars_and_empty_tensors_fit(self) -> None:
        """They are tensors like any other."""
        held = {"scalar": torch.tensor(1.0), "none": torch.zeros(0, 3), "none_too": torch.zeros(0, 3)}
        plan = plan_of(*held.items())
        sink = StagingSink(held)
        sink.check(plan)
        fill(sink, plan, 2)
        sink.commit(plan)
        assert held["scalar"].item() == 2
