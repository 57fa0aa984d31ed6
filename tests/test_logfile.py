"""Reading state logs: all that can be read is read, and all that cannot is named."""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightsync import logfile
from weightsync.fsm.calls import Act
from weightsync.fsm.errors import LogUnreadable, WeightSyncError
from weightsync.fsm.record import KEYS, SCHEMA, Record
from weightsync.fsm.table import ROUND
from weightsync.handlers.log import StateLog
from weightsync.logfile import BadLine, LogEmpty, LogFile, RoundUnknown, read
from weightsync.testing.simulation import Fault, Simulation


@cache
def rounds() -> tuple[tuple[Record, ...], ...]:
    """The records of four rounds in one world: two good ones, one that failed, and one more."""
    faults: list[list[Fault]] = [[], [], [Fault(Act.broadcast, "raise", bucket=1)], []]
    found = []
    earlier = None
    for misfortunes in faults:
        simulation = Simulation(faults=misfortunes, earlier=earlier)
        simulation.run()
        simulation.settle()
        found.append(simulation.round.records())
        earlier = simulation
    return tuple(found)


@cache
def good_log() -> bytes:
    """The log of these rounds, as ``StateLog`` writes it."""
    return b"".join(line(record) for records in rounds() for record in records)


def line(record: Record) -> bytes:
    """One line."""
    return json.dumps(record.to_json()).encode() + b"\n"


def plain(records: tuple[Record, ...]) -> list[dict[str, Any]]:
    """Records as they come back from JSON."""
    found: list[dict[str, Any]] = json.loads(json.dumps([record.to_json() for record in records]))
    return found


def written(path: Path, content: bytes) -> LogFile:
    """The log in a file with that content."""
    path.write_bytes(content)
    return read(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to be written anew."""
    return tmp_path_factory.mktemp("log") / "state.jsonl"


# ---------------------------------------------------------------------------------------------- what is good


def test_a_log_comes_back_as_the_records_it_was_written_from(tmp_path: Path) -> None:
    """Round by round and record by record; and what is lost on the way to JSON was no plain value."""
    with StateLog(tmp_path / "state.jsonl") as log:
        for records in rounds():
            for record in records:
                log(record)
    found = read(tmp_path / "state.jsonl")
    assert [each.plain() for each in found.rounds] == [plain(records) for records in rounds()]
    assert [each.records[0] for each in found.rounds] == [records[0] for records in rounds()]
    assert [each.oddities for each in found.rounds] == [()] * 4
    assert (found.bad, found.bad_lines, found.lines) == (0, (), sum(map(len, rounds())))


def test_what_is_written_by_turns_is_put_together(path: Path) -> None:
    """Rounds of several processes stand between each other; each keeps its order."""
    first, second, *_ = rounds()
    mixed = [*zip(first, second, strict=False)]
    content = b"".join(line(record) for pair in mixed for record in pair)
    content += b"".join(map(line, [*first[len(mixed) :], *second[len(mixed) :]]))
    found = written(path, content)
    assert [each.plain() for each in found.rounds] == [plain(first), plain(second)]
    assert [each.line for each in found.rounds] == [1, 2]


def test_empty_lines_are_nothing(path: Path) -> None:
    """They are neither counted nor complained about."""
    found = written(path, b"\n" + good_log().replace(b"\n", b"\n\n") + b" \r\n")
    assert (len(found.rounds), found.bad) == (4, 0)
    assert found.lines == sum(map(len, rounds()))


def test_a_last_line_needs_no_end(path: Path) -> None:
    """It is whole without its line feed, too."""
    found = written(path, good_log().rstrip(b"\n"))
    assert (len(found.rounds), found.bad) == (4, 0)


def test_a_key_that_is_null_is_as_good_as_left_out(path: Path) -> None:
    """Whoever writes every key reads back the same."""
    records = rounds()[0]
    full = [{**dict.fromkeys(KEYS), **record.to_json()} for record in records]
    found = written(path, b"".join(json.dumps(each).encode() + b"\n" for each in full))
    assert (found.bad, found.rounds[0].plain()) == (0, plain(records))


def test_a_rounds_last_word_is_its_result(path: Path) -> None:
    """If it came to one."""
    found = written(path, good_log())
    assert [each.result and each.result.event for each in found.rounds] == ["result"] * 4
    cut = written(path, b"".join(map(line, rounds()[0][:-1])))
    assert cut.rounds[0].result is None


def test_reading_takes_one_look_at_each_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rounds: every line is parsed once, and none is looked for again."""
    parsed = 0
    parse = logfile._record

    def counting(text: bytes) -> Record:
        nonlocal parsed
        parsed += 1
        return parse(text)

    monkeypatch.setattr(logfile, "_record", counting)
    records = rounds()[0][:5]
    with path.open("wb") as file:
        for number in range(1000):
            file.writelines(
                json.dumps({**each.to_json(), "round": f"n{number}"}).encode() + b"\n" for each in records
            )
    found = read(path)
    assert (len(found.rounds), parsed) == (1000, 5000)


# ----------------------------------------------------------------------------------------------- what is bad


FIRST = good_log().index(b"\n")


@given(st.integers(FIRST, len(good_log())))
def test_a_log_that_is_cut_anywhere_gives_all_before_the_cut(path: Path, cut: int) -> None:
    """Every whole line is there, and so every whole round; the line that is not whole is named."""
    ends = [each.start() for each in re.finditer(b"\n", good_log())]
    whole = sum(end <= cut for end in ends)  # a line is whole without its line feed, too
    half = max(0, cut - ends[whole - 1] - 1)
    found = written(path, good_log()[:cut])
    told = [record for each in found.rounds for record in each.plain()]
    assert told == [record for records in rounds() for record in plain(records)][:whole]
    named = BadLine(whole + 1, f"cut off after {half} bytes, at the end of the file")
    assert found.bad_lines == ((named,) if half else ())


@given(st.integers(1, FIRST - 1))
def test_a_log_that_is_cut_in_its_first_line_holds_nothing(path: Path, cut: int) -> None:
    """It says so, and why."""
    with pytest.raises(LogEmpty, match=f"line 1: cut off after {cut} bytes, at the end of the file$"):
        written(path, good_log()[:cut])


@given(position=st.integers(0), byte=st.integers(0, 255))
@example(position=1, byte=0xFF)
@example(position=0, byte=ord("\n"))
def test_one_wrong_byte_costs_at_most_two_lines(path: Path, position: int, byte: int) -> None:
    """Whatever is overwritten, the other lines are read, and no value of the wrong kind comes through."""
    content = bytearray(good_log())
    position %= len(content)
    content[position] = byte
    found = written(path, bytes(content))
    total = sum(len(each.records) for each in found.rounds)
    assert total >= sum(map(len, rounds())) - 2
    assert found.bad <= 2
    for each in found.rounds:
        assert len(each.oddities) <= 4
        for record in each.records:
            assert all(type(record.to_json()[key]) in _KINDS[key] for key in record.to_json())


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(KEYS, (str,)),
    **dict.fromkeys(
        ("schema", "seq", "step", "epoch", "version", "attempt", "rank", "bucket", "bytes"), (int,)
    ),
    **dict.fromkeys(("time", "seconds"), (int, float)),
    "facts": (dict,),
}


BAD = {
    b"not JSON at all": "not JSON: Expecting value at place 1",
    b'{"time": 1.0,}': "not JSON: ",
    b"\xff\xfe": "not text: byte 0xff at place 1",
    b"[" * 100_000: "nested too deeply",
    b"[1]": f"no record of schema {SCHEMA}: it is no JSON object",
    b"17": f"no record of schema {SCHEMA}: it is no JSON object",
    b"{}": f"no record of schema {SCHEMA}: it has no time, event, table, round, seq",
    b'{"time": NaN}': f"no record of schema {SCHEMA}: NaN is no number",
    b'{"time": 1e999}': f"no record of schema {SCHEMA}: time is inf",
    b'{"time": "noon"}': f"no record of schema {SCHEMA}: time is 'noon'",
    b'{"seq": true}': f"no record of schema {SCHEMA}: seq is True",
    b'{"seq": 1.5}': f"no record of schema {SCHEMA}: seq is 1.5",
    b'{"bytes": 99999999999999999999}': f"no record of schema {SCHEMA}: bytes is 99999999999999999999",
    b'{"facts": [1]}': f"no record of schema {SCHEMA}: facts is [1]",
    b'{"round": 7}': f"no record of schema {SCHEMA}: round is 7",
    b'{"error": {"a": "%s"}}' % (b"x" * 99): f"no record of schema {SCHEMA}: error is {{'a': 'xxx",
}


@pytest.mark.parametrize(("text", "what"), BAD.items(), ids=[what[:40] for what in BAD.values()])
def test_a_bad_line_is_left_out_and_named(text: bytes, what: str, path: Path) -> None:
    """With its number, and with what is wrong with it in a few words."""
    first, *rest = good_log().splitlines(keepends=True)
    found = written(path, first + text + b"\n" + b"".join(rest))
    assert found.bad == 1
    (bad,) = found.bad_lines
    assert bad.number == 2
    assert bad.what.startswith(what)
    assert len(str(bad)) < 120
    assert [each.plain() for each in found.rounds] == [plain(records) for records in rounds()]


def test_a_missing_line_is_noticed_in_its_round(path: Path) -> None:
    """What a round's records do not say is said about them."""
    lines = good_log().splitlines(keepends=True)
    found = written(path, b"".join([lines[0], *lines[3:]]))
    assert found.rounds[0].oddities == ("records 1 to 2 are missing",)
    assert [each.oddities for each in found.rounds[1:]] == [()] * 3
    again = written(path, b"".join([lines[0], lines[1], lines[1], *lines[3:]]))
    assert again.rounds[0].oddities == ("record 1 comes after record 1", "record 2 is missing")


def test_a_round_of_another_make_is_read_and_says_so(path: Path) -> None:
    """A newer schema and an older table: as much as is known is read, and neither is taken for ours."""
    records = rounds()[0]
    newer = [{**record.to_json(), "schema": 7, "mood": "good"} for record in records]
    older = [{**record.to_json(), "round": "old", "table": "0123456789abcdef"} for record in records]
    nameless = [{**record.to_json(), "round": "nameless"} for record in records]
    for each in nameless:
        del each["schema"]
    found = written(path, b"".join(json.dumps(each).encode() + b"\n" for each in [*newer, *older, *nameless]))
    assert [each.oddities for each in found.rounds] == [
        (f"written with schema 7; this is schema {SCHEMA}",),
        (f"made by the table 0123456789abcdef; this is {ROUND.digest}",),
        (f"written with schema 0; this is schema {SCHEMA}",),
    ]
    assert found.bad == 0


def test_a_line_without_an_end_is_not_taken_into_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, it is one bad line, and the next one is read."""
    monkeypatch.setattr(logfile, "LONGEST", 1024 * 1024)
    found = written(path, b"x" * 5_000_000 + b"\n" + good_log())
    assert found.bad_lines == (BadLine(1, "longer than 1 MiB"),)
    assert len(found.rounds) == 4


def test_only_the_first_thousand_bad_lines_are_named(path: Path) -> None:
    """All of them are counted."""
    found = written(path, good_log() + b"?\n" * 1500)
    assert (found.bad, len(found.bad_lines)) == (1500, 1000)


# ------------------------------------------------------------------------------------------- what is no log


@pytest.mark.parametrize("content", [b"", b"\n\n", b" \n"], ids=["nothing", "line feeds", "a blank"])
def test_an_empty_file_is_no_log(content: bytes, path: Path) -> None:
    """And says so in one line."""
    with pytest.raises(LogEmpty, match=r"state.jsonl is empty$"):
        written(path, content)


def test_a_file_of_something_else_is_no_log(path: Path) -> None:
    """The message counts its lines and tells what is wrong with the first."""
    garbage = random.Random(7).randbytes(20_000)
    with pytest.raises(
        LogEmpty, match=r"state.jsonl is no state log: none of \d+ lines is a record; line 1: "
    ) as caught:
        written(path, garbage)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "why"),
    [("missing", "No such file or directory"), ("", "Is a directory"), ("a\0b", "embedded null byte")],
)
def test_what_cannot_be_opened_is_told_in_one_line(where: str, why: str, tmp_path: Path) -> None:
    """As an error of ours, with the name and the reason."""
    with pytest.raises(LogUnreadable, match=f"cannot be read: {why}") as caught:
        read(f"{tmp_path}/{where}")
    assert not isinstance(caught.value, LogEmpty)
    assert isinstance(caught.value, WeightSyncError)


# --------------------------------------------------------------------------------------------- finding one


def named(path: Path, *names: str) -> LogFile:
    """A log of rounds with these names."""
    return written(
        path,
        b"".join(json.dumps({**rounds()[0][0].to_json(), "round": name}).encode() + b"\n" for name in names),
    )


def test_a_round_is_found_by_the_beginning_of_its_id(path: Path) -> None:
    """As long as it is the only one; a whole id is that round, whatever else begins like it."""
    log = named(path, "abc", "abcd", "xyz")
    assert log.find("x").id == "xyz"
    assert log.find("abc").id == "abc"
    assert log.find("abcd").id == "abcd"


def test_a_round_that_is_not_there_or_not_clear_is_an_error(path: Path) -> None:
    """The message names those that are there."""
    log = named(path, "abc", "abd", "xyz")
    with pytest.raises(RoundUnknown, match=r"has no round 'q'; it has abc, abd, xyz$"):
        log.find("q")
    with pytest.raises(RoundUnknown, match=r"'ab' is the beginning of 2 rounds: abc, abd$"):
        log.find("ab")
    with pytest.raises(RoundUnknown, match=r"it has n0, n1, n2, n3, n4, and 4 more$"):
        named(path, *(f"n{number}" for number in range(9))).find("q")
