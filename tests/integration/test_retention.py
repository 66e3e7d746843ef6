"""The housekeeper applies the effective retention on a real server, and counts losses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamqd.config import Consumer, Daemon, Retention, Settings, Topic
from streamqd.errors import StreamqdError
from streamqd.housekeeper import retention_enforcer, topics
from streamqd.housekeeper.figures import ask_time
from streamqd.housekeeper.trimmer import SOON, Trimmer
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard, WorkerState
from streamqd.store import topics as registry
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support.loglines import LogLines
from tests.support.servers import Server

pytestmark = pytest.mark.usefixtures("unlimited_turns")


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    return Harness(link, keys)


@pytest.fixture
def view(link: Connection) -> MetricsView:
    board = Scoreboard(8)
    slot = board.allot(ASSIGNMENT)
    slot.owned = 1
    slot.state = WorkerState.READY
    view = MetricsView("web-1", board)
    ask_time(link, view, "any")
    return view


def make_trimmer(
    harness: Harness, view: MetricsView, topic: Topic | None = None, *, groups: Any = ()
) -> Trimmer:
    settings = Settings(
        daemon=Daemon(instance="web-1"),
        topics={"access": topic or Topic()},
        consumers=tuple(Consumer(topic="access", group=name) for name in groups),
    )
    return Trimmer(harness.store, view, settings)


def write(harness: Harness, count: int, *, first: int = 1, size: int = 1, read: int = 0) -> None:
    """Write entries. The group reads and acknowledges the first of them."""
    harness.groups()
    body = "x" * size
    harness.link.pipeline(
        [("XADD", harness.stream, f"{n}-0", "payload", body) for n in range(first, first + count)]
    )
    if read:
        harness.do("XACK", harness.stream, "hits", *harness.fetch(read))


def length(harness: Harness) -> int:
    return int(harness.do("XLEN", harness.stream))


# --- policies -------------------------------------------------------------------------------------


def test_max_bytes_bounds_the_memory_of_a_partition(harness: Harness, view: MetricsView) -> None:
    write(harness, 3_000, size=1_000, read=3_000)
    make_trimmer(harness, view, Topic(retention=Retention(max_bytes=1_000_000))).run()
    left = harness.do("MEMORY", "USAGE", harness.stream, "SAMPLES", 0)
    assert 700_000 < left < 1_300_000
    assert view.tally("trimmed")["access", "0"] == 3_000 - length(harness)


def test_shrink_keeps_entries_since_the_last_round(harness: Harness, view: MetricsView) -> None:
    trimmer = make_trimmer(harness, view, Topic(retention=Retention(shrink_every=60.0)))
    write(harness, 200, read=200)
    trimmer.run()
    write(harness, 200, first=201, read=200)
    trimmer.run()
    assert length(harness) == 400
    for _ in range(2):
        # as if that time had passed
        harness.do("HINCRBY", harness.trim, "shrunk", -60_000)
        trimmer.run()
        trimmer.run()
        assert length(harness) in (200, 0)
    assert length(harness) == 0


def test_ack_policy_delete_leaves_no_acknowledged_entry(
    harness: Harness, view: MetricsView
) -> None:
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "0", "MKSTREAM")
    write(harness, 150, read=150)
    trimmer = make_trimmer(harness, view, Topic(retention=Retention(ack_policy="delete")))
    assert trimmer.run() == SOON
    assert length(harness) == 150
    ((_, rows),) = harness.do(
        "XREADGROUP", "GROUP", "audit", "w", "COUNT", 150, "STREAMS", harness.stream, ">"
    )
    harness.do("XACK", harness.stream, "audit", *(row[0] for row in rows))
    trimmer.run()
    assert length(harness) == 0


@pytest.mark.fault("F29")
def test_trimmer_reports_the_group_that_holds_entries(harness: Harness, view: MetricsView) -> None:
    write(harness, 500, read=120)
    trimmer = make_trimmer(harness, view, Topic(retention=Retention(max_length=10)))
    trimmer.run()
    assert view.held == {("access", 0): ("hits", 121)}
    harness.do("XACK", harness.stream, "hits", *harness.fetch(380))
    trimmer.run()
    assert view.held == {}
    write(harness, 500, first=501)
    trimmer.run()
    assert view.held
    for slot, _ in view.owned_slots():
        slot.owned = 0
    trimmer.run()
    assert view.held == {}, "a lost unit is shown by its new owner"


def test_retention_trims_a_topic_without_groups(harness: Harness, view: MetricsView) -> None:
    """If a topic has no groups, its partitions have no owner.

    Each instance that lists the topic in its file therefore trims it.
    """
    for slot, _ in view.owned_slots():
        slot.owned = 0
    for number in range(3):
        key = harness.keys.stream("access", number)
        harness.link.pipeline([("XADD", key, f"{n}-0", "payload", n) for n in range(1, 301)])
    for alone, left in ((False, 300), (True, 100)):
        bounds = Retention(max_length=100, without_groups=alone)
        topic = Topic(partitions=3, retention=bounds)
        registry.create(harness.store, "access", topic)
        make_trimmer(harness, view, topic).run()
        lengths = [harness.do("XLEN", harness.keys.stream("access", n)) for n in range(3)]
        assert lengths == [left] * 3


# --- effective settings ---------------------------------------------------------------------------


def test_registered_retention_applies_by_default(harness: Harness, view: MetricsView) -> None:
    stored = Topic(archive="required", retention=Retention(max_length=0))
    registry.create(harness.store, "access", stored)
    write(harness, 300, read=300)
    trimmer = make_trimmer(harness, view)
    trimmer.run()
    assert length(harness) == 300, "nothing is archived"
    harness.do("HSET", harness.trim, "archived", "300-0")
    trimmer.run()
    assert length(harness) == 0


def test_trimmer_rereads_changed_settings(
    harness: Harness, view: MetricsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.create(harness.store, "access", Topic())
    write(harness, 300, read=300)
    trimmer = make_trimmer(harness, view)
    trimmer.run()
    changed = json.dumps({"archive": "off", "retention": {"max_length": 0}})
    harness.do("HSET", harness.keys.meta("access"), "settings", changed)
    trimmer.run()
    assert length(harness) == 300, "they were read a moment ago"
    monkeypatch.setattr(topics, "REFRESH_SECONDS", 0.0)
    trimmer.run()
    assert length(harness) == 0


def test_trimmer_stops_while_settings_are_unreadable(harness: Harness, view: MetricsView) -> None:
    """The trimmer stops as long as settings are unreadable, because they may require an archive."""
    registry.create(harness.store, "access", Topic())
    harness.do("HSET", harness.keys.meta("access"), "settings", "no JSON")
    write(harness, 300, read=300)
    trimmer = make_trimmer(harness, view, Topic(retention=Retention(max_length=0)))
    for _ in range(2):
        with pytest.raises(StreamqdError, match="access"):
            trimmer.run()
    assert length(harness) == 300
    harness.do("HSET", harness.keys.meta("access"), "settings", "{}")
    trimmer.run()
    assert length(harness) == 0


def test_trimmer_continues_after_a_bad_topic(harness: Harness, view: MetricsView) -> None:
    slot = view.board.allot(Assignment("other", 0, "hits"))
    slot.owned = 1
    harness.do("SET", harness.keys.meta("other"), "no hash")
    write(harness, 300, read=300)
    with pytest.raises(StreamqdError, match="WRONGTYPE"):
        make_trimmer(harness, view, Topic(retention=Retention(max_length=0))).run()
    assert length(harness) == 0


# --- allowed losses -------------------------------------------------------------------------------


def test_retention_counts_and_logs_dropped_messages(
    harness: Harness, view: MetricsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_enforcer, "PAGE", 200)
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "0", "MKSTREAM")
    write(harness, 1_000)
    harness.fetch(250)
    topic = Topic(retention=Retention(drop_unacked_above=300))
    trimmer = make_trimmer(harness, view, topic)
    with LogLines() as lines:
        while trimmer.run() == 0.0:
            pass
        told = {
            (line["group"], line["state"]): line["entries"]
            for line in lines.events("retention.dropped")
        }
    assert length(harness) == 300
    assert told == {("audit", "unread"): 700, ("hits", "unread"): 450, ("hits", "pending"): 250}
    assert view.tally("dropped") == {("access", "0", *key): n for key, n in told.items()}
    record = harness.state()["trim"]
    assert record["dropped_pending:hits"] == b"250"
    assert record["dropped_unread:audit"] == b"700"
    assert record["dropped_unread:hits"] == b"450"
    assert record["first"] == b"701-0"
    assert harness.state()["stream"].groups["hits"][1] == {}, "no missing entry is left"
    assert harness.fetch(1) == [b"701-0"]


def test_retention_drops_several_parts_in_one_turn(harness: Harness, view: MetricsView) -> None:
    """One turn drops several parts.

    A part of 512 KiB has six entries here, which are counted and share one stream node.
    """
    harness.do("CONFIG", "SET", "stream-node-max-bytes", 0)
    try:
        write(harness, 30, size=100_000)
    finally:
        harness.do("CONFIG", "SET", "stream-node-max-bytes", 4096)
    harness.fetch(20)
    trimmer = make_trimmer(harness, view, Topic(retention=Retention(drop_unacked_above=0)))
    trimmer.run()
    assert length(harness) == 0
    lost = {("access", "0", "hits", "pending"): 20, ("access", "0", "hits", "unread"): 10}
    assert view.tally("dropped") == lost


def test_retention_by_age_keeps_fresh_entries(harness: Harness, view: MetricsView) -> None:
    now = harness.now_unix_ms()
    write(harness, 300, first=now - 10_000_000)
    write(harness, 100, first=now)
    make_trimmer(harness, view, Topic(retention=Retention(drop_unacked_after=3_600.0))).run()
    assert length(harness) == 100


def test_retention_drops_nothing_by_default(harness: Harness, view: MetricsView) -> None:
    write(harness, 300)
    make_trimmer(harness, view, Topic(retention=Retention(max_length=0, max_age=1.0))).run()
    assert length(harness) == 300
    assert not view.tally("dropped")


def test_retention_settles_drops_of_a_dead_housekeeper(harness: Harness, view: MetricsView) -> None:
    """The next housekeeper settles and counts entries that were dropped.

    The first one died before it could settle them.
    """
    write(harness, 300)
    harness.fetch(150)
    harness.do("XTRIM", harness.stream, "MINID", "=", "101-0")
    topic = Topic(retention=Retention(drop_unacked_above=1_000))
    trimmer = make_trimmer(harness, view, topic)
    trimmer.run()
    trimmer.run()
    assert view.tally("dropped") == {("access", "0", "hits", "pending"): 100}
    assert len(harness.state()["stream"].groups["hits"][1]) == 50


def test_retention_waits_for_a_missing_group(
    harness: Harness, view: MetricsView, server: Server
) -> None:
    write(harness, 300)
    topic = Topic(retention=Retention(drop_unacked_above=10))
    make_trimmer(harness, view, topic, groups=("hits", "audit")).run()
    assert length(harness) == 300
