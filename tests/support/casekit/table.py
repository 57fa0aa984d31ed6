"""Where each of the 22 cases stands: which tests show the right outcome, part by part, or what it waits for.

A case is a fault that somebody reported of a trainer, an engine or a library; its parts are the ways in which
it is tried here. ``tests/test_cases_table.py`` holds this table against the tests that there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["BESIDE", "CASES", "Case", "faults"]


@dataclass(frozen=True)
class Case:
    """One case.

    Args:
        about: the fault, in a few words.
        parts: by the name of each part, its tests: ``file::test``, or ``file::test[word]`` for those of its
            parameters in whose name the word comes up. The parts of a case that has none are ``all``.
        lands: by the name of each part that is not here yet, what brings it.
    """

    about: str
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lands: Mapping[str, str] = field(default_factory=dict)


_ASYNC, _ENGINES, _LOCKS = "test_cases_async.py", "test_cases_engines.py", "test_cases_locks.py"
_MEMORY = "test_cases_memory.py"
_MEMBERS, _RAY, _TENSORS = "test_cases_members.py", "test_cases_ray.py", "test_cases_tensors.py"
_WAITS, _GUARDS, _LEAKS = "test_cases_waits.py", "test_cases_guards.py", "test_cases_leaks.py"
_CHAOS, _PACKAGING, _SHM = "test_chaos_lock.py", "test_packaging.py", "test_shm_ray.py"


def _in(file: str, *names: str) -> tuple[str, ...]:
    """Tests of one file."""
    return tuple(f"{file}::{name}" for name in names)


_FOUR_PLACES = _in(_LOCKS, "test_b01_four_places_to_fail_and_a_fifth_round")
_NO_PAUSE = "TestB03::test_b03_a_and_c_one_does_not_pause"
_HALF_PAUSE = "test_b03_a_pause_or_an_update_that_stops_half_way"
_REFUSED, _NO_DEATH = "TestB29::test_b29_refused_before_a_byte_moves", "test_b29_no_process_dies"
_ACROSS = _in(_RAY, "test_b27_and_b31_strides_and_ties_across_processes")

CASES: dict[str, Case] = {
    "B01": Case(
        "an error keeps the lock",
        {
            "i the iterator": _FOUR_PLACES,
            "ii sending": _FOUR_PLACES,
            "iii an engine": (*_FOUR_PLACES, *_in(_RAY, "test_b01_an_engine_raises_in_its_process")),
            "iv a clean-up hook": _FOUR_PLACES,
        },
    ),
    "B03": Case(
        "a begin that reaches some, and a finish that reaches nobody",
        {
            "a": (*_in(_LOCKS, f"{_NO_PAUSE}[open-]"), *_in(_RAY, f"{_HALF_PAUSE}[open]")),
            "b": (
                *_in(_LOCKS, "TestB03::test_b03_b_the_finish_is_never_reached"),
                *_in(_RAY, f"{_HALF_PAUSE}[apply]"),
            ),
            "c": (*_in(_LOCKS, f"{_NO_PAUSE}[opened-]"), *_in(_RAY, f"{_HALF_PAUSE}[opened]")),
        },
    ),
    "B05": Case(
        "an acknowledgement before the bytes are in place",
        {
            "a": _in(_ENGINES, "TestB05::test_b05_a_the_buffer_waits_for_the_slowest_reader"),
            "b": _in(
                _ENGINES,
                "TestB05::test_b05_b_the_round_is_not_over_before_all_have_applied",
                "TestB05::test_b05_b_an_engine_that_only_took_the_request",
                "TestB05::test_b05_b_an_engine_that_applies_after_its_answer",
            ),
            "c": _in(
                _ENGINES,
                "TestB05::test_b05_c_an_engine_is_given_a_private_copy",
                "TestB05::test_b05_c_an_engine_that_keeps_what_it_was_shown",
            ),
        },
    ),
    "B08": Case(
        "a receive that waits for ever",
        {
            "a": _in(_WAITS, "TestB08::test_b08_a_it_raises_and_says_nothing"),
            "b": _in(_WAITS, "TestB08::test_b08_b_it_never_connects"),
            "c": _in(_MEMBERS, "TestB08::test_b08_c_killed_between_a_bucket_and_its_answer"),
            "d": (
                *_in(
                    _WAITS,
                    "TestB08::test_b08_d_it_takes_a_bucket_when_the_next_round_runs",
                    "TestB08::test_b08_d_its_receipt_comes_when_the_next_round_runs",
                ),
                *_in(_MEMBERS, "TestB08::test_b08_d_it_comes_back_when_the_next_round_runs"),
            ),
        },
    ),
    "B09": Case(
        "one that is silent stops everybody",
        {
            **{
                f"a {phase}": _in(_WAITS, f"TestB09::test_b09_a_silent_in_one_phase[{phase}]")
                for phase in ("begin", "bucket", "finish", "resume")
            },
            "a and the sum": _in(_WAITS, "TestB09::test_b09_a_and_silent_ever_after"),
            **{
                f"b {how}": _in(_CHAOS, f"test_b09_b_a_trainer_stops_before_the_first_bucket[{how}]")
                for how in ("killed", "stopped")
            },
        },
    ),
    "B11": Case(
        "a group that has lost a member",
        {
            "a": _in(_MEMBERS, "TestB11::test_b11_a_between_two_rounds"),
            "b": _in(_MEMBERS, "TestB11::test_b11_b_in_a_bucket"),
        },
    ),
    "B14": Case(
        "names and bytes in two orders",
        {
            "a": (
                *_in(
                    _TENSORS,
                    "TestB14::test_b14_a_names_without_an_order_are_refused",
                    "TestB14::test_b14_a_every_process_makes_the_same_plan",
                ),
                *_in(_RAY, "test_b14_a_another_hash_seed_in_each_process"),
            ),
            "b": _in(_TENSORS, "TestB14::test_b14_b_equal_sizes_and_mixed_dtypes"),
        },
    ),
    "B15": Case(
        "a trainer that starts anew",
        {
            "killed": (
                *_in(_MEMBERS, "TestB15::test_b15_killed_in_a_bucket"),
                *_in(_ENGINES, "test_b15_a_new_trainer_and_engines_that_lived_on"),
            ),
            "frozen": _in(_MEMBERS, "TestB15::test_b15_frozen_in_a_bucket_and_woken_too_late"),
        },
    ),
    "B18": Case(
        "half an update",
        {
            "all": (
                *_in(_ENGINES, "TestB18::test_b18_loaded_in_place", "TestB18::test_b18_staged"),
                *_in(_RAY, "test_b18_half_an_update_in_place"),
            )
        },
    ),
    "B20": Case(
        "a restarted engine that inherits a version",
        {
            "before a round": tuple(
                each
                for file in (_ENGINES, _RAY)
                for each in _in(
                    file,
                    "TestB20::test_b20_it_is_not_served_from_before_a_full_round",
                    "TestB20::test_b20_a_round_meets_the_restarted_engine",
                )
            ),
            "after its last receipt": (
                *_in(_ENGINES, "TestB20::test_b20_it_restarts_before_its_commit"),
                *_in(_RAY, "TestB20::test_b20_it_restarts_after_the_last_receipt"),
            ),
        },
    ),
    "B22": Case(
        "two rounds at a time",
        {
            "threads": _in(_ASYNC, "TestB22::test_b22_three_threads", "TestB22::test_b22_refused_at_once"),
            "tasks": _in(_ASYNC, "TestB22::test_b22_three_tasks"),
            "another version": _in(
                _ASYNC, "TestB22::test_b22_three_threads", "TestB22::test_b22_a_number_that_would_fall"
            ),
        },
    ),
    "B26": Case(
        "three copies in memory at once",
        {
            "all": _in(
                _MEMORY,
                "test_b26_a_good_round_never_passes_what_there_is",
                "test_b26_an_order_that_cannot_fit_is_refused_before_anything_moves",
                "test_b26_wherever_it_fails",
                "test_b26_what_cannot_be_put_back_is_not_piled_up",
                "test_b26_an_update_to_a_sleeping_engine_is_refused",
            )
        },
    ),
    "B27": Case(
        "strides",
        {"all": (*_in(_TENSORS, "TestB27::test_b27_strides_on_both_sides"), *_ACROSS)},
    ),
    "B29": Case(
        "two sides that disagree on a size",
        {
            "a": (
                *_in(_TENSORS, f"{_REFUSED}[a-engine-smaller]"),
                *_in(_RAY, f"{_NO_DEATH}[a-smaller]"),
                *_in(
                    _TENSORS,
                    "TestB29::test_b29_a_trainer_that_is_wrong_costs_no_engine",
                    "TestB29::test_b29_an_engine_that_lost_its_weights_is_out",
                    "TestB29::test_b29_whose_receiving_half_says_so_first",
                ),
            ),
            "b": (*_in(_TENSORS, f"{_REFUSED}[b-engine-larger]"), *_in(_RAY, f"{_NO_DEATH}[b-larger]")),
            "c": (*_in(_TENSORS, f"{_REFUSED}[c-same-bytes]"), *_in(_RAY, f"{_NO_DEATH}[c-dtype]")),
            "d": _in(
                _TENSORS,
                "TestB29::test_b29_d_another_bucket_limit",
                "TestB29::test_b29_d_the_limit_may_change_between_rounds",
            ),
            "e": (
                *_in(_TENSORS, f"{_REFUSED}[e-one-name-more]", f"{_REFUSED}[e-one-name-less]"),
                *_in(_RAY, f"{_NO_DEATH}[e-name]"),
            ),
        },
    ),
    "B31": Case(
        "one tensor by two names",
        {
            "all": (
                *_in(
                    _TENSORS,
                    "TestB31::test_b31_tied_by_the_trainer",
                    "TestB31::test_b31_a_name_without_data_is_told",
                ),
                *_ACROSS,
            )
        },
    ),
    "B33": Case(
        "a tensor larger than a bucket",
        {
            **{
                place: _in(_TENSORS, f"TestB33::test_b33_a_tensor_of_three_buckets[{place}]")
                for place in ("first", "middle", "last")
            },
            "limits": _in(
                _TENSORS,
                "TestB33::test_b33_a_limit_below_every_tensor",
                "TestB33::test_b33_a_limit_that_is_none[0]",
                "TestB33::test_b33_a_limit_that_is_none[-1]",
            ),
            "advice": _in(_TENSORS, "TestB33::test_b33_advice_that_works"),
        },
    ),
    "B34": Case(
        "descriptors that add up",
        {"thirty rounds": _in(_LEAKS, "TestB34::test_b34_thirty_rounds_of_which_ten_fail")},
        lands={"with a limit on descriptors": "issue 6: it belongs to the life of groups over many hosts"},
    ),
    "B35": Case(
        "segments that vanish, stay, or are read when they are gone",
        {
            "a": _in(_SHM, "test_b35_a_one_reader_ends_and_the_others_read_on"),
            "b": _in(_SHM, "test_b35_b_the_trainer_is_killed_in_a_bucket_again_and_again"),
            "c": _in(
                "test_shm_transport.py", "TestViews::test_b35_c_a_view_that_is_kept_fails_the_round_by_name"
            ),
        },
    ),
    "B38": Case(
        "an error in a piece of the machine",
        {
            "guards": _in(_GUARDS, "test_b38_in_each_guard"),
            "executors": _in(_LOCKS, "TestB38::test_b38_in_every_step_of_an_executor"),
            "ports and transports": _in(
                _LOCKS,
                "TestB38::test_b38_in_every_word_to_a_port",
                "TestB38::test_b38_in_every_step_of_a_transport",
                "TestB38::test_b38_in_a_transports_abort",
            ),
            "engines": _in(
                _LOCKS,
                "TestB38::test_b38_at_every_point_of_an_engine",
                "TestB38::test_b38_an_engine_fails_again_while_it_is_put_back",
            ),
            "undoes": _in(
                _LOCKS,
                "TestB38::test_b38_in_an_undo",
                "TestB38::test_b38_the_lock_is_held_as_long_as_anything_is_put_back",
            ),
            "observers": _in(_LOCKS, "TestB38::test_b38_in_an_observer"),
        },
    ),
    "B39": Case(
        "a time-out that is swallowed",
        {
            "a": (
                *_in(_ASYNC, "TestB39::test_b39_a_a_time_out_around_a_round"),
                *_in(_RAY, "test_b39_a_a_time_out_with_engines_that_work_on"),
            ),
            **{
                f"b {state}": _in(_ASYNC, f"TestB39::test_b39_b_a_cancelled_task[{state}]")
                for state in ("Locked", "Broadcasting", "Awaiting", "Cleaning")
            },
            "b and silent": _in(_ASYNC, "TestB39::test_b39_b_a_commit_that_never_ends"),
            "c": _in(_ASYNC, "TestB39::test_b39_c_ctrl_c"),
            "d": _in(_ASYNC, "TestB39::test_b39_d_cancelled_again_while_it_cleans_up"),
        },
    ),
    "B42": Case(
        "event loops",
        {
            "a": _in(_RAY, "test_b42_a_an_async_actor_answers_while_a_round_runs"),
            "b": _in(
                _ASYNC,
                "TestB42::test_b42_b_two_loops_a_thread_and_no_loop",
                "TestB42::test_b42_b_loops_at_the_same_time",
                "TestB42::test_b42_b_begun_here_and_awaited_there",
            ),
        },
    ),
    "B44": Case(
        "an import that needs hardware",
        {
            "installed from a wheel": _in(
                _PACKAGING,
                "test_b44_the_wheel_holds_the_files_of_the_tree",
                "test_b44_the_installed_library_is_imported_from_where_it_was_installed",
            ),
            "import, version, help": _in(
                _PACKAGING,
                "test_b44_it_is_imported_where_nothing_else_is_installed",
                "test_b44_the_installed_command_answers",
            ),
            "one round": _in(_PACKAGING, "test_b44_a_round_away_from_the_tree"),
        },
    ),
}

BESIDE = {
    "B15": "its trainers are processes of their own: ``Succession.step`` looks at the engines",
    "B35 test_b35_b_the_trainer_is_killed_in_a_bucket_again_and_again": "its trainers are processes apart",
    "B38 test_b38_in_each_guard": "a simulated world has checks of its own: ``promises.broken``",
    "B29 test_b29_an_engine_that_lost_its_weights_is_out": "its memory is gone: nobody can look at it",
    "B29 test_b29_whose_receiving_half_says_so_first": "a link that holds an answer back",
    "B33 test_b33_a_limit_that_is_none": "refused where a policy is made: there is no round",
    "B14 test_b14_a_every_process_makes_the_same_plan": "two processes make a plan: there is no round",
    "B39 test_b39_c_ctrl_c": "the child process, which gets the signal, has a ``Bench`` of its own",
    "B42 test_b42_a_an_async_actor_answers_while_a_round_runs": "the trainer is an actor, which is asked",
    "B44": "what is installed away from the tree has no kit",
}
"""Tests without a round that the shared kit looks at afterwards (``Bench``), and why."""

_NAMED = re.compile(r"b(\d\d)_")


def faults(
    cases: Mapping[str, Case], parts: Mapping[str, str], collected: Iterable[str], kit: Iterable[str] = ()
) -> Iterator[str]:
    """What is wrong with a table, a line each.

    Args:
        cases: the table.
        parts: the cases that there have to be, each with the first words of its parts.
        collected: the tests that there are, with their parameters.
        kit: those whose rounds the kit looks at; every other one is to be in ``BESIDE``.
    """
    there = set(collected)
    for name in sorted(parts.keys() ^ cases.keys()):
        yield f"{name} is missing" if name in parts else f"{name} is no case"
    for name in sorted(parts.keys() & cases.keys()):
        yield from _of_case(name, cases[name], parts[name].split(), there)
    yield from _unlisted(cases, there, frozenset(kit))


def _of_case(name: str, case: Case, parts: list[str], there: set[str]) -> Iterator[str]:
    known = {each.split()[0] for each in (*case.parts, *case.lands)}
    for part in parts:
        if part not in known:
            yield f"{name} {part} is neither tested nor awaited"
    for part, reason in case.lands.items():
        if not re.match(r"issue \d+: ", reason):
            yield f"{name} {part} does not say what it lands with"
    for part, tests in case.parts.items():
        if not tests:
            yield f"{name} {part} has no test"
        for test in tests:
            if not any(_meant(test, each) for each in there):
                yield f"{name} {part}: there is no test {test}"
            if f"b{name[1:]}_" not in test:
                yield f"{name} {part}: {test} is not named by the case"


def _meant(test: str, collected: str) -> bool:
    """Whether an entry of the table stands for this one."""
    wanted, _, word = test.partition("[")
    found, _, parameters = collected.partition("[")
    return wanted == found and word.rstrip("]") in parameters


def _unlisted(cases: Mapping[str, Case], there: set[str], kit: frozenset[str]) -> Iterator[str]:
    for test in sorted({each.partition("[")[0] for each in there}):
        function = test.rpartition("::")[2]
        for number in _NAMED.findall(function):
            case = cases.get(f"B{number}", Case(""))
            if test not in {each.partition("[")[0] for tests in case.parts.values() for each in tests}:
                yield f"{test} is not in the table, under B{number}"
            if test not in kit and not {f"B{number}", f"B{number} {function}"} & BESIDE.keys():
                yield f"{test} runs no round that the kit looks at"
