"""Chaos: engines, trainer and keeper are killed, stopped, slowed and cut off, round after round.

``WEIGHTSYNC_CHAOS_SEED=N`` runs what a failure has told, ``make chaos`` a long run.
"""

import os
import secrets
import signal
import subprocess
import sys
from asyncio import CancelledError
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from casekit.levels import Usage, eventually
from casekit.scripts import Injected
from chaoskit.causes import check
from chaoskit.deeds import end, freeze, frozen
from chaoskit.faults import KINDS, LEAST, Fault, draw
from chaoskit.growth import LEAST_ROUNDS, Growth
from chaoskit.runner import ENGINES, run
from weightsync.fsm.errors import EngineGone, EngineSilent, RoundError
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Outcome
from weightsync.handlers.receiver import FAULT_POINTS

ROUNDS = 30


def seed() -> int:
    """What was asked for; in CI always the same, so that a red run is red for everybody; else a new one."""
    asked = os.environ.get("WEIGHTSYNC_CHAOS_SEED")
    if asked is not None:
        return int(asked)
    return 1 if os.environ.get("CI") else secrets.randbelow(1_000_000)


def test_a_seed_says_everything() -> None:
    """The same faults come again; each kind comes often enough, at points that there are."""
    assert draw(7, ROUNDS, ENGINES) == draw(7, ROUNDS, ENGINES) != draw(8, ROUNDS, ENGINES)
    for number in range(200):
        plan = draw(number, ROUNDS, ENGINES)
        alone = Counter(faults[0].kind for faults in plan if len(faults) == 1)
        assert len(plan) == ROUNDS
        assert min(alone[kind] for kind in KINDS) >= LEAST
        for fault in (fault for faults in plan for fault in faults):
            assert not fault.kind.startswith("engine") or fault.point in FAULT_POINTS
    late = Counter(fault.kind for faults in draw(1, 500, ENGINES) for fault in faults)
    assert min(late[kind] for kind in KINDS) > 20


NAMES = ["c0", "c1", "c2"]
RAISED = Fault("engine-raise", "apply", 1, 2)
FAILED = RoundResult(
    round="r1", step=1, version=1, epoch=1, attempts=1, outcome=Outcome.failed, published="no", engines=(),
    path=("Idle", "Locked", "Broadcasting", "Failed", "Released"), seconds={}, error=Injected(str(RAISED)),
    culprit="c1", bucket=2, failed_in="Broadcasting",
)  # fmt: skip


def test_a_round_that_failed_by_what_happened_in_it() -> None:
    """Also if something else happened too, or if it worked all the same."""
    check(FAILED, [RAISED], NAMES, {})
    check(FAILED, [Fault("engine-kill", "open", 0), RAISED], NAMES, {})
    check(replace(FAILED, outcome=Outcome.complete, error=None), [RAISED], NAMES, {})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"error": RoundError("something went wrong")}, "raised another one"),
        ({"error": Injected("another one")}, "raised another one"),
        ({"culprit": "c0"}, "c0 is blamed"),
        ({"culprit": None}, "None is blamed"),
        ({"bucket": 1}, "at bucket 1"),
        ({"failed_in": "Cleaning"}, "in Cleaning"),
        ({"failed_in": "Awaiting"}, "by its path"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_another_error_is_noticed(other: dict[str, object], words: str) -> None:
    """Its kind, its text, whom it blames, and where."""
    with pytest.raises(AssertionError, match=words):
        check(replace(FAILED, **other), [RAISED], NAMES, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "fits", "not_so"),
    [
        (Fault("engine-kill", "open", 1), EngineGone("engine c1 ..."), EngineSilent("engine c1 ...")),
        (Fault("engine-stop", "open", 1), EngineSilent("engine c1 ..."), EngineSilent("engine c2 ...")),
        (Fault("cancel", "open"), CancelledError("the round was cancelled"), CancelledError("no")),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_each_fault_has_errors_of_its_own(fault: Fault, fits: BaseException, not_so: BaseException) -> None:
    """By which no other kind of them explains a round."""
    name = NAMES[fault.engine] if fault.engine >= 0 else None
    check(replace(FAILED, error=fits, culprit=name), [fault], NAMES, {})
    with pytest.raises(AssertionError, match="is not what"):
        check(replace(FAILED, error=not_so, culprit=name), [fault], NAMES, {})


def test_what_this_process_raised_is_the_very_object() -> None:
    """One that looks the same is another one; and nothing fails by itself."""
    fault = Fault("trainer-raise", "bucket_sent", bucket=2)
    error = Injected(str(fault))
    result = replace(FAILED, error=error, culprit=None)
    check(result, [fault], NAMES, {fault: error})
    with pytest.raises(AssertionError, match="not the very object"):
        check(result, [fault], NAMES, {fault: Injected(str(fault))})
    with pytest.raises(AssertionError, match="nothing happened"):
        check(result, [], NAMES, {})


def held(
    process: int, descriptors: int = 50, python: int = 9, threads: int = 30, megabytes: float = 300.0
) -> Usage:
    """What some process may hold."""
    return Usage(process, Counter(socket=descriptors), python, threads, megabytes)


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        ({"descriptors": 1}, "4 more descriptors"),
        ({"python": 1}, "4 more Python threads"),
        ({"threads": 2}, "8 more threads"),
        ({"megabytes": 10}, "40 more MB"),
    ],
    ids=["descriptors", "Python threads", "threads", "memory"],
)
def test_what_leaks_a_little_each_time_shows(leak: dict[str, int], words: str) -> None:
    """Not at once, but soon; not in a process that is new each time."""
    base = {"descriptors": 50, "python": 9, "threads": 30, "megabytes": 300}
    leaky = [{what: base[what] + each * number for what, each in leak.items()} for number in range(30)]
    growth = Growth()
    for more in leaky[:LEAST_ROUNDS]:
        growth.note({"c0": held(1, **more)}, 1)
    with pytest.raises(
        AssertionError, match=f"c0 leaks: after {LEAST_ROUNDS + 1} good rounds it holds {words}"
    ):
        growth.note({"c0": held(1, **leaky[LEAST_ROUNDS])}, 1)
    for process, more in enumerate(leaky):
        growth.note({"c1": held(process, **more)}, 1)


def test_what_comes_and_goes_is_no_leak() -> None:
    """The first round warms up; one moment counts for nothing; a line to each dead trainer may stay."""
    growth = Growth()
    for number in range(40):
        more = 20 * (number % 7 == 6) + number // 10
        growth.note({"c0": held(1, 50 * (number > 0) + more, 9, 30 - number % 3)}, trainers=1 + number // 10)
    assert len(growth.lines()) == 1


def test_what_was_stopped_for_a_while_goes_on_without_whoever_stopped_it(tmp_path: Path) -> None:
    """Ray ends the whole process group of a worker that died, and a frozen keeper would stay so for ever."""
    script = tmp_path / "stops_and_dies.py"
    script.write_text(
        "import os, signal, sys\n"
        "from casekit.levels import eventually\n"
        "from chaoskit.deeds import freeze, frozen\n"
        "freeze(int(sys.argv[1]), 1.0)\n"
        "assert eventually(lambda: frozen(int(sys.argv[1])))\n"
        "os.killpg(0, signal.SIGKILL)\n"
    )
    with subprocess.Popen(["sleep", "60"]) as stopped:
        try:
            paths = os.pathsep.join(sys.path)
            died = subprocess.run(
                [sys.executable, script, str(stopped.pid)], start_new_session=True, check=False,
                env={**os.environ, "PYTHONPATH": paths}, timeout=60,
            )  # fmt: skip
            assert died.returncode == -signal.SIGKILL
            assert eventually(lambda: not frozen(stopped.pid)), "it is stopped for ever"
        finally:
            stopped.kill()


def test_one_process_may_be_hit_by_two_faults() -> None:
    """What is dead cannot be killed or stopped again, and that is no fault of the round."""
    with subprocess.Popen(["sleep", "60"]) as process:
        end(process.pid)
    end(process.pid)
    freeze(process.pid)


@pytest.mark.ray
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_round_ends_well(ray_cluster: None, tmp_path: Path) -> None:
    """Whatever happens in a round, the eight checks hold after it, and the next round is good."""
    chosen = seed()
    print(f"chaos: seed {chosen}; again: WEIGHTSYNC_CHAOS_SEED={chosen}")  # noqa: T201 - for whoever sees it fail
    report = run(chosen, ROUNDS, say=print, folder=tmp_path)
    print("\n".join(report.lines()))  # noqa: T201 - the same
    assert report.rounds == ROUNDS
    rare = [kind for kind in KINDS if report.fired[kind] < LEAST]
    assert not rare, f"these did not happen {LEAST} times: {rare}; seed {chosen}"
