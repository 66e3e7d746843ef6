"""Relays of an outbox that are forked from a process which has already loaded streamqd.

Loading streamqd takes 0.2 s of CPU, which is more than most of these relays need for their work.
The process starts with the first relay and exits with the test process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from streamqd.cli import main
from tests.support import crash_points

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [__name__, "streamqd.cli.outbox_relay", "psycopg", "psycopg_binary", "pymysql"]
)


class ForkedRelay:
    """`streamqd outbox run`, with those methods of `subprocess.Popen` that the tests use.

    If a folder of strikes is given, the relay has crash points.
    """

    def __init__(self, config: Path, log: Path, strikes: Path | None = None) -> None:
        self._process = CONTEXT.Process(target=_run, args=(config, log, strikes))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send_signal(self, number: int) -> None:
        """Send a signal to the relay, unless it has already exited."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the relay."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, negative after a signal, or None after a timeout in seconds."""
        self._process.join(timeout)
        return self._process.exitcode


def _run(config: Path, log: Path, strikes: Path | None) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if strikes is not None:
        os.environ[crash_points.VARIABLE] = str(strikes)
        crash_points.install()
    sys.argv = ["streamqd", "--config", str(config), "outbox", "run"]
    main()
