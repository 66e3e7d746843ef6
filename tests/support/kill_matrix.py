"""The kill-point matrix: its rows, the cost of each, and the comparison with the ledger.

A row is a crash point of the worker. The process is struck while one message, the victim, is at the
stage that the row selects. Each row has its own partition, so that one daemon covers all rows.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from streamqd import config
from streamqd.model import Assignment, Lease
from streamqd.registration import ensure_topics
from streamqd.store import leases
from tests.support.crash_points import Strikes
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Record

MAX_ATTEMPTS = 2
VICTIM = 2  # the victim's position among the messages of a partition
DAEMON = {"lease_ttl": "2s", "rebalance_delay": "10m", "rebalance_moves": 1}
CONSUMER = {
    "max_attempts": MAX_ATTEMPTS,
    "backoff": {"kind": "fixed", "base": "1ms", "max": "1ms", "jitter": "none"},
    "reclaim_idle": "1s",
}


class Cost(NamedTuple):
    """The cost of a fault: the messages that run again, and the crashes charged to the victim."""

    again: str = "nobody"  # nobody | victim | unacked (all that had run and were pending)
    charged: int = 0


FREE = Cost()


class Row(NamedTuple):
    """A crash point with a victim, whose payload is ok, fail or dead.

    `after` is the number of times that the point is passed before the strike. The entries of a
    partition are new, or pending because their owner was lost (`inherited`), or fetched by another
    client (`foreign`). If `crashed` is True, the victim has already crashed one process.
    """

    point: str
    victim: str = "ok"
    killed: Cost = FREE
    paused: Cost = FREE
    after: int = 0
    source: str = "new"
    crashed: bool = False

    @property
    def payloads(self) -> list[str]:
        """The payloads of a partition.

        The second message is so slow that finished ones are settled before the third starts.
        """
        return ["ok", "sleep 0.03", self.victim, "ok", "ok"]


# These are reached only if a client destroys the group of a partition that is being handled.
DESTROYED = ("group_restore-calls", "group_restore-called")
VICTIM_AGAIN, UNACKED = Cost("victim"), Cost("unacked")
CHARGED = Cost("nobody", 1)
ROWS = [
    Row("message_recover-calls", "fail"),
    Row("message_recover-called", "dead"),
    Row("fetch-unsent", "fail"),
    Row("fetch-sent", "dead"),
    Row("fetch-answered", "fail"),
    Row("batch-recorded", "dead"),
    # If a process exits while a message is marked as running, the crash is counted against the
    # message.
    *(
        Row("handler-starts", victim, CHARGED, VICTIM_AGAIN, VICTIM)
        for victim in ("ok", "fail", "dead")
    ),
    *(
        Row("handler-returned", victim, Cost("victim", 1), VICTIM_AGAIN, VICTIM)
        for victim in ("ok", "fail", "dead")
    ),
    # A crash while the message's error is examined is counted against the message, too.
    *(
        Row("outcome-unrecorded", victim, Cost("victim", 1), VICTIM_AGAIN)
        for victim in ("fail", "dead")
    ),
    # The supervisor acknowledges the finished messages of a dead process. Its failures, however,
    # were known only to the dead process itself.
    Row("outcome-recorded", "ok", FREE, VICTIM_AGAIN, VICTIM),
    Row("outcome-recorded", "fail", VICTIM_AGAIN, VICTIM_AGAIN, VICTIM),
    Row("outcome-recorded", "dead", VICTIM_AGAIN, VICTIM_AGAIN, VICTIM),
    Row("settle_ack-calls", "fail", FREE, UNACKED),
    Row("settle_ack-called", "dead"),
    # A failure may wait during a quick run that follows it, which is then not acknowledged either.
    Row("settle_retry-calls", "fail", VICTIM_AGAIN, UNACKED),
    Row("settle_retry-called", "fail", FREE, UNACKED),
    Row("settle_dead-calls", "dead", VICTIM_AGAIN, UNACKED),
    Row("settle_dead-called", "dead", FREE, UNACKED),
    Row("settle_charged-calls", "ok", CHARGED, Cost("victim", 1), crashed=True),
    Row("settle_charged-called", "ok", CHARGED, CHARGED, crashed=True),
    Row("acks-unsent", "ok", FREE, UNACKED),
    Row("acks-sent", "ok"),
    Row("acks-answered", "ok"),
    # A mark alone charges nothing: an entry is charged only after it has run alone.
    Row("quarantine_mark-calls", "fail", after=VICTIM, source="inherited"),
    Row("quarantine_mark-called", "fail", after=VICTIM, source="inherited"),
    Row("quarantine_end-calls", "dead", source="inherited"),
    Row("quarantine_end-called", "fail", source="inherited"),
    Row("message_reclaim-calls", "dead", source="foreign"),
    Row("message_reclaim-called", "fail", source="foreign"),
]

# If a failed message is retried in place, its failures are written down.
BLOCKED = [
    Row("settle_note-calls", "fail", VICTIM_AGAIN, VICTIM_AGAIN),
    Row("settle_note-called", "fail"),
]


def seed(daemon: Daemon, rows: Iterable[Row]) -> dict[int, list[str]]:
    """Send the messages of all rows, one partition per row. Return the uids of each partition."""
    ensure_topics(daemon.link, config.load(daemon.config_path))
    uids = {}
    for number, row in enumerate(rows):
        uids[number] = daemon.send(row.payloads, number)
        if row.source == "inherited":
            lose_owner(daemon, number)
        elif row.source == "foreign":
            fetch(daemon, number, "legacy")
    return uids


def lose_owner(daemon: Daemon, partition: int) -> None:
    """Make all messages in a partition pending for an owner that was lost."""
    assignment = Assignment(TOPIC, partition, GROUP)
    call = leases.acquire(daemon.keys, Lease(assignment, secrets.token_hex(8), 0), 0.001, "lost")
    assert daemon.link.run(call).word == "OK"
    fetch(daemon, partition, "w")


def fetch(daemon: Daemon, partition: int, consumer: str) -> None:
    """Fetch the new entries of a partition as the given consumer."""
    stream = daemon.keys.stream(TOPIC, partition)
    daemon.link.execute("XREADGROUP", "GROUP", GROUP, consumer, "STREAMS", stream, ">")


def arm(strikes: Strikes, rows: Iterable[Row], act: str) -> None:
    """Arm the point of each row, in the partition of the row."""
    for number, row in enumerate(rows):
        if row.crashed:
            strikes.arm("handler-starts", number, "KILL", VICTIM)
        strikes.arm(row.point, number, act, row.after)


class Case(NamedTuple):
    """A row after its fault. `unacked` are messages that had run and were still pending."""

    row: Row
    uids: list[str]
    unacked: frozenset[str] = frozenset()

    def verdict(self, cost: Cost, records: Iterable[Record], letters: Iterable[Letter]) -> str:
        """Compare the runs and dead letters with the model. Return '' if they match."""
        victim = self.uids[VICTIM]
        again = {"nobody": frozenset(), "victim": {victim}, "unacked": self.unacked}[cost.again]
        runs = {uid: Counter({1: 1 + (uid in again)}) for uid in self.uids}
        if self.row.victim == "fail":
            runs[victim].update(range(2, MAX_ATTEMPTS + 1))
        buried = {
            "ok": [],
            "fail": [(victim, "attempts", str(MAX_ATTEMPTS), str(cost.charged))],
            "dead": [(victim, "dead", "1", str(cost.charged))],
        }[self.row.victim]
        if cost.again == "unacked" and not again and not self.row.point.endswith("-called"):
            return "nothing was unacknowledged"
        return compare(runs, buried, records, letters)


Letter = dict[str, str]


def compare(
    runs: Mapping[str, Counter[int]],
    buried: list[tuple[str, str, str, str]],
    records: Iterable[Record],
    letters: Iterable[Letter],
) -> str:
    """Compare the runs of messages, counted by attempt, and their dead letters with the model.

    A dead letter is (uid, reason, attempts, crashes). Return '' if everything matches.
    """
    found: dict[str, Counter[int]] = {uid: Counter() for uid in runs}
    for record in records:
        if record.kind == "start" and record.uid in runs:
            found[record.uid][record.attempt] += 1
    there = [
        (each["uid"], each["reason"], each["attempts"], each["crashes"])
        for each in letters
        if each["uid"] in runs
    ]
    problems = []
    if found != runs:
        problems.append(f"runs {found}, the model says {runs}")
    if there != buried:
        problems.append(f"letters {there}, the model says {buried}")
    return "; ".join(problems)


# --- a pause --------------------------------------------------------------------------------------


def freeze(daemon: Daemon) -> None:
    """Stop every process of the daemon, the supervisor first, so that it cannot miss the others."""
    os.kill(daemon.pid, signal.SIGSTOP)
    for each in daemon.session():
        each.suspend()


def thaw(daemon: Daemon) -> None:
    """Let all processes of the daemon continue."""
    for each in daemon.session():
        each.resume()


def is_at_rest(daemon: Daemon, partitions: Iterable[int]) -> bool:
    """Return True if the daemon has taken the partitions over and handled all entries in them.

    After it has settled everything, it writes to its fences that no inherited entries are left.
    From then on, only another actor changes the `picture`.
    """
    assignments = [Assignment(TOPIC, each, GROUP) for each in partitions]
    found = daemon.link.pipeline(
        [
            ("HMGET", daemon.keys.fence(*assignment), "owner", "session", "quarantine", "mark")
            for assignment in assignments
        ]
    )
    owner = daemon.tables["daemon"]["instance"].encode()
    return all(
        each == owner and session and not (quarantine or mark)
        for each, session, quarantine, mark in found
    )


def picture(daemon: Daemon) -> dict[tuple[str, ...], Any]:
    """Return everything that an owner could change, keyed by the command that reads it.

    This includes fences, positions, pending entries, retries and dead letters.
    """
    keys = daemon.keys
    commands: list[tuple[str, ...]] = []
    for assignment in daemon.assignments():
        stream, retry = (
            keys.stream(assignment.topic, assignment.partition),
            keys.retry_stream(*assignment),
        )
        commands += [
            ("HGETALL", keys.fence(*assignment)),
            ("XINFO", "GROUPS", stream),
            ("XPENDING", stream, assignment.group),
            ("XINFO", "GROUPS", retry),
            ("XPENDING", retry, assignment.group),
            ("ZRANGE", keys.retry(*assignment), "0", "-1", "WITHSCORES"),
            ("HGETALL", keys.retry_items(*assignment)),
            ("HGETALL", keys.attempts(*assignment)),
            ("XRANGE", keys.dlq(assignment.topic, assignment.partition), "-", "+"),
        ]
    return dict(zip(commands, daemon.link.pipeline(commands), strict=True))


def changes(daemon: Daemon, before: dict[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    """Return the differences from an earlier picture, as pairs of (before, now)."""
    now = picture(daemon)
    return {each: (was, now[each]) for each, was in before.items() if now[each] != was}
