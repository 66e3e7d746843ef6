"""The verdict on a soak, in the words of queue checkers. Pure: it reads the ledger and the nemesis.

    lost        confirmed to the producer, and neither handled well nor a dead letter
    duplicated  an attempt that began more than once, each time with its cause
    recovered   the producer lost the answer, and it was handled
    unexpected  handled, but never sent, or written twice

Why a message may run again, and what explains it: `causes`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

from tests.support.causes import Causes, Run, Strike
from tests.support.conservation import number_of
from tests.support.ledger import Record

ATTEMPTS_MAX = 3


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
    slack_seconds: float = 0.0  # what of the slack the causes of the duplicates needed

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
    causes = Causes(runs, strikes)
    _judge_duplicates(report, runs, causes)
    _judge_attempts(report, records, runs, letters)
    _judge_order(report, runs, causes)
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


def _judge_duplicates(report: Report, runs: list[Run], causes: Causes) -> None:
    same: dict[tuple[str, str, int], list[Run]] = defaultdict(list)
    for run in runs:
        same[run.number, run.group, run.attempt].append(run)
    for (number, group, attempt), again in same.items():
        for earlier, later in pairwise(again):
            pids = (earlier.pid, later.pid)
            cause = causes.of(earlier, later)
            report.duplicated.append(Duplicate(number, group, attempt, pids, cause))
    report.slack_seconds = causes.slack


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


def _judge_order(report: Report, runs: list[Run], causes: Causes) -> None:
    """An epoch belongs to one process; in it first attempts follow the stream; it only grows."""
    owner: dict[tuple[tuple[str, str], int], int] = {}
    last: dict[tuple[tuple[str, str], int], tuple[int, ...]] = {}
    newest: dict[tuple[str, str], int] = defaultdict(int)
    for run in runs:
        term = (run.unit, run.epoch)
        if owner.setdefault(term, run.pid) != run.pid:
            report.disorderly.append(f"{run.unit}: epoch {run.epoch} belongs to two processes")
        # A process that stood still between its last look at the clock and its handler.
        if run.epoch < newest[run.unit] and not causes.excuse(run):
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
