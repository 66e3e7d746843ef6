"""Judge a soak with the terms used for queues. Pure: it reads the ledger and the nemesis's log.

    lost        confirmed to the producer, but neither handled successfully nor dead-lettered
    duplicated  an attempt that started more than once, each time with its cause
    recovered   the producer lost the reply, and the message was handled
    unexpected  handled, but never sent, or written twice

`causes` explains why a message may run again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

from tests.support.causes import Causes, Run, Strike
from tests.support.conservation import message_number
from tests.support.ledger import Record

ATTEMPTS_MAX = 3


class Duplicate(NamedTuple):
    """A run that started again. `cause` is '' if no strike explains it.

    `seconds` is the duration of the repeated run, or None if it never finished.
    """

    number: str
    group: str
    attempt: int
    pids: tuple[int, int]
    cause: str
    seconds: float | None

    @property
    def strike_key(self) -> tuple[str, int, str]:
        """The strike, the process that it hit, and the group: one fault of one running slot."""
        return self.cause.partition(" ")[0], self.pids[0], self.group


class ChargeReport(NamedTuple):
    """A supervisor's report that an entry was charged with the death of a worker.

    `place` is the place of the entry. `pid` is the dead worker, or 0 if only the mark that the
    worker left is known.
    """

    pid: int
    partition: int
    group: str
    place: str


@dataclass
class Report:
    """The outcome of a soak. The result of `faults_of_ours` must be empty."""

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
    overcharged: list[str] = field(default_factory=list)  # messages with crashes that have no cause
    blamed: int = 0  # number of charges that supervisors reported
    charged: int = 0  # number of messages seen with a crash; next, the most crashes of one message
    charged_most: int = 0
    disorderly: list[str] = field(default_factory=list)  # shared epochs, broken order
    stall_seconds: float = 0.0  # the longest time that a message waited for its first run
    stalled: str = ""
    slack_seconds: float = 0.0  # the part of the slack that the causes of the duplicates needed
    each: frozenset[str] = frozenset()  # groups that acknowledge each message separately

    @property
    def unexplained(self) -> list[Duplicate]:
        """The duplicates that have no cause."""
        return [each for each in self.duplicated if not each.cause]

    def causes(self) -> dict[str, int]:
        """Return the number of explained duplicates for each kind of cause."""
        named = (each.cause.partition(" ")[2] for each in self.duplicated if each.cause)
        return dict(sorted(Counter(named).items()))

    def max_repeats(self) -> dict[str, int]:
        """Return the highest number of repeats that one strike caused in one process, by kind.

        Apart from the running message, only messages shorter than `ACK_DELAY` can be repeated.
        """
        counts = Counter(
            (each.strike_key, each.cause.rpartition(": ")[2])
            for each in self.duplicated
            if each.cause
        )
        found: dict[str, int] = {}
        for (_, how), count in counts.items():
            found[how] = max(found.get(how, 0), count)
        return dict(sorted(found.items()))

    def repeated_blows(self) -> list[tuple[str, int, str]]:
        """Return the strikes that made a process repeat more than one message.

        Only groups in `each` are considered.
        """
        blows = Counter(
            dup.strike_key for dup in self.duplicated if dup.cause and dup.group in self.each
        )
        return [blow for blow, count in blows.items() if count > 1]

    def faults_of_ours(self) -> dict[str, list[object]]:
        """Return all faults that were found. The result is empty if there are none."""
        most = self.max_repeats()
        found: dict[str, list[object]] = {
            "lost": [*self.lost],
            "duplicated without a cause": [*self.unexplained],
            "several were running": [most] if most.get("running", 0) > 1 else [],
            "several of one strike and slot": [*self.repeated_blows()],
            "unexpected": [*self.unexpected],
            "misattributed": [*self.misattributed],
            "overcharged": [*self.overcharged],
            "disorderly": [*self.disorderly],
        }
        return {name: faults for name, faults in found.items() if faults}


def pair_runs(records: Iterable[Record]) -> list[Run]:
    """Pair starts with ends, ordered by the starts. A process runs one message at a time."""
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
    blames: Iterable[ChargeReport] = (),
    each: Iterable[str] = (),
) -> Report:
    """Judge a soak that has finished and left no message unsettled.

    `letters` maps each group to the numbers of its dead-lettered messages. `charges` maps (group,
    number) to the highest number of crashes seen. `each` names the groups that acknowledge a
    message before they start the next one.
    """
    runs = pair_runs(records)
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
            told[record.kind].add(message_number(record))
    # The message that the producer was sending when it stopped does not have an outcome either.
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
            cause = causes.explain(earlier, later)
            took = None if earlier.ended == inf else round(earlier.ended - earlier.began, 4)
            report.duplicated.append(Duplicate(number, group, attempt, pids, cause, took))
    report.slack_seconds = causes.slack


# --- attempts, epochs, order ----------------------------------------------------------------------


def _judge_attempts(
    report: Report, records: list[Record], runs: list[Run], letters: Mapping[str, set[str]]
) -> None:
    """Check that the attempts of a message depend only on its failures."""
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
    blames: Iterable[ChargeReport],
) -> None:
    """Check that a message is charged at most once for each of its runs that a strike ended.

    It may also be charged once for each mark of a lost owner, if a supervisor reports it.
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
        count_ended = causes.count_ended(own) + sum(marks[place] for place in _places(own, marks))
        if crashes > count_ended:
            report.overcharged.append(f"{number} of {group}: {crashes} crashes, {count_ended} hits")
    for blame in blames:
        report.blamed += 1
        if not blame.pid:
            continue
        last = causes.last(blame.pid, str(blame.partition), blame.group)
        source, _, entry = blame.place.partition(":")
        if last is None or last.ended < inf:
            continue  # the process died after the start was noted and before the handler ran
        first = source == "m"
        if first is not (last.attempt == 1) or (first and last.uid.split("/")[2] != entry):
            report.overcharged.append(f"{blame}, while {last.uid} was running")


def _places(runs: list[Run], marks: Iterable[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Return the marks that may belong to a message. The places of its retries are not known."""
    assignments = {(run.group, int(run.assignment[0])) for run in runs}
    first = {f"m:{run.uid.rpartition('/')[2]}" for run in runs}
    return [
        mark
        for mark in marks
        if mark[:2] in assignments and (mark[2] in first or mark[2][:2] == "r:")
    ]


def _judge_order(report: Report, runs: list[Run], causes: Causes) -> None:
    """Check that an epoch has one process, runs first attempts in order, and only grows."""
    owner: dict[tuple[tuple[str, str], int], int] = {}
    last: dict[tuple[tuple[str, str], int], tuple[int, ...]] = {}
    newest: dict[tuple[str, str], int] = defaultdict(int)
    failed: set[tuple[str, str]] = set()
    for run in runs:
        term = (run.assignment, run.epoch)
        if owner.setdefault(term, run.pid) != run.pid:
            report.disorderly.append(
                f"{run.assignment}: epoch {run.epoch} belongs to two processes"
            )
        # A process is excused if it stood still between its last look at the clock and its handler.
        if run.epoch < newest[run.assignment] and not causes.excuse(run):
            report.disorderly.append(f"{run.assignment}: epoch {run.epoch} ran after a later one")
        newest[run.assignment] = max(newest[run.assignment], run.epoch)
        # If a process dies before it has written a failure, the failed message repeats. As a retry,
        # it may follow later messages, because the suspects of the crash run first.
        if run.attempt == 1 and (run.uid, run.group) not in failed:
            place = tuple(map(int, run.uid.split("/")[2].split("-")))
            if place < last.get(term, ()):
                report.disorderly.append(f"{run.uid} of {run.group} ran after a later one")
            last[term] = place
        if run.ended < inf and not run.well:
            failed.add((run.uid, run.group))


def _measure_stall(report: Report, records: list[Record], runs: list[Run]) -> None:
    ready = {message_number(each): each.at for each in records if each.kind == "sent" and each.uid}
    met: set[tuple[str, str]] = set()
    for run in runs:
        if run.number not in ready or (run.number, run.group) in met:
            continue
        met.add((run.number, run.group))
        waited = run.began - ready[run.number]
        if waited > report.stall_seconds:
            report.stall_seconds = waited
            report.stalled = f"{run.number} of {run.group}, sent at {ready[run.number]:.1f}"
