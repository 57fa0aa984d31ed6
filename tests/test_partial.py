"""A selection by name is sent, and everything else stays as it is: the adapters of a model, for example."""

import json
from typing import Any

import pytest
import torch

import weightsync
from tensorkit import octets
from weightsync.engine import receiver_for
from weightsync.fsm.errors import PlanError, SetupError
from weightsync.fsm.plan import Plan, Tie, make_plan, spec
from weightsync.fsm.policy import LORA, Policy
from weightsync.fsm.states import Disposition
from weightsync.handlers.local_engine import LocalEngine
from weightsync.handlers.sink import InPlaceSink, StagingSink
from weightsync.sync import WeightSync
from weightsync.testing.fakes import FakeWeights
from weightsync.transports.weights import TorchWeights

pytestmark = pytest.mark.timeout(60)

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective"])
STAGES = pytest.mark.parametrize("stages", [True, False])
WIDE, NARROW, RANK = 96, 40, 4


class LoraLinear(torch.nn.Module):
    """A layer with an adapter beside it, by the names that PEFT gives."""

    def __init__(self, wide: int, narrow: int, *, adapter: bool = True) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(wide, narrow)
        if adapter:
            self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(wide, RANK, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(RANK, narrow, bias=False)})

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """The layer, and what the adapter adds."""
        added: torch.Tensor = self.lora_B["default"](self.lora_A["default"](given))
        out: torch.Tensor = self.base_layer(given) + added
        return out


class Adapted(torch.nn.Module):
    """Two of them, and an embedding without."""

    def __init__(self, seed: int, *, adapter: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(50, WIDE)
        self.up = LoraLinear(WIDE, NARROW, adapter=adapter)
        self.down = LoraLinear(NARROW, WIDE, adapter=adapter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Some numbers."""
        given: torch.Tensor = self.embed(tokens)
        out: torch.Tensor = self.down(torch.relu(self.up(given)))
        return out


ADAPTERS = 4 * RANK * (WIDE + NARROW) * 2
"""Bytes of them, in float32."""


def held(model: torch.nn.Module) -> dict[str, bytes]:
    """Every tensor's bytes."""
    return {name: octets(tensor) for name, tensor in model.state_dict().items()}


# -- adapters alone ---------------------------------------------------------------------------------------


@TRANSPORTS
@STAGES
@pytest.mark.parametrize("only", [LORA, ("*.lora_A.*", "*.lora_B.*")], ids=["LORA", "patterns"])
def test_adapters_are_sent_and_the_base_is_not_touched(
    transport: str, only: tuple[str, ...], *, stages: bool
) -> None:
    """Bit for bit, in every round; the result counts the bytes of the adapters alone."""
    engine, trainer = Adapted(1), Adapted(1)
    base = {name: each for name, each in held(engine).items() if "lora" not in name}
    link = LocalEngine(receiver_for(engine, "a", stages=stages))
    optimizer = torch.optim.SGD([each for name, each in trainer.named_parameters() if "lora" in name], 0.1)
    with WeightSync([link], transport, policy=Policy(deadline=30, only=only)) as sync:
        for step in range(1, 4):
            optimizer.zero_grad()
            trainer(torch.arange(50)).square().sum().backward()
            optimizer.step()
            assert held(engine) != held(trainer)
            result = sync.on_step_end(step, trainer)
            assert result is not None
            result.require()
            assert [(row.bytes, row.tensors) for row in result.engines] == [(ADAPTERS, 4)]
            assert held(engine) == held(trainer)
            assert {name: held(engine)[name] for name in base} == base
            assert result.engines[0].disposition is Disposition.serving_new


@TRANSPORTS
def test_the_base_of_an_engine_is_its_own(transport: str) -> None:
    """It may differ, be of another dtype, or have nothing to do with the trainer's; it is not asked for."""
    engine, trainer = Adapted(1), Adapted(2)
    engine.embed.to(torch.bfloat16)
    engine.up.base_layer = torch.nn.Linear(3, 3, device="meta")
    engine.register_buffer("more", torch.ones(2))
    base = {name: each for name, each in engine.state_dict().items() if "lora" not in name}
    before = {name: octets(each) for name, each in base.items() if not each.is_meta}
    with WeightSync([LocalEngine(receiver_for(engine, "a"))], transport, policy=Policy(only=LORA)) as sync:
        sync.on_train_begin(trainer).require()
    found = engine.state_dict()
    assert {name: octets(found[name]) for name in before} == before
    for name, tensor in trainer.state_dict().items():
        if "lora" in name:
            assert torch.equal(found[name], tensor), name


def test_adapters_can_be_cast_and_copied() -> None:
    """A selection goes with everything else that a policy says; what is not sent is not copied."""
    engine, trainer = Adapted(1).to(torch.bfloat16), Adapted(2)
    policy = Policy(only=LORA, cast="bfloat16")
    with WeightSync([LocalEngine(receiver_for(engine, "a"))], policy=policy) as sync:
        result = sync.begin(1, trainer).wait()
    assert result.require().engines[0].bytes == ADAPTERS // 2
    name = "up.lora_A.default.weight"
    assert torch.equal(engine.state_dict()[name], trainer.state_dict()[name].bfloat16())


def test_what_is_not_sent_may_be_anything() -> None:
    """A base that cannot be sent, a sparse one for example, is no obstacle; a name is still taken once."""
    model: dict[str, Any] = {
        "base": torch.eye(2).to_sparse(), "step": 3, "x.lora_A.w": torch.ones(2),
    }  # fmt: skip
    assert list(TorchWeights.of(model, only=LORA).tensors) == ["x.lora_A.w"]
    with pytest.raises(PlanError, match="two tensors are named 'base'"):
        TorchWeights.of([("base", 1), ("base", 2), ("x.lora_A.w", torch.ones(2))], only=LORA)


# -- who refuses ------------------------------------------------------------------------------------------


@TRANSPORTS
@STAGES
def test_an_engine_without_adapters_refuses_by_name(transport: str, *, stages: bool) -> None:
    """Before a byte moves; another one that has them is named with the tensor that differs."""
    engine = Adapted(1, adapter=False)
    before = held(engine)
    link = LocalEngine(receiver_for(engine, "plain", stages=stages))
    with WeightSync([link], transport, policy=Policy(only=LORA)) as sync:
        result = sync.on_train_begin(Adapted(2))
        assert isinstance(result.error, PlanError)
        assert result.culprit == "plain"
        assert "tensor 'up.lora_A.default.weight': float32 (4, 96) is sent, but the engine does not" in str(
            result.error
        )
        assert sync.version() is None
    assert held(engine) == before


@pytest.mark.parametrize("sink", [StagingSink, InPlaceSink])
def test_shapes_and_dtypes_of_what_is_sent_are_compared(sink: type[StagingSink | InPlaceSink]) -> None:
    """As of a whole plan; and a whole plan still asks for everything."""
    model = {"a.lora_A": torch.ones(2, 3), "base": torch.ones(5)}
    engine = sink({"a.lora_A": torch.ones(3, 2), "base": torch.ones(5)})
    with pytest.raises(
        PlanError, match=r"'a.lora_A': float32 \(2, 3\) is sent, but the engine holds float32 \(3"
    ):
        engine.check(TorchWeights.of(model, only=LORA).plan(64))
    one = sink({"a.lora_A": torch.ones(2, 3), "base": torch.ones(5), "more": torch.ones(1)})
    one.check(TorchWeights.of(model, only=LORA).plan(64))
    with pytest.raises(PlanError, match="'more': the engine holds float32"):
        one.check(TorchWeights.of(model).plan(64))
    with pytest.raises(PlanError, match="'more': the engine holds float32"):
        one.check(
            TorchWeights.of({name: model[name] for name in ("a.lora_A",)} | {"base": torch.ones(5)}).plan(64)
        )


def test_a_selector_that_selects_nothing_is_refused_at_once() -> None:
    """Before the lock is asked for, with a few of the names that there are."""
    engine = receiver_for(Adapted(1), "a")
    with WeightSync([LocalEngine(engine)], policy=Policy(only=("*.lora_C.*",))) as sync:
        with pytest.raises(PlanError) as caught:
            sync.on_train_begin(Adapted(2))
        assert str(caught.value) == (
            "only=('*.lora_C.*',) matches none of the 9 names; there are 'down.base_layer.bias', "
            "'down.base_layer.weight', 'down.lora_A.default.weight' and 6 more"
        )
        with pytest.raises(PlanError, match="none of the 0 names: there is nothing to send"):
            sync.on_train_begin({})
        with pytest.raises(PlanError, match=r"none of the 1 names; there are 'LORA_C'"):
            sync.on_train_begin({"LORA_C": torch.ones(1)})
        failed = sync.on_step_end(1, iter({"w": torch.ones(1)}.items()))
        assert failed is not None
        assert isinstance(failed.error, PlanError)
    assert engine.version is None


def test_each_pattern_has_to_match_something() -> None:
    """One that is mistyped leaves half of the adapter as it was, and the round would be called good."""
    model = {"a.lora_A": torch.ones(2), "a.lora_B": torch.ones(2), "base": torch.ones(2)}
    with pytest.raises(PlanError, match=r"'\*lora_b\*' matches none of the 3 names; there are 'a.lora_A'"):
        TorchWeights.of(model, only=("*lora_A*", "*lora_b*"))
    some = {"a.lora_A": torch.ones(2), "base": torch.ones(2)}
    assert list(TorchWeights.of(some, only=LORA).tensors) == ["a.lora_A"], "not every adapter has all of them"


@pytest.mark.parametrize("value", ["*.lora_A.*", b"x", 3, ("a", 4), ("",), {"a": 1}, [], (), iter(())])
def test_patterns_are_a_list_of_strings(value: Any) -> None:
    """One string alone would be taken for its letters."""
    with pytest.raises(SetupError, match=r"Policy\(only="):
        Policy(only=value)
    with pytest.raises(SetupError, match=r"TorchWeights.of\(only="):
        TorchWeights.of({"a": torch.ones(1)}, only=value)


def test_weights_of_another_kind_cannot_be_selected_from_in_silence() -> None:
    """They make their own plan."""
    link = LocalEngine(receiver_for({"w": torch.zeros(1)}, "a"))
    with (
        WeightSync([link], policy=Policy(only=["w*"])) as sync,
        pytest.raises(SetupError, match=r"Policy\(only=\('w\*',\)\) is for tensors, and a FakeWeights"),
    ):
        sync.on_step_end(1, FakeWeights())


# -- the plan ---------------------------------------------------------------------------------------------


def test_a_plan_says_that_it_is_partial() -> None:
    """Its fingerprint does, so that ranks and engines which select otherwise know."""
    model = {"a": torch.ones(2), "b": torch.ones(3)}
    whole, some, all_of_it = (TorchWeights.of(model, only=only).plan(64) for only in (None, ("a",), ("*",)))
    assert (whole.partial, some.partial, all_of_it.partial) == (False, True, True)
    assert (whole.tensors, whole.buckets) == (all_of_it.tensors, all_of_it.buckets)
    assert len({whole.fingerprint, some.fingerprint, all_of_it.fingerprint}) == 3
    assert "partial" not in json.loads(whole.to_json())


def test_a_partial_plan_is_read_back_and_believed_in_nothing() -> None:
    """What it says of itself is under the fingerprint."""
    plan = make_plan([spec("a", "int8", (3,))], bucket_bytes=64, partial=True)
    assert Plan.from_json(plan.to_json()) == plan
    record = json.loads(plan.to_json())
    values: tuple[Any, ...] = (1, None, "yes", [])
    for value in values:
        with pytest.raises(PlanError, match="does not say whether it is partial"):
            Plan.from_json(json.dumps({**record, "partial": value}))
    for forged in ({**record, "partial": False}, {k: v for k, v in record.items() if k != "partial"}):
        with pytest.raises(PlanError, match="fingerprint does not match"):
            Plan.from_json(json.dumps(forged))


def test_ties_are_between_the_names_that_are_sent() -> None:
    """A tensor is sent under its first name that is selected, and the other selected ones are its ties."""
    shared, other = torch.ones(4), torch.ones(2)
    model = {"embed": shared, "x.head": shared, "y.head": shared, "alone": other}
    plan = TorchWeights.of(model, only=["*.head"]).plan(64)
    assert ([each.name for each in plan.tensors], plan.ties) == (["x.head"], (Tie("y.head", "x.head"),))
    assert plan.nbytes == 16
    assert not TorchWeights.of(model, only=["embed"]).plan(64).ties


def test_an_engine_that_ties_or_does_not_gets_what_was_selected() -> None:
    """By name: who holds a name apart that was not sent keeps it; who ties it gets it with the other."""
    plan_of = TorchWeights.of({"embed": torch.ones(4), "head": torch.ones(4)}, only=["head"]).plan(64)
    apart = {"embed": torch.zeros(4), "head": torch.zeros(4)}
    shared = torch.zeros(4)
    tied = {"embed": shared, "head": shared}
    for engine in (apart, tied):
        sink = StagingSink(engine)
        sink.check(plan_of)
        sink.open(plan_of)["head"].fill_(1)
        sink.commit(plan_of)
        assert engine["head"].tolist() == [1.0] * 4
    assert apart["embed"].tolist() == [0.0] * 4
    assert tied["embed"] is tied["head"]


def test_groups_are_of_those_that_are_sent() -> None:
    """Who was left out is left out of its group, too."""
    model = {name: torch.ones(4) for name in ("a.lora_A", "a.lora_B", "a.base")}
    plan = TorchWeights.of(model, groups=[set(model), set()], only=LORA).plan(128)
    assert [len(bucket.pieces) for bucket in plan.buckets] == [2]


def test_the_names_of_adapters_are_known() -> None:
    """Those of PEFT, whatever stands before and behind; nothing else."""
    names = [
        "base_model.model.q.lora_A.default.weight", "lora_B.weight", "q.lora_embedding_A.default",
        "q.lora_embedding_B.default", "q.lora_magnitude_vector.default.weight", "q.base_layer.weight",
        "q.bias",
    ]  # fmt: skip
    weights = TorchWeights.of({name: torch.ones(1) for name in names}, only=weightsync.LORA)
    assert list(weights.tensors) == names[:5]


# -- what a failure has torn ------------------------------------------------------------------------------


@STAGES
def test_a_partial_plan_does_not_heal_what_a_whole_one_has_torn(*, stages: bool) -> None:
    """An engine that was left with a mix in its base comes back by a hand-over of everything alone."""
    model = {"base": torch.ones(64), "x.lora_A": torch.ones(16)}
    points = iter([("applied" if not stages else "copied", 0 if not stages else -1)])
    armed = next(points)

    def fault(point: str, bucket: int) -> None:
        nonlocal armed
        if (point, bucket) == armed:
            armed = ("", 0)
            raise OSError("no power")

    engine = {name: torch.zeros_like(each) for name, each in model.items()}
    link = LocalEngine(receiver_for(engine, "a", stages=stages, fault=fault))
    with WeightSync([link], policy=Policy(deadline=20, bucket_bytes=64)) as whole:
        assert not whole.on_train_begin(model).ok
        assert whole.servable() == {}
    with WeightSync([link], policy=Policy(deadline=20, only=LORA), lock=None) as some:
        result = some.on_train_begin(model)
        if stages:  # it had taken all of it over, and did not come to say so
            assert result.ok
        else:
            assert isinstance(result.error, PlanError)
            assert "tensor 'base': a hand-over that failed may have left it half written" in str(result.error)
            assert some.servable() == {}
    with WeightSync([link], policy=Policy(deadline=20)) as whole:
        assert whole.on_train_begin(model).ok
    with WeightSync([link], policy=Policy(deadline=20, only=LORA)) as some:
        assert some.on_train_begin({**model, "x.lora_A": torch.full((16,), 2.0)}).ok
    assert engine["base"].tolist() == [1.0] * 64
    assert engine["x.lora_A"].tolist() == [2.0] * 16
