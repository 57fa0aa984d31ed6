"""What the user decides about rounds, and the limits that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .errors import SetupError

__all__ = ["Limits", "Policy"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds.

    Args:
        forward: from the start of a round until it must be in Failed or Released.
        idle: in one state, without anything moving.
        engine: one control call to one engine; shorter than ``idle``, so that a silent engine is lost
            before its phase is.
        failed: Failed, from entering it until what does not answer is given up and fenced.
        release: one attempt to give the lock back.
        lease: of the lock.
    """

    forward: float
    idle: float
    engine: float
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
        on_engine_failure: ``"fail"``: every engine must take part. ``"quarantine"``: the round goes on with
            the rest, at or above the quorum, and the lost engine is quarantined.
        quorum: with ``"quarantine"``: a fraction of the engines asked for (0 < f <= 1.0), or a whole number
            of them; at least one engine.
        attempts: how often a round is tried; a retry is a new round and a full resend.
        when_busy: what a second round does while one runs: ``"wait"`` its turn, or ``"refuse"`` at once.
        raise_on_failure: call ``RoundResult.require()`` for the caller.
        bucket_bytes: the largest transfer unit, in bytes.
        verify: ``"full"``: a digest of every tensor, computed on both sides. ``"off"``: counts and the plan's
            fingerprint only; the version's number is then tied to the layout, not to the content.
        lease: seconds the lock outlives its holder.

    Raises:
        SetupError: a value that no round could work with.
    """

    every: int = 1
    deadline: float = 60.0
    idle: float | None = None
    engine_limit: float | None = None
    on_engine_failure: Literal["fail", "quarantine"] = "fail"
    quorum: float | int = 0.5
    attempts: int = 1
    when_busy: Literal["wait", "refuse"] = "wait"
    raise_on_failure: bool = False
    bucket_bytes: int = 64 * 1024 * 1024
    verify: Literal["full", "off"] = "full"
    lease: float = 10.0

    def __post_init__(self) -> None:
        self._whole("every")
        self._whole("attempts")
        self._whole("bucket_bytes")
        self._seconds("deadline", self.deadline)
        self._seconds("lease", self.lease)
        if self.idle is not None:
            self._seconds("idle", self.idle)
        if self.engine_limit is not None:
            self._seconds("engine_limit", self.engine_limit)
        self._choice("on_engine_failure", ("fail", "quarantine"))
        self._choice("when_busy", ("wait", "refuse"))
        self._choice("verify", ("full", "off"))
        self._check_quorum()

    def limits(self) -> Limits:
        """The limits that follow."""
        idle = min(self.idle if self.idle is not None else self.deadline / 4, 0.75 * self.deadline)
        engine = self.engine_limit if self.engine_limit is not None else self.deadline / 6
        return Limits(
            forward=0.75 * self.deadline,
            idle=idle,
            engine=min(engine, 0.8 * idle),
            failed=0.25 * self.deadline,
            release=min(self.lease / 2, self.deadline / 8),
            lease=self.lease,
        )

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

    def _whole(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SetupError(f"Policy({name}={value!r}): a whole number of at least 1 is needed")

    def _seconds(self, name: str, value: float) -> None:
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise SetupError(f"Policy({name}={value!r}): a finite number of seconds above 0 is needed")

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise SetupError(f"Policy({name}={value!r}): choose from {', '.join(map(repr, choices))}")

    def _check_quorum(self) -> None:
        value: object = self.quorum
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        fraction = isinstance(value, float) and 0 < value <= 1
        if not (whole or fraction):
            raise SetupError(
                f"Policy(quorum={value!r}): a fraction above 0 and up to 1.0, or a whole number from 1"
            )
