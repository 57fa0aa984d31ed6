"""Forged logs: each breaks one promise, and the linter names it with its line.

A forgery is a real log of simulated rounds in which something was changed. Every rule has one that it alone
finds: its mutation twin takes the rule out, and then nobody names that promise in that line.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from weightsync.fsm.calls import Act
from weightsync.fsm.lint import RULES, Finding, Linter
from weightsync.fsm.lint_between import Theme
from weightsync.fsm.lint_rules import Rule
from weightsync.fsm.lint_story import key_of
from weightsync.fsm.record import Record
from weightsync.testing.simulation import Fault, Simulation

Line = dict[str, Any]

FAULTS: dict[str, tuple[Fault, ...]] = {
    "good": (),
    "failed": (Fault(Act.broadcast, "raise", bucket=1),),
    "late": (Fault(Act.broadcast, "hang"),),
    "refused": (Fault(Act.publish, "raise"),),
    "troubled": (Fault(Act.broadcast, "raise", bucket=1), Fault(Act.undo, "raise", bucket=0)),
}


@cache
def told(kind: str, inplace: tuple[str, ...] = ()) -> tuple[Line, ...]:
    """A log of three rounds, r1 to r3, of two engines and two executors; r2 meets the faults of its kind."""
    lines: list[Line] = []
    simulation = None
    for number in (1, 2, 3):
        faults = FAULTS[kind] if number == 2 else ()
        simulation = Simulation(faults=faults, executors=2, inplace=inplace, earlier=simulation)
        simulation.run()
        simulation.settle()
        lines += [record.to_json() for record in simulation.round.records()]
    return tuple(lines)


class Log:
    """A log under the forger's hands. Lines are found by round and by what ``key_of`` calls them."""

    def __init__(self, kind: str = "good", inplace: tuple[str, ...] = ()) -> None:
        self.lines: list[Line] = copy.deepcopy(list(told(kind, inplace)))

    def at(self, round: str, key: str, nth: int = 0) -> Line:
        """A line."""
        found = [line for line in self.lines if line["round"] == round and key_of(Record(**line)) == key]
        return found[nth]

    def number(self, line: Line) -> int:
        """Where it stands, from 1."""
        return next(place for place, each in enumerate(self.lines, start=1) if each is line)

    def of(self, round: str) -> list[Line]:
        """The lines of a round."""
        return [line for line in self.lines if line["round"] == round]

    def edit(self, line: Line, facts: Line | None = None, **values: Any) -> int:
        """Change values; a fact that is None goes."""
        line.update(values)
        line["facts"] = {
            name: value
            for name, value in {**line.get("facts", {}), **(facts or {})}.items()
            if value is not None
        }
        return self.number(line)

    def cut(self, line: Line) -> int:
        """Take it out; where it stood."""
        number = self.number(line)
        del self.lines[number - 1]
        self._count()
        return number

    def copy(self, line: Line, after: Line, **values: Any) -> int:
        """Put a copy, with other values, after a line."""
        self.lines.insert(self.number(after), copy.deepcopy({**line, **values}))
        self._count()
        return self.number(after) + 1

    def move(self, line: Line, before: Line) -> int:
        """Have it earlier or later."""
        self.lines.remove(line)
        self.lines.insert(self.number(before) - 1, line)
        self._count()
        return self.number(line)

    def shift(self, round: str, seconds: float) -> None:
        """Have a round at another time."""
        for line in self.of(round):
            line["time"] += seconds

    def _count(self) -> None:
        seen: dict[str, int] = {}
        for line in self.lines:
            line["seq"] = seen.get(line["round"], 0)
            seen[line["round"]] = line["seq"] + 1

    def findings(self, without: Rule | Theme | None = None) -> list[Finding]:
        """What the linter says."""
        linter = Linter([rule for rule in RULES if rule is not without])
        found: list[Finding] = []
        for number, line in enumerate(self.lines, start=1):
            found += linter.feed(Record(**copy.deepcopy(line)), ("log", number))
        return found + linter.end()


Forgery = Callable[[], tuple[Log, int]]
FORGERIES: dict[tuple[str, str], Forgery] = {}
CLAIM = "a fact is known by the right word"


def forges(promise: str, name: str) -> Callable[[Forgery], Forgery]:
    """The rule that must find it."""

    def add(forgery: Forgery) -> Forgery:
        FORGERIES[promise, name] = forgery
        return forgery

    return add


def simple(
    promise: str, name: str, change: Callable[[Log], int], kind: str = "good", inplace: bool = False
) -> None:
    """A forgery in one expression."""

    def forgery() -> tuple[Log, int]:
        log = Log(kind, ("e1",) if inplace else ())
        return log, change(log)

    FORGERIES[promise, name] = forgery


def engine(name: str, incarnation: str = "0") -> Line:
    """A participant, as it stands in a log."""
    return {"id": name, "incarnation": incarnation, "ranks": 1}


E0, E1 = engine("e0"), engine("e1")

# -- who may tell what ------------------------------------------------------------------------------------

simple("P2", CLAIM, lambda log: log.edit(log.at("r2", "BucketSent"), {"acks": [E0]}))
simple("P3", CLAIM, lambda log: log.edit(log.at("r2", "Cleaned"), {"committed": [E0]}))
simple("P4", CLAIM, lambda log: log.edit(log.at("r2", "TransportFailed"), {"reverted": [E0]}), "failed")
simple("P5", CLAIM, lambda log: log.edit(log.at("r2", "Prepared"), {"epoch": 7}))
simple("P8", CLAIM, lambda log: log.edit(log.at("r2", "AllSent"), {"members": [E0]}))
simple("P9", CLAIM, lambda log: log.edit(log.at("r2", "AllSent"), {"plan": {"buckets": 1}}))
simple("P10", CLAIM, lambda log: log.edit(log.at("r2", "Published"), {"settled": True}))

# -- P1 ---------------------------------------------------------------------------------------------------


@forges("P1", "a round is granted once")
def _() -> tuple[Log, int]:
    log = Log()
    grant = log.at("r2", "LockGranted")
    return log, log.copy(grant, grant, source="Locked")


@forges("P1", "the lock is given back once")
def _() -> tuple[Log, int]:
    log = Log()
    last = log.at("r2", "Unlocked")
    return log, log.copy(last, last, source="Released")


simple(
    "P1",
    "the lock is gone only on evidence",
    lambda log: log.edit(log.at("r2", "Unlocked"), trigger="Cancelled"),
)


@forges("P1", "the result comes after the release")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "Unlocked"))
    return log, log.number(log.at("r2", "result"))


@forges("P1", "an epoch is granted once")
def _() -> tuple[Log, int]:
    log = Log()
    epoch = log.at("r1", "LockGranted")["epoch"]
    for line in log.of("r2"):
        if "epoch" in line:
            line["epoch"] = epoch
    return log, log.edit(log.at("r2", "LockGranted"), {"epoch": epoch})


@forges("P1", "a grant has an end")
def _() -> tuple[Log, int]:
    log = Log()
    for key in ("result", "Unlocked"):
        log.cut(log.at("r2", key))
    return log, log.number(log.at("r2", "LockGranted"))


@forges("P1", "one at a time holds the lock")
def _() -> tuple[Log, int]:
    """Of two trainers, the second is granted the lock right after the first."""
    log = Log()
    for line in log.of("r3"):
        line["owner"] = "other"
    log.edit(log.at("r3", "opened"), {"run": "other"})
    log.shift("r3", log.at("r2", "LockGranted")["time"] + 0.002 - log.at("r3", "LockGranted")["time"])
    return log, log.number(log.at("r3", "LockGranted"))


# -- P2 ---------------------------------------------------------------------------------------------------


def receipt(log: Log, **values: Any) -> int:
    """Change the receipt of the first ACK."""
    line = log.at("r2", "EngineAcked")
    return log.edit(line, {"receipts": [{**line["facts"]["receipts"][0], **values}]})


simple("P2", "a receipt proves the plan", lambda log: receipt(log, digest="of something else"))


@forges("P2", "an ack comes after the last bucket")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "BucketSent", 2))
    return log, log.number(log.at("r2", "EngineAcked"))


@forges("P2", "everybody proved it before cleaning")
def _() -> tuple[Log, int]:
    log = Log()
    ack = log.at("r2", "EngineAcked")
    log.cut(log.at("r2", "EngineAcked", 1))
    return log, log.edit(ack, {"decided": True}, target="Cleaning", guard="last")


@forges("P2", "a commit follows a receipt")
def _() -> tuple[Log, int]:
    log = Log()
    return log, log.move(log.at("r2", "call commit"), log.at("r2", "EngineAcked"))


# -- P3 ---------------------------------------------------------------------------------------------------


@forges("P3", "a publication waits for every commit")
def _() -> tuple[Log, int]:
    """The last commit is not there; the one before asks for the publication."""
    log = Log()
    for key in ("EngineCommitted", "call commit"):
        log.cut(log.at("r2", key, 1))
    return log, log.edit(log.at("r2", "EngineCommitted"), {"publication": "unknown"}, guard="c_last")


@forges("P3", "nothing is published out of turn")
def _() -> tuple[Log, int]:
    log = Log()
    return log, log.move(log.at("r2", "call publish"), log.at("r2", "EngineCommitted"))


@forges("P3", "nobody serves what is not published")
def _() -> tuple[Log, int]:
    log = Log()
    return log, log.move(log.at("r2", "call resume"), log.at("r2", "Published"))


simple("P3", "the result says what the ledger said", lambda log: log.edit(
    log.at("r2", "result"), {"published": "yes"}), "refused")  # fmt: skip

# -- P4 ---------------------------------------------------------------------------------------------------


@forges("P4", "only a whole engine is resumed")
def _() -> tuple[Log, int]:
    log = Log("failed")
    last = log.at("r2", "result")
    values = {"round": "r2", "epoch": last["epoch"], "version": last["version"]}
    return log, log.copy(log.at("r1", "call resume"), log.at("r2", "TransportFailed"), **values)


@forges("P4", "a touched engine is not believed")
def _() -> tuple[Log, int]:
    log = Log("failed", ("e1",))
    words = ("EngineReverted", "CommitFailed")
    lines = [line for line in log.of("r2") if line.get("trigger") in words and line["event"] == "transition"]
    torn = next(line for line in lines if line["engine"] == "e1")
    known = [E0, E1] if lines[0] is not torn else [E1]
    facts = {"quarantined": None, "reverted": known}
    return log, log.edit(torn, facts, trigger="EngineReverted", guard="f_revert")


simple("P4", "nobody serves without a proof", lambda log: log.edit(
    log.at("r2", "result"), {"engines": {"e0": "serving_new", "e1": "serving_new"}}), "failed")  # fmt: skip
simple("P4", "a quarantine is remembered", lambda log: log.edit(log.at("r3", "opened"), {"tainted": []}),
       "failed", inplace=True)  # fmt: skip

# -- P5 ---------------------------------------------------------------------------------------------------

simple("P5", "every record is of the rounds epoch", lambda log: log.edit(log.at("r2", "AllSent"), epoch=1))
simple("P5", "a receipt of another round counts for nothing", lambda log: receipt(log, epoch=1))


@forges("P5", "a fact of a state that was left changes nothing")
def _() -> tuple[Log, int]:
    log = Log()
    sent = log.at("r2", "BucketSent", 2)
    return log, log.move(sent, log.at("r2", "EngineAcked"))


@forges("P5", "a late deadline changes nothing")
def _() -> tuple[Log, int]:
    log = Log("late")
    return log, log.edit(log.at("r2", "TimedOut"), {"phase": "Locked"})


@forges("P5", "what was refused changes nothing")
def _() -> tuple[Log, int]:
    log = Log()
    sent = log.at("r2", "AllSent")
    return log, log.copy(
        log.at("r2", "call bind"), sent, event="stale", trigger="EngineAcked", facts={"acks": [E0]}
    )


@forges("P5", "a late publication is refused")
def _() -> tuple[Log, int]:
    """Of two trainers, the one with the older epoch publishes when the other one is over."""
    log = Log()
    for line in log.of("r2"):
        line["owner"] = "other"
    log.edit(log.at("r2", "opened"), {"run": "other"})
    cut = log.number(log.at("r2", "Published")) - 1
    tail = [line for line in log.lines[cut:] if line["round"] == "r2"]
    log.lines = [line for line in log.lines if not any(line is each for each in tail)] + tail
    return log, log.number(log.at("r2", "Published"))


# -- P6 ---------------------------------------------------------------------------------------------------

simple("P6", "a state ends by its deadline", lambda log: log.edit(log.at("r2", "AllSent"), seconds=9.0))
simple("P6", "a round ends by its deadline", lambda log: log.edit(log.at("r2", "result"), seconds=99.0))
simple(
    "P6",
    "a deadline ends the state",
    lambda log: log.edit(log.at("r2", "TimedOut"), target="Broadcasting"),
    "late",
)


@forges("P6", "a round ends before the next")
def _() -> tuple[Log, int]:
    log = Log()
    for key in ("result", "Unlocked"):
        log.cut(log.at("r2", key))
    return log, log.number(log.at("r2", "Cleaned"))


# -- P7 ---------------------------------------------------------------------------------------------------

simple("P7", "a round has one version", lambda log: log.edit(log.at("r2", "AllSent"), version=0))


@forges("P7", "a version never falls")
def _() -> tuple[Log, int]:
    log = Log()
    for line in log.of("r3"):
        line["version"] = 0
    return log, log.number(log.at("r3", "call bind"))


def with_epoch(log: Log, round: str, epoch: int) -> int:
    """The round was granted another epoch, everywhere."""
    for line in log.of(round):
        if "epoch" in line:
            line["epoch"] = epoch
        for each in line.get("facts", {}).get("receipts", []):
            each["epoch"] = epoch
    return log.edit(log.at(round, "LockGranted"), {"epoch": epoch})


@forges("P7", "epochs grow from round to round")
def _() -> tuple[Log, int]:
    log = Log()
    with_epoch(log, "r2", 9)
    return log, log.number(log.at("r3", "LockGranted"))


@forges("P7", "epochs grow over all trainers")
def _() -> tuple[Log, int]:
    log = Log()
    with_epoch(log, "r2", 9)
    log.edit(log.at("r3", "opened"), {"run": "other"})
    return log, log.number(log.at("r3", "LockGranted"))


# -- P8 ---------------------------------------------------------------------------------------------------

simple("P8", "members are those asked for without the lost", lambda log: log.edit(
    log.at("r2", "LockGranted"), {"members": [E0]}))  # fmt: skip


@forges("P8", "nobody else takes part")
def _() -> tuple[Log, int]:
    log = Log()
    line = log.at("r2", "EngineCommitted")
    return log, log.edit(line, {"committed": [engine(line["engine"], "9")]})


simple("P8", "an ack is of the member itself", lambda log: receipt(log, incarnation="9"))
simple("P8", "only members are spoken to", lambda log: log.edit(log.at("r2", "call open"), engine="e7"))

# -- P9 ---------------------------------------------------------------------------------------------------

simple("P9", "no edge goes back", lambda log: log.edit(log.at("r2", "EngineAcked"), target="Broadcasting"))
simple("P9", "every bucket is sent once in its turn", lambda log: log.cut(log.at("r2", "BucketSent", 1)))


@forges("P9", "the whole plan is sent")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "BucketSent", 2))
    return log, log.number(log.at("r2", "AllSent"))


@forges("P9", "a round has an id of its own")
def _() -> tuple[Log, int]:
    log = Log("failed")
    number = log.number(log.at("r3", "opened"))
    for line in log.of("r3"):
        line["round"] = "r2"
    return log, number


def retried(log: Log, attempt: int = 2) -> Log:
    """r3 is the next try of what r2 tried."""
    step = log.at("r2", "opened")["step"]
    for line in log.of("r3"):
        line.update(step=step, attempt=attempt)
    return log


@forges("P9", "a retry follows a failure")
def _() -> tuple[Log, int]:
    log = retried(Log("failed"), attempt=3)
    return log, log.number(log.at("r3", "opened"))


@forges("P9", "a retry sends everything again")
def _() -> tuple[Log, int]:
    log = retried(Log("failed"))
    line = log.at("r3", "Prepared")
    return log, log.edit(line, {"plan": {**line["facts"]["plan"], "buckets": 1}})


# -- P10 --------------------------------------------------------------------------------------------------

simple("P10", "nothing is released before it is put back", lambda log: log.edit(
    log.at("r2", "Cleaned"), {"settled": None}) and log.number(log.at("r2", "Unlocked")))  # fmt: skip


@forges("P10", "every engine was put back")
def _() -> tuple[Log, int]:
    log = Log("failed")
    log.cut(log.at("r2", "EngineReverted", 1))
    return log, log.number(log.at("r2", "Cleaned"))


@forges("P10", "every undo was run")
def _() -> tuple[Log, int]:
    log = Log("failed")
    log.cut(log.at("r2", "call undo", 1))
    return log, log.number(log.at("r2", "Cleaned"))


simple("P10", "what is given up is unclean", lambda log: log.edit(
    log.at("r2", "CleanupFailed"), {"unclean": None}), "troubled")  # fmt: skip
simple("P10", "undos run backwards", lambda log: log.move(
    log.at("r2", "call undo", 1), log.at("r2", "call undo", 0)), "failed")  # fmt: skip
simple("P10", "the result hides nothing", lambda log: log.edit(
    log.at("r2", "result"), {"unclean": False}), "troubled")  # fmt: skip

# -- P11 and P12 ------------------------------------------------------------------------------------------


@forges("P11", "the good end comes after the publication")
def _() -> tuple[Log, int]:
    log = Log()
    return log, log.move(log.at("r2", "call clean"), log.at("r2", "call publish"))


@forges("P11", "a good round is not undone")
def _() -> tuple[Log, int]:
    log = Log()
    return log, log.edit(log.at("r2", "call clean"), trigger="undo")


@forges("P11", "every good end was run")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "call clean", 1))
    return log, log.number(log.at("r2", "Cleaned"))


@forges("P12", "the transport was closed")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "call transport_clean"))
    return log, log.number(log.at("r2", "Cleaned"))


@forges("P12", "the lock goes last")
def _() -> tuple[Log, int]:
    log = Log()
    return log, log.move(log.at("r2", "Unlocked"), log.at("r2", "call resume"))


# -- calls ------------------------------------------------------------------------------------------------


@forges("P8", "every member was opened")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "call open"))
    return log, log.number(log.at("r2", "Prepared"))


@forges("P9", "what is sent was planned and opened")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "call plan"))
    return log, log.number(log.at("r2", "Prepared"))


@forges("P10", "a revert is confirmed by an answer")
def _() -> tuple[Log, int]:
    log = Log("failed")
    log.cut(log.at("r2", "call abort", 1))
    return log, log.number(log.at("r2", "EngineReverted", 1))


@forges("P7", "a number is bound before the first commit")
def _() -> tuple[Log, int]:
    log = Log()
    log.move(log.at("r2", "call bind"), log.at("r2", "Published"))
    return log, log.number(log.at("r2", "EngineCommitted"))


@forges("P3", "a commit is confirmed by an answer")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "call commit", 1))
    return log, log.number(log.at("r2", "EngineCommitted", 1))


@forges("P3", "a publication is confirmed by the ledger")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "call publish"))
    return log, log.number(log.at("r2", "Published"))


simple("P12", "the transport ends last", lambda log: log.move(
    log.at("r2", "call transport_clean"), log.at("r2", "call resume", 1)))  # fmt: skip


@forges("P10", "only what was prepared is undone")
def _() -> tuple[Log, int]:
    log = Log("failed")
    log.cut(log.at("r2", "call prepare", 1))
    return log, log.number(log.at("r2", "call undo"))


@forges("P11", "only what was prepared has a good end")
def _() -> tuple[Log, int]:
    log = Log()
    last = log.at("r2", "call clean", 1)
    return log, log.copy(last, last)


simple(
    "P6", "a transition says how long it took", lambda log: log.edit(log.at("r2", "AllSent"), seconds=None)
)
simple("P9", "a round is of one attempt", lambda log: log.edit(log.at("r2", "AllSent"), owner="other"))


@forges("P6", "a round tells its result before the next")
def _() -> tuple[Log, int]:
    log = Log()
    log.cut(log.at("r2", "result"))
    return log, log.number(log.at("r2", "Unlocked"))


# -- tests ------------------------------------------------------------------------------------------------

NAMES = [(rule.promise, rule.name) for rule in RULES]
BY_NAME = {(rule.promise, rule.name): rule for rule in RULES}


def check_found(promise: str, name: str, without: Rule | Theme | None = None) -> None:
    """The linter names the promise that the forgery of this rule breaks, with the line."""
    log, line = FORGERIES[promise, name]()
    found = log.findings(without)
    assert (promise, line) in {(each.promise, each.line) for each in found}, [str(each) for each in found]


@pytest.mark.parametrize("kind", FAULTS)
def test_the_logs_that_are_forged_are_good(kind: str) -> None:
    """Or nobody would know what a finding is about."""
    assert Log(kind).findings() == []
    assert Log(kind, ("e1",)).findings() == []


def test_every_rule_has_a_forgery_and_every_promise_a_rule() -> None:
    """A rule that nothing breaks could as well not be there."""
    assert len(BY_NAME) == len(NAMES)
    assert set(FORGERIES) == set(NAMES)
    assert {promise for promise, _ in NAMES} == {f"P{number}" for number in range(1, 13)}


@pytest.mark.parametrize(("promise", "name"), NAMES, ids=[f"{promise} {name}" for promise, name in NAMES])
def test_a_forged_log_is_found_out(promise: str, name: str) -> None:
    """The promise is named, with the line."""
    check_found(promise, name)


@pytest.mark.parametrize(
    ("kind", "promise", "change"),
    [
        ("good", "P7", lambda log: log.cut(log.at("r2", "call bind"))),
        ("good", "P6", lambda log: log.edit(log.at("r2", "Prepared"), seconds=-1e6)),
        ("good", "P8", lambda log: [log.cut(log.at("r2", "call open")) for _ in "ab"]),
        ("good", "P3", lambda log: [log.cut(log.at("r2", "call commit")) for _ in "ab"]),
        ("good", "P9", lambda log: log.edit(log.at("r2", "AllSent"), step=99)),
        ("good", "P11", lambda log: log.cut(log.at("r2", "call prepare"))),
        ("good", "P12", lambda it: it.move(it.at("r2", "call transport_clean"), it.at("r2", "Published"))),
        ("failed", "P10", lambda log: log.copy(log.at("r2", "call undo"), log.at("r2", "call undo"))),
        ("failed", "P10", lambda log: [log.cut(log.at("r2", "call abort")) for _ in "ab"]),
        ("failed", "P10", lambda log: log.edit(log.at("r2", "call abort"), error="EngineSilent: no answer")),
        ("failed", "P10", lambda log: log.edit(log.at("r2", "call abort"), engine="e1")),
        ("failed", "P10", lambda log: log.move(log.at("r2", "call abort"), log.at("r2", "Cleaned"))),
        ("good", "P9", lambda log: log.edit(log.at("r2", "call plan"), error="PlanError: no tensors")),
        ("good", "P9", lambda log: log.cut(log.at("r2", "call transport_open"))),
    ],
)  # fmt: skip
def test_the_same_is_found_in_other_clothes(kind: str, promise: str, change: Callable[[Log], object]) -> None:
    """Left out or moved, missing or a lie: the promise is the same."""
    log = Log(kind)
    change(log)
    assert promise in {each.promise for each in log.findings()}


def test_a_quarantine_is_remembered_without_the_result() -> None:
    """What became of an engine stands in the facts; the result only repeats it."""
    log = Log("failed", ("e1",))
    log.cut(log.at("r2", "result"))
    opened = log.edit(log.at("r3", "opened"), {"tainted": []})
    assert ("P4", opened) in {(each.promise, each.line) for each in log.findings()}


def test_an_attempt_goes_on_only_with_another_number() -> None:
    """The number was taken, says the round before: then the same attempt goes on with a higher one."""
    log = retried(Log("failed"))
    for line in log.of("r3"):
        line["version"] += 1
    for line in log.of("r2"):
        line["attempt"] = 2
    log.edit(log.at("r2", "result"), error="VersionBound: it stands for other bytes")
    again = ("P9", log.number(log.at("r3", "opened")))
    assert again not in {(each.promise, each.line) for each in log.findings()}
    log.edit(log.at("r2", "result"), error="EngineGone: it is dead")
    assert again in {(each.promise, each.line) for each in log.findings()}


@pytest.mark.mutation
@pytest.mark.parametrize(("promise", "name"), NAMES, ids=[f"{promise} {name}" for promise, name in NAMES])
def test_without_its_rule_a_forged_log_passes(promise: str, name: str) -> None:
    """The twin of the test above, which fails: it is this rule, and no other, that names it there."""
    check_found(promise, name)
    with pytest.raises(AssertionError):
        check_found(promise, name, BY_NAME[promise, name])
