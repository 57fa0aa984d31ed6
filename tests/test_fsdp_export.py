"""A trainer that shards its model with FSDP, on two real ranks over gloo: what engines get is what it has.

Each form of sharding makes one tour in two processes; the tests look at what it brought.
"""

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdpside import FORMS, Model, Ranks
from weightsync import CachedExport
from weightsync.fsm.errors import PlanError, SetupError
from weightsync.fsm.exports import Cut
from weightsync.handlers.fp8_export import Fp8Exporter
from weightsync.handlers.fsdp_export import FsdpExporter, _held
from weightsync.handlers.fsdp_flat import _cut


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes for all of the tests below."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = Ranks(port)
    yield found
    found.end()


@pytest.fixture(params=FORMS)
def said(ranks: Ranks, request: pytest.FixtureRequest) -> list[Any]:
    """What both ranks said of one form."""
    found = ranks.said(request.param)
    assert all(isinstance(each, dict) for each in found), found
    return found


def test_engines_hold_what_the_trainer_has_after_each_change(said: list[Any]) -> None:
    """Trained, changed in place, given other memory, looked at, and made anew: by one plan."""
    for rank in said:
        assert [told for _, told, _ in rank["steps"]] == ["ok"] * 8, rank["steps"]
    assert [(what, wrong) for what, _, wrong in said[0]["steps"] if wrong] == []
    for rank in said:
        counts = rank["counts"]
        assert (counts.builds, counts.hits, counts.objects) == (1, 6, 0)


def test_a_module_that_was_replaced_is_gone(said: list[Any]) -> None:
    """The plan keeps nothing of it alive."""
    assert [rank["gone"] for rank in said] == [True, True]


def test_the_plan_is_the_same_on_all_ranks_and_says_who_holds_what(said: list[Any]) -> None:
    """As it turns out on each rank."""
    assert said[0]["hash"] == said[1]["hash"]
    assert [rank["cuts"] for rank in said] == [[], []]


def test_what_changes_on_all_ranks_is_planned_anew_on_all(said: list[Any]) -> None:
    """Once."""
    assert [rank["builds"] for rank in said] == [2, 2]


def test_what_changes_on_one_rank_alone_is_refused_on_both(said: list[Any]) -> None:
    """At once, by the name of it, and without a plan; as soon as it is gone, the old plan does."""
    for rank in said:
        told, seconds = rank["alone"]
        assert re.match(r"PlanMismatch: .*'alone' float32 \(1,\)", told), told
        assert seconds < 2.0
        assert rank["builds after"] == 2
        assert rank["back"] == ("ok", 2)


@pytest.mark.parametrize("form", ["fsdp1", "fsdp1-orig"])
def test_a_model_that_is_in_use_is_refused(ranks: Ranks, form: str) -> None:
    """Its pieces are not what it has just then; afterwards all ranks plan anew."""
    for rank in ranks.said(form):
        for told in rank["inside"]:
            assert re.match(
                r"PlanError: unit the root of the model is in use \(SUMMON_FULL_PARAMS\)", told
            ), told
        assert rank["outside"] == ("ok", 4)


def test_scales_are_of_the_values_of_their_round(said: list[Any]) -> None:
    """The layout is planned once; what the engine multiplies is near to the truth in each round."""
    for rank in said:
        assert [told for told, _ in rank["scales"]] == ["ok", "ok", "ok", "builds 1 hits 2"]
    assert all(apart < 0.07 for _, apart in said[0]["scales"]), said[0]["scales"]


# -- alone ------------------------------------------------------------------------------------------------


def test_a_module_is_not_kept_alive() -> None:
    """Nor read when it is gone."""
    model = Model()
    export = CachedExport(FsdpExporter(model))
    assert dict(export()).keys() == model.state_dict().keys()
    del model
    with pytest.raises(PlanError, match=r"the module of this FsdpExporter is gone: give it a function"):
        dict(export())


def test_a_module_is_needed() -> None:
    """Or something that gives one."""
    for wrong in (3, Model):
        with pytest.raises(SetupError, match="a module is needed, or a function that gives one"):
            FsdpExporter(wrong)  # type: ignore[arg-type]


def test_what_is_no_tensor_is_refused_by_name() -> None:
    """A state dict may hold anything."""

    class Odd(torch.nn.Module):
        def get_extra_state(self) -> object:
            return {"a": 1}

    odd = Odd()
    with pytest.raises(PlanError, match="'_extra_state' of the model's state dict is a dict"):
        FsdpExporter(odd).outline()


def test_pieces_of_a_flat_parameter_are_cut_at_its_tensors() -> None:
    """A tensor may lie in one piece, or over several."""
    assert _cut(0, 4, (5, 6), 10) == ((5,), (Cut(5, (0,), (4,)),))
    assert _cut(8, 5, (5, 6), 10) == ((5, 6), (Cut(5, (0,), (2,)), Cut(6, (2,), (3,))))
    assert _cut(10, 0, (5, 6), 10) == ((), ())


class Mesh:
    """As far as it is asked."""

    def __init__(self, ranks: list[Any]) -> None:
        self.mesh = torch.tensor(ranks)


def test_boxes_of_a_mesh_of_two_dimensions() -> None:
    """Split along one of its dimensions, and the same along the other."""
    from torch.distributed.tensor import Replicate, Shard

    owners, cuts = _held((5, 2), Mesh([[0, 1], [2, 3]]), [Replicate(), Shard(0)])
    assert owners == (0, 1, 2, 3)
    assert cuts[:2] == (Cut(0, (0, 0), (3, 2)), Cut(1, (3, 0), (2, 2)))
    assert [(each.offset, each.size) for each in cuts[2:]] == [(each.offset, each.size) for each in cuts[:2]]
    owners, cuts = _held((5, 3), Mesh([[0, 1], [2, 3]]), [Shard(0), Shard(1)])
    assert [(each.rank, each.offset, each.size) for each in cuts] == [
        (0, (0, 0), (3, 2)), (1, (0, 2), (3, 1)), (2, (3, 0), (2, 2)), (3, (3, 2), (2, 1)),
    ]  # fmt: skip


def test_a_rank_without_elements_holds_nothing() -> None:
    """More ranks than rows."""
    from torch.distributed.tensor import Shard

    owners, cuts = _held((1, 2), Mesh([0, 1]), [Shard(0)])
    assert (owners, cuts) == ((0,), (Cut(0, (0, 0), (1, 2)),))


# -- eight bits -------------------------------------------------------------------------------------------


def eight(model: torch.nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    """What such an export brings."""
    return dict(CachedExport(Fp8Exporter(FsdpExporter(model), **options))())


def test_matrices_have_a_scale_for_each_block() -> None:
    """Blocks at the edges are smaller, one of zeros has the scale 1, and vectors stay as they are."""
    model = torch.nn.Linear(5, 3)
    with torch.no_grad():
        model.weight[:2, :2] = 0.0
    got = eight(model, only=("weight",), block=(2, 2))
    assert got["weight"].dtype == torch.float8_e4m3fn
    assert got["weight_scale_inv"].shape == (2, 3)
    assert float(got["weight_scale_inv"][0, 0]) == 1.0
    assert torch.equal(got["bias"], model.bias)
    scale = got["weight_scale_inv"].repeat_interleave(2, 0).repeat_interleave(2, 1)[:3, :5]
    assert torch.allclose(got["weight"].float() * scale, model.weight, rtol=0.07, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_spoils_no_neighbour(bad: float) -> None:
    """It comes as no number, and the rest of its block is as near as without it."""
    model = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.mul_(1e5)[0, 1] = bad
    got = eight(model, only=("weight",), block=(2, 2))
    scale = got["weight_scale_inv"].repeat_interleave(2, 0).repeat_interleave(2, 1)
    near, right = got["weight"].float() * scale, model.weight.isfinite()
    assert bool(got["weight_scale_inv"].isfinite().all())
    assert torch.equal(near.isnan(), ~right)
    assert torch.allclose(near[right], model.weight[right], rtol=0.07, atol=1.0)


def test_numbers_that_are_all_but_zero_have_a_scale() -> None:
    """A quotient that would be zero is no scale."""
    model = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e-45)
    got = eight(model, only=("weight",), block=(2, 2))
    assert float(got["weight_scale_inv"].min()) > 0.0
    assert float((got["weight"].float() * got["weight_scale_inv"]).abs().max()) < 1e-40


def test_what_is_planned_is_what_comes() -> None:
    """Names, dtypes and shapes, of which those that follow from values are live."""
    model = Model()
    export = CachedExport(Fp8Exporter(FsdpExporter(model), only=("*.weight",), block=(2, 3)))
    got = dict(export())
    assert export.plan is not None
    planned = {slot.name: (slot.dtype, slot.shape) for slot in export.plan.slots}
    assert planned == {
        name: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in got.items()
    }
    live = {slot.name for slot in export.plan.slots if slot.live}
    matrices = {"emb", "a", "b.0", "b.1", "head"}
    assert live == {f"{name}.weight{end}" for name in matrices for end in ("", "_scale_inv")}
    assert got["head.weight"] is got["emb.weight"]
    assert got["head.weight_scale_inv"] is got["emb.weight_scale_inv"]


@pytest.mark.parametrize("chosen", ["emb", "head"])
def test_one_of_two_names_may_be_chosen_alone(chosen: str) -> None:
    """The other one stays as it is, whichever comes first; a plan refers to nothing that is not in it."""
    model = Model()
    export = CachedExport(Fp8Exporter(FsdpExporter(model), only=(f"{chosen}.weight",), block=(2, 2)))
    other = "head" if chosen == "emb" else "emb"
    readings = [dict(export()) for _ in range(2)]
    for got in readings:
        kinds = {name: got[f"{name}.weight"].dtype for name in ("emb", "head")}
        assert kinds == {chosen: torch.float8_e4m3fn, other: torch.float32}
        assert got.keys() - model.state_dict().keys() == {f"{chosen}.weight_scale_inv"}
    assert export.plan is not None
    planned = {slot.name: slot for slot in export.plan.slots}
    assert planned.keys() == readings[0].keys()
    for slot in export.plan.slots:
        assert not slot.of or planned[slot.of].dtype == slot.dtype, slot


def test_what_matches_nothing_stays_as_it_is() -> None:
    """And another selection is another outline."""
    model = Model()
    assert eight(model, only=("nothing",)).keys() == model.state_dict().keys()
    outlines = {
        Fp8Exporter(FsdpExporter(model), **options).outline().common
        for options in ({}, {"only": ("a.*",)}, {"block": (2, 2)}, {"suffix": "_s"})
    }
    assert len(outlines) == 4


def test_eight_bits_of_what_is_no_exporter_are_refused() -> None:
    """In one line, as are other wrong things."""
    with pytest.raises(SetupError, match="an exporter is needed"):
        Fp8Exporter(Model())  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="block"):
        Fp8Exporter(FsdpExporter(Model()), block=(0, 1))
    with pytest.raises(SetupError, match="a list of patterns is needed"):
        Fp8Exporter(FsdpExporter(Model()), only="*")
