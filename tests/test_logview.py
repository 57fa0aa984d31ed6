"""How a log looks: the table of its rounds, and the time line of one."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.columns import Column, Paint, clean, grid, shorten
from weightsync.fsm.calls import Act
from weightsync.fsm.policy import Policy
from weightsync.fsm.record import Record
from weightsync.fsm.table import ROUND
from weightsync.logfile import BadLine, LogFile, RoundLog
from weightsync.logrows import RoundRow, row_of, totals
from weightsync.logview import bad_line_lines, oddity_lines, path_words, size, summary_line, table_lines, when
from weightsync.testing.simulation import Fault, Simulation
from weightsync.timeline import timeline_lines

GOOD = ("Idle", "Locked", "Broadcasting", "Awaiting", "Cleaning", "Released")
ROSTER = [{"id": name, "incarnation": "0", "ranks": 1} for name in ("e0", "e1")]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Story:
    """Records of one round, written by hand."""

    def __init__(self, round: str, *, step: int = 3, version: int = 7, epoch: int = 5) -> None:
        self._same = {"table": ROUND.digest, "round": round, "step": step, "version": version, "attempt": 1}
        self._epoch = epoch
        self._time = 1_800_000_000.0
        self._state = "Idle"
        self._entered = self._time
        self.records: list[Record] = []
        facts = {"roster": ROSTER, "quorum": 2, "inplace": [], "tainted": []}
        self.tell(0.0, "opened", target="Idle", facts=facts, owner="trainer")

    def tell(self, later: float, event: str, **values: Any) -> "Story":
        """A record, some time after the one before."""
        self._time += later
        seq = len(self.records)
        epoch = self._epoch if seq else None
        self.records.append(
            Record(time=self._time, event=event, seq=seq, epoch=epoch, **{**self._same, **values})
        )
        return self

    def move(self, later: float, trigger: str, target: str | None = None, **values: Any) -> "Story":
        """A transition; without a target one that stays."""
        spent = round(self._time + later - self._entered, 6)
        source, goal = self._state, target or self._state
        self.tell(later, "transition", source=source, target=goal, trigger=trigger, seconds=spent, **values)
        if target:
            self._state, self._entered = target, self._time
        return self

    def end(self, outcome: str, published: str = "yes", **values: Any) -> RoundLog:
        """Its result, and the round."""
        facts = {"outcome": outcome, "published": published, "unclean": False, **values.pop("facts", {})}
        self.tell(0.0, "result", facts=facts, **values)
        return self.log()

    def log(self, line: int = 1) -> RoundLog:
        """The round as it was read."""
        return RoundLog(str(self._same["round"]), line, tuple(self.records))


def good() -> RoundLog:
    """A round in which all went well."""
    story = Story("4f5cd9212c2c").move(0.004, "LockGranted", "Locked", guard="enough")
    story.tell(0.005, "call", trigger="plan", seconds=0.005)
    story.tell(0.001, "call", trigger="prepare", undo="health watch", seconds=0.001)
    plan = {"plan": {"fingerprint": "p", "tensors": 28, "bytes": 411443, "buckets": 3, "digest": "d"}}
    story.move(0.01, "Prepared", "Broadcasting", guard="positive", facts=plan)
    for index in range(3):
        story.move(0.01, "BucketSent", guard="next_bucket", bucket=index)
    story.move(0.0, "AllSent", "Awaiting", guard="all_out")
    story.move(0.002, "EngineAcked", guard="more", engine="e0", bytes=411443)
    story.move(0.003, "EngineAcked", "Cleaning", guard="last", engine="e1", bytes=411443)
    story.tell(0.01, "call", trigger="commit", engine="e1", seconds=0.01)
    story.move(0.02, "Unlocked", "Released", guard="settled")
    engines = {"engines": {"e0": "serving_new", "e1": "serving_new"}, "pause": {"e0": 0.0415, "e1": 0.0523}}
    return story.end("complete", seconds=0.085, bytes=822886, facts=engines)


def failed() -> RoundLog:
    """A round in which an engine could not apply a bucket."""
    error = "RuntimeError: CUDA out of memory; tried to allocate 20.00 MiB (GPU 0; 23.65 GiB total capacity)"
    story = Story("9e0a7b1d33aa", step=4, version=8, epoch=6)
    story.move(0.004, "LockGranted", "Locked", guard="enough")
    story.move(0.02, "Prepared", "Broadcasting", guard="positive")
    story.move(0.01, "BucketSent", guard="next_bucket", bucket=0)
    story.move(0.5, "EngineLost", "Failed", guard="loss_breaks", engine="e1", culprit="e1", error=error)
    story.tell(0.01, "call", trigger="abort", engine="e0", seconds=0.01)
    story.move(0.01, "EngineReverted", guard="f_revert", engine="e0")
    story.move(
        1.25, "CleanupFailed", guard="unsettled_ours", error="OSError: left over", facts={"unclean": True}
    )
    story.move(0.01, "Unlocked", "Released", guard="settled")
    engines = {"engines": {"e0": "serving_old", "e1": "quarantined"}, "pause": {"e0": 0.56, "e1": 1.81}}
    facts = {"unclean": True, **engines}
    return story.end("failed", "no", seconds=1.814, bytes=0, culprit="e1", bucket=1, error=error, facts=facts)


def partial() -> RoundLog:
    """A round that went on without an engine."""
    story = Story("aa00", step=5, version=9, epoch=7).move(0.004, "LockGranted", "Locked", guard="enough")
    lost = "EngineGone: engine e0 is dead"
    story.move(0.02, "EngineLost", guard="loss_holds", engine="e0", culprit="e0", error=lost)
    for trigger, target in zip(("Prepared", "AllSent", "EngineAcked", "Unlocked"), GOOD[2:], strict=True):
        story.move(0.02, trigger, target)
    engines = {"engines": {"e0": "quarantined", "e1": "serving_new"}, "pause": {"e0": 120.5, "e1": 0.05}}
    return story.end("partial", seconds=0.104, bytes=411443, facts=engines)


def unfinished() -> RoundLog:
    """A round whose process was killed while it sent."""
    story = Story("ab17", step=6, version=10, epoch=8).move(0.004, "LockGranted", "Locked", guard="enough")
    return story.move(0.02, "Prepared", "Broadcasting").move(0.2, "BucketSent", bucket=0).log()


def rows() -> list[RoundRow]:
    """All four."""
    return [row_of(each) for each in (good(), failed(), partial(), unfinished())]


def same(lines: Sequence[str], wanted: str) -> None:
    """Lines are those of a text that stands indented in its test."""
    expected = wanted.strip("\n").split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in expected if line.strip())
    assert list(lines) == [line[margin:] for line in expected][: len(expected) - 1]


# ---------------------------------------------------------------------------------------------- the table


def test_a_wide_table_writes_everything_out() -> None:
    """Paths in words, errors in full: this is what goes into a file or a pipe."""
    same(
        table_lines(rows()),
        """
        round         step  version  epoch  path                                       outcome         seconds  pause  engines               culprit  error
        4f5cd9212c2c     3        7      5  Idle>Locked>...>Released                   complete          0.085  0.052  2 new
        9e0a7b1d33aa     4        8      6  Idle>Locked>Broadcasting>Failed!>Released  failed unclean    1.814  1.810  1 old, 1 quarantined  e1       RuntimeError: CUDA out of memory; tried to allocate 20.00 MiB (GPU 0; 23.65 GiB total capacity)
        aa00             5        9      7  Idle>Locked>...>Released                   partial           0.104    120  1 new, 1 quarantined  e0       EngineGone: engine e0 is dead
        ab17             6       10      8  Idle>Locked>Broadcasting>?                 unfinished        0.224         2 unknown
        """,  # noqa: E501 - that is how wide it is
    )


def test_a_table_for_a_terminal_writes_paths_in_initials() -> None:
    """And shortens errors to what is left."""
    same(
        table_lines(rows(), 140),
        """
        round         step  version  epoch  path         outcome         seconds  pause  engines               culprit  error
        4f5cd9212c2c     3        7      5  I>L>B>A>C>R  complete          0.085  0.052  2 new
        9e0a7b1d33aa     4        8      6  I>L>B>F!>R   failed unclean    1.814  1.810  1 old, 1 quarantined  e1       RuntimeError: CUDA out of...
        aa00             5        9      7  I>L>B>A>C>R  partial           0.104    120  1 new, 1 quarantined  e0       EngineGone: engine e0 is ...
        ab17             6       10      8  I>L>B>?      unfinished        0.224         2 unknown
        """,  # noqa: E501 - that is how wide it is
    )


def test_a_narrow_table_keeps_what_matters_most() -> None:
    """Which version went which way, and how it ended."""
    same(
        table_lines(rows(), 100),
        """
        round         version  path         outcome         culprit  error
        4f5cd9212c2c        7  I>L>B>A>C>R  complete
        9e0a7b1d33aa        8  I>L>B>F!>R   failed unclean  e1       RuntimeError: CUDA out of memory; tr...
        aa00                9  I>L>B>A>C>R  partial         e0       EngineGone: engine e0 is dead
        ab17               10  I>L>B>?      unfinished
        """,
    )
    same(
        table_lines(rows(), 46),
        """
        round     version  path         outcome
        4f5cd...        7  I>L>B>A>C>R  complete
        9e0a7...        8  I>L>B>F!>R   failed unclean
        aa00            9  I>L>B>A>C>R  partial
        ab17           10  I>L>B>?      unfinished
        """,
    )


def test_a_table_of_good_rounds_has_no_columns_for_errors() -> None:
    """What nobody has to say takes no room, so that paths are in words here."""
    same(
        table_lines([row_of(good())], 100),
        """
        round         step  version  epoch  path                      outcome   seconds  pause  engines
        4f5cd9212c2c     3        7      5  Idle>Locked>...>Released  complete    0.085  0.052  2 new
        """,
    )


@given(st.integers(20, 200))
def test_no_line_is_wider_than_it_may_be(width: int) -> None:
    """From 46 characters on; below that the four columns that never leave need theirs."""
    assert max(map(len, table_lines(rows(), width))) <= max(width, 44)


def test_colours_change_nothing_but_colours() -> None:
    """The same text with them and without; Failed and its culprit stand out."""
    painted = table_lines(rows(), 140, Paint(on=True))
    assert [COLOUR.sub("", line) for line in painted] == table_lines(rows(), 140)
    assert "\x1b[1;31mfailed unclean\x1b[0m" in painted[2]
    assert "\x1b[31mI>L>B>F!>R\x1b[0m" in painted[2]
    assert "\x1b[1;31me1\x1b[0m" in painted[2]
    assert "\x1b[32mcomplete\x1b[0m" in painted[1]


@pytest.mark.parametrize(
    ("path", "words", "initials"),
    [
        (GOOD, "Idle>Locked>...>Released", "I>L>B>A>C>R"),
        (("Idle", "Failed", "Released"), "Idle>Failed!>Released", "I>F!>R"),
        (("Idle", "Locked", "Failed", "Released"), "Idle>Locked>Failed!>Released", "I>L>F!>R"),
        ((*GOOD[:4], "Failed", "Released"), "Idle>Locked>...>Awaiting>Failed!>Released", "I>L>B>A>F!>R"),
        ((*GOOD[:5], "Failed"), "Idle>Locked>...>Cleaning>Failed!>?", "I>L>B>A>C>F!>?"),
        (("Idle",), "Idle>?", "I>?"),
        (("Awaiting", "Cleaning", "Released"), "Awaiting>Cleaning>Released", "A>C>R"),
        ((), "?", "?"),
    ],
)
def test_a_path_in_few_words(path: Sequence[str], words: str, initials: str) -> None:
    """Its ends and where it failed are always there; what never ended says so."""
    assert path_words(path) == words
    assert path_words(path, initials=True) == initials


def test_all_rounds_in_one_line() -> None:
    """How many ended how, and what it cost."""
    assert summary_line(totals(rows())) == (
        "4 rounds: 1 complete, 1 partial, 1 failed, 1 unfinished; 1 unclean; 2.227 s in rounds; "
        "longest pause 120 s; 1.2 MiB proven"
    )
    assert summary_line(totals([row_of(good())])).startswith("1 round: 1 complete; 0.085 s in rounds;")
    assert summary_line(totals([])) == "0 rounds: none; 0.000 s in rounds"


def test_bad_lines_are_named_at_the_end() -> None:
    """The first few of them; the rest is counted."""
    bad = tuple(BadLine(number, "not JSON: \x1b[2J") for number in range(1, 31))
    log = LogFile("state.jsonl", (), bad, bad=31, lines=99)
    lines = bad_line_lines(log, most=2)
    assert lines == [
        "31 of 99 lines could not be read:",
        r"  line 1: not JSON: \x1b[2J",
        r"  line 2: not JSON: \x1b[2J",
        "  and 29 more",
    ]
    assert bad_line_lines(LogFile("state.jsonl", (), (), bad=0, lines=99)) == []


def test_rounds_that_are_not_all_there_say_so() -> None:
    """Below the table, by their ids."""
    gap = RoundLog("gap", 1, (*good().records[:1], *good().records[3:]))
    assert oddity_lines([row_of(gap), row_of(good())]) == ["round gap: records 1 to 2 are missing"]
    assert oddity_lines([row_of(gap)] * 9, 20, most=1) == [
        "round gap: record...",
        "and 8 more rounds with oddities",
    ]


# ------------------------------------------------------------------------------------------- the time line


def test_the_time_line_of_a_good_round() -> None:
    """What it was, a lane for each state, and each step; buckets in a row are one step."""
    same(
        timeline_lines(good(), 100),
        """
        round 4f5cd9212c2c: step 3, version 7, epoch 5, attempt 1
        2027-01-15 08:00:00 UTC, by trainer, line 1 of the log
        28 tensors, 401.8 KiB, in 3 buckets
        complete after 0.085 s (published: yes)
          e0: serves the new version, paused for 0.042 s
          e1: serves the new version, paused for 0.052 s

        Idle          ###.......................................................................    0.0040 s
        Locked        ...##############.........................................................    0.0160 s
        Broadcasting  .................###########################..............................    0.0300 s
        Awaiting      ...........................................#####..........................    0.0050 s
        Cleaning      ...............................................###########################    0.0300 s

           time  state         what                                engine  bucket    took
        +0.0000  Idle          opened: 2 engines, quorum 2
        +0.0040  Locked        LockGranted [enough]                                0.0040
        +0.0090                  call plan                                         0.0050
        +0.0100                  call prepare health watch                         0.0010
        +0.0200  Broadcasting  Prepared [positive]                                 0.0160
        +0.0500                  BucketSent [next_bucket]                     0-2
        +0.0500  Awaiting      AllSent [all_out]                                   0.0300
        +0.0520                  EngineAcked [more]                e0
        +0.0550  Cleaning      EngineAcked [last]                  e1              0.0050
        +0.0650                  call commit                       e1              0.0100
        +0.0850  Released      Unlocked [settled]                                  0.0300
        +0.0850                  result: complete, published: yes                  0.0850
        """,
    )


def test_the_time_line_of_a_failed_round_on_a_narrow_terminal() -> None:
    """Errors are told in full, once, where there is no room for them in the rows; their rows are marked."""
    same(
        timeline_lines(failed(), 80),
        """
        round 9e0a7b1d33aa: step 4, version 8, epoch 6, attempt 1
        2027-01-15 08:00:00 UTC, by trainer, line 1 of the log
        failed in Broadcasting after 1.814 s (published: no, unclean): engine e1, bucket
          1: RuntimeError: CUDA out of memory; tried to allocate 20.00 MiB (GPU 0; 23.65
          GiB total capacity)
          e0: serves the old version, paused for 0.560 s
          e1: quarantined, paused for 1.810 s

        Idle          #.....................................................    0.0040 s
        Locked        #.....................................................    0.0200 s
        Broadcasting  ################......................................    0.5100 s
        Failed        ...............#######################################    1.2800 s

              time  state         what                            engine  bucket    took
           +0.0000  Idle          opened: 2 engines, quorum 2
           +0.0040  Locked        LockGranted [enough]                            0.0040
           +0.0240  Broadcasting  Prepared [positive]                             0.0200
           +0.0340                  BucketSent [next_bucket]                   0
        !  +0.5340  Failed        EngineLost [loss_breaks]        e1              0.5100
             RuntimeError: CUDA out of memory; tried to allocate 20.00 MiB (GPU 0; 23.65
               GiB total capacity)
           +0.5440                  call abort                    e0              0.0100
           +0.5540                  EngineReverted [f_revert]     e0
        !  +1.8040                  CleanupFailed [unsettled_...
             OSError: left over
           +1.8140  Released      Unlocked [settled]                              1.2800
        !  +1.8140                  result: failed, published...  e1           1  1.8140
        """,
    )


def test_a_wide_time_line_has_errors_in_their_rows() -> None:
    """One line for each step, for those who search in it."""
    lines = timeline_lines(failed())
    (lost,) = [line for line in lines if "EngineLost" in line]
    assert lost.startswith("!  +0.5340  Failed        EngineLost [loss_breaks]")
    assert lost.endswith("(GPU 0; 23.65 GiB total capacity)")


def test_the_time_line_of_a_round_that_never_ended() -> None:
    """It is told up to where it stopped, and the state it was in then has its lane."""
    lines = timeline_lines(unfinished(), 72)
    assert lines[2:5] == [
        "unfinished after 0.224 s",
        "  e0: nobody said what became of it",
        "  e1: nobody said what became of it",
    ]
    lane = next(line for line in lines if line.startswith("Broadcasting  "))
    assert lane.endswith("0.2000 s")
    assert "Released" not in "\n".join(lines)


def test_a_painted_time_line_shows_who_is_to_blame() -> None:
    """The culprit's engine, the lane of Failed and the marks stand out; nothing else changes."""
    painted = timeline_lines(failed(), 80, Paint(on=True))
    assert [COLOUR.sub("", line) for line in painted] == timeline_lines(failed(), 80)
    lost = next(line for line in painted if "EngineLost" in line)
    assert "\x1b[1;31m!\x1b[0m" in lost
    assert "\x1b[1;31me1\x1b[0m" in lost
    reverted = next(line for line in painted if "EngineReverted" in line)
    assert "e0" in reverted
    assert "\x1b[1;31m" not in reverted
    assert "\x1b[1;31m...............####" in next(
        line for line in painted if "Failed  " in COLOUR.sub("", line)
    )


# ------------------------------------------------------------------------------------ whatever a log says


EVIL = "a\x1b[2Jb\rc\nd\u202ee\ud800"


def test_nothing_in_a_log_reaches_the_terminal_as_a_command() -> None:
    """Every text of a record is shown as text, in one line."""
    evil = Story(EVIL)
    evil.tell(0.0, "call", trigger=EVIL, engine=EVIL, undo=EVIL, error=EVIL, culprit=EVIL)
    evil.move(0.1, EVIL, EVIL, guard=EVIL, facts={"plan": {"buckets": EVIL, "tensors": 10**400, "bytes": 1}})
    facts = {"engines": {EVIL: EVIL}, "pause": {EVIL: 1.0, "x": float("inf"), "y": "z"}}
    round = evil.end(EVIL, EVIL, culprit=EVIL, error=EVIL, facts=facts)
    row = row_of(round)
    shown = [*timeline_lines(round), *timeline_lines(round, 50), *table_lines([row]), *table_lines([row], 60)]
    shown += [summary_line(totals([row])), *oddity_lines([row])]
    assert "\\x1b[2J" in "".join(shown)
    for line in shown:
        assert line.isprintable() or not line
        line.encode()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["roster", "quorum", "plan", "outcome", "engines", "pause"]), JUNK))
def test_whatever_stands_among_the_facts_something_is_shown(facts: dict[str, Any]) -> None:
    """The reader checks every key but what is inside of `facts`; here nothing of it is relied on."""
    story = Story("r")
    story.tell(0.1, "opened", facts=facts).tell(0.1, "note", facts=facts).tell(0.1, "result", facts=facts)
    row = row_of(story.log())
    assert table_lines([row], 80)
    assert timeline_lines(story.log(), 80)
    assert summary_line(totals([row]))
    assert json.loads(json.dumps(row.to_json()))["round"] == "r"


@pytest.mark.parametrize("act", list(Act), ids=lambda act: act.name)
def test_a_row_says_what_the_result_says(act: Act) -> None:
    """For rounds with a fault anywhere, the log's row and the ``RoundResult`` agree on all they share."""
    policy = Policy(deadline=4.0, lease=2.0, on_engine_failure="quarantine", quorum=1)
    simulation = Simulation(
        policy=policy, faults=[Fault(act, "raise"), Fault(Act.commit, "die", engine="e1")]
    )
    result = simulation.run()
    row = row_of(RoundLog(simulation.name, 1, simulation.round.records()))
    assert (row.outcome, row.published, row.unclean) == (
        result.outcome.name,
        result.published,
        result.unclean,
    )
    assert (row.path, row.failed_in, row.ok) == (result.path, result.failed_in, result.ok)
    assert row.engines == {each.engine: each.disposition.name for each in result.engines}
    assert row.pause == round(result.pause_seconds, 6)
    assert (row.step, row.version, row.epoch) == (result.step, result.version, result.epoch or None)
    if result.error is not None:
        assert row.error == f"{type(result.error).__name__}: {result.error}"
        assert row.culprit == result.culprit


# ------------------------------------------------------------------------------------------ text in columns


def test_a_grid_gives_way_in_a_fixed_order() -> None:
    """First those leave that may, the highest first; one that can be tight is made tight before it leaves."""
    columns = [
        Column("name", ["abcdefgh"]),
        Column("note", ["0123456789" * 3], least=20, tight=8, leaves=2),
        Column("age", ["7"], right=True, leaves=3),
        Column("nothing", [""]),
    ]
    heights: dict[int | None, list[str]] = {
        None: ["name      note                            age", f"abcdefgh  {'0123456789' * 3}    7"],
        40: ["name      note                       age", "abcdefgh  0123456789012345678901...    7"],
        35: ["name      note                  age", "abcdefgh  01234567890123456...    7"],
        34: ["name      note", "abcdefgh  012345678901234567890..."],
        20: ["name      note", "abcdefgh  0123456..."],
        17: ["name", "abcdefgh"],
    }
    for width, lines in heights.items():
        assert grid(columns, width) == lines


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("abcdef", 6, "abcdef"), ("abcdef", 5, "ab..."), ("abcdef", 3, "abc"), ("abcdef", 0, ""), ("", 4, "")],
)
def test_a_shortened_text_says_that_it_is(text: str, width: int, short: str) -> None:
    """With dots, as long as there is room for more than dots."""
    assert shorten(text, width) == short


@given(st.text())
def test_a_clean_text_is_printable_and_in_one_line(text: str) -> None:
    """And what was so before stays as it is, but for blanks in a row."""
    found = clean(text)
    assert found.isprintable()
    assert clean(found) == found
    if text.isprintable() and "  " not in text:
        assert found == text.strip()


def same_number(show: Callable[[Any], str], pairs: dict[Any, str]) -> None:
    """Each value is shown like that."""
    assert {value: show(value) for value in pairs} == pairs


def test_sizes_and_moments_as_a_person_says_them() -> None:
    """Including those that no calendar has."""
    same_number(
        size, {0: "0 bytes", 1023: "1023 bytes", 1536: "1.5 KiB", 3 * 2**30: "3.0 GiB", 2**50: "1024.0 TiB"}
    )
    same_number(when, {0.0: "1970-01-01 00:00:00 UTC", 1e18: "1e+18", -1e17: "-1e+17"})
