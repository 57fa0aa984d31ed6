"""An export's plan is made once, used again as long as it may be, and brings nothing but what is there.

The rules alone, then an export of one rank, then three ranks in threads over a store of this process.
"""

import gc
import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from casekit.levels import eventually
from exportkit import Collective, GatheredExporter, RealTeam, tensors
from weightsync import CachedExport, LocalEngine, WeightSync, receiver_for
from weightsync.fsm.errors import (
    PlanError,
    PlanMismatch,
    RankFailed,
    RanksDisagree,
    SetupError,
)
from weightsync.fsm.exports import Cut, Decision, ExportPlan, Outline, Slot, Standing, decide
from weightsync.handlers.object_tap import counted

# -- the rules --------------------------------------------------------------------------------------------


def fresh(mark: str) -> Standing:
    """Of a rank without a plan."""
    return Standing("same", mark)


def after(standings: dict[int, Standing], **changes: str) -> dict[int, Standing]:
    """Where ranks stand when they have the plan that was decided on; those that are named have changed."""
    key = decide(standings).key
    return {
        rank: replace(
            each, key=key, planned=each.mark,
            mark=changes.get(f"r{rank}", each.mark), change="x is now y" if f"r{rank}" in changes else "",
        )
        for rank, each in standings.items()
    }  # fmt: skip


FIRST = {0: fresh("a"), 1: fresh("b"), 2: fresh("b")}


def test_the_first_plan_is_made_and_the_next_ones_are_it() -> None:
    """By what all ranks have, which need not be the same."""
    assert decide(FIRST).build
    again = decide(after(FIRST))
    assert again == Decision(build=False, key=decide(FIRST).key)


def test_all_that_change_plan_anew() -> None:
    """Under another key."""
    found = decide(after(FIRST, r0="c", r1="d", r2="d"))
    assert found.build
    assert found.key != decide(FIRST).key


def test_one_that_forgot_has_all_of_them_plan() -> None:
    """Nothing has changed, so they can."""
    known = after(FIRST)
    assert decide({**known, 1: fresh("b")}) == Decision(build=True, key=known[0].key)


@pytest.mark.parametrize("who", [{"r1": "z"}, {"r0": "z", "r2": "z"}])
def test_some_that_change_alone_are_named(who: dict[str, str]) -> None:
    """They and the others, and in what the first of them has changed."""
    with pytest.raises(PlanMismatch, match=r"changed since the export plan was made \(x is now y\)") as found:
        decide(after(FIRST, **who))
    assert ("rank 1 of" in str(found.value)) is ("r1" in who)


def test_plans_of_two_keys_are_no_base_to_compare_with() -> None:
    """A rank that missed the last planning is not one that has changed alone."""
    known = after(FIRST)
    assert decide({**known, 1: replace(known[1], key="older", planned="other", change="x")}).build


standings = st.builds(
    Standing, st.just("same"), st.sampled_from("ab"), st.sampled_from(["", "k", "l"]), st.sampled_from("ab")
)


@given(st.dictionaries(st.integers(0, 3), standings, min_size=1))
def test_nobody_uses_a_plan_that_is_not_of_all_of_now(found: dict[int, Standing]) -> None:
    """Whatever they say: it is used again only if all have it, and by its key it is of these very marks."""
    try:
        decision = decide(found)
    except PlanMismatch:
        return
    if not decision.build:
        assert {each.key for each in found.values()} == {decision.key}
    anew = {rank: fresh(each.mark) for rank, each in found.items()}
    assert decide(anew) == Decision(build=True, key=decision.key)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from("abcd"))
def test_one_mark_makes_another_key(marks: list[str], where: int, other: str) -> None:
    """On any rank."""
    changed = [other if rank == where else mark for rank, mark in enumerate(marks)]
    keys = [decide({rank: fresh(mark) for rank, mark in enumerate(each)}).key for each in (marks, changed)]
    assert (keys[0] == keys[1]) is (marks == changed)


def test_a_plan_is_plain_values_with_a_hash_of_all_of_it() -> None:
    """Nothing in it refers to a tensor, and any difference is another hash."""
    slot = Slot("w", "float32", (4, 3), (0, 1), (Cut(0, (0, 0), (2, 3)), Cut(1, (2, 0), (2, 3))))
    others = [
        replace(slot, **change)
        for change in (
            {"name": "v"}, {"dtype": "bfloat16"}, {"shape": (3, 4)}, {"owners": (1, 0)}, {"cuts": ()},
            {"of": "u"}, {"live": True},
        )
    ]  # fmt: skip
    hashes = {ExportPlan.sealed([each], "k").hash for each in [slot, *others]}
    assert len(hashes) == 8
    assert hash(ExportPlan.sealed([slot], "k")) == hash(ExportPlan.sealed([slot], "k"))


def test_an_outline_tells_in_what_it_changed() -> None:
    """The first line, of those that are shared before those that are not."""
    old = Outline(2, ("a", "b"), ("mine",))
    assert old.change_to(Outline(2, ("a", "c"), ("yours",))) == "b is now c"
    assert old.change_to(Outline(4, ("a", "b"), ("mine",))) == "world 2 is now world 4"
    assert old.change_to(Outline(2, ("a",), ("mine",))) == "b is now nothing"
    assert old.change_to(Outline(2, ("a", "b"), ())) == "mine is now nothing"
    assert old.change_to(Outline(2, ("a", "b"), ("mine",))) == ""
    assert old.common == Outline(2, ("a", "b"), ("yours",)).common
    assert old.mark != Outline(2, ("a", "b"), ("yours",)).mark


def test_what_is_told_is_plain() -> None:
    """Standings and decisions go by JSON and come back."""
    standing, decision = Standing("a", "b", "c", "d", "e"), Decision(build=True, key="k")
    assert Standing.from_json(json.loads(json.dumps(standing.to_json()))) == standing
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision


# -- one rank ---------------------------------------------------------------------------------------------


@pytest.fixture
def collective(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Collective]:
    """In the place of torch's own."""

    def make(world: int) -> Collective:
        found = Collective(world)
        monkeypatch.setattr(dist, "all_gather_object", found)
        return found

    return make


@pytest.fixture
def alone(collective: Callable[[int], Collective]) -> CachedExport:
    """An export of one rank."""
    return CachedExport(GatheredExporter(tensors(1.0), 0, collective(1)))


def held(export: CachedExport) -> dict[str, torch.Tensor]:
    """What its exporter reads."""
    exporter: Any = export._exporter
    found: dict[str, torch.Tensor] = exporter.held
    return found


def test_it_is_planned_once(alone: CachedExport) -> None:
    """And every reading brings what is there then, of the same storage or of another one."""
    for step in range(1, 6):
        held(alone)["w"].fill_(float(step))
        held(alone)["b"] = torch.full((3,), -float(step))
        got = dict(alone())
        assert float(got["w"].mean()) == step
        assert float(got["b"].mean()) == -step
    counts = alone.counts
    assert (counts.builds, counts.hits, counts.objects) == (1, 4, 3)
    assert counts.seconds > 0


@pytest.mark.parametrize("change", ["added", "removed", "reshaped", "renamed", "dtype"])
def test_another_layout_is_planned_anew(alone: CachedExport, change: str) -> None:
    """Whatever changes in it."""
    dict(alone())
    named = held(alone)
    if change == "added":
        named["new"] = torch.zeros(2)
    elif change == "dtype":
        named["w"] = named["w"].double()
    else:
        was = named.pop("w")
        if change != "removed":
            named["w" if change == "reshaped" else "v"] = was.repeat(2, 1) if change == "reshaped" else was
    got = dict(alone())
    assert got.keys() == named.keys()
    assert all(got[name] is named[name] for name in named)
    assert (alone.counts.builds, alone.counts.hits) == (2, 0)


def test_reset_forgets(alone: CachedExport) -> None:
    """The plan, and what the exporter keeps beside it."""
    dict(alone())
    assert alone.plan is not None
    alone.reset()
    dict(alone())
    assert alone.counts.builds == 2


def test_a_plan_that_lasts_for_one_reading_is_made_in_each(alone: CachedExport) -> None:
    """For exporters that say so."""
    held(alone)
    exporter: Any = alone._exporter
    exporter.lasting = False
    for _ in range(3):
        dict(alone())
    assert (alone.counts.builds, alone.counts.hits) == (3, 0)


def test_what_the_plan_did_not_bring_is_not_handed_over(alone: CachedExport) -> None:
    """If an outline overlooks a change, the layout that comes out does not; the next reading plans anew."""
    dict(alone())
    exporter: Any = alone._exporter
    outline = exporter.outline()
    exporter.outline = lambda: outline
    held(alone)["w"] = torch.zeros(5)
    with pytest.raises(PlanError, match=r"where its plan brought .*the plan is dropped"):
        dict(alone())
    assert dict(alone())["w"].shape == (5,)
    assert alone.counts.builds == 2


def test_fewer_tensors_than_the_plan_brought_are_noticed(alone: CachedExport) -> None:
    """Also if those that come are right."""
    dict(alone())
    exporter: Any = alone._exporter
    read = exporter.tensors
    exporter.tensors = lambda plan: itertools.islice(read(plan), 2)
    with pytest.raises(PlanError, match="2 tensors, where its plan brought 3"):
        dict(alone())


def test_a_reading_that_ends_early_leaves_no_plan(alone: CachedExport) -> None:
    """Whether it raised, or its reader went away."""
    dict(alone())
    reading = alone()
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert alone.plan is None


@pytest.mark.parametrize("first", [True, False])
def test_a_reading_that_is_kept_alive_half_way_leaves_no_plan(alone: CachedExport, *, first: bool) -> None:
    """An error of its reader does that; the next reading plans anew, and is not compared with half a one."""
    if not first:
        dict(alone())
    reading = alone()
    next(reading)
    got = dict(alone())
    assert got.keys() == held(alone).keys()
    assert alone.counts.builds == 2
    assert dict(alone()).keys() == got.keys()
    del reading
    assert alone.plan is not None


def test_engines_get_the_next_weights_after_a_tensor_that_cannot_be_sent(alone: CachedExport) -> None:
    """The error of the first hand-over is kept, as a user keeps it."""
    mine = tensors(0.0)
    with WeightSync([LocalEngine(receiver_for(mine, "e"))], "memory") as sync:
        exporter: Any = alone._exporter
        right = exporter.tensors
        exporter.tensors = lambda plan: ((name, each.to_sparse()) for name, each in right(plan))
        kept: Any = sync.on_step_end(1, alone)
        assert isinstance(kept.error, PlanError)
        exporter.tensors = right
        assert sync.on_step_end(2, alone).ok  # type: ignore[union-attr]
        assert float(mine["w"].mean()) == 1.0


def test_a_reading_that_ends_late_leaves_the_next_plan_alone(alone: CachedExport) -> None:
    """What an error still refers to is let go of at any time."""
    late = alone()
    next(late)
    alone.reset()
    dict(alone())
    late.close()  # type: ignore[attr-defined]
    dict(alone())
    assert (alone.counts.builds, alone.counts.hits) == (2, 1)


def test_it_keeps_no_tensor_and_no_module_alive(collective: Callable[[int], Collective]) -> None:
    """What a plan was made of may go while the plan stays."""
    exporter = GatheredExporter(tensors(1.0), 0, collective(1))
    export = CachedExport(exporter)
    dict(export())
    gone = weakref.ref(exporter.held["w"])
    exporter.held = tensors(2.0)
    gc.collect()
    assert gone() is None
    assert float(dict(export())["w"].mean()) == 2.0
    assert (export.counts.builds, export.counts.hits) == (1, 1)


def test_several_ranks_have_to_agree_first(collective: Callable[[int], Collective]) -> None:
    """To read such an export without them would wait for ever."""
    export = CachedExport(GatheredExporter(tensors(1.0), 0, collective(2)))
    with pytest.raises(SetupError, match=r"gathers from 2 ranks.*snapshot=False"):
        dict(export())


def test_an_exporter_is_needed() -> None:
    """A module is none."""
    wrong: Any = torch.nn.Linear(1, 1)
    with pytest.raises(SetupError, match="an exporter is needed, such as FsdpExporter"):
        CachedExport(wrong)


def test_a_hand_over_by_a_cached_export(alone: CachedExport) -> None:
    """Engines hold the trainer's values of each step, and the log says which plan, and what it cost."""
    mine, records = tensors(0.0), list[Any]()
    with WeightSync([LocalEngine(receiver_for(mine, "e"))], "memory", handlers=[records.append]) as sync:
        for step in (1, 2):
            held(alone)["w"].fill_(step)
            assert sync.on_step_end(step, alone).ok  # type: ignore[union-attr]
            assert float(mine["w"].mean()) == step
        assert sync.begin(3, alone).wait().ok
        assert eventually(lambda: sum(each.event == "export" for each in records) == 3)
    told = [each.facts for each in records if each.event == "export"]
    assert alone.plan is not None
    assert [each["plan"] for each in told] == [alone.plan.hash[:12]] * 3
    assert [each["builds"] for each in told] == [1, 1, 1]
    assert [each["hits"] for each in told] == [0, 1, 2]
    assert [each["objects"] for each in told] == [3, 0, 0]


def test_objects_are_counted_where_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that calls them, in blocks within blocks; afterwards nothing is left in torch."""
    calls = list[int]()
    monkeypatch.setattr(dist, "all_gather_object", lambda *_: calls.append(1))
    real = dist.all_gather_object
    with counted() as outer:
        dist.all_gather_object([], 1)
        with counted() as inner:
            dist.all_gather_object([], 1)
    dist.all_gather_object([], 1)
    assert (outer.calls, inner.calls, len(calls)) == (2, 1, 3)
    assert dist.all_gather_object is real


# -- ranks that plan together -----------------------------------------------------------------------------


class Exports:
    """Three ranks with an export each, whose collectives end only if all three take part."""

    def __init__(self, collective: Collective) -> None:
        self.collective, self.team = collective, RealTeam(tensors(-1.0))
        self.exporters = [GatheredExporter(tensors(0.0), rank, collective) for rank in range(3)]
        self.exports: list[Any] = [CachedExport(each) for each in self.exporters]
        self._step = itertools.count(1)
        self.seconds = 0.0

    def hand_over(self, exports: list[Any] | None = None) -> list[Any]:
        """What each rank gets."""
        began = time.monotonic()
        got = self.team.step(next(self._step), *(exports or self.exports))
        self.seconds = time.monotonic() - began
        return got

    @property
    def builds(self) -> list[int]:
        """Of each rank."""
        return [each.counts.builds for each in self.exports]

    @property
    def hits(self) -> list[int]:
        """Of each rank."""
        return [each.counts.hits for each in self.exports]


@pytest.fixture
def exports(collective: Callable[[int], Collective]) -> Iterator[Exports]:
    """Three ranks."""
    found = Exports(collective(3))
    yield found
    found.team.close()


def good(got: list[Any]) -> bool:
    """Whether all ranks have a good result."""
    return all(getattr(each, "ok", False) for each in got)


def same_error(got: list[Any], kind: type[Exception]) -> str:
    """What all ranks raised."""
    assert [type(each) for each in got] == [kind] * 3, got
    (text,) = {str(each) for each in got}
    return text


def test_all_ranks_plan_once(exports: Exports) -> None:
    """And call no collective of objects from the second hand-over on."""
    for _ in range(4):
        assert good(exports.hand_over())
    assert (exports.builds, exports.hits) == ([1] * 3, [3] * 3)
    assert exports.collective.calls == [3] * 3
    assert [each.counts.objects for each in exports.exports] == [3] * 3
    assert len({each.plan.key for each in exports.exports}) == 1


def test_all_ranks_that_change_plan_anew(exports: Exports) -> None:
    """Together."""
    exports.hand_over()
    one_more(exports, 0, 1, 2)
    exports.team.held["new"] = torch.ones(2)
    assert good(exports.hand_over())
    assert (exports.builds, exports.collective.alone) == ([2] * 3, 0)
    assert float(exports.team.held["new"].sum()) == 0.0


def one_more(exports: Exports, *ranks: int) -> None:
    """These ranks hold one more tensor."""
    for rank in ranks:
        exports.exporters[rank].held["new"] = torch.zeros(2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_changes_alone_is_refused_on_all(exports: Exports, rank: int) -> None:
    """At once, by name, before anybody gathers; and what it has changed back fits the plan again."""
    exports.hand_over()
    one_more(exports, rank)
    text = same_error(exports.hand_over(), PlanMismatch)
    assert "do not bring the same tensors" in text
    assert "line 4 is" in text
    assert "new torch.float32 (2,)" in text
    assert exports.seconds < 2.0
    assert (exports.collective.calls, exports.collective.alone) == ([3] * 3, 0)
    assert exports.team.lock.status().epoch == 1
    del exports.exporters[rank].held["new"]
    assert good(exports.hand_over())
    assert (exports.builds, exports.hits) == ([1] * 3, [1] * 3)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_own_part_changes_alone_is_refused_on_all(exports: Exports, rank: int) -> None:
    """What ranks need not share is compared with what each of them had; a reset on all allows it."""
    for number, each in enumerate(exports.exporters):
        each.own = (f"stage {number}",)
    exports.hand_over()
    exports.exporters[rank].own = ("stage 9",)
    text = same_error(exports.hand_over(), PlanMismatch)
    assert f"rank {rank} of the trainer changed since the export plan was made" in text
    assert f"stage {rank} is now stage 9" in text
    assert exports.seconds < 2.0
    assert exports.builds == [1] * 3
    for export in exports.exports:
        export.reset()
    assert good(exports.hand_over())
    assert exports.builds == [2] * 3


def test_a_rank_that_forgets_alone_has_all_of_them_plan(exports: Exports) -> None:
    """As one does that was started again."""
    exports.hand_over()
    exports.exports[1].reset()
    assert good(exports.hand_over())
    assert (exports.builds, exports.collective.alone) == ([2] * 3, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_while_it_reads_has_all_of_them_plan(exports: Exports, rank: int) -> None:
    """Its plan is dropped, so the next hand-over does not go by what was begun."""
    exports.hand_over()
    lost = exports.exporters[rank].held.pop("b")
    outline = exports.exporters[1 - rank].outline()
    exports.exporters[rank].outline = lambda: outline  # type: ignore[method-assign]
    same = exports.hand_over()
    assert all(isinstance(each, (RankFailed, KeyError)) for each in same), same
    exports.exporters[rank].held["b"] = lost
    assert good(exports.hand_over())
    assert exports.builds == [2] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_to_say_what_it_has_fails_all(exports: Exports, rank: int) -> None:
    """Before anybody gathers."""
    exports.hand_over()
    right = exports.exporters[rank].outline

    def wrong() -> Outline:
        raise OSError("no model")

    exports.exporters[rank].outline = wrong  # type: ignore[method-assign]
    got = exports.hand_over()
    assert all(isinstance(each, (RankFailed, OSError)) and "no model" in str(each) for each in got), got
    exports.exporters[rank].outline = right  # type: ignore[method-assign]
    assert good(exports.hand_over())
    assert (exports.builds, exports.hits) == ([1] * 3, [1] * 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_export_on_some_ranks_alone_is_refused(exports: Exports, rank: int) -> None:
    """The others brought tensors, and would not take part in gathering."""
    models: list[Any] = [*exports.exports]
    models[rank] = tensors(0.0)
    text = same_error(exports.hand_over(models), RanksDisagree)
    one, two = (each for each in range(3) if each != rank)
    # It is said as soon as it is known, which may be before the last rank is there.
    there = [f"rank {one}", f"rank {two}", f"ranks {one}, {two}"]
    assert any(f"{each} brought an export to agree on, and rank {rank} did not" in text for each in there)
    assert exports.collective.calls == [0] * 3


def test_what_was_agreed_on_is_used_once(exports: Exports) -> None:
    """Nobody reads an export by itself with an older decision."""
    exports.hand_over()
    with pytest.raises(SetupError, match="have to agree before it is read"):
        dict(exports.exports[0]())


def test_a_rank_that_missed_the_planning_has_all_of_them_plan(exports: Exports) -> None:
    """It gave up after the others were told to plan: it has an older plan, and did not change alone."""
    exports.hand_over()
    one_more(exports, 0, 1, 2)
    exports.team.held["new"] = torch.ones(2)
    first = exports.exports[0]
    first._planned, _ = first.standing()
    first._plan = replace(first.plan, key="newer")
    assert good(exports.hand_over())
    assert exports.builds == [2] * 3
