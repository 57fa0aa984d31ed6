"""What a transport does when an engine or the weights fail, wherever the round is."""

from __future__ import annotations

from ...fsm.errors import EngineGone
from ...handlers.threads import spawn
from .contents import plain
from .peers import InjectedError
from .rounds import PHASES, Rounds, TransportUnderTest, Watched
from .rules import Check, Violation, checked
from .transport_rules import (
    BOUNDED,
    EARLY_ACK,
    LOSS_BY_NAME,
    NEXT_ROUND,
    OLD_WEIGHTS,
    SURVIVES_LOSS,
    TELLS_OR_RAISES,
)

__all__ = ["FAULTS"]

FAULTS: list[Check[TransportUnderTest]] = []

POINTS: tuple[int | str, ...] = ("receive", 0, 2, 4, "applied", "released")
"""In turn: before the engine connects; at the first, a middle and the last bucket; with all of them applied
and the view still open; and when only the receipt is missing."""

_PAIRS = (("a", "b"), ("b", "a"))
"""Who fails, and who does not."""


def _each(
    kind: str, first: int, points: tuple[int | str, ...] = POINTS
) -> list[tuple[str, int | str, tuple[str, str]]]:
    """A check's name, its point, who fails there and who does not: the first and the last engine in turn.

    A transport that is wrong about one of them, by its place or its name, would pass if it were always the
    other one that fails.
    """
    return [
        (f"{kind}-at-{point if isinstance(point, str) else f'bucket-{point}'}", point, _PAIRS[turn % 2])
        for turn, point in enumerate(points, first)
    ]


def failing(tested: TransportUnderTest, kind: str, point: int | str, pair: tuple[str, str]) -> None:
    """An engine fails: it alone is lost, with its own error; the others go on, or are freed."""
    bad, _ = pair
    with Rounds(tested) as rounds:
        rounds.round(plain(1)).good()
        survives = rounds.transport.capabilities.survives_loss
        rounds[bad].arm(kind, point)
        run = rounds.round(plain(2), needs_all=not survives)
        try:
            error = rounds.join(spawn("kit-round", run.run), BOUNDED)
        except Violation as found:
            if found.rule is TELLS_OR_RAISES and run.lost:  # not a word on it: another one was blamed
                LOSS_BY_NAME.unless(bad in run.lost, f"engine {bad} failed at {point}; lost were {run.lost}")
            raise
        told = f"engine {bad} failed at {point}; lost were {run.lost or 'none'}, raised was {error!r}"
        LOSS_BY_NAME.unless(list(run.lost) == [bad], told)
        LOSS_BY_NAME.unless(
            _own(run.lost[bad]),
            f"engine {bad} was lost with an error that is not its own: {run.lost[bad]!r}",
        )
        _others(rounds, run, error, pair)
        rounds.go_on()


def hanging(tested: TransportUnderTest, point: int | str, pair: tuple[str, str]) -> None:
    """An engine hangs, and the round decides to do without it: nobody waits for it any longer."""
    bad, _ = pair
    with Rounds(tested) as rounds:
        rounds.round(plain(1)).good()
        survives = rounds.transport.capabilities.survives_loss
        rounds[bad].arm("hang", point)
        run = rounds.round(plain(2), needs_all=not survives)
        whole = spawn("kit-round", run.run)
        rounds.stick(bad, run, whole)
        run.fence(bad)
        error = rounds.join(whole, BOUNDED)
        _others(rounds, run, error, pair)
        rounds.go_on()


def _others(rounds: Rounds, run: Watched, error: BaseException | None, pair: tuple[str, str]) -> None:
    """The other engine holds everything, or it was freed and serves what it did before."""
    bad, well = pair
    EARLY_ACK.unless(bad not in run.acked, f"engine {bad} was acked, and has failed")
    if rounds.transport.capabilities.survives_loss:
        SURVIVES_LOSS.unless(
            run.acked == [well] and error is None, f"the other engine was not served: {error!r}"
        )
        run.hold([well], SURVIVES_LOSS)
    rounds.freed(well)


def late(tested: TransportUnderTest, point: int | str, pair: tuple[str, str]) -> None:
    """An engine hangs, and nobody decides anything: the phase ends by its deadline, and the round with it."""
    bad, well = pair
    with Rounds(tested) as rounds:
        rounds[bad].arm("hang", point)
        run = rounds.round(limit=0.6)
        rounds.join(spawn("kit-round", run.run), BOUNDED)
        EARLY_ACK.unless(bad not in run.acked, f"engine {bad} was acked, and has not answered")
        rounds.freed(well)
        rounds.go_on()


def old_weights(tested: TransportUnderTest, point: int | str, pair: tuple[str, str]) -> None:
    """A round that fails leaves every engine with the weights it had, bit for bit."""
    with Rounds(tested) as rounds:
        first = rounds.round(plain(1))
        first.good()
        before = [peer.content() for peer in rounds.peers]
        rounds[pair[0]].arm("raise", point)
        rounds.round(plain(2)).run()
        rounds.freed("a", "b")
        for peer, content in zip(rounds.peers, before, strict=True):
            OLD_WEIGHTS.unless(
                peer.content() == content, f"engine {peer.link.id} serves other bytes after a failed round"
            )
        rounds.go_on()


# What raises and what dies do so in turns of their own: at every point each engine fails by one of them.
for _first, _kind in enumerate(("raise", "die")):
    for _name, _point, _pair in _each(_kind, _first):
        checked(FAULTS, _name, _kind, _point, _pair)(failing)
for _name, _point, _pair in _each("hang", 0):
    checked(FAULTS, _name, _point, _pair)(hanging)
for _name, _point, _pair in _each("late", 1, ("receive", 2, "released")):
    checked(FAULTS, "peers-never-connect" if _point == "receive" else _name, _point, _pair)(late)
for _name, _point, _pair in _each("old-weights", 1, (0, 2, "released")):
    checked(FAULTS, _name, _point, _pair)(old_weights)


@checked(FAULTS, "every-engine-fails")
def every_engine_fails(tested: TransportUnderTest) -> None:
    """When nobody is left the round is over, and the sender is not."""
    with Rounds(tested) as rounds:
        for peer in rounds.peers:
            peer.arm("raise", 1)
        run = rounds.round(needs_all=not rounds.transport.capabilities.survives_loss)
        rounds.join(spawn("kit-round", run.run), BOUNDED)
        LOSS_BY_NAME.unless(run.lost, "both engines failed, and none was lost")
        LOSS_BY_NAME.unless(
            all(map(_own, run.lost.values())), f"engines were lost with errors not their own: {run.lost}"
        )
        rounds.go_on()


@checked(FAULTS, "a-loss-that-ends-the-round")
def loss_ends_the_round(tested: TransportUnderTest) -> None:
    """With a quorum of all, a loss closes the port: the phase ends at once."""
    with Rounds(tested) as rounds:
        rounds["b"].arm("raise", 2)
        run = rounds.round(needs_all=True)
        error = rounds.join(spawn("kit-round", run.run), BOUNDED)
        LOSS_BY_NAME.unless(list(run.lost) == ["b"], f"lost were {run.lost or 'none'}, raised was {error!r}")
        rounds.freed("a")
        rounds.go_on()


@checked(FAULTS, "weights-that-fail")
def weights_that_fail(tested: TransportUnderTest) -> None:
    """A tensor that is no longer what the plan says is an error of the phase; the engines are freed."""
    with Rounds(tested) as rounds:
        run = rounds.round()
        run.weights.tensors["w2"].resize_(3)
        error = rounds.join(spawn("kit-round", run.run), BOUNDED)
        TELLS_OR_RAISES.unless(
            error is not None, "a tensor has changed its shape since the plan, and nothing was raised"
        )
        rounds.freed("a", "b")
        rounds.go_on()


@checked(FAULTS, "dead-at-clean", "clean", "die", needs="processes")
@checked(FAULTS, "dead-at-abort", "abort", "die", needs="processes")
@checked(FAULTS, "stopped-at-clean", "clean", "freeze", needs="processes")
@checked(FAULTS, "stopped-at-abort", "abort", "freeze", needs="processes")
def gone_at_the_end(tested: TransportUnderTest, end: str, kind: str) -> None:
    """An engine that dies, or stops, after all was said keeps nobody from ending the round."""
    with Rounds(tested) as rounds:
        run = rounds.round()
        for phase in PHASES:
            error = run.phase(phase)
            NEXT_ROUND.unless(error is None, f"{phase} failed, though nothing was wrong: {error!r}")
        if kind == "die":
            rounds["b"].kill()
        else:
            rounds["b"].freeze(stop=True)
        try:
            rounds.end(end)
        finally:
            if kind == "freeze":
                rounds["b"].freeze(stop=False)
        rounds.go_on()


def _own(error: BaseException | None) -> bool:
    """Whether it is what happened in the engine: itself, in its causes, or at least in its words."""
    while error is not None:
        if isinstance(error, (InjectedError, EngineGone)) or "injected" in str(error):
            return True
        error = error.__cause__
    return False
