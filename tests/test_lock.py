"""The lock as a value: turns, epochs, leases, and one closing answer for each request."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.fsm.lock import (
    TOMBSTONES,
    Closed,
    Ending,
    Granted,
    LockBook,
    LockError,
    NotHolder,
    Notice,
    Renewed,
    StaleEpoch,
    Ticket,
    UnknownTicket,
    Waiting,
    answer_to,
)

LEASE = 10.0
A, B, C = (Ticket(name, f"trainer-{name}", f"round-{name}") for name in "abc")


@dataclass
class Keeper:
    """A book with a clock that is turned by hand."""

    book: LockBook = field(default_factory=lambda: LockBook(LEASE))
    now: float = 0.0

    def request(self, ticket: Ticket) -> Notice:
        """Join the queue."""
        return self._take(ticket.id, *self.book.request(ticket, self.now))

    def poll(self, ticket: Ticket) -> Notice:
        """Ask how it stands."""
        return self._take(ticket.id, *self.book.poll(ticket.id, self.now))

    def renew(self, ticket: Ticket, epoch: int) -> Notice:
        """Count the lease anew."""
        return self._take(ticket.id, *self.book.renew(ticket.id, epoch, self.now))

    def release(self, ticket: Ticket, epoch: int | None) -> Notice:
        """Give back or cancel."""
        return self._take(ticket.id, *self.book.release(ticket.id, epoch, self.now))

    def turn(self, seconds: float) -> tuple[Notice, ...]:
        """Let time pass."""
        self.now += seconds
        self.book, notices = self.book.expire(self.now)
        return notices

    def _take(self, ticket_id: str, book: LockBook, notices: tuple[Notice, ...]) -> Notice:
        self.book = book
        return answer_to(ticket_id, notices)


@pytest.fixture
def keeper() -> Keeper:
    """A free lock at time 0."""
    return Keeper()


def test_a_free_lock_is_granted_at_once(keeper: Keeper) -> None:
    """The first request gets epoch 1 and a whole lease."""
    assert keeper.request(A) == Granted(1, LEASE, A)


def test_a_waiter_is_told_who_holds_the_lock_and_its_place(keeper: Keeper) -> None:
    """Owner, round, epoch and since when; and how many come first."""
    keeper.turn(2)
    keeper.request(A)
    keeper.turn(3)
    keeper.request(B)
    answer = keeper.request(C)
    assert isinstance(answer, Waiting)
    assert answer.place == 2
    holder = answer.holder
    assert holder is not None
    assert (holder.owner, holder.round, holder.epoch) == ("trainer-a", "round-a", 1)
    assert (holder.since, holder.seconds) == (2.0, 3.0)
    assert str(holder) == "trainer-a (round round-a, epoch 1, for 3.0 s)"


def test_turns_are_taken_in_the_order_of_the_requests(keeper: Keeper) -> None:
    """A release grants the lock to the first in the queue, whoever polls first."""
    keeper.request(A)
    keeper.request(B)
    keeper.request(C)
    keeper.poll(C)
    book, notices = keeper.book.release(A.id, 1, keeper.now)
    assert notices == (Closed(Ending.RELEASED, 1, A), Granted(2, LEASE, B))
    keeper.book = book
    assert keeper.release(B, 2) == Closed(Ending.RELEASED, 2, B)
    assert keeper.poll(C) == Granted(3, LEASE, C)


def test_the_same_request_again_does_not_queue_twice(keeper: Keeper) -> None:
    """A request whose answer got lost may be repeated: it says how the ticket stands."""
    keeper.request(A)
    keeper.request(B)
    assert keeper.request(A) == Granted(1, LEASE, A)
    again = keeper.request(B)
    assert isinstance(again, Waiting)
    assert again.place == 1
    assert len(keeper.book.queue) == 1


def test_an_id_belongs_to_the_owner_that_came_with_it(keeper: Keeper) -> None:
    """The id of another owner's ticket is no way in."""
    keeper.request(A)
    forged = Ticket(A.id, "stranger", A.round)
    before = keeper.book
    with pytest.raises(NotHolder, match=r"ticket a of stranger .* was not issued"):
        keeper.request(forged)
    with pytest.raises(NotHolder):
        keeper.book.recognise(forged)
    assert keeper.book == before
    keeper.book.recognise(A)


def test_renewing_extends_the_lease(keeper: Keeper) -> None:
    """The lease counts from the renewal."""
    keeper.request(A)
    keeper.turn(6)
    assert keeper.renew(A, 1) == Renewed(1, LEASE, A)
    keeper.turn(9)
    assert keeper.poll(A) == Granted(1, 1.0, A)


def test_polling_does_not_extend_a_grant(keeper: Keeper) -> None:
    """A holder that only asks how it stands still runs out."""
    keeper.request(A)
    keeper.turn(9)
    keeper.poll(A)
    assert keeper.turn(1) == (Closed(Ending.EXPIRED, 1, A),)


def test_an_expired_holder_makes_room_at_that_moment(keeper: Keeper) -> None:
    """The next waiter is granted by the same step, with a higher epoch and a whole lease."""
    keeper.request(A)
    keeper.turn(5)
    keeper.request(B)
    assert keeper.turn(4.5) == ()
    assert keeper.book.next_expiry() == 10.0
    assert keeper.turn(0.5) == (Closed(Ending.EXPIRED, 1, A), Granted(2, LEASE, B))


def test_a_late_renewal_is_refused_even_if_nobody_waits(keeper: Keeper) -> None:
    """Once over, a lease stays over: the holder cannot tell whether somebody had the lock meanwhile."""
    keeper.request(A)
    keeper.now = LEASE
    with pytest.raises(NotHolder, match=r"ticket a of trainer-a .* cannot renew: it is expired, epoch 1"):
        keeper.renew(A, 1)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda k: k.renew(B, 1), NotHolder, "it waits for trainer-a; stop, and request anew"),
        (lambda k: k.release(B, 1), NotHolder, "it waits for trainer-a; cancel it instead"),
        (lambda k: k.renew(A, 0), StaleEpoch, "cannot renew epoch 0: it holds epoch 1"),
        (lambda k: k.release(A, 0), StaleEpoch, "cannot release epoch 0: it holds epoch 1"),
        (lambda k: k.release(A, 2), StaleEpoch, "cannot release epoch 2"),
        (lambda k: k.poll(C), UnknownTicket, "no ticket c here"),
        (lambda k: k.renew(C, 1), UnknownTicket, "no ticket c here"),
        (lambda k: k.release(C, None), UnknownTicket, "no ticket c here"),
    ],
)
def test_strangers_and_stale_epochs_change_nothing(
    keeper: Keeper, act: Callable[[Keeper], Notice], error: type[LockError], message: str
) -> None:
    """Whoever does not hold the lock can neither renew nor release it; the message is one line."""
    keeper.request(A)
    keeper.request(B)
    before = keeper.book
    with pytest.raises(error, match=message) as caught:
        act(keeper)
    assert "\n" not in str(caught.value)
    assert keeper.book == before


def test_a_cancelled_waiter_is_never_granted(keeper: Keeper) -> None:
    """It leaves the queue; the next one moves up."""
    keeper.request(A)
    keeper.request(B)
    keeper.request(C)
    assert keeper.release(B, None) == Closed(Ending.CANCELLED, None, B)
    assert keeper.book.release(A.id, 1, 0.0)[1][-1] == Granted(2, LEASE, C)


def test_a_grant_that_crosses_a_cancel_is_handed_back(keeper: Keeper) -> None:
    """A cancel closes the ticket even if it has become the holder meanwhile."""
    keeper.request(A)
    keeper.request(B)
    keeper.release(A, 1)
    assert keeper.release(B, None) == Closed(Ending.HANDED_BACK, 2, B)
    assert keeper.book.holder is None


def test_a_grant_made_by_the_very_cancel_is_handed_back(keeper: Keeper) -> None:
    """The time of the cancel is the time at which the holder expires: the answer is still the closing one."""
    keeper.request(A)
    keeper.turn(1)
    keeper.request(B)
    keeper.now = LEASE
    assert keeper.release(B, None) == Closed(Ending.HANDED_BACK, 2, B)


def test_a_cancel_may_overtake_its_request(keeper: Keeper) -> None:
    """The request that arrives later finds itself closed and is never granted."""
    book, notices = keeper.book.cancel(A, 0.0)
    assert notices == (Closed(Ending.CANCELLED, None, A),)
    keeper.book = book
    assert keeper.request(A) == Closed(Ending.CANCELLED, None, A, again=True)
    assert keeper.request(B) == Granted(1, LEASE, B)


def test_cancelling_closes_whatever_the_ticket_has_become(keeper: Keeper) -> None:
    """Waiting, holding or over; only its owner may do so."""
    keeper.request(A)
    keeper.request(B)
    with pytest.raises(NotHolder):
        keeper.book.cancel(Ticket(A.id, "stranger", A.round), 0.0)
    for ticket, answer in (
        (B, Closed(Ending.CANCELLED, None, B)),
        (A, Closed(Ending.HANDED_BACK, 1, A)),
        (A, Closed(Ending.HANDED_BACK, 1, A, again=True)),
    ):
        keeper.book, notices = keeper.book.cancel(ticket, 0.0)
        assert notices == (answer,)


def test_releasing_twice_says_so_again(keeper: Keeper) -> None:
    """The ticket does not hold the lock, which is as true the second time."""
    keeper.request(A)
    keeper.release(A, 1)
    keeper.request(B)
    assert keeper.release(A, 1) == Closed(Ending.RELEASED, 1, A, again=True)
    assert keeper.release(A, None) == Closed(Ending.RELEASED, 1, A, again=True)
    assert keeper.poll(B) == Granted(2, LEASE, B)


def test_releasing_after_the_lease_ran_out_is_answered(keeper: Keeper) -> None:
    """An expired holder may still give back, and learns that its lease was over."""
    keeper.request(A)
    keeper.now = LEASE + 1
    assert keeper.release(A, 1) == Closed(Ending.EXPIRED, 1, A)
    assert keeper.release(A, 1) == Closed(Ending.EXPIRED, 1, A, again=True)


def test_a_closed_ticket_is_fenced_by_its_epoch(keeper: Keeper) -> None:
    """Giving back an epoch that the ticket never had is refused, closed or not."""
    keeper.request(A)
    keeper.release(A, 1)
    with pytest.raises(StaleEpoch, match="cannot release epoch 2: it is released, epoch 1"):
        keeper.release(A, 2)


def test_a_closed_ticket_cannot_request_again(keeper: Keeper) -> None:
    """No grant follows a closing answer, also not when a delayed request of the same ticket arrives."""
    keeper.request(A)
    keeper.release(A, 1)
    assert keeper.request(A) == Closed(Ending.RELEASED, 1, A, again=True)
    assert keeper.book.holder is None


def test_a_waiter_that_does_not_ask_is_taken_for_dead(keeper: Keeper) -> None:
    """The lock is not handed to a waiter that has been silent for one lease."""
    keeper.request(A)
    keeper.request(B)
    keeper.request(C)
    keeper.turn(6)
    keeper.renew(A, 1)
    keeper.poll(C)
    assert keeper.turn(4) == (Closed(Ending.ABANDONED, None, B),)
    keeper.release(A, 1)
    assert keeper.poll(C) == Granted(2, LEASE, C)
    assert keeper.poll(B) == Closed(Ending.ABANDONED, None, B, again=True)


def test_next_expiry_is_the_earliest_of_holder_and_waiters(keeper: Keeper) -> None:
    """A keeper that sleeps until then misses nothing; an idle lock has none."""
    assert keeper.book.next_expiry() is None
    keeper.request(A)
    keeper.turn(2)
    keeper.request(B)
    assert keeper.book.next_expiry() == 10.0
    keeper.renew(A, 1)
    assert keeper.book.next_expiry() == 12.0


def test_epochs_go_on_after_a_restart() -> None:
    """The first grant of a restored book is above every earlier one, and old tickets are unknown."""
    keeper = Keeper(LockBook.restore(41, lease=LEASE))
    with pytest.raises(UnknownTicket, match="the keeper restarted"):
        keeper.renew(A, 41)
    assert keeper.request(B) == Granted(42, LEASE, B)


def test_a_restarted_keeper_may_wait_out_the_forgotten_holder() -> None:
    """Nothing is granted before ``not_before``, which counts as the next expiry."""
    keeper = Keeper(LockBook.restore(41, lease=LEASE, not_before=7.0))
    assert keeper.request(A) == Waiting(None, 1, A)
    assert keeper.book.next_expiry() == 7.0
    assert keeper.turn(7) == (Granted(42, LEASE, A),)


def test_nothing_is_granted_above_the_ceiling() -> None:
    """A keeper that has not written the next epoch down yet cannot grant it."""
    keeper = Keeper(LockBook(LEASE, epoch=3, ceiling=3))
    assert keeper.request(A) == Waiting(None, 1, A)
    assert keeper.book.exhausted()
    assert keeper.turn(1) == ()


def test_only_so_many_tombstones_are_kept(keeper: Keeper) -> None:
    """A book does not grow with the rounds; the oldest ticket is forgotten, and then unknown."""
    tickets = [Ticket(str(number), "owner", str(number)) for number in range(TOMBSTONES + 1)]
    for epoch, ticket in enumerate(tickets, start=1):
        keeper.request(ticket)
        keeper.release(ticket, epoch)
    assert len(keeper.book.closed) == TOMBSTONES
    with pytest.raises(UnknownTicket):
        keeper.release(tickets[0], 1)
    assert keeper.release(tickets[1], 2) == Closed(Ending.RELEASED, 2, tickets[1], again=True)


@pytest.mark.parametrize("lease", [0.0, -1.0, float("inf"), float("nan")])
def test_a_lease_is_a_positive_number(lease: float) -> None:
    """A lock that is never given back by time alone is refused."""
    with pytest.raises(LockError, match="a lease is a positive number of seconds"):
        LockBook(lease)


def test_status_lists_the_holder_and_the_queue(keeper: Keeper) -> None:
    """Anybody may look, which changes nothing."""
    keeper.request(A)
    keeper.request(B)
    status = keeper.book.status(4.0)
    assert status.holder is not None
    assert (status.holder.owner, status.holder.seconds) == ("trainer-a", 4.0)
    assert (status.epoch, status.lease, status.waiting) == (1, LEASE, (B,))


def test_a_book_is_a_plain_value(keeper: Keeper) -> None:
    """It can be sent to another process and compared."""
    keeper.request(A)
    keeper.request(B)
    assert pickle.loads(pickle.dumps(keeper.book)) == keeper.book


@given(
    skew=st.floats(-1e3, 1e3),
    there=st.floats(0, 20),
    stood=st.floats(0, 20),
    renewed=st.booleans(),
)
def test_the_holder_stops_before_the_keeper(skew: float, there: float, stood: float, renewed: bool) -> None:
    """Whatever the clocks show and however slow the question was, the holder's end is not the later one."""
    asked = 0.0
    arrived = asked + there
    keeper = Keeper(now=arrived)
    keeper.request(A)
    keeper.now = arrived + stood if stood < LEASE else arrived
    answer = keeper.renew(A, 1) if renewed else keeper.poll(A)
    assert isinstance(answer, Granted | Renewed)
    if isinstance(answer, Granted):
        answer = Granted(answer.epoch, answer.remaining, A, waited=keeper.now - arrived)
    grant = keeper.book.holder
    assert grant is not None
    assert answer.end(asked + skew) - skew <= grant.until + 1e-9


# ------------------------------------------------------------------------------ any sequence of any questions


class Watch:
    """Holds what the keeper says against what it said before."""

    def __init__(self) -> None:
        self.book = LockBook(LEASE)
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.waiting: list[Ticket] = []  # in the order of the requests
        self.holder: Ticket | None = None
        self.granted: list[Ticket] = []
        self.closed: set[Ticket] = set()
        self.epoch = 0

    def request(self) -> None:
        """Ask with a new ticket."""
        ticket = Ticket(f"t{len(self.tickets)}", "owner", "round")
        self.tickets.append(ticket)
        self.waiting.append(ticket)
        self.ask(LockBook.request, ticket)

    def ask(self, move: Callable[..., tuple[LockBook, tuple[Notice, ...]]], *question: object) -> None:
        """Ask anything; a refusal changes nothing."""
        try:
            self.book, notices = move(self.book, *question, self.now)
        except LockError:
            return
        for notice in notices:
            self.see(notice)
        assert (self.book.holder.ticket if self.book.holder else None) == self.holder
        assert [waiter.ticket for waiter in self.book.queue] == self.waiting
        assert self.holder is not None or not self.waiting, "the lock is free while somebody waits"

    def see(self, notice: Notice) -> None:
        """Compare one notice with all those before."""
        ticket = notice.ticket
        match notice:
            case Closed(again=True):
                assert ticket in self.closed
            case Closed():
                assert ticket not in self.closed, "a second closing answer"
                self.closed.add(ticket)
                self.waiting = [waiter for waiter in self.waiting if waiter != ticket]
                self.holder = None if self.holder == ticket else self.holder
            case Granted(epoch=epoch) if self.holder == ticket:
                assert epoch == self.epoch
            case Granted(epoch=epoch):
                assert self.holder is None, "two holders"
                assert ticket not in self.closed, "a grant after the closing answer"
                assert ticket == self.waiting.pop(0), "out of turn"
                assert epoch > self.epoch
                self.holder, self.epoch = ticket, epoch
                self.granted.append(ticket)
            case Renewed():
                assert ticket == self.holder
            case Waiting(place=place):
                assert self.waiting[place - 1] == ticket

    def finish(self) -> None:
        """Let everybody who still lives have its turn."""
        for ticket in list(self.waiting):
            self.ask(LockBook.poll, ticket.id)
        expected = [*self.granted, *self.waiting]
        for _ in expected:
            self.now += LEASE / 4
            for ticket in list(self.waiting):
                self.ask(LockBook.poll, ticket.id)
            if self.holder is not None:
                self.ask(LockBook.release, self.holder.id, self.epoch)
        assert self.granted == expected, "a live waiter was passed over"
        assert self.book.holder is None


NUMBER = st.integers(0, 7)
OFFSET = st.integers(-1, 1)  # from the epoch that is current
QUESTION = st.one_of(
    st.tuples(st.just("request")),
    st.tuples(st.just("turn"), st.sampled_from([0, 1, 3, 5, 10, 11])),
    st.tuples(st.just("poll"), NUMBER),
    st.tuples(st.just("cancel"), NUMBER),
    st.tuples(st.just("renew"), NUMBER, OFFSET),
    st.tuples(st.just("release"), NUMBER, OFFSET),
)


@given(st.lists(QUESTION, max_size=60))
def test_no_sequence_of_questions_breaks_the_lock(questions: list[tuple[Any, ...]]) -> None:
    """One holder, rising epochs, turns in order, one closing answer, no grant after it, a turn for all."""
    watch = Watch()
    for what, *rest in questions:
        if what == "request":
            watch.request()
        elif what == "turn":
            watch.now += rest[0]
            watch.ask(LockBook.expire)
        elif watch.tickets:
            ticket_id = watch.tickets[rest[0] % len(watch.tickets)].id
            match what:
                case "poll":
                    watch.ask(LockBook.poll, ticket_id)
                case "cancel":
                    watch.ask(LockBook.release, ticket_id, None)
                case "renew":
                    watch.ask(LockBook.renew, ticket_id, watch.epoch + rest[1])
                case "release":
                    watch.ask(LockBook.release, ticket_id, watch.epoch + rest[1])
    watch.finish()
