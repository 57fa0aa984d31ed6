"""What is built is what is in the tree, and what is installed from it works away from the tree.

Case B44 is among it: sgl-project/sglang#15643, nvidia-cosmos/cosmos-rl#525.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import weightsync

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("fsm", "transports", "handlers", "diagrams")
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.egg-info", ".*")


def run(*command: str | Path, folder: Path, hidden: bool = False) -> str:
    """The standard output of a command that must succeed, run as a user would; with every GPU ``hidden``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if hidden else {}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    """A clean copy of the tree, and what was built from it."""

    tree: Path
    sdist: Path
    wheel: Path

    def files(self) -> set[str]:
        """The files of the library, as they should be called inside a wheel."""
        folders = {self.tree / name: Path("weightsync", name) for name in LAYERS}
        folders[self.tree / "src" / "weightsync"] = Path("weightsync")
        return {
            str(inside / path.relative_to(folder))
            for folder, inside in folders.items()
            for path in folder.rglob("*")  # stops at links, behind which are the other folders
            if path.is_file()
        }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The tree without what earlier builds and runs left in it; its sdist; the wheel made from that sdist."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in ("src", *LAYERS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=LEFTOVERS)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree, folder=dist)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return Built(tree, sdist, wheel)


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel in it.

    Torch and the like are borrowed from the environment of the tests, by a path file. An interpreter reads no
    path files in a folder that it was led to by one, so the editable install over there stays out of sight.
    """
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(built.wheel)]
    run(sys.executable, "-m", "pip", "--python", python, *install, folder=home)
    (packages,) = home.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n", encoding="utf-8")
    return python


def test_b44_the_wheel_holds_the_files_of_the_tree(built: Built) -> None:
    """Nothing is missing, nothing is added, and every file lies where it is imported from."""
    with zipfile.ZipFile(built.wheel) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = built.files()
    assert {"weightsync/py.typed", *(f"weightsync/{name}/__init__.py" for name in LAYERS)} <= wanted
    assert packed == wanted, "a data file? see [tool.setuptools.package-data]"


def test_the_sdist_holds_files_where_the_tree_has_links(built: Built) -> None:
    """Who unpacks the sdist needs no support for links, and gets the licence with it."""
    with tarfile.open(built.sdist) as sdist:
        members = {member.name.partition("/")[2]: member for member in sdist.getmembers()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= members.keys()
    assert {f"src/{name}" for name in built.files()} <= members.keys()
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]


def test_the_wheel_says_what_it_is(built: Built) -> None:
    """Version, licence and command in the metadata are those of the tree."""
    with zipfile.ZipFile(built.wheel) as wheel:
        info = f"weightsync-{weightsync.__version__}.dist-info"
        metadata = wheel.read(f"{info}/METADATA").decode()
        commands = wheel.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "weightsync = weightsync.cli:main" in commands


def test_b44_the_installed_library_is_imported_from_where_it_was_installed(
    python: Path, tmp_path: Path
) -> None:
    """The fresh environment uses its own copy: nothing on its path leads back into the tree."""
    code = """
import sys, weightsync, weightsync.diagrams, weightsync.fsm, weightsync.handlers, weightsync.transports
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "weightsync"]
print(weightsync.__version__)
print(*{module.__file__ for module in ours}, sep=":")
print(*sys.path, sep=":")
"""
    version, files, path = run(python, "-c", code, folder=tmp_path).splitlines()
    home = python.parent.parent
    assert version == weightsync.__version__
    assert not [file for file in files.split(":") if not Path(file).is_relative_to(home)]
    assert not [entry for entry in path.split(":") if Path(entry) in (ROOT, ROOT / "src")]


def test_b44_the_installed_command_answers(python: Path, tmp_path: Path) -> None:
    """The command and `python -m weightsync` are the same thing, and both are there."""
    asked = run(python.parent / "weightsync", "--help", folder=tmp_path)
    assert "usage: weightsync" in asked
    assert "usage: " in run(python, "-m", "weightsync", "--help", folder=tmp_path)


def test_b44_a_round_away_from_the_tree(python: Path, tmp_path: Path) -> None:
    """Two engines of one process, over both transports, without a GPU; and its log is read."""
    code = """
import torch, weightsync
assert not torch.cuda.is_available()
for transport in ("memory", "collective"):
    held = [{"w": torch.zeros(8), "b": torch.zeros(2, dtype=torch.bfloat16)} for _ in range(2)]
    engines = [weightsync.LocalEngine(weightsync.receiver_for(each, f"e{n}")) for n, each in enumerate(held)]
    model = {"w": torch.arange(8.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    log = weightsync.StateLog(f"{transport}.jsonl")
    with weightsync.WeightSync(engines, transport, handlers=[log]) as sync:
        result = sync.on_train_begin(model).require()
    assert all(torch.equal(each[name], model[name]) for each in held for name in model)
    print(transport, result.version, *result.path)
"""
    path = "Idle Locked Broadcasting Awaiting Cleaning Released"
    told = run(python, "-c", code, folder=tmp_path, hidden=True).splitlines()
    assert told == [f"{transport} 0 {path}" for transport in ("memory", "collective")]
    for transport in ("memory", "collective"):
        log = tmp_path / f"{transport}.jsonl"
        assert "1 complete" in run(python.parent / "weightsync", "log", log, folder=tmp_path)
        run(python.parent / "weightsync", "check", log, folder=tmp_path)


def test_b44_it_is_imported_where_nothing_else_is_installed(built: Built, tmp_path: Path) -> None:
    """No torch, no Ray, no GPU: the import, the version and the help ask for none of them."""
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(tmp_path / "site")
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    (packages,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    (packages / "site.pth").write_text(f"{tmp_path / 'site'}\n", encoding="utf-8")
    code = "import weightsync; print(weightsync.__version__, len(dir(weightsync)) > 10)"
    assert run(python, "-c", code, folder=tmp_path) == f"{weightsync.__version__} True\n"
    assert "usage: weightsync" in run(python, "-m", "weightsync", "--help", folder=tmp_path)
