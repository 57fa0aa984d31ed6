"""How a round ends from outside: aborts at every moment, and ports that are closed."""

from __future__ import annotations

from ...handlers.threads import spawn
from .contents import plain
from .rounds import PHASES, Rounds, TransportUnderTest
from .rules import Check, checked, eventually
from .transport_rules import ABORT_IS_IDEMPOTENT, ABORT_WAKES, BOUNDED, CLOSED_PORT_IS_QUIET, NEXT_ROUND

__all__ = ["ENDS"]

ENDS: list[Check[TransportUnderTest]] = []


@checked(ENDS, "abort-at-receive", "receive")
@checked(ENDS, "abort-at-bucket-1", 1)
@checked(ENDS, "abort-at-the-last-bucket", 4)
@checked(ENDS, "abort-before-the-view-is-closed", "applied")
@checked(ENDS, "abort-in-collect", "released")
def abort_from_outside(tested: TransportUnderTest, point: int | str) -> None:
    """An abort beside a phase that is stuck ends it at once, frees the engines, and may come again."""
    with Rounds(tested) as rounds:
        rounds.round(plain(1)).good()
        rounds["b"].arm("hang", point)
        run = rounds.round(plain(2))
        whole = spawn("kit-round", run.drive)
        rounds.stick("b", run, whole)
        rounds.end("abort")
        rounds.end("abort", ABORT_IS_IDEMPOTENT)
        rounds.stopped(whole)
        rounds.freed("a")
        run.close()
        for phase in PHASES[1:]:
            error = run.phase(phase)
            CLOSED_PORT_IS_QUIET.unless(
                error is None, f"{phase} after an abort, with a closed port, raised {error!r}"
            )
        rounds.go_on()


@checked(ENDS, "round-over-at-receive", "receive")
@checked(ENDS, "round-over-at-bucket-1", 1)
@checked(ENDS, "round-over-in-collect", "released")
def port_closes(tested: TransportUnderTest, point: int | str) -> None:
    """The round moves on while a phase is stuck: it returns at once, and the abort frees the engines."""
    with Rounds(tested) as rounds:
        rounds["b"].arm("hang", point)
        run = rounds.round()
        whole = spawn("kit-round", run.drive)
        rounds.stick("b", run, whole)
        run.close()
        error = rounds.join(whole, BOUNDED)
        CLOSED_PORT_IS_QUIET.unless(error is None, f"the round moved on, and a phase raised {error!r}")
        rounds.end("abort")
        rounds.freed("a")
        rounds.go_on()


def moves_on(tested: TransportUnderTest, phase: str, after: int) -> None:
    """PortClosed out of whatever is fired next ends the phase, and is no error of the transport."""
    with Rounds(tested) as rounds:
        run = rounds.round(moves_on={phase: after})
        error = rounds.join(spawn("kit-round", run.run), BOUNDED)
        CLOSED_PORT_IS_QUIET.unless(error is None, f"PortClosed in {phase} became {error!r}")
        rounds.freed("a", "b")
        rounds.go_on()


for _phase, _places in (("open", (0, 1)), ("broadcast", (0, 1, 4)), ("collect", (0, 1))):
    for _after in _places:
        checked(ENDS, f"port-closed-in-{_phase}-after-{_after}", _phase, _after)(moves_on)


@checked(ENDS, "port-closed-before-open", "open")
@checked(ENDS, "port-closed-before-broadcast", "broadcast")
@checked(ENDS, "port-closed-before-collect", "collect")
def closed_before(tested: TransportUnderTest, first: str) -> None:
    """A phase that begins when the round is over does nothing, and nothing of it stays behind."""
    with Rounds(tested) as rounds:
        run = rounds.round()
        for phase in PHASES:
            if phase == first:
                run.close()
            error = run.phase(phase)
            CLOSED_PORT_IS_QUIET.unless(error is None, f"{phase} with a closed port raised {error!r}")
        rounds.end("abort")
        rounds.freed("a", "b")
        rounds.go_on()


@checked(ENDS, "abort-before-open", 0)
@checked(ENDS, "abort-after-open", 1)
@checked(ENDS, "abort-after-broadcast", 2)
@checked(ENDS, "abort-after-collect", 3)
def abort_between(tested: TransportUnderTest, phases: int) -> None:
    """An abort between two phases frees the engines; a second one, and a clean, find nothing to do."""
    with Rounds(tested) as rounds:
        run = rounds.round()
        for phase in PHASES[:phases]:
            error = run.phase(phase)
            NEXT_ROUND.unless(error is None, f"{phase} failed, though nothing was wrong: {error!r}")
        for end in ("abort", "abort"):
            rounds.end(end, ABORT_IS_IDEMPOTENT)
        rounds.freed(*("ab" if phases else ""))
        for end in ("clean", "abort"):
            rounds.end(end, ABORT_IS_IDEMPOTENT)
        rounds.go_on()
        rounds.end("abort", ABORT_IS_IDEMPOTENT)  # after the clean of a good round
        rounds.go_on()


@checked(ENDS, "aborts-at-once")
def aborts_at_once(tested: TransportUnderTest) -> None:
    """Aborts from many threads, beside a broadcast that is stuck: one of them ends it, none fails."""
    with Rounds(tested) as rounds:
        rounds["b"].arm("hang", 1)
        run = rounds.round()
        whole = spawn("kit-round", run.drive)
        rounds.stick("b", run, whole)
        calls = [spawn("kit-abort", rounds.transport.abort) for _ in range(4)]
        for call in calls:
            _, error = rounds.outcome(call, "an abort beside others", ABORT_WAKES)
            ABORT_IS_IDEMPOTENT.unless(error is None, f"an abort beside others raised {error!r}")
        rounds.stopped(whole)
        rounds.freed("a")
        rounds.go_on()


@checked(ENDS, "left-open")
def left_open(tested: TransportUnderTest) -> None:
    """A round that nobody ended does not keep its engines when the next one is opened."""
    with Rounds(tested) as rounds:
        error = rounds.round().phase("open")
        NEXT_ROUND.unless(error is None, f"open failed, though nothing was wrong: {error!r}")
        rounds.round(plain(9)).good(NEXT_ROUND)
        left = [peer.link.id for peer in rounds.peers if not eventually(peer.ended, rounds.patience)]
        NEXT_ROUND.unless(not left, f"engines {left} still receive a round that was left open")


@checked(ENDS, "close-twice")
def close_twice(tested: TransportUnderTest) -> None:
    """Close ends what is open, may come twice, and before anything was opened."""
    with Rounds(tested) as rounds:
        rounds.end("close")
        rounds.end("close")
    with Rounds(tested) as rounds:
        rounds.round().phase("open")
        rounds.end("close")
        rounds.end("close")
        rounds.freed("a", "b")
