"""What becomes of jobs when a worker is killed: `make bench NAME=survival`.

A thousand jobs wait, two workers begin, and the process that runs the job in the middle kills
itself with SIGKILL, the first time that job runs. Of a system's processes that end by this each is
started again, as a service manager does it. Then the jobs are counted that never run, and what the
others had to wait, while one more is sent each second: some look for lost jobs only when they find
others. Most systems wait for minutes until something expires: all of them wait side by
side, each with a server of its own, and the next begins when the one before waits.
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
from tests.benchmarks.peers.systems import System, chosen
from tests.support.machine import machine

JOBS = 1000
VICTIM = JOBS // 2
FOR_EVER = 1_000_000  # seconds
PATIENCE_MINUTES = 15.0
SETTLE_SECONDS = 5.0  # from the death until the next system may begin, if this one still waits
KILL_SECONDS = 60.0  # it must have happened by then
RESTART_SECONDS = 1.0
LOOK_SECONDS = 0.2  # the times are from the workers' own clocks

NOTE = struct.Struct("=qq")  # as tally.py writes it


@dataclass(frozen=True, slots=True)
class Run:
    """The job `number` was run; the time is that of CLOCK_MONOTONIC, in nanoseconds."""

    number: int
    at_ns: int


class Trial(Stage):
    """One system, one death."""

    def __init__(self, system: System, commands: Path, port: int) -> None:
        super().__init__(system, commands, port)
        self.restarts = 0
        self.seen = 0  # bytes of runs that were looked at
        self.done = 0  # different jobs in them

    def begin(self) -> None:
        """Fill the queue, start the workers."""
        self.runs.touch()
        self.send("numbered", JOBS + 1)  # the first is not numbered
        self.keep_sending("trickle", FOR_EVER)
        self.start()
        self.began = self.started = time.monotonic()

    @property
    def runs(self) -> Path:
        """What tally.py notes in."""
        return self.folder / "runs"

    def env(self) -> dict[str, str]:
        """The environment of its processes."""
        return {**super().env(), "BENCH_RUNS": str(self.runs), "BENCH_VICTIM": str(VICTIM)}

    def died_ns(self) -> int | None:
        """When the process killed itself."""
        mark = Path(f"{self.runs}.killed")
        raw = mark.read_bytes() if mark.exists() else b""
        return int(struct.unpack("=q", raw)[0]) if len(raw) == struct.calcsize("=q") else None

    def noted(self) -> list[Run]:
        """All runs so far."""
        raw = self.runs.read_bytes()
        whole = len(raw) // NOTE.size * NOTE.size
        return [Run(*each) for each in NOTE.iter_unpack(raw[:whole])]

    def revive(self) -> None:
        """Start what has ended again, a while after the last time."""
        if time.monotonic() - self.started < RESTART_SECONDS:
            return
        for number, (process, command) in enumerate(
            zip(self.processes, self.system.workers, strict=True)
        ):
            if process.poll() is not None:
                self.processes[number] = self.spawn(command)
                self.restarts += 1
                self.started = time.monotonic()

    def waits(self, patience_s: float) -> bool:
        """Whether it is worth looking again; raises when nothing was killed."""
        died_ns = self.died_ns()
        if died_ns is None:
            if time.monotonic() - self.began > KILL_SECONDS:
                raise RuntimeError(f"{self.system.name}: nobody died, and: {self.printed()}")
            return True
        if self.runs.stat().st_size != self.seen:
            runs = self.noted()
            self.seen, self.done = len(runs) * NOTE.size, len({each.number for each in runs})
        if self.done == JOBS:
            return False
        return time.monotonic() - died_ns / 1e9 < patience_s

    def settled(self) -> bool:
        """Whether the next may begin: somebody died, and the rest of the work is done."""
        died_ns = self.died_ns()
        return died_ns is not None and time.monotonic() - died_ns / 1e9 > SETTLE_SECONDS

    def outcome(self) -> dict[str, Any]:
        """What became of the jobs, and of which version that is told."""
        died_ns = self.died_ns()
        assert died_ns is not None
        installed = environments.packages(self.system, self.commands)
        found = {
            "version": installed[self.system.package],
            "survives": self.system.survives,
            "restarts": self.restarts,
            **outcome(self.noted(), died_ns),
        }
        print(f"{self.system.name}: {found}", file=sys.stderr)
        return found


def outcome(runs: list[Run], died_ns: int) -> dict[str, Any]:
    """What became of the jobs; seconds count from the death, None is never.

    `jobs` is how many there were, `never_run` how many were run by nobody, the one that was struck
    not counted; `twice` is how many were run to their end more than once.
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


class Ward:
    """The trials that still wait, each with what must be closed behind it."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.waiting: dict[Trial, contextlib.ExitStack] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def admit(self, system: System, folder: Path) -> None:
        """Let a trial begin, and stay until it has ended or only waits."""
        with contextlib.ExitStack() as stack:
            port, _, _ = stack.enter_context(server.private())
            trial = Trial(system, folder, port)
            stack.enter_context(trial.fresh())
            trial.begin()
            self.waiting[trial] = stack.pop_all()
        while trial in self.waiting and not trial.settled():
            self.look()

    def look(self) -> None:
        """See to all of them; what became of those that have ended is in `found`."""
        time.sleep(LOOK_SECONDS)
        for trial, stack in list(self.waiting.items()):
            trial.revive()
            try:
                if trial.waits(self.patience_s):
                    continue
                self.found[trial.system.name] = trial.outcome()
            except RuntimeError as error:
                print(error, file=sys.stderr)
            del self.waiting[trial]
            stack.close()

    def close(self) -> None:
        """End all that still wait."""
        while self.waiting:
            self.waiting.popitem()[1].close()


def measure(systems: list[System], patience_s: float) -> dict[str, dict[str, Any]]:
    """The outcomes by name; one that cannot be measured is left out, and says why on stderr."""
    ward = Ward(patience_s)
    with contextlib.closing(ward):
        for system in systems:
            folder = environments.prepare(system)
            if folder is None:
                continue
            print(f"killing a worker: {system.name}", file=sys.stderr)
            try:
                ward.admit(system, folder)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print(error, file=sys.stderr)
        while ward.waiting:
            ward.look()
    return {each.name: ward.found[each.name] for each in systems if each.name in ward.found}


def main() -> int:
    """Measure and write the results. 1: nothing could be measured."""
    arguments = argparse.ArgumentParser(prog="make bench NAME=survival", description=__doc__)
    arguments.add_argument("--only", action="append", default=[], help="part of a system's name")
    arguments.add_argument("--patience", type=float, default=PATIENCE_MINUTES, help="in minutes")
    arguments.add_argument("--output", type=Path, default=page.SURVIVAL)
    options = arguments.parse_args()
    found = measure(chosen(options.only), options.patience * 60)
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
    print(f"written to {options.output}; `make bench NAME=page` makes the page of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
