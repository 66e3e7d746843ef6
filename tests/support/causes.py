"""Why a message ran again: the one strike of the nemesis that explains it, if there is one. Pure.

A strike explains that a message ran again when it hit the process that had it in hand:

    running           what the process was in the middle of: the last run that it ever began. Of
                      each process and strike that is one.
    not acknowledged  what had ended before that run began, but so shortly before that nothing had
                      to be settled yet (`ACK_DELAY`), and had not taken longer than that either:
                      what has is settled before the next run begins. Only when a whole instance
                      is struck, whose scoreboard or connection goes along; of a worker alone only
                      failures, which may wait for a quick run that comes behind them.
    about to begin    what a process began first after it had stood still since its last look at
                      the clock, while its successor had it: one for each process and strike.

A process whose last run had ended before it was struck has nothing in hand: it settles at once.
Unless it could not, because Redis or its connection was away from that end to the strike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

# What the daemon promises, in seconds.
ACK_DELAY = 0.02  # longest that the end of a run waits to be settled while others begin,
# and longest that such a run took itself
QUICK = 0.002  # behind a run that took longer a failure waits for nothing
# From what a process does to what the ledger or the nemesis writes of it, and back: others have the
# processor meanwhile. How much of it was needed is in every report.
SLACK = 0.05
RECONNECT = 4.0  # longest pause of a worker between two tries to connect, with its jitter


class Strike(NamedTuple):
    """What the nemesis did, to whom and when (monotonic seconds). `pids` are workers it touches.

    `ended` is when the fault was healed; the same as `began` for a blow.
    """

    number: int
    kind: str
    whom: str
    pids: tuple[int, ...]
    began: float
    ended: float


# A strike of one worker; its supervisor reads in the scoreboard what was done.
WORKER = frozenset({"kill worker", "stop worker"})
# A strike of a whole instance: what was not acknowledged is another's to handle.
LATE = "late after an outage"
INSTANCE = frozenset({"kill supervisor", "stop supervisor", "stop host", "cut off", LATE})
# A strike after which a process goes on where it was.
STANDSTILL = frozenset({"stop worker", "stop host"})
# A strike after which a worker may die by its own supervisor's hand: it is killed, or its run
# takes too long.
DEADLY = frozenset({"kill worker", "stop worker", "stop host"})
# Each alone costs nobody a lease. Both together do: all leases are over when Redis is back, and of
# an instance whose connection is half open then, nobody hears for an exchange.
OUTAGE, DEAF = frozenset({"stop redis", "kill redis"}), "half open"
NEAR = 2.0  # seconds from the one to the other, and to the takeover
# While these last, and until the next try, an instance cannot settle what is done.
BREAKS = OUTAGE | {"cut off"}


class Run(NamedTuple):
    """One call of the handler. `ended` is inf when it never did."""

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
    def unit(self) -> tuple[str, str]:
        """Partition (as in the uid) and group."""
        return self.uid.split("/")[1], self.group

    @property
    def process(self) -> tuple[int, tuple[str, str], int]:
        """Who ran it. A pid alone comes back, in a long soak."""
        return self.pid, self.unit, self.epoch


class Causes:
    """All runs and strikes of a soak. `slack` is what of SLACK was needed so far, in seconds."""

    def __init__(self, runs: Iterable[Run], strikes: Iterable[Strike]) -> None:
        self.slack = 0.0
        strikes = list(strikes)
        self._strikes = [*strikes, *_late_returns(strikes)]
        self._by_process: dict[object, list[Run]] = defaultdict(list)
        for run in runs:
            self._by_process[run.process].append(run)

    def of(self, earlier: Run, later: Run) -> str:
        """The strike that explains why `later` repeats `earlier`, '' when none does."""
        found = [
            (needed, strike.number, strike.kind, how)
            for strike in self._strikes
            for how, needed in [self._how(earlier, later, strike)]
            if needed <= SLACK
        ]
        if not found:
            return ""
        needed, number, kind, how = min(found)
        self.slack = max(self.slack, needed)
        return f"{number} {kind}: {how}"

    def hits(self, runs: Iterable[Run]) -> int:
        """How many of these runs a strike has ended together with their process."""
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
        """The last run that a process began, None when it has begun none."""
        ends = [
            of_process[-1]
            for of_process in self._by_process.values()
            if of_process[-1].pid == pid and of_process[-1].unit == (partition, group)
        ]
        return max(ends, key=lambda run: run.began, default=None)

    def excuse(self, run: Run) -> bool:
        """Whether `run` may begin under an epoch that is over: its process had stood still."""
        return any(
            self._about_to_begin(run, strike) <= SLACK
            for strike in self._strikes
            if run.pid in strike.pids
        )

    # What follows tells how much slack an explanation needs, inf when it is none at all.

    def _how(self, earlier: Run, later: Run, strike: Strike) -> tuple[str, float]:
        followed, went_on = strike.began <= later.began, strike.began <= earlier.began
        if earlier.pid in strike.pids and earlier.epoch < later.epoch and followed:
            return self._in_hand(earlier, strike)
        if later.pid in strike.pids and later.epoch < earlier.epoch and went_on:
            return "about to begin", self._about_to_begin(later, strike)
        return "", inf  # also of a process that repeats its own run: it knows what it has done

    def _about_to_begin(self, run: Run, strike: Strike) -> float:
        if strike.kind not in STANDSTILL:
            return inf
        # In the middle of the strike it certainly stood still.
        middle = (strike.began + strike.ended) / 2
        of_process = self._by_process[run.process]
        first = bisect_left(of_process, middle, key=lambda each: each.began)
        if run not in of_process[first : first + 1]:
            return inf
        if first and of_process[first - 1].ended > middle:
            return inf  # it was in the middle of that one, and looks again before the next
        return run.began - strike.ended

    def _in_hand(self, run: Run, strike: Strike) -> tuple[str, float]:
        if strike.kind not in WORKER | INSTANCE:
            return "", inf
        of_process = self._by_process[run.process]
        last = of_process[-1]
        needed = max(last.began - strike.ended, self._settled_before(last, strike))
        if run is last:
            return "running", needed
        if run.well and strike.kind in WORKER:
            return "", inf  # its supervisor reads in the scoreboard that it is done
        if run.ended - run.began > ACK_DELAY:
            return "", inf
        behind = [each for each in of_process[:-1] if each.began >= run.began]
        if not run.well and any(each.ended - each.began > QUICK for each in behind):
            return "", inf
        waited = last.began - run.ended - self._stood_still(run, last)
        return "not acknowledged", max(needed, waited - ACK_DELAY)

    def _settled_before(self, last: Run, strike: Strike) -> float:
        """For how long the last run of a process could have been settled when it was struck."""
        away = [
            (each.began, each.ended + RECONNECT)
            for each in self._strikes
            if each.kind in BREAKS and each.whom in ("redis", strike.whom)
        ]
        for began, ended in _joined(away):
            if last.ended <= ended and strike.began <= ended:
                return min(began - last.ended, strike.began - last.ended)
        return strike.began - last.ended

    def _stood_still(self, run: Run, last: Run) -> float:
        """For how long the process stood still between the end of `run` and `last`."""
        return sum(
            max(0.0, min(each.ended, last.began) - max(each.began, run.ended))
            for each in self._strikes
            if each.kind in STANDSTILL and run.pid in each.pids
        )


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, where spans that touch are one."""
    found: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def _late_returns(strikes: list[Strike]) -> list[Strike]:
    """The instances that could not renew their leases when Redis was back."""
    return [
        Strike(deaf.number, LATE, deaf.whom, deaf.pids, outage.began, outage.ended + NEAR)
        for outage in strikes
        if outage.kind in OUTAGE
        for deaf in strikes
        if deaf.kind == DEAF and outage.began - NEAR < deaf.began < outage.ended + NEAR
    ]
