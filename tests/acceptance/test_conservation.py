"""When messages are lost on purpose, each missing one was either handled or counted as lost."""

from __future__ import annotations

import urllib.request
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from streamqd.model import Assignment
from tests.support.conservation import Conservation
from tests.support.daemon import TOPIC, Daemon
from tests.support.servers import ProcessServer, free_port
from tests.support.trial import GROUPS, WORK

pytestmark = pytest.mark.promise

PARTITIONS = 2
ABOVE, NODE = 60, 10  # entries: the limit per partition, and the size of a stream node
BATCH, RUNS = 20, 16  # messages sent per step, and the number of runs to wait for
LOST = 20  # messages; the least that each group must lose per partition


def read_counter(port: int, name: str, assignment: Assignment) -> int:
    """Return a counter of an assignment. Source: the daemon's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    labels = {
        f'topic="{assignment.topic}"',
        f'partition="{assignment.partition}"',
        f'group="{assignment.group}"',
    }
    found = [
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"streamqd_{name}_total{{") and all(each in line for each in labels)
    ]
    return int(sum(found))


def has_begun(daemon: Daemon, runs: int) -> bool:
    """Return True if at least `runs` runs have started."""
    return daemon.ledger.count("start") >= runs


def test_every_missing_message_is_handled_or_counted_as_lost(
    fresh_server: ProcessServer, tmp_path: Path
):
    """A missing message was either handled or is counted as lost.

    Two groups receive twice as many messages as they can handle. Every fifth one expires after 50
    ms.
    """
    port = free_port()
    daemon = Daemon(
        *(tmp_path, fresh_server.url),
        partitions=PARTITIONS,
        groups=GROUPS,
        http=f"127.0.0.1:{port}",
        consumer={"backoff": {"kind": "fixed", "base": "20ms"}, "prefetch_max": 4},
        code=WORK.read_text(),
    )
    retention = {"drop_unacked_above": ABOVE}
    daemon.write_config(topics={TOPIC: {"partitions": PARTITIONS, "retention": retention}})
    daemon.link.execute("CONFIG", "SET", "stream-node-max-entries", NODE)
    numbers, expiring = count(0), set[str]()
    conservation = Conservation(
        *(daemon.link, daemon.keys, daemon.assignments(), daemon.ledger),
        drops=True,
        expiring=expiring,
    )

    def send(works: list[str], expires: float | None = None) -> None:
        named = [(str(next(numbers)), work) for work in works]
        if expires is not None:
            expiring.update(number for number, _ in named)
        daemon.send((" ".join(each) for each in named), expires=expires)

    def settled() -> bool:
        conservation.check()
        return not conservation.count_unfinished()

    with daemon:
        while not conservation.last or min(each.lost for each in conservation.last.values()) < LOST:
            wanted = daemon.ledger.count("start") + RUNS
            send(["sleep 0.01"] * (BATCH - 6) + ["fail 1", "dead"])
            send(["sleep 0.01"] * 4, expires=0.05)
            daemon.wait_for(partial(has_begun, daemon, wanted), what="it works", every=0.002)
            conservation.check()
            assert conservation.violations == []
        daemon.wait_for(settled, what="all is settled")
        assert conservation.violations == []
        sent = next(numbers) // PARTITIONS
        for assignment, seen in conservation.last.items():
            unhandled = len(conservation.unhandled[assignment])
            expired, missing_entries = (
                read_counter(port, name, assignment) for name in ("expired", "missing_entries")
            )
            print(
                f"{assignment}: of {sent} {unhandled} were not handled:"
                f" {seen.lost_unread} lost unread, {seen.lost_pending} in hand, {expired} expired"
            )
            assert missing_entries == 0
            assert expired > 0
            # A message that was lost while it was pending may still be handled, because it was
            # already in flight.
            least = seen.lost_unread + expired
            assert least <= unhandled <= least + seen.lost_pending
        assert daemon.stop() == 0
