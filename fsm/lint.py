"""The linter: does a log tell of rounds that kept their promises?

    linter = Linter()
    for place, record in the log:  linter.feed(record, place)  -> findings
    linter.end()                                               -> findings

Two things are held against each record. The *rules*, of one round (:mod:`.lint_rules`, :mod:`.lint_calls`,
:mod:`.lint_course`) and of many (:mod:`.lint_between`), ask for the promises P1 to P12, without the table;
*replay* asks whether the running table allows it. As a rule, a record that breaks a promise does not replay
either; then only the promise is told, which says more.

Records come in the order of their files, several files by time. A round is remembered while it is under way,
and a little longer; so a log may be as long as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .errors import ReplayMismatch
from .journal import follow
from .lint_between import BETWEEN_RULES, Books, Recent, Theme, moments_of
from .lint_calls import CALL_RULES
from .lint_course import COURSE_RULES
from .lint_rules import ANY, PROOF_RULES, TRANSITION, Rule
from .lint_story import Place, Story, key_of, told_of
from .record import SCHEMA, Record
from .reducer import Position, Step
from .table import ROUND

__all__ = ["REPLAY", "RULES", "Finding", "Linter"]

RULES: tuple[Rule | Theme, ...] = (*PROOF_RULES, *CALL_RULES, *COURSE_RULES, *BETWEEN_RULES)
"""Every rule there is."""

REPLAY = "replay"
"""In the place of a promise: the log says something else than the table."""

_OVER = 256
_UNDER_WAY = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    Args:
        promise: ``P1`` to ``P12``, or ``replay``.
        round: in which round; empty if it is about the file.
    """

    file: str
    line: int
    promise: str
    round: str
    what: str

    def __str__(self) -> str:
        where = f"round {self.round}: " if self.round else ""
        return f"{self.file}:{self.line}: {self.promise}: {where}{self.what}"


@dataclass(slots=True)
class _Reading:
    """One round while it is read: what it said, where replay is, and whether something was found in it."""

    story: Story
    position: Position | None = None
    seq: int = 1
    follows: bool = True
    flawed: bool = False


class Linter:
    """Reads records and says what is wrong with them. One thread at a time.

    Args:
        rules: all of them by default.
    """

    def __init__(self, rules: Iterable[Rule | Theme] = RULES) -> None:
        asked = tuple(rules)
        self._rules = [rule for rule in asked if isinstance(rule, Rule)]
        self._by_key: dict[tuple[str, bool], tuple[Rule, ...]] = {}
        self._themes = [theme for theme in asked if isinstance(theme, Theme)]
        self._books = Books()
        self._under_way: Recent[str, _Reading] = Recent(_UNDER_WAY)
        self._over: Recent[str, _Reading] = Recent(_OVER)
        self._told: set[tuple[str, ...]] = set()
        self.rounds = self.flawed = self.unfinished = 0

    # -- reading ---------------------------------------------------------------------------------------------

    def feed(self, record: Record, place: Place) -> list[Finding]:
        """The next record of the log, and what is wrong with it."""
        if record.schema != SCHEMA or record.table != ROUND.digest:
            return self._foreign(record, place)
        reading = self._under_way.get(record.round) or self._over.get(record.round)
        if record.event == "opened" and (reading is None or record.seq == 0):
            return self._opened(record, place)
        if reading is None:
            return self._headless(record, place)
        try:
            found = list(self._next(reading, record, place))
        except Exception as error:  # noqa: BLE001 - whatever stands in a log, it is the log that is to blame
            reading.follows = False
            found = [
                self._finding(reading, place, REPLAY, f"it makes no sense: {type(error).__name__}: {error}")
            ]
        if reading.story.result and record.round in self._under_way:
            del self._under_way[record.round]
            self._over.put(record.round, reading)
        return found

    def end(self) -> list[Finding]:
        """The log is over: what is wrong with rounds that are not."""
        found: list[Finding] = []
        for reading in self._under_way.values():
            self.unfinished += not reading.story.over
            found += self._leave(reading)
        return found

    def _leave(self, reading: _Reading) -> list[Finding]:
        """Nothing more is expected of this round."""
        if reading.story.over:
            return []
        reading.story.ended = True
        return list(self._between("end", reading))

    def _opened(self, record: Record, place: Place) -> list[Finding]:
        self.rounds += 1
        known = self._under_way.pop(record.round, None)
        try:
            reading = _Reading(Story.of(record, place))
        except Exception as error:  # noqa: BLE001 - as above
            self.flawed += 1
            self._told.add((place[0], record.round))
            what = f"the opening is incomplete: {type(error).__name__}: {error}"
            return [Finding(*place, REPLAY, record.round, what)]
        self.unfinished += known is not None and not known.story.over
        self._over.pop(record.round, None)
        if len(self._under_way) >= _UNDER_WAY:
            _, oldest = self._under_way.popitem(last=False)
            self.unfinished += not oldest.story.over
        self._under_way.put(record.round, reading)
        self._books.begin(reading.story)
        return [*self._between("opened", reading), *self._replay(reading, record, place)]

    def _next(self, reading: _Reading, record: Record, place: Place) -> Iterator[Finding]:
        story, key, moves = reading.story, key_of(record), record.event == "transition"
        yield from self._gap(reading, record, place)
        for rule in self._asked(key, moves=moves):
            for what in rule.check(story, record):
                yield self._finding(reading, place, rule.promise, what)
        was_over = story.over
        story.take(record, place)
        if key == "Published" and moves:
            newest = self._books.published.get(story.ledger_name)
            if newest is not None and (newest.epoch or 0) > (story.epoch or 0):
                story.late = place
        for moment in moments_of(story, key, error=record.error is not None, was_over=was_over):
            if moment == "over":
                story.ended = True
            yield from self._between(moment, reading)
        yield from self._replay(reading, record, place)

    def _gap(self, reading: _Reading, record: Record, place: Place) -> Iterator[Finding]:
        """Say what is missing before this record. What follows may be wrong for that reason alone."""
        wanted, reading.seq = reading.seq, record.seq + 1
        if record.seq == wanted:
            return
        reading.follows = False
        what = f"record {record.seq} comes after record {wanted - 1}"
        if record.seq > wanted:
            many = f"records {wanted} to {record.seq - 1} are"
            what = f"{many if record.seq > wanted + 1 else f'record {wanted} is'} missing"
        yield self._finding(reading, place, REPLAY, what)

    def _asked(self, key: str, *, moves: bool) -> tuple[Rule, ...]:
        """The rules that are asked about a record of this kind."""
        if (key, moves) not in self._by_key:
            words = {key, ANY, TRANSITION} if moves else {key, ANY}
            found = tuple(rule for rule in self._rules if words.intersection(rule.keys))
            if len(self._by_key) > 1000:  # a log may call its records anything
                return found
            self._by_key[key, moves] = found
        return self._by_key[key, moves]

    def _between(self, moment: str, reading: _Reading) -> Iterator[Finding]:
        """Hold the round against others, and write down what came of it."""
        for theme in self._themes:
            if moment in theme.moments:
                for (file, line), round, what in theme.look(self._books, reading.story):
                    self._blame(round)
                    yield Finding(file, line, theme.promise, round, what)
        self._books.learn(moment, reading.story)

    # -- the table -------------------------------------------------------------------------------------------

    def _replay(self, reading: _Reading, record: Record, place: Place) -> Iterator[Finding]:
        """Where replay differs; only if no promise was broken before, which says more."""
        if not reading.follows:
            return
        try:
            if record.event in ("opened", "transition"):  # of the others, all that replay asks has been asked
                followed = follow(reading.position, record.to_json(), record.seq)
                reading.position = followed.after if isinstance(followed, Step) else followed
            elif record.event == "result" and reading.position is not None:
                _same_result(reading.position, record)
        except Exception as error:  # noqa: BLE001 - as above
            reading.follows = False
            if not reading.flawed:
                ours = isinstance(error, ReplayMismatch)
                what = str(error) if ours else f"it cannot be replayed: {type(error).__name__}: {error}"
                yield self._finding(reading, place, REPLAY, what.removeprefix(f"round {record.round}, "))

    # -- what is wrong ---------------------------------------------------------------------------------------

    def _finding(self, reading: _Reading, place: Place, promise: str, what: str) -> Finding:
        self.flawed += not reading.flawed
        reading.flawed = True
        return Finding(*place, promise, reading.story.round, what)

    def _blame(self, round: str) -> None:
        """Count a round in which something was found, if it is still remembered."""
        reading = self._under_way.get(round) or self._over.get(round)
        if reading is not None and not reading.flawed:
            reading.flawed = True
            self.flawed += 1

    def _foreign(self, record: Record, place: Place) -> list[Finding]:
        """A record of another table or schema cannot be judged; said once for each of them."""
        what = (
            f"made by schema {record.schema} and table {record.table}; this is schema {SCHEMA} and table "
            f"{ROUND.digest}: the weightsync that wrote it can judge it"
        )
        return self._once(place, what, "", place[0], str(record.schema), record.table)

    def _headless(self, record: Record, place: Place) -> list[Finding]:
        """A record of a round whose beginning is not there; said once for each."""
        if record.round in self._books.known:
            return []  # it was over long ago, and this is a late word about it
        what = (
            f"it begins with record {record.seq}: what came before it stands in another file, or is missing"
        )
        found = self._once(place, what, record.round, place[0], record.round)
        self.rounds += bool(found)
        self.flawed += bool(found)
        return found

    def _once(self, place: Place, what: str, round: str, *words: str) -> list[Finding]:
        if words in self._told:
            return []
        if len(self._told) < _UNDER_WAY:
            self._told.add(words)
        return [Finding(*place, REPLAY, round, what)]


def _same_result(position: Position, record: Record) -> None:
    """Refuse a result that differs from what the round comes to.

    Raises:
        ReplayMismatch: it does.
    """
    facts, told = position.facts, told_of(record)
    engines = {engine.id: facts.disposition(engine).name for engine in facts.roster}
    for name, found in (("outcome", facts.outcome.name), ("engines", engines)):
        if told.get(name) != found:
            raise ReplayMismatch(f"record {record.seq}: {name} is {told.get(name)}, replay gives {found}")
