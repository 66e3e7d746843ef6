"""One round of one system: throughput, cost, latency, start, sending. One server for all."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.benchmarks.peers.environments import HERE
from tests.benchmarks.peers.systems import System

SLOTS = 4096
PACED = 601  # jobs of a measurement of latency, three seconds of them
LIMIT_SECONDS = 180.0


class Round:
    """The shared files and processes of one round."""

    def __init__(self, system: System, commands: Path, port: int, server_pid: int) -> None:
        self.system = system
        self.commands = commands
        self.url = f"redis://127.0.0.1:{port}"
        self.client = redis.Redis(port=port)
        self.server = psutil.Process(server_pid)
        self.processes: list[subprocess.Popen[bytes]] = []

    def measure(self) -> dict[str, float]:
        """All figures of this round."""
        figures: dict[str, float] = {}
        with self._fresh():
            figures["sent/s, one by one"] = self._send("single", self.system.singles)
        with self._fresh():
            figures |= self._throughput()
        with self._fresh():
            figures |= self._start_and_latency()
        return figures

    # --- what is measured -------------------------------------------------------------------------

    def _throughput(self) -> dict[str, float]:
        jobs = self.system.jobs
        before = self._info("memory", "used_memory")
        sent = self._send("bulk", jobs)
        weight = (self._info("memory", "used_memory") - before) / jobs
        self._start()
        self._wait(lambda: self._handled() > 0)
        began, done, spent = time.perf_counter(), self._handled(), self._spent()
        self._wait(lambda: self._handled() >= jobs)
        ended, spent_after = time.perf_counter(), self._spent()
        left = jobs - done
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
            "PSS MiB in all": sum(map(_pss, self._tree())) / 2**20,
        }

    def _start_and_latency(self) -> dict[str, float]:
        self._send("bulk", 2)
        began = time.perf_counter()
        self._start()
        self._wait(lambda: self._handled() > 0)
        first = time.perf_counter() - began
        self._wait(lambda: self._handled() >= 2)
        self._send("paced", PACED)
        self._wait(lambda: self._handled() >= 2 + PACED)
        raw = self.late.read_bytes()
        late = sorted(each[0] for each in struct.iter_unpack("=q", raw))
        return {
            "first job after s": first,
            "latency p50 ms": late[len(late) // 2] / 1e6,
            "latency p99 ms": late[len(late) * 99 // 100] / 1e6,
        }

    # --- the processes ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[None]:
        self.client.flushall()
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            self.late = self.folder / "late"
            self.late.touch()
            tally = self.folder / "tally"
            tally.write_bytes(bytes(SLOTS * 8))
            with tally.open("r+b") as file:
                self.cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
            if self.system.config:
                config = self.system.config.replace("{redis}", self.url)
                (self.folder / "streamq.toml").write_text(config)
            if self.system.prepare:
                subprocess.run(
                    self._command(self.system.prepare), env=self._env(), check=True,
                    stdout=subprocess.DEVNULL, cwd=self._apps(),
                )  # fmt: skip
            try:
                yield
            finally:
                self._stop()

    def _start(self) -> None:
        log = (self.folder / "workers.log").open("wb")
        self.processes = [
            subprocess.Popen(
                self._command(command), env=self._env(), cwd=self._apps(),
                stdout=log, stderr=log, start_new_session=True,
            )
            for command in self.system.workers
        ]  # fmt: skip

    def _stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes = []

    def _send(self, mode: str, count: int) -> float:
        """Jobs per second of one process that sends `count` of them."""
        if self.system.node:
            command = ["node", self.system.app, mode, str(count)]
        else:
            command = [str(self.commands / "python"), "drive.py", self.system.app, mode, str(count)]
        done = subprocess.run(
            command, env=self._env(), cwd=self._apps(), check=True, capture_output=True, text=True
        )
        return (count - 1) / float(done.stdout.split()[-1])

    def _command(self, words: tuple[str, ...]) -> list[str]:
        names = {"bin": self.commands, "folder": self.folder, "redis": self.url}
        return [word.format(**names) for word in words]

    def _apps(self) -> Path:
        return self.commands.parents[1] if self.system.node else HERE / "apps"

    def _env(self) -> dict[str, str]:
        return {
            **os.environ,
            **self.system.env,
            "BENCH_REDIS": self.url,
            "BENCH_TALLY": str(self.folder / "tally"),
            "BENCH_LATE": str(self.late),
            "PYTHONPATH": str(HERE / "apps"),
            "PYTHONWARNINGS": "ignore",
        }

    # --- looking ----------------------------------------------------------------------------------

    def _handled(self) -> int:
        return sum(self.cells)

    def _tree(self) -> list[psutil.Process]:
        found = []
        for process in self.processes:
            root = psutil.Process(process.pid)
            found += [root, *root.children(recursive=True)]
        return found

    def _spent(self) -> tuple[float, float, float]:
        """CPU seconds of the workers and all that is theirs; of the server; its commands."""
        worker = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                worker += times.user + times.system + times.children_user + times.children_system
        server = self.server.cpu_times()
        commands = self._info("stats", "total_commands_processed")
        return worker, server.user + server.system, commands

    def _worker_pss(self) -> float:
        """Of a process that has handled something; those of a fork per job are gone by now."""
        weights = [_pss(each) for each in self._tree() if self.cells[each.pid % SLOTS]]
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
                log = (self.folder / "workers.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.system.name}: {self._handled()} handled, then: {log}")
            time.sleep(0.002)


def _pss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0
