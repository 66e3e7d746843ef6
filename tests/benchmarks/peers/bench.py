"""A round of one system: throughput, cost, latency, start and sending. All share one server."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.peers.stage import SLOTS, Stage
from tests.benchmarks.peers.systems import System

PACED = 601  # number of jobs in a latency measurement, which takes three seconds
LIMIT_SECONDS = 180.0


class Round(Stage):
    """All measurements of one round. `scale` is the fraction of the usual numbers of jobs."""

    def __init__(
        self, system: System, commands: Path, port: int, server_pid: int, scale: float = 1.0
    ) -> None:
        super().__init__(system, commands, port)
        self.server = psutil.Process(server_pid)
        self.jobs = max(100, int(system.jobs * scale))
        self.singles = max(100, int(system.singles * scale))
        self.paced = max(100, int(PACED * scale))

    def measure(self) -> dict[str, float]:
        """Return all figures of this round."""
        figures: dict[str, float] = {}
        with self.empty_stage():
            figures["sent/s, one by one"] = self.send("single", self.singles)
        with self.empty_stage():
            figures |= self._throughput()
        with self.empty_stage():
            figures |= self._start_and_latency()
        return figures

    # --- measurements -----------------------------------------------------------------------------

    def _throughput(self) -> dict[str, float]:
        jobs = self.jobs
        before = self._info("memory", "used_memory")
        sent = self.send("bulk", jobs)
        weight = (self._info("memory", "used_memory") - before) / jobs
        self.start()
        self._wait(lambda: self._count_handled() > 0)
        began, done, spent = time.perf_counter(), self._count_handled(), self._read_usage()
        self._wait(lambda: self._count_handled() >= jobs)
        ended, spent_after = time.perf_counter(), self._read_usage()
        left = max(1, jobs - done)  # a few jobs may already be done at the first check
        worker, server, calls = (
            after - first for first, after in zip(spent, spent_after, strict=True)
        )
        return {
            "sent/s, in bulk": sent,
            "handled/s": left / (ended - began),
            "worker CPU us/job": worker / left * 1e6,
            "Redis CPU us/job": server / left * 1e6,
            "Redis commands/job": calls / left,
            "bytes/job in Redis": weight,
            "PSS MiB per worker": self._worker_pss(),
            "PSS MiB in all": sum(map(_pss, self._process_tree())) / 2**20,
        }

    def _start_and_latency(self) -> dict[str, float]:
        self.send("bulk", 2)
        began = time.perf_counter()
        self.start()
        self._wait(lambda: self._count_handled() > 0)
        first = time.perf_counter() - began
        self._wait(lambda: self._count_handled() >= 2)
        self.send("paced", self.paced)
        self._wait(lambda: self._count_handled() >= 2 + self.paced)
        raw = self.late.read_bytes()
        late = sorted(each[0] for each in struct.iter_unpack("=q", raw))
        return {
            "first job after s": first,
            "latency p50 ms": late[len(late) // 2] / 1e6,
            "latency p99 ms": late[len(late) * 99 // 100] / 1e6,
        }

    # --- observations -----------------------------------------------------------------------------

    def _count_handled(self) -> int:
        return sum(self.cells)

    def _process_tree(self) -> list[psutil.Process]:
        found = []
        for process in self.processes:
            root = psutil.Process(process.pid)
            found += [root, *root.children(recursive=True)]
        return found

    def _read_usage(self) -> tuple[float, float, float]:
        """Return the CPU seconds of worker trees and server, and the server's command count."""
        worker = 0.0
        for process in self._process_tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                worker += times.user + times.system + times.children_user + times.children_system
        server = self.server.cpu_times()
        commands = self._info("stats", "total_commands_processed")
        return worker, server.user + server.system, commands

    def _worker_pss(self) -> float:
        """Return the mean PSS of the workers that handled jobs. Exited forks do not count."""
        weights = [_pss(each) for each in self._process_tree() if self.cells[each.pid % SLOTS]]
        return sum(weights) / max(1, len(weights)) / 2**20

    def _info(self, section: str, name: str) -> float:
        answer: Any = self.client.info(section)
        return float(answer[name])

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > deadline or any(
                each.poll() is not None for each in self.processes
            ):
                handled, output = self._count_handled(), self.read_output()
                told = f"{self.system.name}: {handled} handled, then: {output}"
                raise RuntimeError(told)
            time.sleep(0.002)


def _pss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0
