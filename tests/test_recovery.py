"""Recovery: a quarantined engine comes back by a full resend, rests between failures, and serves not before.

With real rounds over fakes outside, and a hand-turned clock for the rests.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weightsync.fsm.contract import EngineLink
from weightsync.fsm.engine_table import Opened, Session
from weightsync.fsm.errors import (
    EngineAsleep,
    EngineRefused,
    EngineResting,
    EngineTaken,
    EngineUnknown,
    SetupError,
    WorldMismatch,
)
from weightsync.fsm.journal import replay
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Expectation
from weightsync.fsm.recovery import Backoff, Care
from weightsync.fsm.results import PassedOver, RoundResult
from weightsync.fsm.states import Disposition, EngineState, Outcome
from weightsync.sync import WeightSync
from weightsync.testing.clock import HandClock
from weightsync.testing.fakes import FakeEngine, FakeTransport, FakeWeights, Gate
from weightsync.testing.scene import Trainer, close_all


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


# -- the value --------------------------------------------------------------------------------------------


@given(first=st.floats(1e-3, 1e3), more=st.floats(1.0, 1e3), tries=st.integers(1, 200))
def test_each_rest_is_twice_the_last_up_to_the_longest(first: float, more: float, tries: int) -> None:
    """And never longer, however often it failed."""
    backoff, care, now = Backoff(first, first * more), Care(), 5.0
    rests = []
    for _ in range(tries):
        care = care.failed(now, backoff)
        rests.append(care.left(now))
        now += rests[-1]
        assert care.left(now) == pytest.approx(0.0, abs=1e-6)
    assert rests[0] == pytest.approx(min(first, first * more))
    assert all(rest <= first * more * (1 + 1e-9) for rest in rests)
    for earlier, later in pairwise(rests):
        assert later == pytest.approx(min(2 * earlier, first * more), rel=1e-6)
    assert care.tries == tries


@pytest.mark.parametrize(("first", "longest"), [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_a_rest_that_is_none_is_refused(first: float, longest: float) -> None:
    """Before anything moves."""
    with pytest.raises(SetupError, match="is none"):
        Backoff(first, longest)


def test_who_never_failed_may_be_tried() -> None:
    """Whatever the clock says."""
    assert Care().left(-1e9) == 0.0


@pytest.mark.parametrize("name", ["rest", "longest_rest"])
def test_rests_are_seconds(name: str) -> None:
    """Finite, and above nothing."""
    wrong: Any = {name: float("inf")}
    with pytest.raises(SetupError, match=name):
        Policy(**wrong)


# -- rounds -----------------------------------------------------------------------------------------------


class Hospital:
    """A trainer that goes on without lost engines, on whose clock only the rests are counted."""

    def __init__(self, *, fail: bool = False, **values: Any) -> None:
        usual: dict[str, Any] = {"deadline": 4.0, "lease": 2.0, "rest": 1.0, "longest_rest": 8.0}
        if not fail:
            usual |= {"on_engine_failure": "quarantine", "quorum": 1}
        self.trainer = Trainer(Policy(**{**usual, **values}))
        self.clock = HandClock(100.0)
        self.sync, self.engines = self.trainer.sync, {each.id: each for each in self.trainer.engines}
        self.sync._books.now = self.clock.now
        self.step = 0

    def pass_time(self, seconds: float) -> None:
        """Turn the clock."""
        self.clock.advance_to(self.clock.now() + seconds)

    def hand_over(self, fill: int | None = None) -> RoundResult:
        """The next step's round."""
        self.step += 1
        result = self.sync.on_step_end(self.step, FakeWeights(self.step if fill is None else fill))
        assert result is not None
        return result

    def lose(self, name: str) -> RoundResult:
        """A round in which this engine is lost."""
        self.engines[name].bad["bucket 1"] = OSError("lost")
        result = self.hand_over()
        assert result.serving(Disposition.quarantined) == (name,)
        return result

    def notes(self) -> list[dict[str, Any]]:
        """What the log says of recoveries."""
        return [dict(r.facts or {}) for r in self.trainer.records if r.event == "recovery"]

    def check_log(self) -> None:
        """Each round of the log replays to its end."""
        rounds: dict[str, list[Any]] = {}
        for record in self.trainer.records:
            rounds.setdefault(record.round, []).append(json.loads(json.dumps(record.to_json())))
        for records in rounds.values():
            assert replay(records)[-1].after.state.name == "Released"


def opened(engine: FakeEngine, during: Callable[[], object]) -> int:
    """How often the engine was paused meanwhile."""
    before = engine.words.count("open")
    during()
    return engine.words.count("open") - before


def test_a_lost_engine_is_in_the_next_round_at_once() -> None:
    """The first failure costs no rest; the log says that the round is to bring it back."""
    hospital = Hospital()
    hospital.hand_over()
    hospital.lose("b")
    assert hospital.hand_over().outcome is Outcome.complete
    assert hospital.sync.servable() == {"a": 2, "b": 2}
    assert hospital.notes() == [{"tries": {"b": 1}}]
    hospital.check_log()


def test_an_engine_that_keeps_failing_is_tried_less_and_less() -> None:
    """Sixteen rounds, a second apart: it is said a word to in five of them, and the log says when and why."""
    hospital = Hospital()
    hospital.lose("b")
    engine, tried = hospital.engines["b"], []
    for step in range(16):
        engine.bad["open"] = OSError("again")
        words = len(engine.words)
        result = hospital.hand_over()
        assert result.outcome is Outcome.partial
        assert result.ok
        if len(engine.words) > words:
            tried.append(step)
        else:
            (row,) = [row for row in result.engines if row.engine == "b"]
            assert isinstance(row.error, EngineResting)
            assert "the next one is to try in" in str(row.error)
        hospital.pass_time(1.0)
    assert tried == [0, 1, 3, 7, 15]
    assert [note["tries"]["b"] for note in hospital.notes()] == [1, 2, 3, 4, 5]
    resting = [r for r in hospital.trainer.records if r.error and "EngineResting" in r.error]
    assert {(r.event, r.source, r.engine) for r in resting} == {("transition", "Idle", "b")}
    assert len(resting) == 11
    hospital.check_log()
    hospital.engines["b"].bad.clear()
    assert hospital.hand_over().outcome is Outcome.partial
    hospital.pass_time(8.0)
    assert hospital.hand_over().outcome is Outcome.complete
    hospital.lose("b")
    assert hospital.hand_over().outcome is Outcome.complete, "a commit has ended its rests"


def test_an_engine_that_is_dead_slows_nobody_while_it_rests() -> None:
    """It is not even asked who it is, by a round or by a router."""
    hospital = Hospital()
    hospital.hand_over()
    engine = hospital.engines["b"]
    engine.alive = False
    for _ in range(2):
        hospital.hand_over()
    words = list(engine.words)
    hospital.hand_over()
    assert hospital.sync.servable() == {"a": 3}
    assert engine.words == words
    engine.restart()
    hospital.pass_time(2.0)
    assert hospital.hand_over().outcome is Outcome.complete
    assert hospital.sync.servable() == {"a": 4, "b": 4}


def test_nobody_rests_if_the_others_are_too_few() -> None:
    """A quorum of two of two needs it: it is asked for, however often it failed."""
    hospital = Hospital(quorum=2)
    for _ in range(3):
        hospital.engines["b"].bad["open"] = OSError("again")
        assert hospital.hand_over().outcome is Outcome.failed
    assert hospital.hand_over().outcome is Outcome.complete


def test_without_quarantine_every_engine_is_asked_for_each_time() -> None:
    """That is what the policy says."""
    hospital = Hospital(fail=True)
    for _ in range(4):
        hospital.engines["b"].bad["open"] = OSError("again")
        assert hospital.hand_over().outcome is Outcome.failed
    assert hospital.hand_over().outcome is Outcome.complete


# -- catching up ------------------------------------------------------------------------------------------


def test_catching_up_asks_for_those_that_are_behind_alone() -> None:
    """The same version, the same bytes, a round of its own; the other engine is not paused for it."""
    hospital = Hospital()
    hospital.hand_over()
    lost = hospital.lose("b")
    assert hospital.sync.servable() == {"a": lost.version}

    def catch_up() -> None:
        result = hospital.sync.catch_up(hospital.step, FakeWeights(hospital.step))
        assert (result.outcome, result.version) == (Outcome.complete, lost.version)
        assert [row.engine for row in result.engines] == ["b"]

    assert opened(hospital.engines["a"], catch_up) == 0
    assert hospital.sync.servable() == {"a": lost.version, "b": lost.version}
    assert hospital.engines["b"].content == FakeWeights(hospital.step).content
    assert hospital.notes() == [{"tries": {"b": 1}}]
    assert hospital.hand_over().version == lost.version + 1
    hospital.check_log()


def test_catching_up_without_the_bytes_is_the_next_version_for_all() -> None:
    """Other bytes may not go under the published number."""
    hospital = Hospital()
    hospital.hand_over()
    lost = hospital.lose("b")
    result = hospital.sync.catch_up(9, FakeWeights(99))
    assert (result.outcome, result.version) == (Outcome.complete, lost.version + 1)
    assert hospital.sync.servable() == {"a": result.version, "b": result.version}


def test_without_verification_nobody_can_tell_the_bytes_apart() -> None:
    """So they get a number of their own."""
    hospital = Hospital(verify="off")
    hospital.hand_over()
    lost = hospital.lose("b")
    assert hospital.sync.catch_up(9, FakeWeights(hospital.step)).version == lost.version + 1


def test_there_may_be_nobody_to_catch_up() -> None:
    """Said as a value; nobody is paused, and the lock is not asked for."""
    hospital = Hospital()
    hospital.hand_over()
    epoch = hospital.trainer.lock.status().epoch
    result = hospital.sync.catch_up(1, FakeWeights(1))
    assert result.passed_over == PassedOver("nobody", 0)
    assert result.require().summary() == "step 1: not sent, no engine has to catch up now"
    assert hospital.trainer.lock.status().epoch == epoch


def test_an_engine_that_restarted_or_missed_a_round_catches_up_too() -> None:
    """It was never quarantined, and does not hold the version all the same."""
    hospital = Hospital()
    hospital.hand_over()
    hospital.engines["b"].restart()
    result = hospital.sync.catch_up(1, FakeWeights(1))
    assert [(row.engine, row.incarnation) for row in result.engines] == [("b", "1")]
    assert hospital.sync.servable() == {"a": 0, "b": 0}


@pytest.mark.parametrize("why", ["asleep", "ranks", "taken", "unknown"])
def test_who_cannot_catch_up_is_refused_before_the_lock(why: str) -> None:
    """As for every other round; the lock is not asked for, and nothing is in the log."""
    hospital = Hospital()
    hospital.hand_over()
    b: FakeEngine = hospital.engines["b"]
    kind: type[EngineRefused] = EngineUnknown
    if why == "unknown":
        late = FakeEngine("c")
        late.alive = False
        hospital.sync.add_engine(late)
    elif why == "taken":
        b.restart()
        session, kind = Session("theirs", 1 << 50, 0), EngineTaken
        b.machine.fire(Opened(session, Expectation("plan", 1, 1, 1)))
    else:
        b.restart()
        b.asleep, b.ranks = why == "asleep", 2 if why == "ranks" else None
        kind = EngineAsleep if why == "asleep" else WorldMismatch
    epoch, told = hospital.trainer.lock.status().epoch, len(hospital.trainer.records)
    error: Exception | None = None
    try:
        hospital.sync.catch_up(1, FakeWeights(1))
    except EngineRefused as refused:
        error = refused
    assert type(error) is kind, "it was not refused"
    assert hospital.trainer.lock.status().epoch == epoch
    assert len(hospital.trainer.records) == told


def test_who_catches_up_does_not_wait_for_who_cannot() -> None:
    """Two are behind, and one of them sleeps."""
    hospital = Hospital()
    hospital.hand_over()
    for engine in hospital.engines.values():
        engine.restart()
    hospital.engines["b"].asleep = True
    result = hospital.sync.catch_up(1, FakeWeights(1))
    assert result.serving(Disposition.serving_new) == ("a",)
    assert hospital.sync.servable() == {"a": 0}


def test_apart_an_engine_that_fell_asleep_does_not_undo_the_others_round() -> None:
    """They have the weights; the round of its own is left out."""
    hospital = Hospital(catch_up="apart")
    hospital.hand_over()
    b = hospital.engines["b"]
    b.bad["bucket 1"] = OSError("lost")
    commit = hospital.engines["a"].commit

    def then_b_sleeps(session: Session) -> Any:
        b.asleep = True
        return commit(session)

    hospital.engines["a"].commit = then_b_sleeps  # type: ignore[method-assign]
    result = hospital.hand_over()
    assert (result.outcome, result.version) == (Outcome.partial, 1)
    assert hospital.sync.servable() == {"a": 1}


def test_an_engine_that_fell_asleep_in_its_next_life_holds_nothing() -> None:
    """It is behind, and not vouched for when it wakes."""
    hospital = Hospital()
    hospital.hand_over()
    hospital.engines["b"].restart()
    hospital.engines["b"].asleep = True
    assert hospital.sync.servable() == {"a": 0}
    assert hospital.sync.engines()["b"].version is None, "it kept its version"


def test_failing_to_catch_up_is_a_failed_round_and_a_rest() -> None:
    """The others serve on; until it may be tried again there is nobody to catch up."""
    hospital = Hospital()
    hospital.hand_over()
    lost = hospital.lose("b")
    hospital.engines["b"].bad["bucket 2"] = OSError("again")
    result = hospital.sync.catch_up(hospital.step, FakeWeights(hospital.step))
    assert (result.outcome, result.path[-2:]) == (Outcome.failed, ("Failed", "Released"))
    assert hospital.sync.servable() == {"a": lost.version}
    assert hospital.sync.catch_up(hospital.step, FakeWeights(hospital.step)).passed_over is not None
    hospital.pass_time(1.0)
    assert hospital.sync.catch_up(hospital.step, FakeWeights(hospital.step)).ok
    assert hospital.sync.servable() == {"a": lost.version, "b": lost.version}


def test_apart_a_lost_engine_is_back_before_the_call_returns() -> None:
    """With the version it was lost with; and the rounds of the others never ask for it."""
    hospital = Hospital(catch_up="apart")
    hospital.hand_over()
    hospital.engines["b"].bad["bucket 1"] = OSError("lost")
    result = hospital.hand_over()
    assert (result.outcome, result.version) == (Outcome.partial, 1)
    assert hospital.sync.servable() == {"a": 1, "b": 1}
    hospital.check_log()


def test_apart_an_engine_that_keeps_failing_is_in_no_round_of_the_others() -> None:
    """It fails its own rounds, after its own rests."""
    hospital = Hospital(catch_up="apart")
    hospital.engines["b"].bad["bucket 1"] = OSError("lost")
    for _ in range(6):
        hospital.engines["b"].bad["open"] = OSError("again")
        assert hospital.hand_over().ok
        hospital.pass_time(1.0)
    rosters: dict[str, set[str]] = {}
    for record in hospital.trainer.records:
        if record.event == "call" and record.trigger == "open" and record.engine:
            rosters.setdefault(record.round, set()).add(record.engine)
    assert sorted(map(sorted, rosters.values())) == sorted([["a", "b"], *[["a"]] * 5, *[["b"]] * 3])
    hospital.engines["b"].bad.clear()
    hospital.pass_time(8.0)
    assert hospital.hand_over().ok
    assert hospital.sync.servable() == {"a": 6, "b": 6}
    hospital.check_log()


# -- who belongs to it ------------------------------------------------------------------------------------


def test_a_late_joiner_takes_part_in_the_next_round() -> None:
    """And is not servable before, whatever it says of itself."""
    hospital = Hospital()
    hospital.hand_over()
    late = FakeEngine("c")
    hospital.sync.add_engine(late)
    assert hospital.sync.servable() == {"a": 0, "b": 0}
    assert late.words == []
    result = hospital.hand_over()
    assert [row.engine for row in result.engines] == ["a", "b", "c"]
    assert hospital.sync.servable() == {"a": 1, "b": 1, "c": 1}
    assert late.content == FakeWeights(hospital.step).content


def test_a_late_joiner_of_a_round_that_runs_waits_for_the_next_one() -> None:
    """Membership is frozen when the round begins."""
    hospital, gate = Hospital(), Gate()
    hospital.trainer.transport.bad["bucket 1"] = gate
    pending = hospital.sync.begin(1, FakeWeights(1), snapshot=False)
    gate.await_visitor()
    late = FakeEngine("c")
    hospital.sync.add_engine(late)
    hospital.sync.remove_engine("a")
    gate.open()
    assert [row.engine for row in pending.wait().engines] == ["a", "b"]
    assert hospital.sync.servable() == {"b": 0}, "who was removed is not to be used"
    assert "close" not in hospital.engines["a"].words
    result = hospital.sync.catch_up(1, FakeWeights(1))
    assert [row.engine for row in result.engines] == ["c"]
    assert hospital.engines["a"].words[-1] == "close"
    assert hospital.sync.servable() == {"b": 0, "c": 0}


def test_an_engine_that_comes_back_under_its_name_is_a_new_one() -> None:
    """Removed and added again between two rounds: the books have nothing of the one before."""
    hospital = Hospital()
    hospital.hand_over()
    again = FakeEngine("a")
    hospital.sync.remove_engine("a")
    hospital.sync.add_engine(again)
    assert hospital.sync.servable() == {"b": 0}
    hospital.hand_over()
    assert hospital.sync.servable() == {"a": 1, "b": 1}
    assert hospital.engines["a"].words[-1] == "close"
    assert again.content == FakeWeights(hospital.step).content


def test_an_engine_that_comes_back_by_its_old_link_has_to_prove_itself_too() -> None:
    """Nobody knows what was done with it meanwhile; its link stays open."""
    hospital = Hospital()
    hospital.hand_over()
    b = hospital.engines["b"]
    hospital.sync.remove_engine("b")
    hospital.sync.add_engine(b)
    assert hospital.sync.servable() == {"a": 0}, "it was servable before a round"
    hospital.hand_over()
    assert hospital.sync.servable() == {"a": 1, "b": 1}
    assert "close" not in b.words


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_being_removed_does_not_lift_a_quarantine(restarts: bool, between: bool) -> None:
    """The same life comes back by a new link, with a round in between or without."""
    hospital = Hospital()
    hospital.hand_over()
    hospital.lose("b")
    b = hospital.engines["b"]
    hospital.sync.remove_engine("b")
    if between:
        hospital.hand_over()
    if restarts:
        b.restart()
    hospital.sync.add_engine(copy(b))
    result = hospital.hand_over()
    opening = [record for record in hospital.trainer.records if record.event == "opened"][-1]
    tainted = json.dumps((opening.facts or {}).get("tainted", []))
    assert ("b" in tainted) is not restarts, "it was taken for whole"
    assert result.serving(Disposition.serving_new) == ("a", "b")
    assert hospital.sync._books.tainted() == frozenset()
    hospital.check_log()


def test_every_link_is_closed_once() -> None:
    """Of who was replaced, and of who was removed before any round, at the next round or at the end."""
    hospital = Hospital()
    hospital.hand_over()
    new, late, last = (FakeEngine(name) for name in "bcd")
    add = hospital.sync.add_engine
    add(late)
    hospital.sync.remove_engine("c")
    hospital.hand_over()
    assert late.words == ["close"]
    hospital.sync.remove_engine("b")
    add(new)
    add(last)
    hospital.sync.remove_engine("d")
    hospital.sync.close()
    assert hospital.engines["b"].words.count("close") == 1, "a link was left open"
    assert new.words == late.words == last.words == ["close"]
    with pytest.raises(SetupError, match="closed"):
        add(FakeEngine("e"))


def test_membership_that_cannot_be_is_refused_in_one_line() -> None:
    """A name twice, a stranger, the last one, a quorum or a transport that could not be kept."""
    hospital = Hospital(quorum=2)
    with pytest.raises(SetupError, match="there is an engine called 'a'"):
        hospital.sync.add_engine(FakeEngine("a"))
    with pytest.raises(SetupError, match="no engine is called 'z'"):
        hospital.sync.remove_engine("z")
    with pytest.raises(SetupError, match="more engines than the 1"):
        hospital.sync.remove_engine("a")
    hospital = Hospital()
    hospital.sync.remove_engine("a")
    with pytest.raises(SetupError, match="the last engine"):
        hospital.sync.remove_engine("b")
    alone: list[EngineLink] = [FakeEngine("x")]
    policy = Policy(on_engine_failure="quarantine", quorum=0.6)
    with WeightSync(alone, FakeTransport(survives_loss=False), policy=policy) as sync:
        sync.add_engine(FakeEngine("y"))
        with pytest.raises(SetupError, match="cannot go on without a participant"):
            sync.add_engine(FakeEngine("z"))


# -- whatever happens -------------------------------------------------------------------------------------

EVENTS = st.one_of(
    st.tuples(st.just("bad"), st.sampled_from("abc"), st.sampled_from(
        ["hello", "open", "bucket 0", "bucket 2", "commit", "resume", "abort"])),
    st.tuples(st.just("transport"), st.sampled_from(["bucket 1", "open", "collect", "clean"])),
    st.tuples(st.sampled_from(["die", "restart", "remove", "add"]), st.sampled_from("abc")),
    st.tuples(st.just("time"), st.floats(0.1, 4.0)),
    st.tuples(st.just("hand over")),
    st.tuples(st.just("hand over")),
    st.tuples(st.just("catch up"), st.booleans()),
)  # fmt: skip


class History(Hospital):
    """A history that somebody else decides, and what must be true after each of its events."""

    def __init__(self, apart: str) -> None:
        super().__init__(catch_up=apart, deadline=20.0)
        self.engines["b"].machine = FakeEngine("b", stages=False).machine
        self.bytes: dict[int, dict[str, bytes]] = {}
        self.content: dict[str, bytes] = {}

    def live_through(self, event: tuple[Any, ...]) -> None:
        """One of them."""
        match event:
            case ("bad", name, word):
                self.engines.get(name, FakeEngine("?")).bad[word] = OSError(word)
            case ("transport", word):
                self.trainer.transport.bad[word] = OSError(word)
            case ("die", name) if name in self.engines:
                self.engines[name].alive = False
            case ("restart", name) if name in self.engines:
                self.engines[name].restart()
            case ("remove", name) if name in self.engines and len(self.engines) > 1:
                self.sync.remove_engine(name)
                del self.engines[name]
            case ("add", name) if name not in self.engines:
                self.engines[name] = FakeEngine(name)
                self.sync.add_engine(self.engines[name])
            case ("time", seconds):
                self.pass_time(seconds)
            case ("hand over",):
                self.content = FakeWeights(self.step + 1).content
                with self.unknown():
                    self._note(self.hand_over())
            case ("catch up", same):
                weights = FakeWeights(self.step if same else self.step + 100)
                with self.unknown():
                    self._note(self.sync.catch_up(self.step, weights), weights)

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """One that was never reached is refused, if no other engine answers, either."""
        try:
            yield
        except EngineUnknown:
            assert not any(each.alive and not each.bad for each in self.engines.values())

    def _note(self, result: RoundResult, weights: FakeWeights | None = None) -> None:
        content = self.content if weights is None else weights.content
        if result.passed_over is None and result.serving(Disposition.serving_new):
            known = self.bytes.setdefault(result.version, content)
            assert known == content, "one number for two contents"

    def check(self) -> None:
        """Whoever a router may use is there, and holds whole what its version stands for."""
        for name, version in self.sync.servable().items():
            engine = self.engines[name]
            assert engine.alive, f"{name} is dead"
            assert engine.machine.state is EngineState.Serving, f"{name} is {engine.machine.state.name}"
            assert engine.machine.facts.version == version, name
            assert engine.content == self.bytes[version], f"{name} holds something else"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@example("together", [("die", "a"), ("die", "b"), ("add", "c"), ("die", "c"), ("hand over",)])
@given(apart=st.sampled_from(["together", "apart"]), events=st.lists(EVENTS, max_size=20))
def test_no_history_makes_an_unproven_engine_servable(apart: str, events: list[tuple[Any, ...]]) -> None:
    """After each event; and when all is well again, everybody comes back."""
    history = History(apart)
    try:
        history.live_through(("hand over",))
        for event in events:
            history.live_through(event)
            history.check()
        for engine in history.engines.values():
            engine.bad.clear()
            if not engine.alive:
                engine.restart()
        history.trainer.transport.bad.clear()
        for _ in range(4):
            history.pass_time(10.0)
            history.live_through(("hand over",))
        history.check()
        assert history.sync.servable().keys() == history.engines.keys()
    finally:
        close_all()
