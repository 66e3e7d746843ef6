"""Random synthetic soak tests: the verdict finds each violation that is planted in them.

A soak follows the protocol: each partition has one owner at a time. A strike stops each owner, and
its successor repeats the messages that were not acknowledged. The verdict therefore has no finding
until a test changes one record.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.support.causes import ACK_DELAY, QUICK, SLACK, Strike
from tests.support.ledger import Record
from tests.support.verdict import ATTEMPTS_MAX, Report, judge

G = "g"
PARTITIONS, OWNERS, MESSAGES = 4, 6, 12  # owners per partition, and messages per owner
LONG = 1.0  # seconds between two owners
BLOWS = ("kill worker", "kill supervisor", "stop host", "stop supervisor", "cut off")


class Soak:
    """A ledger and a log of strikes, which are made from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"soak {seed}")
        self.records: list[Record] = []
        self.strikes: list[Strike] = []
        self.letters: set[str] = set()
        self._numbers = iter(range(1, 1_000_000))
        self._pids = iter(range(100, 1_000_000))
        for partition in range(PARTITIONS):
            self._record_partition(partition)

    def judge(self) -> Report:
        records = sorted(self.records, key=lambda record: record.at)
        return judge(records, self.strikes, {G: self.letters})

    def select(self, kind: str, *others: str) -> list[Record]:
        """Return all records of these kinds."""
        return [each for each in self.records if each.kind in (kind, *others)]

    def pick_random(self, *kinds: str) -> Record:
        """Return a random record of these kinds."""
        return self.chance.choice(self.select(*kinds))

    def starts_in_same_partition(self, record: Record) -> list[Record]:
        """Return the starts in the same partition as the record, in order."""
        home = record.uid.split("/")[1]
        starts = (each for each in self.select("start") if each.uid.split("/")[1] == home)
        return sorted(starts, key=lambda each: each.at)

    def _record_partition(self, partition: int) -> None:
        now, again = 1.0, []
        for turn in range(OWNERS):
            pid = next(self._pids)
            works = again
            works += [self._record_sent(partition, now) for _ in range(MESSAGES)]
            ends_well = turn == OWNERS - 1
            now, again = self._record_owner(pid, works, now, ends_well=ends_well)

    def _record_sent(self, partition: int, now: float) -> tuple[str, str, int]:
        """Record that a message was sent.

        Return its uid, its planned outcome, and its number of attempts.
        """
        number = next(self._numbers)
        word, attempts = self.chance.choice([("sleep 0.1", 1), ("fail 1", 2), ("dead", 1)])
        uid = f"t/{partition}/{number}-0"
        for kind in ("planned", "sent"):
            self.records.append(Record(kind, uid, "", 0, 1, now - 0.5, f"{number} {word}"))
        return uid, word, attempts

    def _record_owner(
        self, pid: int, works: list[tuple[str, str, int]], now: float, *, ends_well: bool
    ) -> tuple[float, list[tuple[str, str, int]]]:
        """Record the runs of an owner. A strike hits the last, unless the owner exits cleanly."""
        for work in works[:-1]:
            now = self._record_runs(pid, work, now)
            now += 2 * (ACK_DELAY + SLACK)  # every message has been acknowledged by now
        if ends_well:
            return self._record_runs(pid, works[-1], now), []
        uid, _, _ = works[-1]
        self._record_start(pid, uid, 1, now)
        kind = self.chance.choice(BLOWS)
        lasting = 0.0 if "kill" in kind else LONG / 2
        at = now + 0.01
        self.strikes.append(Strike(len(self.strikes), kind, "a", (pid,), at, at + lasting))
        return now + LONG, works[-1:]

    def _record_runs(self, pid: int, work: tuple[str, str, int], now: float) -> float:
        uid, word, attempts = work
        for attempt in range(1, attempts + 1):
            self._record_start(pid, uid, attempt, now)
            now += 2 * QUICK
            good = attempt == attempts and word != "dead"
            self._record("end" if good else "raise", pid, uid, attempt, now)
            now += 2 * (ACK_DELAY + SLACK)
        if word == "dead":
            self.letters.add(number_in(uid))
        return now

    def _record_start(self, pid: int, uid: str, attempt: int, at: float) -> None:
        self._record("start", pid, uid, attempt, at)

    def _record(self, kind: str, pid: int, uid: str, attempt: int, at: float) -> None:
        self.records.append(Record(kind, uid, G, attempt, pid, at, f"{number_in(uid)} {pid}"))


def number_in(uid: str) -> str:
    return uid.split("/")[2].partition("-")[0]


# --- planted violations ---------------------------------------------------------------------------


def lose(soak: Soak) -> None:
    """Remove the successful run of a message."""
    soak.records.remove(soak.pick_random("end"))


def lose_dead_letter(soak: Soak) -> None:
    soak.letters.discard(soak.chance.choice(sorted(soak.letters)))


def record_repeated_run(soak: Soak, again: Record, *, pid: int, epoch: int, at: float) -> None:
    """Record that a process repeats a run."""
    text = f"{again.text.partition(' ')[0]} {epoch}"
    soak.records.append(again._replace(pid=pid, at=at, text=text))


def repeat(soak: Soak) -> None:
    """Make the next owner repeat a message that was settled long before the strike."""
    again = soak.pick_random("end", "raise")._replace(kind="start")
    starts = soak.starts_in_same_partition(again)
    record_repeated_run(soak, again, pid=99_999, epoch=99_999, at=starts[-1].at + LONG)


def repeat_two(soak: Soak) -> None:
    """Also repeat the run before the one that a strike hit and explains."""
    strike = soak.chance.choice(soak.strikes)
    own = [each for each in soak.select("start") if each.pid in strike.pids]
    record_repeated_run(soak, own[-2], pid=99_999, epoch=99_999, at=strike.ended + 100 * LONG)


def repeat_itself(soak: Soak) -> None:
    """Make a process repeat its own run."""
    again = soak.pick_random("end")
    record_repeated_run(
        soak, again._replace(kind="start"), pid=again.pid, epoch=again.pid, at=again.at + 0.001
    )


def forget_strike(soak: Soak) -> None:
    """Remove the strike that explains a duplicate."""
    soak.strikes.remove(soak.chance.choice(soak.strikes))


def miss_process(soak: Soak) -> None:
    """Make a strike hit another process."""
    at = soak.chance.randrange(len(soak.strikes))
    soak.strikes[at] = soak.strikes[at]._replace(pids=(99_999,))


def strike_late(soak: Soak) -> None:
    """Move a strike to a time after the repetition."""
    at = soak.chance.randrange(len(soak.strikes))
    strike = soak.strikes[at]
    soak.strikes[at] = strike._replace(began=strike.began + LONG, ended=strike.ended + LONG)


def continue_after_strike(soak: Soak) -> None:
    """Make a process handle another message after a strike, so that it has lost nothing."""
    strike = soak.chance.choice(soak.strikes)
    (pid,) = strike.pids
    last = max((each for each in soak.select("start") if each.pid == pid), key=lambda each: each.at)
    home = last.uid.split("/")[1]
    number, at = f"{500_000}", strike.ended + 2 * SLACK
    uid = f"t/{home}/{number}-0"
    for kind in ("planned", "sent"):
        soak.records.append(Record(kind, uid, "", 0, 1, 0.5, f"{number} sleep 0"))
    for kind, when in (("start", at), ("end", at + QUICK)):
        soak.records.append(Record(kind, uid, G, 1, pid, when, f"{number} {pid}"))


def send_twice(soak: Soak) -> None:
    start = soak.pick_random("start")
    soak.records.append(start._replace(uid=f"{start.uid[:-2]}-1", at=start.at + 0.001, pid=99_999))


def invent_run(soak: Soak) -> None:
    start = soak.pick_random("start")
    soak.records.append(start._replace(text="777777 1", pid=99_999, at=start.at + 0.001))


def skip_attempt(soak: Soak) -> None:
    at = soak.records.index(soak.pick_random("start"))
    soak.records[at] = soak.records[at]._replace(attempt=ATTEMPTS_MAX + 1)


def hand_over(soak: Soak, start: Record, *, pid: int, epoch: str) -> None:
    """Give a run to another process, under any epoch."""
    text = f"{number_in(start.uid)} {epoch}"
    own = (start.uid, start.attempt, start.pid)
    soak.records = [
        each._replace(pid=pid, text=text) if (each.uid, each.attempt, each.pid) == own else each
        for each in soak.records
    ]


def share_epoch(soak: Soak) -> None:
    start = soak.pick_random("start")
    hand_over(soak, start, pid=99_999, epoch=start.text.split()[1])


def run_under_old_epoch(soak: Soak) -> None:
    """Make an owner that was struck long ago handle a new message."""
    home = soak.starts_in_same_partition(soak.pick_random("start"))
    hand_over(soak, home[-1], pid=home[0].pid, epoch=str(home[0].pid))


def disorder(soak: Soak) -> None:
    """Make an owner handle two messages in the wrong order."""
    home = [
        each
        for each in soak.starts_in_same_partition(soak.pick_random("start"))
        if each.attempt == 1
    ]
    one, other = next((a, b) for a, b in pairwise(home) if a.pid == b.pid and a.uid != b.uid)
    for record, at in ((one, other.at), (other, one.at)):
        soak.records[soak.records.index(record)] = record._replace(at=at)


PLANTED: dict[Callable[[Soak], None], str] = {
    lose: "lost",
    lose_dead_letter: "lost",
    repeat: "duplicated without a cause",
    repeat_two: "duplicated without a cause",
    repeat_itself: "duplicated without a cause",
    forget_strike: "duplicated without a cause",
    miss_process: "duplicated without a cause",
    strike_late: "duplicated without a cause",
    continue_after_strike: "duplicated without a cause",
    send_twice: "unexpected",
    invent_run: "unexpected",
    skip_attempt: "misattributed",
    share_epoch: "disorderly",
    run_under_old_epoch: "disorderly",
    disorder: "disorderly",
}
SEEDS = range(10)


@pytest.mark.parametrize("seed", SEEDS)
def test_clean_run_has_no_findings(seed: int):
    report = Soak(seed).judge()
    assert report.faults_of_ours() == {}
    assert len(report.duplicated) == PARTITIONS * (OWNERS - 1)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_every_injected_fault_is_found(plant: Callable[[Soak], None]):
    missed = []
    for seed in SEEDS:
        soak = Soak(seed)
        plant(soak)
        if PLANTED[plant] not in soak.judge().faults_of_ours():
            missed.append(seed)
    assert missed == []
