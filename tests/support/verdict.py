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
    """A run that began again. `cause` is '' when no strike explains it.

    `seconds` is how long the run took that was repeated, None when it never ended.
    """

    number: str
    group: str
    attempt: int
    pids: tuple[int, int]
    cause: str
    seconds: float | None

    @property
    def blow(self) -> tuple[str, int, str]:
        """What is one fault and one running slot: the strike, the process it hit, and the group."""
        return self.cause.partition(" ")[0], self.pids[0], self.group


class Blame(NamedTuple):
    """A supervisor tells of an entry that was charged with a death. `place` is of the entry.

    `pid` is the worker that has died, 0 when all that is known of it is the mark that it has left.
    """

    pid: int
    partition: int
    group: str
    place: str


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
    overcharged: list[str] = field(default_factory=list)  # crashes that nobody has caused
    blamed: int = 0  # charges that supervisors have told of
    charged: int = 0  # messages that were seen with a crash, and the most of one
    charged_most: int = 0
    disorderly: list[str] = field(default_factory=list)  # epochs shared, order broken
    stall_seconds: float = 0.0  # the longest that a message waited for its first run
    stalled: str = ""
    slack_seconds: float = 0.0  # what of the slack the causes of the duplicates needed
    each: frozenset[str] = frozenset()  # groups that acknowledge each message by itself

    @property
    def unexplained(self) -> list[Duplicate]:
        """Duplicates without a cause."""
        return [each for each in self.duplicated if not each.cause]

    def causes(self) -> dict[str, int]:
        """Kind of cause -> how many duplicates it explains."""
        named = (each.cause.partition(" ")[2] for each in self.duplicated if each.cause)
        return dict(sorted(Counter(named).items()))

    def most(self) -> dict[str, int]:
        """How often one strike made one process repeat something: in which way -> at most.

        Beside what was running, only what took less than `ACK_DELAY` can be repeated.
        """
        counts = Counter(
            (each.blow, each.cause.rpartition(": ")[2]) for each in self.duplicated if each.cause
        )
        found: dict[str, int] = {}
        for (_, how), count in counts.items():
            found[how] = max(found.get(how, 0), count)
        return dict(sorted(found.items()))

    def several(self) -> list[tuple[str, int, str]]:
        """Blows that made a process of a group in `each` repeat more than one message."""
        blows = Counter(dup.blow for dup in self.duplicated if dup.cause and dup.group in self.each)
        return [blow for blow, count in blows.items() if count > 1]

    def faults_of_ours(self) -> dict[str, list[object]]:
        """All that is wrong; empty when nothing is."""
        most = self.most()
        found: dict[str, list[object]] = {
            "lost": [*self.lost],
            "duplicated without a cause": [*self.unexplained],
            "several were running": [most] if most.get("running", 0) > 1 else [],
            "several of one strike and slot": [*self.several()],
            "unexpected": [*self.unexpected],
            "misattributed": [*self.misattributed],
            "overcharged": [*self.overcharged],
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


def judge(
    records: list[Record],
    strikes: list[Strike],
    letters: Mapping[str, set[str]],
    charges: Mapping[tuple[str, str], int] | None = None,
    blames: Iterable[Blame] = (),
    each: Iterable[str] = (),
) -> Report:
    """Judge a soak that is over: nothing is left unsettled.

    `letters`: group -> dead numbers. `charges`: group, number -> the most crashes that were seen.
    `each`: groups that acknowledge a message before they begin the next.
    """
    runs = runs_of(records)
    dead = sum(map(len, letters.values()))
    report = Report(handled=len(runs), dead=dead, each=frozenset(each))
    _count_messages(report, records, runs, letters)
    causes = Causes(runs, strikes)
    _judge_duplicates(report, runs, causes)
    _judge_attempts(report, records, runs, letters)
    _judge_charges(report, runs, causes, charges or {}, blames)
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
            took = None if earlier.ended == inf else round(earlier.ended - earlier.began, 4)
            report.duplicated.append(Duplicate(number, group, attempt, pids, cause, took))
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


def _judge_charges(
    report: Report,
    runs: list[Run],
    causes: Causes,
    charges: Mapping[tuple[str, str], int],
    blames: Iterable[Blame],
) -> None:
    """A message is charged once, at most, for each of its runs that a strike has ended.

    And once for each mark that an owner has left who was lost, which a supervisor must tell.
    """
    blames = list(blames)
    marks = Counter((each.group, each.partition, each.place) for each in blames if not each.pid)
    of_message: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        of_message[run.group, run.number].append(run)
    report.charged = len(charges)
    report.charged_most = max(charges.values(), default=0)
    for (group, number), crashes in charges.items():
        own = of_message[group, number]
        hits = causes.hits(own) + sum(marks[place] for place in _places(own, marks))
        if crashes > hits:
            report.overcharged.append(f"{number} of {group}: {crashes} crashes, {hits} hits")
    for blame in blames:
        report.blamed += 1
        if not blame.pid:
            continue
        last = causes.last(blame.pid, str(blame.partition), blame.group)
        source, _, entry = blame.place.partition(":")
        if last is None or last.ended < inf:
            continue  # the process died between the note that it begins and the handler
        first = source == "m"
        if first is not (last.attempt == 1) or (first and last.uid.split("/")[2] != entry):
            report.overcharged.append(f"{blame}, while {last.uid} was running")


def _places(runs: list[Run], marks: Iterable[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """The marks that may be of a message; of its retries nobody knows the places."""
    units = {(run.group, int(run.unit[0])) for run in runs}
    first = {f"m:{run.uid.rpartition('/')[2]}" for run in runs}
    return [
        mark for mark in marks if mark[:2] in units and (mark[2] in first or mark[2][:2] == "r:")
    ]


def _judge_order(report: Report, runs: list[Run], causes: Causes) -> None:
    """An epoch belongs to one process; in it first attempts follow the stream; it only grows."""
    owner: dict[tuple[tuple[str, str], int], int] = {}
    last: dict[tuple[tuple[str, str], int], tuple[int, ...]] = {}
    newest: dict[tuple[str, str], int] = defaultdict(int)
    failed: set[tuple[str, str]] = set()
    for run in runs:
        term = (run.unit, run.epoch)
        if owner.setdefault(term, run.pid) != run.pid:
            report.disorderly.append(f"{run.unit}: epoch {run.epoch} belongs to two processes")
        # A process that stood still between its last look at the clock and its handler.
        if run.epoch < newest[run.unit] and not causes.excuse(run):
            report.disorderly.append(f"{run.unit}: epoch {run.epoch} ran after a later one")
        newest[run.unit] = max(newest[run.unit], run.epoch)
        # A failure that was not yet written when its process died repeats. As a retry, it may come
        # after later messages: the suspects of the crash run first.
        if run.attempt == 1 and (run.uid, run.group) not in failed:
            place = tuple(map(int, run.uid.split("/")[2].split("-")))
            if place < last.get(term, ()):
                report.disorderly.append(f"{run.uid} of {run.group} ran after a later one")
            last[term] = place
        if run.ended < inf and not run.well:
            failed.add((run.uid, run.group))


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
