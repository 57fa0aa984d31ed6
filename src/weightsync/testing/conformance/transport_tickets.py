"""What a ticket is good for, and for how long; and how an inlet ends that nothing is sent to."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from ...fsm.contract import InletFactory, Ticket
from ...fsm.engine_table import Session
from ...fsm.plan import Plan
from ...handlers.threads import spawn
from .contents import plain
from .rounds import Rounds, TransportUnderTest, Watched
from .rules import Check, checked, eventually
from .subjects import inlet_of
from .transport_rules import INLET_CLOSES, STALE_TICKET

__all__ = ["TICKETS"]

TICKETS: list[Check[TransportUnderTest]] = []
_MOMENT = 0.3
"""Seconds in which what must not happen would have happened on an idle machine."""

_READ = 0.5
"""Seconds for which an inlet that has no business here may wait for a bucket."""


@checked(TICKETS, "stale-ticket")
def stale_ticket(tested: TransportUnderTest) -> None:
    """The ticket of a round that is over brings nothing, not even while the next round is under way."""
    with Rounds(tested) as rounds:
        old = rounds.round(plain(1))
        old.good()
        for _ in range(2):
            _leads_nowhere(rounds, inlet_of(tested), old, old.session, "an old ticket")
            rounds["b"].arm("wait", 2)
            run = rounds.round(plain(2))
            whole = spawn("kit-round", run.run)
            eventually(rounds["b"].reached, rounds.patience)
            try:
                _leads_nowhere(
                    rounds, inlet_of(tested), old, old.session, "an old ticket, beside a new round,"
                )
            finally:
                rounds["b"].release()
            rounds.join(whole, STALE_TICKET)
            STALE_TICKET.unless(not run.lost, f"an old ticket disturbed a round: {run.lost}")


@checked(TICKETS, "ticket-of-another-session")
def another_session(tested: TransportUnderTest) -> None:
    """A ticket of the round that is under way brings nothing to an engine whose session is another one."""
    with Rounds(tested, ("a",)) as rounds:
        old = rounds.round(plain(1))
        old.good()
        run, whole = _unread(rounds)
        mine = run.session
        for other in (old.session, replace(mine, epoch=mine.epoch - 1), replace(mine, round="kit-another")):
            _leads_nowhere(rounds, inlet_of(tested), run, other, f"the ticket of {mine}, taken by {other},")
        rounds.end("abort")
        rounds.stopped(whole)
        rounds.go_on()


@checked(TICKETS, "ticket-that-nobody-read")
def nobody_read(tested: TransportUnderTest) -> None:
    """What was sent, and not fetched before the end of its round, cannot be fetched afterwards."""
    with Rounds(tested, ("a",)) as rounds:
        run, whole = _unread(rounds)
        rounds.end("abort")
        rounds.stopped(whole)
        for _ in range(2):
            _leads_nowhere(rounds, inlet_of(tested), run, run.session, "a ticket of an aborted round")
            rounds.go_on()


@checked(TICKETS, "inlet-waits-no-longer-than-its-limit", 0.5)
@checked(TICKETS, "inlet-closes", 120.0)
def inlet_ends(tested: TransportUnderTest, limit: float) -> None:
    """An inlet that nothing is sent to gives up by its own limit, or when it is closed from outside."""
    with Rounds(tested, ("a",)) as rounds:
        run = rounds.round(silent=True)
        opening = run.begin("open")
        eventually(lambda: run.tickets, rounds.patience)
        INLET_CLOSES.unless(run.tickets, "open asked no engine to receive")
        inlet = inlet_of(tested)(run.tickets[0], run.session, run.plan, limit)

        def read() -> int:
            with inlet.buckets() as frames:
                return sum(1 for _ in frames)

        reading = spawn("kit-inlet", read)
        if limit > rounds.patience:
            eventually(lambda: opening.done() and reading.done(), _MOMENT)
            inlet.close()
            inlet.close()
        got, error = rounds.outcome(reading, "an inlet that nothing is sent to", INLET_CLOSES)
        INLET_CLOSES.unless(
            error is not None, f"an inlet that nothing was sent to brought {got} buckets, without error"
        )
        inlet.close()
        rounds.end("abort")
        run.finish("open", opening)


def _unread(rounds: Rounds) -> tuple[Watched, Future[BaseException | None]]:
    """A round of a single bucket that has gone as far as it can, and whose engine has fetched nothing."""
    run = rounds.round(plain(2), silent=True, bucket_bytes=1 << 20)
    whole = spawn("kit-round", run.drive)
    eventually(lambda: run.tickets or whole.done(), rounds.patience)
    STALE_TICKET.unless(run.tickets, "open asked no engine to receive")
    eventually(lambda: run.fired("all_sent") or whole.done(), _MOMENT)
    return run, whole


def _leads_nowhere(rounds: Rounds, make: InletFactory, run: Watched, session: Session, what: str) -> None:
    """An inlet with the ticket of ``run`` fails soon, and has not handed out a single bucket by then."""
    seen: list[int] = []
    call = _reading(make, run.tickets[0], session, run.plan, seen)
    _, error = rounds.outcome(call, f"an inlet with {what}", STALE_TICKET)
    STALE_TICKET.unless(error is not None, f"{what} raised no error, and brought {len(seen)} buckets")
    STALE_TICKET.unless(not seen, f"{what} brought {len(seen)} buckets before it failed with {error!r}")


def _reading(
    make: InletFactory, ticket: Ticket, session: Session, plan: Plan, seen: list[int]
) -> Future[None]:
    def read() -> None:
        with make(ticket, session, plan, _READ).buckets() as frames:
            for frame in frames:
                seen.append(frame.index)  # noqa: PERF401 - an error may come after some

    return spawn("kit-inlet", read)
