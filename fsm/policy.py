"""What the user decides about rounds, and the limits that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from . import checks
from .errors import SetupError
from .recovery import Backoff
from .sampling import WHOLE, Part, part_of_version
from .tensors import CASTS

__all__ = ["LORA", "Limits", "Policy"]

LORA = ("*lora_A*", "*lora_B*", "*lora_embedding_A*", "*lora_embedding_B*", "*lora_magnitude_vector*")
"""For ``Policy(only=LORA)``: the names that PEFT gives to the tensors of an adapter."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds.

    Args:
        forward: from the start of a round until it must be in Failed or Released.
        idle: in one state, without anything moving.
        engine: one control call to one engine; shorter than ``idle``, so that a silent engine is lost
            before its phase is.
        drain: one engine, from being told to pause until the last generation that runs in it has ended.
        pausing: in Locked, while engines pause and nothing else moves; longer than ``drain``, so that such an
            engine is lost before its phase is, too.
        first_contact: an engine that has never said hello, until it does. Beside the round, not within it.
        failed: Failed, from entering it until what does not answer is given up and fenced.
        release: one attempt to give the lock back.
        lease: of the lock.
    """

    forward: float
    idle: float
    engine: float
    drain: float
    pausing: float
    first_contact: float
    failed: float
    release: float
    lease: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The decisions a user can take. Every limit is finite.

    Args:
        every: hand weights over at every n-th step; 1 is every step.
        deadline: seconds within which a round is over. Three quarters belong to the good path, one quarter to
            Failed. Only a lock service that does not answer can add to it: by at most one lease once it has
            granted, by at most two and a third if it never said whether it did.
        idle: seconds without progress after which a state is given up; a quarter of the deadline by default.
        engine_limit: seconds one engine may be silent, when it is asked something or when nothing moves but
            it; a sixth of the deadline by default.
        drain: seconds that a pausing engine is given until the generations that run in it have ended; a third
            of the deadline by default, and never more than six tenths of it.
        first_contact: seconds that an engine that has never said hello is given to do so, once: its process
            may still be loading a model. The deadline counts from the end of that wait.
        on_engine_failure: ``"fail"``: every engine must take part. ``"quarantine"``: the round goes on with
            the rest, at or above the quorum, and the lost engine is quarantined.
        quorum: with ``"quarantine"``: a fraction of the engines asked for (0 < f <= 1.0), or a whole number
            of them; at least one engine.
        catch_up: with ``"quarantine"``: how a quarantined engine comes back. ``"together"``: by the next
            round of all. ``"apart"``: by a round of its own, with the same version, right after one of all
            that succeeded; a caller who waits for that one waits for both.
        rest: with ``"quarantine"``: seconds for which an engine that did not come back is left out; twice as
            long after each further failure.
        longest_rest: seconds; no rest is longer.
        attempts: how often a round is tried; a retry is a new round and a full resend.
        when_busy: what a second hand-over does while a round runs. ``"wait"``: it queues up, and is sent when
            its turn has come. ``"block"``: the call returns only when the rounds before are over.
            ``"refuse"``: it raises at once. ``"coalesce"``: it takes the place of weights that wait and were
            not begun yet.
            ``"skip"``: these weights are not sent.
        staleness: with ``"coalesce"`` and ``"skip"``: by how many hand-overs the engines may be behind the
            trainer. One that would leave them further behind blocks until a round is over.
        raise_on_failure: call ``RoundResult.require()`` for the caller.
        bucket_bytes: the largest transfer unit, in bytes.
        verify: what is compared of the content, by digests computed on both sides. ``"sampled"``: of each
            tensor the part whose turn it is, small tensors whole; each byte has its turn once in
            ``verify_turns`` consecutive versions. ``"full"``: every byte in every round. ``"off"``: counts
            and the plan's fingerprint only; the version's number is then tied to the layout, not to the
            content.
        verify_turns: with ``"sampled"``: how many parts there are. Versions of your own that go up by more
            than 1 reach every part only if that step and this number have no common factor.
        cast: floating-point tensors are sent as this dtype, e.g. ``"bfloat16"``; others as they are.
        only: patterns of names, as those of files (``fnmatchcase``): what matches none of them is not sent,
            and the engines keep what they have of it. Each must match something, but for those of ``LORA``,
            which are the names of adapters. By default all is sent.
        lease: seconds the lock outlives its holder.

    Raises:
        SetupError: a value that no round could work with.
    """

    every: int = 1
    deadline: float = 60.0
    idle: float | None = None
    engine_limit: float | None = None
    drain: float | None = None
    first_contact: float = 300.0
    on_engine_failure: Literal["fail", "quarantine"] = "fail"
    quorum: float | int = 0.5
    catch_up: Literal["together", "apart"] = "together"
    rest: float = 1.0
    longest_rest: float = 300.0
    attempts: int = 1
    when_busy: Literal["wait", "block", "refuse", "coalesce", "skip"] = "wait"
    staleness: int = 2
    raise_on_failure: bool = False
    bucket_bytes: int = 64 * 1024 * 1024
    verify: Literal["sampled", "full", "off"] = "sampled"
    verify_turns: int = 32
    cast: str | None = None
    only: Iterable[str] | None = None
    lease: float = 10.0

    def __post_init__(self) -> None:
        for name in ("every", "attempts", "bucket_bytes", "staleness", "verify_turns"):
            checks.whole("Policy", name, getattr(self, name))
        for name in ("deadline", "lease", "first_contact", "rest", "longest_rest"):
            checks.seconds("Policy", name, getattr(self, name))
        for name in ("idle", "engine_limit", "drain"):
            if getattr(self, name) is not None:
                checks.seconds("Policy", name, getattr(self, name))
        checks.flag("Policy", "raise_on_failure", self.raise_on_failure)
        self._choice("on_engine_failure", ("fail", "quarantine"))
        self._choice("catch_up", ("together", "apart"))
        self._choice("when_busy", ("wait", "block", "refuse", "coalesce", "skip"))
        self._choice("verify", ("sampled", "full", "off"))
        if self.cast is not None:
            object.__setattr__(self, "cast", checks.dtype("Policy", "cast", self.cast, CASTS))
        if self.only is not None:
            object.__setattr__(self, "only", checks.patterns("Policy", "only", self.only))
        self._check_quorum()

    def limits(self) -> Limits:
        """The limits that follow."""
        forward = 0.75 * self.deadline
        idle = min(self.idle if self.idle is not None else self.deadline / 4, forward)
        engine = self.engine_limit if self.engine_limit is not None else self.deadline / 6
        engine = min(engine, 0.8 * idle)
        drain = self.drain if self.drain is not None else max(self.deadline / 3, engine)
        drain = min(drain, 0.8 * forward)
        return Limits(
            forward=forward,
            idle=idle,
            engine=engine,
            drain=drain,
            pausing=max(idle, drain / 0.8),
            first_contact=self.first_contact,
            failed=0.25 * self.deadline,
            release=min(self.lease / 2, self.deadline / 8),
            lease=self.lease,
        )

    def part(self, version: int) -> Part | None:
        """What the digests of a version are of; None if there are none."""
        match self.verify:
            case "off":
                return None
            case "full":
                return WHOLE
            case _:
                return part_of_version(version, self.verify_turns)

    def backoff(self) -> Backoff | None:
        """How long an engine that does not come back rests; None if every engine must take part."""
        if self.on_engine_failure == "fail":
            return None
        return Backoff(min(self.rest, self.longest_rest), self.longest_rest)

    def quorum_of(self, engines: int) -> int:
        """The quorum for a round that asks for ``engines`` engines: a number from 1 to all.

        Raises:
            SetupError: a whole number above the number of engines.
        """
        if self.on_engine_failure == "fail":
            return engines
        if isinstance(self.quorum, int):
            if self.quorum > engines:
                raise SetupError(
                    f"Policy(quorum={self.quorum}) asks for more engines than the {engines} there are"
                )
            return self.quorum
        return max(1, math.ceil(self.quorum * engines - 1e-9))

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise checks.refusal("Policy", name, value, f"choose from {', '.join(map(repr, choices))}")

    def _check_quorum(self) -> None:
        value: object = self.quorum
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        fraction = isinstance(value, float) and 0 < value <= 1
        if not (whole or fraction):
            needed = "a fraction above 0 and up to 1.0, or a whole number from 1"
            raise checks.refusal("Policy", "quorum", value, needed)
