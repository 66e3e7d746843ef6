"""Each task of the housekeeper works on a real server, and so does the whole process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from streamqd import housekeeper, logs, process
from streamqd.admin.backlog import parse_other_clients
from streamqd.config import Consumer, Daemon, Http, Retention, Settings, Topic
from streamqd.errors import RedisResponseError
from streamqd.housekeeper import Housekeeper, figures, health, page, promoter
from streamqd.housekeeper.batch import Refusals
from streamqd.housekeeper.figures import measure
from streamqd.housekeeper.outboxes import measure_outboxes
from streamqd.housekeeper.promoter import retry_promoter, send_promoter
from streamqd.housekeeper.reclaimer import Reclaimer
from streamqd.housekeeper.trimmer import Trimmer
from streamqd.metrics.table import METRICS
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import InstanceFlags, Scoreboard, WorkerSlot, WorkerState, now_ns
from streamqd.store import archives, messages, publishing, statistics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support import users
from tests.support.loglines import LogLines
from tests.support.servers import ProcessServer, Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("unlimited_turns")
OTHER = Assignment("access", 0, "audit")
HEALTHY = InstanceFlags.STARTED | InstanceFlags.REDIS_OK | InstanceFlags.MEMBER


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    return Harness(link, keys)


@pytest.fixture
def board() -> Scoreboard:
    board = Scoreboard(8)
    board.flags = InstanceFlags.MEMBER
    return board


@pytest.fixture
def slot(board: Scoreboard) -> WorkerSlot:
    slot = board.allot(ASSIGNMENT)
    slot.owned = 1
    slot.state = WorkerState.READY
    return slot


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with LogLines() as opened:
        yield opened


def settings_for(server: Server, **changes: Any) -> Settings:
    settings = Settings(
        redis=users.settings_as(server.settings, "daemon"),
        daemon=Daemon(instance="web-1"),
        http=Http(bind="127.0.0.1:0"),
        topics={"access": Topic(partitions=1)},
        consumers=(
            Consumer(topic="access", group="hits", handler="weblog:count", reclaim_idle=0.05),
        ),
    )
    return replace(settings, **changes)


def delay_retry(harness: Harness, place: bytes, delay: float) -> int:
    """Retry an entry in the same way as its worker.

    Return the due time, or a slightly earlier time.
    """
    due = harness.now_unix_ms() + round(delay * 1000)
    call = messages.retry(
        harness.keys, harness.leased("t1"), [(place, delay, {b"retryCount": b"1"})]
    )
    assert messages.SettledReply.parse(harness.link.run(call)).words == ["MOVED"]
    return due


# --- promote --------------------------------------------------------------------------------------


def test_promoter_follows_a_hint_before_its_poll(
    harness: Harness, view: MetricsView, slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoter, "POLL_SECONDS", 1000.0)
    (place,) = harness.pending("1-0")
    harness.own("t1")
    retries = retry_promoter(harness.store, view)
    assert 0.0 < retries.run({ASSIGNMENT: 0}) <= promoter.HINT_INTERVAL_SECONDS
    due = delay_retry(harness, place, 0.0)

    wait_until(lambda: view.now_unix_ms() > due + 50)
    retries.run({ASSIGNMENT: 0})
    assert harness.state()["retry"].entries == {}, "without a hint it waits for the next poll"
    retries.run({ASSIGNMENT: due + 1})
    assert len(harness.state()["retry"].entries) == 1
    assert view.tally("promoted") == {("access", "0", "hits"): 1}


def test_promoter_moves_a_retry_at_its_due_time(
    harness: Harness, view: MetricsView, slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoter, "POLL_SECONDS", 1000.0)
    (place,) = harness.pending("1-0")
    harness.own("t1")
    due = delay_retry(harness, place, 0.15)
    retries = retry_promoter(harness.store, view)
    assert 0.01 <= retries.run({ASSIGNMENT: 0}) < promoter.HINT_INTERVAL_SECONDS
    wait_until(lambda: retries.run({ASSIGNMENT: 0}) and harness.state()["retry"].entries)
    (moved,) = harness.state()["retry"].entries
    assert 0 <= int(moved.partition("-")[0]) - due < 500


def test_promoter_skips_assignments_without_delayed_messages(
    harness: Harness, view: MetricsView, slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoter, "POLL_SECONDS", 0.0)
    sends, retries = (made(harness.store, view) for made in (send_promoter, retry_promoter))
    (place,) = harness.pending("1-0")
    harness.own("t1")

    def run() -> tuple[int, int]:
        sends.run({("access", 0): 0})
        retries.run({ASSIGNMENT: 0})
        return harness.do("XLEN", harness.stream) - 1, harness.do("XLEN", harness.retry)

    assert run() == (0, 0)
    harness.link.run(publishing.schedule(harness.keys, "access", 0, 0.0, "s1", ["payload", "x"]))
    due = delay_retry(harness, place, 0.0)
    wait_until(lambda: view.now_unix_ms() > due + 50)
    assert run() == (0, 0), "no traffic, so no request"
    deque(measure(harness.store, view), maxlen=0)
    assert run() == (1, 1)

    harness.link.run(publishing.schedule(harness.keys, "access", 0, 0.0, "s2", ["payload", "x"]))
    assert run() == (2, 1), "a moment ago something was delayed"
    monkeypatch.setattr(promoter, "ACTIVE_SECONDS", 0.0)
    harness.link.run(publishing.schedule(harness.keys, "access", 0, 0.0, "s3", ["payload", "x"]))
    assert run() == (2, 1), "figures older than the last answer are ignored"


def test_promoter_moves_many_due_retries_in_bounded_runs(
    harness: Harness, view: MetricsView, slot: WorkerSlot
) -> None:
    total = promoter.PAGE * promoter.ROUNDS_MAX + 10
    for number in range(total):
        harness.do("ZADD", harness.delayed, 1, f"m:{number}-0")
        harness.do("HSET", harness.items, f"m:{number}-0", b"\x92\xa7payload\xa1x")
    retries = retry_promoter(harness.store, view)
    assert retries.run({ASSIGNMENT: 0}) == 0.0, "there is more to do at once"
    assert harness.do("XLEN", harness.retry) == total - 10
    assert retries.run({ASSIGNMENT: 0}) > 0
    assert harness.do("XLEN", harness.retry) == total


def test_promoter_writes_a_scheduled_send(
    harness: Harness, view: MetricsView, slot: WorkerSlot
) -> None:
    send = publishing.schedule(harness.keys, "access", 0, 0.1, "s1", ["payload", "later"])
    harness.link.run(send)
    sends = send_promoter(harness.store, view)
    wait_until(lambda: sends.run({("access", 0): 0}) and harness.do("XLEN", harness.stream))
    ((_, fields),) = harness.do("XRANGE", harness.stream, "-", "+")
    assert fields[:2] == [b"payload", b"later"]
    assert view.tally("sent") == {("access", "0"): 1}


def test_promoter_logs_a_due_time_without_a_message(
    harness: Harness, view: MetricsView, slot: WorkerSlot, lines: LogLines
) -> None:
    harness.do("ZADD", harness.delayed, 1, "m:1-0")
    retry_promoter(harness.store, view).run({ASSIGNMENT: 0})
    assert harness.do("ZCARD", harness.delayed) == 0
    assert [line["members"] for line in lines.events("due_time.removed")] == [1]


# --- reclaim --------------------------------------------------------------------------------------


@pytest.fixture
def reclaimer(harness: Harness, server: Server) -> Reclaimer:
    return Reclaimer(harness.store, settings_for(server).consumers)


@pytest.mark.parametrize("stream", ["stream", "retry"])
def test_reclaimer_flags_idle_entries_of_other_clients_once(
    harness: Harness,
    view: MetricsView,
    slot: WorkerSlot,
    reclaimer: Reclaimer,
    lines: LogLines,
    stream: str,
) -> None:
    harness.groups()
    key = getattr(harness, stream)
    harness.add("1-0", stream=key)
    harness.fetch(consumer="by-hand", stream=key)
    before = harness.dump()

    wait_until(lambda: reclaimer.run(view.owned_slots()) or slot.reclaim_requested)
    reclaimer.run(view.owned_slots())
    assert slot.reclaim_requested == slot.reclaim_done + 1
    assert [line["consumer_name"] for line in lines.events("reclaim.requested")] == ["by-hand"]
    assert harness.dump().keys() == before.keys()
    assert harness.do("XPENDING", key, ASSIGNMENT.group, "-", "+", 9)[0][1] == b"by-hand", (
        "claimed nothing"
    )

    slot.reclaim_done = slot.reclaim_requested
    reclaimer.run(view.owned_slots())
    assert slot.reclaim_requested == slot.reclaim_done + 1, "still there: asked for again"


def test_reclaimer_ignores_own_and_fresh_entries(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    harness.pending("1-0")
    harness.add("2-0")
    harness.fetch(consumer="by-hand")
    patient = replace(settings_for(server).consumers[0], reclaim_idle=3600.0)
    Reclaimer(harness.store, [patient]).run(view.owned_slots())
    harness.do("XACK", harness.stream, ASSIGNMENT.group, "2-0")
    eager = replace(patient, reclaim_idle=0.0)
    Reclaimer(harness.store, [eager]).run(view.owned_slots())
    assert slot.reclaim_requested == 0


def test_reclaimer_flags_ownerless_entries_immediately(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    """Entries without an owner are flagged immediately.

    XNACK of Redis 8.8 leaves such entries. Here, the consumer '' has the same effect.
    """
    harness.pending("1-0")
    patient = replace(settings_for(server).consumers[0], reclaim_idle=3600.0)
    Reclaimer(harness.store, [patient]).run(view.owned_slots())
    assert slot.reclaim_requested == 0
    harness.do("XCLAIM", harness.stream, ASSIGNMENT.group, "", 0, "1-0", "JUSTID")
    Reclaimer(harness.store, [patient]).run(view.owned_slots())
    assert slot.reclaim_requested == 1


def test_reclaimer_counts_entries_without_a_consumer() -> None:
    """Entries without a consumer are counted.

    In the reply of Redis 8.8, they are missing from the list, but the summary includes them.
    """
    summary = [3, b"1-0", b"3-0", [[b"w", b"2"]]]
    assert parse_other_clients([summary, None]) == {"": 1}
    assert parse_other_clients([[1, b"1-0", b"1-0", []], None]) == {"": 1}
    assert parse_other_clients([None, [1, b"1-0", b"1-0", [[b"", b"1"]]]]) == {"": 1}
    assert parse_other_clients([[2, b"1-0", b"2-0", [[b"w", b"2"]]], None]) == {}
    assert parse_other_clients([[1, b"1-0", b"1-0", [[b"x", b"1"]]], summary]) == {"x": 1, "": 1}


def test_reclaimer_continues_after_a_missing_group(
    harness: Harness, view: MetricsView, board: Scoreboard, slot: WorkerSlot, reclaimer: Reclaimer
) -> None:
    other = board.allot(Assignment("access", 1, "hits"))
    other.owned = 1
    harness.groups()
    harness.add("1-0")
    harness.fetch(consumer="by-hand")
    wait_until(lambda: reclaimer.run(view.owned_slots()) or slot.reclaim_requested)
    assert other.reclaim_requested == 0


# --- trim -----------------------------------------------------------------------------------------


def handle_entries(harness: Harness, first: int, last: int, group: str = "hits") -> None:
    """Read and acknowledge a group's entries up to the last ID."""
    harness.do(
        "XREADGROUP", "GROUP", group, "w", "COUNT", last - first + 1, "STREAMS", harness.stream, ">"
    )
    harness.do("XACK", harness.stream, group, *(f"{n}-0" for n in range(first, last + 1)))


def test_trimmer_keeps_unacknowledged_entries(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    harness.groups()
    for number in range(1, 1001):
        harness.add(f"{number}-0")
    settings = settings_for(server, topics={"access": Topic(retention=Retention(max_length=100))})
    trimmer = Trimmer(harness.store, view, settings)
    trimmer.run()
    assert harness.do("XLEN", harness.stream) == 1000, "nothing has been acknowledged"
    handle_entries(harness, 1, 500)
    trimmer.run()
    left = harness.do("XLEN", harness.stream)
    assert 500 <= left < 620, "down to the floor, but for a part of a node"
    handle_entries(harness, 501, 1000)
    trimmer.run()
    assert 100 <= harness.do("XLEN", harness.stream) < 220
    assert view.tally("trimmed")["access", "0"] == 1000 - harness.do("XLEN", harness.stream)


def test_metrics_scrape_succeeds_during_trimming(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    """A scrape succeeds although the trimmer changes a mapping at the same time.

    Otherwise, the HTTP thread would return 500.
    """
    harness.groups()
    harness.add("1-0")
    settings = settings_for(server, topics={"access": Topic(retention=Retention(max_length=1))})
    trimmer = Trimmer(harness.store, view, settings)
    for number in range(1, 1001):
        harness.add(f"{number + 1}-0")
    trimmer.run()
    assert view.held
    reading = [iter(metric.read(view)) for metric in METRICS]
    for each in reading:
        next(each, None)

    handle_entries(harness, 1, 1001)
    place = ("access", 0)
    reply = harness.link.run(trimmer._call(place, {place: settings.topics["access"]}))
    trimmer._record_reply(place, reply, Refusals())
    view.count("failures", (view.instance, "trim"))

    for each in reading:
        list(each)
    trimmer.run()
    assert not view.held


def test_trimmer_trims_only_with_a_retention(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    harness.groups()
    now = harness.now_unix_ms()
    for number in range(300):
        harness.add(f"{now - 10_000_000 + number}-0")
    for number in range(10):
        harness.add(f"{now + number}-0")
    harness.fetch(310)
    harness.do(
        "XACK",
        harness.stream,
        "hits",
        *[i for i, _ in harness.do("XRANGE", harness.stream, "-", "+")],
    )
    Trimmer(harness.store, view, settings_for(server)).run()
    assert harness.do("XLEN", harness.stream) == 310, "a topic without retention keeps all"
    settings = settings_for(server, topics={"access": Topic(retention=Retention(max_age=3600.0))})
    Trimmer(harness.store, view, settings).run()
    assert 10 <= harness.do("XLEN", harness.stream) <= 110


def test_trimmer_keeps_unarchived_entries(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    harness.groups()
    for number in range(1, 501):
        harness.add(f"{number}-0")
    handle_entries(harness, 1, 500)
    topic = Topic(retention=Retention(max_length=0), archive="required")
    trimmer = Trimmer(harness.store, view, settings_for(server, topics={"access": topic}))
    trimmer.run()
    assert harness.do("XLEN", harness.stream) == 500, "nothing has been archived"
    harness.link.run(archives.advance(harness.keys, "access", 0, "300-0"))
    trimmer.run()
    assert 200 <= harness.do("XLEN", harness.stream) <= 300, "down to the watermark, whole nodes"
    assert harness.do("XRANGE", harness.stream, "301-0", "301-0")


def test_trimmer_waits_for_a_missing_group_and_logs_once(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server, lines: LogLines
) -> None:
    harness.groups()
    for number in range(1, 301):
        harness.add(f"{number}-0")
    handle_entries(harness, 1, 300)
    hits = settings_for(server).consumers[0]
    settings = settings_for(
        server,
        topics={"access": Topic(retention=Retention(max_length=0))},
        consumers=(hits, replace(hits, group="audit")),
    )
    trimmer = Trimmer(harness.store, view, settings)
    trimmer.run()
    trimmer.run()
    assert harness.do("XLEN", harness.stream) == 300
    assert [line["group"] for line in lines.events("trim.refused")] == ["audit"]
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "$")
    trimmer.run()
    assert harness.do("XLEN", harness.stream) == 0


def test_trimmer_removes_acknowledged_retry_entries(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    harness.groups()
    harness.pending_retry("1-0", "2-0")
    harness.do("XACK", harness.retry, "hits", "1-0", "2-0")
    deque(measure(harness.store, view), maxlen=0)
    Trimmer(harness.store, view, settings_for(server)).run()
    assert harness.do("XLEN", harness.retry) == 0


# --- the whole housekeeper ------------------------------------------------------------------------


class Running:
    """A housekeeper that runs in a thread of the test."""

    def __init__(self, board: Scoreboard, settings: Settings) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs = theirs
        self.keeper = Housekeeper(board, settings, theirs)
        self.code: int | None = None
        self._server: Any = None
        serve = self.keeper._serve

        def remember() -> Any:
            self._server = serve()
            return self._server

        self.keeper._serve = remember  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.keeper.run()

    def get(self, path: str) -> tuple[int, bytes]:
        host, port = wait_until(lambda: self._server and self._server.bound)
        connection = HTTPConnection(host, port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def reasons(self, path: str) -> list[str]:
        status, body = self.get(path)
        found = json.loads(body)
        assert (status == 200) == found["ok"] == (not found["reasons"])
        return list(found["reasons"])

    def stop(self) -> None:
        if self._thread.is_alive():
            self.ours.send(b"quit")
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.ours.close()
        self._theirs.close()


@pytest.fixture
def begin(board: Scoreboard) -> Iterator[Callable[[Settings], Running]]:
    started: list[Running] = []

    def start(settings: Settings) -> Running:
        started.append(Running(board, settings))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def test_housekeeper_measures_publishes_and_serves(
    harness: Harness,
    board: Scoreboard,
    slot: WorkerSlot,
    server: Server,
    begin: Callable[[Settings], Running],
) -> None:
    harness.pending("1-0", "2-0")
    harness.add("3-0")
    slot.epoch = 77
    slot.add("fetched", 2)
    board.flags = HEALTHY
    board.progress_ns = now_ns()
    running = begin(settings_for(server))
    key = harness.keys.instance("default", "web-1")

    def published() -> Any:
        raw = harness.do("GET", key)
        found = json.loads(raw) if raw else {"assignments": [{"pending": None}]}
        return found if found["assignments"][0]["pending"] is not None else None

    summary = wait_until(published)
    (assignment,) = summary["assignments"]
    assert (assignment["topic"], assignment["partition"], assignment["group"]) == ASSIGNMENT
    assert (assignment["epoch"], assignment["pending"], assignment["state"]) == (77, 2, "ready")
    assert assignment["counters"]["fetched"] == 2
    assert summary["state"] == "working"
    assert abs(summary["at_unix_ms"] - harness.now_unix_ms()) < 5000
    assert 0 < harness.do("PTTL", key) <= 10_000

    board.progress_ns = now_ns()
    assert running.reasons("/readyz") == running.reasons("/livez") == []
    text = running.get("/metrics")[1].decode()
    labels = 'group="hits",partition="0",streamqd_instance="web-1",topic="access"'
    assert f"streamqd_consumed_total{{{labels}}} 2.0" in text
    assert 'streamqd_pending{group="hits",partition="0",topic="access"} 2.0' in text
    assert 'streamqd_topic_length{partition="0",topic="access"} 3.0' in text
    status = json.loads(running.get("/status")[1])
    assert (status["instance"], status["not_ready"]) == ("web-1", [])
    front = running.get("/")[1].decode()
    assert "owns 1 partition " in front
    assert "run <code>streamqd console</code> and open the link that it prints" in front
    links = re.findall(r'href="([^"]+)"', front)
    assert len(links) == 5
    assert [path for path in links if running.get(f"/{path}")[0] == 404] == []


def test_housekeeper_isolates_an_unreadable_outbox(store: Store, view: MetricsView) -> None:
    """An outbox that cannot be read has no figures, and all others keep theirs."""
    keys, bad = store.keys, logs.bad_values()
    names = ["shop", "frog", "list", "empty"]
    store.execute("HSET", keys.outbox("shop"), "epoch", 3, "rows", 5, "sent", 9)
    store.execute("SET", keys.outbox_lease("shop"), "token", "PX", 60_000)
    store.execute("HSET", keys.outbox("frog"), "rows", "frog")
    measure_outboxes(store, view, ["shop", "frog", "empty"], bad)
    shop, empty = view.outboxes
    assert (shop.name, shop.rows, shop.sent, shop.relayed) == ("shop", 5, 9, True)
    assert (empty.name, empty.epoch, empty.relayed) == ("empty", 0, False)
    store.execute("LPUSH", keys.outbox("list"), "x")
    with pytest.raises(RedisResponseError):
        measure_outboxes(store, view, names, bad)
    assert [each.name for each in view.outboxes] == ["shop", "empty"]


def test_housekeeper_shows_a_new_partition_immediately(
    harness: Harness,
    board: Scoreboard,
    slot: WorkerSlot,
    server: Server,
    begin: Callable[[Settings], Running],
) -> None:
    harness.groups()
    running = begin(settings_for(server))
    wait_until(lambda: ASSIGNMENT in running.keeper.view.assignments)
    harness.link.run(messages.ensure_group(harness.keys, OTHER, "0"))
    board.allot(OTHER).owned = 1
    began = time.monotonic()
    wait_until(lambda: OTHER in running.keeper.view.assignments)
    assert time.monotonic() - began < 1.0


def test_housekeeper_shows_worker_changes_immediately(
    harness: Harness,
    slot: WorkerSlot,
    server: Server,
    begin: Callable[[Settings], Running],
) -> None:
    harness.groups()
    begin(settings_for(server))
    key = harness.keys.instance("default", "web-1")

    def shown() -> str:
        raw = harness.do("GET", key)
        return json.loads(raw)["assignments"][0]["state"] if raw else ""

    wait_until(lambda: shown() == "ready", what="the first summary")
    for state, word in [(WorkerState.BOOTING, "booting"), (WorkerState.READY, "ready")] * 3:
        slot.state = state
        wait_until(lambda word=word: shown() == word, timeout=1.0, what=f"it is {word}")


def test_health_endpoints_report_reasons(
    harness: Harness,
    board: Scoreboard,
    slot: WorkerSlot,
    server: Server,
    begin: Callable[[Settings], Running],
) -> None:
    running = begin(settings_for(server))
    assert running.reasons("/livez") == []
    assert running.reasons("/startupz") == ["the daemon is still starting"]
    board.flags = HEALTHY
    wait_until(lambda: running.reasons("/readyz") == [])
    board.flags = HEALTHY | InstanceFlags.DRAINING
    assert running.reasons("/readyz") == ["the daemon is draining"]
    board.flags = InstanceFlags.STARTED
    assert running.reasons("/readyz") == ["Redis does not answer"]
    board.flags = HEALTHY
    slot.owned = 0
    assert len(running.reasons("/readyz")) == 1
    board.flags = HEALTHY | InstanceFlags.STANDBY
    assert running.reasons("/readyz") == []
    board.progress_ns = now_ns() - 60_000_000_000
    assert "supervisor" in running.reasons("/livez")[0]


def test_housekeeper_of_a_duplicate_publishes_no_summary(
    server: Server, harness: Harness, board: Scoreboard, begin: Callable[[Settings], Running]
) -> None:
    """If two daemons have the same name, the second does not replace the first one's summary."""
    board.flags = InstanceFlags.STARTED
    begin(settings_for(server))
    summary = harness.keys.instance("default", "web-1")
    duplicate = harness.keys.duplicate("default", "web-1")
    board.flags |= InstanceFlags.DUPLICATE
    wait_until(lambda: harness.do("EXISTS", duplicate))
    assert not harness.do("EXISTS", summary)
    board.flags = HEALTHY
    wait_until(lambda: harness.do("EXISTS", summary))


def test_readiness_fails_with_a_stalled_worker(
    view: MetricsView, board: Scoreboard, slot: WorkerSlot, harness: Harness
) -> None:
    harness.groups()
    harness.add("1-0")
    deque(measure(harness.store, view), maxlen=0)
    view.redis_up = True
    board.flags = HEALTHY
    slot.progress_ns = now_ns()
    assert health.readiness_problems(view) == []
    slot.progress_ns = now_ns() - 120_000_000_000
    assert health.readiness_problems(view) == ["the worker of access/0/hits makes no progress"]
    slot.post_batch([b"m:1-0", b"m:2-0"])
    slot.states[1] = 1
    slot.lanes[0], slot.lanes[1] = 1, now_ns() - 110_000_000_000
    assert health.readiness_problems(view) == [], "a handler may run for hours"


def test_housekeeper_promotes_retries_when_due(
    harness: Harness, slot: WorkerSlot, server: Server, begin: Callable[[Settings], Running]
) -> None:
    places = harness.pending("1-0", "2-0", "3-0")
    harness.own("t1")
    begin(settings_for(server))
    dues = [
        delay_retry(harness, place, delay)
        for place, delay in zip(places, (0, 0.3, 1.4), strict=True)
    ]
    wait_until(lambda: harness.do("XLEN", harness.retry) == 3)
    moved = [int(i.partition(b"-")[0]) for i, _ in harness.do("XRANGE", harness.retry, "-", "+")]
    late = [at - due for at, due in zip(moved, dues, strict=True)]
    print(f"promoted {late} ms after they were due")
    assert all(ms >= 0 for ms in late), (moved, dues)


def test_housekeeper_task_continues_after_a_bad_key(
    harness: Harness,
    board: Scoreboard,
    slot: WorkerSlot,
    server: Server,
    lines: LogLines,
    begin: Callable[[Settings], Running],
) -> None:
    good = board.allot(OTHER)
    good.owned = 1
    harness.groups()
    harness.link.run(messages.ensure_group(harness.keys, OTHER, "0"))
    harness.do("SET", harness.delayed, "not a sorted set")
    harness.do("ZADD", harness.keys.retry(*OTHER), 1, "m:1-0")
    harness.do("HSET", harness.keys.retry_items(*OTHER), "m:1-0", b"\x92\xa7payload\xa1x")
    running = begin(settings_for(server))
    wait_until(lambda: harness.do("XLEN", harness.keys.retry_stream(*OTHER)) == 1)
    wait_until(lambda: running.keeper.view.assignments)
    assert list(running.keeper.view.assignments) == [OTHER]
    wait_until(lambda: lines.events("housekeeper.failed"))
    tally = running.keeper.view.tally
    wait_until(lambda: tally("failures")["web-1", "promote_retries"] >= 2)
    told = [
        each for each in lines.events("housekeeper.failed") if each["task"] == "promote_retries"
    ]
    assert len(told) == 1
    harness.do("DEL", harness.delayed)
    wait_until(
        lambda: (
            {"measure", "promote_retries"}
            <= {each["task"] for each in lines.events("housekeeper.recovered")}
        )
    )


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_housekeeper_recovers_after_a_redis_outage(
    fresh_server: ProcessServer,
    board: Scoreboard,
    slot: WorkerSlot,
    lines: LogLines,
    begin: Callable[[Settings], Running],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    monkeypatch.setattr(housekeeper, "LINK_TIMEOUT", 0.3)
    board.flags = HEALTHY
    running = begin(settings_for(fresh_server))
    wait_until(lambda: running.reasons("/readyz") == [])
    if fault == "killed":
        fresh_server.kill()
    else:
        fresh_server.pause()
    wait_until(lambda: running.reasons("/readyz") == ["Redis does not answer"])
    assert running.reasons("/livez") == []
    assert b'streamqd_redis_up{streamqd_instance="web-1"} 0.0' in running.get("/metrics")[1]
    wait_until(lambda: running.keeper._redis_episode.failures >= 3)
    assert len(lines.events("redis.lost")) == 1

    if fault == "killed":
        fresh_server.restart()
    else:
        fresh_server.resume()
    wait_until(lambda: running.reasons("/readyz") == [], timeout=20)
    (back,) = lines.events("redis.recovered")
    assert back["failures"] >= 3
    assert len(lines.events("redis.lost")) == 1


@pytest.mark.fault("F15")
def test_housekeeper_survives_an_empty_redis(
    harness: Harness, slot: WorkerSlot, server: Server, begin: Callable[[Settings], Running]
) -> None:
    """The housekeeper continues without registry, groups or streams, for example after FLUSHALL."""
    running = begin(
        settings_for(server, topics={"access": Topic(retention=Retention(max_age=1.0))})
    )
    key = harness.keys.instance("default", "web-1")
    for _ in range(2):
        wait_until(lambda: harness.do("GET", key))
        harness.do("FLUSHALL")
    wait_until(lambda: harness.do("GET", key))
    assert running.keeper.view.tally("failures") == {}


# --- the process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["quit", "eof"])
def test_housekeeper_ignores_signals_until_its_supervisor_exits(
    harness: Harness, board: Scoreboard, slot: WorkerSlot, server: Server, ending: str
) -> None:
    settings = settings_for(server)
    harness.link.close()

    def run(control: socket.socket) -> int:
        return housekeeper.run(board, settings, control)

    child = process.spawn(run, title="streamqd: housekeeper")
    try:
        wait_until(lambda: board.housekeeper_progress_ns)
        for number in (signal.SIGTERM, signal.SIGINT):
            child.signal(number)
        seen = board.housekeeper_progress_ns
        wait_until(lambda: board.housekeeper_progress_ns > seen)
        assert child.reap() is None
        began = time.monotonic()
        if ending == "quit":
            child.send(b"quit")
        else:
            child.control.shutdown(socket.SHUT_RDWR)
        exit_ = wait_until(child.reap)
        assert (exit_.code, exit_.signal) == (0, None)
        assert time.monotonic() - began < 2
    finally:
        if Path(f"/proc/{child.pid}").exists():
            child.kill_group()
            os.waitpid(child.pid, 0)


# --- the summary ----------------------------------------------------------------------------------


def test_summary_has_the_dead_letters_of_each_group(
    harness: Harness, view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    """The figures contain the dead letters of each group as well as those of the partition."""

    def told() -> tuple[int | None, int | None]:
        deque(measure(harness.store, view), maxlen=0)
        summary = housekeeper.Summary(view, settings_for(server), os.getpid()).document()
        [assignment] = summary["assignments"]
        return assignment["partition_dead_letters"], assignment["dead_letters"]

    assert told() == (0, 0)
    for group in (harness.assignment.group, "another", "another"):
        harness.do("XADD", harness.dlq, "*", "payload", "x", "group", group)
    assert told() == (3, 1)
    harness.do("XADD", harness.dlq, "*", "payload", "x", "group", harness.assignment.group)
    assert told() == (4, 2)
    harness.do("DEL", harness.dlq)
    assert told() == (0, 0)


def test_measurement_counts_many_pages_of_dead_letters(
    harness: Harness, view: MetricsView, slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement counts many pages.

    With one page each, 500,000 dead letters would take 50 minutes to two hours.
    """
    monkeypatch.setattr(figures, "DEAD_LETTERS_SECONDS", 60.0)
    count = 3 * statistics.DEAD_LETTERS_AT_ONCE
    harness.link.pipeline([("XADD", harness.dlq, "*", "group", "another")] * count)
    deque(measure(harness.store, view), maxlen=0)
    assert view.dead_letters[harness.assignment[:2]].get("another") == count

    # The first page is always read, so that even a slow server does not stop the count.
    monkeypatch.setattr(figures, "DEAD_LETTERS_SECONDS", 0.0)
    view.dead_letters = {}
    for at in (1, 2, 3):
        deque(measure(harness.store, view), maxlen=0)
        known = view.dead_letters[harness.assignment[:2]]
        assert known.by_group["another"] == at * statistics.DEAD_LETTERS_AT_ONCE


def test_summary_has_the_progress_of_a_recovery(
    view: MetricsView, slot: WorkerSlot, server: Server
) -> None:
    def told() -> tuple[int, int, int]:
        summary = housekeeper.Summary(view, settings_for(server), os.getpid()).document()
        [assignment] = summary["assignments"]
        return assignment["suspects_left"], assignment["suspects"], assignment["round_size"]

    slot.pid, slot.suspects, slot.round_size = 4711, 128, 16
    assert told() == (0, 0, 0)
    slot.suspects_left = 37
    assert told() == (37, 128, 16)
    slot.pid = 0
    assert told() == (0, 0, 0)


# --- the page -------------------------------------------------------------------------------------


def test_front_page_escapes_its_values(view: MetricsView, slot: WorkerSlot, server: Server) -> None:
    evil = "<script>alert(1)</script>"
    document = housekeeper.Summary(view, settings_for(server), os.getpid()).document()
    text = page.render(document | dict.fromkeys(("instance", "host", "fleet"), evil), [evil])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 5  # the title, the heading, two facts, and the reason
    assert "src=" not in text
