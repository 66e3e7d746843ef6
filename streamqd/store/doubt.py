"""Doubting a silent connection: is the server slow, or is the connection dead?

A proxy that swallows and a NAT that forgets end a connection without a word, while new connections
work. So an answer that is overdue by far more than a server needs is asked after on a connection of
its own, the probe. The probe is answered: whoever asked before it and is still silent is talking to
nobody. It is not answered: the server is slow, stopped or away, and waiting goes on as ever, with
few more probes. Nothing of this costs an exchange that is answered in time.

What was sent on a connection that is given up may have been executed, or be executed late: that is
a lost answer (`RedisUnavailable.sent`), with which all callers can live.

A connection that is still being opened needs no probe: nothing was asked yet, so the next attempt
is the probe. `Attempts` limits how long each one may take.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from random import random

from streamqd.errors import SilentConnection

# It asks too whether scripts and writes are served now: a server that lets them wait (CLIENT PAUSE)
# keeps this one waiting, or says BUSY. It needs no right that our scripts do not need.
PROBE = ("EVAL", "return 1", "0")
PROBE_SECONDS = 1.0  # longest wait for the answer to a probe
# What is overdue may still come for this part of the silence that needs no thought, and for twice
# as long as the probe took. The server answers in the order in which it was asked, but the network
# does not have to carry it like that.
GRACE_SHARE = 0.25
PAUSE_SECONDS = (1.0, 4.0)  # first and longest pause between two probes that are not answered
PATIENCE_MAX = 2.0  # also with a server that is often slow
LEARNT_SECONDS = 60.0  # how long it counts as slow after an answer that came late
ATTEMPT_SECONDS = 1.0  # limit of each of the first attempts to connect and log in
ATTEMPTS_QUICK = 3  # attempts with this limit; it doubles with each failed attempt after them


class Attempts:
    """Limits each attempt to connect and log in. Lives as long as what connects.

    The first attempts are short: the connection may die while it logs in, and another one works.
    Later ones are longer: the server may be slow.
    """

    def __init__(self) -> None:
        self._used_up = 0  # attempts in a row that reached their limit

    def limit(self) -> float:
        """Return how many seconds the next attempt may take."""
        return ATTEMPT_SECONDS * float(2 ** min(10, max(0, self._used_up + 1 - ATTEMPTS_QUICK)))

    def ended(self, seconds: float) -> None:
        """Take how long an attempt took, whether it succeeded or not."""
        self._used_up = self._used_up + 1 if seconds >= self.limit() else 0


class Doubt:
    """Judges the silences of one connection to a server. Lives over its reconnects."""

    def __init__(self, seconds: float, probe: Callable[[float], bool]) -> None:
        """`seconds`: a silence that needs no thought. `probe` asks, for so many seconds at most."""
        self.seconds = seconds
        self.probe = probe
        self._late = 0.0  # how late an answer was that came after a probe
        self._late_until = 0.0

    def silence(self, expected: float, most: float) -> Silence:
        """A silence that begins: the answer is `expected` (monotonic), and worth `most` seconds."""
        return Silence(self, expected, expected + most)

    def wait(self, sock: socket.socket, deadline: float) -> None:
        """Wait for something to read, when there has been nothing for `seconds`.

        Raises TimeoutError at the `deadline` (monotonic), SilentConnection before it when the
        server answers others.
        """
        expected = time.monotonic() - self.seconds
        silence = self.silence(expected, deadline - expected)
        while not readable(sock, silence.left()):
            silence.judge(sock)
        silence.end()

    def patience(self) -> float:
        """Seconds without an answer after which to ask: more where it came after a probe lately."""
        learnt = 2 * self._late if time.monotonic() < self._late_until else 0.0
        # Of many that are silent together not all ask in the same moment.
        return max(self.seconds, min(learnt, PATIENCE_MAX)) * (1 + random() / 8)

    def learn(self, late: float) -> None:
        """An answer came so many seconds late, after a probe had asked for it."""
        self._late = late
        self._late_until = time.monotonic() + LEARNT_SECONDS


class Silence:
    """One answer that does not come: when to ask after it, and when to give it up."""

    def __init__(self, doubt: Doubt, expected: float, deadline: float) -> None:
        self._doubt = doubt
        self._expected = expected
        self._deadline = deadline
        self._ask_at = expected + doubt.patience()
        self._pause = PAUSE_SECONDS[0]
        self._asked = False

    def left(self) -> float:
        """Seconds until `judge` has something to do."""
        return max(0.0, min(self._ask_at, self._deadline) - time.monotonic())

    def judge(self, sock: socket.socket) -> None:
        """Nothing has come: ask on another connection if it is time.

        Raises TimeoutError when it has lasted too long, SilentConnection when the server answers
        others.
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
        """The answer is there."""
        if self._asked:
            self._doubt.learn(time.monotonic() - self._expected)


def readable(sock: socket.socket, seconds: float) -> bool:
    """Wait until there is something to read, or the other side has ended. False: not in time."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
