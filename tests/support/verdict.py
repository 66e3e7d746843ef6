"""The verdict on a soak, in the words of queue checkers. Pure: it reads the ledger and the nemesis.

    lost        confirmed to the producer, and neither handled well nor a dead letter
    duplicated  an attempt that began more than once, each time with its cause
    recovered   the producer lost the answer, and it was handled
    unexpected  handled, but never sent, or written twice

A duplicate is explained by one strike of the nemesis that hit the process of the earlier run while
it had the message in hand, before the later run began. In hand are the run that the process was
in (or had just ended), one for each strike and process; and, of a strike that takes the scoreboard
or the connection along, what had ended since the last acknowledgement: it is written at most
`ACK_DELAY` after the end, before the next run begins. The other way round, a process that stood
still between its last look at the clock and its handler begins one run that its successor has had.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

from tests.support.conservation import number_of
from tests.support.ledger import Record

ACK_DELAY = 0.02  # seconds
SLACK = 0.5  # seconds between what a process does and what the ledger or the nemesis writes of it
ATTEMPTS_MAX = 3


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
# Each alone costs nobody a lease. Both together do: all leases are over when Redis is back, and of
# an instance whose connection is half open then, nobody hears for an exchange.
OUTAGE, DEAF = frozenset({"stop redis", "kill redis"}), "half open"
NEAR = 2.0  # seconds from the one to the other, and to the takeover


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


class Duplicate(NamedTuple):
    """A run that began again. `cause` is '' when no strike explains it."""

    number: str
    group: str
    attempt: int
    pids: tuple[int, int]
    cause: str


@dataclass
class Report:
    """What came of a soak. Everything in `faults_of_ours` must be empty."""

    sent: int = 0
    unknown: int = 0
    refused: int = 0
    handled: int = 0
    dead: int = 0
    lost: list[str] = field(default_factory=list)
    duplicated: list[Duplicate] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misattributed: list[str] = field(default_factory=list)  # attempts that do not add up
    disorderly: list[str] = field(default_factory=list)  # epochs shared, order broken
    stall_seconds: float = 0.0  # the longest that a message waited for its first run
    stalled: str = ""

    @property
    def unexplained(self) -> list[Duplicate]:
        """Duplicates without a cause."""
        return [each for each in self.duplicated if not each.cause]

    def causes(self) -> dict[str, int]:
        """Kind of cause -> how many duplicates it explains."""
        named = (each.cause.partition(" ")[2] for each in self.duplicated if each.cause)
        return dict(sorted(Counter(named).items()))

    def faults_of_ours(self) -> dict[str, list[object]]:
        """All that is wrong; empty when nothing is."""
        found: dict[str, list[object]] = {
            "lost": [*self.lost],
            "duplicated without a cause": [*self.unexplained],
            "unexpected": [*self.unexpected],
            "misattributed": [*self.misattributed],
            "disorderly": [*self.disorderly],
        }
        return {name: faults for name, faults in found.items() if faults}


def runs_of(records: Iterable[Record]) -> list[Run]:
    """Put starts and ends together, in the order of the starts. A process runs one at a time."""
    runs: list[Run] = []
    current: dict[int, int] = {}
    for record in records:
        if record.kind == "start":
            number, epoch = record.text.split()
            current[record.pid] = len(runs)
            runs.append(
                Run(
                    *(number, record.uid, record.group, record.attempt, int(epoch)),
                    *(record.pid, record.at, inf, False),
                )
            )
        elif record.kind in ("end", "raise"):
            at = current.pop(record.pid)
            runs[at] = runs[at]._replace(ended=record.at, well=record.kind == "end")
    return runs


def judge(records: list[Record], strikes: list[Strike], letters: Mapping[str, set[str]]) -> Report:
    """Judge a soak that is over: nothing is left unsettled. `letters`: group -> dead numbers."""
    runs = runs_of(records)
    report = Report(handled=len(runs), dead=sum(map(len, letters.values())))
    _count_messages(report, records, runs, letters)
    _judge_duplicates(report, runs, strikes)
    _judge_attempts(report, records, runs, letters)
    _judge_order(report, runs, strikes)
    _measure_stall(report, records, runs)
    return report


def _count_messages(
    report: Report, records: list[Record], runs: list[Run], letters: Mapping[str, set[str]]
) -> None:
    told: dict[str, set[str]] = {kind: set() for kind in ("planned", "sent", "unknown", "refused")}
    for record in records:
        if record.kind in told:
            told[record.kind].add(number_of(record))
    # What the producer was at when it ended has no outcome either.
    unknown = told["unknown"] | told["planned"] - told["sent"] - told["refused"]
    report.sent, report.unknown, report.refused = map(len, (told["sent"], unknown, told["refused"]))
    uids, handled = defaultdict(set), {run.number for run in runs}
    for run in runs:
        uids[run.number].add(run.uid)
    due = told["sent"] | (unknown & handled)
    for group, dead in letters.items():
        ended = {run.number for run in runs if run.group == group and run.well}
        report.lost += sorted(f"{number} of {group}" for number in due - ended - dead)
    report.recovered = sorted(unknown & handled, key=int)
    stray = handled - told["sent"] - unknown
    twice = {number for number, names in uids.items() if len(names) > 1}
    report.unexpected = sorted(stray | twice, key=int)


# --- duplicates -----------------------------------------------------------------------------------


def _judge_duplicates(report: Report, runs: list[Run], strikes: list[Strike]) -> None:
    by_process: dict[object, list[Run]] = defaultdict(list)
    same: dict[tuple[str, str, int], list[Run]] = defaultdict(list)
    strikes = [*strikes, *_late_returns(strikes)]
    for run in runs:
        by_process[run.process].append(run)
        same[run.number, run.group, run.attempt].append(run)
    for (number, group, attempt), again in same.items():
        for earlier, later in pairwise(again):
            cause = _cause(earlier, later, by_process, strikes)
            pids = (earlier.pid, later.pid)
            report.duplicated.append(Duplicate(number, group, attempt, pids, cause))


def _cause(
    earlier: Run, later: Run, by_process: Mapping[object, list[Run]], strikes: list[Strike]
) -> str:
    """The strike that explains why `later` repeats `earlier`, '' when none does."""
    if earlier.process == later.process:
        return ""  # a process knows what it has done
    for strike in strikes:
        how = ""
        if earlier.pid in strike.pids and later.began >= strike.began:
            how = _in_hand(earlier, by_process[earlier.process], strike)
        elif later.pid in strike.pids and earlier.began >= strike.began:
            how = _about_to_begin(later, by_process[later.process], strike)
        if how:
            return f"{strike.number} {strike.kind}: {how}"
    return ""


def _late_returns(strikes: list[Strike]) -> list[Strike]:
    """The instances that could not renew their leases when Redis was back."""
    return [
        Strike(deaf.number, LATE, deaf.whom, deaf.pids, outage.began, outage.ended + NEAR)
        for outage in strikes
        if outage.kind in OUTAGE
        for deaf in strikes
        if deaf.kind == DEAF and outage.began - NEAR < deaf.began < outage.ended + NEAR
    ]


def _about_to_begin(run: Run, of_process: list[Run], strike: Strike) -> str:
    """Whether `run` is the one that its process was about to begin when it was stopped."""
    if strike.kind not in STANDSTILL or run.began > strike.ended + SLACK:
        return ""
    first = next(each for each in of_process if each.began >= strike.began)
    return "about to begin" if run is first else ""


def _in_hand(run: Run, of_process: list[Run], strike: Strike) -> str:
    """How the struck process had the message of `run` in hand, '' when it had not."""
    if strike.kind not in WORKER | INSTANCE:
        return ""
    until = strike.ended + SLACK
    begun = [each for each in of_process if each.began <= until]
    if not begun:
        return ""
    last = begun[-1]
    # What had ended well before a worker was struck is in the scoreboard.
    if run is last and (strike.kind in INSTANCE or run.ended >= strike.began - SLACK):
        return "running"
    # A failure is set aside with the one after it; other ends are in the scoreboard.
    unsettled = strike.kind in INSTANCE or not run.well
    if unsettled and last.began <= run.ended + ACK_DELAY + SLACK:
        return "not acknowledged"
    return ""


# --- attempts, epochs, order ----------------------------------------------------------------------


def _judge_attempts(
    report: Report, records: list[Record], runs: list[Run], letters: Mapping[str, set[str]]
) -> None:
    """The attempts of a message are what its failures make them, whatever else has happened."""
    wanted = {}
    for record in records:
        if record.kind == "planned":
            number, word, argument = (*record.text.split(), "0")[:3]
            failures = int(argument) if word == "fail" else 0
            buried = word == "dead" or failures >= ATTEMPTS_MAX
            wanted[number] = (min(failures + 1, ATTEMPTS_MAX), buried)
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    for run in runs:
        seen[run.number, run.group].add(run.attempt)
    for (number, group), attempts in seen.items():
        attempts_max, buried = wanted.get(number, (0, False))
        is_dead = number in letters.get(group, ())
        if attempts != set(range(1, attempts_max + 1)) or is_dead is not buried:
            report.misattributed.append(
                f"{number} of {group}: attempts {sorted(attempts)}, dead {is_dead}; planned were"
                f" {attempts_max}, dead {buried}"
            )


def _judge_order(report: Report, runs: list[Run], strikes: list[Strike]) -> None:
    """An epoch belongs to one process; in it first attempts follow the stream; it only grows."""
    owner: dict[tuple[tuple[str, str], int], int] = {}
    last: dict[tuple[tuple[str, str], int], tuple[int, ...]] = {}
    newest: dict[tuple[str, str], int] = defaultdict(int)
    struck = {pid for each in strikes if each.kind in WORKER | INSTANCE for pid in each.pids}
    for run in runs:
        term = (run.unit, run.epoch)
        if owner.setdefault(term, run.pid) != run.pid:
            report.disorderly.append(f"{run.unit}: epoch {run.epoch} belongs to two processes")
        # A process that stood still between its last look at the clock and its handler.
        if run.epoch < newest[run.unit] and run.pid not in struck:
            report.disorderly.append(f"{run.unit}: epoch {run.epoch} ran after a later one")
        newest[run.unit] = max(newest[run.unit], run.epoch)
        if run.attempt == 1:
            place = tuple(map(int, run.uid.split("/")[2].split("-")))
            if place < last.get(term, ()):
                report.disorderly.append(f"{run.uid} of {run.group} ran after a later one")
            last[term] = place


def _measure_stall(report: Report, records: list[Record], runs: list[Run]) -> None:
    ready = {number_of(each): each.at for each in records if each.kind == "sent" and each.uid}
    met: set[tuple[str, str]] = set()
    for run in runs:
        if run.number not in ready or (run.number, run.group) in met:
            continue
        met.add((run.number, run.group))
        waited = run.began - ready[run.number]
        if waited > report.stall_seconds:
            report.stall_seconds = waited
            report.stalled = f"{run.number} of {run.group}, sent at {ready[run.number]:.1f}"
