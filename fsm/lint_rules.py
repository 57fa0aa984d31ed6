"""How the linter's rules look, and those about proofs: P1 to P5, and P8.

A rule belongs to one promise, is asked about the records it names, and says in one line what is wrong. It
looks at what the record claims and at what the log has said of the round before, and never at the table: a
table that is wrong is one of the things a log can show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .lint_story import EVIDENCE, SENDING, SETS, Story, told_of
from .record import Record
from .states import Lock, Publication, State

__all__ = ["ANY", "PROOF_RULES", "TRANSITION", "Check", "Rule", "rule_maker"]

Check = Callable[[Story, Record], Iterable[str]]
TRANSITION = "transition"
"""As the only word of a rule: every transition."""
ANY = "any"
"""As the only word of a rule: every record but the first."""

Idle, Awaiting, Cleaning = State.Idle.name, State.Awaiting.name, State.Cleaning.name
Failed, Released = State.Failed.name, State.Released.name
_GONE, _UNKNOWN, _YES, _NO = Lock.gone.name, Publication.unknown.name, Publication.yes.name, "no"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Args:
        promise: ``P1`` to ``P12``.
        name: what must be true, in a few words.
        keys: which records it is asked about, as ``key_of`` calls them.
        check: says what is wrong, a line each.
    """

    promise: str
    name: str
    keys: tuple[str, ...]
    check: Check


def rule_maker(rules: list[Rule]) -> Callable[..., Callable[[Check], Check]]:
    """A decorator that adds to ``rules``."""

    def rule(promise: str, *keys: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            rules.append(Rule(promise, getattr(check, "__name__", "?").replace("_", " "), keys, check))
            return check

        return add

    return rule


PROOF_RULES: list[Rule] = []
"""The rules of this module."""
_rule = rule_maker(PROOF_RULES)


# -- claims: who may say what, and where ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Claim:
    promise: str
    triggers: frozenset[str]
    states: frozenset[str]


def _claim(promise: str, triggers: str, states: Iterable[str]) -> _Claim:
    return _Claim(promise, frozenset(triggers.split()), frozenset(states))


_BOTH = (Cleaning, Failed)
_CLAIMS: dict[str, _Claim] = {
    "lost": _claim("P8", "EngineLost", [Idle]),
    "members": _claim("P8", "LockGranted", [Idle]),
    "evicted": _claim("P8", "EngineLost EngineAcked", SENDING),
    "quarantined": _claim("P8", "EngineLost CommitFailed EngineReverted", _BOTH),
    "epoch": _claim("P5", "LockGranted", [Idle, Failed]),
    "plan": _claim("P9", "Prepared", [State.Locked.name]),
    "sent": _claim("P9", "BucketSent", [State.Broadcasting.name]),
    "acks": _claim("P2", "EngineAcked", [Awaiting]),
    "decided": _claim("P2", "EngineAcked EngineLost", [Awaiting]),
    "committed": _claim("P3", "EngineCommitted", _BOTH),
    "reverted": _claim("P4", "EngineReverted", [Failed]),
    "publication": _claim("P3", "EngineCommitted CommitFailed EngineLost Published PublishFailed", _BOTH),
    "settled": _claim("P10", "Cleaned CleanupFailed TimedOut", _BOTH),
    "unclean": _claim("P10", "CleanupFailed TimedOut", [Failed]),
}
"""By whose word a fact becomes known, in which states, and the promise that is broken otherwise."""

_TAKEN_BACK = {
    "acks": "P2", "committed": "P3", "reverted": "P4", "lost": "P4", "evicted": "P4", "quarantined": "P4",
    "members": "P8",
}  # fmt: skip
"""What is known of an engine stays known; the promise that is broken otherwise."""


def _claims_of(promise: str) -> Check:
    fields = {name: claim for name, claim in _CLAIMS.items() if claim.promise == promise}
    sets = [name for name, what in _TAKEN_BACK.items() if what == promise]

    def a_fact_is_known_by_the_right_word(story: Story, record: Record) -> Iterator[str]:
        told = told_of(record)
        if not told:
            return
        for name in told.keys() & fields.keys():
            claim = fields[name]
            if record.trigger not in claim.triggers or story.state not in claim.states:
                yield f"{record.trigger} in {story.state} cannot tell what is {name}"
            elif name in SETS and name != "members":
                others = story.after(record, name) - story.sets[name] - {record.engine}
                if others:
                    yield f"{record.trigger} of {record.engine} counts {_names(others)} as {name}"
        for name in told.keys() & set(sets):
            back = story.sets[name] - story.after(record, name)
            if back:
                yield f"{_names(back)} was {name} and is not any more"

    return a_fact_is_known_by_the_right_word


for _promise in ("P2", "P3", "P4", "P5", "P8", "P9", "P10"):
    _rule(_promise, TRANSITION)(_claims_of(_promise))


def _names(engines: Iterable[str]) -> str:
    return ", ".join(sorted(engines)) or "nobody"


# -- P1: every grant is released exactly once -------------------------------------------------------------


@_rule("P1", "LockGranted")
def a_round_is_granted_once(story: Story, record: Record) -> Iterator[str]:
    """One ticket, one grant."""
    if story.granted is not None:
        yield f"the lock is granted again, as epoch {record.epoch}; it was granted in line {story.granted[1]}"


@_rule("P1", "Unlocked", "LockRefused")
def the_lock_is_given_back_once(story: Story, record: Record) -> Iterator[str]:
    """A second release would be somebody else's."""
    if story.lock == _GONE:
        yield f"{record.trigger}, although {story.evidence} had proven that the lock is not held"


@_rule("P1", TRANSITION)
def the_lock_is_gone_only_on_evidence(story: Story, record: Record) -> Iterator[str]:
    """A claim that it is needs a word of the lock service, or the end of the lease."""
    claimed = told_of(record).get("lock")
    if claimed == _GONE and record.trigger not in EVIDENCE:
        yield f"{record.trigger} does not prove that the lock is not held"
    if record.target == Released != story.state and _GONE not in (claimed, story.lock):
        yield f"Released by {record.trigger}, and nothing proves that the lock is not held"


@_rule("P1", "result")
def the_result_comes_after_the_release(story: Story, record: Record) -> Iterator[str]:
    """A round that is not Released is not over, and it is over once."""
    if not story.over:
        yield f"the result is told in {story.state}, before the lock was proven not held"
    if story.result:
        yield "the result is told twice"


# -- P2: no final ACK before the receiver let go ----------------------------------------------------------

_PROVEN = ("fingerprint", "tensors", "bytes")


def _receipts(record: Record) -> list[dict[str, Any]]:
    return list(told_of(record).get("receipts", ()))


def _counts(story: Story, record: Record) -> bool:
    """Whether an ACK is taken for a proof."""
    return record.engine in story.after(record, "acks") - story.sets["acks"]


@_rule("P2", "EngineAcked")
def a_receipt_proves_the_plan(story: Story, record: Record) -> Iterator[str]:
    """One receipt for each rank, over all that was planned."""
    if not _counts(story, record):
        return
    plan, receipts = story.plan or {}, _receipts(record)
    ranks = story.roster.get(str(record.engine), {}).get("ranks", 1)
    if sorted(each["rank"] for each in receipts) != list(range(ranks)):
        yield f"{record.engine} counts as proven by {len(receipts)} receipts, and has ranks 0 to {ranks - 1}"
    for each in receipts:
        names = (*_PROVEN, "digest") if plan.get("digest") else _PROVEN
        wrong = [name for name in names if each[name] != plan.get(name)]
        if wrong:
            told = ", ".join(f"{name} {each[name]!r}, planned {plan.get(name)!r}" for name in wrong)
            yield f"a receipt of {record.engine} rank {each['rank']} counts and proves something else: {told}"


@_rule("P2", "EngineAcked")
def an_ack_comes_after_the_last_bucket(story: Story, record: Record) -> Iterator[str]:
    """Nobody holds what was not sent."""
    buckets = (story.plan or {}).get("buckets", 0)
    if _counts(story, record) and not (story.all_sent and story.sent == buckets):
        yield f"{record.engine} counts as proven after {story.sent} of {buckets} buckets"


@_rule("P2", TRANSITION)
def everybody_proved_it_before_cleaning(story: Story, record: Record) -> Iterator[str]:
    """Cleaning begins with the last receipt."""
    if record.target == Cleaning != story.state:
        without = story.remaining(record) - story.after(record, "acks")
        if without:
            yield f"Cleaning begins without a receipt of {_names(without)}"


@_rule("P2", "EngineCommitted", "call commit")
def a_commit_follows_a_receipt(story: Story, record: Record) -> Iterator[str]:
    """Nobody commits what is not proven."""
    if record.engine in story.roster and (not story.decided or record.engine not in story.sets["acks"]):
        yield f"{record.engine} commits without having proved that it holds the bytes"


# -- P3: no version published before all remaining committed ----------------------------------------------


@_rule("P3", TRANSITION)
def a_publication_waits_for_every_commit(story: Story, record: Record) -> Iterator[str]:
    """Of all who remain, and of the quorum when it is asked for."""
    claimed = told_of(record).get("publication")
    if claimed not in (_UNKNOWN, _YES):
        return
    missing, holding = story.missing(record), story.remaining(record)
    if missing:
        yield f"version {story.version} is published although {_names(missing)} did not confirm the commit"
    if claimed == _UNKNOWN and len(holding) < story.quorum:
        yield f"version {story.version} is published on {len(holding)} engines; the quorum is {story.quorum}"
    if claimed == _YES and story.publication != _UNKNOWN:
        yield f"version {story.version} is published without having been asked for"


@_rule("P3", "call publish", "call bind")
def nothing_is_published_out_of_turn(story: Story, record: Record) -> Iterator[str]:
    """The ledger is asked to bind in Cleaning, and to publish when the last commit is confirmed."""
    if record.error is None and (
        not story.decided or (record.trigger, story.publication) == ("publish", _NO)
    ):
        yield f"the ledger was asked to {record.trigger} version {story.version} before its turn"


@_rule("P3", "call resume")
def nobody_serves_what_is_not_published(story: Story, record: Record) -> Iterator[str]:
    """In Failed an engine that committed may: its commit is not undone."""
    if story.state == Cleaning and story.publication != _YES:
        yield f"{record.engine} was resumed with version {story.version} before it was published"


@_rule("P3", "result")
def the_result_says_what_the_ledger_said(story: Story, record: Record) -> Iterator[str]:
    """Published is yes, no, or unknown."""
    told = told_of(record).get("published")
    if told != story.publication:
        yield f"the result says published: {told}; the ledger's answers make it {story.publication}"


# -- P4: no engine resumed unless proven whole or untouched -----------------------------------------------


@_rule("P4", "call resume")
def only_a_whole_engine_is_resumed(story: Story, record: Record) -> Iterator[str]:
    """By its confirmed commit, and not out since. One that reverted serves by its own answer."""
    engine = str(record.engine)
    if story.disposition(engine) != "serving_new":
        yield f"{engine} was resumed, and is {story.disposition(engine)}: no commit of it is confirmed"


@_rule("P4", "EngineReverted")
def a_touched_engine_is_not_believed(story: Story, record: Record) -> Iterator[str]:
    """One that loads in place holds a mix after the first bucket, whatever it says."""
    touched = record.engine in story.inplace and story.sent > 0
    if touched and record.engine in story.after(record, "reverted"):
        yield f"{record.engine} loads in place, {story.sent} buckets were sent, and it counts as reverted"


@_rule("P4", "result")
def nobody_serves_without_a_proof(story: Story, record: Record) -> Iterator[str]:
    """An engine serves the new version by its commit, the old one if it is untouched."""
    for engine, what in _rows(record).items():
        proven = story.disposition(engine)
        unasked = engine in story.open and engine not in story.tainted  # that is P10's
        if what != proven and what.startswith("serving") and not (what == "serving_old" and unasked):
            yield f"the result says {engine} is {what}; by its own word it is {proven}"


def _rows(record: Record) -> dict[str, str]:
    return dict(told_of(record).get("engines", {}))


# -- P5: a stale event changes nothing --------------------------------------------------------------------


@_rule("P5", ANY)
def every_record_is_of_the_rounds_epoch(story: Story, record: Record) -> Iterator[str]:
    """What carries another epoch belongs to another grant."""
    if record.trigger != "LockGranted" and record.epoch != story.epoch:
        yield f"{record.trigger or record.event} of epoch {record.epoch}; the round's epoch is {story.epoch}"


@_rule("P5", "EngineAcked")
def a_receipt_of_another_round_counts_for_nothing(story: Story, record: Record) -> Iterator[str]:
    """It is late, or it is forged."""
    for each in _receipts(record) if _counts(story, record) else ():
        if (each["round"], each["epoch"]) != (story.round, story.epoch):
            yield f"a receipt of {record.engine} for round {each['round']}, epoch {each['epoch']} counts here"


@_rule("P5", TRANSITION)
def a_fact_of_a_state_that_was_left_changes_nothing(story: Story, record: Record) -> Iterator[str]:
    """The state a fact was taken in is the one the round is in; after Released nothing is learnt."""
    if record.source != story.state:
        yield f"{record.trigger} is taken in {record.source}, and the round is in {story.state}"
    changed = told_of(record).keys() & _CLAIMS.keys()
    if story.over and changed:
        yield f"{record.trigger} comes after Released, and changes {_names(changed)}"


@_rule("P5", "TimedOut")
def a_late_deadline_changes_nothing(story: Story, record: Record) -> Iterator[str]:
    """One that was armed for a state which the round has left."""
    phase, told = told_of(record).get("phase"), told_of(record).keys() & _CLAIMS.keys()
    if phase != story.state and (record.target != story.state or told):
        yield f"the deadline of {phase} is taken for that of {story.state}"


@_rule("P5", "stale", "refused")
def what_was_refused_changes_nothing(story: Story, record: Record) -> Iterator[str]:
    """It is counted and logged, and that is all."""
    if record.facts or record.target is not None:
        yield f"a {record.event} {record.trigger} changes {_names(told_of(record) or ['the state'])}"


# -- P8: membership is fixed by (id, incarnation) at Locked -----------------------------------------------


@_rule("P8", "LockGranted")
def members_are_those_asked_for_without_the_lost(story: Story, record: Record) -> Iterator[str]:
    """Nobody more, nobody less."""
    if record.target != State.Locked.name:
        return
    wanted, found = story.roster.keys() - story.sets["lost"], story.after(record, "members")
    if found != wanted:
        yield f"the members are {_names(found)}; asked for and not lost were {_names(wanted)}"


@_rule("P8", TRANSITION)
def nobody_else_takes_part(story: Story, record: Record) -> Iterator[str]:
    """Another name, another incarnation or other ranks are somebody else."""
    told = told_of(record)
    for name in told.keys() & set(SETS):
        for each in told[name]:
            if story.roster.get(each["id"]) != each:
                yield f"{each['id']} (incarnation {each['incarnation']}) is {name}, and was not asked for"
        strangers = story.after(record, name) - story.sets["members"]
        if strangers and name not in ("lost", "members"):
            yield f"{_names(strangers)} is {name}, and is no member"


@_rule("P8", "EngineAcked")
def an_ack_is_of_the_member_itself(story: Story, record: Record) -> Iterator[str]:
    """A receipt names the incarnation that made it; a stranger's ends the round."""
    if "stranger" in told_of(record) and record.target not in (Failed, story.state):
        yield f"the ACK of {record.engine}, who is not a member, leads to {record.target}"
    wanted = record.engine, story.roster.get(str(record.engine), {}).get("incarnation")
    for each in _receipts(record) if _counts(story, record) else ():
        if (each["engine"], each["incarnation"]) != wanted:
            other = f"{each['engine']} (incarnation {each['incarnation']})"
            yield f"a receipt of {other} counts for {record.engine}"


@_rule("P8", "call open", "call commit", "call abort", "call resume", "result")
def only_members_are_spoken_to(story: Story, record: Record) -> Iterator[str]:
    """And the result speaks of all who were asked for."""
    if record.event == "call" and record.engine not in story.sets["members"]:
        yield f"{record.trigger} went to {record.engine}, who is no member"
    if record.event == "result" and _rows(record).keys() != story.roster.keys():
        yield f"the result is about {_names(_rows(record))}; asked for were {_names(story.roster)}"
