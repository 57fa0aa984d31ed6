"""The linter's rules about calls: what counts was asked for, in its turn, and not more often than it may be.

A call is written down when it is answered or given up on, and the fact that follows from it right after. So a
fact without its call was told by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

from .lint_rules import ANY, TRANSITION, Rule, rule_maker
from .lint_story import Story
from .record import Record
from .states import Publication, State

__all__ = ["CALL_RULES"]

CALL_RULES: list[Rule] = []
"""The rules of this module."""
_rule = rule_maker(CALL_RULES)

Broadcasting = State.Broadcasting.name


# -- facts follow calls -----------------------------------------------------------------------------------


@_rule("P8", "Prepared")
def every_member_was_opened(story: Story, record: Record) -> Iterator[str]:
    """Nobody is sent to who did not say that it takes part."""
    if record.target == Broadcasting:
        for engine in sorted(story.remaining(record)):
            if ("open", engine) not in story.answered:
                yield f"{engine} is sent to, and never answered open"


@_rule("P9", "Prepared")
def what_is_sent_was_planned_and_opened(story: Story, record: Record) -> Iterator[str]:
    """There is a plan because the weights were read, and a way because the transport has opened it."""
    if record.target == Broadcasting:
        for act in ("plan", "transport_open"):
            if act not in story.done:
                yield f"the sending begins, and {act} was never answered"


@_rule("P7", "EngineCommitted", "call commit")
def a_number_is_bound_before_the_first_commit(story: Story, record: Record) -> Iterator[str]:
    """From then on an engine may hold it, and it must not stand for other bytes."""
    if record.error is None and "bind" not in story.done:
        yield f"{record.engine} commits version {story.version}, and its number is not bound"


@_rule("P3", "EngineCommitted")
def a_commit_is_confirmed_by_an_answer(story: Story, record: Record) -> Iterator[str]:
    """To commit, or to an abort that came too late to prevent it."""
    if not {("commit", record.engine), ("abort", record.engine)} & story.answered:
        yield f"{record.engine} counts as committed, and was never heard to say so"


@_rule("P10", "EngineReverted")
def a_revert_is_confirmed_by_an_answer(story: Story, record: Record) -> Iterator[str]:
    """To an abort: nobody else can know what the engine is."""
    engine = str(record.engine)
    if engine in story.after(record, "reverted") and ("abort", engine) not in story.answered:
        yield f"{engine} counts as reverted, and never answered abort"


@_rule("P3", "Published")
def a_publication_is_confirmed_by_the_ledger(story: Story, record: Record) -> Iterator[str]:
    """By its answer to publish, or to ask."""
    if not {"publish", "ask"} & story.done:
        yield f"version {story.version} counts as published, and the ledger never said so"


# -- in their turn, and once ------------------------------------------------------------------------------


@_rule("P12", "call transport_clean")
def the_transport_ends_last(story: Story, record: Record) -> Iterator[str]:
    """Its good end comes when the version is published and who holds it is resumed."""
    waiting = (story.sets["committed"] & story.sets["members"]) - story.resumed
    waiting -= story.sets["evicted"] | story.sets["quarantined"]
    if record.error is None and (story.publication != Publication.yes.name or waiting):
        who = f"{', '.join(sorted(waiting))} is not resumed" if waiting else "nothing is published"
        yield f"the transport had its good end, and {who}"


@_rule("P10", "call undo")
def only_what_was_prepared_is_undone(story: Story, record: Record) -> Iterator[str]:
    """And once."""
    who = str(record.undo)
    if record.error is None and story.runs["undo", who] >= story.runs["prepare", who]:
        yield f"{who} was prepared {story.runs['prepare', who]} times, and its undo is run once more"


@_rule("P11", "call clean")
def only_what_was_prepared_has_a_good_end(story: Story, record: Record) -> Iterator[str]:
    """And one."""
    who = str(record.undo)
    if record.error is None and story.runs["clean", who] >= story.runs["prepare", who]:
        yield f"{who} was prepared {story.runs['prepare', who]} times, and its good end is run once more"


# -- what every record says -------------------------------------------------------------------------------


@_rule("P6", TRANSITION)
def a_transition_says_how_long_it_took(story: Story, record: Record) -> Iterator[str]:
    """Or no limit could be held against it; time does not run backwards."""
    if record.seconds is None or not record.seconds >= 0:
        yield f"{record.trigger} says that {story.state} had lasted {record.seconds} s"


@_rule("P9", ANY)
def a_round_is_of_one_attempt(story: Story, record: Record) -> Iterator[str]:
    """Of one trainer, at one step."""
    wanted = story.owner, story.step, story.attempt
    found = record.owner or "", record.step, record.attempt or 1
    if found != wanted:
        yield f"a record with owner, step and attempt {found}; the round was opened with {wanted}"
