"""The linter: good logs of every kind pass, several files are read together, and no input is too bad."""

import itertools
import json
import random
import tempfile
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.cli import main
from weightsync.fsm.calls import Act
from weightsync.fsm.errors import LogUnreadable
from weightsync.fsm.executors import RoundView
from weightsync.fsm.lint import REPLAY, Linter
from weightsync.fsm.policy import Policy
from weightsync.fsm.record import Record
from weightsync.handlers.ledger import MemoryLedger
from weightsync.handlers.log import StateLog
from weightsync.loglint import lint
from weightsync.testing.fakes import FakeWeights
from weightsync.testing.scene import Trainer, close_all
from weightsync.testing.simulation import Fault, Simulation, run_together

Printed = pytest.CaptureFixture[str]

STRICT = Policy(deadline=4.0, lease=2.0)
GO_ON = Policy(deadline=4.0, lease=2.0, on_engine_failure="quarantine", quorum=1)
KINDS = ("raise", "hang", "lost", "die", "corrupt")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


def misfortunes(dice: random.Random) -> list[Fault]:
    """None, one or a few."""
    return [
        Fault(
            dice.choice(list(Act)),
            dice.choice(KINDS),  # type: ignore[arg-type]
            dice.choice([None, "e0", "e1", "e2"]),
            dice.choice([None, 0, 1]),
        )
        for _ in range(dice.choice([0, 1, 1, 2, 3]))
    ]


def life(seed: int, rounds: int = 4) -> tuple[list[Record], set[tuple[str, bool]]]:
    """The log of one trainer to whom all sorts of things happen; and what became of its rounds."""
    dice = random.Random(seed)
    records: list[Record] = []
    ends: set[tuple[str, bool]] = set()
    simulation = None
    for number in range(rounds):
        simulation = Simulation(
            engines=3,
            policy=dice.choice([STRICT, GO_ON]),
            inplace=dice.choice([(), ("e1",)]),
            faults=misfortunes(dice),
            executors=dice.choice([0, 1, 2, 3]),
            seed=seed * 10 + number,
            jitter=dice.choice([0.0, 0.3, 1.0]),
            rival=dice.choice([0.0, 0.0, 0.5, 3.5]),
            earlier=simulation,
        )
        if number and dice.random() < 0.1:
            simulation.world.restart("e2")
        result = simulation.run(cancel_at=dice.choice([None, None, 0.01, 0.03, 0.5]))
        if dice.random() < 0.3:
            simulation.settle()
        ends.add((result.outcome.name, result.unclean))
        records += simulation.round.records()
    return records, ends


def findings(records: Iterable[Record]) -> list[str]:
    """What the linter says of a log."""
    linter = Linter()
    found = []
    for line, record in enumerate(records, start=1):
        found += linter.feed(record, ("log", line))
    return [str(each) for each in [*found, *linter.end()]]


def written(path: Path, records: Iterable[Record]) -> Path:
    """As a file."""
    with StateLog(path) as log:
        for record in records:
            log(record)
    return path


def test_good_logs_of_every_kind_pass() -> None:
    """Failed, partial, cancelled, unclean, with a lost lease: no false alarm in a thousand rounds."""
    ends: set[tuple[str, bool]] = set()
    for seed in range(250):
        records, became = life(seed)
        assert findings(records) == [], f"seed {seed}"
        ends |= became
    assert ends == set(itertools.product(("complete", "partial", "failed"), (True, False)))


def test_two_trainers_at_one_lock_pass() -> None:
    """Their rounds are interleaved, in one file or in two."""
    one = Simulation(faults=[Fault(Act.broadcast, "raise", bucket=1)])
    two = Simulation(earlier=one)
    run_together(one, two)
    alone = [record.to_json() for record in two.round.records()]
    alone[0]["facts"]["run"] = "other"
    both = [*one.round.records(), *(Record(**values) for values in alone)]
    assert findings(sorted(both, key=lambda record: record.time)) == []
    assert findings(both) == []


def test_a_log_of_a_real_trainer_passes_and_says_where_it_ran(tmp_path: Path) -> None:
    """With threads and a clock; what the rules between rounds need stands in the first record of each."""
    path = tmp_path / "state.jsonl"
    trainer = Trainer(Policy(deadline=20.0, lease=5.0, attempts=2), [StateLog(path)])
    trainer.transport.bad["bucket 1"] = RuntimeError("on purpose")
    for step in (1, 2, 3):
        trainer.hand_over(step, FakeWeights(step))
    close_all()
    linted = lint([path])
    assert linted.good, [str(each) for each in linted.findings]
    assert (linted.rounds, linted.unfinished) == (len(list(opened(path))), 0)
    settings = {tuple(told["facts"][key] for key in ("run", "lock", "ledger")) for told in opened(path)}
    assert len(settings) == 1
    assert all(next(iter(settings)))
    assert all(told["facts"]["limits"]["lease"] == 5.0 for told in opened(path))


class Rival:
    """The first attempt fails; in the second, another trainer takes the number."""

    name = "rival"

    def __init__(self) -> None:
        self.tries: list[int] = []
        self.ledger: MemoryLedger | None = None

    def prepare(self, round: RoundView) -> None:
        """Before anything moves."""
        self.tries.append(round.attempt)
        if len(self.tries) == 1:
            raise OSError("on purpose")
        if len(self.tries) == 2 and self.ledger is not None:
            self.ledger.bind((self.ledger.current().newest or 0) + 1, "other bytes", round.session.epoch)

    def clean(self, round: RoundView) -> None:
        """Nothing is left."""


def test_an_attempt_goes_on_when_its_number_was_taken(tmp_path: Path) -> None:
    """The second attempt finds a higher number bound by somebody else, and goes on as the second attempt."""
    path, rival = tmp_path / "state.jsonl", Rival()
    trainer = Trainer(Policy(deadline=20.0, lease=5.0, attempts=2), [rival, StateLog(path)])
    rival.ledger = trainer.ledger
    result = trainer.hand_over(1, FakeWeights(1))
    close_all()
    assert (result.ok, rival.tries) == (True, [1, 2, 2])
    assert [str(each) for each in lint([path]).findings] == []


def opened(path: Path) -> Iterator[dict[str, Any]]:
    """The first records of a log's rounds."""
    return (told for line in path.open() if (told := json.loads(line))["event"] == "opened")


# -- changes that nobody thought of -----------------------------------------------------------------------

_SOUND = life(3)[0]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_transition_that_is_taken_out_is_found(data: st.DataObject) -> None:
    """Also if what follows is numbered anew: the path has a hole."""
    moves = [
        i
        for i, record in enumerate(_SOUND)
        if record.event == "transition" and record.source != record.target
    ]
    cut = data.draw(st.sampled_from(moves))
    lines = [record.to_json() for i, record in enumerate(_SOUND) if i != cut]
    for line in lines:
        if line["round"] == _SOUND[cut].round and line["seq"] > _SOUND[cut].seq:
            line["seq"] -= 1
    assert findings(Record(**line) for line in lines)


_WORDS = [
    "members",
    "acks",
    "receipts",
    "plan",
    "sent",
    "settled",
    "lock",
    "engines",
    "phase",
    "limits",
    "run",
]
_PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
_NONSENSE = st.one_of(_PLAIN, st.dictionaries(st.sampled_from(_WORDS), _PLAIN, max_size=3))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_value_of_any_record_may_be_nonsense(data: st.DataObject) -> None:
    """The linter says so, or it does not matter; it never raises."""
    lines = [record.to_json() for record in _SOUND]
    line = data.draw(st.sampled_from(lines))
    line[data.draw(st.sampled_from([*line, "facts"]))] = data.draw(_NONSENSE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.jsonl")
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        lint([path])


# -- files ------------------------------------------------------------------------------------------------


def test_parts_of_a_rotated_log_are_read_together(tmp_path: Path) -> None:
    """In whichever order they are named; the second one alone begins in the middle, and says so."""
    records, _ = life(5)
    cut = len(records) // 2 + 3
    old, new = written(tmp_path / "old", records[:cut]), written(tmp_path / "new", records[cut:])
    assert lint([old, new]).good
    assert lint([new, old]).good
    alone = lint([new])
    assert [each.promise for each in alone.findings] == [REPLAY]
    assert "what came before it stands in another file" in alone.findings[0].what


def test_a_log_that_stops_is_good_and_not_over(tmp_path: Path) -> None:
    """Its trainer was killed, or is at work; the one that comes after it is another."""
    path = written(tmp_path / "state.jsonl", good_round()[:6])
    linted = lint([path])
    assert (linted.good, linted.unfinished) == (True, 1)


def test_a_version_that_falls_in_another_file_is_found(tmp_path: Path) -> None:
    """Two trainers with one ledger; each log alone is good."""
    one = Simulation(version=5)
    one.run()
    two = Simulation(earlier=one, version=6)
    two.run()
    lines = [record.to_json() for record in two.round.records()]
    lines[0]["facts"]["run"] = "other"
    forged = [Record(**{**line, "version": 4}) for line in lines]
    first, second = written(tmp_path / "a", one.round.records()), written(tmp_path / "b", forged)
    assert lint([first]).good
    assert lint([second]).good
    assert {(each.file, each.promise) for each in lint([first, second]).findings} == {(str(second), "P7")}


def test_a_log_named_twice_is_refused(tmp_path: Path) -> None:
    """It would be a log of rounds that happened twice, whatever path leads to it."""
    path = written(tmp_path / "state.jsonl", life(0, rounds=1)[0])
    (tmp_path / "link.jsonl").symlink_to(path)
    for other in (path, tmp_path / "link.jsonl", tmp_path / ".." / tmp_path.name / path.name):
        with pytest.raises(LogUnreadable, match="named twice"):
            lint([path, other])


def test_findings_and_the_sum_for_machines(tmp_path: Path, capsys: Printed) -> None:
    """One object a line, also for lines that could not be read."""
    records = list(life(0, rounds=1)[0])
    values = records[-1].to_json()
    values["seconds"] = 1000.0
    path = written(tmp_path / "state.jsonl", [*records[:-1], Record(**values)])
    with path.open("a") as file:
        file.write("garbage\n")
    assert main(["check", "--format", "json", str(path)]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["kind"], each.get("promise"), each.get("line")) for each in told] == [
        ("finding", "P6", len(records)),
        ("bad line", None, len(records) + 1),
        ("sum", None, None),
    ]
    assert (told[-1]["rounds"], told[-1]["flawed"], told[-1]["bad_lines"]) == (1, 1, 1)


def test_findings_for_people(tmp_path: Path, capsys: Printed) -> None:
    """File, line, promise, round, and what is wrong; the sum last."""
    values = [record.to_json() for record in life(0, rounds=1)[0]]
    values[-1]["seconds"] = 1000.0
    path = written(tmp_path / "state.jsonl", (Record(**each) for each in values))
    assert main(["check", str(path)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}:{len(values)}: P6: round r1: the round took 1000.000 s; ")
    assert last == "0 of 1 rounds replay to what the log says and keep P1-P12; 0 not over"


def test_an_empty_log_is_no_harm_beside_others(tmp_path: Path, capsys: Printed) -> None:
    """Its trainer was refused before it opened a round; the others are linted, and it is said."""
    good, path = written(tmp_path / "good", life(0, rounds=1)[0]), tmp_path / "empty.jsonl"
    path.touch()
    assert main(["check", str(path), str(good)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"{path} is empty: no round was opened there"
    assert last.startswith("1 of 1 rounds")


@pytest.mark.parametrize("content", [b"", b"\x00\xff\x00", b"{}", b"[1]\n", b"{" * 100_000], ids=str)
def test_what_is_no_log_gives_one_clear_line(content: bytes, tmp_path: Path, capsys: Printed) -> None:
    """And no traceback; beside a good log as well."""
    good, path = written(tmp_path / "good", life(0, rounds=1)[0]), tmp_path / "state.jsonl"
    path.write_bytes(content)
    for files in ([path], [good, path] if content else [path, path.with_name("empty")]):
        path.with_name("empty").touch()
        assert main(["check", *map(str, files)]) != 0
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert str(path) in printed.err


def test_memory_does_not_grow_with_the_log() -> None:
    """Ten times the rounds need no more than a little more."""
    template = [record.to_json() for record in good_round()]

    def peak(rounds: int) -> int:
        tracemalloc.start()
        linter = Linter()
        for number in range(rounds):
            for values in template:
                linter.feed(Record(**_renamed(values, number)), ("log", 1))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert linter.flawed == 0
        return top

    small = peak(400)
    assert (
        peak(1200) - small < 800 * 1000
    )  # less than a kilobyte a round: its name, so that it is not used again


def good_round() -> tuple[Record, ...]:
    """Of a good round."""
    simulation = Simulation(engines=1, buckets=1, executors=0)
    simulation.run()
    return simulation.round.records()


def _renamed(values: dict[str, Any], number: int) -> dict[str, Any]:
    """The same round, so much later."""
    text = json.dumps({**values, "time": values["time"] + number})
    text = text.replace('"r1"', f'"r{number}"').replace('"epoch": 1', f'"epoch": {number + 1}')
    return {**json.loads(text), "version": number}
