"""Judges mutants two at a time, each in its own copy of the repository, by its own tests.

First, every named test runs once in an unchanged copy: a test that fails there proves nothing.
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
TEST_SECONDS = 30  # per test
RUN_SECONDS = 90.0  # for the tests of one mutant
FIRST_RUN_SECONDS = 240.0  # for one run of all tests
# Without the others, such as those of xdist and anyio, pytest starts in three quarters of the time.
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin", "tests.mutants.witness")


@dataclass
class Result:
    """The result of one mutant. `word` is `killed`, or the problem."""

    mutant: Mutant
    word: str
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    """One pytest in a folder, in its own session, so that all of its processes can be killed."""

    folder: Path
    tests: Sequence[str]
    patience: float
    began: float = field(default_factory=time.monotonic)
    overdue: bool = False

    def __post_init__(self) -> None:
        parent = os.getpid()
        self.report = self.folder / "report.json"
        self.output = self.folder / "output.txt"
        plugins = [option for name in ("no:cacheprovider", *PLUGINS) for option in ("-p", name)]
        clean = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("PYTEST_", "PYTHONDONTWRITE"))
        }
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", "-q", "--tb=short", *plugins),
                    *(f"--rootdir={self.folder}", f"--timeout={TEST_SECONDS}", *self.tests),
                ],
                cwd=self.folder,
                # First in the path of every process that a test starts, ahead of any installation.
                env=clean
                | {"PYTHONPATH": str(self.folder), REPORT: str(self.report)}
                | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: process.die_with_parent(parent),
            )

    @property
    def ended(self) -> bool:
        """Return True if it has exited. After its time limit it is killed."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.began > self.patience:
            self.overdue = True
            self.end()
        return self.overdue

    def end(self) -> None:
        """Kill its remaining processes."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def outcome(self, test: str) -> str:
        """Return passed, failed, error, skipped, or '' if it did not run: its worst case."""
        cases = [
            outcome
            for node, outcome in self.outcomes().items()
            if node == test or node.startswith(f"{test}[")
        ]
        return next((one for one in ("failed", "error", "skipped", "passed") if one in cases), "")

    def outcomes(self) -> dict[str, str]:
        """Return the outcome by node id."""
        found: dict[str, str] = self._read().get("outcomes", {})
        return found

    def said(self) -> str:
        """Return the message of each failed test."""
        found: dict[str, str] = self._read().get("said", {})
        return "\n".join(f"{node}: {text}" for node, text in found.items())

    def doubt(self) -> str:
        """Return why its outcomes cannot be trusted, '' if they can."""
        if self.overdue:
            return f"not over after {self.patience:g} s"
        report = self._read()
        if self.process.returncode not in (0, 1) or not report.get("loaded"):
            return f"pytest ended with {self.process.returncode}"
        if report["strangers"]:
            return f"it tested other code: {report['strangers'][0]}"
        return ""

    def tail(self, lines: int = 15) -> str:
        """Return the end of its output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

    def _read(self) -> dict[str, Any]:
        if not self.report.exists():
            return {}
        found: dict[str, Any] = json.loads(self.report.read_text())
        return found


def judge(mutants: Sequence[Mutant], jobs: int, tell: Callable[[Result], None]) -> list[Result]:
    """Judge mutants, `jobs` at a time. Pass each result to `tell` as soon as it is known."""
    with _folder() as folder:
        pristine = _copy(ROOT, folder / "pristine", shutil.copy2)
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
    """Run every named test unchanged. Return those that did not pass: test -> (why, output)."""
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
    """Start the tests of a mutant, unless there is a problem already."""
    try:
        text = one.applied(pristine)
    except DoesNotApply as error:
        return Result(one, "does not apply", str(error))
    for test in (*one.tests, one.guard):
        if test in red:
            why, output = red[test]
            return Result(one, "test is red without the patch", f"{test}: {why}\n{output}")
    path = _copy(pristine, folder, os.link) / one.path
    path.unlink()  # only this link, not the file of the unchanged copy
    path.write_text(text)
    # With equal size and modification second, its compiled form would count as current.
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


def _copy(source: Path, target: Path, copy: Callable[[str, str], object]) -> Path:
    """Copy the files that tests need. `copy` preserves times, so compiled files stay valid.

    Links take a tenth of the time. Python and pytest never write to an existing file.
    """
    ignored = shutil.ignore_patterns(".mypy_cache", "report.json", "output.txt")
    target.mkdir()
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=ignored, copy_function=copy)
        else:
            copy(str(source / name), str(target / name))
    return target


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="sqm-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
