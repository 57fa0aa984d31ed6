"""Faults to bring back into the product, in a test run of its own: ``pytest -p membermutants``.

Which one is said by the environment variable ``MEMBERS_MUTANT``. Each changes the product, never a check.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weightsync import books, conductor, entries, turns
from weightsync.fsm import ranks as rules
from weightsync.fsm import recovery
from weightsync.fsm.errors import PlanMismatch
from weightsync.fsm.turns import Turn
from weightsync.fsm.turns import turn as right_turn
from weightsync.handlers import leader, monitor, ranks, receiver

__all__ = ["MUTANTS"]

Changed: Any = setattr


def staleness_without_a_limit() -> None:
    """Weights are left out for as long as a round runs."""
    Changed(turns, "turn", lambda policy, *, busy, behind: right_turn(policy, busy=busy, behind=1))


def failed_rounds_count_as_delivered() -> None:
    """Whatever became of a round, the engines are taken to be up to date."""
    over = turns.Turns._over

    def trusting(self: turns.Turns, pending: Any, result: Any) -> None:
        over(self, pending, result)
        self._delivered = max(self._delivered, pending.number)

    Changed(turns.Turns, "_over", trusting)


def whoever_comes_next_is_next() -> None:
    """Those who block are asked again in no order."""
    Changed(turns.Turns, "_ahead", lambda self, pending: [])
    Changed(turns.Turns, "_let_in", lambda self: None)


def older_weights_take_the_place_of_newer_ones() -> None:
    """Whatever waits is replaced."""

    def put(self: turns.Turns, pending: Any, decided: Turn) -> None:
        number, pending.number = pending.number, 1 << 20
        right_put(self, pending, decided)
        pending.number = number

    right_put = turns.Turns._put
    Changed(turns.Turns, "_put", put)
    Changed(turns.Turns, "_newer", lambda self, pending: None)


def coalescing_only_queues() -> None:
    """Nothing is replaced, and every copy is kept."""

    def queues(policy: Any, *, busy: bool, behind: int) -> Turn:
        decided = right_turn(policy, busy=busy, behind=behind)
        return Turn.enter if decided is Turn.replace else decided

    Changed(turns, "turn", queues)


def nobody_rests() -> None:
    """An engine that keeps failing is in every round."""
    Changed(recovery.Care, "failed", lambda self, now, backoff: replace(self, tries=self.tries + 1))


def rests_never_grow() -> None:
    """Each is as long as the first."""
    Changed(recovery.Backoff, "rest", lambda self, failures: self.first)


def any_bytes_under_the_published_number() -> None:
    """Whoever catches up is sent what there is."""
    catch_up = conductor.Conductor._catch_up

    def careless(self: conductor.Conductor, pending: Any, weights: Any) -> Any:
        Changed(
            conductor.Conductor, "_digest", lambda self, weights, version: self._stage.ledger.current().digest
        )
        return catch_up(self, pending, weights)

    Changed(conductor.Conductor, "_catch_up", careless)


def everybody_is_paused_to_catch_up() -> None:
    """A round of all, under the published number."""
    Changed(books.EngineBooks, "behind", lambda self, version: list(self.links))


def added_engines_are_taken_at_their_word() -> None:
    """What an engine says it holds is written down as proven."""
    heard = entries._heard

    def trusting(entry: books.Entry, status: Any, ours: Any) -> books.Entry:
        return replace(heard(entry, status, ours), version=status.version or 0)

    Changed(entries, "_heard", trusting)


def removed_engines_are_servable() -> None:
    """Until the next round takes note."""
    Changed(books.EngineBooks, "servable", lambda self: {
        name: entry.version for name, entry in self.entries().items()
        if entry.version is not None and not entry.quarantined and entry.error is None
    })  # fmt: skip


def late_answers_are_not_asked_for_again() -> None:
    """Whoever answers when the round is over is servable by what the round has proved."""

    def vouched(self: books.EngineBooks, limit: float) -> dict[str, int]:
        self.refresh(limit, everybody=True, without=self.resting(0))
        return self.servable()

    Changed(books.EngineBooks, "vouched", vouched)


def old_answers_are_believed() -> None:
    """Whichever comes last."""
    refresh = books.EngineBooks.refresh

    def forgetful(self: books.EngineBooks, limit: float, **which: Any) -> set[str]:
        self._answered = type("Nothing", (dict,), {"get": lambda self, name, default: 0})()
        return refresh(self, limit, **which)

    Changed(books.EngineBooks, "refresh", forgetful)


def a_number_says_whose_bytes_they_are() -> None:
    """Whoever had the engine meanwhile."""
    Changed(books.EngineBooks, "_ours", lambda self, epoch: True)


def failed_rounds_of_ours_are_others() -> None:
    """Only the epoch of the last commit is known to be ours."""
    Changed(books.EngineBooks, "_ours", lambda self, epoch: False)


def who_comes_back_is_who_it_was() -> None:
    """Removed and added again by its link, it keeps what it had."""
    add = books.EngineBooks.add

    def welcome(self: books.EngineBooks, link: Any) -> None:
        add(self, link)
        self._new.clear()

    Changed(books.EngineBooks, "add", welcome)


def removing_lifts_a_quarantine() -> None:
    """Whoever comes back by a new link is taken for whole."""
    Changed(books.EngineBooks, "take_in", _forgetful(books.EngineBooks.take_in))


def _forgetful(take_in: Any) -> Any:
    def forgets(self: books.EngineBooks) -> Any:
        gone = take_in(self)
        self._entries = {name: replace(entry, former=None) for name, entry in self._entries.items()}
        return gone

    return forgets


def removed_links_are_forgotten() -> None:
    """Only those that are wanted are closed."""
    Changed(books.EngineBooks, "every", lambda self: list({**self.links, **self._wanted}.values()))


def nobody_is_ever_let_go() -> None:
    """Who was removed is asked for all the same."""
    Changed(books.EngineBooks, "take_in", lambda self: [])


def nothing_is_refused_before_the_lock() -> None:
    """Whoever cannot be used is found out in the round."""
    Changed(books.EngineBooks, "refusal", lambda self, names: None)


def who_sleeps_is_asked_for() -> None:
    """An engine that says it is asleep is taken for awake."""
    check: Any = vars(entries)["check"]
    Changed(entries, "check", lambda name, status, ranks: check(name, replace(status, asleep=False), ranks))


def catching_up_refuses_nobody() -> None:
    """Whoever catches up is asked for under the lock, whatever it says."""
    Changed(conductor.Conductor, "_refusal", lambda self, cast: None)


def who_sleeps_holds_what_it_held() -> None:
    """An engine that was started anew while nobody looked, and sleeps, keeps its version in the books."""
    learnt: Any = vars(books)["learnt"]

    def keeping(entry: books.Entry, said: Any, ranks: Any, ours: Any) -> Any:
        known = learnt(entry, said, ranks, ours)
        return replace(known, version=entry.version) if known.error is not None else known

    Changed(books, "learnt", keeping)


def nobody_asks_whose_commit_it_was() -> None:
    """A number that stands is taken for the bytes that stood for it."""
    Changed(entries, "_overwritten", lambda *_, others: False)


def every_session_of_others_overwrites() -> None:
    """Whoever had a session may have changed the engine, whatever it says of its last commit."""
    Changed(entries, "_overwritten", lambda *_, others: others)


def who_sleeps_opens_a_session() -> None:
    """The engine itself does not look."""
    Changed(receiver.Receiver, "_asleep", property(lambda self: lambda: False, lambda self, value: None))


def epochs_are_not_compared() -> None:
    """The engine that another lock's trainer has is found out in the round."""
    Changed(conductor.Conductor, "_compare_epochs", lambda self: None)


def ranks_are_not_compared() -> None:
    """Whatever was declared."""
    check: Any = vars(entries)["check"]
    Changed(entries, "check", lambda name, status, ranks: check(name, status, None))


def numbers_are_not_looked_up() -> None:
    """The ledger is asked when a round publishes."""
    Changed(conductor.Conductor, "_version_of", lambda self, pending, *_: pending.version or 0)


def watching_before_the_end() -> None:
    """The monitor watches again while engines are paused."""

    def clean(self: monitor.HealthWatch, round: Any) -> None:
        self._watch_again(round.session.round)

    Changed(monitor.HealthWatch, "clean", clean)


def watching_on_the_good_path_alone() -> None:
    """A round that fails leaves the monitor paused."""
    call = monitor.HealthWatch.__call__

    def partial(self: monitor.HealthWatch, record: Any) -> None:
        if record.event != "result" or record.error is None:
            call(self, record)

    Changed(monitor.HealthWatch, "__call__", partial)


def plans_of_ranks_are_not_compared() -> None:
    """Whatever the other ranks bring."""
    right: Any = vars(leader)["disagreement"]

    def blind(reports: Any) -> Any:
        error = right(reports)
        return None if isinstance(error, PlanMismatch) else error

    Changed(leader, "disagreement", blind)


def nobody_listens_for_ranks() -> None:
    """A rank that dies in a round is noticed at the next hand-over."""
    Changed(leader.Leader, "_heard", lambda self, number, pulses: None)


def errors_of_rank_0_are_its_own() -> None:
    """The others wait for an outcome that does not come."""
    post = ranks.TrainerRanks.post

    def silent(self: ranks.TrainerRanks, number: int, what: str, value: Any) -> None:
        if what != "outcome" or value["error"] is None:
            post(self, number, what, value)

    Changed(ranks.TrainerRanks, "post", silent)


def followers_do_not_listen() -> None:
    """They wait for rank 0 as long as a round may take, alive or not."""
    Changed(rules.Pulses, "silent", lambda self, now, limit: [])


def ranks_that_give_up_say_nothing() -> None:
    """What they have given up is published for them."""
    Changed(ranks.TrainerRanks, "give_up", lambda self, error: None)


def reports_are_taken_back_if_the_store_answered() -> None:
    """A report of which the store said nothing stands, and its rank has gone."""
    arrive = ranks.TrainerRanks.arrive

    def said(self: ranks.TrainerRanks, *args: Any) -> Any:
        try:
            return arrive(self, *args)
        except BaseException:
            self._owed = []
            raise

    Changed(ranks.TrainerRanks, "arrive", said)


def who_dies_after_its_report_is_not_missed() -> None:
    """Its silence is all that tells, and takes longer than the round."""
    Changed(leader.Leader, "_absent", lambda *_: None)


def nobody_is_in_anybodys_place() -> None:
    """Rank 0 does not look who reports when the round is over."""
    Changed(leader.Leader, "_replaced", lambda self, met: None)


def the_other_ones_report_stands() -> None:
    """Who finds somebody else in its place takes back its own report alone."""
    give_up = ranks.TrainerRanks.give_up

    def own(self: ranks.TrainerRanks, error: BaseException) -> None:
        del self._owed[1:]
        give_up(self, error)

    Changed(ranks.TrainerRanks, "give_up", own)


def bad_steps_of_followers_are_their_own() -> None:
    """Rank 0 waits for who does not come."""
    Changed(ranks.TrainerRanks, "cannot", lambda self, kind, error: None)


def nobody_looks_once_more() -> None:
    """Who gave up too late to stop the round is not noticed."""
    Changed(leader.Leader, "_gave_up", lambda self, met: None)


def any_run_is_this_one() -> None:
    """What was reported to an older run is taken for a report."""
    Changed(ranks.TrainerRanks, "reported", lambda self, rank: (
        None if self.said("report", rank) is None else rules.Report(**self.said("report", rank))
    ))  # fmt: skip


def answers_of_an_older_run_are_taken() -> None:
    """A rank never looks whether another run has begun."""
    find_run = ranks.TrainerRanks.find_run

    def once(self: ranks.TrainerRanks) -> bool:
        return False if self._looked and self._run else find_run(self)

    Changed(ranks.TrainerRanks, "find_run", once)


def refusals_come_out_of_turn() -> None:
    """Before whatever was begun."""
    Changed(turns.Turns, "in_turn", lambda self, work: work())


def cancellations_wait_for_the_ranks() -> None:
    """Until all have come, or the limit is over."""
    agree = leader.Leader._agree

    class Deaf:
        cancelled = None

    Changed(leader.Leader, "_agree", lambda self, met, led: agree(self, met, Deaf()))  # type: ignore[arg-type]


def old_words_are_kept() -> None:
    """Nothing that was said of a hand-over is ever deleted."""
    Changed(ranks, "_KEPT", 1 << 30)


MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    "staleness_without_a_limit": (staleness_without_a_limit, "turns.py -k too_far_behind"),
    "failed_rounds_count_as_delivered": (failed_rounds_count_as_delivered, "turns.py -k nearer"),
    "coalescing_only_queues": (coalescing_only_queues, "turns.py -k newest_weights"),
    "late_answers_are_not_asked_for_again": (late_answers_are_not_asked_for_again, "books.py -k too_late"),
    "old_answers_are_believed": (old_answers_are_believed, "books.py -k older_question"),
    "whoever_comes_next_is_next": (whoever_comes_next_is_next, "turns.py -k in_their_order"),
    "older_weights_take_the_place_of_newer_ones": (
        older_weights_take_the_place_of_newer_ones,
        "turns.py -k passed_over_for_newer",
    ),
    "catching_up_refuses_nobody": (catching_up_refuses_nobody, "recovery.py -k cannot_catch_up"),
    "who_sleeps_holds_what_it_held": (who_sleeps_holds_what_it_held, "recovery.py -k fell_asleep"),
    "a_number_says_whose_bytes_they_are": (a_number_says_whose_bytes_they_are, "books.py -k another_trainer"),
    "failed_rounds_of_ours_are_others": (failed_rounds_of_ours_are_others, "books.py -k of_our_own"),
    "who_comes_back_is_who_it_was": (who_comes_back_is_who_it_was, "recovery.py -k by_its_old_link"),
    "removing_lifts_a_quarantine": (removing_lifts_a_quarantine, "recovery.py -k does_not_lift"),
    "removed_links_are_forgotten": (removed_links_are_forgotten, "recovery.py -k every_link"),
    "nobody_rests": (nobody_rests, "recovery.py -k tried_less"),
    "rests_never_grow": (rests_never_grow, "recovery.py -k tried_less"),
    "any_bytes_under_the_published_number": (
        any_bytes_under_the_published_number,
        "recovery.py -k without_the_bytes",
    ),
    "everybody_is_paused_to_catch_up": (everybody_is_paused_to_catch_up, "recovery.py -k behind_alone"),
    "added_engines_are_taken_at_their_word": (
        added_engines_are_taken_at_their_word,
        "recovery.py -k no_history",
    ),
    "nothing_is_refused_before_the_lock": (
        nothing_is_refused_before_the_lock,
        "bad_inputs.py -k not_there",
    ),
    "who_sleeps_is_asked_for": (who_sleeps_is_asked_for, "bad_inputs.py -k is_asleep"),
    "who_sleeps_opens_a_session": (who_sleeps_opens_a_session, "bad_inputs.py -k real_engine"),
    "nobody_asks_whose_commit_it_was": (nobody_asks_whose_commit_it_was, "books.py -k committed_on"),
    "every_session_of_others_overwrites": (every_session_of_others_overwrites, "books.py -k costs_nothing"),
    "epochs_are_not_compared": (epochs_are_not_compared, "bad_inputs.py -k another_lock"),
    "ranks_are_not_compared": (ranks_are_not_compared, "bad_inputs.py -k another_number"),
    "numbers_are_not_looked_up": (numbers_are_not_looked_up, "bad_inputs.py -k version_that_falls"),
    "watching_before_the_end": (watching_before_the_end, "monitor.py -k lock_is_free"),
    "watching_on_the_good_path_alone": (watching_on_the_good_path_alone, "monitor.py -k lock_is_free"),
    "plans_of_ranks_are_not_compared": (
        plans_of_ranks_are_not_compared,
        "ranks.py -k refused_on_every_rank",
    ),
    "nobody_listens_for_ranks": (nobody_listens_for_ranks, "ranks.py -k while_it_waits"),
    "errors_of_rank_0_are_its_own": (errors_of_rank_0_are_its_own, "ranks.py -k no_result"),
    "followers_do_not_listen": (followers_do_not_listen, "ranks.py -k beats_stop"),
    "ranks_that_give_up_say_nothing": (ranks_that_give_up_say_nothing, "ranks_apart.py -k not_begun"),
    "reports_are_taken_back_if_the_store_answered": (
        reports_are_taken_back_if_the_store_answered,
        "ranks_reports.py -k the_store_took",
    ),
    "who_dies_after_its_report_is_not_missed": (
        who_dies_after_its_report_is_not_missed,
        "ranks_reports.py -k short_round",
    ),
    "nobody_is_in_anybodys_place": (nobody_is_in_anybodys_place, "ranks_reports.py -k in_the_place_of"),
    "the_other_ones_report_stands": (the_other_ones_report_stands, "ranks_reports.py -k both_reports"),
    "bad_steps_of_followers_are_their_own": (
        bad_steps_of_followers_are_their_own,
        "ranks_reports.py -k heard_of_by_all",
    ),
    "nobody_looks_once_more": (nobody_looks_once_more, "ranks_apart.py -k before_it_tells"),
    "any_run_is_this_one": (any_run_is_this_one, "ranks_apart.py -k is_no_report"),
    "answers_of_an_older_run_are_taken": (answers_of_an_older_run_are_taken, "ranks_apart.py -k second_run"),
    "refusals_come_out_of_turn": (refusals_come_out_of_turn, "ranks_apart.py -k waits_before_it"),
    "cancellations_wait_for_the_ranks": (cancellations_wait_for_the_ranks, "ranks_apart.py -k noticed"),
    "old_words_are_kept": (old_words_are_kept, "ranks_apart.py -k does_not_grow"),
    "nobody_is_ever_let_go": (nobody_is_ever_let_go, "cases_members.py -k b11_a"),
    "removed_engines_are_servable": (removed_engines_are_servable, "recovery.py -k that_runs_waits"),
}
"""What breaks, and the tests that must notice: ``tests/test_`` and so on, with what selects them."""

if "MEMBERS_MUTANT" in os.environ:
    MUTANTS[os.environ["MEMBERS_MUTANT"]][0]()
