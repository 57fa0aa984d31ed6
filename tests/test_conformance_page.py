"""What docs/conformance.md shows is true: its two suites are run from the page, and its rules are ours."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weightsync.testing.conformance import ENGINE_RULES, TRANSPORT_RULES, Rule

pytestmark = pytest.mark.timeout(60)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "conformance.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


def shown(file: str) -> ModuleType:
    """The block of the page that begins with the name of this file, as the module that it is then."""
    (block,) = (each for each in BLOCKS if each.startswith(f"# {file}\n"))
    sys.modules[Path(file).stem] = module = ModuleType(Path(file).stem)
    exec(compile(block, f"{PAGE.name}: {file}", "exec"), vars(module))
    return module


shown("queue_transport.py")
TestQueueTransport: Any = vars(shown("test_queue_transport.py"))["TestQueueTransport"]
TestLocalEngine: Any = vars(shown("test_local_engine.py"))["TestLocalEngine"]


class TestLocalEngineThatIsAskedIfItIsPaused(TestLocalEngine):  # type: ignore[misc]
    """What the page says does as well."""

    def engine(self) -> Any:
        """The same, asked otherwise."""
        subject = super().engine()
        subject.admits = lambda: not subject.receiver.gate.paused
        return subject

    def checks(self) -> Any:
        """Those that ask for it most."""
        wanted = ("rounds", "drain", "never-blocks", "abort", "own-limit")
        return [check for check in super().checks() if check.name.startswith(wanted)]


def table(title: str, rules: dict[str, Rule]) -> str:
    """Rules as the page shows them."""
    rows = [f"| `{rule.name}` | {rule.says} | {rule.do} |" for rule in rules.values()]
    return "\n".join(
        [f"| {title} | the contract | what to do when it is broken |", "| --- | --- | --- |", *rows]
    )


def test_the_page_has_every_rule() -> None:
    """The two tables are those of the kit, word by word."""
    wanted = f"{table('transports', TRANSPORT_RULES)}\n\n{table('engines', ENGINE_RULES)}"
    found = PAGE.read_text().partition("<!-- rules -->\n")[2].partition("\n<!-- end of rules -->")[0]
    assert found == wanted, "write the tables anew from TRANSPORT_RULES and ENGINE_RULES"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.partition("\n")[0])
def test_every_block_is_python(block: str) -> None:
    """A block that does not even compile helps nobody."""
    compile(block, PAGE.name, "exec")
