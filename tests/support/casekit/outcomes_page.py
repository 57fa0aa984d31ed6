"""docs/outcomes.md, written from what ``outcomes.py`` has seen: ``python -m casekit.outcomes_page FILE``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from weightsync.fsm.states import State

from .outcomes import FAULTS, POLICIES, SCENARIOS, Row, Scenario, outcome

__all__ = ["Rows", "page", "rows"]

Rows = Mapping[Scenario, Mapping[str, Row]]
"""By policy, what became of each scenario."""

_STATES = [state for state in State if state is not State.Released]

_HEAD = """\
# What becomes of a round, fault by fault

<!-- Written by `make outcomes` from rounds that it runs. Do not edit: tests/test_outcomes.py compares. -->

Each line is a round of the real driver, table, lock, ledger and engine machines on a hand-turned clock
(`weightsync.testing.Simulation`), in which one thing goes wrong. Two engines, e0 and e1, serve the version
of the round before, which is called old here; what befalls an engine befalls e0. After each round the tests
let everything arrive that is still under way, hold the promises of [architecture.md](architecture.md) against
engines, lock and ledger, replay its log, and run another round, which has to reach every engine that lives.

That real engines, transports and processes end in the same way is shown by `tests/test_outcomes.py` (some of
these faults, in threads), `tests/test_cases_*.py` and `tests/test_chaos_lock.py` (owners and keepers).

The words: **complete**, every engine serves the new version; **partial**, at least the quorum does, and it is
published; **failed**, anything else. A star: the caller gets an error, although the version is published.
**new**, **old**: what an engine serves, whole. **quarantined**: nobody is sent to it until a full resend
commits on it.
"""

_MATRIX = {
    "quarantine": '## Go on with the rest: `Policy(on_engine_failure="quarantine", quorum=1)`, 1 of 2',
    "fail": '## All or nothing: `Policy(on_engine_failure="fail")`, the default',
}

_DETAILS = """\
## Line by line

Where both policies end in the same way there is one line. The path begins with the state in which it
happens; in Failed, sending has failed before. *In place*: what engines are that load in place, if that
differs. *Named*: the engine that the error names, and the kind of the error. *Lock*: how it came to be free.
*s*: seconds of the round, with a deadline of {deadline:g} s, a lease of {lease:g} s and limits that follow.
"""


def rows() -> Rows:
    """Run them all."""
    return {scenario: {policy: outcome(scenario, policy) for policy in POLICIES} for scenario in SCENARIOS}


def page(found: Rows) -> str:
    """The page."""
    policy = next(iter(POLICIES.values()))
    parts = [_HEAD]
    for name, title in _MATRIX.items():
        parts += [title, _matrix(found, name)]
    parts.append(_DETAILS.format(deadline=policy.deadline, lease=policy.lease).rstrip("\n"))
    for fault in FAULTS:
        parts += [f"### {fault[0].upper()}{fault[1:]}", _details(found, fault)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _matrix(found: Rows, policy: str) -> str:
    """Faults down, states across."""
    lines = []
    for fault in FAULTS:
        cells = []
        for state in _STATES:
            seen = [
                _word(both[policy])
                for scenario, both in found.items()
                if (scenario.fault, scenario.state) == (fault, state)
            ]
            cells.append(", ".join(dict.fromkeys(seen)) or "-")
        lines.append([fault, *cells])
    return _table(["", *(state.name for state in _STATES)], lines)


def _word(row: Row) -> str:
    """The outcome in a word, and a star if somebody has to look all the same."""
    return f"{row.outcome}*" if row.published == "yes" and row.error else row.outcome


def _details(found: Rows, fault: str) -> str:
    lines = []
    for scenario, both in found.items():
        if scenario.fault == fault:
            same = both["quarantine"] == both["fail"]
            for name, row in both.items():
                if not same or name == "quarantine":
                    lines.append([scenario.where, "both" if same else name, *_cells(row)])
    head = ["at", "policy", "path", "outcome", "published", "engines", "in place", "named", "lock", "s"]
    return _table(head, lines)


def _cells(row: Row) -> list[str]:
    named = " ".join(filter(None, [row.blamed, row.error]))
    return [
        " > ".join(row.path), _word(row) + (", unclean" if row.unclean else ""), row.published,
        ", ".join(row.engines), "" if row.in_place == row.engines else ", ".join(row.in_place),
        named, row.lock, f"{row.seconds:.1f}" if row.seconds >= 0.1 else "",
    ]  # fmt: skip


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """As Markdown."""
    every = [head, ["---"] * len(head), *lines]
    return "\n".join(
        f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in every
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(rows()), encoding="utf-8")
