"""Faults to bring back into snapshots, in a test run of its own: ``pytest -p snapshotmutants``.

Which one is said by the environment variable ``SNAPSHOT_MUTANT``; the ranks of ``shardkit`` install it, too.
Each changes the product, never a check.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weightsync.fsm import shards
from weightsync.fsm.executors import RoundView
from weightsync.handlers import (
    crew,
    form_dtensor,
    form_flat,
    forms,
    loan,
    rank_barrier,
    rollback,
    slots,
    snapshots,
    votes,
)

__all__ = ["MUTANTS", "install"]

Changed: Any = setattr


def nothing_is_resharded() -> None:
    """FSDP1's root goes on with the whole copy that it has."""
    Changed(form_flat, "_reshard", lambda name, handle: None)


def one_whole_copy_is_forgotten() -> None:
    """That of evaluation stays if the model trains by the time."""
    Changed(form_flat, "_GATHERED", ())


def what_was_replaced_is_not_written_back() -> None:
    """FSDP1 does so itself, after the load."""
    right = form_flat._reshard

    def reshard(name: str, handle: Any) -> None:
        handle._writeback_orig_params = lambda: False
        right(name, handle)
        del handle._writeback_orig_params

    Changed(form_flat, "_reshard", reshard)


def units_of_fsdp2_stay_gathered() -> None:
    """So there are no DTensors to be seen."""
    Changed(form_dtensor, "reshard", lambda model, *, ended: None)


def what_is_gathered_ahead_is_used() -> None:
    """Nobody waits for it, so the next pass does."""
    Changed(form_dtensor, "_groups", lambda unit: [])


def passes_may_go_on() -> None:
    """Each looks as if it had ended."""
    right = forms.shards_of
    Changed(
        snapshots, "shards_of",
        lambda model, *, buffers, ended=False: right(model, buffers=buffers, ended=True),
    )  # fmt: skip


def the_copy_is_the_live_memory() -> None:
    """What is on the CPU already is not copied."""

    def read(self: slots.Slot, holdings: Any, *, checksum: bool) -> None:
        import torch

        self.octets = tuple(each.tensor.reshape(-1).view(torch.uint8) for each in holdings)

    Changed(slots.Slot, "read", read)


def summoned_weights_are_taken() -> None:
    """Nobody asks whether the parameters are whole."""
    Changed(form_flat, "_refuse_busy", lambda name, unit, *, ended: None)


def nobody_asks_before_writing() -> None:
    """A rank that can does, whatever the others say."""

    def agree(self: snapshots.Snapshots, what: str, look: Callable[[], Any]) -> Any:
        return look()

    Changed(snapshots.Snapshots, "_agree", agree)


def nobody_asks_after_writing() -> None:
    """A rank that failed is alone with it."""

    def do(self: snapshots.Snapshots, what: str, work: Callable[[], object]) -> Any:
        return loan.finished(work)

    Changed(snapshots.Snapshots, "_do", do)


def a_torn_model_is_saved() -> None:
    """It is not remembered that a load failed."""
    right = snapshots.Snapshots._overwrite

    def overwrite(self: snapshots.Snapshots, what: str, pairs: Any) -> None:
        try:
            right(self, what, pairs)
        finally:
            self._torn = ""

    Changed(snapshots.Snapshots, "_overwrite", overwrite)


def an_error_leaves_the_block_as_it_is() -> None:
    """The weights are put back at the end of the block, and only there."""
    right = snapshots.Snapshots._return

    def returns(self: snapshots.Snapshots, owed: Any) -> None:
        import sys

        if sys.exception() is None if hasattr(sys, "exception") else sys.exc_info()[0] is None:
            right(self, owed)

    Changed(snapshots.Snapshots, "_return", returns)


def a_pass_that_failed_keeps_the_block() -> None:
    """Its units are in the middle of it for ever."""
    right = forms.shards_of
    Changed(snapshots, "shards_of", lambda model, *, buffers, ended=False: right(model, buffers=buffers))


def an_interrupt_ends_a_write() -> None:
    """In the middle."""

    def finished(work: Callable[[], object]) -> None:
        work()

    Changed(snapshots, "finished", finished)


def an_unknown_version_is_no_error() -> None:
    """Nothing is loaded, and nobody told."""
    right = snapshots.Snapshots._pairs

    def pairs(self: snapshots.Snapshots, version: int, holdings: Any) -> Any:
        known = version in self._kept
        return right(self, version, holdings) if known else ([], snapshots.Loaded(version, ()))

    Changed(snapshots.Snapshots, "_pairs", pairs)


def differences_are_not_looked_at() -> None:
    """A name is enough."""
    Changed(shards.Shard, "difference", lambda self, now: "")


def names_may_be_missing() -> None:
    """Also if each of them was asked for."""
    Changed(shards, "_refuse", lambda names, why: None)


def the_checksum_is_not_compared() -> None:
    """A copy is believed."""
    Changed(slots.Slot, "verify", lambda self, names: None)


def memory_is_not_used_again() -> None:
    """Each copy is made anew."""
    Changed(slots, "_SPARE", 0)
    Changed(slots.Slots, "keep_only", lambda self, needed: self._all.__setitem__(slice(None), needed))


def casts_of_older_weights_stay() -> None:
    """Autocast is not told."""
    import torch

    def write(pairs: Any) -> None:
        clear = torch.clear_autocast_cache
        Changed(torch, "clear_autocast_cache", lambda: None)
        try:
            slots.write(pairs)
        finally:
            Changed(torch, "clear_autocast_cache", clear)

    Changed(snapshots, "write", write)


def truths_are_copied_as_truths() -> None:
    """Torch makes a 1 of whatever is not 0."""
    Changed(slots, "_words", lambda tensor: tensor.detach())


def older_runs_are_taken_for_this_one() -> None:
    """Who comes first takes part in the vote that it finds, whoever called it."""
    right = votes.RankVotes._called

    def hasty(self: votes.RankVotes, what: str) -> str:
        call = self.read("call")
        if call is None:
            return right(self, what)
        self._run, self._number = call[0], call[1] - 1
        return what

    Changed(votes.RankVotes, "_called", hasty)


def who_gives_up_says_nothing() -> None:
    """The others wait for as long as they may."""
    Changed(votes.RankVotes, "_leave", lambda self, what, alone: None)


def the_published_version_is_given_up_by_a_failure() -> None:
    """There is nothing to roll back to."""
    right = rollback.Rollback.prepare
    Changed(rollback.Rollback, "prepare", lambda self, round: right(self, replace(round, bound=())))


def failed_versions_pile_up() -> None:
    """Nobody gives them up."""
    Changed(rollback.Rollback, "_give_up_all_but", lambda self, needed: None)


def followers_do_not_hear_what_is_published() -> None:
    """Each rank believes its own clean-up."""
    right = rank_barrier.RankBarrier.call

    def call(self: rank_barrier.RankBarrier, round: Any, what: str) -> None:
        right(self, replace(round, bound=(), copied=False), what)

    Changed(rank_barrier.RankBarrier, "call", call)


def the_trainer_goes_on_unheard() -> None:
    """Nobody is told that a private copy is sent."""
    Changed(crew, "RoundView", lambda *values: RoundView(*values[:-1]))


def private_copies_are_taken_for_the_model() -> None:
    """What is kept is not what was sent."""
    Changed(rollback.Rollback, "_refuse_copies", lambda self, round: None)


def what_could_not_be_put_back_is_let_go_of() -> None:
    """Its memory is used again."""

    def owe(self: snapshots.Snapshots, owed: Any, failed: BaseException) -> None:
        self._torn = "since it could not be left"

    Changed(snapshots.Snapshots, "_owe", owe)


def threads_take_each_others_weights() -> None:
    """A block of another one is entered."""
    Changed(snapshots.Snapshots, "_not_in_another_thread", lambda self, loan: None)


def an_outer_block_ends_the_inner_one() -> None:
    """It writes back at once, and the inner one puts the outer one's version there for good."""
    right = snapshots.Snapshots._end

    def end(self: snapshots.Snapshots, owed: Any) -> None:
        loans, self._loans = self._loans, [owed]
        try:
            right(self, owed)
        finally:
            self._loans = loans

    Changed(snapshots.Snapshots, "_end", end)


def an_interrupt_of_a_save_loses_the_version() -> None:
    """It is given up before the new one is begun."""
    right = snapshots.Snapshots._save

    def save(self: snapshots.Snapshots, what: str, room: Any) -> Any:
        self._kept.pop(room.version, None)
        return right(self, what, room)

    Changed(snapshots.Snapshots, "_save", save)


def copies_are_on_the_default_device() -> None:
    """Wherever that is."""

    def init(self: slots.Slot, kind: Any) -> None:
        import torch

        self.kind, self._sums = kind, ()
        self.octets = tuple(torch.empty(nbytes, dtype=torch.uint8) for nbytes, _ in kind)

    Changed(slots.Slot, "__init__", init)


_APART = "shards_apart.py -k"
MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    each.__name__: (each, tests)
    for each, tests in (
        (nothing_is_resharded, f"{_APART} sequence_of_two_versions"),
        (one_whole_copy_is_forgotten, f"{_APART} what_is_loaded_is_what_was_saved"),
        (what_was_replaced_is_not_written_back, f"{_APART} parameter_that_was_replaced"),
        (units_of_fsdp2_stay_gathered, f"{_APART} what_is_loaded_is_what_was_saved"),
        (what_is_gathered_ahead_is_used, f"{_APART} gathered_ahead"),
        (passes_may_go_on, f"{_APART} middle_of_a_pass"),
        (the_copy_is_the_live_memory, f"{_APART} no_alias"),
        (summoned_weights_are_taken, f"{_APART} summon_full_params"),
        (nobody_asks_before_writing, f"{_APART} no_rank_loads"),
        (nobody_asks_after_writing, f"{_APART} write_that_fails"),
        (a_torn_model_is_saved, f"{_APART} write_that_fails"),
        (an_error_leaves_the_block_as_it_is, f"{_APART} block_leaves_the_weights"),
        (a_pass_that_failed_keeps_the_block, f"{_APART} pass_that_fails"),
        (memory_is_not_used_again, f"{_APART} memory_is_made_once"),
        (differences_are_not_looked_at, f"{_APART} no_rank_loads"),
        (an_interrupt_ends_a_write, "snapshots.py -k interrupt"),
        (an_unknown_version_is_no_error, "snapshots.py -k unknown_version"),
        (names_may_be_missing, "snapshots.py -k strict_wants"),
        (the_checksum_is_not_compared, "snapshots.py -k written_to"),
        (casts_of_older_weights_stay, "snapshots.py -k was_cast"),
        (truths_are_copied_as_truths, "snapshots.py -k every_bit"),
        (what_could_not_be_put_back_is_let_go_of, "blocks.py -k could_not"),
        (threads_take_each_others_weights, "blocks.py -k another_thread"),
        (an_outer_block_ends_the_inner_one, "blocks.py -k order_of_their_beginning"),
        (an_interrupt_of_a_save_loses_the_version, "snapshots.py -k one_version_or_the_other"),
        (copies_are_on_the_default_device, "blocks.py -k default_device"),
        (older_runs_are_taken_for_this_one, "votes.py -k older_run"),
        (who_gives_up_says_nothing, "votes.py -k gives_up"),
        (the_published_version_is_given_up_by_a_failure, "rollback.py -k dirty_engine"),
        (failed_versions_pile_up, "rollback.py -k two_copies"),
        (private_copies_are_taken_for_the_model, "rollback.py -k private_copy"),
        (followers_do_not_hear_what_is_published, "rollback.py -k ranks_keep_the_same"),
        (the_trainer_goes_on_unheard, "rollback.py -k no_rank_takes"),
    )
}


def install() -> None:
    """Bring back the one that is named."""
    MUTANTS[os.environ["SNAPSHOT_MUTANT"]][0]()


def pytest_configure() -> None:
    """In the process of the tests."""
    install()
