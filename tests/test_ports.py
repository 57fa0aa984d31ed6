"""Ports: what a transport may tell a round, in one phase of it."""

from collections.abc import Callable
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm.contract import Port
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineGone, PortClosed
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Participant
from weightsync.fsm.states import State
from weightsync.handlers.ports import RoundPort, Told
from weightsync.testing.desk import Desk

SESSION = Session("r", 1, 0)
Posted = list[tuple[Told, State]]
QUORUM = Policy(deadline=4.0, lease=20.0, on_engine_failure="quarantine", quorum=1)


def port_of(desk: Desk, phase: State) -> tuple[RoundPort, Posted]:
    """A port, and what it posted."""
    posted: Posted = []

    def post(event: Told, phase: State) -> None:
        posted.append((event, phase))

    return RoundPort(desk.driver, phase, SESSION, desk.clock, post), posted


def brought_to(phase: State) -> Desk:
    """A desk in that state, with a quorum of one."""
    desk = Desk(policy=QUORUM)
    {State.Locked: desk.locked, State.Broadcasting: desk.broadcasting, State.Awaiting: desk.awaiting}[phase]()
    return desk


PHASES = (State.Locked, State.Broadcasting, State.Awaiting)
E0 = Participant("e0")
GONE = EngineGone("gone")
WORDS: dict[str, tuple[Callable[[Port], None], Told, tuple[State, ...]]] = {
    "bucket_sent": (lambda port: port.bucket_sent(3), e.BucketSent(3), (State.Broadcasting,)),
    "all_sent": (lambda port: port.all_sent(), e.AllSent(), (State.Broadcasting,)),
    "acked": (lambda port: port.acked(E0, ()), e.EngineAcked(E0, ()), (State.Awaiting,)),
    "lost": (
        lambda port: port.lost(E0, GONE),
        e.EngineLost(E0),
        (State.Locked, State.Broadcasting, State.Awaiting),
    ),
    "progress": (lambda port: port.progress(), None, (State.Locked, State.Broadcasting, State.Awaiting)),
}
PHASES = (State.Locked, State.Broadcasting, State.Awaiting)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_port_fires_the_facts_of_its_phase_and_no_others(word: str, phase: State) -> None:
    """What belongs to another phase is refused by name, and nothing is posted."""
    say, event, phases = WORDS[word]
    port, posted = port_of(brought_to(phase), phase)
    if phase in phases:
        say(port)
        assert posted == [(event, phase)]
    else:
        with pytest.raises(PortClosed, match=f"port of {phase.name} does not fire"):
            say(port)
        assert posted == []


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_port_is_closed_when_the_round_moved_on(word: str, phase: State) -> None:
    """That is how a transport learns that it is cancelled; whatever it says then is refused."""
    desk = brought_to(phase)
    port, posted = port_of(desk, phase)
    closed = [port.closed]
    desk.told(e.Cancelled())
    closed.append(port.closed)
    assert closed == [False, True]
    with pytest.raises(PortClosed, match=f"round r is no longer {phase.name}"):
        WORDS[word][0](port)
    assert posted == []


def test_a_port_knows_the_round_and_its_deadline() -> None:
    """Seconds until the phase's end, which progress moves; 0 when it is over."""
    desk = brought_to(State.Broadcasting)
    port, _ = port_of(desk, State.Broadcasting)
    assert port.session is SESSION
    assert port.limit == pytest.approx(1.0)
    desk.clock.advance_to(0.75)
    assert port.limit == pytest.approx(0.25)
    desk.driver.progress(0.75)
    assert port.limit == pytest.approx(1.0)
    desk.clock.advance_to(9.0)
    assert port.limit == 0.0
    desk.told(e.Cancelled())
    assert port.limit == 0.0


def test_a_transport_is_woken_when_an_engine_is_gone_and_when_it_is_over() -> None:
    """Once for each change; at once if the port is closed already."""
    desk = brought_to(State.Broadcasting)
    port, _ = port_of(desk, State.Broadcasting)
    woken: list[tuple[Any, ...]] = []
    port.on_change(lambda: woken.append((port.closed, port.engines)))
    port.look()
    assert woken == []
    desk.told(e.EngineLost(E0, GONE), State.Broadcasting)
    port.look()
    port.look()
    assert woken == [(False, (Participant("e1"),))]
    desk.told(e.Cancelled())
    port.look()
    port.look()
    assert [closed for closed, _ in woken] == [False, True]
    port.on_change(lambda: woken.append(("late",)))
    assert woken[-1] == ("late",)


def test_a_phase_that_is_over_at_once_wakes_its_transport() -> None:
    """The round moves on before anybody has looked at the port: the transport must not wait for its limit."""
    desk = brought_to(State.Awaiting)
    port, _ = port_of(desk, State.Awaiting)
    woken: list[bool] = []
    port.on_change(lambda: woken.append(port.closed))
    desk.told(e.Cancelled())
    port.look()
    assert woken == [True]


def test_a_waker_that_raises_is_the_transports_error() -> None:
    """It does not end the thread that moves the round, and the other wakers get their turn."""
    desk = brought_to(State.Broadcasting)
    port, posted = port_of(desk, State.Broadcasting)
    port.look()
    woken: list[int] = []
    error = RuntimeError("in the waker")

    def broken() -> None:
        raise error

    port.on_change(broken)
    port.on_change(lambda: woken.append(1))
    desk.told(e.EngineLost(E0, GONE), State.Broadcasting)
    port.look()
    assert woken == [1]
    ((event, phase),) = posted
    assert isinstance(event, e.TransportFailed)
    assert event.error is error
    assert phase is State.Broadcasting
