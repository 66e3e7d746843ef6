"""Retention by the housekeeper on a real server: effective settings and counted losses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamqd.config import Consumer, Daemon, Retention, Settings, Topic
from streamqd.errors import StreamqdError
from streamqd.housekeeper import retention_enforcer, topics
from streamqd.housekeeper.figures import ask_time
from streamqd.housekeeper.trimmer import SOON, Trimmer
from streamqd.metrics import MetricsView
from streamqd.model import Unit
from streamqd.scoreboard import Scoreboard, WorkerState
from streamqd.store import topics as registry
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.contract.desk import UNIT, Desk
from tests.support.loglines import LogLines
from tests.support.servers import Server

pytestmark = pytest.mark.usefixtures("unhurried")


@pytest.fixture
def desk(link: Connection, keys: Keys) -> Desk:
    return Desk(link, keys)


@pytest.fixture
def view(link: Connection) -> MetricsView:
    board = Scoreboard(8)
    slot = board.allot(UNIT)
    slot.owned = 1
    slot.state = WorkerState.READY
    view = MetricsView("web-1", board)
    ask_time(link, view, "any")
    return view


def trimmer_of(
    desk: Desk, view: MetricsView, topic: Topic | None = None, *, groups: Any = ()
) -> Trimmer:
    settings = Settings(
        daemon=Daemon(instance="web-1"),
        topics={"access": topic or Topic()},
        consumers=tuple(Consumer(topic="access", group=name) for name in groups),
    )
    return Trimmer(desk.store, view, settings)


def write(desk: Desk, count: int, *, first: int = 1, size: int = 1, read: int = 0) -> None:
    """Write entries. The group reads and acknowledges the first ones."""
    desk.groups()
    body = "x" * size
    desk.link.pipeline(
        [("XADD", desk.stream, f"{n}-0", "payload", body) for n in range(first, first + count)]
    )
    if read:
        desk.do("XACK", desk.stream, "hits", *desk.fetch(read))


def length(desk: Desk) -> int:
    return int(desk.do("XLEN", desk.stream))


# --- policies -------------------------------------------------------------------------------------


def test_bytes_bound_the_memory_of_a_partition(desk: Desk, view: MetricsView) -> None:
    write(desk, 3_000, size=1_000, read=3_000)
    trimmer_of(desk, view, Topic(retention=Retention(max_bytes=1_000_000))).run()
    left = desk.do("MEMORY", "USAGE", desk.stream, "SAMPLES", 0)
    assert 700_000 < left < 1_300_000
    assert view.tally("trimmed")["access", "0"] == 3_000 - length(desk)


def test_shrink_keeps_entries_since_the_last_round(desk: Desk, view: MetricsView) -> None:
    trimmer = trimmer_of(desk, view, Topic(retention=Retention(shrink_every=60.0)))
    write(desk, 200, read=200)
    trimmer.run()
    write(desk, 200, first=201, read=200)
    trimmer.run()
    assert length(desk) == 400
    for _ in range(2):
        # As if the time had passed.
        desk.do("HINCRBY", desk.trim, "shrunk", -60_000)
        trimmer.run()
        trimmer.run()
        assert length(desk) in (200, 0)
    assert length(desk) == 0


def test_deleting_on_all_acknowledgements_leaves_nothing(desk: Desk, view: MetricsView) -> None:
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "0", "MKSTREAM")
    write(desk, 150, read=150)
    trimmer = trimmer_of(desk, view, Topic(retention=Retention(ack_policy="delete")))
    assert trimmer.run() == SOON
    assert length(desk) == 150
    ((_, rows),) = desk.do(
        "XREADGROUP", "GROUP", "audit", "w", "COUNT", 150, "STREAMS", desk.stream, ">"
    )
    desk.do("XACK", desk.stream, "audit", *(row[0] for row in rows))
    trimmer.run()
    assert length(desk) == 0


@pytest.mark.fault("F29")
def test_trimmer_reports_the_group_that_holds_entries(desk: Desk, view: MetricsView) -> None:
    write(desk, 500, read=120)
    trimmer = trimmer_of(desk, view, Topic(retention=Retention(max_length=10)))
    trimmer.run()
    assert view.held == {("access", 0): ("hits", 121)}
    desk.do("XACK", desk.stream, "hits", *desk.fetch(380))
    trimmer.run()
    assert view.held == {}
    write(desk, 500, first=501)
    trimmer.run()
    assert view.held
    for slot, _ in view.owned():
        slot.owned = 0
    trimmer.run()
    assert view.held == {}, "a lost unit is shown by its new owner"


def test_a_topic_that_no_group_reads(desk: Desk, view: MetricsView) -> None:
    """Its partitions have no owner, so each instance with the topic in its file trims it."""
    for slot, _ in view.owned():
        slot.owned = 0
    for number in range(3):
        key = desk.keys.stream("access", number)
        desk.link.pipeline([("XADD", key, f"{n}-0", "payload", n) for n in range(1, 301)])
    for alone, left in ((False, 300), (True, 100)):
        bounds = Retention(max_length=100, without_groups=alone)
        topic = Topic(partitions=3, retention=bounds)
        registry.create(desk.store, "access", topic)
        trimmer_of(desk, view, topic).run()
        lengths = [desk.do("XLEN", desk.keys.stream("access", n)) for n in range(3)]
        assert lengths == [left] * 3


# --- effective settings ---------------------------------------------------------------------------


def test_registered_settings_hold_where_the_file_is_silent(desk: Desk, view: MetricsView) -> None:
    stored = Topic(archive="required", retention=Retention(max_length=0))
    registry.create(desk.store, "access", stored)
    write(desk, 300, read=300)
    trimmer = trimmer_of(desk, view)
    trimmer.run()
    assert length(desk) == 300, "nothing is archived"
    desk.do("HSET", desk.trim, "archived", "300-0")
    trimmer.run()
    assert length(desk) == 0


def test_changed_settings_are_read_again(
    desk: Desk, view: MetricsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.create(desk.store, "access", Topic())
    write(desk, 300, read=300)
    trimmer = trimmer_of(desk, view)
    trimmer.run()
    changed = json.dumps({"archive": "off", "retention": {"max_length": 0}})
    desk.do("HSET", desk.keys.meta("access"), "settings", changed)
    trimmer.run()
    assert length(desk) == 300, "they were read a moment ago"
    monkeypatch.setattr(topics, "REFRESH_SECONDS", 0.0)
    trimmer.run()
    assert length(desk) == 0


def test_trimmer_stops_while_settings_are_unreadable(desk: Desk, view: MetricsView) -> None:
    """The settings may require an archive."""
    registry.create(desk.store, "access", Topic())
    desk.do("HSET", desk.keys.meta("access"), "settings", "no JSON")
    write(desk, 300, read=300)
    trimmer = trimmer_of(desk, view, Topic(retention=Retention(max_length=0)))
    for _ in range(2):
        with pytest.raises(StreamqdError, match="access"):
            trimmer.run()
    assert length(desk) == 300
    desk.do("HSET", desk.keys.meta("access"), "settings", "{}")
    trimmer.run()
    assert length(desk) == 0


def test_trimmer_continues_after_a_bad_topic(desk: Desk, view: MetricsView) -> None:
    slot = view.board.allot(Unit("other", 0, "hits"))
    slot.owned = 1
    desk.do("SET", desk.keys.meta("other"), "no hash")
    write(desk, 300, read=300)
    with pytest.raises(StreamqdError, match="WRONGTYPE"):
        trimmer_of(desk, view, Topic(retention=Retention(max_length=0))).run()
    assert length(desk) == 0


# --- allowed losses -------------------------------------------------------------------------------


def test_dropped_messages_are_counted_and_logged(
    desk: Desk, view: MetricsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_enforcer, "PAGE", 200)
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "0", "MKSTREAM")
    write(desk, 1_000)
    desk.fetch(250)
    topic = Topic(retention=Retention(drop_unacked_above=300))
    trimmer = trimmer_of(desk, view, topic)
    with LogLines() as lines:
        while trimmer.run() == 0.0:
            pass
        told = {
            (line["group"], line["state"]): line["entries"]
            for line in lines.named("retention.dropped")
        }
    assert length(desk) == 300
    assert told == {("audit", "unread"): 700, ("hits", "unread"): 450, ("hits", "pending"): 250}
    assert view.tally("dropped") == {("access", "0", *key): n for key, n in told.items()}
    record = desk.state()["trim"]
    assert record["dropped_pending:hits"] == b"250"
    assert record["dropped_unread:audit"] == b"700"
    assert record["dropped_unread:hits"] == b"450"
    assert record["first"] == b"701-0"
    assert desk.state()["stream"].groups["hits"][1] == {}, "no ghost is left"
    assert desk.fetch(1) == [b"701-0"]


def test_retention_drops_several_parts_in_one_turn(desk: Desk, view: MetricsView) -> None:
    """A part of 512 KiB has six entries here, which are counted and in one stream node."""
    desk.do("CONFIG", "SET", "stream-node-max-bytes", 0)
    try:
        write(desk, 30, size=100_000)
    finally:
        desk.do("CONFIG", "SET", "stream-node-max-bytes", 4096)
    desk.fetch(20)
    trimmer = trimmer_of(desk, view, Topic(retention=Retention(drop_unacked_above=0)))
    trimmer.run()
    assert length(desk) == 0
    lost = {("access", "0", "hits", "pending"): 20, ("access", "0", "hits", "unread"): 10}
    assert view.tally("dropped") == lost


def test_retention_by_age_keeps_fresh_entries(desk: Desk, view: MetricsView) -> None:
    now = desk.now_unix_ms()
    write(desk, 300, first=now - 10_000_000)
    write(desk, 100, first=now)
    trimmer_of(desk, view, Topic(retention=Retention(drop_unacked_after=3_600.0))).run()
    assert length(desk) == 100


def test_without_the_setting_nothing_is_lost(desk: Desk, view: MetricsView) -> None:
    write(desk, 300)
    trimmer_of(desk, view, Topic(retention=Retention(max_length=0, max_age=1.0))).run()
    assert length(desk) == 300
    assert not view.tally("dropped")


def test_retention_settles_drops_of_a_dead_housekeeper(desk: Desk, view: MetricsView) -> None:
    """It dropped entries and died before it settled. The next one counts the pending entries."""
    write(desk, 300)
    desk.fetch(150)
    desk.do("XTRIM", desk.stream, "MINID", "=", "101-0")
    topic = Topic(retention=Retention(drop_unacked_above=1_000))
    trimmer = trimmer_of(desk, view, topic)
    trimmer.run()
    trimmer.run()
    assert view.tally("dropped") == {("access", "0", "hits", "pending"): 100}
    assert len(desk.state()["stream"].groups["hits"][1]) == 50


def test_a_missing_group_holds_a_drop_too(desk: Desk, view: MetricsView, server: Server) -> None:
    write(desk, 300)
    topic = Topic(retention=Retention(drop_unacked_above=10))
    trimmer_of(desk, view, topic, groups=("hits", "audit")).run()
    assert length(desk) == 300
