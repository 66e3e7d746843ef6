"""Run the fault battery and write its page:  python -m tests.faults [--page] [SERVER …]

Runs every marked test on each server (default: valkey redis7 redis62), writes the outcomes to
docs/explanation/faults.json and the page to docs/explanation/fault-battery.md. With `--page` it
runs nothing and writes the page from the outcomes of the last run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults import page, recorder
from tests.faults.marked import rows_of_tests
from tests.support import servers

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "explanation" / "faults.json"
PAGE = RESULTS.with_name("fault-battery.md")
SERVERS = ("valkey", "redis7", "redis62")


def main() -> int:
    """Run, record, write; return 0 when no marked test has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("server", nargs="*", default=SERVERS)
    options = parser.parse_args()
    if not options.page:
        try:
            results = run(options.server)
        except servers.NoServerError as error:
            print(error, file=sys.stderr)
            return 2
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(current_page())
    return int(any("failed" in found.values() for found in last_results()["outcomes"].values()))


def current_page() -> str:
    """The page as it must be now."""
    return page.render(rows_of_tests(), last_results())


def last_results() -> dict[str, Any]:
    """The outcomes of the last run; none when there was no run."""
    if not RESULTS.exists():
        return {"outcomes": {}}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def run(words: list[str]) -> dict[str, Any]:
    """Run the marked tests on each server. Raises NoServerError before the first."""
    about = {word: _about(word) for word in words}
    started, outcomes = time.monotonic(), {}
    for word in words:
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", "-m", "fault", "-p", recorder.__name__),
                    *("--server", word, "-n", "2", "--dist", "loadfile", "-q"),
                ],
                cwd=ROOT,
                env={**os.environ, recorder.VARIABLE: file.name},
            )
            outcomes[word] = json.load(file)
    return {
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "seconds": round(time.monotonic() - started),
        "machine": _machine(),
        "servers": about,
        "outcomes": outcomes,
    }


def _about(word: str) -> str:
    server = servers.start(word)
    try:
        return f"{server.product} {server.facts.version}"
    finally:
        server.close()


def _machine() -> dict[str, Any]:
    model = "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
