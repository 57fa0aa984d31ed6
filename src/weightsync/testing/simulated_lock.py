"""The lock as one simulated round sees it: it asks the keeper, and asks again while it waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fsm.calls import Act, Call
from ..fsm.errors import LockError
from ..fsm.tickets import (
    Closed,
    Granted,
    NotHolder,
    Notice,
    Renewed,
    StaleEpoch,
    Ticket,
    TicketClosed,
    UnknownTicket,
    Waiting,
    answer_to,
)

if TYPE_CHECKING:
    from .simulation import Simulation

__all__ = ["SimulatedLock"]


class SimulatedLock:
    """Takes one round's calls to the keeper of its world.

    Args:
        simulation: the round's.
        rival: so many seconds another trainer holds the lock from now on.
    """

    def __init__(self, simulation: Simulation, rival: float) -> None:
        name = simulation.name
        self._simulation = simulation
        self._world = simulation.world
        self._keeper = simulation.world.keeper
        self.ticket = Ticket(f"t-{name}", simulation.owner, name)
        self._rival = Ticket(f"rival-{name}", "rival", "theirs")
        self.asking = False
        if rival:
            self._compete(rival)

    def work(self, call: Call, asked: float, epoch: int) -> None:
        """Carry out a call that was sent at ``asked``, in this epoch."""
        match call.act:
            case Act.acquire:
                self._acquire(call, asked)
            case Act.renew:
                self._renew(call, asked, epoch)
            case _:
                self._release(call, epoch)

    def stop_asking(self) -> None:
        """Nobody waits for the lock any more: the release was sent."""
        self.asking = False
        self._keeper.forget(self.ticket.id)

    # -- at the keeper ---------------------------------------------------------------------------------------

    def _acquire(self, call: Call, asked: float) -> None:
        self._stand(call, asked)
        self._told(call, self._keeper.move(self._world.book.request(self.ticket, self._now)))

    def _poll(self, call: Call, asked: float) -> None:
        try:
            self._stand(call, asked)
            self._told(call, self._keeper.move(self._world.book.poll(self.ticket.id, self._now)))
        except LockError as error:
            self.stop_asking()
            self._simulation.answer(call, error=error)

    def _stand(self, call: Call, asked: float) -> None:
        def answer(granted: Granted) -> None:
            self.asking = False
            self._simulation.answer(call, (granted.epoch, granted.end(asked)))

        if self.asking:
            self._keeper.stand(self.ticket.id, answer)

    def _told(self, call: Call, notices: tuple[Notice, ...]) -> None:
        """A ticket that is over is an error; one that waits is told who holds the lock."""
        answer = answer_to(self.ticket.id, notices)
        if isinstance(answer, Closed):
            self.stop_asking()
            self._simulation.answer(call, error=TicketClosed(f"{self.ticket} is over"))
        elif isinstance(answer, Waiting):
            self._simulation.told(f"{call}: waiting", lambda: self._waits(call, answer))

    def _renew(self, call: Call, asked: float, epoch: int) -> None:
        notices = self._keeper.move(self._world.book.renew(self.ticket.id, epoch, self._now))
        renewed = next(notice for notice in notices if isinstance(notice, Renewed))
        self._simulation.answer(call, renewed.end(asked))

    def _release(self, call: Call, epoch: int) -> None:
        book = self._world.book
        try:
            if epoch:
                self._keeper.move(book.release(self.ticket.id, epoch, self._now))
            else:
                self._keeper.move(book.cancel(self.ticket, self._now))
        except (UnknownTicket, TicketClosed):
            pass  # each of these proves that this ticket does not hold the lock
        except (NotHolder, StaleEpoch):
            self._keeper.move(book.cancel(self.ticket, self._now))
        self._simulation.answer(call)

    # -- at the trainer --------------------------------------------------------------------------------------

    def ask(self) -> None:
        """The request is on its way."""
        self.asking = True

    def _waits(self, call: Call, answer: Waiting) -> None:
        """Not yet: the question stands for a third of a lease, then it is asked anew."""
        self._simulation.alarm(self._third, f"{call}: ask again", lambda: self._ask_again(call))
        self._simulation.waits(answer)

    def _ask_again(self, call: Call) -> None:
        asked = self._now
        if self.asking:
            self._simulation.say("lock", f"{call}: wait", lambda: self._poll(call, asked))

    def _compete(self, seconds: float) -> None:
        self._keeper.move(self._world.book.request(self._rival, self._now))
        for beat in range(1, int(seconds / self._third) + 1):
            self._simulation.at(beat * self._third, lambda: self._rival_does("renew"))
        self._simulation.at(seconds, lambda: self._rival_does("release"))

    def _rival_does(self, what: str) -> None:
        holder = self._world.book.holder
        if holder and holder.ticket == self._rival:
            self._keeper.move(getattr(self._world.book, what)(self._rival.id, holder.epoch, self._now))

    @property
    def _now(self) -> float:
        return self._world.clock.now()

    @property
    def _third(self) -> float:
        return self._world.book.lease / 3
