"""A path that is laid over a picture shows that path, the whole of it, and nothing else."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from weightsync.diagrams import Trace, read_trace, render
from weightsync.diagrams.frame import PATH
from weightsync.diagrams.overlay import duration
from weightsync.fsm.engine_table import ENGINE
from weightsync.fsm.errors import ReplayMismatch
from weightsync.fsm.rows import Table
from weightsync.fsm.table import ROUND

SVG = "{http://www.w3.org/2000/svg}"
Ends = tuple[str, str]
Fact = tuple[str, str, str | None, float | None]


def log(*facts: Fact, table: Table[Any, Any] = ROUND, name: str = "r1") -> list[dict[str, Any]]:
    """Records of one round, as a state log holds them; where a row stays, the target is the source."""
    made: list[dict[str, Any]] = [{"event": "opened", "table": table.digest, "round": name, "seq": 0}]
    for source, trigger, guard, seconds in facts:
        (row,) = (
            row for row in table.rows
            if (row.source.name, row.event.__name__) == (source, trigger)
            and (row.guard.__name__ if row.guard else None) == guard
        )  # fmt: skip
        record = {
            "event": "transition", "table": table.digest, "round": name, "seq": len(made), "source": source,
            "target": row.goal.name, "trigger": trigger, "guard": guard, "seconds": seconds,
        }  # fmt: skip
        made.append({key: value for key, value in record.items() if value is not None})
    return made


GOOD = (
    ("Idle", "LockGranted", "enough", 0.0042), ("Locked", "Prepared", "positive", 0.231),
    ("Broadcasting", "BucketSent", "next_bucket", 0.6), ("Broadcasting", "BucketSent", "next_bucket", 1.2),
    ("Broadcasting", "AllSent", "all_out", 1.2401), ("Awaiting", "EngineAcked", "last", 0.05),
    ("Cleaning", "EngineCommitted", "c_last", 0.1), ("Cleaning", "Published", "asked", 0.2),
    ("Cleaning", "Cleaned", "published_unsettled", 0.3), ("Cleaning", "Unlocked", "settled", 0.4),
)  # fmt: skip
GOOD_EDGES = [
    ("Idle", "Locked"), ("Locked", "Broadcasting"), ("Broadcasting", "Awaiting"), ("Awaiting", "Cleaning"),
    ("Cleaning", "Released"),
]  # fmt: skip
BAD = (
    *GOOD[:3], ("Broadcasting", "TimedOut", "due", 61.0), ("Failed", "Cleaned", "proven_ours", 0.1),
    ("Failed", "Unlocked", "settled", 0.5),
)  # fmt: skip
BAD_EDGES = [
    ("Idle", "Locked"),
    ("Locked", "Broadcasting"),
    ("Broadcasting", "Failed"),
    ("Failed", "Released"),
]
PATHS = [pytest.param(GOOD, GOOD_EDGES, id="good"), pytest.param(BAD, BAD_EDGES, id="failed")]


def elements(drawn: str, kind: str, look: str) -> list[ET.Element]:
    """The groups of one kind and look in an SVG."""
    classes = [(group, group.get("class", "").split()) for group in ET.fromstring(drawn).iter(f"{SVG}g")]
    return [group for group, names in classes if names[0] == kind and look in names]


def ends(group: ET.Element) -> Ends:
    """The move that a group draws."""
    return str(group.get("data-source")), str(group.get("data-target"))


def others(edges: list[Ends]) -> set[Ends]:
    """The moves of the round's table that are not among ``edges``."""
    return {(row.source.name, row.target.name) for row in ROUND.rows if row.target} - set(edges)


@pytest.mark.parametrize(("facts", "edges"), PATHS)
def test_the_svg_shows_precisely_the_path(facts: tuple[Fact, ...], edges: list[Ends]) -> None:
    """The moves of the path are marked, in arrow and labels; all others and their states step back."""
    drawn = render(ROUND, "svg", read_trace(ROUND, log(*facts)))
    for kind in ("arrow", "move"):
        assert sorted(ends(g) for g in elements(drawn, kind, "taken") if g.get("data-source")) == sorted(
            edges
        )
        assert {ends(g) for g in elements(drawn, kind, "faded")} == others(edges)
    visited = {name for edge in edges for name in edge}
    assert {g.get("data-state") for g in elements(drawn, "state", "taken")} == visited
    assert {g.get("data-state") for g in elements(drawn, "state", "faded")} == {
        s.name for s in ROUND.states
    } - visited


def test_the_legend_explains_the_colour_of_a_path() -> None:
    """With an arrow in that colour, and only where there is a path."""
    bare, traced = render(ROUND, "svg"), render(ROUND, "svg", read_trace(ROUND, log(*GOOD)))
    assert [g for g in elements(traced, "arrow", "taken") if g.get("data-source") is None]
    assert f'<tspan class="trace">{PATH}</tspan>' in traced
    assert not elements(bare, "arrow", "taken")
    assert PATH not in bare


@pytest.mark.parametrize(("facts", "edges"), PATHS)
def test_the_svg_numbers_the_moves_in_their_order(facts: tuple[Fact, ...], edges: list[Ends]) -> None:
    """The badges count from 1 along the path, and say when each move was made."""
    drawn = render(ROUND, "svg", read_trace(ROUND, log(*facts)))
    badges = {
        ends(group): [str(text.text) for text in group.findall(f"{SVG}g/{SVG}text")]
        for group in elements(drawn, "move", "taken")
    }
    assert badges == {edge: [str(number)] for number, edge in enumerate(edges, start=1)}
    assert "at 235 ms" in drawn


def test_states_show_the_time_spent_in_them() -> None:
    """Each state that was left says for how long it lasted; the last one, and those not seen, say nothing."""
    drawn = render(ROUND, "svg", read_trace(ROUND, log(*GOOD)))
    cards = {g.get("data-state"): "|".join(map(str, g.itertext())) for g in elements(drawn, "state", "taken")}
    assert "|1.24 s|" in cards["Broadcasting"]
    assert "|4.2 ms|" in cards["Idle"]
    assert not re.search(r"\d m?s\b", cards["Released"])


def test_rows_that_stay_are_counted_and_are_no_moves() -> None:
    """Two buckets are no steps of the path; the state says how many rows it took without being left."""
    trace = read_trace(ROUND, log(*GOOD))
    assert [(step.source, step.target) for step in trace.steps] == GOOD_EDGES
    drawn = render(ROUND, "svg", trace)
    (card,) = (g for g in elements(drawn, "state", "taken") if g.get("data-state") == "Broadcasting")
    text = "".join(map(str, card.itertext()))
    assert "stays: 2 times" in text
    assert "BucketSent [next_bucket] \N{MULTIPLICATION SIGN}2" in text


@pytest.mark.parametrize(("facts", "edges"), PATHS)
def test_dot_shows_precisely_the_path(facts: tuple[Fact, ...], edges: list[Ends]) -> None:
    """The edges of the path, and no others, are thick and carry their number."""
    text = render(ROUND, "dot", read_trace(ROUND, log(*facts)))
    found = re.findall(r'^  "(\w+)" -> "(\w+)" \[label=" \((\d+)\) at .*penwidth=3\];', text, re.MULTILINE)
    assert sorted(found, key=lambda edge: edge[2]) == [
        (*edge, str(n)) for n, edge in enumerate(edges, start=1)
    ]
    assert text.count("penwidth=3") == len(edges)


@pytest.mark.parametrize(("facts", "edges"), PATHS)
def test_mermaid_shows_the_path(facts: tuple[Fact, ...], edges: list[Ends]) -> None:
    """The states of the path have a class of their own; its moves, which cannot be coloured, have numbers."""
    text = render(ROUND, "mermaid", read_trace(ROUND, log(*facts)))
    marked = re.findall(r"^    class (\w+) taken$", text, re.MULTILINE)
    assert sorted(marked) == sorted({name for edge in edges for name in edge})
    numbered = re.findall(r"^    (\w+) --> (\w+) : \((\d+)\)", text, re.MULTILINE)
    assert sorted(numbered, key=lambda edge: edge[2]) == [(*e, str(n)) for n, e in enumerate(edges, start=1)]


def test_markdown_lists_the_path() -> None:
    """The page begins with the steps, and each row says how often it was taken."""
    text = render(ROUND, "markdown", read_trace(ROUND, log(*BAD)))
    assert "| 3 | `Broadcasting` | `Failed` | `TimedOut` | `due` | 1 min 1 s |" in text
    assert len(re.findall(r"^\| \d+ \| .* \| 1 \|$", text, re.MULTILINE)) == len(BAD)


def test_a_path_can_pass_twice() -> None:
    """An engine serves many sessions: an edge carries all its numbers, a state the sum of its times."""
    session = (
        ("Serving", "Opened", "newer", 2.0), ("Paused", "Opened", "newer", 0.5),
        ("Paused", "AbortOrdered", "ends_whole", 0.25),
    )  # fmt: skip
    trace = read_trace(ENGINE, log(*session, *session, table=ENGINE))
    assert [step.number for step in trace.on(("Serving", "Paused"))] == [1, 4]
    assert [step.number for step in trace.on(("Paused", "Paused"))] == [2, 5]
    assert trace.time_in("Serving") == "4.00 s"
    assert trace.time_in("Paused") == "1.50 s"
    assert len(elements(render(ENGINE, "svg", trace), "move", "taken")) == 3


def test_the_last_round_of_a_log_is_shown_unless_another_is_asked_for() -> None:
    """Rounds may lie in one log, also mixed with one another."""
    first, second = log(*GOOD, name="r1"), log(*BAD, name="r2")
    mixed = [record for pair in zip(first, second, strict=False) for record in pair]
    assert read_trace(ROUND, mixed).round == "r2"
    assert read_trace(ROUND, [*second, *first]).visited[-2:] == ("Cleaning", "Released")
    assert read_trace(ROUND, [*first, *second], round="r1").visited[-2:] == ("Cleaning", "Released")


def test_a_round_that_is_not_over_is_shown_as_far_as_it_came() -> None:
    """A log that ends in the middle, or begins there, gives the part of the path that it tells."""
    begun = read_trace(ROUND, log(*GOOD)[:3])
    assert begun.visited == ("Idle", "Locked", "Broadcasting")
    waiting = read_trace(ROUND, log(("Idle", "EngineLost", "asked_for", 1.0)))
    assert (waiting.visited, waiting.steps) == (("Idle",), ())
    assert read_trace(ROUND, log(*GOOD)[5:]).visited == ("Broadcasting", "Awaiting", "Cleaning", "Released")


def test_times_that_are_not_known_are_not_made_up() -> None:
    """Without seconds, neither states nor moves tell a time, nor do the moves that come after."""
    trace = read_trace(
        ROUND, log(("Idle", "LockGranted", "enough", None), ("Locked", "Prepared", "positive", 1.0))
    )
    assert trace.time_in("Idle") == ""
    assert [step.caption for step in trace.steps] == ["", ""]
    assert trace.time_in("Locked") == "1.00 s"
    assert render(ROUND, "svg", trace)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"target": "Cleaning"}, "no row Idle -> Cleaning"),
        ({"guard": "hopefully"}, r"no row Idle -> Locked: LockGranted \[hopefully\]"),
        ({"trigger": "Hope"}, "no row Idle -> Locked: Hope"),
    ],
)
def test_a_record_that_is_no_row_is_refused(change: dict[str, str], what: str) -> None:
    """A picture of a path that the table does not have would be a lie."""
    records = log(*GOOD)
    records[1] |= change
    with pytest.raises(ReplayMismatch, match=what):
        read_trace(ROUND, records)


def test_a_log_with_a_hole_is_refused() -> None:
    """A state cannot be skipped in the middle of a path."""
    records = log(*GOOD)
    del records[2]
    with pytest.raises(ReplayMismatch, match="round r1 is in Locked, and the log goes on in Broadcasting"):
        read_trace(ROUND, records)


@pytest.mark.parametrize("records", [[], log(*GOOD)[:1], log(*GOOD, table=ROUND)])
def test_a_log_without_the_wanted_round_is_refused(records: list[dict[str, Any]]) -> None:
    """Nothing to show is an error, and so is a log of another table."""
    with pytest.raises(ReplayMismatch, match="no transition"):
        read_trace(ENGINE, records)
    with pytest.raises(ReplayMismatch, match="of round r9"):
        read_trace(ROUND, records, round="r9")


def test_a_long_path_is_named_by_its_ends() -> None:
    """The line over the picture stays one line."""
    there = ("Serving", "Opened", "newer", 1.0), ("Paused", "AbortOrdered", "ends_whole", 1.0)
    trace: Trace = read_trace(ENGINE, log(*there * 20, table=ENGINE))
    assert trace.summary.count("Serving") == 4
    assert "\N{HORIZONTAL ELLIPSIS}" in trace.summary


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00042, "0.4 ms"), (0.0123, "12 ms"), (0.9996, "1000 ms"), (1.2401, "1.24 s"), (3599.7, "60 min 0 s")],
)
def test_durations_are_said_as_people_do(seconds: float, text: str) -> None:
    """Three digits are enough for a picture."""
    assert duration(seconds) == text
