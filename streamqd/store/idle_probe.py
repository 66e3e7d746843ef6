"""Find out whether a silent connection is dead or the server is only slow.

A proxy or a NAT can drop a connection without closing it, while new connections still work.
Therefore, if a reply takes much longer than a server normally needs, this module sends a probe on a
separate connection. If the server answers the probe while the first connection stays silent, the
first connection is dead. If the probe gets no answer either, the server is slow, stopped or
unreachable. In this case, the wait for the reply continues, with a few more probes. If the server
answers in time, no probe is sent, so the exchange has no extra cost.

When a silent connection is given up, the server may have executed its commands, or may still
execute them. The caller therefore gets the same error as for a lost reply
(`RedisUnavailableError.sent` is True).

A connection that is still being opened needs no probe, because no command was sent. The next
attempt to connect has the same effect as a probe, and `Attempts` limits the time of each attempt.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from random import random

from streamqd.errors import SilentConnectionError

# The probe is a script, so that it also checks whether the server executes scripts and writes. If
# the server delays these (CLIENT PAUSE), it delays the probe too, or answers BUSY. The probe needs
# no permissions other than those of the scripts.
PROBE = ("EVAL", "return 1", "0")
PROBE_SECONDS = 1.0  # longest wait for the answer to a probe
# After the server has answered a probe, wait a little longer for the overdue reply. The server
# answers in order, but the network can reorder packets of different connections. The wait is this
# share of `IdleProbe.seconds`, or twice the duration of the probe if that is longer.
GRACE_SHARE = 0.25
PAUSE_SECONDS = (1.0, 4.0)  # first and longest pause between two unanswered probes
PROBE_AFTER_MAX = 2.0  # longest silence before a probe, even if the server is often slow
SLOW_SERVER_SECONDS = 60.0  # how long a server counts as slow after a late answer
ATTEMPT_SECONDS = 1.0  # time limit of each of the first attempts to connect and log in
# Number of attempts that are limited to ATTEMPT_SECONDS. After these, the limit doubles each time.
ATTEMPTS_QUICK = 3


class Attempts:
    """The time limits of consecutive attempts to connect and log in.

    The first attempts are short. If a connection dies during the login, another one may work, so it
    is better to try again soon. Later attempts are longer, because the server may just be slow.
    """

    def __init__(self) -> None:
        self._used_up = 0  # number of consecutive attempts that reached their time limit

    def limit(self) -> float:
        """Return the time limit of the next attempt in seconds."""
        return ATTEMPT_SECONDS * float(2 ** min(10, max(0, self._used_up + 1 - ATTEMPTS_QUICK)))

    def record(self, seconds: float) -> None:
        """Record the duration of an attempt, whether it succeeded or not."""
        self._used_up = self._used_up + 1 if seconds >= self.limit() else 0


class IdleProbe:
    """Decides when the connection to a server has been silent for too long.

    The same object is used after a reconnect, because it remembers whether the server was slow.
    """

    def __init__(self, seconds: float, ask: Callable[[float], bool]) -> None:
        """Prepare to probe a server after `seconds` seconds of silence.

        `ask` sends a probe, and returns True if the server answers it within the given number of
        seconds.
        """
        self.seconds = seconds
        self.ask = ask
        self._late = 0.0  # how many seconds late the last late answer was
        self._late_until = 0.0

    def start_wait(self, expected: float, most: float) -> ReplyWait:
        """Start to wait for a reply that is expected at `expected` (monotonic).

        The deadline of the wait is `most` seconds after that time.
        """
        return ReplyWait(self, expected, expected + most)

    def await_reply(self, sock: socket.socket, deadline: float) -> None:
        """Wait for data on a connection that has already been silent for `seconds` seconds.

        Raises TimeoutError at `deadline` (monotonic). Raises SilentConnectionError earlier if the
        server answers on another connection.
        """
        expected = time.monotonic() - self.seconds
        wait = self.start_wait(expected, deadline - expected)
        while not wait_readable(sock, wait.seconds_left()):
            wait.check(sock)
        wait.record_reply()

    def seconds_until_probe(self) -> float:
        """Return the seconds of silence before a probe.

        For SLOW_SERVER_SECONDS after a late answer, this is longer than usual.
        """
        longer = 2 * self._late if time.monotonic() < self._late_until else 0.0
        # Add a random part, so that connections which become silent together do not all send their
        # probes at the same time.
        return max(self.seconds, min(longer, PROBE_AFTER_MAX)) * (1 + random() / 8)

    def record_late_reply(self, late: float) -> None:
        """Record that a reply arrived `late` seconds too late, after a probe had been sent."""
        self._late = late
        self._late_until = time.monotonic() + SLOW_SERVER_SECONDS


class ReplyWait:
    """The wait for one reply. It determines when to send a probe and when to give up."""

    def __init__(self, probe: IdleProbe, expected: float, deadline: float) -> None:
        self._probe = probe
        self._expected = expected
        self._deadline = deadline
        self._probe_at = expected + probe.seconds_until_probe()
        self._pause = PAUSE_SECONDS[0]
        self._has_probed = False

    def seconds_left(self) -> float:
        """Return the number of seconds until `check` must be called."""
        return max(0.0, min(self._probe_at, self._deadline) - time.monotonic())

    def check(self, sock: socket.socket) -> None:
        """Send a probe for a connection that is still silent, if the probe is due.

        Raises TimeoutError after the deadline. Raises SilentConnectionError if the server answers
        the probe, but the connection itself stays silent.
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
        """Record that the reply has arrived."""
        if self._has_probed:
            self._probe.record_late_reply(time.monotonic() - self._expected)


def wait_readable(sock: socket.socket, seconds: float) -> bool:
    """Wait until the socket has data to read or the peer has closed it.

    Return False if this does not happen within `seconds` seconds.
    """
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
