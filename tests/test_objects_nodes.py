"""Ray's object store between nodes: buckets travel, and a node that goes takes its engines alone along."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from casekit.rayside import environment

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


def test_engines_on_another_node_get_every_bucket_and_its_end_is_theirs_alone(tmp_path: Path) -> None:
    """Two stores, two nodes: what is put into the one is read from the other."""
    found_in = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "casekit.nodes", str(found_in)],
        env={**os.environ, **environment()["env_vars"]},
        capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(found_in.read_text())
    assert found["nodes"] == 2
    for name in ("first", "second"):
        assert found[name]["ok"], found[name]["line"]
        assert found[name]["new"] == {"here": True, "there": True, "yonder": True}
    assert found["alone"]["ok"], found["alone"]["line"]
    assert found["alone"]["new"] == {"here": True}
    assert found["servable"] == ["here"]
