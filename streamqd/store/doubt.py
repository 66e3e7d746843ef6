"""Probe a silent connection to find out whether the server is slow or the connection is dead.

A proxy or a NAT can drop a connection without closing it, while new connections still work. If a
reply is overdue by much more than a server needs, a probe is therefore sent on a separate
connection. If the server answers the probe and the first connection stays silent, that connection
is dead. If the probe gets no answer, the server is slow, stopped or unreachable, and waiting
continues, with a few more probes. An exchange that is answered in time costs nothing more.

Commands on an abandoned connection may have been executed, or may be executed late. That is a lost
reply (`RedisUnavailable.sent`), which all callers handle.

A connection that is still opening needs no probe: no command was sent yet, so the next attempt is
the probe. `Attempts` limits the time of each attempt.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from random import random

from streamqd.errors import SilentConnection

# The probe also checks that scripts and writes are served now: a server that delays them
# (CLIENT PAUSE) delays the probe, or replies BUSY. It needs no permission that our scripts lack.
PROBE = ("EVAL", "return 1", "0")
PROBE_SECONDS = 1.0  # longest wait for the answer to a probe
# After a probe, an overdue answer may still come for this share of the normal silence, and for
# twice the time of the probe. The server answers in order, but the network need not deliver in
# order across connections.
GRACE_SHARE = 0.25
PAUSE_SECONDS = (1.0, 4.0)  # first and longest pause between two unanswered probes
PATIENCE_MAX = 2.0  # seconds, even with a server that is often slow
SLOW_SERVER_SECONDS = 60.0  # seconds that a server counts as slow after a late answer
ATTEMPT_SECONDS = 1.0  # limit of each of the first attempts to connect and log in
ATTEMPTS_QUICK = 3  # attempts with this limit, which doubles with each later failed attempt


class Attempts:
    """Limits each attempt to connect and log in. Lives as long as its connection.

    The first attempts are short: the connection may die during the login, and another one may
    work. Later ones are longer: the server may be slow.
    """

    def __init__(self) -> None:
        self._used_up = 0  # attempts in a row that reached their limit

    def limit(self) -> float:
        """Return how many seconds the next attempt may take."""
        return ATTEMPT_SECONDS * float(2 ** min(10, max(0, self._used_up + 1 - ATTEMPTS_QUICK)))

    def ended(self, seconds: float) -> None:
        """Record the duration of an attempt, successful or not."""
        self._used_up = self._used_up + 1 if seconds >= self.limit() else 0


class Doubt:
    """Judges the silences of one connection to a server. Survives its reconnects."""

    def __init__(self, seconds: float, probe: Callable[[float], bool]) -> None:
        """`seconds`: normal silence. `probe` asks the server within the given seconds."""
        self.seconds = seconds
        self.probe = probe
        self._late = 0.0  # seconds that the last answer after a probe was late
        self._late_until = 0.0

    def silence(self, expected: float, most: float) -> Silence:
        """Start a silence. The answer is due at `expected` (monotonic) and awaited `most` more."""
        return Silence(self, expected, expected + most)

    def wait(self, sock: socket.socket, deadline: float) -> None:
        """Wait for something to read, after a silence of `seconds`.

        Raises TimeoutError at `deadline` (monotonic), or SilentConnection earlier if the server
        answers other connections.
        """
        expected = time.monotonic() - self.seconds
        silence = self.silence(expected, deadline - expected)
        while not readable(sock, silence.left()):
            silence.judge(sock)
        silence.end()

    def patience(self) -> float:
        """Seconds of silence before a probe, longer if an answer recently came after a probe."""
        learnt = 2 * self._late if time.monotonic() < self._late_until else 0.0
        # Connections that become silent at the same time must not all probe at the same time.
        return max(self.seconds, min(learnt, PATIENCE_MAX)) * (1 + random() / 8)

    def learn(self, late: float) -> None:
        """Record that an answer came this many seconds late, after a probe."""
        self._late = late
        self._late_until = time.monotonic() + SLOW_SERVER_SECONDS


class Silence:
    """One overdue answer: when to probe, and when to give it up."""

    def __init__(self, doubt: Doubt, expected: float, deadline: float) -> None:
        self._doubt = doubt
        self._expected = expected
        self._deadline = deadline
        self._ask_at = expected + doubt.patience()
        self._pause = PAUSE_SECONDS[0]
        self._asked = False

    def left(self) -> float:
        """Return the seconds until `judge` has something to do."""
        return max(0.0, min(self._ask_at, self._deadline) - time.monotonic())

    def judge(self, sock: socket.socket) -> None:
        """Handle continued silence: probe on another connection when it is time.

        Raises TimeoutError after the deadline, SilentConnection if the server answers other
        connections.
        """
        now = time.monotonic()
        if now >= self._deadline:
            raise TimeoutError(f"there was no answer for {now - self._expected:.1f} s")
        if now < self._ask_at:
            return
        self._asked = True
        if self._doubt.probe(min(PROBE_SECONDS, self._deadline - now)):
            spent = time.monotonic() - now
            if not readable(sock, max(GRACE_SHARE * self._doubt.seconds, 2 * spent)):
                silent = time.monotonic() - self._expected
                raise SilentConnection(
                    f"the connection is silent: nothing came for {silent:.1f} s, while a new"
                    " connection was answered",
                    sent=True,
                )
            return
        self._ask_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, PAUSE_SECONDS[1])

    def end(self) -> None:
        """Record that the answer came."""
        if self._asked:
            self._doubt.learn(time.monotonic() - self._expected)


def readable(sock: socket.socket, seconds: float) -> bool:
    """Wait until the socket is readable or closed by the peer. False: not in time."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
