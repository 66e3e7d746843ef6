"""Measure the fate of jobs when a worker is killed: `make bench NAME=survival`.

A thousand jobs are waiting when two workers start. The process that runs the middle job kills
itself with SIGKILL the first time that this job runs. Each process of the system that exits is
restarted, as a service manager would do. The benchmark then counts the jobs that never run, and
measures how long the others waited. It sends one more job each second, because some systems look
for lost jobs only when they find others.

Most systems wait for a timeout that takes minutes. They wait in parallel, each with its own server:
the next system starts as soon as the previous one has only to wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.peers import environments, page, server
from tests.benchmarks.peers.stage import Stage
from tests.benchmarks.peers.systems import System, select_systems
from tests.support.machine import machine

JOBS = 1000
VICTIM = JOBS // 2
FOR_EVER = 1_000_000  # jobs, one per second: more than any run needs
PATIENCE_MINUTES = 15.0
SETTLE_SECONDS = 5.0  # from the death until the next system may start, if this one still waits
KILL_SECONDS = 60.0  # seconds within which the death must have happened
RESTART_SECONDS = 1.0
LOOK_SECONDS = 0.2  # seconds between two looks; the times come from the workers' own clocks

NOTE = struct.Struct("=qq")  # the format in which tally.py writes


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the job `number`. The time is CLOCK_MONOTONIC, in nanoseconds."""

    number: int
    at_ns: int


class Trial(Stage):
    """One system and one death."""

    def __init__(self, system: System, commands: Path, port: int, server: str) -> None:
        super().__init__(system, commands, port)
        self.server = server  # the server's name and version
        self.restarts = 0
        self.seen = 0  # bytes of runs that were read so far
        self.done = 0  # number of different jobs in them

    def begin(self) -> None:
        """Fill the queue, and start the workers."""
        self.runs.touch()
        self.send("numbered", JOBS + 1)  # the first job is not numbered
        self.keep_sending("trickle", FOR_EVER)
        self.start()
        self.began = self.started = time.monotonic()

    @property
    def runs(self) -> Path:
        """The file that tally.py writes."""
        return self.folder / "runs"

    def env(self) -> dict[str, str]:
        """Return the environment of the system's processes."""
        return {**super().env(), "BENCH_RUNS": str(self.runs), "BENCH_VICTIM": str(VICTIM)}

    def died_ns(self) -> int | None:
        """Return the time at which the process killed itself, or None if it has not done so yet."""
        mark = Path(f"{self.runs}.killed")
        raw = mark.read_bytes() if mark.exists() else b""
        return int(struct.unpack("=q", raw)[0]) if len(raw) == struct.calcsize("=q") else None

    def read_runs(self) -> list[Run]:
        """Return all runs so far."""
        raw = self.runs.read_bytes()
        whole = len(raw) // NOTE.size * NOTE.size
        return [Run(*each) for each in NOTE.iter_unpack(raw[:whole])]

    def restart_exited(self) -> None:
        """Restart exited processes, at the earliest `RESTART_SECONDS` after the last start."""
        if time.monotonic() - self.started < RESTART_SECONDS:
            return
        for number, (process, command) in enumerate(
            zip(self.processes, self.system.workers, strict=True)
        ):
            if process.poll() is not None:
                self.processes[number] = self.spawn(command)
                self.restarts += 1
                self.started = time.monotonic()

    def is_waiting(self, patience_s: float) -> bool:
        """Return True while the trial needs another look. Raises RuntimeError if none died."""
        died_ns = self.died_ns()
        if died_ns is None:
            if time.monotonic() - self.began > KILL_SECONDS:
                raise RuntimeError(
                    f"{self.system.name}: no process died; its output: {self.read_output()}"
                )
            return True
        if self.runs.stat().st_size != self.seen:
            runs = self.read_runs()
            self.seen, self.done = len(runs) * NOTE.size, len({each.number for each in runs})
        if self.done == JOBS:
            return False
        return time.monotonic() - died_ns / 1e9 < patience_s

    def is_settled(self) -> bool:
        """Return True if the next trial may start, which is SETTLE_SECONDS after a process died."""
        died_ns = self.died_ns()
        return died_ns is not None and time.monotonic() - died_ns / 1e9 > SETTLE_SECONDS

    def outcome(self) -> dict[str, Any]:
        """Return the fate of the jobs, with the version of the system."""
        died_ns = self.died_ns()
        assert died_ns is not None
        installed = environments.packages(self.system, self.commands)
        found = {
            **environments.versions(self.system, self.commands, installed),
            "server": self.server,
            "survives": self.system.survives,
            "restarts": self.restarts,
            **outcome(self.read_runs(), died_ns),
        }
        print(f"{self.system.name}: {found}", file=sys.stderr)
        return found


def outcome(runs: list[Run], died_ns: int) -> dict[str, Any]:
    """Return the fate of the jobs. Seconds count from the death, and None means never.

    `jobs` is the number of jobs. `never_run` counts the jobs that never ran, without the struck
    one. `twice` counts the jobs that ran to their end more than once.
    """
    first: dict[int, int] = {}
    for run in sorted(runs, key=lambda each: each.at_ns):
        first.setdefault(run.number, run.at_ns)
    struck = first.pop(VICTIM, None)
    last = max((at for at in first.values() if at > died_ns), default=died_ns)
    return {
        "jobs": JOBS,
        "never_run": JOBS - 1 - len(first),
        "struck_again_s": None if struck is None else round((struck - died_ns) / 1e9, 3),
        "others_done_s": round((last - died_ns) / 1e9, 3),
        "twice": sum(count > 1 for count in Counter(each.number for each in runs).values()),
    }


class WaitingTrials:
    """The trials that are still waiting, with the resources to close after each of them."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.waiting: dict[Trial, contextlib.ExitStack] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def start_trial(self, system: System, folder: Path) -> None:
        """Start a trial. Return when it has finished or has only to wait."""
        with contextlib.ExitStack() as stack:
            port, _, about = stack.enter_context(server.start_private_server(system.server))
            trial = Trial(system, folder, port, about)
            stack.enter_context(trial.empty_stage())
            trial.begin()
            self.waiting[trial] = stack.pop_all()
        while trial in self.waiting and not trial.is_settled():
            self.check_trials()

    def check_trials(self) -> None:
        """Check all trials, and move the outcomes of finished ones to `found`."""
        time.sleep(LOOK_SECONDS)
        for trial, stack in list(self.waiting.items()):
            trial.restart_exited()
            try:
                if trial.is_waiting(self.patience_s):
                    continue
                self.found[trial.system.name] = trial.outcome()
            except RuntimeError as error:
                print(error, file=sys.stderr)
            del self.waiting[trial]
            stack.close()

    def close(self) -> None:
        """Close all trials that are still waiting."""
        while self.waiting:
            self.waiting.popitem()[1].close()


def measure(systems: list[System], patience_s: float) -> dict[str, dict[str, Any]]:
    """Return the outcomes by name. A system that cannot be measured is only reported on stderr."""
    trials = WaitingTrials(patience_s)
    with contextlib.closing(trials):
        for system in systems:
            folder = environments.prepare(system)
            if folder is None:
                continue
            print(f"killing a worker: {system.name}", file=sys.stderr)
            try:
                trials.start_trial(system, folder)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print(error, file=sys.stderr)
        while trials.waiting:
            trials.check_trials()
    return {each.name: trials.found[each.name] for each in systems if each.name in trials.found}


def main() -> int:
    """Measure, and write the results. Return 1 if nothing could be measured."""
    arguments = argparse.ArgumentParser(prog="make bench NAME=survival", description=__doc__)
    arguments.add_argument("--only", action="append", default=[], help="part of a system's name")
    arguments.add_argument("--patience", type=float, default=PATIENCE_MINUTES, help="in minutes")
    arguments.add_argument("--output", type=Path, default=page.SURVIVAL)
    options = arguments.parse_args()
    found = measure(select_systems(options.only), options.patience * 60)
    if not found:
        print("nothing could be measured: see above why", file=sys.stderr)
        return 1
    results = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "patience_minutes": options.patience,
        "systems": found,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.output}; `make bench NAME=page` writes its page")
    return 0


if __name__ == "__main__":
    sys.exit(main())
