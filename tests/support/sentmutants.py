"""What breaks the promises on what is sent and how it is proven: ``pytest -p sentmutants``.

Each changes the product, never a check. Which one is at work is said by the environment variable
``SENT_MUTANT``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from breakers import Changed, Patch
from weightsync import joining
from weightsync.fsm import policy, receipt, sampling
from weightsync.fsm.engine_table import Session
from weightsync.fsm.layout import Plan
from weightsync.fsm.plan import make_plan
from weightsync.fsm.sampling import WHOLE, Part
from weightsync.handlers import gate, rank, sink
from weightsync.handlers.receiver import Receiver
from weightsync.transports import octets, sources, weights
from weightsync.transports.digest import digest_of

__all__ = ["MUTANTS"]


def always_the_first_part(patch: Patch) -> None:
    """It is never the turn of the rest."""
    patch.setattr(policy, "part_of_version", lambda version, turns: Part(0, turns))


def a_turn_for_each_try(patch: Patch) -> None:
    """The same version has another part the next time."""
    turns = iter(range(1 << 30))
    patch.setattr(policy, "part_of_version", lambda version, of: Part(next(turns) % of, of))


def nobody_looks_at_the_end(patch: Patch) -> None:
    """The last bytes of a tensor are in no part."""
    real = Part.range

    def range_of(self: Part, nbytes: int) -> tuple[int, int]:
        start, stop = real(self, nbytes)
        return start, min(stop, nbytes - 1)

    patch.setattr(Part, "range", range_of)


def a_digest_says_nothing_of_its_part(patch: Patch) -> None:
    """Whoever compares cannot know of what."""
    patch.setattr(Part, "mark", lambda self, digits: digits)


def old_weights_are_asked_for_everything(patch: Patch) -> None:
    """What takes no part is not told so."""
    patch.setattr(joining, "takes_part", lambda digest: True)
    patch.setattr(sampling, "takes_part", lambda digest, given=0: True)


def old_engines_are_liars(patch: Patch) -> None:
    """Nobody is told that the engine is only older."""
    patch.setattr(receipt, "_no_part", lambda where, name, found, wanted: None)


def the_uncast_bytes_are_digested(patch: Patch) -> None:
    """Of the trainer's own numbers."""

    def of_the_tensors(specs: Any, sources: Mapping[str, Any], part: Part = WHOLE) -> str:
        return digest_of(specs, {name: getattr(each, "tensor", each) for name, each in sources.items()}, part)

    patch.setattr(weights, "digest_of", of_the_tensors)


def blocks_begin_where_a_range_does(patch: Patch) -> None:
    """Each reader casts what it asked for, in one go."""
    real = octets._read_cast

    def in_one_go(cast: Any, start: int, stop: int, into: Any) -> None:
        size = cast.element_size()
        if start % size or stop % size or into.ctypes.data % size or not cast.tensor.is_contiguous():
            real(cast, start, stop, into)
            return
        line = cast.tensor.view(-1)[start // size : stop // size].to(cast.dtype)
        into[:] = line.view(torch.uint8).numpy()

    patch.setattr(octets, "_read_cast", in_one_go)


def a_partial_plan_is_not_checked(patch: Patch) -> None:
    """What is sent is some of it, so who knows."""
    real = sink._Live.check

    def check(self: Any, plan: Plan) -> None:
        if not plan.partial:
            real(self, plan)

    patch.setattr(sink._Live, "check", check)


def a_partial_plan_looks_whole(patch: Patch) -> None:
    """It does not say that it is one."""

    def whole(*given: Any, partial: bool, **more: Any) -> Plan:
        return make_plan(*given, **more)

    patch.setattr(weights, "make_plan", whole)


def what_is_torn_is_forgotten(patch: Patch) -> None:
    """A selection heals everything."""
    check = sink._Live.check

    def forgetful(self: Any, plan: Plan) -> None:
        self._torn = set()
        check(self, plan)

    patch.setattr(sink._Live, "check", forgetful)


def the_policy_is_for_modules_alone(patch: Patch) -> None:
    """Other weights go as they are."""
    patch.setattr(joining, "_as_policy_says", lambda model, policy: model)


def nobody_looks_at_itself(patch: Patch) -> None:
    """An engine is what its sessions made of it."""
    patch.setattr(rank.Rank, "_look", lambda self, session, lost: "")


def a_part_heals_everything(patch: Patch) -> None:
    """Whoever lost its weights is whole after a round of some of them."""
    look = Receiver._look

    def trusting(self: Any, session: Session, cause: Exception | None = None) -> None:
        if cause is not None:
            look(self, session, cause)

    patch.setattr(Receiver, "_look", trusting)


def a_loss_lets_everybody_in(patch: Patch) -> None:
    """The gate stays as it is."""
    patch.setattr(gate.Gate, "shut", lambda self: None)


def mistyped_patterns_are_passed_over(patch: Patch) -> None:
    """As long as another one matches."""
    patch.setattr(sources, "LORA", type("All", (), {"__contains__": lambda self, each: True})())


MUTANTS: dict[str, tuple[Changed, str]] = {
    "nobody_looks_at_itself": (nobody_looks_at_itself, "lost_weights.py -k asked_what_it_is"),
    "a_part_heals_everything": (a_part_heals_everything, "lost_weights.py -k no_more_than_it_is"),
    "a_loss_lets_everybody_in": (a_loss_lets_everybody_in, "lost_weights.py -k who_is_inside"),
    "mistyped_patterns_are_passed_over": (mistyped_patterns_are_passed_over, "partial.py -k has_to_match"),
    "always_the_first_part": (always_the_first_part, "sampling.py -k within_the_turns"),
    "a_turn_for_each_try": (a_turn_for_each_try, "sampling.py -k catch_up"),
    "nobody_looks_at_the_end": (nobody_looks_at_the_end, "sampling.py -k has_its_turn"),
    "a_digest_says_nothing_of_its_part": (a_digest_says_nothing_of_its_part, "sampling.py -k says_its_part"),
    "old_weights_are_asked_for_everything": (
        old_weights_are_asked_for_everything,
        "sampling.py -k take_no_part_are_refused",
    ),
    "old_engines_are_liars": (old_engines_are_liars, "sampling.py -k older_weightsync"),
    "the_uncast_bytes_are_digested": (the_uncast_bytes_are_digested, "casting.py -k as_torch_casts_it"),
    "blocks_begin_where_a_range_does": (blocks_begin_where_a_range_does, "casting.py -k large_tensors"),
    "a_partial_plan_is_not_checked": (a_partial_plan_is_not_checked, "partial.py -k without_adapters"),
    "a_partial_plan_looks_whole": (a_partial_plan_looks_whole, "partial.py -k says_that_it_is_partial"),
    "what_is_torn_is_forgotten": (what_is_torn_is_forgotten, "partial.py -k has_torn"),
    "the_policy_is_for_modules_alone": (the_policy_is_for_modules_alone, "partial.py -k another_kind"),
}
"""What breaks, and the tests that must notice: ``tests/test_`` and so on, with what selects them."""

if "SENT_MUTANT" in os.environ:
    MUTANTS[os.environ["SENT_MUTANT"]][0](pytest.MonkeyPatch())
