"""A server and the real daemon for tests. The pytest plugin uses this module."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamqd.embedded import EmbeddedServer

START_SECONDS = 30.0
END_SECONDS = 15.0  # seconds that a daemon or a server has to exit after a signal
LOG_LINES = 40  # last lines of the log that the error about a failed daemon shows


@dataclass(frozen=True, slots=True)
class Settled:
    """The files of a daemon that has handled all messages and exited.

    `streamqd_daemon` returns an instance.
    """

    __module__ = "streamqd.testing"

    state_dir: Path
    """The `daemon.state_dir` of the daemon, which `on_start` hooks also get."""
    log: str
    """The log of the daemon, one JSON object per line, mixed with any output of the handlers."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events in the log, in order. The `event` field of each contains its name."""
        lines = (json.loads(each) for each in self.log.splitlines() if each.startswith("{"))
        return [each for each in lines if "event" in each]


@contextlib.contextmanager
def embedded_server() -> Iterator[str]:
    """Run the embedded server in a temporary directory, and yield its URL, `unix://…`.

    Raises ConfigError if no server program is installed.
    """
    # Paths below pytest's own directory can be too long for a Unix socket.
    folder = Path(tempfile.mkdtemp(prefix="streamqd-"))
    server = EmbeddedServer(folder)
    try:
        server.start()
        server.wait_ready(START_SECONDS)
        yield server.settings.url
    finally:
        server.stop(END_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def settle(
    url: str, folder: Path, modules: tuple[str, ...], config: str | Path | None, timeout: float
) -> Settled:
    """Run the daemon in `folder` until all messages in the server are handled.

    `config` is a configuration file or its text. If it is None, the handlers in `modules` run with
    their declared settings. Raises AssertionError with the end of the log if the daemon fails, or
    if it takes longer than `timeout` seconds.
    """
    path = config if isinstance(config, Path) else folder / "streamq.toml"
    if not isinstance(config, Path):
        path.write_text(config or "")
    environment = os.environ | {
        # The daemon must be able to import handlers from the same places as the tests.
        "PYTHONPATH": os.pathsep.join(each or str(Path.cwd()) for each in sys.path),
        "STREAMQ_REDIS__URL": url,
        "STREAMQ_DAEMON__STATE_DIR": str(folder / "state"),
        "STREAMQ_HTTP__BIND": "",
        "STREAMQ_LOG__FORMAT": "json",
    }
    if modules:
        environment["STREAMQ_DAEMON__HANDLERS"] = ",".join(modules)
    log = folder / "log"
    with log.open("ab") as file:
        start = file.tell()
        command = [sys.executable, "-m", "streamqd", "--config", str(path), "--burst"]
        daemon = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        code = _wait_for_exit(daemon, timeout)
    logged = log.read_bytes()[start:].decode(errors="replace")
    if code != 0:
        how = f"did not exit within {timeout:g} s" if code is None else f"exited with code {code}"
        tail = "\n".join(logged.splitlines()[-LOG_LINES:])
        raise AssertionError(f"the daemon {how}:\n{tail}")
    return Settled(folder / "state", logged)


def _wait_for_exit(daemon: subprocess.Popen[bytes], timeout: float) -> int | None:
    """Wait for the daemon and return its exit code, or None if it had to be killed."""
    try:
        return daemon.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGQUIT)  # a drain would wait for a handler that hangs
            try:
                daemon.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
