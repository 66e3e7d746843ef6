"""The folder, files and processes of one system, on a server that the caller provides."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from tests.benchmarks.peers.environments import HERE
from tests.benchmarks.peers.systems import System

SLOTS = 4096
STOP_SECONDS = 5.0


class Stage:
    """The shared files and the processes of one system."""

    def __init__(self, system: System, commands: Path, port: int) -> None:
        self.system = system
        self.commands = commands
        self.url = f"redis://127.0.0.1:{port}"
        self.client = redis.Redis(port=port)
        self.processes: list[subprocess.Popen[bytes]] = []  # processes of the system
        self.senders: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def empty_stage(self) -> Iterator[None]:
        """Start with an empty server and an empty folder. Stop all processes at the end."""
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
                    self._command(self.system.prepare), env=self.env(), check=True,
                    stdout=subprocess.DEVNULL, cwd=self._apps(),
                )  # fmt: skip
            try:
                yield
            finally:
                self._stop()

    def start(self) -> None:
        """Start all processes of the system."""
        self.processes = [self.spawn(command) for command in self.system.workers]

    def spawn(self, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start one process, whose output is appended to workers.log."""
        return self._spawn_process(self._command(command))

    def keep_sending(self, mode: str, count: int) -> None:
        """Send jobs as `send` does, but in the background."""
        self.senders.append(self._spawn_process(self._drive_command(mode, count)))

    def send(self, mode: str, count: int) -> float:
        """Send `count` jobs from one process with drive.py. Return the jobs per second."""
        command = self._drive_command(mode, count)
        done = subprocess.run(
            command, env=self.env(), cwd=self._apps(), capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{self.system.name} cannot send: {done.stderr[-2000:]}")
        return (count - 1) / float(done.stdout.split()[-1])

    def env(self) -> dict[str, str]:
        """Return the environment of the system's processes."""
        return {
            **os.environ,
            **self.system.env,
            "BENCH_REDIS": self.url,
            "BENCH_TALLY": str(self.folder / "tally"),
            "BENCH_LATE": str(self.late),
            "PYTHONPATH": str(HERE / "apps"),
            "PYTHONWARNINGS": "ignore",
        }

    def read_output(self) -> str:
        """Return the end of the output of the system's processes."""
        log = self.folder / "workers.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""

    def _spawn_process(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "workers.log").open("ab") as log:
            return subprocess.Popen(
                command, env=self.env(), cwd=self._apps(),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _stop(self) -> None:
        everybody = [*self.senders, *self.processes]
        for process in everybody:
            process.terminate()
        for process in everybody:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes, self.senders = [], []

    def _drive_command(self, mode: str, count: int) -> list[str]:
        if self.system.node:
            return ["node", self.system.app, mode, str(count)]
        return [str(self.commands / "python"), "drive.py", self.system.app, mode, str(count)]

    def _command(self, words: tuple[str, ...]) -> list[str]:
        names = {"bin": self.commands, "folder": self.folder, "redis": self.url}
        return [word.format(**names) for word in words]

    def _apps(self) -> Path:
        return self.commands.parents[1] if self.system.node else HERE / "apps"
