"""The lock of a simulated round: a real ``LockBook``, and the questions that stand before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fsm.calls import Act, Call
from ..fsm.lock import LockBook
from ..fsm.tickets import Closed, Granted, Notice, Renewed, Ticket, TicketClosed, Waiting, answer_to

if TYPE_CHECKING:
    from .simulation import Simulation

__all__ = ["SimulatedLock"]


class SimulatedLock:
    """Takes one round's calls to the book of its world.

    Args:
        simulation: the round's.
        rival: so many seconds another trainer holds the lock from now on.
    """

    def __init__(self, simulation: Simulation, rival: float) -> None:
        name = simulation.name
        self._simulation = simulation
        self._world = simulation.world
        self._ticket = Ticket(f"t-{name}", "trainer", name)
        self._rival = Ticket(f"rival-{name}", "rival", "theirs")
        self._question: tuple[Call, float] | None = None
        if rival:
            self._compete(rival)

    def work(self, call: Call, asked: float) -> None:
        """Carry out a call that was sent at ``asked``."""
        match call.act:
            case Act.acquire:
                self._acquire(call, asked)
            case Act.renew:
                self._renew(call, asked)
            case _:
                self._release(call)

    def stop_asking(self) -> None:
        """Nobody waits for the lock any more: the release was sent."""
        self._question = None

    def _acquire(self, call: Call, asked: float) -> None:
        self._question = (call, asked)
        self._told(call, self._move(self._world.book.request(self._ticket, self._now)))
        self._simulation.at(self._third, lambda: self._ask_again(call))

    def _ask_again(self, call: Call) -> None:
        """A question stands for a third of a lease, then it is asked anew."""
        if self._question is None:
            return
        self._question = (call, self._now)
        self._told(call, self._move(self._world.book.poll(self._ticket.id, self._now)))
        self._simulation.at(self._third, lambda: self._ask_again(call))

    def _told(self, call: Call, notices: tuple[Notice, ...]) -> None:
        """A ticket that is over is an error; one that waits is told who holds the lock."""
        answer = answer_to(self._ticket.id, notices)
        if isinstance(answer, Closed):
            self._question = None
            self._simulation.answer(call, error=TicketClosed(f"{self._ticket} is over"))
        elif isinstance(answer, Waiting):
            self._simulation.soon(lambda: self._simulation.waits(answer))

    def _renew(self, call: Call, asked: float) -> None:
        epoch = self._simulation.round.facts.epoch
        notices = self._move(self._world.book.renew(self._ticket.id, epoch, self._now))
        renewed = next(notice for notice in notices if isinstance(notice, Renewed))
        self._simulation.answer(call, renewed.end(asked))

    def _release(self, call: Call) -> None:
        epoch, book = self._simulation.round.facts.epoch, self._world.book
        if epoch:
            self._move(book.release(self._ticket.id, epoch, self._now))
        else:
            self._move(book.cancel(self._ticket, self._now))
        self._simulation.answer(call)

    def _move(self, moved: tuple[LockBook, tuple[Notice, ...]]) -> tuple[Notice, ...]:
        """Take a move of the book over; the question that stands is answered if the lock was granted."""
        self._world.book, notices = moved
        holder = self._world.book.holder
        if self._question and holder and holder.ticket == self._ticket:
            (call, asked), self._question = self._question, None
            granted = Granted(holder.epoch, holder.until - self._now, self._ticket, waited=self._now - asked)
            self._simulation.answer(call, (granted.epoch, granted.end(asked)))
        return notices

    def _compete(self, seconds: float) -> None:
        self._move(self._world.book.request(self._rival, self._now))
        for beat in range(1, int(seconds / self._third) + 1):
            self._simulation.at(beat * self._third, lambda: self._rival_does("renew"))
        self._simulation.at(seconds, lambda: self._rival_does("release"))

    def _rival_does(self, what: str) -> None:
        holder = self._world.book.holder
        if holder and holder.ticket == self._rival:
            self._move(getattr(self._world.book, what)(self._rival.id, holder.epoch, self._now))

    @property
    def _now(self) -> float:
        return self._world.clock.now()

    @property
    def _third(self) -> float:
        return self._world.book.lease / 3
