"""The linter's rules about order and time within one round: P6, P7, and P9 to P12.

Clocks: how long a state lasted is what the round itself measured (``seconds``), never a difference of two
``time`` values, which a correction of the host's clock may move.
"""

from __future__ import annotations

from collections.abc import Iterator

from .lint_rules import ANY, TRANSITION, Rule, rule_maker
from .lint_story import FORWARD, RANK, Story, told_of
from .record import Record
from .states import Lock, Publication, State

__all__ = ["COURSE_RULES", "patience"]

COURSE_RULES: list[Rule] = []
"""The rules of this module."""
_rule = rule_maker(COURSE_RULES)

Broadcasting, Awaiting, Cleaning = State.Broadcasting.name, State.Awaiting.name, State.Cleaning.name
Failed, Released = State.Failed.name, State.Released.name
_YES = Publication.yes.name


def _list(names: object) -> str:
    return ", ".join(sorted(names)) if isinstance(names, (set, frozenset, list)) else str(names)


# -- P6: every state ends by its deadline -----------------------------------------------------------------


def patience(limit: float) -> float:
    """How late a limit may be kept: hosts are busy, and threads wait for their turn."""
    return limit * 1.1 + 1.0


def _bounds(story: Story, record: Record) -> Iterator[tuple[str, float, float]]:
    """What took how long, and how long it may take."""
    limits, took = story.limits, record.seconds or 0.0
    if story.state in FORWARD:
        yield f"{story.state} and what came before it", story.forward + took, limits["forward"]
    elif story.state == Failed and not story.settled:
        yield "Failed, without settling,", took, limits["failed"]
    elif story.state == Failed:
        # The lock service alone may add to it: until the arithmetic of the lease proves it free.
        yield "Failed", took, limits["failed"] + 2 * limits["release"] + 7 / 3 * limits["lease"]


@_rule("P6", TRANSITION)
def a_state_ends_by_its_deadline(story: Story, record: Record) -> Iterator[str]:
    """By the limits with which the round was opened; without them nothing is known."""
    for what, took, limit in _bounds(story, record) if story.limits else ():
        if took > patience(limit):
            yield f"{what} took {took:.3f} s; the limit is {limit:.3f} s"


@_rule("P6", "result")
def a_round_ends_by_its_deadline(story: Story, record: Record) -> Iterator[str]:
    """All in all."""
    limits, took = story.limits, record.seconds or 0.0
    if limits:
        most = limits["forward"] + limits["failed"] + 2 * limits["release"] + 7 / 3 * limits["lease"]
        if took > patience(most):
            yield f"the round took {took:.3f} s; the limits add up to {most:.3f} s"


@_rule("P6", "TimedOut")
def a_deadline_ends_the_state(story: Story, record: Record) -> Iterator[str]:
    """The state is left; in Failed, where there is nowhere to go, it is given up."""
    if told_of(record).get("phase") != story.state or story.state not in FORWARD | {Failed}:
        return
    gives_up = story.settled or told_of(record).get("settled") is True
    if record.target == story.state and not (story.state == Failed and gives_up):
        yield f"the deadline of {story.state} passed, and the round stays"


# -- P7: versions never fall ------------------------------------------------------------------------------


@_rule("P7", ANY)
def a_round_has_one_version(story: Story, record: Record) -> Iterator[str]:
    """From its first record to its last."""
    if record.version != story.version:
        yield f"a record of version {record.version}; the round hands over version {story.version}"


# -- P9: a retry is a new round and a full resend ---------------------------------------------------------


@_rule("P9", TRANSITION)
def no_edge_goes_back(story: Story, record: Record) -> Iterator[str]:
    """A round only moves on, and from Failed only to Released."""
    goal = str(record.target)
    if RANK.get(goal, -1) < RANK.get(story.state, 0) or (
        story.state == Failed and goal not in (Failed, Released)
    ):
        yield f"{record.trigger} leads from {story.state} back to {goal}"


@_rule("P9", "BucketSent")
def every_bucket_is_sent_once_in_its_turn(story: Story, record: Record) -> Iterator[str]:
    """From 0 to the last one of the plan."""
    buckets = (story.plan or {}).get("buckets", 0)
    if record.bucket != story.sent or story.sent >= buckets:
        yield f"bucket {record.bucket} is sent; {story.sent} of {buckets} were sent before"


@_rule("P9", TRANSITION)
def the_whole_plan_is_sent(story: Story, record: Record) -> Iterator[str]:
    """Before anybody is waited for."""
    buckets, begins = (story.plan or {}).get("buckets", 0), record.target == Awaiting != story.state
    if (record.trigger == "AllSent" or begins) and (story.sent != buckets or not buckets):
        yield f"{story.sent} of {buckets} buckets were sent, and that counts as all"


# -- P10: a partly applied pause is undone, or its engines are quarantined --------------------------------


@_rule("P10", TRANSITION)
def nothing_is_released_before_it_is_put_back(story: Story, record: Record) -> Iterator[str]:
    """Settled means put back, or given up and fenced."""
    if record.target == Released != story.state and not (story.settled or told_of(record).get("settled")):
        yield f"Released by {record.trigger}, before everything was put back or given up"


@_rule("P10", "Cleaned")
def every_engine_was_put_back(story: Story, record: Record) -> Iterator[str]:
    """In Failed each one has said what it is; whoever committed was resumed."""
    if "settled" not in told_of(record):
        return
    if story.state == Failed and story.open:
        yield f"everything counts as put back, and {_list(story.open)} never said what it is"
    paused = (story.sets["committed"] & story.sets["members"]) - story.resumed
    paused -= story.sets["evicted"] | story.sets["quarantined"]
    if paused:
        yield f"everything counts as put back, and {_list(paused)} committed and was never resumed"


@_rule("P10", "Cleaned")
def every_undo_was_run(story: Story, record: Record) -> Iterator[str]:
    """In Failed: what an executor prepared is undone, and no putting back met an error."""
    if "settled" not in told_of(record) or story.state != Failed:
        return
    if story.owing:
        yield f"everything counts as put back, and the undo of {_list(story.owing)} was never run"
    if story.troubled:
        yield "everything counts as put back, although putting back met an error"


@_rule("P10", "CleanupFailed", "TimedOut")
def what_is_given_up_is_unclean(story: Story, record: Record) -> Iterator[str]:
    """Who gives up says so."""
    if told_of(record).get("settled") and not told_of(record).get("unclean"):
        yield f"{record.trigger} gives up in {story.state}, and the round does not count as unclean"


@_rule("P10", "call undo")
def undos_run_backwards(story: Story, record: Record) -> Iterator[str]:
    """The newest first. When all is given up, they are only begun, and may answer in any order."""
    who = record.undo
    if not story.unclean and who in story.order and who != story.order[-1]:
        yield f"the undo of {who} was run before that of {story.order[-1]}, which was prepared later"


@_rule("P10", "result")
def the_result_hides_nothing(story: Story, record: Record) -> Iterator[str]:
    """Unclean is unclean, and who never said what it is does not serve."""
    told = told_of(record)
    if bool(told.get("unclean")) is not story.unclean:
        yield f"the result says unclean: {told.get('unclean')}; the round's facts say {story.unclean}"
    silent = story.open - story.tainted
    for engine, what in dict(told.get("engines", {})).items():
        if engine in silent and what == "serving_old":
            yield f"the result says {engine} is {what}; it was paused, and never said that it had reverted"


# -- P11: kept on failure, cleared on success -------------------------------------------------------------


@_rule("P11", "call clean")
def the_good_end_comes_after_the_publication(story: Story, record: Record) -> Iterator[str]:
    """What an executor keeps for a failed round is let go only when the version is published."""
    if story.publication != _YES:
        yield f"the good end of {record.undo} was run, and version {story.version} is not published"


@_rule("P11", "call undo")
def a_good_round_is_not_undone(story: Story, record: Record) -> Iterator[str]:
    """Only Failed undoes, and never what had its good end."""
    if story.state in FORWARD:
        yield f"the undo of {record.undo} was run in {story.state}"
    elif record.undo in story.cleaned:
        yield f"the undo of {record.undo} was run after its good end"


@_rule("P11", "Cleaned")
def every_good_end_was_run(story: Story, record: Record) -> Iterator[str]:
    """In Cleaning: of each executor that was prepared."""
    left = set(story.prepared) - story.cleaned
    if story.state == Cleaning and left:
        yield f"everything counts as put back, and the good end of {_list(left)} was never run"


# -- P12: nothing is left behind --------------------------------------------------------------------------


@_rule("P12", "Cleaned")
def the_transport_was_closed(story: Story, record: Record) -> Iterator[str]:
    """By its good end or by its abort, and what it was doing is over."""
    if "settled" not in told_of(record):
        return
    end = "transport_clean" if story.state == Cleaning else "transport_abort"
    if end not in story.done:
        yield f"everything counts as put back, and the transport never answered {end}"
    for state, act in ((Broadcasting, "broadcast"), (Awaiting, "collect")):
        if state in story.entered and act not in story.heard:
            yield f"everything counts as put back, and {act} may still be under way"


@_rule("P12", "Unlocked")
def the_lock_goes_last(story: Story, record: Record) -> Iterator[str]:
    """Everything is closed before it is given back."""
    if not story.settled and story.lock != Lock.gone.name:
        yield f"the lock is given back in {story.state}, before what the round holds was put back"
