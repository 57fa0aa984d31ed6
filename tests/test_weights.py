"""What a trainer hands over becomes weights: names, ties, order, and clear words about what cannot be."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from casekit.tensors import given_away
from weightsync.fsm.contract import Weights
from weightsync.fsm.errors import PlanError, TransportError
from weightsync.fsm.plan import Tie
from weightsync.transports.digest import digest
from weightsync.transports.weights import TorchWeights, tensors_of

Pairs = list[tuple[str, torch.Tensor]]


class Tied(torch.nn.Module):
    """An output head that shares the embedding's tensor, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def plan_names(weights: TorchWeights) -> list[str]:
    """The names that are sent, in order."""
    return [each.name for each in weights.plan(1 << 20).tensors]


class TestSources:
    def test_a_module_is_its_state_dict(self) -> None:
        """Parameters and persistent buffers, a scalar counter among them, in the module's order."""
        model = Tied()
        weights = TorchWeights.of(model)
        names = [*weights.tensors, *(tie.name for tie in weights.ties)]
        assert sorted(names) == sorted(model.state_dict())
        assert "scratch" not in names
        assert weights.tensors["norm.num_batches_tracked"].shape == ()

    def test_a_tied_tensor_is_sent_once_with_both_names(self) -> None:
        """The first name carries the bytes, the other one is a tie to it."""
        weights = TorchWeights.of(Tied())
        assert weights.ties == (Tie("head.weight", "embed.weight"),)
        assert weights.plan(1 << 20).ties == weights.ties

    def test_views_that_differ_are_no_ties(self) -> None:
        """The same memory read as another shape, dtype, part or with other strides is another tensor."""
        base = torch.arange(4.0).view(2, 2)
        views = [base, base.t(), base.view(4), base.view(torch.int32), base[:1]]
        assert TorchWeights.of([(str(index), view) for index, view in enumerate(views)]).ties == ()

    def test_empty_tensors_are_no_ties(self) -> None:
        """They have no memory to share."""
        assert TorchWeights.of({"a": torch.zeros(0), "b": torch.zeros(0)}).ties == ()

    @pytest.mark.parametrize(
        "given",
        [
            dict,
            list,
            tuple,
            iter,
            lambda pairs: (pair for pair in pairs),
            lambda pairs: dict(pairs).items(),
            lambda pairs: lambda: pairs,
            lambda pairs: lambda: iter(pairs),
            lambda pairs: lambda: dict(pairs),
        ],
        ids=["mapping", "list", "tuple", "iterator", "generator", "items", "function", "lazy", "deferred"],
    )
    def test_every_source_keeps_its_order(self, given: Callable[[Pairs], object]) -> None:
        """Tensors are sent in the order in which they are given, whatever gives them."""
        pairs = [("b", torch.zeros(2)), ("c", torch.ones(1)), ("a", torch.zeros(3))]
        weights = TorchWeights.of(given(pairs))
        weights.materialize()
        assert plan_names(weights) == ["b", "c", "a"]
        assert [tuple(each.shape) for each in weights.tensors.values()] == [(2,), (1,), (3,)]

    def test_a_list_stays_the_very_list(self) -> None:
        """Whoever clears it when the round succeeded has to find the one that was handed over."""
        pairs = [("a", torch.zeros(2))]
        assert TorchWeights.of(pairs).source is pairs

    def test_weights_stay_themselves(self) -> None:
        """What is made of weights already is not wrapped again."""
        weights = TorchWeights.of({"a": torch.zeros(2)})
        assert TorchWeights.of(weights) is weights

    def test_parameters_are_detached(self) -> None:
        """No graph is kept alive, and the memory is the parameter's own."""
        parameter = torch.nn.Parameter(torch.ones(2))
        held = TorchWeights.of({"a": parameter}).tensors["a"]
        assert not held.requires_grad
        assert held.data_ptr() == parameter.data_ptr()

    def test_an_empty_model_has_one_empty_bucket(self) -> None:
        """There is nothing to send, and a plan for it."""
        plan = TorchWeights.of({}).plan(1 << 20)
        assert (len(plan.tensors), len(plan.buckets), plan.nbytes) == (0, 1, 0)

    def test_a_conjugate_view_is_sent_as_what_it_shows(self) -> None:
        """A note on somebody else's values will not do: its own values are what is sent."""
        numbers = torch.complex(torch.ones(2), torch.ones(2))
        held = TorchWeights.of({"a": numbers.conj()}).tensors["a"]
        assert held.view(torch.float32).tolist() == [1, -1, 1, -1]

    def test_it_is_what_the_contract_asks_for(self) -> None:
        """The type checker agrees, and a transport gets at the tensors."""
        weights: Weights = TorchWeights.of({"a": torch.zeros(2)})
        assert list(tensors_of(weights)) == ["a"]

    def test_a_transport_refuses_other_weights(self) -> None:
        """Weights that only have a plan and a digest cannot be sent as tensors."""

        class Imagined:
            """No weights at all: it is refused before anything of it is used."""

        with pytest.raises(TransportError, match="not Imagined"):
            tensors_of(Imagined())  # type: ignore[arg-type]


class TestRefusals:
    @pytest.mark.parametrize(
        "source", [{"b", "a"}, frozenset({"a"}), {"a": 1}.keys(), lambda: {"a", "b"}], ids=str
    )
    def test_what_has_no_order_is_refused(self, source: object) -> None:
        """The order of a set differs between processes: names would stand for other tensors' bytes."""
        with pytest.raises(PlanError, match="no order"):
            TorchWeights.of(source).materialize()

    @pytest.mark.parametrize("left", [0, 8], ids=["none", "some"])
    @pytest.mark.parametrize(
        "view",
        [lambda t: t, lambda t: t.t(), lambda t: t[2:], lambda t: t.expand(2, 3, 4), torch.nn.Parameter],
        ids=["whole", "transposed", "part", "expanded", "parameter"],
    )
    def test_a_tensor_whose_memory_was_given_away_is_refused(
        self, view: Callable[[torch.Tensor], torch.Tensor], left: int
    ) -> None:
        """As a sharded model's is between its layers: what would be sent is whatever lies there now."""
        tensor = torch.ones(3, 4)
        source = {"good": torch.ones(2), "freed": view(tensor)}
        why = "'freed' has no memory, its storage was resized: gather it first"
        with given_away(tensor, left):
            with pytest.raises(PlanError, match=why):
                TorchWeights.of(source)
            with pytest.raises(PlanError, match=why):
                TorchWeights.of(lambda: source).materialize()
        assert list(TorchWeights.of(source).tensors) == ["good", "freed"]

    def test_what_memory_is_left_may_be_enough(self) -> None:
        """A part that is still there can be sent, and what has no elements needs no memory."""
        tensor = torch.arange(12.0).view(3, 4)
        source = {"part": tensor[:1], "none": tensor[:0]}
        with given_away(tensor, 16):
            tensors = TorchWeights.of(source).tensors
            assert tensors["part"].tolist() == [[0, 1, 2, 3]]

    @pytest.mark.parametrize(
        "source", [3, None, "abc", b"abc", torch.zeros(2)], ids=lambda each: type(each).__name__
    )
    def test_what_is_no_source_is_refused_at_once(self, source: object) -> None:
        """The message names what was given."""
        with pytest.raises(PlanError, match=type(source).__name__):
            TorchWeights.of(source)

    @pytest.mark.parametrize(
        "item", ["a", ("a",), ("a", torch.zeros(1), 3), (1, torch.zeros(1)), None], ids=str
    )
    def test_what_is_no_pair_is_refused(self, item: object) -> None:
        """The message says which item."""
        with pytest.raises(PlanError, match="item 1 is a"):
            TorchWeights.of([("ok", torch.zeros(1)), item])

    def test_a_name_may_come_once(self) -> None:
        """Two tensors of one name would overwrite each other."""
        with pytest.raises(PlanError, match="two tensors are named 'a'"):
            TorchWeights.of([("a", torch.zeros(1)), ("a", torch.zeros(1))])

    def test_what_is_no_tensor_is_refused(self) -> None:
        """A number in a state dict would be dropped silently otherwise."""
        with pytest.raises(PlanError, match="'step' is a int"):
            TorchWeights.of({"a": torch.zeros(1), "step": 3})

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda: torch.eye(3).to_sparse(), "sparse"),
            (lambda: torch.eye(4).to_sparse_csr(), "sparse"),
            (lambda: torch.empty(3, device="meta"), "no values"),
            (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
            (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
            (
                lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
                "wraps others",
            ),
            (lambda: torch.nn.LazyLinear(3).weight, "not initialised"),
            (lambda: torch.empty(3, dtype=torch.bits8), "bits8"),
        ],
        ids=["coo", "csr", "meta", "quantised", "nested", "jagged", "lazy", "bits8"],
    )
    def test_what_has_no_bytes_of_its_own_is_refused_by_name(
        self, make: Callable[[], torch.Tensor], why: str
    ) -> None:
        """Before anything moves, with what to do instead."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = make()
        with pytest.raises(PlanError, match=rf"'layer\.w'.*{why}"):
            TorchWeights.of({"a": torch.zeros(1), "layer.w": tensor})


class TestReading:
    def test_a_generator_is_read_once_and_in_the_round(self) -> None:
        """Nothing runs before ``materialize``, and the result is remembered."""
        reads: list[str] = []

        def generate() -> Iterator[tuple[str, torch.Tensor]]:
            for name in "ab":
                reads.append(name)
                yield name, torch.zeros(1)

        weights = TorchWeights.of(generate())
        assert reads == []
        weights.materialize()
        weights.materialize()
        assert reads == ["a", "b"]
        assert plan_names(weights) == ["a", "b"]

    def test_what_a_source_raises_comes_out_untouched(self) -> None:
        """The round reports the very exception of the trainer's own code."""
        failure = ZeroDivisionError("mine")

        def generate() -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(1)
            raise failure

        with pytest.raises(ZeroDivisionError) as caught:
            TorchWeights.of(generate()).materialize()
        assert caught.value is failure

    def test_a_generator_that_failed_is_not_read_on(self) -> None:
        """What it would still give is not the whole, so a second attempt says so."""

        def generate() -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(1)
            yield "b", 3  # type: ignore[misc]
            yield "c", torch.zeros(1)

        weights = TorchWeights.of(generate())
        with pytest.raises(PlanError, match="'b'"):
            weights.materialize()
        with pytest.raises(PlanError, match="only once") as caught:
            weights.plan(8)
        assert "'b'" in str(caught.value.__cause__)

    def test_a_function_can_be_asked_again(self) -> None:
        """A retry after an error calls it anew."""
        calls = iter([False, True])

        def give() -> dict[str, torch.Tensor]:
            if not next(calls):
                raise RuntimeError("not yet")
            return {"a": torch.zeros(1)}

        weights = TorchWeights.of(give)
        with pytest.raises(RuntimeError, match="not yet"):
            weights.materialize()
        assert plan_names(weights) == ["a"]

    def test_forgetting_lets_go_of_the_tensors(self) -> None:
        """Their memory is free for the next step; plan and digest stay."""
        weights = TorchWeights.of([("a", torch.zeros(2))])
        plan, content = weights.plan(8), weights.digest()
        weights.forget()
        assert (weights.plan(8), weights.source) == (plan, None)
        with pytest.raises(PlanError, match="let go of"):
            _ = weights.tensors
        assert content


class TestPlans:
    def test_the_same_metadata_give_the_same_plan(self) -> None:
        """Every round of a run uses one plan object, whatever the values are."""
        first, second = (TorchWeights.of({"a": torch.full((3,), value)}) for value in (1.0, 2.0))
        assert first.plan(64) is second.plan(64)
        assert first.plan(64) is not first.plan(32)

    def test_a_limit_that_is_no_number_of_bytes_is_refused(self) -> None:
        """Also when the plan for a number that equals it is known already."""
        weights = TorchWeights.of({"a": torch.zeros(3)})
        weights.plan(64)
        with pytest.raises(PlanError):
            weights.plan(64.0)  # type: ignore[arg-type]

    def test_groups_arrive_together(self) -> None:
        """Tensors of a group share a bucket, under any of their names."""
        state = {name: torch.zeros(4) for name in "abcd"}
        plan = TorchWeights.of(state, groups=[{"a", "d"}]).plan(32)
        buckets = [[plan.tensors[piece.tensor].name for piece in bucket.pieces] for bucket in plan.buckets]
        assert ["a", "d"] in buckets

    def test_a_group_that_is_one_name_is_refused(self) -> None:
        """A string is a collection of letters, which is not what was meant."""
        with pytest.raises(PlanError, match="not the one name"):
            TorchWeights.of({"ab": torch.zeros(4)}, groups=["ab"]).plan(32)

    def test_bytes_follow_the_elements_not_the_storage(self) -> None:
        """A slice of a large storage is as small as it looks, an expanded row as large as it looks."""
        state = {"slice": torch.zeros(1000, 1000)[5:7, 3:5], "row": torch.zeros(1, 3).expand(4, 3)}
        assert [each.nbytes for each in TorchWeights.of(state).plan(64).tensors] == [16, 48]

    def test_the_digest_is_the_shared_function(self) -> None:
        """A receiver that digests the same tensors by the plan gets the same."""
        model = Tied()
        weights = TorchWeights.of(model)
        assert weights.digest() == digest(weights.plan(16), model.state_dict())


class TestSnapshots:
    def test_a_snapshot_does_not_change_with_training(self) -> None:
        """It has memory of its own, and the plan and digest of the moment it was taken."""
        model = Tied()
        weights = TorchWeights.of(model)
        copy = weights.snapshot()
        content = weights.digest()
        with torch.no_grad():
            model.embed.weight.add_(1)
        assert copy.digest() == content
        assert TorchWeights.of(model).digest() != content
        assert copy.plan(64) is weights.plan(64)
        assert copy.ties == weights.ties
        assert copy.source is model

    def test_a_snapshot_of_a_view_is_whole(self) -> None:
        """An expanded tensor gets memory for all of its elements; none is left to the original."""
        row = torch.ones(1, 3)
        copy = TorchWeights.of({"a": row.expand(4, 3)}).snapshot()
        row.zero_()
        assert torch.equal(copy.tensors["a"], torch.ones(4, 3))
