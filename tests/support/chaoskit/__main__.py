"""``python -m chaoskit``: a long run, on a Ray cluster of its own. ``make chaos`` calls it."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys

import ray

from .runner import ChaosFound, run


def main() -> int:
    """Run it; 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="chaoskit", description="Many rounds with faults on real processes."
    )
    parser.add_argument("--seed", type=int, help="of the run; a new one by default")
    parser.add_argument("--rounds", type=int, default=500, help="how many rounds with faults (500)")
    parser.add_argument("--seconds", type=float, help="begin no further round after so many seconds")
    asked = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if asked.seed is None else asked.seed
    _say(f"chaos: seed {seed}")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        report = run(seed, asked.rounds, seconds=asked.seconds, say=_say)
    except ChaosFound as found:
        _say(f"FOUND: {found}")
        return 1
    finally:
        ray.shutdown()
    _say("\n".join(report.lines()))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a command talks


if __name__ == "__main__":
    sys.exit(main())
