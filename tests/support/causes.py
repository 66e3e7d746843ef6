"""Find the strike of the nemesis that explains why a message ran again. Pure.

A strike explains a repeated message if it hit the process that held the message:

    running           The process was in the middle of the message. It was the last run that the
                      process started, so there is at most one per process and strike.
    not acknowledged  The message finished before that last run started, but so recently
                      (`ACK_DELAY`) that it did not have to be acknowledged yet. It also took no
                      longer than `ACK_DELAY`, because a longer run is acknowledged before the
                      next one starts. This applies only if a whole instance is struck and
                      loses its scoreboard or connection. If only a worker is struck, it
                      applies to failures, which may wait during a quick run that follows.
    about to begin    The process had stood still since its last look at the clock, while its
                      successor held the message, and then started this run first. There is at
                      most one per process and strike.

A process whose last run finished before the strike holds no message, because it acknowledges
immediately. The exception is a process that could not reach Redis from the end of that run until
the strike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

# Limits that the daemon promises, in seconds.
ACK_DELAY = 0.02  # the longest wait for an acknowledgment while other runs start
# A run that may wait this long also takes no longer than this itself.
QUICK = 0.002  # a failure does not wait during a run that takes longer
# The time allowed between the act of a process and its record in the ledger or the nemesis, in
# either direction, because other processes use the CPU in between. Every report shows how much of
# it was needed.
SLACK = 0.05
RECONNECT = 4.0  # the longest pause of a worker between two attempts to connect, including jitter


class Strike(NamedTuple):
    """A fault with its kind, its target and its time (monotonic seconds).

    `pids` are the workers that the fault affects. `ended` is the time at which the fault was
    healed; it equals `began` if the fault is instantaneous.
    """

    number: int
    kind: str
    whom: str
    pids: tuple[int, ...]
    began: float
    ended: float


# Strikes on a single worker. Its supervisor reads the finished work from the scoreboard.
WORKER = frozenset({"kill worker", "stop worker"})
# Strikes on a whole instance. Another instance then handles the unacknowledged messages.
LATE = "late after an outage"
INSTANCE = frozenset({"kill supervisor", "stop supervisor", "stop host", "cut off", LATE})
# Strikes after which a process continues from where it was.
STANDSTILL = frozenset({"stop worker", "stop host"})
# Strikes after which a supervisor may kill its own worker, either because the worker is a target or
# because its run takes too long.
DEADLY = frozenset({"kill worker", "stop worker", "stop host"})
# Neither of these faults alone costs a lease, but together they do: when Redis is back, all leases
# have expired, and an instance whose connection is half open gets no reply for one round trip.
OUTAGE, DEAF = frozenset({"stop redis", "kill redis"}), "half open"
NEAR = 2.0  # most seconds between the two faults, and until the takeover
# During these faults, and until its next attempt to connect, an instance cannot acknowledge.
BREAKS = OUTAGE | {"cut off"}


class Run(NamedTuple):
    """A call of the handler. `ended` is inf if the call never finished."""

    number: str
    uid: str
    group: str
    attempt: int
    epoch: int
    pid: int
    began: float
    ended: float
    well: bool

    @property
    def assignment(self) -> tuple[str, str]:
        """The partition (as in the uid), and the group."""
        return self.uid.split("/")[1], self.group

    @property
    def process(self) -> tuple[int, tuple[str, str], int]:
        """The process of the run. A pid alone would not be unique in a long soak."""
        return self.pid, self.assignment, self.epoch


class Causes:
    """All runs and strikes of a soak.

    `slack` is the part of SLACK that the explanations have needed so far, in seconds.
    """

    def __init__(self, runs: Iterable[Run], strikes: Iterable[Strike]) -> None:
        self.slack = 0.0
        strikes = list(strikes)
        self._strikes = [*strikes, *_find_late_returns(strikes)]
        self._by_process: dict[object, list[Run]] = defaultdict(list)
        for run in runs:
            self._by_process[run.process].append(run)

    def explain(self, earlier: Run, later: Run) -> str:
        """Return the strike that explains why `later` repeats `earlier`, or '' if there is none."""
        found = [
            (needed, strike.number, strike.kind, how)
            for strike in self._strikes
            for how, needed in [self._match_strike(earlier, later, strike)]
            if needed <= SLACK
        ]
        if not found:
            return ""
        needed, number, kind, how = min(found)
        self.slack = max(self.slack, needed)
        return f"{number} {kind}: {how}"

    def count_ended(self, runs: Iterable[Run]) -> int:
        """Return how many of these runs a strike ended together with their process."""
        return sum(
            any(
                strike.kind in DEADLY
                and run.pid in strike.pids
                and run.began - SLACK <= strike.ended
                and (run.ended == inf or abs(strike.began - run.ended) <= SLACK)
                for strike in self._strikes
            )
            for run in runs
        )

    def last(self, pid: int, partition: str, group: str) -> Run | None:
        """Return the last run that a process started in a partition and group, or None."""
        ends = [
            of_process[-1]
            for of_process in self._by_process.values()
            if of_process[-1].pid == pid and of_process[-1].assignment == (partition, group)
        ]
        return max(ends, key=lambda run: run.began, default=None)

    def excuse(self, run: Run) -> bool:
        """Return True if `run` may start under an old epoch because its process had stood still."""
        return any(
            self._about_to_begin(run, strike) <= SLACK
            for strike in self._strikes
            if run.pid in strike.pids
        )

    # The following methods return the slack that an explanation needs, or inf if it does not apply.

    def _match_strike(self, earlier: Run, later: Run, strike: Strike) -> tuple[str, float]:
        followed, went_on = strike.began <= later.began, strike.began <= earlier.began
        if earlier.pid in strike.pids and earlier.epoch < later.epoch and followed:
            return self._in_flight(earlier, strike)
        if later.pid in strike.pids and later.epoch < earlier.epoch and went_on:
            return "about to begin", self._about_to_begin(later, strike)
        return "", inf  # a process never repeats its own run: it knows its finished work

    def _about_to_begin(self, run: Run, strike: Strike) -> float:
        if strike.kind not in STANDSTILL:
            return inf
        # In the middle of the strike, the process was certainly standing still.
        middle = (strike.began + strike.ended) / 2
        of_process = self._by_process[run.process]
        first = bisect_left(of_process, middle, key=lambda each: each.began)
        if run not in of_process[first : first + 1]:
            return inf
        if first and of_process[first - 1].ended > middle:
            return inf  # it was in the middle of that run, and checks again before the next one
        return run.began - strike.ended

    def _in_flight(self, run: Run, strike: Strike) -> tuple[str, float]:
        if strike.kind not in WORKER | INSTANCE:
            return "", inf
        of_process = self._by_process[run.process]
        last = of_process[-1]
        needed = max(last.began - strike.ended, self._settled_before(last, strike))
        if run is last:
            return "running", needed
        if run.well and strike.kind in WORKER:
            return "", inf  # its supervisor reads in the scoreboard that the run finished
        if run.ended - run.began > ACK_DELAY:
            return "", inf
        behind = [each for each in of_process[:-1] if each.began >= run.began]
        if not run.well and any(each.ended - each.began > QUICK for each in behind):
            return "", inf
        waited = last.began - run.ended - self._seconds_frozen(run, last)
        return "not acknowledged", max(needed, waited - ACK_DELAY)

    def _settled_before(self, last: Run, strike: Strike) -> float:
        """Return how long before the strike a process could have settled its last run (seconds)."""
        away = [
            (each.began, each.ended + RECONNECT)
            for each in self._strikes
            if each.kind in BREAKS and each.whom in ("redis", strike.whom)
        ]
        for began, ended in _merge_spans(away):
            if last.ended <= ended and strike.began <= ended:
                return min(began - last.ended, strike.began - last.ended)
        return strike.began - last.ended

    def _seconds_frozen(self, run: Run, last: Run) -> float:
        """Return the seconds for which the process stood still between `run` and `last`."""
        return sum(
            max(0.0, min(each.ended, last.began) - max(each.began, run.ended))
            for each in self._strikes
            if each.kind in STANDSTILL and run.pid in each.pids
        )


def _merge_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge time spans that touch or overlap."""
    found: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def _find_late_returns(strikes: list[Strike]) -> list[Strike]:
    """Return strikes for the instances that could not renew their leases once Redis was back."""
    return [
        Strike(deaf.number, LATE, deaf.whom, deaf.pids, outage.began, outage.ended + NEAR)
        for outage in strikes
        if outage.kind in OUTAGE
        for deaf in strikes
        if deaf.kind == DEAF and outage.began - NEAR < deaf.began < outage.ended + NEAR
    ]
