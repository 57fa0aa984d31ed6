"""The README says what is so: its commands run, its Python fits the library, its files are there."""

import ast
import inspect
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import weightsync
from weightsync.cli import _parser, main
from weightsync.demo.main import Options, run
from weightsync.diagrams.png import png
from weightsync.logfile import read

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in blocks("")
    for line in block.splitlines()
    if line.startswith("weightsync ")
]


def test_there_are_commands_of_each_kind() -> None:
    """So that the tests below look at something."""
    assert {command[0] for command in COMMANDS} == {"demo", "log", "diagram", "check", "doctor"}
    assert len(COMMANDS) == 12


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_is_understood(command: list[str]) -> None:
    """Every option of it is one of the command line's."""
    assert callable(_parser().parse_args(command).run)


def test_the_commands_run_after_a_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand there, in the folder in which a second demo was run: they show the second."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run(Options(steps=1, threads=True, quick=True), lambda _: None)
    newest = read("runs/demo-1/state.jsonl").rounds[-1].id
    for command in COMMANDS:
        if command[0] != "demo" and command != ["check"]:  # which takes a minute, and has tests of its own
            assert main([newest[:6] if word == "ID" else word for word in command]) == 0, command
    assert f"\n{newest} " in capsys.readouterr().out
    assert Path("round.svg").is_file()
    assert newest in Path("path.svg").read_text()


def test_the_loop_fits_the_library() -> None:
    """The names are public, and the arguments are those of what is called."""
    (text,) = blocks("python")
    tree = ast.parse(text)
    (imported,) = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    names = {alias.name for alias in imported.names}
    assert imported.module == "weightsync"
    assert names <= set(weightsync.__all__)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls += [ast.parse(code, mode="eval").body for code in re.findall(r"`(Policy\([^`]*\))`", TEXT)]
    checked = set()
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in names - {"ray_engine"}:
            given: dict[str, Any] = {keyword.arg or "": None for keyword in call.keywords}
            inspect.signature(getattr(weightsync, call.func.id)).bind(*call.args, **given)
            checked.add(call.func.id)
    assert checked == names - {"ray_engine", "RayReceiver"}
    methods = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
    methods |= set(re.findall(r"`(?:await )?sync\.(\w+)\(", TEXT))
    known = dir(weightsync.WeightSync) + dir(weightsync.RayReceiver)
    assert methods - set(known) == {"admit", "remote"}


def test_other_hosts_are_told_of() -> None:
    """With the argument that the transport has."""
    (code,) = re.findall(r"`transport=(CollectiveTransport\(address=\"[^`]*\))`", TEXT)
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    (keyword,) = call.keywords
    assert keyword.arg in inspect.signature(weightsync.CollectiveTransport).parameters


def test_what_a_png_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of an extra that there is; and the message without it names the same."""
    assert "pip install -e '.[png]'" in TEXT
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(weightsync.WeightSyncError, match="the extra png"):
        png("<svg/>")


def test_its_links_lead_somewhere() -> None:
    """Files and folders of the repository."""
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert len(links) > 4
    assert not [link for link in links if not (ROOT / link).exists()]


def test_epochs_are_explained_where_the_log_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    """In the README and in the help of the command."""
    assert "*epoch*" in TEXT
    assert main(["log", "--help"]) == 0
    assert "epoch: the number of the lock's grant" in capsys.readouterr().out
