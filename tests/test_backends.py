"""Optional back ends: absent is quiet, broken is one warning, asking explains, mistakes are never swallowed.

The packages of these tests are real ones, written to a folder on the path.
"""

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightsync import backends as backends_module
from weightsync.backends import Backend, Backends, Mode
from weightsync.cli import doctor, main
from weightsync.fsm.contract import Capabilities
from weightsync.fsm.errors import BackendUnavailable, SetupError, WeightSyncError
from weightsync.fsm.imports import Standing, said
from weightsync.joining import TRANSPORTS, transport_for
from weightsync.transport_backends import GROUP, TABLE, transports

SRC = Path(__file__).parents[1] / "src"


class Shelf:
    """A folder on the path, to put packages on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, path: str, text: str = "") -> None:
        """Write a module; its packages are made."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.relative_to(self.folder).parents:
            if str(folder) != ".":
                (self.folder / folder / "__init__.py").touch()
        file.write_text(textwrap.dedent(text))

    def installed(self, name: str, points: dict[str, str], requires: tuple[str, ...] = ()) -> None:
        """The papers of a package, with entry points."""
        folder = self.folder / f"{name}-2.5.dist-info"
        folder.mkdir()
        lines = [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5",
            *(f"Requires-Dist: {each}" for each in requires),
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "entry_points.txt").write_text(
            f"[{GROUP}]\n" + "".join(f"{point} = {value}\n" for point, value in points.items())
        )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """A shelf; what was imported from it is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backends_module, "_TOLD", set())
    before = set(sys.modules)
    yield Shelf(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the library logs, however quiet."""
    caplog.set_level(logging.DEBUG, "weightsync")
    return caplog


def one(mode: Mode = "warn", needs: tuple[str, ...] = ("gadget",)) -> Backends:
    """A registry with a back end ``plug``, which is ``plugged.inner:Plug`` and may lack ``gadget``."""
    plug = Backend("plug", "plugged.inner", "Plug", needs, "a plug")
    return Backends("thing", [plug, Backend("safe", "collections", "OrderedDict")], mode=mode, also=("auto",))


def refusal(backends: Backends) -> Exception | None:
    """What asking for it raises."""
    try:
        backends.get("plug")
    except Exception as error:  # noqa: BLE001 - which kind is what is looked at
        return error
    return None


USES_GADGET = """
    import gadget

    class Plug:
        size = gadget.SIZE
"""


# -- ready --------------------------------------------------------------------------------------------------


def test_what_is_there_is_made_without_a_word(shelf: Shelf, log: pytest.LogCaptureFixture) -> None:
    """And imported once."""
    shelf.put("plugged/inner.py", USES_GADGET)
    shelf.put("gadget.py", "SIZE = 3")
    backends = one()
    assert backends.get("plug")().size == 3
    assert backends.find("plug") is backends.get("plug")
    assert backends.verdict("plug").standing is Standing.ready
    assert log.messages == []


def test_nothing_is_imported_before_it_is_asked_for(shelf: Shelf) -> None:
    """Neither by listing names nor by looking at what one needs."""
    shelf.put("plugged/inner.py", USES_GADGET)
    shelf.put("gadget.py", "SIZE = 3")
    backends = one()
    assert backends.names() == ("auto", "plug", "safe")
    assert [backends.lacking(each) for each in backends.all()] == [[], []]
    assert not {"plugged", "plugged.inner", "gadget"} & sys.modules.keys()


# -- absent -------------------------------------------------------------------------------------------------


def test_what_is_absent_is_an_event_at_level_debug(shelf: Shelf, log: pytest.LogCaptureFixture) -> None:
    """Nobody wanted it."""
    shelf.put("plugged/inner.py", USES_GADGET)
    backends = one()
    assert backends.find("plug") is None
    assert backends.find("plug") is None
    assert len(log.records) == 1
    record = log.records[0]
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == (
        'event="thing is absent" backend=plug error=ModuleNotFoundError message="No module named \'gadget\'"'
    )


def test_asking_for_what_is_absent_says_what_to_install(shelf: Shelf) -> None:
    """With the others, and what was raised."""
    shelf.put("plugged/inner.py", USES_GADGET)
    with pytest.raises(BackendUnavailable) as caught:
        one().get("plug")
    assert str(caught.value) == (
        "thing 'plug' cannot be used here, as gadget is not installed; others are: auto, safe"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.name == "gadget"


def test_a_package_that_is_used_late_is_missed_at_once(shelf: Shelf) -> None:
    """The back end imports it in the middle of a round only; it is asked about before."""
    shelf.put("plugged/inner.py", "class Plug:\n    def use(self):\n        import gadget")
    with pytest.raises(BackendUnavailable, match="gadget is not installed"):
        one().get("plug")


# -- broken -------------------------------------------------------------------------------------------------

BROKEN = {
    "another package is missing inside": ("import not_there_at_all", "ModuleNotFoundError", "gadget.py:1"),
    "an import error from inside": ("raise ImportError('wrong glibc')", "ImportError", "gadget.py:1"),
    "a missing name": ("from os import not_there", "ImportError", "gadget.py:1"),
    "a native library": ("import ctypes\nctypes.CDLL('libnot_there.so')", "OSError", "gadget.py:2"),
    "a device": ("raise RuntimeError('no driver')", "RuntimeError", "gadget.py:1"),
    "anything else in it": ("None.missing", "AttributeError", "gadget.py:1"),
    "its own syntax": ("def (", "SyntaxError", "gadget.py:1"),
    "a part of it is missing": ("import gadget.part", "ModuleNotFoundError", "gadget.py:1"),
    "a symbol that it no longer has": ("", "AttributeError", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_one_structured_warning(
    what: str, shelf: Shelf, log: pytest.LogCaptureFixture
) -> None:
    """Event, name, kind of error, its text and the first place outside of the back end, in one line."""
    text, kind, where = BROKEN[what]
    shelf.put("plugged/inner.py", USES_GADGET)
    shelf.put("gadget.py", text)
    for backends in (one(), one()):
        assert backends.find("plug") is None
        assert backends.find("plug") is None
    assert len(log.records) == 1
    record = log.records[0]
    line = record.getMessage()
    assert record.levelno == logging.WARNING
    assert line.startswith(f'event="thing is broken" backend=plug error={kind} message=')
    assert "\n" not in line
    assert where in line
    assert backends.verdict("plug").standing is Standing.broken


@pytest.mark.parametrize("what", BROKEN)
def test_asking_for_what_is_broken_explains(what: str, shelf: Shelf) -> None:
    """It is named, with the others, and what was raised is the cause, the very object each time."""
    text, kind, _ = BROKEN[what]
    shelf.put("plugged/inner.py", USES_GADGET)
    shelf.put("gadget.py", text)
    backends = one()
    error, again = refusal(backends), refusal(backends)
    assert isinstance(error, BackendUnavailable)
    assert isinstance(error, SetupError)
    assert str(error).startswith(f"thing 'plug' is broken: its import raised {kind}: ")
    assert str(error).endswith("; others are: auto, safe")
    assert type(error.__cause__).__name__ == kind
    assert again is not None
    assert again.__cause__ is error.__cause__


def test_a_native_library_that_cannot_be_loaded_is_broken(shelf: Shelf) -> None:
    """A file with the name of an extension module that is none: the loader names it."""
    shelf.put("plugged/inner.py", USES_GADGET)
    import sysconfig

    shelf.put(f"gadget{sysconfig.get_config_var('EXT_SUFFIX')}", "no elf")
    with pytest.raises(BackendUnavailable, match=r"ImportError: .*gadget") as caught:
        one().get("plug")
    assert "at " in str(caught.value)


# -- modes --------------------------------------------------------------------------------------------------


def test_quiet_writes_no_warning(shelf: Shelf, log: pytest.LogCaptureFixture) -> None:
    """Whoever asks by name is told all the same."""
    shelf.put("plugged/inner.py", USES_GADGET)
    shelf.put("gadget.py", "raise OSError('boom')")
    backends = one("quiet")
    assert backends.find("plug") is None
    assert [record.levelname for record in log.records] == ["DEBUG"]
    with pytest.raises(BackendUnavailable, match="OSError: boom"):
        backends.get("plug")


@pytest.mark.parametrize("text", [None, "raise OSError('boom')"])
def test_strict_raises_at_the_first_question(text: str | None, shelf: Shelf) -> None:
    """Also to whoever could do without it, whether it is absent or broken."""
    shelf.put("plugged/inner.py", USES_GADGET)
    if text is not None:
        shelf.put("gadget.py", text)
    assert one("warn").find("plug") is None
    with pytest.raises(BackendUnavailable, match="boom" if text else "gadget is not installed"):
        one("strict").find("plug")


def test_another_mode_is_refused() -> None:
    """In one line."""
    with pytest.raises(SetupError, match=r"Backends\(mode='loud'\): 'quiet', 'warn' or 'strict' is needed"):
        transports("loud")  # type: ignore[arg-type]


# -- mistakes -----------------------------------------------------------------------------------------------

MISTAKES = {
    "syntax": ("def (", SyntaxError),
    "a name": ("Plug = nowhere", NameError),
    "an attribute": ("Plug = None.missing", AttributeError),
    "an attribute of a module of its own": ("from . import other\nPlug = other.missing", AttributeError),
    "a type": ("Plug = 1 + 'one'", TypeError),
    "a name that another module of its own does not have": ("from .other import missing", ImportError),
    "a module of its own that is not there": (
        "from . import other\nimport plugged.gone",
        ModuleNotFoundError,
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_of_its_own_is_raised_as_it_is(
    what: str, shelf: Shelf, log: pytest.LogCaptureFixture
) -> None:
    """Each time, whoever asks, in every mode; and nobody calls it a missing package."""
    text, kind = MISTAKES[what]
    shelf.put("plugged/other.py")
    shelf.put("plugged/inner.py", text)
    shelf.put("gadget.py", "SIZE = 1")
    for mode in ("quiet", "warn", "strict"):
        backends = one(mode)
        for ask in (backends.find, backends.get, backends.verdict):
            with pytest.raises(kind) as caught:
                ask("plug")
            assert not isinstance(caught.value, WeightSyncError)
    assert log.messages == []


def test_an_interrupt_is_no_verdict(shelf: Shelf) -> None:
    """Nor is an exit."""
    shelf.put("plugged/inner.py", "raise KeyboardInterrupt")
    shelf.put("gadget.py")
    with pytest.raises(KeyboardInterrupt):
        one().find("plug")


def test_a_class_that_is_not_where_the_table_says_is_a_mistake(shelf: Shelf) -> None:
    """Of the library's, if the table is."""
    shelf.put("plugged/inner.py")
    shelf.put("gadget.py")
    with pytest.raises(AttributeError, match="Plug"):
        one().get("plug")


# -- entry points -------------------------------------------------------------------------------------------

MINE = """
    from weightsync.fsm.contract import Capabilities

    class Mine:
        name = "mine"
        capabilities = Capabilities(
            stages=True, aliases=False, cross_host=False, survives_loss=True, dtypes=None
        )

        def open(self, *_): ...
        def broadcast(self, *_): ...
        def collect(self, *_): ...
        def clean(self): ...
        def abort(self): ...
        def close(self): ...
"""


def test_a_transport_of_ones_own_is_found_by_its_entry_point(shelf: Shelf) -> None:
    """By name, behind the library's own; its package is imported when it is asked for."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    shelf.put("minepack/transport.py", MINE)
    backends = transports()
    assert backends.names() == (*TRANSPORTS, "mine")
    assert "minepack" not in sys.modules
    found = transport_for("mine", backends=backends)
    assert (found.name, type(found).__module__) == ("mine", "minepack.transport")
    assert isinstance(found.capabilities, Capabilities)
    assert transport_for("mine").name == "mine"


def test_what_its_package_may_be_installed_with_may_be_absent(
    shelf: Shelf, log: pytest.LogCaptureFixture
) -> None:
    """An extra of it; anything else that is missing makes it broken."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"}, ('fast-wire>=2; extra == "fast"',))
    shelf.put("minepack/transport.py", "import fast_wire")
    with pytest.raises(
        BackendUnavailable, match=r"'mine' of minepack cannot be used here, as fast_wire is not inst"
    ):
        transport_for("mine")
    assert [record.levelname for record in log.records] == ["DEBUG"]


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ("minepack.gone:Mine", "ModuleNotFoundError: No module named 'minepack.gone'"),
        ("minepack.transport:Gone", "AttributeError: module 'minepack.transport' has no attribute 'Gone'"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_broken(point: str, says: str, shelf: Shelf) -> None:
    """Its package is named."""
    shelf.installed("minepack", {"mine": point})
    shelf.put("minepack/transport.py", MINE)
    with pytest.raises(
        BackendUnavailable, match=f"transport 'mine' of minepack is broken: its import raised {says}"
    ):
        transport_for("mine")


@pytest.mark.parametrize("value", ["ph mod::x y", "minepack.transport", ":Mine", "minepack.transport:"])
def test_a_malformed_entry_point_costs_one_line_and_nobody_else(value: str, shelf: Shelf) -> None:
    """Neither listing nor anything but its own name minds it, the first time and the next ones."""
    shelf.installed("badpack", {"bad": value})
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    shelf.put("minepack/transport.py", MINE)
    backends = transports()
    for _ in range(2):
        assert backends.names() == (*TRANSPORTS, "bad", "mine")
        assert transport_for("mine", backends=backends).name == "mine"
        with pytest.raises(SetupError, match="no transport is called 'typo'; there are: auto"):
            transport_for("typo", backends=backends)
        with pytest.raises(BackendUnavailable) as caught:
            transport_for("bad", backends=backends)
        assert f"'bad' of badpack is broken: its entry point says {value!r}, where 'module:name'" in str(
            caught.value
        )
    assert main(["doctor"]) == 1


def test_papers_that_cannot_be_read_cost_one_line_and_nobody_else(
    shelf: Shelf, log: pytest.LogCaptureFixture
) -> None:
    """Whatever a stranger wrote there, and however often it is looked at."""
    shelf.installed("badpack", {"bad": "x:y"})
    (shelf.folder / "badpack-2.5.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nno equals sign\n")
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    shelf.put("minepack/transport.py", MINE)
    for _ in range(2):
        assert transports().names() == (*TRANSPORTS, "mine")
    assert [record.levelname for record in log.records] == ["WARNING"]
    assert 'event="entry points cannot be read" package=badpack' in log.messages[0]


def test_what_was_read_half_is_read_again(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on the way does not leave the part that came before it."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    backends, right = transports(), backends_module._of

    def interrupted(point: Any) -> Backend:
        raise KeyboardInterrupt

    monkeypatch.setattr(backends_module, "_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backends.names()
    monkeypatch.setattr(backends_module, "_of", right)
    assert backends.names() == (*TRANSPORTS, "mine")
    assert [each.name for each in backends.all() if each.source] == ["mine"]


def test_a_mistake_in_it_is_raised(shelf: Shelf) -> None:
    """Its author is who asks."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    shelf.put("minepack/transport.py", "Mine = nowhere")
    with pytest.raises(NameError):
        transport_for("mine")


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("def Mine(): raise OSError('device busy')", BackendUnavailable,
         "transport 'mine' of minepack cannot be made here: OSError: device busy"),
        ("Mine = 3", SetupError, "transport 'mine' of minepack names a int, which cannot be called"),
        ("def Mine(): return 1 + 'one'", TypeError, "raised while transport 'mine' of minepack was made"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_named(text: str, kind: type[Exception], says: str, shelf: Shelf) -> None:
    """Whose it is stands in the error, or beside that of a mistake, which stays what it is."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    shelf.put("minepack/transport.py", text)
    with pytest.raises(kind) as caught:
        transport_for("mine")
    assert says in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert isinstance(caught.value, WeightSyncError) is (kind is not TypeError)


def test_a_recursion_without_end_is_a_mistake(shelf: Shelf) -> None:
    """Though Python counts it among the errors of the time when something runs."""
    shelf.put("plugged/inner.py", "def f(): return f()\nf()")
    shelf.put("gadget.py")
    with pytest.raises(RecursionError):
        one().find("plug")


def test_an_error_that_cannot_speak_is_told(shelf: Shelf, log: pytest.LogCaptureFixture) -> None:
    """And one with signs that move a terminal does not."""
    silent = "class E(OSError):\n    def __str__(self): raise ValueError\nraise E"
    shelf.put("plugged/inner.py", "import gadget")
    shelf.put("gadget.py", silent)
    assert one().verdict("plug").reason == "E: (its text raised ValueError)"
    assert 'message="(its text raised ValueError)"' in log.messages[0]
    assert said(OSError("one\ntwo\x1b[31m\x00")) == "OSError: one two?[31m?"
    assert said(SystemExit()) == "SystemExit"


def test_a_name_of_the_librarys_is_nobody_elses(shelf: Shelf) -> None:
    """A package cannot take the place of a transport that is known."""
    shelf.installed("minepack", {"memory": "minepack.transport:Mine"})
    shelf.put("minepack/transport.py", MINE)
    shelf.installed("yourpack", {"auto": "minepack.transport:Mine"})
    assert type(transport_for("memory")).__module__ == "weightsync.transports.memory"
    assert transports().names() == TRANSPORTS


def test_two_packages_of_one_name_are_refused(shelf: Shelf) -> None:
    """Whichever came first would be a matter of chance."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    shelf.installed("yourpack", {"mine": "minepack.transport:Mine"})
    with pytest.raises(
        SetupError, match="'mine' is brought by minepack and yourpack: uninstall all of these but one"
    ):
        transport_for("mine")


def test_what_is_no_transport_is_refused(shelf: Shelf) -> None:
    """Before a round asks it anything."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    shelf.put("minepack/transport.py", "Mine = dict")
    with pytest.raises(
        SetupError, match=r"the entry point 'mine' of weightsync.transports makes has to be a trans"
    ):
        transport_for("mine")


def test_a_name_that_nobody_brings_is_refused_with_those_there_are(shelf: Shelf) -> None:
    """Those of other packages included."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine"})
    with pytest.raises(
        SetupError, match=r"no transport is called 'yours'; there are: auto, memory, .*, objects, mine$"
    ):
        transport_for("yours")


# -- the library itself -------------------------------------------------------------------------------------


def test_the_table_says_where_the_transports_are() -> None:
    """Each can be imported, and is called as the table says."""
    for each in TABLE:
        made = transports().get(each.name)
        assert f"{each.path}.{each.attribute}" == f"{made.__module__}.{made.__qualname__}"


def run(shelf: Shelf, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, in which the shelf comes first on the path."""
    path = os.pathsep.join([str(shelf.folder), str(SRC)])
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


ASKS = """
    import logging
    logging.basicConfig(format="%(levelname)s %(message)s")
    import weightsync
    from weightsync.transport_backends import transports
    from weightsync.fsm.errors import BackendUnavailable
    for _ in range(3):
        try:
            transports().get("shm")
        except BackendUnavailable as error:
            print(type(error.__cause__).__name__)
"""


@pytest.mark.parametrize("options", [(), ("-W", "error")])
def test_a_broken_library_breaks_neither_the_import_nor_more_than_its_transports(
    shelf: Shelf, options: tuple[str, ...]
) -> None:
    """Also where each warning of Python's is fatal; the log has one line for three questions."""
    shelf.put(
        "msgpack/__init__.py",
        "import warnings\nwarnings.warn('old')\nraise OSError('libmsg.so: no such file')",
    )
    for name in ("torch", "xxhash", "numpy"):
        shelf.put(f"{name}/__init__.py")
    done = run(shelf, ASKS, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["UserWarning" if options else "OSError"] * 3
    lines = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(lines) == 1, done.stderr
    assert 'WARNING event="transport is broken" backend=shm error=' in lines[0]
    assert f"where={shelf.folder}/msgpack/__init__.py:" in lines[0]


AUTO = """
    import logging
    logging.basicConfig(format="%(levelname)s %(message)s")
    from weightsync.fsm.errors import BackendUnavailable
    from weightsync.joining import transport_for
    from weightsync.transport_backends import transports
    for mode in ("warn", "strict"):
        try:
            print(transport_for("auto", None, transports(mode))._take("shm").name)
        except BackendUnavailable as error:
            print(error)
"""


def test_auto_takes_another_transport_unless_it_is_strict(shelf: Shelf) -> None:
    """Shared memory lacks its package: the collective will do, or the error says why not."""
    shelf.put("msgpack/__init__.py", "raise OSError('libmsg.so: no such file')")
    done = run(shelf, AUTO)
    assert done.returncode == 0, done.stderr
    lenient, strict = done.stdout.splitlines()
    assert lenient == "collective"
    assert strict.startswith(
        "transport 'shm' is broken: its import raised OSError: libmsg.so: no such file, at"
    )
    assert done.stderr.count("WARNING") == 1


def test_the_doctor_prints_the_table(shelf: Shelf) -> None:
    """With those of other packages; what is broken is found by loading, and is status 1."""
    shelf.installed("minepack", {"mine": "minepack.transport:Mine", "worse": "minepack.worse:Mine"})
    shelf.put("minepack/transport.py", MINE)
    shelf.put("minepack/worse.py", "Mine = nowhere")
    shelf.put("msgpack/__init__.py", "raise OSError('libmsg.so: no such file')")
    doctor = "import sys\nfrom weightsync.cli import main\nsys.exit(main(['doctor'{}]))"
    seen = run(shelf, doctor.format(""))
    assert seen.returncode == 0, seen.stderr
    lines = {line.partition("  ")[0]: " ".join(line.split()) for line in seen.stdout.splitlines()}
    assert lines["transport mine"].startswith("transport mine ok 2.5 brought by minepack; not imported")
    loaded = run(shelf, doctor.format(", '--load'"))
    assert loaded.returncode == 1, loaded.stderr
    told = " ".join(loaded.stdout.split())
    assert (
        "transport mine ok 2.5 brought by minepack transport worse BROKEN 2.5 brought by minepack: NameError"
        in told
    )
    assert "transport shm BROKEN OSError: libmsg.so: no such file, at" in told
    assert "transport memory ok engines in this process" in told


@pytest.mark.parametrize("load", [False, True])
def test_the_doctor_has_a_line_for_each_stranger(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], *, load: bool
) -> None:
    """Whatever they do, the others have theirs; what cannot be reached is not called usable."""
    ends = {"quits": "raise SystemExit(3)", "mute": "class E(Exception):\n    __str__ = 3\nraise E"}
    for name, text in ends.items():
        shelf.installed(name, {name: f"{name}_mod:T"})
        shelf.put(f"{name}_mod.py", text)
    for name, point in {"takes": "memory", "grabs": "auto", "one": "same", "two": "same"}.items():
        shelf.installed(name, {point: "minepack.transport:Mine"})
    shelf.put("minepack/transport.py", MINE)
    lines = [(each.what, each.verdict, each.note) for each in doctor.findings(load=load)]
    told = [line for line in lines if "brought by" in line[2]]
    assert len(told) == 6
    assert [line for line in told if line[0] == "transport memory"] == [
        ("transport memory", "no", "brought by takes, and not to be reached: the name is the library's own")
    ]
    assert [line[1] for line in told if line[0] == "transport auto"] == ["no"]
    assert sorted(line[2] for line in told if line[0] == "transport same") == [
        "brought by one, and not to be reached: the name is brought by two as well",
        "brought by two, and not to be reached: the name is brought by one as well",
    ]
    found = {line[0]: line[1:] for line in told}
    if load:
        assert found["transport quits"] == ("BROKEN", "brought by quits: SystemExit: 3")
        assert found["transport mute"] == ("BROKEN", "brought by mute: E: (its text raised TypeError)")
    assert ("transport memory", "ok", "engines in this process") in lines
    assert main(["doctor", "--load"][: 2 if load else 1]) == (1 if load else 0)
    assert capsys.readouterr().out.count("transport same") == 2


# -- workers of a cluster -----------------------------------------------------------------------------------


class Worker:
    """An actor that asks for something broken, more than once and in more than one registry."""

    def lines(self, folder: str) -> list[str]:
        """What its process logs of that."""
        sys.path.insert(0, folder)
        told: list[str] = []

        class Listens(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                told.append(record.getMessage())

        logging.getLogger("weightsync").addHandler(Listens(logging.WARNING))
        plug = Backend("plug", "plugged.inner", "Plug", ("gadget",))
        for _ in range(3):
            backends = Backends("thing", [plug])
            for _ in range(2):
                backends.find("plug")
        return told


@pytest.mark.ray
@pytest.mark.slow
def test_each_worker_of_a_cluster_says_it_once(shelf: Shelf, ray_cluster: None) -> None:
    """However often it asks; N workers log N lines, and none for what nobody asked for."""
    import ray

    shelf.put("plugged/inner.py", USES_GADGET)
    shelf.put("gadget.py", "raise OSError('libgadget.so: no such file')")
    path = os.pathsep.join([str(SRC), str(Path(__file__).parent)])
    kind: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": path}})(Worker)
    workers: list[Any] = [kind.remote() for _ in range(2)]
    try:
        said = ray.get([worker.lines.remote(str(shelf.folder)) for worker in workers], timeout=120)
    finally:
        for worker in workers:
            ray.kill(worker)
    assert [len(lines) for lines in said] == [1, 1]
    cause = 'backend=plug error=OSError message="libgadget.so: no such file"'
    assert all(cause in lines[0] for lines in said)
