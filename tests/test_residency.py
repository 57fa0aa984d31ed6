"""The moves of a round: in their order, logged, and on every way out as it was promised.

``test_cases_memory.py`` has the rounds that fail in every place, on a memory that is booked. Here are real
tensors, orders that nobody thought of, and parts that fail.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from casekit.levels import eventually, generates
from weightsync import (
    CalledPart,
    FollowerSync,
    Gated,
    HostCopy,
    LocalEngine,
    MemoryShort,
    Policy,
    Rebuilt,
    Residency,
    ResidencyError,
    Scratch,
    TrainerRanks,
    WeightSync,
    offload,
    onload,
    receiver_for,
    shift,
)  # fmt: skip
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineAsleep, SetupError
from weightsync.fsm.executors import RoundView
from weightsync.fsm.residency import Course, Move, inverse, overflow
from weightsync.fsm.states import Disposition
from weightsync.fsm.tensors import has_memory
from weightsync.handlers.threads import spawn
from weightsync.testing.fakes import FakeWeights

SOON = 10.0


def view(round: str = "r1", weights: Any = None, note: Any = None) -> RoundView:
    """A round as an executor sees it."""
    given = {} if note is None else {"note": note}
    return RoundView(Session(round, 1, 1), 1, 1, None, weights or FakeWeights(1), **given)


class Booked:
    """Parts that are booked in one list, each of so many bytes; one of them may fail."""

    def __init__(self, **sizes: int) -> None:
        self.log: list[str] = []
        self.failing: dict[str, BaseException] = {}
        self.there = dict.fromkeys(sizes, False)
        self.parts = {name: self._part(name, size) for name, size in sizes.items()}

    def _part(self, name: str, size: int) -> CalledPart:
        def move(word: str) -> None:
            if (error := self.failing.get(f"{word} {name}")) is not None:
                raise error
            self.there[name] = word == "onload"
            self.log.append(f"{word} {name}")

        return CalledPart(
            name, on=lambda: move("onload"), off=lambda: move("offload"), nbytes=size,
            resident=lambda: self.there[name],
        )  # fmt: skip

    def moves(self, line: str) -> list[Move]:
        """``+a -b``: a comes, b goes."""
        return [Move(self.parts[each[1:]], each[0] == "+") for each in line.split()]


# -- in its order ------------------------------------------------------------------------------------------


def test_what_is_made_and_what_it_costs() -> None:
    """A move with nothing to change is left out; each other has its line, and the bytes add up."""
    booked, notes = Booked(a=60, b=50, c=30), []

    def note(event: str, /, **values: Any) -> None:
        notes.append((event, values))

    booked.there["a"] = True
    residency = Residency(
        before=booked.moves("-a +b"), release=booked.moves("-a"), after=booked.moves("+c +b"), name="turns"
    )
    undo = residency.prepare(view(note=note))
    assert undo is not None
    assert booked.log == ["offload a", "onload b"]
    residency.clean(view(note=note))
    assert booked.log == ["offload a", "onload b", "onload c"]
    told = [
        (event, values["executor"], values["trigger"], values["freed"], values["facts"])
        for event, values in notes
    ]
    assert told == [
        ("action", "turns", "offload", 60, {"part": "a", "bytes_before": 60, "bytes_after": 0}),
        ("action", "turns", "onload", -50, {"part": "b", "bytes_before": 0, "bytes_after": 50}),
        ("action", "turns", "onload", -30, {"part": "c", "bytes_before": 50, "bytes_after": 80}),
    ]
    assert all(values["seconds"] >= 0 for _, values in notes)


def test_the_undo_releases_first_and_takes_back_in_reverse() -> None:
    """What is to be released does not come back, wherever it was before."""
    booked = Booked(a=1, b=1, c=1, d=1)
    booked.there |= {"a": True, "d": True}
    residency = Residency(before=booked.moves("-a +b +c"), release=booked.moves("-d"))
    undo = residency.prepare(view())
    assert undo is not None
    booked.log.clear()
    undo()
    assert booked.log == ["offload d", "offload c", "offload b", "onload a"]
    assert booked.there == {"a": True, "b": False, "c": False, "d": False}


def test_what_comes_for_the_round_alone_is_let_go_of_by_both_ends() -> None:
    """Parameters that are made again to be sent stay until that is proven, and no longer."""
    for ends in ("clean", "undo"):
        booked = Booked(p=1)
        residency = Residency(before=booked.moves("+p"), release=booked.moves("-p"))
        undo = residency.prepare(view())
        assert undo is not None
        assert booked.there == {"p": True}
        residency.clean(view()) if ends == "clean" else undo()
        assert booked.log == ["onload p", "offload p"]


def test_moves_that_are_named_for_failure_stand_for_the_way_back() -> None:
    """After the release."""
    booked = Booked(a=1, b=1, c=1)
    booked.there["a"] = True
    residency = Residency(before=booked.moves("-a +b"), failed=booked.moves("-a +b +c"))
    undo = residency.prepare(view())
    assert undo is not None
    undo()
    assert booked.log == ["offload a", "onload b", "onload c"]


def test_a_move_that_fails_is_taken_back_with_those_before_it() -> None:
    """By whoever raises, since nobody gets an undo of one that raises; what fails then is a note."""
    booked = Booked(a=1, b=1, c=1)
    booked.there["a"] = True
    boom = OSError("boom")
    booked.failing = {"onload c": boom, "offload b": OSError("stuck")}
    residency = Residency(before=booked.moves("-a +b +c"))
    with pytest.raises(OSError, match="boom") as caught:
        residency.prepare(view())
    assert caught.value is boom
    assert boom.__notes__ == [
        "and offload b failed: OSError: stuck",
        "and onload a was not tried: what should have gone before it is still there",
    ]
    booked.failing = {}
    assert residency.prepare(view("r2")) is not None, "the next round begins anew"


def test_a_clean_up_that_fails_is_undone_as_a_whole() -> None:
    """What it has brought goes again; what it has released stays so."""
    booked = Booked(a=1, b=1, c=1, d=1, e=1)
    booked.there |= {"a": True, "d": True}
    residency = Residency(
        before=booked.moves("-a +b"), release=booked.moves("-d"), after=booked.moves("+c +e")
    )
    undo = residency.prepare(view())
    assert undo is not None
    booked.failing = {"onload e": OSError("boom")}
    with pytest.raises(OSError, match="boom"):
        residency.clean(view())
    undo()
    assert booked.there == {"a": True, "b": False, "c": False, "d": False, "e": False}


def test_an_undo_that_fails_says_everything_in_one_line() -> None:
    """And does what else it can."""
    booked = Booked(a=1, b=1, c=1)
    booked.there |= {"a": True}
    residency = Residency(before=booked.moves("-a +b +c"))
    undo = residency.prepare(view())
    assert undo is not None
    booked.failing = {"onload a": OSError("boom"), "offload c": OSError("stuck")}
    with pytest.raises(ResidencyError) as caught:
        undo()
    line = str(caught.value)
    assert line.startswith(
        "residency could not be put back: offload c failed: OSError: stuck; onload a was not"
    )
    assert "\n" not in line
    assert booked.there == {"a": False, "b": False, "c": True}


def test_a_part_that_does_not_do_what_it_says_is_found_out() -> None:
    """It returned, and is not there."""
    part = CalledPart("a", on=print, off=print, resident=lambda: False)
    with pytest.raises(ResidencyError, match="onload a was done, and the part says that it is not in memory"):
        Residency(before=[onload(part)]).prepare(view())


def test_a_round_does_not_begin_in_the_moves_of_another() -> None:
    """One that hangs in a part was given up by its round; it is still at it, and takes back what it did."""
    reached, going = threading.Event(), threading.Event()
    there: list[bool] = []

    def slow() -> None:
        reached.set()
        assert going.wait(SOON)
        there.append(True)

    part = CalledPart("a", on=slow, off=there.clear, resident=lambda: bool(there))
    residency = Residency(before=[onload(part)])
    hanging = spawn("hanging", residency.prepare, view("r1"))
    assert reached.wait(SOON)
    busy = "residency has not finished the moves of round r1"
    with pytest.raises(ResidencyError, match=busy):
        residency.prepare(view("r2"))
    going.set()
    undo = hanging.result(SOON)
    with pytest.raises(ResidencyError, match=busy):
        residency.prepare(view("r2"))
    assert undo is not None
    undo()
    assert residency.prepare(view("r3")) is not None


def test_who_is_woken_is_told_from_who_is_not() -> None:
    """Engines whose weights come before the round; a cache or a sleep of others wakes nobody."""
    receiver = receiver_for({"w": torch.zeros(2)}, "e1")
    named = CalledPart("w0", on=print, off=print, engine="e0")
    gated = Gated(CalledPart("w1", on=print, off=print), receiver)
    other = CalledPart("w2", on=print, off=print, engine="e2")
    trainer = CalledPart("trainer", on=print, off=print)
    residency = Residency(before=[offload(other), onload(named), onload(gated), onload(trainer)])
    assert residency.wakes == {"e0", "e1"}


def test_lists_that_could_not_be_meant_are_refused() -> None:
    """Two parts of one name, and a release that comes."""
    one, two = (CalledPart("a", on=print, off=print) for _ in range(2))
    with pytest.raises(SetupError, match="two parts are called 'a': give each a name of its own"):
        Residency(before=[offload(one)], after=[onload(two)])
    with pytest.raises(SetupError, match=r"Residency\(release=...\): onload a is no release"):
        Residency(release=[onload(one)])


def test_shift_is_taken_back_if_it_fails() -> None:
    """The first error stays the first."""
    booked = Booked(a=1, b=1, c=1)
    booked.there["a"] = True
    booked.failing["onload c"] = boom = OSError("boom")
    with pytest.raises(OSError, match="boom") as caught:
        shift(*booked.moves("-a +b +c"))
    assert caught.value is boom
    assert booked.log == ["offload a", "onload b", "offload b", "onload a"]
    booked.failing |= {"offload b": OSError("stuck")}
    with pytest.raises(OSError, match="boom"):
        shift(*booked.moves("-a +b +c"))
    assert boom.__notes__ == ["and offload b failed: OSError: stuck"]
    assert booked.there == {"a": False, "b": True, "c": False}


def test_shift_takes_back_what_moved_and_raised_then() -> None:
    """It is there, whatever it says of how it came."""
    there: list[bool] = []

    def late() -> None:
        there.append(True)
        raise OSError("late")

    part = CalledPart("a", on=late, off=there.clear, resident=lambda: bool(there))
    with pytest.raises(OSError, match="late"):
        shift(onload(part))
    assert not there


# -- orders that nobody thought of -------------------------------------------------------------------------

SIZES = {"a": 5, "b": 3, "c": 2, "d": 1}
LISTS = st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=4)


@dataclass
class Thought:
    """Lists of moves, who is there before them, and what goes wrong."""

    before: list[tuple[str, bool]]
    release: list[str]
    after: list[tuple[str, bool]]
    failed: list[tuple[str, bool]] | None
    there: set[str]
    capacity: int
    breaks: int
    later: bool


@given(
    st.builds(
        Thought,
        LISTS,
        st.lists(st.sampled_from("abcd"), max_size=2),
        LISTS,
        st.none() | LISTS,
        st.sets(st.sampled_from("abcd")),
        st.integers(1, 11),
        st.integers(0, 9),
        st.booleans(),
    )
)
def test_what_is_let_through_never_passes_what_there_is(thought: Thought) -> None:
    """Any lists, with a fault at any move: refused before the first one, or within the capacity throughout.

    And after a failure everything that was not to be released is where it was.
    """
    listed = (*thought.before, *thought.after, *(thought.failed or ()))
    thought.there &= {*thought.release, *(name for name, _ in listed)}  # nobody counts what is never moved
    assume(sum(SIZES[each] for each in thought.there) <= thought.capacity)
    booked = Booked(**SIZES)
    booked.there |= dict.fromkeys(thought.there, True)
    first = dict(booked.there)
    used: list[int] = []
    made: list[str] = []
    for name in SIZES:
        booked.parts[name] = watched(booked, name, used, made, thought.breaks)

    def moves(listed: list[tuple[str, bool]]) -> list[Move]:
        return [Move(booked.parts[name], comes) for name, comes in listed]

    residency = Residency(
        before=moves(thought.before), release=moves([(name, False) for name in thought.release]),
        after=moves(thought.after), failed=None if thought.failed is None else moves(thought.failed),
        capacity=thought.capacity,
    )  # fmt: skip
    works = a_round(residency, fails=thought.later)
    assert max(used, default=0) <= thought.capacity
    if works is None:
        assert made == []
    elif not works and thought.failed is None and len(made) >= thought.breaks > 0:
        return  # it failed at a move, perhaps one of those that take others back
    elif not works and thought.failed is None:
        assert booked.there == {name: first[name] and name not in thought.release for name in SIZES}


def a_round(residency: Residency, *, fails: bool) -> bool | None:
    """Whether it works; None if it was refused. It fails between the two ends of the handler, if at all."""
    try:
        undo = residency.prepare(view())
    except MemoryShort:
        return None
    except OSError:
        return False
    assert undo is not None
    try:
        if fails:
            raise OSError
        residency.clean(view())
    except OSError:
        with suppress(ResidencyError):
            undo()
        return False
    return True


def watched(booked: Booked, name: str, used: list[int], made: list[str], breaks: int) -> CalledPart:
    """A part that fails at one of all moves, and of which it is known how much there was at any time."""

    def move(*, comes: bool) -> None:
        made.append(name)
        if len(made) == breaks:
            raise OSError(name)
        booked.there[name] = comes
        used.append(sum(SIZES[each] for each, there in booked.there.items() if there))

    return CalledPart(
        name, on=lambda: move(comes=True), off=lambda: move(comes=False), nbytes=SIZES[name],
        resident=lambda: booked.there[name],
    )  # fmt: skip


def test_the_first_move_that_is_too_much_is_named() -> None:
    """On the good way, on the way back, and on the way for a failure."""
    booked = Booked(a=60, b=60, c=30)
    sizes, there = {"a": 60, "b": 60, "c": 30}, {"a": True, "b": False, "c": False}

    def over(capacity: int = 100, **lines: str) -> str:
        found = overflow(
            Course(**{name: tuple(booked.moves(line)) for name, line in lines.items()}),
            sizes,
            there,
            capacity,
        )
        return "" if found is None else f"{found[0]}: {found[1]}"

    assert over(before="-a +b", after="+c") == ""
    assert over(before="+b -a", after="+c") == "onload b: 120"
    assert over(before="-a +b", after="+c", capacity=89) == "onload c: 90"
    assert over(before="-a", after="+b", failed="+a +c +b") == "onload b: 150"
    assert over(before="-a +b", after="+c -b +a") == "", "the cache and the trainer fit"
    assert over(before="-a", release="-b", after="+b +c", failed="+b +a") == "onload b: 120"
    assert [str(each) for each in inverse(booked.moves("-a +b"))] == ["offload b", "onload a"]


# -- real tensors ------------------------------------------------------------------------------------------


class Colocated:
    """A trainer that computes in bfloat16, with masters and an optimizer; and an engine beside it."""

    def __init__(
        self,
        fault: Callable[[str, int], None] | None = None,
        policy: Policy | None = None,
        *,
        again: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.masters = {"w": torch.randn(16, 16), "b": torch.randn(16)}
        self.model = {name: each.to(torch.bfloat16) for name, each in self.masters.items()}
        self.moments = [torch.randn(16, 16), torch.randn(16)]
        self.held = {name: torch.zeros_like(each) for name, each in self.model.items()}
        self.keys = torch.ones(64)
        self.receiver = receiver_for(self.held, "e0", fault=fault, asleep=lambda: not self.weights.resident())
        self.optimizer = HostCopy("optimizer", self.moments)
        self.parameters = Rebuilt("parameters", self.model, self.masters)
        self.weights = Gated(HostCopy("weights", self.held), self.receiver)
        self.cache = Gated(Scratch("cache", [self.keys]), self.receiver)
        self.records: list[Any] = []
        back = [onload(self.parameters)] if again else []
        residency = Residency(
            before=[offload(self.optimizer), *back, onload(self.weights)],
            release=[offload(self.parameters)],
            after=[onload(self.cache)],
        )
        self.sync = WeightSync(
            [LocalEngine(self.receiver)], "memory", policy=policy or Policy(deadline=SOON),
            handlers=[residency, self.records.append],
        )  # fmt: skip

    def train(self) -> None:
        """The engine sleeps, the trainer wakes and takes a step."""
        shift(offload(self.cache), offload(self.weights), onload(self.parameters), onload(self.optimizer))
        for name, master in self.masters.items():
            master.add_(1)
            self.model[name].copy_(master)

    def there(self) -> dict[str, bool]:
        """Who has memory, as the tensors say."""
        return {
            "optimizer": all(map(has_memory, self.moments)),
            "parameters": all(map(has_memory, self.model.values())),
            "weights": all(map(has_memory, self.held.values())),
            "cache": has_memory(self.keys),
        }

    def engine_has_the_masters(self) -> bool:
        """Bit for bit, cast."""
        return all(
            torch.equal(self.held[name], each.to(torch.bfloat16)) for name, each in self.masters.items()
        )


GENERATING = {"optimizer": False, "parameters": False, "weights": True, "cache": True}


def test_rounds_of_a_trainer_and_an_engine_that_take_turns() -> None:
    """The parameters have no copy anywhere while the engine generates, and the engine gets every bit."""
    both = Colocated()
    with both.sync as sync:
        for step in range(1, 5):
            both.train()
            assert not generates(both.receiver.gate)
            result = sync.on_step_end(step, both.model)
            assert result is not None
            assert result.ok, result.summary()
            assert both.there() == GENERATING
            assert both.engine_has_the_masters()
            assert generates(both.receiver.gate)
            assert sync.servable() == {"e0": step - 1}
        assert both.parameters.proven == 2
    acted = [(each.trigger, each.facts["part"]) for each in both.records if each.event == "action"]
    assert acted[-4:] == [
        ("offload", "optimizer"), ("onload", "weights"), ("offload", "parameters"), ("onload", "cache"),
    ]  # fmt: skip


def test_parameters_stay_until_the_update_is_proven() -> None:
    """The release is no earlier than the publication: every bucket, and every look at them, is before it."""
    both = Colocated()
    with both.sync as sync:
        both.train()
        assert sync.on_train_begin(both.model).ok
    events = [each.trigger for each in both.records if each.event in ("transition", "action")]
    assert events.index("Published") < events.index("offload", events.index("onload") + 1)


@pytest.mark.parametrize("point", ["open", "apply", "acked", "commit"])
def test_a_failure_lets_go_of_the_parameters_too(point: str) -> None:
    """They would stay in memory otherwise; what else was moved is where it was, and the next round works."""
    failing: list[str] = []

    def fault(where: str, bucket: int) -> None:
        if where in failing:
            failing.clear()
            raise RuntimeError(f"it fails in bucket {bucket}")

    both = Colocated(fault)
    with both.sync as sync:
        both.train()
        assert sync.on_train_begin(both.model).ok
        both.train()
        failing.append(point)
        result = sync.on_step_end(1, both.model)
        assert result is not None
        assert not result.ok
        assert both.there() == {"optimizer": True, "parameters": False, "weights": False, "cache": False}
        assert not generates(both.receiver.gate)
        assert sync.servable() == {}, "nobody is sent to an engine that is asleep"
        both.train()
        result = sync.on_step_end(2, both.model)
        assert result is not None
        assert result.ok, result.summary()
        assert both.there() == GENERATING
        assert both.engine_has_the_masters()


@pytest.mark.parametrize("again", [False, True])
def test_a_retry_does_not_read_what_was_let_go_of(again: bool) -> None:
    """The first try has released it: said in a line, since to read there may end the process.

    One that ``before`` brings back is sent again.
    """
    failing = ["acked"]

    def fault(where: str, bucket: int) -> None:
        if where in failing:
            failing.clear()
            raise RuntimeError(f"it fails in bucket {bucket}")

    both = Colocated(fault, Policy(deadline=SOON, attempts=2), again=again)
    with both.sync as sync:
        both.train()
        result = sync.on_train_begin(both.model)
        assert result.attempts == 2
        if again:
            assert result.ok, result.summary()
            assert both.there() == GENERATING
            assert both.engine_has_the_masters()
        else:
            assert isinstance(result.error, ResidencyError)
            assert "tensor 'w' is to be sent and has no memory" in str(result.error)
            assert both.there() == {**dict.fromkeys(GENERATING, False), "optimizer": True}
            both.train()
            assert sync.begin(1, both.model, snapshot=False).wait().ok


@pytest.mark.parametrize("stages", [True, False])
@pytest.mark.parametrize("transport", ["memory", "shm", "collective"])
def test_what_was_handed_over_can_go(transport: str, stages: bool) -> None:
    """On both sides: nothing that reads or writes weights keeps their memory from being let go of."""
    model = {"w": torch.randn(500, 40), "b": torch.randn(7)}
    held = {name: torch.zeros_like(each) for name, each in model.items()}
    link = LocalEngine(receiver_for(held, "a", stages=stages))
    policy = Policy(deadline=SOON, verify="full", bucket_bytes=10_001)
    with WeightSync([link], transport, policy=policy) as sync:
        assert sync.begin(0, model, snapshot=False).wait().ok
        for part in (HostCopy("model", model), HostCopy("held", held)):
            part.offload()
            part.onload()
        assert sync.begin(1, {**model, "b": torch.ones(7)}, snapshot=False).wait().ok
        assert torch.equal(held["w"], model["w"])
        assert held["b"].tolist() == [1.0] * 7


def test_a_round_is_not_robbed_of_what_it_sends() -> None:
    """The list says to let go of the parameters before they are sent: refused, and nothing was moved."""
    both = Colocated()
    robbing = Residency(before=[offload(both.optimizer), offload(both.parameters)])
    with WeightSync([LocalEngine(both.receiver)], "memory", handlers=[robbing]) as sync:
        result = sync.on_train_begin(both.model)
        assert isinstance(result.error, ResidencyError)
        assert "offload parameters before the round would take away what it sends" in str(result.error)
        assert all(both.there().values())
        assert sync.begin(1, both.model).wait().ok, "of a private copy, it is not"
    both.sync.close()


@pytest.mark.parametrize("engine", ["e0", "e1"])
def test_a_round_wakes_the_engines_that_its_handlers_name(engine: str) -> None:
    """And no other: one that nobody wakes is refused as ever, before anything is moved."""
    awake: list[bool] = []
    link = LocalEngine(receiver_for({"w": torch.zeros(3)}, "e1", asleep=lambda: not awake))
    part = CalledPart(
        "weights", on=lambda: awake.append(True), off=awake.clear, resident=lambda: bool(awake), engine=engine
    )
    with WeightSync([link], "memory", handlers=[Residency(before=[onload(part)])]) as sync:
        for step in range(2):  # at the first contact, and when it is known
            error = error_of(sync, step)
            if engine == "e1":
                assert error is None
                assert sync.servable() == {"e1": step}
                part.offload()
                assert sync.servable() == {}
            else:
                assert isinstance(error, EngineAsleep)
                assert not awake


def test_an_engine_that_does_not_wake_is_lost_alone_if_its_part_lets_it() -> None:
    """Its own refusal counts; the others go on, and it comes back when it wakes."""
    awake, asked = {"e0"}, [False]
    held = {name: {"w": torch.zeros(3)} for name in ("e0", "e1")}
    links = [
        LocalEngine(receiver_for(held[name], name, asleep=lambda name=name: name not in awake))  # type: ignore[misc]
        for name in held
    ]
    part = CalledPart(
        "e1 weights", on=lambda: asked.__setitem__(0, True), off=lambda: asked.__setitem__(0, False),
        resident=lambda: asked[0], engine="e1",
    )  # fmt: skip
    policy = Policy(deadline=SOON, on_engine_failure="quarantine", quorum=1, rest=0.001)
    handlers = [Residency(before=[onload(part)])]
    with WeightSync(links, "memory", policy=policy, handlers=handlers) as sync:
        result = sync.begin(0, {"w": torch.ones(3)}).wait()
        assert [row.disposition for row in result.engines] == [
            Disposition.serving_new, Disposition.quarantined,
        ]  # fmt: skip
        assert sync.servable() == {"e0": 0}
        awake.add("e1")
        assert eventually(lambda: sync.begin(1, {"w": torch.full((3,), 2.0)}).wait().ok, SOON)
        assert held["e1"]["w"].tolist() == [2.0] * 3


def error_of(sync: WeightSync, step: int) -> BaseException | None:
    """Of a round, or of its refusal; None if it is good."""
    try:
        return sync.begin(step, {"w": torch.full((3,), float(step))}).wait().error
    except EngineAsleep as error:
        return error


# -- a trainer of several ranks ----------------------------------------------------------------------------


class Devices:
    """Two ranks with a device each, of 100; an engine that lies on both. What passes that is an error."""

    def __init__(self) -> None:
        self.there: dict[str, tuple[int, bool]] = {
            "rank 0": (60, True), "rank 1": (60, True), "weights": (60, False), "cache": (30, False),
        }  # fmt: skip
        self.log: list[str] = []
        self.slow = threading.Event()
        self._turn = threading.Lock()

    def part(self, name: str, **more: Any) -> CalledPart:
        """A part of a rank, on its device; one of the engine, on both."""
        return CalledPart(
            name, on=lambda: self._move(name, comes=True), off=lambda: self._move(name, comes=False),
            resident=lambda: self.there[name][1], **more,
        )  # fmt: skip

    def _move(self, name: str, *, comes: bool) -> None:
        if name == "rank 1":  # it is the later one
            assert self.slow.wait(SOON)
        with self._turn:
            size, _ = self.there[name]
            self.there[name] = (size, comes)
            self.log.append(f"{'onload' if comes else 'offload'} {name}")
            if name == "rank 0":
                self.slow.set()
            for rank in ("rank 0", "rank 1"):
                used = sum(self.there[each][0] for each in (rank, "weights", "cache") if self.there[each][1])
                if used > 100:
                    self.there[name] = (size, not comes)
                    raise MemoryError(f"{used} on the device of {rank}")


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_is_woken_when_every_rank_has_made_room(fails: bool) -> None:
    """Its devices are those of all ranks. When the round fails it sleeps again before any rank comes back."""
    devices = Devices()
    ranks = [Residency(before=[offload(devices.part(f"rank {each}"))]) for each in range(2)]
    weights, cache = (devices.part(each, engine="a") for each in ("weights", "cache"))
    engine = Residency(before=[onload(weights)], after=[onload(cache)], after_ranks=True, name="engines")
    store: Any = HashStore()
    leading, following = (TrainerRanks(store, each, 2) for each in range(2))
    held = {"w": torch.zeros(4)}
    failing = ["apply"] if fails else []

    def fault(where: str, bucket: int) -> None:
        if where in failing:
            raise RuntimeError(f"it fails in bucket {bucket}")

    link = LocalEngine(receiver_for(held, "a", fault=fault, asleep=lambda: not devices.there["weights"][1]))
    policy = Policy(deadline=SOON)
    with (
        WeightSync([link], "memory", policy=policy, handlers=[engine, ranks[0]], ranks=leading) as sync,
        FollowerSync(following, policy=policy, handlers=[ranks[1]]) as other,
    ):
        model = {"w": torch.ones(4)}
        beside = spawn("rank 1", other.on_train_begin, model)
        result = sync.on_train_begin(model)
        beside.result(SOON)
        assert result.ok is not fails, result.summary()
        assert not result.unclean, result.summary()
        assert {*devices.log[:2]} == {"offload rank 0", "offload rank 1"}
        if fails:
            assert devices.log[2:4] == ["onload weights", "offload weights"]
            assert {*devices.log[4:]} == {"onload rank 0", "onload rank 1"}
        else:
            assert devices.log[2:] == ["onload weights", "onload cache"]


def test_an_engines_parts_among_those_of_a_rank_are_refused() -> None:
    """They would be moved when this rank has made room, and perhaps no other."""
    part = CalledPart("weights", on=print, off=print, engine="a")
    link = LocalEngine(receiver_for({"w": torch.zeros(4)}, "a"))
    store: Any = HashStore()
    with pytest.raises(SetupError, match="residency moves parts of engine a, whose devices are"):
        WeightSync(
            [link], "memory", handlers=[Residency(before=[onload(part)])], ranks=TrainerRanks(store, 0, 2)
        )
