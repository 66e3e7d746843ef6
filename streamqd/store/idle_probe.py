"""Probe a silent connection to find out whether the server is slow or the connection is dead.

A proxy or a NAT can drop a connection without closing it, while new connections still work. So if a
reply is overdue by much more time than a server needs, a probe is sent on a separate connection. If
the server answers the probe and the first connection stays silent, that connection is dead. If the
probe gets no answer, the server is slow, stopped or unreachable, and waiting continues, with a few
more probes. An exchange that is answered in time has no extra cost.

Commands on an abandoned connection may have been executed, or may still be executed. To the caller,
this is a lost reply (`RedisUnavailableError.sent`).

A connection that is still opening needs no probe, because no command was sent. The next attempt
serves as the probe, and `Attempts` limits the time of each attempt.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from random import random

from streamqd.errors import SilentConnectionError

# The probe also checks that the server executes scripts and writes: a server that delays these
# (CLIENT PAUSE) delays the probe or replies BUSY. It needs only permissions that the scripts need
# too.
PROBE = ("EVAL", "return 1", "0")
PROBE_SECONDS = 1.0  # longest wait for the answer to a probe
# After an answered probe, wait for the overdue answer this share of the normal silence, plus twice
# the time of the probe. The server answers in order, but the network may reorder across
# connections.
GRACE_SHARE = 0.25
PAUSE_SECONDS = (1.0, 4.0)  # first and longest pause between two unanswered probes
PROBE_AFTER_MAX = 2.0  # seconds, even with a server that is often slow
SLOW_SERVER_SECONDS = 60.0  # seconds that a server counts as slow after a late answer
ATTEMPT_SECONDS = 1.0  # time limit of each of the first attempts to connect and log in
ATTEMPTS_QUICK = 3  # attempts with this limit. After them, each failed attempt doubles it.


class Attempts:
    """Limits each attempt of one connection to connect and log in.

    The first attempts are short, because a connection may die during the login while another one
    would work. Later attempts are longer, because the server may be slow.
    """

    def __init__(self) -> None:
        self._used_up = 0  # consecutive attempts that reached their limit

    def limit(self) -> float:
        """Return how many seconds the next attempt may take."""
        return ATTEMPT_SECONDS * float(2 ** min(10, max(0, self._used_up + 1 - ATTEMPTS_QUICK)))

    def record(self, seconds: float) -> None:
        """Record the duration of an attempt, successful or not."""
        self._used_up = self._used_up + 1 if seconds >= self.limit() else 0


class IdleProbe:
    """Watches the silences of one connection to a server, across reconnects."""

    def __init__(self, seconds: float, ask: Callable[[float], bool]) -> None:
        """`seconds` is the longest normal silence.

        `ask` probes the server within the given seconds.
        """
        self.seconds = seconds
        self.ask = ask
        self._late = 0.0  # seconds by which the last answer after a probe was late
        self._late_until = 0.0

    def start_wait(self, expected: float, most: float) -> ReplyWait:
        """Start a wait for an answer.

        It is due at `expected` (monotonic), with `most` seconds more.
        """
        return ReplyWait(self, expected, expected + most)

    def await_reply(self, sock: socket.socket, deadline: float) -> None:
        """Wait for something to read, after a silence of `seconds`.

        Raises TimeoutError at `deadline` (monotonic), or SilentConnectionError earlier if the
        server answers other connections.
        """
        expected = time.monotonic() - self.seconds
        wait = self.start_wait(expected, deadline - expected)
        while not wait_readable(sock, wait.seconds_left()):
            wait.check(sock)
        wait.record_reply()

    def seconds_until_probe(self) -> float:
        """Seconds of silence before a probe, more if the server was recently slow."""
        longer = 2 * self._late if time.monotonic() < self._late_until else 0.0
        # Vary the time, because connections that become silent together must not all probe
        # together.
        return max(self.seconds, min(longer, PROBE_AFTER_MAX)) * (1 + random() / 8)

    def record_late_reply(self, late: float) -> None:
        """Record that an answer arrived after a probe, `late` seconds late."""
        self._late = late
        self._late_until = time.monotonic() + SLOW_SERVER_SECONDS


class ReplyWait:
    """The wait for one answer: when to probe, and when to give up."""

    def __init__(self, probe: IdleProbe, expected: float, deadline: float) -> None:
        self._probe = probe
        self._expected = expected
        self._deadline = deadline
        self._probe_at = expected + probe.seconds_until_probe()
        self._pause = PAUSE_SECONDS[0]
        self._has_probed = False

    def seconds_left(self) -> float:
        """Return the seconds until `check` must be called."""
        return max(0.0, min(self._probe_at, self._deadline) - time.monotonic())

    def check(self, sock: socket.socket) -> None:
        """Check a connection that is still silent: probe on another connection when that is due.

        Raises TimeoutError after the deadline, SilentConnectionError if the server answers other
        connections.
        """
        now = time.monotonic()
        if now >= self._deadline:
            raise TimeoutError(f"there was no answer for {now - self._expected:.1f} s")
        if now < self._probe_at:
            return
        self._has_probed = True
        if self._probe.ask(min(PROBE_SECONDS, self._deadline - now)):
            spent = time.monotonic() - now
            if not wait_readable(sock, max(GRACE_SHARE * self._probe.seconds, 2 * spent)):
                silent = time.monotonic() - self._expected
                raise SilentConnectionError(
                    f"the connection is silent: nothing came for {silent:.1f} s, while a new"
                    " connection was answered",
                    sent=True,
                )
            return
        self._probe_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, PAUSE_SECONDS[1])

    def record_reply(self) -> None:
        """Record that the answer arrived."""
        if self._has_probed:
            self._probe.record_late_reply(time.monotonic() - self._expected)


def wait_readable(sock: socket.socket, seconds: float) -> bool:
    """Wait until the socket is readable or closed by the peer. Return False after `seconds`."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
