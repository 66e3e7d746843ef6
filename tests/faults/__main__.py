"""Run the fault battery and write its page:  python -m tests.faults [--page] [-k WORD] [SERVER …]

Every marked test runs on the first server. The tests that use a server also run on the others
(default: valkey redis7 redis62). The outcomes are written to docs/internals/faults.json and the
page to docs/internals/fault-battery.md. `-k` runs only the tests that pytest selects, and keeps the
outcomes of the others. `--page` runs no tests, and writes the page from the outcomes of the last
run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults import page, recorder, results
from tests.faults.marked import rows_of_tests
from tests.faults.results import SERVERS
from tests.support import servers
from tests.support.machine import machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "internals" / "faults.json"
PAGE = RESULTS.with_name("fault-battery.md")
PROCESSES = "3"  # most tests spend most of their time waiting for events


def main() -> int:
    """Run the tests, and write the outcomes and the page. Return 0 if no marked test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("-k", metavar="WORD", default="", help="only the tests that match")
    parser.add_argument("server", nargs="*", default=SERVERS)
    options = parser.parse_args()
    if not options.page:
        try:
            found = run(options.server, options.k)
        except (servers.NoServerError, BrokenRunError) as error:
            print(error, file=sys.stderr)
            return 2
        if options.k and RESULTS.exists():
            found = results.merge_results(last_results(), found)
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(current_page())
    failed = [
        f"{server}: {test}"
        for server, found in last_results()["outcomes"].items()
        for test, outcome in found.items()
        if outcome == "failed"
    ]
    print("\n".join(["failed:", *failed] if failed else ["none has failed"]))
    return int(bool(failed))


class BrokenRunError(Exception):
    """An error of pytest itself, which has printed its own message above."""


def current_page() -> str:
    """Return the page for the current table and outcomes."""
    return page.render(rows_of_tests(), last_results())


def last_results() -> dict[str, Any]:
    """Return the outcomes of the last run, or an empty result if there was none."""
    if not RESULTS.exists():
        return {"outcomes": {}}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def run(words: Sequence[str], only: str = "") -> dict[str, Any]:
    """Run the marked tests on each server. Raises NoServerError, BrokenRunError."""
    about = {word: servers.about(word) for word in words}
    began, seconds = time.monotonic(), {}
    outcomes: dict[str, dict[str, str]] = {}
    on_server: set[str] = set()
    full_speed: dict[str, dict[str, float]] = {}
    for at, word in enumerate(words):
        print(f"--- {at + 1}/{len(words)}: {about[word]}", flush=True)
        started = time.monotonic()
        found = _run_one(word, only, everything=at == 0)
        outcomes = results.join_outcomes(outcomes, found["outcomes"])
        on_server.update(found["on_server"])
        for server, times in found["full_speed"].items():
            full_speed.setdefault(server, {}).update(times)
        seconds[word] = round(time.monotonic() - started)
        told = Counter(how for tests in found["outcomes"].values() for how in tests.values())
        count = ", ".join(f"{n} {how}" for how, n in told.items())
        print(f"--- {about[word]}: {count or 'no test'} in {seconds[word]} s", flush=True)
    print(f"--- all in {time.monotonic() - began:.0f} s", flush=True)
    return {
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "seconds": seconds,
        "machine": machine(),
        "servers": about,
        "outcomes": outcomes,
        "on_server": sorted(on_server),
        "full_speed": full_speed,
    }


def _run_one(word: str, only: str, *, everything: bool) -> dict[str, Any]:
    """Run the marked tests on one server, and show the progress as pytest prints it."""
    command = [
        *(sys.executable, "-m", "pytest", "-m", "fault", "-p", recorder.__name__),
        *("--server", word, "-n", PROCESSES, "--dist", "loadfile", "-v", "--durations=10"),
        *(("-k", only) if only else ()),
        *sorted({test.partition("::")[0] for test in rows_of_tests()}),
    ]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        environment = {recorder.VARIABLE: file.name}
        if not everything:
            environment[recorder.SCOPE] = "server"
        code = subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode
        if code not in (0, 1, 5):  # all passed, some failed, none were selected
            raise BrokenRunError(f"the run on {word} was broken off (pytest's code {code})")
        found: dict[str, Any] = json.load(file)
    return found


if __name__ == "__main__":
    sys.exit(main())
