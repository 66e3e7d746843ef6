"""Judges mutants: each in a copy of the repository of its own, by its own tests, two at a time.

First every named test runs once in an unchanged copy: a test that is red there proves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamqd import process
from tests.mutants.mutant import DoesNotApply, Mutant
from tests.mutants.witness import REPORT

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("streamqd", "lua", "tests", "pyproject.toml")
KILLED = "killed"
TEST_SECONDS = 30  # of one test
RUN_SECONDS = 90.0  # of the tests of one mutant
FIRST_RUN_SECONDS = 240.0  # of all tests, once


@dataclass
class Result:
    """How one mutant fared. `word` is `killed`, or what is wrong."""

    mutant: Mutant
    word: str
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    """One pytest in a folder, in a session of its own, so that nothing of it can stay behind."""

    folder: Path
    tests: Sequence[str]
    patience: float
    began: float = field(default_factory=time.monotonic)
    overdue: bool = False

    def __post_init__(self) -> None:
        parent = os.getpid()
        self.report = self.folder / "report.json"
        self.output = self.folder / "output.txt"
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.mutants.witness"]
        clean = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("PYTEST_", "PYTHONDONTWRITE"))
        }
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", *options, f"--rootdir={self.folder}"),
                    *(f"--timeout={TEST_SECONDS}", *self.tests),
                ],
                cwd=self.folder,
                # First on the path of every process that a test starts, before any installation.
                env=clean | {"PYTHONPATH": str(self.folder), REPORT: str(self.report)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: process.die_with_parent(parent),
            )

    @property
    def ended(self) -> bool:
        """Whether it is over; it is killed when its time is."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.began > self.patience:
            self.overdue = True
            self.end()
        return self.overdue

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def outcome(self, test: str) -> str:
        """passed, failed, error, skipped, or '' when it did not run. The worst of its cases."""
        cases = [
            outcome
            for node, outcome in self.outcomes().items()
            if node == test or node.startswith(f"{test}[")
        ]
        return next((one for one in ("failed", "error", "skipped", "passed") if one in cases), "")

    def outcomes(self) -> dict[str, str]:
        """Node id -> outcome."""
        found: dict[str, str] = self._read().get("outcomes", {})
        return found

    def said(self) -> str:
        """What each red test said."""
        found: dict[str, str] = self._read().get("said", {})
        return "\n".join(f"{node}: {text}" for node, text in found.items())

    def doubt(self) -> str:
        """Why its outcomes cannot be believed, '' when they can."""
        if self.overdue:
            return f"not over after {self.patience:g} s"
        report = self._read()
        if self.process.returncode not in (0, 1) or not report.get("loaded"):
            return f"pytest ended with {self.process.returncode}"
        if report["strangers"]:
            return f"it tested other code: {report['strangers'][0]}"
        return ""

    def tail(self, lines: int = 15) -> str:
        """The end of what it printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

    def _read(self) -> dict[str, Any]:
        if not self.report.exists():
            return {}
        found: dict[str, Any] = json.loads(self.report.read_text())
        return found


def judge(mutants: Sequence[Mutant], jobs: int, tell: Callable[[Result], None]) -> list[Result]:
    """Judge mutants, `jobs` at a time; `tell` each result as soon as it is known."""
    with _folder() as folder:
        pristine = _copy(ROOT, folder / "pristine")
        red = _red_without(pristine, mutants, folder)
        results: list[Result] = []
        running: list[tuple[Mutant, Run]] = []
        waiting = list(mutants)
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    one = waiting.pop(0)
                    begun = _begin(one, red, pristine, folder / f"copy-{len(waiting)}")
                    if isinstance(begun, Run):
                        running.append((one, begun))
                    else:
                        results.append(begun)
                        tell(begun)
                for one, run in [pair for pair in running if pair[1].ended]:
                    running.remove((one, run))
                    results.append(_verdict(one, run))
                    tell(results[-1])
                    shutil.rmtree(run.folder)
                time.sleep(0.02)
        finally:
            for _, run in running:
                run.end()
    return sorted(results, key=lambda result: mutants.index(result.mutant))


def _red_without(
    pristine: Path, mutants: Sequence[Mutant], folder: Path
) -> dict[str, tuple[str, str]]:
    """Run every named test unchanged; return those that are not green: test -> (why, output)."""
    wanted = {test: None for one in mutants for test in (*one.tests, one.guard) if test}
    run = Run(pristine, list(wanted), FIRST_RUN_SECONDS)
    try:
        while not run.ended:
            time.sleep(0.05)
    finally:
        run.end()
    doubt = run.doubt()
    return {
        test: (doubt or run.outcome(test) or "not found", run.tail())
        for test in wanted
        if doubt or run.outcome(test) != "passed"
    }


def _begin(
    one: Mutant, red: dict[str, tuple[str, str]], pristine: Path, folder: Path
) -> Run | Result:
    """Start the tests of a mutant, unless something is wrong already."""
    try:
        text = one.applied(pristine)
    except DoesNotApply as error:
        return Result(one, "does not apply", str(error))
    for test in (*one.tests, one.guard):
        if test in red:
            why, output = red[test]
            return Result(one, "test is red without the patch", f"{test}: {why}\n{output}")
    path = _copy(pristine, folder) / one.path
    path.write_text(text)
    # Its compiled form would be taken for current if size and second of writing were the same.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    return Run(folder, [*one.tests, *filter(None, [one.guard])], RUN_SECONDS)


def _verdict(one: Mutant, run: Run) -> Result:
    seconds = time.monotonic() - run.began
    doubt = run.doubt()
    if not doubt and one.guard and run.outcome(one.guard) != "passed":
        doubt = "the script does not compile"
    if doubt:
        return Result(one, "could not be judged", f"{doubt}\n{run.tail()}", seconds)
    blind = [test for test in one.tests if run.outcome(test) != "failed"]
    if blind:
        detail = "\n".join(f"{test}: {run.outcome(test) or 'did not run'}" for test in blind)
        return Result(one, "SURVIVED", detail, seconds)
    return Result(one, KILLED, run.said(), seconds)


def _copy(source: Path, target: Path) -> Path:
    """Copy what tests need. Times are kept, so that compiled files stay valid."""
    ignored = shutil.ignore_patterns(".mypy_cache", "report.json", "output.txt")
    target.mkdir()
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=ignored)
        else:
            shutil.copy2(source / name, target / name)
    return target


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="sqm-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
