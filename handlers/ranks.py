"""What a rank says in the store that a trainer's ranks share, and what it finds there.

A store can outlive a run, and keep its words for the next one. So rank 0 begins a *run* with an id of its
own, and every *call* of a hook on another rank has one too. A report says which run it was made in, and a
verdict which calls it answers: neither side takes an older word for an answer. Who comes before rank 0 does
finds an older run, takes nothing that was said in it for an answer, and reports again when it is another one.

What a rank says has one place (``NAME/WHAT/RANK``), and what it says next takes it. What rank 0 says of a
hand-over is under its run and number (``NAME/RUN/NUMBER/WHAT``). The number is rank 0's alone: a rank that
missed one reads on. Old numbers, and the run before, are deleted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..fsm.errors import RankLost, RoundCancelled, SetupError
from ..fsm.exports import Outline, Standing
from ..fsm.plan import Plan
from ..fsm.ranks import Report, Verdict, layout
from .rank_store import RankStore, Store, check_rank, line_of

__all__ = ["Part", "Store", "TrainerRanks"]

_GLANCE = 0.01  # seconds between two looks
_SLICE = 0.1  # seconds between two looks at whether the part is to be given up
_KEPT = 8  # hand-overs whose words are kept, for a rank that is late, or was not there

Part = Callable[[], Plan | tuple[Outline, Standing]]
"""What a rank does in a meeting: it reads its tensors, or says where it stands before it does."""


class TrainerRanks(RankStore):
    """This process as a rank of its trainer.

    Args:
        store: shared by all ranks.
        rank: which of them this is; 0 leads.
        world_size: how many there are.
        name: of this trainer, where one store serves several at a time.
        limit: seconds for which a rank may be late for a hand-over, or busy with its part of it. Whatever
            may keep one rank longer than the others between two hand-overs has to fit.
        silent: seconds without a sign of life after which a rank is lost, in the middle of a hand-over; and
            seconds within which the store has to answer.

    Raises:
        SetupError: something of the wrong kind, or numbers that no trainer has.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "weightsync",
        limit: float = 60.0,
        silent: float = 10.0,
    ) -> None:
        check_rank("TrainerRanks", store, rank, world_size, name=name, limit=limit, silent=silent)
        super().__init__(store, name, rank, silent)
        self.world_size, self.limit = world_size, limit
        self._me = uuid.uuid4().hex[:12]
        self._run: str | None = None
        self._known = False  # whether the run is not an older one's
        self._looked = False
        self._number = self._beats = self._calls = 0
        self._layouts_said: dict[str, str] = {}
        self._wrong: Report | None = None  # the last call, if its step was none
        self._owed: list[str] = []  # the call that was reported, and those of others in its place
        if rank:
            with suppress(RankLost):  # if the store does not answer, the first hand-over says so
                self.find_run()

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    @property
    def interval(self) -> float:
        """Seconds between two beats."""
        return self.silent / 4

    # -- a rank's part ---------------------------------------------------------------------------------------

    def work(self, step: int, kind: str, part: Part, stopped: Callable[[], object] = lambda: None) -> Report:
        """Do this rank's part; what there is to report of it.

        The part runs on a thread, and for ``limit`` seconds at most: it may be a collective that never ends.

        Raises:
            RankLost: it took longer, or the store did not answer.
            RoundCancelled: ``stopped`` said so.
        """
        end, done = time.monotonic() + self.limit, self._workers.submit(part)
        while not wait([done], timeout=min(_SLICE, max(0.0, end - time.monotonic()))).done:
            if stopped():
                raise RoundCancelled(f"the hand-over of step {step} was cancelled while the ranks met")
            if time.monotonic() >= end:
                raise RankLost(
                    f"rank {self.rank} of the trainer: its part of step {step} took longer than "
                    f"{self.limit:g} s"
                )
        found = done.result()
        if isinstance(found, Plan):
            self._say_layout("layout", found.fingerprint, lambda: layout(found))
            return self._blank(step, kind, fingerprint=found.fingerprint)
        outline, standing = found
        self._say_layout("export", standing.common, lambda: outline.lines)
        report = self._blank(step, kind, fingerprint=standing.common)
        return replace(report, stage="export", standing=standing.to_json())

    def _say_layout(self, stage: str, fingerprint: str, lines: Callable[[], list[str]]) -> None:
        """What the fingerprint is of; read only if they differ."""
        if self._layouts_said.get(stage) != fingerprint:
            self.say(stage, [fingerprint, lines()])
            self._layouts_said[stage] = fingerprint

    def arrive(self, step: int, kind: str, part: Part, stage: str = "") -> Report:
        """Do this rank's part, and report it. For all but rank 0.

        Whatever is raised here or later, while an answer is waited for: then ``give_up``.
        """
        self._begin_call()
        self.find_run()
        if self._wrong is not None:  # what answers that call, which is over, is no answer to this one
            self.answer(self._wrong)
            self._wrong = None
        try:
            report = self.work(step, kind, part)
        except BaseException as error:
            self._failed(step, kind, error, stage)
            raise
        self._owed = [report.call]  # before it is said: the store may take it and not say so
        self.say("report", report.to_json())
        return report

    def cannot(self, kind: str, error: BaseException) -> None:
        """Report that this rank was called with a step that is none. For all but rank 0."""
        self._begin_call()
        self._wrong = self._blank(None, kind)
        self._failed(None, kind, error)

    def _begin_call(self) -> None:
        self._calls += 1
        self._owed = []

    def _failed(self, step: int | None, kind: str, error: BaseException, stage: str = "") -> None:
        with suppress(RankLost):  # the others find out by themselves
            self.find_run()
            report = replace(self._blank(step, kind, error=line_of(error)), stage=stage)
            self.say("report", report.to_json())
            if isinstance(error, Exception):
                self._make_known(report)

    def report_again(self, report: Report) -> Report:
        """In the run that there is now."""
        report = replace(report, run=self._run or "", after=self._number)
        self.say("report", report.to_json())
        return report

    def _make_known(self, report: Report) -> None:
        """Nobody waits after this one; at the first hand-over rank 0 has to have begun its run to read it."""
        end = time.monotonic() + self.limit
        while not self._known and self.answer(report) is None and time.monotonic() < end:
            if self.find_run():
                report = self.report_again(report)
            self.pause()

    def give_up(self, error: BaseException) -> None:
        """Take back what this call has reported, or may have: it does not wait for an answer any more.

        If somebody else was found in this rank's place, that report is worth nothing, either.
        """
        if self._owed:
            call, *others = self._owed
            self.say("fail", [call, line_of(error), *others])

    def check_alone(self) -> None:
        """Nobody else has reported as this rank since this one did.

        Raises:
            SetupError: somebody has.
        """
        told = self.said("report", self.rank)
        if told is not None and not told["call"].startswith(self._me):
            self._owed.append(told["call"])
            raise SetupError(
                f"somebody else reports as rank {self.rank}: give each rank a number of its own, and each "
                f"trainer a TrainerRanks(name=...) of its own in a store that several use"
            )

    def _blank(self, step: int | None, kind: str, *, fingerprint: str = "", error: str = "") -> Report:
        call = f"{self._me}.{self._calls}"
        return Report(
            self.rank, self.world_size, self._run or "", call, step, kind, fingerprint, error, self._number
        )

    # -- the run ---------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Begin a hand-over, and with the first one the run; hands back its number. For rank 0.

        Raises:
            SetupError: another rank 0 has begun a run of its own.
        """
        if self._run is None:
            found = self.read("run")
            self.write(self._me, "run")
            self._run = self._me
            if found is not None:
                self._forget_run(found)
        else:
            self.check_run()
        self._number += 1
        return self._number

    def check_run(self) -> None:
        """This rank 0's run is the one that the others find.

        Raises:
            SetupError: another rank 0 has begun a run of its own.
        """
        if self.read("run") not in (self._run, None):
            raise SetupError(
                "another rank 0 has begun a run in this store: give each trainer a TrainerRanks(name=...) of "
                "its own; if this one was restarted, the older one is to end"
            )

    def find_run(self) -> bool:
        """See whether this is another run than at the last look. For all but rank 0."""
        found = self.read("run")
        changed: bool = found != self._run
        newest = self.read(found, "newest") or 0
        if changed:
            # Who sees it begin knows that it is no older one's. One that was there before this rank may be,
            # and what was said in it by then is no answer to anything that this rank says.
            self._known, self._run, self._number = self._looked, found, 0 if self._looked else newest
        self._looked = True
        self._number = max(self._number, newest - _KEPT)
        return changed

    @property
    def known(self) -> bool:
        """Whether this rank knows that the run is not an older one."""
        return self._known

    @property
    def run(self) -> str:
        """The run, as far as this rank knows it; empty if there is none."""
        return self._run or ""

    @property
    def number(self) -> int:
        """Of the hand-over that is under way."""
        return self._number

    @property
    def next_number(self) -> int:
        """Of the hand-over whose verdict this rank has not seen."""
        return self._number + 1

    def answer(self, report: Report) -> tuple[int, Verdict] | None:
        """The next verdict that answers this report, with its number; None if there is none yet."""
        while (told := self.look(self._number + 1, "verdict")) is not None:
            self._number += 1
            verdict = Verdict.from_json(told)
            if verdict.answers(report):
                self._known = True
                return self._number, verdict
        return None

    def end(self) -> None:
        """Say that this rank takes part in nothing any more."""
        if self.rank:
            self.find_run()
            self.say("left", [self._run, self._me])
        else:
            if self._run is None:
                self.open()
            self.write(True, self._run, "ended")  # noqa: FBT003 - any value will do

    def ended(self) -> bool:
        """Whether rank 0 said so, in a run that is known to be this one."""
        return self._known and self.read(self._run, "ended") is not None

    def left(self, rank: int) -> bool:
        """Whether that rank said so, and nobody has come in its place."""
        run, who = self.said("left", rank) or (None, "")
        if run is None or run != self._run:
            return False
        told = self.said("report", rank)
        return told is None or str(told["call"]).startswith(who)

    # -- words -----------------------------------------------------------------------------------------------

    def say(self, what: str, value: Any) -> None:
        """Say something as this rank, in the place of what it said before."""
        self.write(value, what, self.rank)

    def said(self, what: str, rank: int) -> Any:
        """What that rank said last; None if it has not."""
        return self.read(what, rank)

    def reported(self, rank: int) -> Report | None:
        """The last report of that rank in this run."""
        told = self.said("report", rank)
        return None if told is None or told["run"] != self._run else Report.from_json(told)

    def gave_up(self, report: Report) -> str:
        """Why that report was taken back; empty if it was not."""
        call, why, *others = self.said("fail", report.rank) or ("", "")
        return str(why) if report.call in (call, *others) else ""

    def attends(self, report: Report, number: int) -> bool:
        """Whether who made that report has said since that it waits for the outcome. For rank 0."""
        beat = self.said("beat", report.rank)
        return beat is not None and beat[1:] == [report.call, number, self._run]

    def layout_of(self, report: Report) -> list[str]:
        """The tensors of the plan that was reported, or the lines of the outline."""
        fingerprint, lines = self.said(report.stage or "layout", report.rank) or ("", [])
        return list(lines) if fingerprint == report.fingerprint else []

    def post(self, number: int, what: str, value: Any) -> None:
        """Say something about a hand-over. For rank 0."""
        self.write(value, self._run, number, what)

    def look(self, number: int, what: str) -> Any:
        """What rank 0 said about a hand-over; None if it has not."""
        return self.read(self._run, number, what)

    def judge(self, number: int, verdict: Verdict) -> None:
        """Answer reports. For rank 0."""
        self.post(number, "verdict", verdict.to_json())
        self.write(number, self._run, "newest")

    def beat(self, number: int, where: object = None) -> None:
        """A sign of life, with where it is: rank 0 in its round, another one in the call of its hook."""
        self._beats += 1
        self.say("beat", [f"{self._me}.{self._beats}", where, number, self._run])

    def pause(self) -> None:
        """Between two looks."""
        time.sleep(_GLANCE)

    def forget(self, number: int) -> None:
        """Delete what was said of a hand-over that is long over. For rank 0."""
        self._delete(self._run, [number - _KEPT])

    def _forget_run(self, run: str) -> None:
        newest = self.read(run, "newest") or 0
        self._delete(run, range(newest - _KEPT, newest + 2))
        for what in ("newest", "ended"):
            self.drop(run, what)

    def _delete(self, run: str | None, numbers: Iterable[int]) -> None:
        for number in numbers:
            for what in ("verdict", "call", "outcome"):
                if number > 0:
                    self.drop(run, number, what)
