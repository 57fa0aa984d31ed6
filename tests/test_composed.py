"""Two trainers, one lock, two engines: every misfortune at every step, and games that are drawn by lot."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from weightsync.cli import check, explore, main
from weightsync.fsm.errors import LeaseEnded
from weightsync.fsm.explore import chaos, small_round
from weightsync.fsm.states import Outcome, State
from weightsync.logfile import read
from weightsync.testing import composed
from weightsync.testing.composed import NEVER, WIDER, WORLDS, Composed, Owner, Setup
from weightsync.testing.deviations import KINDS, Deviation, possible
from weightsync.testing.exploring import Broken, Explored, explore_composed, rerun
from weightsync.testing.lots import log_lines, played
from weightsync.testing.snapshot import key
from weightsync.testing.watch import COMPOSED_PROMISES, Watch

pytestmark = pytest.mark.usefixtures("untraced")

TINY = Setup("one engine, one bucket", engines=1, buckets=1)

COUNTS: dict[str, tuple[int, int, int]] = {
    "one after the other, one engine is enough": (27859, 29445, 1586),
    "one after the other, both engines are needed": (28142, 29728, 1586),
    "at the same time, one engine is enough": (31451, 33302, 1851),
    "at the same time, both engines are needed": (31865, 33716, 1851),
    "one after the other, both engines stage": (27791, 29377, 1586),
    "at the same time, both engines load in place": (31487, 33338, 1851),
}
"""(states, transitions, misfortunes) of each world: exact, so that what gets lost shows."""


def run(system: Composed) -> Composed:
    """Follow the canonical schedule to the end; every promise is looked after."""
    watch = Watch(system)
    watch.before()
    while system.step():
        assert list(watch.look()) == []
        watch.before()
    assert list(watch.end()) == []
    return system


def until(system: Composed, owner: str, state: State) -> tuple[Composed, Owner]:
    """Go on until a trainer's round is in this state."""
    while True:
        for each in system.owners:
            if each.name == owner and each.simulation.round.state is state:
                return system, each
        assert system.step()


# -- every misfortune at every step -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("setup", WORLDS, ids=[setup.name for setup in WORLDS])
def test_no_promise_is_broken(setup: Setup) -> None:
    """Whatever goes wrong, and whenever; and the size of what was explored is known."""
    found = explore_composed(setup)
    assert not found.violations, "\n".join(found.lines())
    counts = (found.states, found.transitions, found.runs)
    assert counts == COUNTS[setup.name], "a change of the driver or the world? then of these"
    assert found.kinds.keys() == KINDS.keys(), "each kind of misfortune happens"


@pytest.mark.parametrize("setup", WIDER, ids=[setup.name for setup in WIDER])
def test_a_part_of_what_is_wider_breaks_no_promise(setup: Setup) -> None:
    """One engine, or three, for a few of the misfortunes; `weightsync check --wide` tries them all."""
    found = explore_composed(setup, part=(3, 10))
    assert not found.violations, "\n".join(found.lines())
    assert found.runs > 50


@pytest.mark.slow
def test_a_part_of_every_pair_breaks_no_promise() -> None:
    """Two misfortunes in one run, for a few of the first ones, with the smallest system."""
    found = explore_composed(TINY, depth=2, part=(100, 200))
    assert not found.violations, "\n".join(found.lines())
    assert found.runs > 800


def test_parts_are_the_whole() -> None:
    """What is explored side by side is what would be explored at once."""
    which = ("kill", "stop", "first")
    whole, kinds = explore_composed(TINY, kinds=which), Counter[str]()
    for part in range(3):
        kinds += explore_composed(TINY, kinds=which, part=(part, 3)).kinds
    assert kinds == whole.kinds


def test_every_end_is_reached() -> None:
    """What is explored ends in every way in which a round can end."""
    outcomes = set[Outcome]()
    for kind, what in (("alarm", "a e0"), ("cancel", "a"), ("kill", "e1")):
        system, _ = until(Composed(WORLDS[0]), "a", State.Broadcasting)
        system.step()
        system.step()
        Deviation(kind, what).bend(system)
        run(system)
        outcomes |= {owner.result.outcome for owner in system.owners if owner.result}
    assert outcomes == set(Outcome) - {Outcome.passed_over}, "a hand-over without a round has no end"


def test_the_snapshot_tells_moments_apart_and_knows_them_again() -> None:
    """The same choices lead to the same value; another moment, or another misfortune, to another one."""
    one, two = Composed(WORLDS[0]), Composed(WORLDS[0])
    seen = set()
    for _ in range(60):
        assert key(one) == key(two)
        seen.add(key(one))
        one.step()
        two.step()
    assert len(seen) == 60
    Deviation("kill", "e0").bend(one)
    assert key(one) != key(two)


def test_cutting_at_known_moments_hides_nothing() -> None:
    """A sample of what was cut, followed to its very end: no promise is broken there either."""
    chance = random.Random(5)
    for setup in WORLDS[:4]:
        for _ in range(12):
            system = Composed(setup)
            for _ in range(chance.randrange(80)):
                system.step()
            chance.choice(possible(system)).bend(system)
            run(system)


def test_a_violation_is_told_with_the_choices_that_lead_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the log of that very run can be made again."""
    monkeypatch.setattr(Watch, "_lock", lambda self: ["rest: made up"] if self._system.steps == 7 else [])
    found = explore_composed(TINY, until={"rest"}, kinds={"kill"})
    broken = found.violations["rest"]
    assert broken == Broken("rest", "rest: made up", (), 7)
    assert found.lines()[1] == "1 x rest: made up, in step 7"
    assert rerun(TINY, broken).steps == 7


# -- what could not be explored before ----------------------------------------------------------------------


def test_an_owner_that_was_stopped_is_refused_everywhere_when_it_goes_on() -> None:
    """The second trainer works meanwhile; what the first one still says changes no engine and no ledger."""
    system, first = until(Composed(WORLDS[0]), "a", State.Awaiting)
    Deviation("stop", "a").bend(system)
    run(system)
    second = system.owners[1]
    assert first.result is not None
    assert second.result is not None
    assert isinstance(first.result.error, LeaseEnded)
    assert (first.result.published, second.result.outcome) == ("no", Outcome.complete)
    assert system.world.ledger.epoch == second.result.epoch == 2


def test_an_owner_that_was_killed_costs_one_lease() -> None:
    """The one that waits gets the lock when it has ended, and no later."""
    system, _ = until(Composed(WORLDS[2]), "a", State.Broadcasting)
    died = system.world.clock.now()
    Deviation("kill", "a").bend(system)
    system, second = until(system, "b", State.Locked)
    assert system.world.clock.now() - died <= composed.LEASE + 0.01
    run(system)
    assert second.result is not None
    assert second.result.ok


def test_a_keeper_that_was_started_anew_grants_above_the_epoch_and_after_the_lease() -> None:
    """Whoever held the lock is unknown to it, and is refused; the next grant waits until no lease is left."""
    system, first = until(Composed(WORLDS[0]), "a", State.Awaiting)
    restarted = system.world.clock.now()
    Deviation("keeper").bend(system)
    system, second = until(system, "b", State.Locked)
    assert second.simulation.round.facts.epoch == 2
    assert system.world.clock.now() >= restarted + composed.LEASE
    run(system)
    assert first.result is not None


def test_an_engine_that_restarts_in_the_middle_is_not_marked_current() -> None:
    """Another incarnation takes no part in the round, whatever it says."""
    system, first = until(Composed(WORLDS[0]), "a", State.Awaiting)
    Deviation("restart", "e1").bend(system)
    run(system)
    assert first.result is not None
    rows = {row.engine: row for row in first.result.engines}
    assert (rows["e1"].disposition.name, rows["e1"].incarnation) == ("quarantined", "0")


# -- what exploring found -----------------------------------------------------------------------------------


def test_a_grant_that_comes_after_its_own_lease_is_given_back() -> None:
    """The request was long under way: by our clock its lease is over, by the keeper's it has just begun."""
    system = Composed(WORLDS[0])
    message, due = system.next()
    assert message is not None
    assert due < NEVER
    Deviation("late", str(message.number)).bend(system)
    run(system)
    closed = {each.ticket.owner: each.how.name for each in system.world.book.closed}
    assert closed["a"] == "RELEASED"


def test_a_receipt_of_another_round_is_no_bad_receipt() -> None:
    """It is counted and changes nothing; the round goes on with the engine it came from."""
    system, second = until(Composed(WORLDS[0]), "b", State.Awaiting)
    before = second.simulation.round.facts
    Deviation("old", "b").bend(system)
    assert second.simulation.round.facts == before
    assert second.simulation.driver.stale == 2
    run(system)
    assert second.result is not None
    assert second.result.outcome is Outcome.complete


# -- by lot -------------------------------------------------------------------------------------------------


def test_no_seed_breaks_a_promise() -> None:
    """Several misfortunes, slow messages, any order; `weightsync check --seeds 1000` plays more."""
    lots = [played(seed) for seed in range(250)]
    assert [(lot.seed, lot.broken) for lot in lots if lot.broken] == []
    assert {len(lot.story) for lot in lots} >= {0, 1, 2, 3, 4}


def test_the_same_seed_gives_the_same_log_in_every_process() -> None:
    """Byte for byte, whatever the order of sets there is."""
    asked = "from weightsync.testing.lots import played; print(*played(220).log, sep='\\n')"
    told = []
    for hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", asked],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            check=True,
            timeout=60,
        )
        told.append(done.stdout)
    here = "".join(f"{line}\n" for line in played(220).log).encode()
    assert told == [here, here]
    assert here != "".join(f"{line}\n" for line in played(221).log).encode()


# -- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest system is all there is to explore."""
    monkeypatch.setattr(composed, "WORLDS", (TINY,))


@pytest.mark.usefixtures("tiny")
def test_check_says_how_much_it_explored(capsys: Any) -> None:
    """Of each world and in all."""
    assert main(["check"]) == 0
    *_, world, total = capsys.readouterr().out.splitlines()
    assert world.startswith("two trainers, one engine, one bucket: ")
    assert "states, " in world
    assert "transitions, " in world
    assert total.startswith("in all: ")
    assert "0 promises broken" in total


def test_check_can_look_wider(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The wider systems, and the tables of three engines, come on top."""
    monkeypatch.setattr(composed, "WORLDS", ())
    monkeypatch.setattr(composed, "WIDER", (TINY,))
    monkeypatch.setattr(explore, "_explored", lambda job: Explored(job.setup))
    monkeypatch.setattr(check, "_explorations", list)
    monkeypatch.setattr(check, "_wide_explorations", lambda: [("three", lambda: chaos(small_round(1, 1)))])
    assert main(["check"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["check", "--wide"]) == 0
    told = capsys.readouterr().out
    assert "two trainers, one engine, one bucket: " in told
    assert "three: " in told


@pytest.mark.usefixtures("tiny")
def test_check_writes_the_log_of_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """A log that `weightsync log` and `weightsync diagram --trace` can show."""
    monkeypatch.setattr(Watch, "_lock", lambda self: ["P1 one owner: made up"] if self._late() else [])
    monkeypatch.setattr(
        Watch, "_late", lambda self: self._system.story and self._system.steps > 8, raising=False
    )
    assert main(["check", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "P1 one owner: made up" in printed
    assert "after step " in printed
    (path,) = tmp_path.iterdir()
    assert str(path) in printed
    assert read(path).bad == 0
    assert main(["log", str(path)]) == 0
    assert main(["log", str(path), "--round", "r1"]) == 0
    assert "injected" in capsys.readouterr().out
    assert main(["diagram", "--trace", str(path), "--output", str(tmp_path / "path.svg")]) == 0


def test_check_plays_seeds(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And shows what went wrong in one that breaks a promise, with the way to play it again."""
    assert main(["check", "--seeds", "20", "--seed", "7"]) == 0
    assert "20 seeds from 7: " in capsys.readouterr().out
    monkeypatch.setattr(Watch, "end", lambda self: ["rest: made up"])
    assert main(["check", "--seeds", "1", "--seed", "220", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "seed 220: rest: made up" in printed
    assert "again: weightsync check --seeds 1 --seed 220" in printed
    lines = (tmp_path / "seed-220.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines[:2]] == ["r1", "r2"]


def test_every_promise_has_a_name_and_every_kind_a_deed() -> None:
    """P1 to P10 are all there; the log of a system holds both rounds."""
    assert {f"P{number}" for number in range(1, 11)} <= {name.split()[0] for name in COMPOSED_PROMISES}
    system = run(Composed(TINY))
    assert {json.loads(line)["round"] for line in log_lines(system)} == {"r1", "r2"}
