"""An engine whose weights are not what its last commit left: it notices, stops generating, and says so."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from casekit.levels import eventually, generates
from weightsync import LocalEngine, LocalLock, Policy, WeightSync
from weightsync.engine import receiver_for
from weightsync.fsm.engine import Answer
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineSilent, PlanError, WeightsGone
from weightsync.fsm.lock import Granted
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Expectation
from weightsync.fsm.results import RoundResult
from weightsync.fsm.sampling import part_of_version
from weightsync.fsm.states import EngineState
from weightsync.handlers.known_plans import KnownPlans
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.threads import spawn
from weightsync.transports.weights import TorchWeights

SOON = 10.0


def weights(value: float, **other: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a trainer has."""
    return {"a": torch.full((8,), value), "b": torch.full((4,), value), **other}


class Served:
    """An engine that has committed version 0, and its trainer."""

    def __init__(self, *, stages: bool) -> None:
        self.held: dict[str, torch.Tensor] = weights(-1.0)
        self.receiver: Receiver = receiver_for(self.held, "e", stages=stages)
        self.lock = LocalLock()
        link = LocalEngine(self.receiver)
        self.sync = WeightSync([link], "memory", policy=Policy(deadline=SOON), lock=self.lock)
        self.works(0.0)

    def works(self, value: float) -> None:
        """A round."""
        step = int(value)
        result = self.sync.begin(step, weights(value)).wait()
        assert result.ok, result.summary()
        assert self.held["b"].unique().tolist() == [value]

    def lose(self) -> None:
        """Somebody reloads a part of the model in another shape."""
        self.held["a"] = torch.zeros(3)

    def session(self) -> Session:
        """One of another trainer, which had the lock in between."""
        ticket = self.lock.request("another", "round")
        granted = self.lock.wait(ticket, SOON)
        assert isinstance(granted, Granted)
        self.lock.release(ticket, granted.epoch)
        return Session(f"round-{granted.epoch}", granted.epoch, 99)

    def open(
        self, session: Session, model: dict[str, torch.Tensor], only: tuple[str, ...] | None = None
    ) -> None:
        """Its word to open."""
        self.receiver.open(session, self.receiver.status.incarnation, *asked(model, only), SOON)

    def generates(self) -> bool:
        """Whether generation is admitted."""
        return generates(self.receiver.gate)

    def is_out(self) -> bool:
        """Whether it is quarantined, and says so."""
        status = self.receiver.status
        return (status.state, status.version, self.generates()) == (EngineState.Quarantined, None, False)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens on another thread."""
    assert eventually(condition), "it did not happen"


def asked(model: dict[str, torch.Tensor], only: tuple[str, ...] | None = None) -> tuple[Plan, Expectation]:
    """What an open brings."""
    given = TorchWeights.of(model, only=only)
    plan = given.plan(1 << 20)
    digest = given.digest(part_of_version(99, 32))
    return plan, Expectation(plan.fingerprint, len(plan.tensors), plan.nbytes, len(plan.buckets), digest)


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """One that stages unless something else is said."""
    engine = Served(stages=getattr(request, "param", True))
    yield engine
    engine.sync.close()


IN_BOTH_WAYS = pytest.mark.parametrize("served", [True, False], ids=["stages", "in place"], indirect=True)


@IN_BOTH_WAYS
def test_it_sees_that_when_a_plan_does_not_fit(served: Served) -> None:
    """Its trainer hears whose fault it is; nobody generates any more, until a round has brought it back."""
    served.lose()
    assert served.generates(), "nobody has looked yet"
    with pytest.raises(WeightsGone, match="no longer what its last commit was written to"):
        served.open(served.session(), weights(1.0))
    assert served.is_out()
    served.held["a"] = torch.zeros(8)
    served.works(2.0)
    assert served.generates()


@IN_BOTH_WAYS
def test_it_sees_that_when_it_is_asked_what_it_is(served: Served) -> None:
    """An abort of a session that it never had, for example."""
    assert served.receiver.abort(served.session()) is Answer.reverted
    assert served.generates()
    served.lose()
    assert served.receiver.abort(served.session()) is Answer.torn
    assert served.is_out()
    assert served.receiver.abort(served.session()) is Answer.torn
    served.held["a"] = torch.zeros(8)
    served.works(2.0)
    assert served.receiver.abort(served.session()) is Answer.reverted


@IN_BOTH_WAYS
def test_a_plan_that_does_not_fit_an_engine_that_is_whole_changes_nothing(served: Served) -> None:
    """It is the trainer's mistake."""
    with pytest.raises(PlanError):
        served.open(served.session(), weights(1.0, c=torch.zeros(1)))
    assert served.generates()
    assert (served.receiver.state, served.receiver.version) == (EngineState.Serving, 0)


def test_who_is_inside_goes_on(served: Served) -> None:
    """A generation that has begun is not waited for, and nobody new is let in."""
    served.lose()
    with served.receiver.gate.admit():
        with pytest.raises(WeightsGone):
            served.open(served.session(), weights(1.0))
        assert served.receiver.gate.inside == 1
        assert not served.generates()
    assert served.is_out()


@IN_BOTH_WAYS
def test_a_session_that_is_open_may_still_bring_them_back(served: Served) -> None:
    """It goes on; if it ends without a commit, the engine is out."""
    first = served.session()
    served.open(first, weights(1.0))
    served.lose()
    with pytest.raises(WeightsGone):
        served.open(served.session(), weights(1.0))
    assert served.receiver.state is EngineState.Paused
    assert served.receiver.abort(first) is Answer.torn
    assert served.is_out()


def test_a_model_that_cannot_be_looked_at_is_aborted_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """The engine's own code raises: that is written down, and the answer is what the session left."""

    class Model(nn.Linear):
        broken = False

        def state_dict(self, *args: Any, **more: Any) -> Any:
            if self.broken:
                raise RuntimeError("somebody else is at it")
            return super().state_dict(*args, **more)

    model = Model(2, 2)
    receiver = receiver_for(model, "e")
    with WeightSync([LocalEngine(receiver)], "memory", policy=Policy(deadline=SOON)) as sync:
        sync.begin(0, nn.Linear(2, 2)).wait().require()
        Model.broken = True
        assert receiver.abort(Session("late", 1 << 62, 7)) is Answer.reverted
        assert "somebody else is at it" in caplog.text


def test_who_sleeps_is_not_looked_at() -> None:
    """Its memory may be elsewhere, which is no loss."""
    held, asleep = weights(-1.0), threading.Event()
    receiver = receiver_for(held, "e", asleep=asleep.is_set)
    with WeightSync([LocalEngine(receiver)], "memory", policy=Policy(deadline=SOON)) as sync:
        sync.begin(0, weights(0.0)).wait().require()
        asleep.set()
        held["a"] = torch.zeros(0)
        assert receiver.abort(Session("late", 1 << 62, 7)) is Answer.reverted
        asleep.clear()
        assert receiver.abort(Session("later", (1 << 62) + 1, 7)) is Answer.torn


def test_who_naps_while_it_is_looked_at_is_whole(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory was elsewhere for that moment, and is back."""
    lost = KnownPlans.lost
    naps = iter([True, False])

    def napping(plans: KnownPlans, sink: Any) -> str:
        whole, served.held["a"] = served.held["a"], torch.zeros(0) if next(naps, False) else served.held["a"]
        try:
            return lost(plans, sink)
        finally:
            served.held["a"] = whole

    monkeypatch.setattr(KnownPlans, "lost", napping)
    assert served.receiver.abort(served.session()) is Answer.reverted
    assert next(naps, None) is None, "it was looked at twice"


# -- a part of the weights ----------------------------------------------------------------------------------


def part(served: Served, value: float, *only: str, **other: torch.Tensor) -> RoundResult:
    """A round of what ``only`` chooses."""
    policy = Policy(deadline=SOON, only=only)
    with WeightSync([LocalEngine(served.receiver)], "memory", policy=policy, lock=served.lock) as sync:
        return sync.begin(int(value), weights(value, **other)).wait()


@IN_BOTH_WAYS
def test_a_part_leaves_the_rest_as_it_was(served: Served) -> None:
    """Also if it brings names that the last commit of everything knew nothing of, as an adapter does."""
    served.held["x.lora_A"] = torch.zeros(2)
    part(served, 1.0, "*lora_A", **{"x.lora_A": torch.ones(2)}).require()
    assert served.receiver.abort(served.session()) is Answer.reverted
    served.held["x.lora_A"] = torch.zeros(9)
    assert served.receiver.abort(served.session()) is Answer.torn, "that is a part of what was left"


@IN_BOTH_WAYS
def test_the_rest_may_be_what_is_lost(served: Served) -> None:
    """Beside a part that is as it was."""
    part(served, 1.0, "b").require()
    served.lose()
    assert served.receiver.abort(served.session()) is Answer.torn


@IN_BOTH_WAYS
def test_a_part_brings_back_no_more_than_it_is(served: Served) -> None:
    """Whoever lost something else stays out, until a round brings everything."""
    served.lose()
    assert served.receiver.abort(served.session()) is Answer.torn
    result = part(served, 1.0, "b")
    assert isinstance(result.error, WeightsGone)
    assert served.is_out()
    served.held["a"] = torch.zeros(8)
    served.works(2.0)
    assert served.generates()


@IN_BOTH_WAYS
def test_parts_alone_are_compared_with_what_they_left(served: Served) -> None:
    """In place, an open marks what it is about to write; that is no loss if nothing was written."""
    part(served, 1.0, "b").require()
    late = served.session()
    served.open(late, weights(2.0), ("a",))
    assert served.receiver.abort(late) is Answer.reverted
    assert served.held["a"].unique().tolist() == [0.0]


# -- whose turn it is ---------------------------------------------------------------------------------------


def test_it_is_looked_at_while_nothing_else_is_decided(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a commit that exchanges tensors one by one, it would look as if some were gone."""
    lost, turns = KnownPlans.lost, []

    def looks(plans: KnownPlans, sink: Any) -> str:
        turns.append(served.receiver._rank._turn.locked())
        return lost(plans, sink)

    monkeypatch.setattr(KnownPlans, "lost", looks)
    served.receiver.abort(served.session())
    with pytest.raises(PlanError):
        served.open(served.session(), weights(1.0, c=torch.zeros(1)))
    assert turns == [True, True]


def test_a_pause_that_does_not_come_about_lets_nobody_in(served: Served) -> None:
    """The weights are seen to be lost while an open waits for a generation, and that takes too long."""
    late, soon = served.session(), served.session()
    with served.receiver.gate.admit():
        opening = spawn("open", served.receiver.open, soon, served.receiver.status.incarnation,
                        *asked(weights(1.0)), 0.5)  # fmt: skip
        until(lambda: not served.receiver.gate._open)
        served.lose()
        assert served.receiver.abort(late) is Answer.torn
        assert isinstance(opening.exception(SOON), EngineSilent)
    assert served.is_out()


@pytest.mark.parametrize("swaps", [False, True], ids=["stages", "swaps"])
def test_to_look_leaves_no_trace(*, swaps: bool) -> None:
    """A late abort between the check of an open and its session: the sink prepares for the right plan."""
    held, lock = weights(-1.0), LocalLock()
    receiver = receiver_for(held, "e", swaps=swaps)
    with WeightSync([LocalEngine(receiver)], "memory", policy=Policy(deadline=SOON), lock=lock) as sync:
        sync.begin(0, weights(0.0)).wait().require()
        some = Policy(deadline=SOON, only=("b",))
        with WeightSync([LocalEngine(receiver)], "memory", policy=some, lock=lock) as other:
            with receiver.gate.admit():
                pending = other.begin(1, weights(1.0))
                until(lambda: not receiver.gate._open)
                assert receiver.abort(Session("over", 1, 0)) is Answer.reverted
            pending.wait().require()
        for value in (2.0, 3.0):
            sync.begin(int(value), weights(value)).wait().require()
            assert held["a"].unique().tolist() == [value]
