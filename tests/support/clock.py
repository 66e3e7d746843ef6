"""A server whose clock is shifted with libfaketime."""

from __future__ import annotations

import os
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

from streamqd.store.client import Connection
from tests.support.servers import ProcessServer

HOUR = 3600
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
LEAVINGS = ("/dev/shm/faketime_shm_{pid}", "/dev/shm/sem.faketime_sem_{pid}")


class Clock:
    """The offset between a server's clock and the real one.

    The test is skipped if the clock cannot be set.
    """

    def __init__(self, server: ProcessServer) -> None:
        if not FAKETIME.exists():
            pytest.skip("libfaketime is not installed (Debian: apt-get install faketime)")
        self._path = server.folder / "clock"
        self.jump_to(0)
        server.environment = {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        server.leavings = LEAVINGS
        if not _starts(server.binary):
            pytest.skip(f"{server.binary} and libfaketime do not bear each other")
        server.restart()

    def jump_to(self, seconds: int) -> None:
        """Set the clock to a number of seconds ahead of the real one."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(self._path)


@cache
def _starts(binary: Path) -> bool:
    """Return True if a program starts at all with the library."""
    command, environment = [str(binary), "--version"], os.environ | {"LD_PRELOAD": str(FAKETIME)}
    try:
        subprocess.run(command, env=environment, check=True, timeout=10, capture_output=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


def seconds_ahead(link: Connection) -> float:
    return float(int(link.execute("TIME")[0]) - time.time())
