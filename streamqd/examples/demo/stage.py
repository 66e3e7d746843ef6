"""The directory of one demonstration, its daemon, and its commands."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import resources
from pathlib import Path
from typing import IO, Any

MARKER = "made-by-streamqd-demo"  # only a directory with this file is ever removed
START_SECONDS = 60.0
STOP_SECONDS = 60.0
CONSOLE_PORT = 9466


class DemoError(Exception):
    """Raised if the demonstration failed. The text is for the user."""


class Folder:
    """The files of one run: configuration, input, log, and the daemon's state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "weblog.toml"
        self.lines = path / "access.log"
        self.log = path / "daemon.log"
        self.port = 9464

    def prepare(self) -> int:
        """Recreate the directory and return the number of input lines.

        Raises DemoError if the directory contains other files, or a daemon still uses it.
        """
        if self.path.exists():
            if any(self.path.iterdir()) and not (self.path / MARKER).exists():
                raise DemoError(f"{self.path} is not a demo directory; pass another one with --dir")
            self._refuse_when_in_use()
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True)
        (self.path / MARKER).touch()
        shipped = resources.files("streamqd.examples")
        self.port = _free_port(self.port)
        text = (shipped / "weblog.toml").read_text("utf-8")
        self.config.write_text(text.replace("127.0.0.1:9464", f"127.0.0.1:{self.port}"))
        raw = gzip.decompress((shipped / "data" / "apache_access.log.gz").read_bytes())
        self.lines.write_bytes(raw)
        return raw.count(b"\n")

    def _refuse_when_in_use(self) -> None:
        for path in self.path.glob("*.lock"):
            with path.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pid = lock.read().strip()
                    raise DemoError(
                        f"a daemon (process {pid}) is still running in {self.path}; stop it first"
                    ) from None

    def database(self, group: str, partition: int) -> Path:
        """Return the database of the weblog.py handlers for a group and a partition."""
        return self.path / "weblog" / f"{group}-{partition}.db"

    def streamqd(self, *arguments: str) -> list[str]:
        """Return a command line of streamqd with this run's configuration."""
        return [sys.executable, "-m", "streamqd", "--config", str(self.config), *arguments]

    def ask(self, *arguments: str) -> Any:
        """Run a command and return its JSON output. Raises DemoError if the command fails."""
        done = subprocess.run(
            self.streamqd(*arguments, "--json"), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise DemoError(f"streamqd {shlex.join(arguments)} failed: {done.stderr.strip()}")
        return json.loads(done.stdout)


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    return wanted


class DemoDaemon:
    """The real daemon as a process in its own session, so that Ctrl-C reaches only this process."""

    def __init__(self, folder: Folder, *options: str) -> None:
        self._folder = folder
        self._output: IO[bytes] = folder.log.open("ab")
        self.process = subprocess.Popen(
            folder.streamqd(*options),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "STREAMQ_LOG__FORMAT": "json"},
        )

    def __enter__(self) -> DemoDaemon:
        return self

    def __exit__(self, *_exc: object) -> None:
        # Kill the daemon after a second Ctrl-C or a slow drain. Its workers die with it.
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            self.drain()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def wait_ready(self) -> None:
        """Wait for the event `daemon.ready` in the log. Raises DemoError after START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while "daemon.ready" not in self._events():
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(f"the daemon was not ready after {START_SECONDS:g} s{self._tail()}")
            time.sleep(0.05)

    def check(self) -> None:
        """Raise DemoError if the daemon has exited."""
        code = self.process.poll()
        if code is not None:
            raise DemoError(f"the daemon exited with code {code}{self._tail()}")

    def drain(self) -> int:
        """Send SIGTERM, wait for the daemon, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def _events(self) -> list[str]:
        found = []
        for line in self._folder.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                found.append(str(json.loads(line).get("event")))
        return found

    def _tail(self) -> str:
        lines = self._folder.log.read_text(errors="replace").splitlines()[-12:]
        return "".join(f"\n    {line}" for line in lines)


class DemoConsole:
    """The web console as a process.

    It prints a link, and a new link each time one has been used.
    """

    def __init__(self, folder: Folder) -> None:
        self._output: IO[bytes] = folder.log.open("ab")
        self.process = subprocess.Popen(
            folder.streamqd("console", "--port", str(_free_port(CONSOLE_PORT))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            start_new_session=True,
        )
        self._forwarding = threading.Thread(target=self._forward, daemon=True)

    def __enter__(self) -> DemoConsole:
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(STOP_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def print_address(self) -> None:
        """Print the link, and each new link as soon as the console prints it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        print(line or "console: it did not start; the log of the daemon has the reason", flush=True)
        self._forwarding.start()

    def _forward(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(line, end="", flush=True)
