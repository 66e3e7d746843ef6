"""Run long tests and write their results:  python -m tests.soak [NAME …]; without a name, all.

Set the amount in the environment: `MINUTES=60 python -m tests.soak nemesis`, see `SOAKS`. SEED
repeats a run, RESULT replaces the result file in docs/, and PYTEST_ARGS is passed to pytest.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = Path("docs/internals/soak")


class Soak(NamedTuple):
    """A file in tests/soak, the variable that sets the amount, and its default."""

    file: str
    variable: str
    amount: int
    result: str


SOAKS = {
    "spark": Soak("test_spark_kills.py", "KILLS", 20, "spark-kills.json"),
    "backfill": Soak("test_spark_backfill.py", "ROWS", 500_000, "spark-backfill.json"),
    "memory": Soak("test_memory.py", "MESSAGES", 10_000_000, "memory.json"),
    "nemesis": Soak("test_nemesis.py", "MINUTES", 10, "nemesis.json"),
    "kill-points": Soak("test_kill_points.py", "ROUNDS", 3, "kill-points.json"),
    "console": Soak("test_console.py", "LETTERS", 200_000, "console.json"),
    "hygiene": Soak("test_hygiene.py", "COUNT", 10_000, "hygiene.json"),
}


def main() -> int:
    """Run the named soaks, even after a failure. Return the number that failed."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"of {', '.join(SOAKS)}")
    names = parser.parse_args().name or [*SOAKS]
    if unknown := [name for name in names if name not in SOAKS]:
        parser.error(f"no such test: {', '.join(unknown)}; there are {', '.join(SOAKS)}")
    return sum(_run(SOAKS[name]) for name in names)


def _run(soak: Soak) -> bool:
    """Run one soak. Return True if it failed."""
    given = {name: text for name, text in os.environ.items() if text}
    # A soak on an object store has its own result.
    file = Path(soak.result)
    result = file.with_stem(f"{file.stem}-{given['STORE']}") if "STORE" in given else file
    defaults = {soak.variable: str(soak.amount), "RESULT": str(RESULTS / result)}
    more = shlex.split(os.environ.get("PYTEST_ARGS", ""))
    command = [sys.executable, "-m", "pytest", "-s", f"tests/soak/{soak.file}", *more]
    return subprocess.run(command, cwd=ROOT, env=defaults | given).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
