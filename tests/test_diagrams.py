"""The pictures say what the tables say: each row once, each move drawn, and nothing in the way."""

import hashlib
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from enum import Enum
from html import unescape
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weightsync import diagrams
from weightsync.diagrams import DrawingToolMissing, FormatUnknown, NoPlace, read_trace, render, write
from weightsync.diagrams.measure import Font, width, wrap
from weightsync.diagrams.model import extract
from weightsync.diagrams.png import png
from weightsync.diagrams.shapes import Box, Sheet
from weightsync.diagrams.svg import draw
from weightsync.fsm.engine_table import ENGINE
from weightsync.fsm.rows import Row, Table
from weightsync.fsm.states import State
from weightsync.fsm.table import ROUND

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
AnyTable = Table[Any, Any]
Found = Counter[tuple[str, str | None, str]]

TABLES = [pytest.param(ROUND, id="round"), pytest.param(ENGINE, id="engine")]


def rows_of(table: AnyTable) -> Found:
    """What has to be found in a picture: (source, target or None where it stays, label) of each row."""
    return Counter((r.source.name, r.target.name if r.target else None, r.label) for r in table.rows)


# ------------------------------------------------------------------------------- reading the formats back


def in_mermaid(text: str) -> Found:
    """The rows that a Mermaid text holds. What a state says before its rows has no event's shape."""
    found: Found = Counter()
    states: dict[str, list[str]] = {}
    for line in text.splitlines():
        if move := re.fullmatch(r"    (\w+) --> (\w+) : (.+)", line):
            found.update((move[1], move[2], label) for label in move[3].split("<br/>"))
        elif inner := re.fullmatch(r"    (\w+) : (.+)", line):
            states.setdefault(inner[1], []).append(inner[2])
    for name, said in states.items():
        head = 3 if said[2:3] and said[2].startswith("enter / ") else 2
        found.update((name, None, label) for label in said[head:])
    return found


def in_dot(text: str) -> Found:
    """The rows that a DOT text holds."""
    found: Found = Counter()
    for source, target, labels in re.findall(r'^  "(.*?)" -> "(.*?)" \[label="(.*?)"', text, re.MULTILINE):
        found.update((source, target, label.strip()) for label in labels.split("\\l") if label)
    for name, table in re.findall(r'^  "(\w+)" \[label=<(.*)>', text, re.MULTILINE):
        stays = re.findall(r'<FONT FACE="Courier" POINT-SIZE="10">(.*?)</FONT><BR/>', table)
        found.update((name, None, unescape(label)) for label in stays)
    return found


def in_markdown(text: str) -> Found:
    """The rows that a Markdown page holds."""
    found: Found = Counter()
    for line in re.findall(r"^\| \d+ \|.*\|$", text, re.MULTILINE):
        _, event, source, target, guard, _, orders = [
            c.strip().replace("`", "") for c in line.split("|")[1:-1]
        ]
        label = event + (f" [{guard}]" if guard else "") + (f" / {orders}" if orders else "")
        found[source, None if target == "stays" else target, label] += 1
    return found


def said(group: ET.Element) -> str:
    """All text of a panel, its lines joined: a label that was broken is whole again."""
    lines = ("".join(text.itertext()).strip() for text in group.findall(f"{SVG}text"))
    return " ".join(lines)


def groups(drawn: str, kind: str) -> list[ET.Element]:
    """The groups of one kind in an SVG: ``state``, ``move`` or ``arrow``."""
    return [g for g in ET.fromstring(drawn).iter(f"{SVG}g") if g.get("class", "").split()[0] == kind]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("form", "read"), [("mermaid", in_mermaid), ("dot", in_dot), ("markdown", in_markdown)]
)
def test_each_row_is_in_each_text_once(table: AnyTable, form: str, read: Any) -> None:
    """No row is missing, none is there twice, and none says something else than the table."""
    text = render(table, form)
    assert isinstance(text, str)
    assert read(text) == rows_of(table)


@pytest.mark.parametrize("table", TABLES)
def test_the_svg_draws_each_move_with_all_its_rows(table: AnyTable) -> None:
    """Between two states there is one arrow and one box of labels; the box holds the rows in their order."""
    drawn = render(table, "svg")
    wanted: dict[tuple[str, str], list[str]] = {}
    for row in table.rows:
        if row.target:
            wanted.setdefault((row.source.name, row.target.name), []).append(row.label)
    arrows = [
        (g.get("data-source"), g.get("data-target")) for g in groups(drawn, "arrow") if g.get("data-source")
    ]
    assert sorted(arrows) == sorted(wanted)
    labels = {(g.get("data-source"), g.get("data-target")): said(g) for g in groups(drawn, "move")}
    assert labels == {ends: " ".join(rows) for ends, rows in wanted.items()}


@pytest.mark.parametrize("table", TABLES)
def test_the_svg_lists_in_each_state_what_stays(table: AnyTable) -> None:
    """The card of a state has its name, its entry order, its sentence, and its rows that do not leave it."""
    cards = {g.get("data-state"): said(g) for g in groups(render(table, "svg"), "state")}
    for state in table.states:
        entry = [f"enter / {table.entry[state].name}"] if state in table.entry else []
        stays = [row.label for row in table.rows if row.source is state and row.target is None]
        assert cards[state.name] == " ".join([state.name, *entry, state.value, "stays:", *stays])


def test_all_failing_moves_are_red() -> None:
    """Each state before the end has its way into Failed, in a colour of its own."""
    red = {g.get("data-source") for g in groups(render(ROUND, "svg"), "arrow") if "bad" in g.get("class", "")}
    assert red - {None} == {"Idle", "Locked", "Broadcasting", "Awaiting", "Cleaning"}


# ------------------------------------------------------------------------------------------- the geometry

WALK = [
    ("Idle", "LockGranted", "enough"), ("Locked", "Prepared", "positive"),
    ("Broadcasting", "AllSent", "all_out"), ("Awaiting", "EngineAcked", "last"),
    ("Cleaning", "UnlockFailed", "settled"), ("Failed", "Unlocked", "settled"),
]  # fmt: skip
"""A path with as much to write as a round can have."""

CIRCLE = [
    ("Serving", "Opened", "newer"), ("Paused", "FrameSeen", "in_turn"), ("Receiving", "Opened", "newer"),
    ("Paused", "Opened", "newer"), ("Paused", "AbortOrdered", "ends_whole"),
]  # fmt: skip


def records(table: AnyTable, path: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """A log of a path."""
    events = {row.event.__name__: row.event for row in table.rows}
    made = []
    for source, trigger, guard in path:
        (row,) = (
            r for r in table.rows_for(type(table.start)[source], events[trigger])
            if r.guard and r.guard.__name__ == guard
        )  # fmt: skip
        made.append(
            {"round": "7b1f6a52-8c1e-4d0e-9a53-2f1a7f5f0c11", "source": source, "target": row.goal.name,
             "trigger": trigger, "guard": guard, "seconds": 59.994}
        )  # fmt: skip
    return made


SHEETS = {
    "round": lambda: draw(extract(ROUND)),
    "engine": lambda: draw(extract(ENGINE)),
    "round with a path": lambda: draw(extract(ROUND), read_trace(ROUND, records(ROUND, WALK))),
    "engine with a path": lambda: draw(extract(ENGINE), read_trace(ENGINE, records(ENGINE, CIRCLE * 6))),
}


@pytest.fixture(params=SHEETS)
def sheet(request: pytest.FixtureRequest) -> Sheet:
    """Each picture that is drawn, as it is laid out."""
    return SHEETS[request.param]()


def test_no_two_boxes_overlap(sheet: Sheet) -> None:
    """Neither cards nor labels lie on one another, and all are on the page."""
    page = Box(0, 0, sheet.width, sheet.height)
    assert all(page.holds(panel.box) for panel in sheet.panels)
    inside = Box(16, 16, sheet.width - 32, sheet.height - 32)
    assert not [text for text in sheet.texts if not inside.holds(text.box)]
    assert [(a.ends, b.ends) for a, b in combinations(sheet.panels, 2) if a.box.overlaps(b.box)] == []


def test_no_text_leaves_its_box(sheet: Sheet) -> None:
    """Every line fits into its panel with some air, even in a wide font, and no rule runs through it."""
    for panel in sheet.panels:
        inside = Box(panel.box.x + 4, panel.box.y + 4, panel.box.w - 8, panel.box.h - 8)
        rules = [Box(x1, y1, max(x2 - x1, 1), max(y2 - y1, 1)) for (x1, y1), (x2, y2) in panel.rules]
        for text in panel.texts:
            assert inside.holds(text.box), (panel.ends, text)
            assert not any(text.box.overlaps(rule) for rule in rules), (panel.ends, text)


def test_no_two_texts_overlap(sheet: Sheet) -> None:
    """All lines can be read, title and legend included, and neither a badge nor the first dot covers one."""
    texts = [*sheet.texts, *(text for panel in sheet.panels for text in panel.texts)]
    assert [(a, b) for a, b in combinations(texts, 2) if a.box.overlaps(b.box)] == []
    dots = [Box(x - 6, y - 6, 12, 12) for x, y in sheet.dots]
    assert not [text for text in texts if any(text.box.overlaps(dot) for dot in dots)]
    for panel in sheet.panels:
        badges = [badge.box for badge in panel.badges]
        assert all(panel.box.holds(badge) for badge in badges)
        assert not [text for text in texts if any(text.box.overlaps(badge) for badge in badges)]


def test_arrows_lead_from_box_to_box_and_through_no_other(sheet: Sheet) -> None:
    """An arrow begins at its source, ends at its target, passes behind its labels, and meets no other box."""
    cards = {panel.ends[0]: panel.box for panel in sheet.panels if panel.kind == "state"}
    for arrow in sheet.arrows:
        if not arrow.ends:
            continue
        strips = [
            Box(min(x1, x2) - 1, min(y1, y2) - 1, abs(x2 - x1) + 2, abs(y2 - y1) + 2)
            for (x1, y1), (x2, y2) in zip(arrow.points, arrow.points[1:], strict=False)
        ]
        met = {panel.ends for panel in sheet.panels if any(strip.overlaps(panel.box) for strip in strips)}
        assert met == {arrow.ends, arrow.ends[:1], arrow.ends[1:]}
        for (x, y), name in zip((arrow.points[0], arrow.points[-1]), arrow.ends, strict=True):
            box = cards[name]
            assert x in (box.x, box.right) or y in (box.y, box.bottom), (arrow.ends, name)


def test_no_arrow_is_hidden_by_another(sheet: Sheet) -> None:
    """Lines share a stretch only where moves with the same goal run together."""
    lines = [(a, s) for a in sheet.arrows for s in zip(a.points, a.points[1:], strict=False)]
    for (a, ((ax, ay), (bx, by))), (b, ((cx, cy), (dx, dy))) in combinations(lines, 2):
        along = ax == bx == cx == dx and min(max(ay, by), max(cy, dy)) > max(min(ay, by), min(cy, dy))
        beside = ay == by == cy == dy and min(max(ax, bx), max(cx, dx)) > max(min(ax, bx), min(cx, dx))
        assert not (along or beside) or a.ends[1] == b.ends[1], (a.ends, b.ends)


def test_a_long_text_is_broken_to_fit() -> None:
    """Wrapping keeps all characters, and no line is wider than the room, even if one word alone is."""
    text = "short " + "x" * 300 + " \N{CJK UNIFIED IDEOGRAPH-4E00}" * 20
    lines = wrap(text, Font.body, 100)
    assert all(width(line, Font.body) <= 100 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


# ------------------------------------------------------------------------- hostile names, and foreign tables

HOSTILE = "\"'<a href='x'>&amp;]]> {x} --> [*]; `$$ %% # | \\n \n\x01 :: direction LR <br/>"


class Odd(Enum):
    """States that nobody would call so."""

    end = "the end; of the <world>"
    state_0 = "a name that is also made up"


def doctored(states: type[Enum] = State, name: str = "round") -> AnyTable:
    """A table with names that mean something to each of the formats."""
    event, learn = type(HOSTILE, (), {"__doc__": HOSTILE}), type(HOSTILE, (), {})

    def guard(facts: object, event: object, state: object) -> bool:
        return True

    guard.__name__ = HOSTILE
    order = Enum("Odder", {HOSTILE: HOSTILE})  # type: ignore[misc]  # no name that can be written
    members = list(states)
    pairs = (
        [(r.source, r.target) for r in ROUND.rows]
        if states is State
        else [(members[0], members[1]), (members[1], None)]
    )
    rows: list[Row[Any]] = [
        Row(n, event, source, target, guard, learn, tuple(order))  # type: ignore[arg-type]
        for n, (source, target) in enumerate(pairs, start=1)
    ]
    return Table(name, rows, start=members[0], final=members[-1:], entry={members[0]: next(iter(order))})


def test_hostile_names_leave_the_svg_well_formed_and_in_its_boxes() -> None:
    """Whatever a name holds, it is drawn as text, and wrapped."""
    table = doctored()
    drawn = render(table, "svg")
    assert len(groups(drawn, "move")) == len({(r.source, r.target) for r in table.rows if r.target})
    assert "<a href='x'>" in said(groups(drawn, "move")[0])
    laid = draw(extract(table))
    test_no_text_leaves_its_box(laid)
    assert not [
        (a, b) for a, b in combinations((p.box for p in laid.panels if p.kind == "state"), 2) if a.overlaps(b)
    ]


def check_mermaid(text: str) -> None:
    """The rules that Mermaid does not tell: each line of the body has one of six shapes, and tame labels."""
    head, title, tail, kind, *body = text.splitlines()
    assert (head, tail, kind) == ("---", "---", "stateDiagram-v2")
    assert re.fullmatch(r'title: ([\w -]+|"[^"\\]*")', title)
    label = r"(?:(?!direction\s)[^;:#%$&<>\"`*\\{}\n]|<br/>)+"
    shapes = (
        rf"\w+ : {label}", rf"\w+ --> \w+ : {label}", r"\[\*\] --> \w+", r"\w+ --> \[\*\]",
        r"class \w+ \w+", r"classDef \w+ [\w#:,-]+",
    )  # fmt: skip
    for line in body:
        assert any(re.fullmatch(f"    {shape}", line) for shape in shapes), line
        assert not re.match(r"    (end|state|note|class|direction) :", line)
    assert ";" not in text
    assert "linkStyle" not in text


@pytest.mark.parametrize("table", [*TABLES, doctored(), doctored(Odd, "odd: one")])
def test_mermaid_keeps_away_from_what_mermaid_misreads(table: AnyTable) -> None:
    """No label holds a character that ends it or means something, no state is called like a keyword."""
    text = render(table, "mermaid")
    check_mermaid(text)
    assert text.count(" --> ") == 1 + len(table.final) + len(
        {(r.source, r.target) for r in table.rows if r.target}
    )


def test_the_rules_for_mermaid_can_fail() -> None:
    """The check above notices each of the traps."""
    for bad in ("A : b; c", "linkStyle 0 stroke:red", "A --> B : x::y", "end : x", "A : go direction TB"):
        with pytest.raises(AssertionError):
            check_mermaid(f"---\ntitle: t\n---\nstateDiagram-v2\n    {bad}\n")


def test_dot_quotes_hostile_names() -> None:
    """A name cannot end the string that holds it, nor the table that a state is."""
    text = render(doctored(Odd, 'a"b\\'), "dot")
    assert text.startswith('digraph "a\\"b\\\\" {')
    (edge,) = (line for line in text.splitlines() if line.startswith('  "end" -> '))
    assert re.fullmatch(r'  "end" -> "state_0" \[label="(?:[^"\\]|\\.)*"\];', edge)
    (node,) = (line for line in text.splitlines() if line.startswith('  "state_0" ['))
    ET.fromstring(node[node.index("<TABLE") : node.rindex("</TABLE>") + 8])


def test_markdown_keeps_its_columns() -> None:
    """A name with a bar or a tag in it stays one cell of text."""
    lines = [line for line in render(doctored(), "markdown").splitlines() if re.match(r"\| \d", line)]
    assert len(lines) == len(ROUND.rows)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {8}
    assert not any(re.search(r"(?<!\\)<", line) for line in lines)


def test_a_table_without_a_sheet_is_refused_for_svg_alone() -> None:
    """Places are made by hand; what lays states out itself draws any table."""
    table = doctored(Odd, "odd")
    with pytest.raises(NoPlace, match="no sheet for a table called 'odd'"):
        render(table, "svg")
    assert render(table, "dot")


def test_a_move_without_a_place_is_refused_by_name() -> None:
    """A new kind of move cannot be forgotten on the sheet: drawing fails and says which one it is."""
    back = Row(999, type("Again", (), {}), State.Failed, State.Idle, None, None, ())
    table: AnyTable = Table("round", [*ROUND.rows, back], start=State.Idle, final=[State.Released])
    with pytest.raises(NoPlace, match="move Failed -> Idle"):
        render(table, "svg")


def test_a_move_that_is_gone_is_refused_by_name() -> None:
    """Nor is an arrow drawn that the table does not have."""
    fewer = [row for row in ROUND.rows if (row.source, row.target) != (State.Failed, State.Released)]
    with pytest.raises(NoPlace, match="move Failed -> Released"):
        render(Table("round", fewer, start=State.Idle), "svg")


# -------------------------------------------------------------------------- files: the same, and whole


@pytest.mark.parametrize("name", sorted(diagrams.checked_in()))
def test_the_checked_in_files_are_what_the_tables_say(name: str) -> None:
    """After a change of a table the files are written anew: `make diagrams`."""
    path = ROOT / "diagrams" / name
    assert path.read_text(encoding="utf-8") == diagrams.checked_in()[name], "stale: run `make diagrams`"


def test_no_drawing_is_left_over() -> None:
    """All drawings in the folder belong to a table that there is."""
    kinds = {".dot", ".md", ".mmd", ".svg", ".png"}
    assert {p.name for p in (ROOT / "diagrams").iterdir() if p.suffix in kinds} == set(diagrams.checked_in())


def test_the_same_table_gives_the_same_bytes() -> None:
    """Neither hash seed nor process nor clock shows in a drawing."""
    code = (
        "import hashlib; from weightsync.diagrams import checked_in;"
        "print(hashlib.sha256(repr(sorted(checked_in().items())).encode()).hexdigest())"
    )
    here = hashlib.sha256(repr(sorted(diagrams.checked_in().items())).encode()).hexdigest()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == here


def test_write_all_writes_what_is_not_as_it_should_be(tmp_path: Path) -> None:
    """The first time all files, then none, then the one that was changed; nothing else is left behind."""
    names = sorted(diagrams.checked_in())
    assert sorted(path.name for path in diagrams.write_all(tmp_path)) == names
    assert diagrams.write_all(tmp_path) == []
    (tmp_path / "round.svg").write_text("old", encoding="utf-8")
    assert diagrams.write_all(tmp_path) == [tmp_path / "round.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("a.svg", "<svg "),
        ("a.dot", "digraph "),
        ("a.GV", "digraph "),
        ("a.mmd", "---\n"),
        ("a.md", "# Round"),
    ],
)
def test_a_file_holds_what_its_name_says(tmp_path: Path, name: str, start: str) -> None:
    """The suffix alone decides about the format."""
    assert write(tmp_path / name, ROUND).read_text(encoding="utf-8").startswith(start)


@pytest.mark.parametrize(
    ("name", "form"), [("a.txt", None), ("svg", None), ("a.svg", "dot"), ("a.jpg", "svg")]
)
def test_a_name_that_would_lie_is_refused(tmp_path: Path, name: str, form: str | None) -> None:
    """An unknown suffix, or one that says something else than the format, writes nothing."""
    with pytest.raises(FormatUnknown, match=re.escape(repr(name))):
        write(tmp_path / name, ROUND, form)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_refused() -> None:
    """The error lists what there is."""
    with pytest.raises(FormatUnknown, match="dot, markdown, mermaid, png, svg"):
        render(ROUND, "pdf")


def test_a_failed_drawing_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be drawn does not destroy what was drawn before."""
    path = write(tmp_path / "a.svg", ROUND)
    before = path.read_bytes()
    with pytest.raises(NoPlace):
        write(path, doctored(Odd, "odd"))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["/proc/a.svg", "{tmp}/folder.svg"])
def test_a_file_that_cannot_be_written_is_named_as_the_user_did(place: str, tmp_path: Path) -> None:
    """Not by the name of the file beside it, which nobody knows; and that one is gone."""
    path = Path(place.format(tmp=tmp_path))
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(OSError) as refused:  # noqa: PT011 - which one it is differs by the place
        write(path, ROUND)
    assert (refused.value.filename, refused.value.filename2) == (str(path), None)
    assert refused.value.strerror
    assert [each.name for each in tmp_path.iterdir()] == ["folder.svg"]


def test_a_name_may_be_as_long_as_names_are(tmp_path: Path) -> None:
    """The file beside it does not need more letters than the system allows."""
    path = write(tmp_path / f"{'x' * 251}.svg", ROUND)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_picture_is_a_file_like_any_other(umask: int, mode: int, tmp_path: Path) -> None:
    """Its mode follows the umask, whatever an older file allowed."""
    path = tmp_path / "a.svg"
    path.touch(0o600)
    before = os.umask(umask)
    try:
        write(path, ROUND)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


# ---------------------------------------------------------------------------------------------- PNG


def test_a_png_without_its_extra_says_which_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line names what to install, and no file appears."""
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(
        DrawingToolMissing, match=r"^a PNG needs resvg-py, the extra png: pip install resvg-py$"
    ):
        write(tmp_path / "a.png", ROUND)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("raises", ["OSError('libresvg.so')", "ImportError('libresvg.so')"])
def test_a_png_with_a_broken_extra_says_why(
    raises: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is installed, and its native library cannot be loaded: to install it again is not what helps."""
    (tmp_path / "resvg_py.py").write_text(f"raise {raises}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "resvg_py", raising=False)
    with pytest.raises(
        DrawingToolMissing, match=r"is broken: its import raised (OS|Import)Error: libresvg.so$"
    ):
        write(tmp_path / "a.png", ROUND)
    assert not (tmp_path / "a.png").exists()


def test_a_png_without_fonts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no font is installed text would be left out in silence; that is an error instead."""
    mute = ModuleType("resvg_py")
    mute.svg_to_bytes = lambda **_: b"blank"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "resvg_py", mute)
    with pytest.raises(DrawingToolMissing, match="needs a font"):
        png("<svg/>")


@pytest.mark.parametrize("table", TABLES)
def test_a_png_is_one(table: AnyTable, tmp_path: Path) -> None:
    """With the extra and a font, the file is a PNG of twice the size of the SVG."""
    pytest.importorskip("resvg_py", reason="needs the extra weightsync[png]")
    laid = draw(extract(table))
    try:
        content = write(tmp_path / "a.png", table).read_bytes()
    except DrawingToolMissing as error:
        pytest.skip(str(error))
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    wide, high = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert wide == 2 * laid.width
    assert abs(high - 2 * laid.height) <= 1
