"""docs/outcomes.md is what rounds really come to: every line is run anew, checked, and compared."""

from collections.abc import Callable
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from casekit import outcomes
from casekit.bench import SENDING, Bench, quick, threads
from casekit.outcomes import FAULTS, LIMIT, POLICIES, SCENARIOS, Row, Scenario, outcome
from casekit.outcomes_page import page, rows
from casekit.scripts import Injected, Raise
from casekit.tensors import state
from casekit.wrapped import Steps, Tripwire
from weightsync.fsm.policy import Policy
from weightsync.fsm.states import Disposition, State
from weightsync.joining import transport_for

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "outcomes.md"
TRAINER_KNOWS_NOTHING = {
    "Awaiting: the transport is silent, collecting receipts",
    "Failed: the trainer is stopped until its lease is over, at its beginning",
}
"""Where engines are quarantined that nothing befell: they cannot be asked in time what they are."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_one_thing_goes_wrong_in_one_state(scenario: Scenario, policy: str) -> None:
    """The round ends in time, keeps its promises, and says what is true; the next one reaches everybody."""
    row = outcome(scenario, policy)
    assert row.seconds < LIMIT
    told = row.outcome != "nobody is told"
    assert (row.path[-1] == State.Released.name) is told
    assert row.ok is (told and not row.error)
    assert (
        row.published == ("yes" if any(each.endswith("new") for each in row.engines) else "no") or not row.ok
    )
    assert row.lock in ("given back", "its lease ended", "was not granted", "was gone before")
    hit = scenario.fault.startswith("an engine")
    if hit and scenario.state is not State.Failed:
        assert row.outcome == ("partial" if policy == "quarantine" else "failed")
        assert row.blamed == ("" if policy == "quarantine" else "e0"), "somebody else is blamed"
        assert row.engines[1] == f"e1 {'new' if row.published == 'yes' or 'Cleaning' in row.path else 'old'}"
    misfit = scenario.fault == "the weights do not fit"
    if misfit:
        alone = scenario.where == "one engine" and policy == "quarantine"
        assert row.blamed == ("" if alone else "e0"), "who the weights do not fit has to be named"
        assert row.engines == (("e0 quarantined", "e1 new") if alone else ("e0 old", "e1 old"))
    if not hit and not misfit and str(scenario) not in TRAINER_KNOWS_NOTHING:
        assert row.blamed == "", "an engine is blamed for what it did not do"
        assert {each.split()[1] for each in row.engines} <= {"old", "new"}, "a whole engine is quarantined"


def test_the_page_is_what_the_rounds_say() -> None:
    """Word by word. Whoever has changed that looks at the difference, and runs the target."""
    held, told = PAGE.read_text(encoding="utf-8").splitlines(), page(rows()).splitlines()
    changed = list(unified_diff(held, told, "docs/outcomes.md", "the rounds", n=0, lineterm=""))
    assert not changed, "\n".join(
        ["docs/outcomes.md is not what rounds come to: run `make outcomes`", *changed]
    )


def test_every_kind_of_fault_is_tried() -> None:
    """And, of whatever can befall anybody at any time, in every state."""
    assert {scenario.state for scenario in SCENARIOS} == set(State) - {State.Released}
    words = ("raises", "silent", "lost", "killed", "other bytes", "cancelled", "lease", "host dies", "anew")
    assert [word for word in words if not any(word in fault for fault in FAULTS)] == []
    deeds = [scenario.fault for scenario in SCENARIOS if scenario.deed]
    assert {deeds.count(fault) for fault in deeds} == {len(State) - 1}


def test_a_line_that_differs_is_noticed() -> None:
    """One word of one row changes the page."""
    seen = rows()
    scenario = SCENARIOS[0]
    other = {**seen, scenario: {**seen[scenario], "fail": replace(seen[scenario]["fail"], blamed="e1")}}
    assert page(other) != page(seen)


@pytest.mark.mutation
def test_a_driver_that_decides_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quorum that is counted wrongly changes what the page says."""
    outcomes._played.cache_clear()
    monkeypatch.setattr(Policy, "quorum_of", lambda self, engines: engines)
    try:
        row = outcome(SCENARIOS[0], "quarantine")
    finally:
        outcomes._played.cache_clear()
    assert row.outcome == "failed"
    assert f"told to open | quarantine | {' > '.join(row.path)}" not in PAGE.read_text(encoding="utf-8")


# -- the same in threads ------------------------------------------------------------------------------------

Arm = Callable[[Bench, Tripwire, Steps, Any], None]
REAL: dict[str, Arm] = {
    "Locked: an engine raises, told to open": lambda bench, wire, hook, boom: bench.engines["e0"].arm(
        "open", boom
    ),
    "Broadcasting: an engine raises, at bucket 1": lambda bench, wire, hook, boom: bench.engines["e0"].arm(
        "apply", boom, 1
    ),
    "Cleaning: an engine raises, told to commit": lambda bench, wire, hook, boom: bench.engines["e0"].arm(
        "commit", boom
    ),
    "Cleaning: an engine raises, told to resume": lambda bench, wire, hook, boom: bench.engines["e0"].arm(
        "resume", boom
    ),
    "Locked: the transport raises, opening": lambda bench, wire, hook, boom: wire.arm("open", boom),
    "Broadcasting: the transport raises, at bucket 1": lambda bench, wire, hook, boom: wire.arm(
        "bucket_sent", boom, skip=1
    ),
    "Awaiting: the transport raises, collecting receipts": lambda bench, wire, hook, boom: wire.arm(
        "collect", boom
    ),
    "Cleaning: the transport raises, cleaning up": lambda bench, wire, hook, boom: wire.arm("clean", boom),
    "Locked: a handler raises, getting ready": lambda bench, wire, hook, boom: hook.arm("prepare", boom),
    "Cleaning: a handler raises, cleaning up": lambda bench, wire, hook, boom: hook.arm("clean", boom),
}
SHORT = {
    Disposition.serving_new: "new",
    Disposition.serving_old: "old",
    Disposition.quarantined: "quarantined",
}


@pytest.mark.parametrize(("policy", "stages"), [("quarantine", True), ("fail", False)])
@pytest.mark.parametrize("name", REAL)
def test_the_same_in_threads(name: str, policy: str, stages: bool) -> None:
    """A real round with real engines and the memory transport ends as the page says."""
    row = outcome(next(scenario for scenario in SCENARIOS if str(scenario) == name), policy)
    options = {} if policy == "fail" else {"on_engine_failure": "quarantine", "quorum": 1}
    wire, hook = Tripwire(transport_for("memory")), Steps()
    with Bench(threads("e0", "e1", stages=stages), wire, policy=quick(**options), handlers=[hook]) as bench:
        bench.works()
        REAL[name](bench, wire, hook, Raise(Injected(name)))
        result = bench.endures(state(2))
        assert _seen(result) == _page(row, stages)
        bench.works()


def _seen(result: Any) -> tuple[Any, ...]:
    engines = tuple(f"{row.engine} {SHORT[row.disposition]}" for row in result.engines)
    return (
        result.outcome.name,
        result.ok,
        result.published,
        engines,
        result.culprit or "",
        _plain(result.path),
    )


def _page(row: Row, stages: bool) -> tuple[Any, ...]:
    engines = row.engines if stages else row.in_place
    return row.outcome, row.ok, row.published, engines, row.blamed, _plain(row.path)


def _plain(path: tuple[str, ...]) -> tuple[str, ...]:
    """From Cleaning or Failed on: threads may be further with their sending when an engine fails."""
    return tuple(each for each in path if each not in ("Idle", "Locked", *SENDING))
