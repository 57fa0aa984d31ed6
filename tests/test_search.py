"""The search that all explorations share, on graphs small enough to see through."""

from __future__ import annotations

from collections.abc import Iterable

from weightsync.fsm.search import Edge, explore


def count_to(end: int, *, certain: bool = False) -> Iterable[Edge[int]]:
    """What can happen at a number below ``end``: one more, two more, or nothing."""
    if end < 10:
        yield Edge("one", end + 1, row=1, certain=certain)
        yield Edge("two", end + 2, row=2)
    yield Edge("stay", end, row=3)
    yield Edge("refused", None)


def test_everything_is_visited_and_counted() -> None:
    """Every node once; steps, refusals and rows as often as they happen."""
    found = explore(0, count_to)
    assert set(found.nodes) == set(range(12))
    assert (found.positions, found.accepted, found.refused) == (12, 32, 12)
    assert found.rows == {1: 10, 2: 10, 3: 12}
    assert not found.violations
    assert found.lines() == ["12 positions, 32 steps accepted, 12 refused, 3 rows, 0 promises broken"]


def test_the_trace_is_the_shortest() -> None:
    """The way to a node goes two by two; it shows what happened and where it led."""
    found = explore(0, count_to, show=lambda number: f"<{number}>")
    assert found.trace(0) == ()
    assert found.trace(4) == ("two -> <2>", "two -> <4>")
    assert len(found.trace(9)) == 5


def test_a_broken_promise_in_a_node_is_found() -> None:
    """Each hit is counted, the first one keeps its trace."""
    found = explore(0, count_to, lambda number: ["small"] if number > 5 else [])
    assert found.hits == {"small": 6}
    assert found.violations["small"].trace == ("two -> 2", "two -> 4", "two -> 6")
    assert found.lines()[1:] == [
        "6 x small, after 3 steps:", "  1. two -> 2", "  2. two -> 4", "  3. two -> 6",
    ]  # fmt: skip


def test_a_broken_promise_in_the_first_node_has_no_trace() -> None:
    """What is wrong from the beginning needs no steps."""
    found = explore(0, count_to, lambda number: ["odd"] if number == 0 else [])
    assert found.violations["odd"].lines() == ["odd, after 0 steps:"]
    assert str(found.violations["odd"]) == "odd, after 0 steps:"


def test_a_broken_promise_of_a_step_is_found_also_when_it_is_refused() -> None:
    """The trace ends with the step itself."""

    def steps(number: int) -> Iterable[Edge[int]]:
        yield Edge("good", min(number + 1, 3))
        yield Edge("bad", None if number == 2 else number, broken=("step",) if number == 2 else ())

    found = explore(0, steps)
    assert found.violations["step"].trace == ("good -> 1", "good -> 2", "bad -> (here)")
    assert found.hits == {"step": 1}


def test_it_stops_where_it_is_told_to() -> None:
    """One promise can be looked for alone; others are noted on the way."""

    def check(number: int) -> Iterable[str]:
        return ["first"] if number == 2 else ["second"] if number == 6 else []

    assert explore(0, count_to, check, until=["first"]).positions < 6
    assert explore(0, count_to, check, until=["second"]).violations.keys() == {"first", "second"}
    assert explore(0, count_to, check, until=["third"]).positions == 12


def test_a_graph_without_an_end_is_given_up() -> None:
    """Too many nodes are a broken promise of their own."""
    found = explore(0, lambda number: [Edge("one", number + 1)], limit=50)
    assert found.hits == {"finite": 1}
    assert found.positions == 51


def test_a_goal_must_be_reached_by_what_is_certain() -> None:
    """A way that somebody might take is no way that is taken in the end."""
    sure = explore(0, lambda number: count_to(number, certain=True), goal=lambda number: number >= 10)
    assert not sure.violations
    unsure = explore(0, count_to, goal=lambda number: number >= 10)
    assert unsure.hits == {"inevitable": 10}
    assert unsure.violations["inevitable"].trace == ()


def test_going_in_circles_is_not_getting_there() -> None:
    """A certain step that leads back does not count as a way out, wherever it is found."""

    def circle(number: int) -> Iterable[Edge[int]]:
        yield Edge("round", (number + 1) % 3, certain=True)
        yield Edge("out", 9)

    found = explore(0, lambda number: circle(number) if number < 3 else (), goal=lambda number: number == 9)
    assert found.hits == {"inevitable": 3}


def test_the_goal_is_not_asked_of_a_search_that_was_cut_short() -> None:
    """Half a graph says nothing about what is inevitable."""
    found = explore(0, count_to, lambda n: ["here"] if n == 2 else [], goal=lambda n: n >= 10, until=["here"])
    assert found.violations.keys() == {"here"}
