"""A helper is a process that the supervisor keeps running and that serves no partition.

The housekeeper and the outbox relays are helpers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from streamqd import logs, process
from streamqd.process import Child

RESTART_SECONDS = 1.0  # first pause after an unexpected exit
STEADY_SECONDS = 60.0  # uptime that resets the backoff between restarts
QUIT_SECONDS = 5.0  # time limit for the exit of a helper
REAP_SECONDS = 5.0  # longest wait for the exit of a killed process

Start = Callable[[], Child]


@dataclass
class Helper:
    """Keeps one helper process running, on which no lease depends.

    The supervisor calls `keep` once per tick. `start` forks the process and may raise OSError.
    `silent` returns the number of seconds since the process last made progress. `exited` is the
    name of the log event for an unexpected exit. `outbox` is the name of the outbox if the process
    is a relay, and None otherwise.
    """

    start: Start
    silent: Callable[[Child], float]
    silence_max: float  # seconds without progress after which the process is killed
    exited: str
    outbox: str | None
    forks: logs.Episode
    retry: float  # seconds between attempts after a refused fork
    # Longest pause in seconds before a restart, reached after many quick exits.
    longest: float = RESTART_SECONDS
    exit_timeout: float = QUIT_SECONDS  # seconds after which a process that must exit is killed
    child: Child | None = None
    start_at: float = 0.0
    restarts: int = 0
    _quick: int = 0  # number of consecutive exits soon after the start
    _started_at: float = 0.0
    _quit_at: float = 0.0  # monotonic time of the request to exit, 0 if there is none
    _wanted: bool = True

    def keep(self, now: float) -> None:
        """Keep the process running: if it has exited, reap it and fork another.

        A process is killed if it makes no progress, or if it was asked to exit and takes too long.
        After an unexpected exit, the next process is forked after a pause.
        """
        child = self.child
        if child is not None:
            exit_ = child.reap()
            if exit_ is None:
                self._watch(child, now)
                return
            self._on_exit(child, exit_, now)
        if self._wanted and now >= self.start_at:
            self._fork(now)

    def _fork(self, now: float) -> None:
        try:
            self.child = self.start()
        except OSError as error:
            self.start_at = now + self.retry
            self.forks.log_failure(error=str(error))
            return
        self._started_at = now

    def _on_exit(self, child: Child, exit_: process.Exit, now: float) -> None:
        asked, self._quit_at, self.child = self._quit_at, 0.0, None
        self.start_at = now
        if not asked:
            self._quick = 0 if now - self._started_at > STEADY_SECONDS else self._quick + 1
            longer = RESTART_SECONDS * 2 ** min(max(0, self._quick - 3), 8)
            self.start_at = now + min(self.longest, longer)
            self.restarts += 1
            logs.event(self.exited, logging.WARNING, how=str(exit_), outbox=self.outbox)
        logs.stack(exit_.stack, child=child.pid)

    def _watch(self, child: Child, now: float) -> None:
        overdue = self._quit_at and now - self._quit_at > self.exit_timeout
        if self.silent(child) > self.silence_max or overdue:
            child.kill_group()

    def replace(self, now: float) -> None:
        """Ask the process to exit. Once it has exited, `keep` forks a new one."""
        if self.child is not None and not self._quit_at:
            self._quit_at = now
            self.child.send(b"quit")

    def dismiss(self, now: float) -> None:
        """Ask the process to exit, and do not fork another."""
        self._wanted = False
        self.replace(now)

    def stop(self, seconds: float) -> None:
        """Ask the process to exit, and kill it if it has not exited within `seconds` seconds.

        In both cases, wait until it has exited.
        """
        self._wanted = False
        child, self.child = self.child, None
        if child is None:
            return
        child.send(b"quit")
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if child.reap() is not None:
                return
            process.wait_readable([child.pidfd], left)
        child.kill_group()
        process.wait_readable([child.pidfd], REAP_SECONDS)
        child.reap()
