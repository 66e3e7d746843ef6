"""Measure how soon after a fault a fleet handles messages at full speed again.

The handlers sleep, so the speed depends on the settings and not on the machine. A backlog keeps all
lanes busy from before the fault until after it. If the machine becomes slower after the fault, full
speed is the speed of a control: the same load on a daemon without a fault, during the same seconds.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tests.support.daemon import GROUP, Daemon

SLEEP_SECONDS = 0.05
LANES = 8  # 160 messages per second and partition
BACKLOG_SECONDS = 90
WINDOW_SECONDS = 0.5
FULL = 0.8  # the fraction of the rate before the fault that counts as full speed
# A busy machine stops every process for a while. Therefore, full speed is at most the speed of the
# slowest window before the fault, and at least this fraction of the rate.
LEAST = 0.25
STEADY_SECONDS = 3.0  # seconds of full speed after which a fault counts as over
PATIENCE_SECONDS = 25.0

# Starts a daemon with this number of partitions, on its own server.
Control = Callable[[int], AbstractContextManager[Daemon]]

CODE = f"""
import time
from streamqd import Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment(durable=False)

def obey(message: Message) -> None:
    time.sleep({SLEEP_SECONDS})
    ledger._note_run("end", message)
"""
CONSUMER = {"concurrency": LANES, "order": "none"}


def full_speed(times: Sequence[float]) -> int:
    """Return the number of runs in a window at full speed.

    `times` are the ends of undisturbed runs, in order.
    """
    windows = [bisect_left(times, at + WINDOW_SECONDS) - index for index, at in enumerate(times)]
    whole = [
        count for at, count in zip(times, windows, strict=True) if at + WINDOW_SECONDS <= times[-1]
    ]
    mean = len(times) / (times[-1] - times[0]) * WINDOW_SECONDS
    return max(1, int(LEAST * mean), min([int(FULL * mean), *whole]))


def seconds_until_full(times: Sequence[float], fault: float, wanted: int) -> float | None:
    """Return the seconds from a fault until the speed is full and stays full, or None if not yet.

    `times` are the ends of runs in order, on the clock of `fault`. `wanted` is the number of runs
    in a window at full speed. The speed is full at a run if that many more runs end within
    WINDOW_SECONDS after it. It stays full if this holds for STEADY_SECONDS. A fault without any
    effect gives 0.
    """
    over = fault
    for index in range(max(0, bisect_left(times, fault) - 1), len(times) - wanted):
        if times[index + wanted] - times[index] > WINDOW_SECONDS:
            over = max(fault, times[index + 1])
    seen = times[-wanted] if len(times) > wanted else fault
    return over - fault if seen - over >= STEADY_SECONDS else None


class Load:
    """The load of daemons that share one ledger, and the times at which its runs ended."""

    def __init__(self, daemon: Daemon, control: Control | None = None) -> None:
        """Send the backlog, and wait until it is handled at a steady rate."""
        self._daemon, self._control = daemon, control
        expected = daemon.partitions * LANES / SLEEP_SECONDS
        daemon.send(["x"] * int(BACKLOG_SECONDS * expected))
        self._wait(lambda: self._rate(time.monotonic()) >= LEAST * expected, "the load")
        since = time.monotonic()
        self._wait(lambda: time.monotonic() - since >= STEADY_SECONDS, "some time of it")
        times = self._times()
        self.wanted = full_speed(times[bisect_left(times, since) :])

    def seconds_until_full(self, fault: float) -> float:
        """Wait until the speed is full again. Return the seconds since `fault` (monotonic)."""
        try:
            self._wait_for_full(fault)
        except AssertionError:
            if self._control is None:
                raise
            # A daemon without a fault shows whether the machine has become slower.
            with self._control(self._daemon.partitions) as other:
                self.wanted = min(self.wanted, Load(other).wanted)
                self._wait_for_full(fault)
        seconds = seconds_until_full(self._times(), fault, self.wanted)
        assert seconds is not None
        assert self._daemon.unsettled() > 0, "the backlog was too small"
        print(f"full speed ({self.wanted} runs a window) {seconds:.2f} s after the fault")
        return round(seconds, 2)

    def _wait_for_full(self, fault: float) -> None:
        try:
            self._wait(
                lambda: seconds_until_full(self._times(), fault, self.wanted) is not None,
                f"full speed after the fault ({self.wanted} runs a window)",
            )
        except AssertionError as error:
            ends = Counter(int(at - fault) for at in self._times() if at >= fault)
            raise AssertionError(f"runs in each second since the fault: {ends}; {error}") from None

    def _times(self) -> list[float]:
        records = self._daemon.ledger.records("end")
        return sorted(each.at for each in records if each.group == GROUP)

    def _rate(self, now: float) -> float:
        times = self._times()
        return len(times) - bisect_left(times, now - 1.0)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        self._daemon.wait_for(condition, what=what, timeout=PATIENCE_SECONDS, every=0.1)
