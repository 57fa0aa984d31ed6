"""Every misfortune at every call: whatever goes wrong, a round keeps its promises, and the next one works.

What is checked after each round is in ``weightsync.testing.promises``: it ended in Released by its deadline,
once; its log replays; nothing was in flight when the lock was given back, and the lock is free; each engine
is what the result says, whole or quarantined, in no session; what is said of the publication is true; the
first error is the very object; no honest partner was refused.
"""

import random
import time
from collections.abc import Iterator
from typing import Any, Literal, cast

import pytest

from weightsync.fsm.calls import ENGINE_ACTS, Act
from weightsync.fsm.errors import EngineSilent, PlanError, WeightsGone
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, EngineState, Outcome
from weightsync.testing.promises import broken, broken_at_end
from weightsync.testing.simulation import Fault, Injected, Simulation, run_together

Kind = Literal["raise", "hang", "lost", "die"]
KINDS: tuple[Kind, ...] = ("raise", "hang", "lost", "die")
LEASE = 2.0
ALL_OF_THE_LOCK = 7 / 3 * LEASE
GO_ON = Policy(deadline=4.0, lease=LEASE, on_engine_failure="quarantine", quorum=1)
ALL = Policy(deadline=4.0, lease=LEASE)


def check_next(earlier: Simulation, **options: Any) -> None:
    """A clean round right after reaches every engine that is alive."""
    following = Simulation(earlier=earlier, policy=GO_ON, **options)
    result = following.run()
    assert broken(following, result) == []
    alive = {name for name, partner in earlier.world.partners.items() if partner.alive}
    assert set(result.serving(Disposition.serving_new)) == alive
    assert result.published == ("yes" if alive else "no")
    assert following.round.facts.version >= earlier.round.facts.version


UNFIT = "the plan does not fit"


@pytest.mark.parametrize("policy", [ALL, GO_ON], ids=["all", "quorum"])
@pytest.mark.parametrize("inplace", [(), ("e0",)], ids=["staging", "in place"])
def test_a_plan_that_fits_nobody_costs_nobody(policy: Policy, inplace: tuple[str, ...]) -> None:
    """The trainer's mistake takes no engine out of routing, whatever the quorum; the first error says it."""
    simulation = Simulation(engines=3, policy=policy, inplace=inplace, faults=[Fault(Act.plan, "unfit")])
    result = simulation.run()
    assert broken(simulation, result) == []
    assert result.path == ("Idle", "Locked", "Failed", "Released")
    assert set(result.serving(Disposition.serving_old)) == {"e0", "e1", "e2"}
    assert isinstance(result.error, PlanError)
    assert UNFIT in str(result.error)
    assert (result.culprit, result.failed_in) == (str(result.error).split()[-1].split("@")[0], "Locked")
    check_next(simulation)


def test_an_engine_that_the_plan_does_not_fit_is_out_if_the_others_are_enough() -> None:
    """Then it is the engine that is built wrong."""
    simulation = Simulation(engines=3, policy=GO_ON, faults=[Fault(Act.open, "unfit", "e1")])
    result = simulation.run()
    assert broken(simulation, result) == []
    assert result.outcome is Outcome.partial
    assert set(result.serving(Disposition.serving_new)) == {"e0", "e2"}
    assert result.serving(Disposition.quarantined) == ("e1",)
    assert isinstance(next(row for row in result.engines if row.engine == "e1").error, PlanError)


def test_the_others_are_not_enough_when_one_of_them_dies() -> None:
    """The one that is dead is lost; the one that the plan does not fit keeps what it has."""
    policy = Policy(deadline=4.0, lease=LEASE, on_engine_failure="quarantine", quorum=2)
    faults = [Fault(Act.open, "die", "e0"), Fault(Act.open, "unfit", "e1")]
    for seed in range(4):
        simulation = Simulation(engines=3, policy=policy, seed=seed, faults=faults)
        result = simulation.run()
        assert broken(simulation, result) == []
        assert set(result.serving(Disposition.serving_old)) == {"e1", "e2"}
        assert (result.serving(Disposition.quarantined), result.published) == (("e0",), "no")


@pytest.mark.parametrize("policy", [ALL, GO_ON], ids=["all", "quorum"])
def test_who_does_not_answer_when_the_plan_fits_nobody_is_out_for_its_silence(policy: Policy) -> None:
    """Its row names what put it out, and not what it had said of the plan before."""
    faults = [Fault(Act.plan, "unfit"), Fault(Act.abort, "hang", "e1")]
    simulation = Simulation(engines=3, policy=policy, faults=faults)
    result = simulation.run()
    assert broken(simulation, result) == []
    assert isinstance(result.error, PlanError)
    assert set(result.serving(Disposition.serving_old)) == {"e0", "e2"}
    row = next(row for row in result.engines if row.engine == "e1")
    assert (row.disposition, type(row.error)) == (Disposition.quarantined, EngineSilent)


@pytest.mark.parametrize("policy", [ALL, GO_ON], ids=["all", "quorum"])
@pytest.mark.parametrize("nobody", [False, True], ids=["it fits", "it fits nobody"])
def test_who_has_lost_its_weights_is_out_whatever_else_is_wrong(policy: Policy, nobody: bool) -> None:
    """Whoever is the first to say what is wrong: this engine serves nobody until the next good round."""
    faults = [Fault(Act.open, "gone", "e0"), *([Fault(Act.plan, "unfit")] if nobody else [])]
    kinds = set()
    for seed in range(8):
        simulation = Simulation(engines=3, policy=policy, seed=seed, faults=faults)
        result = simulation.run()
        assert broken(simulation, result) == []
        assert result.serving(Disposition.quarantined) == ("e0",)
        assert len(result.serving(Disposition.serving_old) + result.serving(Disposition.serving_new)) == 2
        kinds.add(type(result.error))
    partial = type(None)  # what is wrong with one engine is in its row
    assert kinds == {PlanError if nobody else WeightsGone if policy is ALL else partial}


@pytest.mark.parametrize("policy", [ALL, GO_ON], ids=["all", "quorum"])
@pytest.mark.parametrize("inplace", [(), ("e0",)], ids=["staging", "in place"])
def test_an_older_session_is_over_when_a_later_round_fails(policy: Policy, inplace: tuple[str, ...]) -> None:
    """Its trainer lost sight of e0, which stays in the session; the next one's weights fit nobody."""
    deaf = [
        Fault(Act.broadcast, "raise", bucket=1), Fault(Act.abort, "hang", "e0"),
        Fault(Act.fence, "hang", "e0"),
    ]  # fmt: skip
    first = Simulation(policy=policy, inplace=inplace, faults=deaf, owner="one")
    first.run()
    e0 = first.world.partners["e0"]
    assert e0.machine.state is EngineState.Receiving, "or there is nothing to see"
    then = Simulation(policy=policy, earlier=first, owner="other", faults=[Fault(Act.plan, "unfit")])
    result = then.run()
    torn = bool(inplace)
    assert then.world.partners["e0"].machine.state is EngineState["Quarantined" if torn else "Serving"]
    assert ("e0" in result.serving(Disposition.serving_old)) is not torn
    assert broken(then, result) == []


def check_plain_error(fault: Fault, result: RoundResult) -> None:
    """One thing went wrong: it is the error, unless the round was told to go on without the engine."""
    if (
        result.outcome is Outcome.failed
        and fault.kind == "raise"
        and fault.act not in (Act.acquire, Act.renew)
    ):
        assert isinstance(result.error, Injected)
        assert fault.act.name in str(result.error)


@pytest.mark.parametrize("act", Act, ids=lambda act: act.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [ALL, GO_ON], ids=["all", "quorum"])
@pytest.mark.parametrize("inplace", [(), ("e0",)], ids=["staging", "in place"])
def test_one_thing_goes_wrong(act: Act, kind: Kind, policy: Policy, inplace: tuple[str, ...]) -> None:
    """In each kind of call, in each way."""
    fault = Fault(act, kind, "e0" if act in ENGINE_ACTS else None)
    service = {Act.release: LEASE, Act.acquire: ALL_OF_THE_LOCK if kind == "die" else 0.0}
    for seed in range(2):
        simulation = Simulation(policy=policy, inplace=inplace, faults=[fault], executors=2, seed=seed)
        result = simulation.run()
        assert broken(simulation, result, slack=service.get(act, 0.0)) == []
        check_plain_error(fault, result)
        check_next(simulation, seed=seed)


@pytest.mark.parametrize("bucket", [0, 1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "corrupt"])
@pytest.mark.parametrize("policy", [ALL, GO_ON], ids=["all", "quorum"])
@pytest.mark.parametrize("inplace", [(), ("e0",)], ids=["staging", "in place"])
def test_one_engine_fails_at_a_bucket(
    bucket: int, kind: Any, policy: Policy, inplace: tuple[str, ...]
) -> None:
    """An error, silence, death, or other bytes: with a quorum the rest goes on without it."""
    for act in (Act.broadcast, Act.collect):
        fault = Fault(act, kind, "e0", bucket)
        simulation = Simulation(policy=policy, inplace=inplace, faults=[fault], seed=bucket)
        result = simulation.run()
        assert broken(simulation, result) == []
        assert result.outcome is (Outcome.partial if policy is GO_ON else Outcome.failed)
        assert result.engines[0].disposition is Disposition.quarantined
        check_next(simulation)


def any_fault(chance: random.Random) -> Fault:
    """A misfortune at any call of anybody."""
    act, kind = chance.choice(tuple(Act)), cast("Any", chance.choice(KINDS))
    if act in (Act.broadcast, Act.collect):
        engine, bucket = chance.choice(("e0", "e1", "e2", None)), chance.choice((0, 1, 2, None))
        corrupt = act is Act.broadcast and engine is not None and chance.random() < 0.3
        return Fault(act, "corrupt" if corrupt else kind, engine, bucket)
    if act in ENGINE_ACTS:
        return Fault(act, kind, chance.choice(("e0", "e1", "e2", None)))
    return Fault(act, kind, bucket=chance.choice((0, 1, None)))


def any_worlds(seed: int, seconds: float, most: int) -> Iterator[tuple[random.Random, dict[str, Any]]]:
    """Options of simulations, drawn at random, for a limited time."""
    end = time.monotonic() + seconds
    for number in range(most):
        if time.monotonic() > end and number >= most / 20:
            return
        chance = random.Random(seed * 1_000_003 + number)
        options: dict[str, Any] = {
            "engines": 3,
            "inplace": chance.choice(((), ("e0",), ("e0", "e1", "e2"))),
            "faults": [any_fault(chance) for _ in range(chance.choice((1, 2, 2, 2, 3)))],
            "executors": 2,
            "policy": chance.choice((ALL, GO_ON)),
            "seed": chance.randrange(1 << 30),
            "jitter": chance.choice((0.0, 0.0, 0.3, 1.5)),
            "rival": chance.choice((0.0, 0.0, 0.0, 4 * chance.random())),
        }
        yield chance, options


@pytest.mark.slow
def test_several_things_go_wrong() -> None:
    """Two or three misfortunes, slow messages, somebody else's lock, a cancellation: a sample of them."""
    for chance, options in any_worlds(seed=1, seconds=9.0, most=1500):
        cancel_at = chance.choice((None, None, 0.15 * chance.random()))
        simulation = Simulation(**options)
        result = simulation.run(cancel_at)
        found = broken(simulation, result, slack=ALL_OF_THE_LOCK)
        assert found == [], f"{found} in {options}, cancelled at {cancel_at}: {result.summary()}"
        check_next(simulation)


def test_the_next_round_begins_while_the_last_one_still_has_words_under_way() -> None:
    """Late frames, orders and answers of a round that is over meet the sessions of the one that runs."""
    for chance, options in any_worlds(seed=2, seconds=4.0, most=600):
        first = Simulation(**options)
        result = first.run()
        assert broken_at_end(first, result, slack=ALL_OF_THE_LOCK) == []
        second = Simulation(earlier=first, policy=GO_ON, jitter=options["jitter"], faults=[any_fault(chance)])
        result = second.run()
        found = broken(second, result, slack=2 * ALL_OF_THE_LOCK)
        assert found == [], f"{found} in {options}: {result.summary()}"


def test_two_trainers_want_the_same_engines_at_the_same_time() -> None:
    """One lock, two rounds: whoever has the later epoch is whom the engines obey."""
    for chance, options in any_worlds(seed=3, seconds=4.0, most=600):
        one = Simulation(**options)
        two = Simulation(earlier=one, policy=GO_ON, jitter=options["jitter"], faults=[any_fault(chance)])
        results = run_together(one, two)
        later = max(zip(results, (one, two), strict=True), key=lambda pair: pair[0].epoch)[1]
        for simulation, result in zip((one, two), results, strict=True):
            assert broken_at_end(simulation, result, slack=2 * ALL_OF_THE_LOCK) == []
            if simulation is later and "Locked" in result.path:
                found = broken(simulation, result, slack=100.0)
                assert found == [], f"{found} in {options}: {result.summary()}"


def test_a_round_that_is_cancelled_at_any_time() -> None:
    """Every five milliseconds of a round: before the last receipt it fails, after it the round finishes."""
    outcomes = []
    for moment in range(30):
        simulation = Simulation(executors=2, seed=moment)
        result = simulation.run(cancel_at=0.005 * moment)
        assert broken(simulation, result) == []
        assert result.ok or str(result.error) == "cancelled"
        outcomes.append(result.ok)
        check_next(simulation)
    assert set(outcomes) == {True, False}
