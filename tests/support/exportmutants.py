"""Faults to bring back into exports, in a test run of its own: ``pytest -p exportmutants``.

Which one is said by the environment variable ``EXPORTS_MUTANT``. Each changes the product, never a check.
Ranks in processes of their own import this module, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from weightsync import follower
from weightsync.fsm import exports as rules
from weightsync.fsm.errors import PlanMismatch
from weightsync.fsm.exports import Decision, Standing
from weightsync.handlers import (
    export_entries,
    exports,
    fp8_export,
    fsdp_export,
    fsdp_flat,
    leader,
    megatron_export,
    object_tap,
    wrapped,
)

__all__ = ["MUTANTS", "install"]

Changed: Any = setattr


def plans_never_last() -> None:
    """Every hand-over plans, as if there were no cache."""
    settle = exports.CachedExport.settle
    Changed(
        exports.CachedExport, "settle", lambda self, decision: settle(self, replace(decision, build=True))
    )


def values_are_kept_with_the_plan() -> None:
    """What was read once is handed over again."""
    read, kept = exports.CachedExport._read, dict[str, list[tuple[str, Any]]]()

    def again(self: Any, plan: Any, *, first: bool) -> Iterator[tuple[str, Any]]:
        if first:
            kept[plan.hash] = [(name, each.clone()) for name, each in read(self, plan, first=first)]
        yield from kept[plan.hash]

    Changed(exports.CachedExport, "_read", again)


def layouts_are_not_compared() -> None:
    """Whatever comes out is what was planned."""
    Changed(exports.CachedExport, "_check", lambda self, number, found: None)


def what_was_begun_is_kept() -> None:
    """A reading that failed leaves its plan."""

    def reading(self: Any) -> Iterator[tuple[str, Any]]:
        yield from self._reading(self._taken())

    Changed(exports.CachedExport, "__call__", reading)


def half_a_reading_is_kept() -> None:
    """As long as somebody keeps it alive."""
    Changed(exports.CachedExport, "_abandon", lambda self: None)


def nothing_is_forgotten() -> None:
    """A reset changes nothing."""
    Changed(exports.CachedExport, "reset", lambda self: None)


def ranks_decide_for_themselves() -> None:
    """Each by what it has and had, as a cache in each process does."""

    def settle(self: Any, decision: Decision) -> None:
        _, mine = self.standing()
        right(self, replace(decision, build=mine.mark != mine.planned))

    right = exports.CachedExport.settle
    Changed(exports.CachedExport, "settle", settle)


def who_changes_alone_is_believed() -> None:
    """All plan anew, whoever changed."""

    def decide(standings: dict[int, Standing]) -> Decision:
        try:
            return right(standings)
        except PlanMismatch:
            return right({rank: replace(each, key="") for rank, each in standings.items()})

    right = rules.decide
    Changed(rules, "decide", decide)
    Changed(leader, "decide", decide)


def outlines_are_not_compared() -> None:
    """What ranks have in common is not looked at before they gather."""
    Changed(rules.Outline, "common", "the same")


def one_key_fits_all() -> None:
    """Which outlines a plan was made of is not looked at."""
    right = rules._digest
    Changed(
        rules, "_digest", lambda value: "k" if isinstance(value, list) and _marks(value) else right(value)
    )


def _marks(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(each, str) and len(each) in (1, 64) for each in value)


def exports_are_not_agreed_on() -> None:
    """They are read at once, on every rank."""
    Changed(follower, "export_of", lambda model: None)


def objects_are_not_counted() -> None:
    """Nobody sees them."""
    Changed(object_tap, "_tapped", lambda real: real)


def taps_are_left_in_torch() -> None:
    """For ever."""
    Changed(object_tap, "_remove", lambda: None)


def modules_are_kept_alive() -> None:
    """By whoever was given one."""
    right = export_entries.ModelAt.__init__

    def keep(self: Any, where: str, model: Any) -> None:
        right(self, where, model)
        self.kept = model

    Changed(export_entries.ModelAt, "__init__", keep)


def what_was_gathered_is_read() -> None:
    """Of FSDP1: a forward pass has left it, and it may be older than the pieces."""
    right = fsdp_flat._gathered

    def gathered(prefix: str, handle: Any) -> Any:
        padded = getattr(handle.flat_param, "_full_param_padded", None)
        if padded is not None and padded.untyped_storage().size():
            return padded
        return right(prefix, handle)

    Changed(fsdp_flat, "_gathered", gathered)


def units_have_one_name() -> None:
    """Of FSDP1: the other places of a unit are left to whatever reads what belongs to none."""

    def units(module: Any, *, again: bool = False) -> Iterator[tuple[str, Any]]:
        return wrapped.flat_units(module)

    Changed(fsdp_flat, "flat_units", units)


def who_is_in_a_pass_is_not_asked() -> None:
    """Of FSDP2."""
    Changed(fsdp_export, "_let_go", lambda model: None)


def buffers_come_as_a_pass_left_them() -> None:
    """In the dtype of mixed precision."""
    Changed(fsdp_flat, "_dtypes_of_buffers", lambda module: {})


def pieces_are_taken_for_tensors() -> None:
    """Nobody looks whether the unit of a piece is there."""
    Changed(fsdp_export, "refuse_pieces", lambda model: None)


def other_memory_is_not_written_back() -> None:
    """Of FSDP1 with parameters of their own."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    kind: Any = FlatParamHandle
    right = fsdp_flat._gathered

    def gathered(prefix: str, handle: Any) -> Any:
        write, kind._writeback_orig_params = kind._writeback_orig_params, lambda self: False
        try:
            return right(prefix, handle)
        finally:
            kind._writeback_orig_params = write

    Changed(fsdp_flat, "_gathered", gathered)


def parameters_are_read_as_they_stand() -> None:
    """Of FSDP2: without its being told to let go of what it has gathered."""

    def entries(model: Any) -> Iterator[Any]:
        first: dict[int, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *export_entries.persistent_buffers(model)]
        for name, tensor in named:
            of = first.setdefault(id(tensor), name)
            yield fsdp_export._entry(name, tensor, "" if of == name else of)

    Changed(fsdp_export, "_entries", entries)
    Changed(fsdp_export, "_let_go", lambda model: None)


def scales_are_kept_with_the_plan() -> None:
    """As they were when it was made."""
    right, kept = fp8_export._made, dict[tuple[int, ...], Any]()

    def made(tensor: Any, block: tuple[int, int]) -> Any:
        numbers, scales = right(tensor, block)
        return numbers, kept.setdefault(tuple(tensor.shape), scales)

    Changed(fp8_export, "_made", made)


def names_of_one_tensor_are_chosen_together() -> None:
    """What is another name refers to the first one, whatever became of that."""
    Changed(fp8_export.Fp8Exporter, "_named", lambda self, slot, of: slot)


def what_is_no_number_is_scaled_too() -> None:
    """As if it were as large as anything."""
    right = fp8_export._made

    def made(tensor: Any, block: tuple[int, int]) -> Any:
        numbers, scales = right(tensor, block)
        return numbers, scales.masked_fill(~tensor.isfinite().all(), 1.0)

    Changed(fp8_export, "_made", made)


def tasks_keep_their_tensors() -> None:
    """They are handed to Bridge again as they were made."""
    Changed(megatron_export, "_stripped", lambda stages, task: (task, None))


def adapters_are_left_out_in_silence() -> None:
    """Nothing is said."""
    right = megatron_export.MegatronExporter.outline

    def outline(self: Any) -> Any:
        merge, self._merge = self._merge, True
        try:
            return right(self)
        finally:
            self._merge = merge

    Changed(megatron_export.MegatronExporter, "outline", outline)


def eight_bits_are_kept() -> None:
    """Bridge's own planning for them is not left to it."""
    Changed(megatron_export.MegatronExporter, "lasting", True)


MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    "plans_never_last": (plans_never_last, "exports.py -k all_ranks_plan_once"),
    "plans_that_never_last_are_slow": (plans_never_last, "megatron_export.py -k worth_its_while"),
    "values_are_kept_with_the_plan": (values_are_kept_with_the_plan, "exports.py -k it_is_planned_once"),
    "layouts_are_not_compared": (layouts_are_not_compared, "exports.py -k did_not_bring"),
    "what_was_begun_is_kept": (what_was_begun_is_kept, "exports.py -k ends_early"),
    "nothing_is_forgotten": (nothing_is_forgotten, "exports.py -k reset_forgets"),
    "ranks_decide_for_themselves": (ranks_decide_for_themselves, "exports.py -k forgets_alone"),
    "who_changes_alone_is_believed": (who_changes_alone_is_believed, "exports.py -k own_part_changes_alone"),
    "outlines_are_not_compared": (outlines_are_not_compared, "exports.py -k rank_that_changes_alone"),
    "one_key_fits_all": (one_key_fits_all, "exports.py -k all_that_change"),
    "exports_are_not_agreed_on": (exports_are_not_agreed_on, "exports.py -k all_ranks_plan_once"),
    "objects_are_not_counted": (objects_are_not_counted, "exports.py -k objects_are_counted"),
    "taps_are_left_in_torch": (taps_are_left_in_torch, "exports.py -k objects_are_counted"),
    "modules_are_kept_alive": (modules_are_kept_alive, "fsdp_export.py -k is_not_kept_alive"),
    "stages_are_kept_alive": (modules_are_kept_alive, "megatron_export.py -k not_kept_alive"),
    "what_was_gathered_is_read": (what_was_gathered_is_read, "fsdp_export.py -k after_each_change"),
    "units_have_one_name": (units_have_one_name, "fsdp_odd.py -k both_names"),
    "who_is_in_a_pass_is_not_asked": (who_is_in_a_pass_is_not_asked, "fsdp_odd.py -k inside_of_a_pass"),
    "buffers_come_as_a_pass_left_them": (
        buffers_come_as_a_pass_left_them,
        "fsdp_odd.py -k buffers_of_mixed",
    ),
    "pieces_are_taken_for_tensors": (pieces_are_taken_for_tensors, "fsdp_odd.py -k part_of_a_unit"),
    "other_memory_is_not_written_back": (
        other_memory_is_not_written_back,
        "fsdp_export.py -k after_each_change",
    ),
    "parameters_are_read_as_they_stand": (
        parameters_are_read_as_they_stand,
        "fsdp_export.py -k after_each_change",
    ),
    "half_a_reading_is_kept": (half_a_reading_is_kept, "exports.py -k cannot_be_sent"),
    "scales_are_kept_with_the_plan": (scales_are_kept_with_the_plan, "fsdp_export.py -k scales_are_of"),
    "names_of_one_tensor_are_chosen_together": (
        names_of_one_tensor_are_chosen_together,
        "fsdp_export.py -k chosen_alone",
    ),
    "what_is_no_number_is_scaled_too": (
        what_is_no_number_is_scaled_too,
        "fsdp_export.py -k spoils_no_neighbour",
    ),
    "tasks_keep_their_tensors": (tasks_keep_their_tensors, "megatron_export.py -k hold_what"),
    "adapters_are_left_out_in_silence": (adapters_are_left_out_in_silence, "megatron_export.py -k adapters"),
    "eight_bits_are_kept": (eight_bits_are_kept, "megatron_export.py -k by_bridge_itself"),
}
"""What breaks, and the tests that must notice: ``tests/test_`` and so on, with what selects them."""


def install() -> None:
    """Bring the fault back that is asked for, in this process; once."""
    wanted = os.environ.get("EXPORTS_MUTANT")
    if wanted and not _installed:
        _installed.append(wanted)
        MUTANTS[wanted][0]()


_installed: list[str] = []
install()
