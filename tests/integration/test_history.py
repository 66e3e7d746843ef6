"""The housekeeper writes the history to a real server, and readers check every value."""

from __future__ import annotations

import json
import time

import pytest

from streamqd.config import Consumer, Daemon, Settings
from streamqd.housekeeper.history import COUNT_INTERVAL_SECONDS, HistoryWriter
from streamqd.isolate import run_directly
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import COUNTERS, Scoreboard, WorkerSlot, now_ns
from streamqd.store import history
from streamqd.store.client import Connection
from streamqd.store.history import HistoryRow, Interval
from streamqd.store.keys import Keys
from streamqd.store.statistics import AssignmentFigures, Backlog, PartitionFigures
from streamqd.store.store import Store

FLEET = "default"
ORDERS = [Assignment("orders", number, "billing") for number in range(2)]
NOW = int(time.time()) // 60 * 60_000 + 30_000  # the middle of the current minute


@pytest.fixture
def store(link: Connection, keys: Keys) -> Store:
    return Store(link, keys)


@pytest.fixture
def view() -> MetricsView:
    board = Scoreboard(8)
    for assignment in ORDERS:
        board.allot(assignment).owned = 1
    view = MetricsView(instance="web-1", board=board)
    set_time(view, NOW)
    return view


def set_time(view: MetricsView, unix_ms: int) -> None:
    view.asked_ns, view.server_unix_ms = now_ns(), unix_ms


def make_writer(store: Store, view: MetricsView, keep: float = 86_400.0) -> HistoryWriter:
    consumer = Consumer(topic="orders", group="billing", handler="shop:bill")
    daemon = Daemon(instance="web-1", fleet=FLEET, history=keep)
    settings = Settings(daemon=daemon, consumers=(consumer,))
    return HistoryWriter(store, view, settings, run_directly)


def add_counts(slot: WorkerSlot, **counts: int) -> None:
    for name, number in counts.items():
        slot.counters[COUNTERS.index(name)] += number


def set_figures(view: MetricsView, added: int, lag: int = 0, oldest_unix_ms: int = 0) -> None:
    """Set the figures of both partitions in the same way as the housekeeper's measurement."""
    view.partitions = {
        (assignment.topic, assignment.partition): PartitionFigures(0, added, "", "", 0, 0, "")
        for assignment in ORDERS
    }
    unread = f"{oldest_unix_ms}-0" if lag else ""
    view.assignments = {
        assignment: AssignmentFigures(
            Backlog(0, "", lag, unread, lag), Backlog(0, "", 0, "", 0), 0, None
        )
        for assignment in ORDERS
    }


def entries(store: Store, since: int = 0) -> list[Interval]:
    return list(history.read(store, FLEET, since))


def test_history_entry_has_the_sums_since_the_last_one(store: Store, view: MetricsView) -> None:
    first, second = view.board.slots()[:2]
    add_counts(first, acked=1_000)  # counted before this housekeeper started
    writer = make_writer(store, view)
    set_figures(view, added=500)
    writer.write()
    add_counts(first, acked=7, failed=2, retried=1, dead_lettered=1)
    add_counts(second, acked=5, expired=3)
    first.handle_histogram[4] += 6
    second.handle_histogram[4] += 1
    second.handle_histogram[9] += 4
    second.delay_histogram[3] += 5
    set_figures(view, added=520, lag=8, oldest_unix_ms=NOW - 2_000)
    writer.write()
    started, [row] = entries(store)[0], entries(store)[1].rows
    assert not started.rows  # no events and no waiting messages
    assert started.measured == entries(store)[1].measured == {("orders", "billing"): 2}
    assert (row.topic, row.group) == ("orders", "billing")
    expected = {
        "added": 40,
        "acked": 12,
        "failed": 2,
        "retried": 1,
        "dead_lettered": 1,
        "expired": 3,
    }
    assert row.counts == expected
    assert row.lag == 16
    assert 2_000 <= row.oldest_ms < 60_000
    assert row.handled == {4: 7, 9: 4}
    one, two = entries(store)[1].assignments
    assert [(each.partition, each.counts["acked"], each.lag) for each in (one, two)] == [
        *((0, 7, 8), (1, 5, 8)),
    ]
    assert (one.topic, one.group, one.handler) == ("orders", "billing", "shop:bill")
    assert (one.handled, two.handled) == ({4: 6}, {4: 1, 9: 4})
    assert (one.delays, two.delays) == ({}, {3: 5})
    assert entries(store)[1].by_assignment() == [one, two]


def test_history_reads_a_group_of_dead_letters(store: Store) -> None:
    """The history contains a group of dead letters.

    Its name has an @, which no configured group may have.
    """
    rows = [HistoryRow("orders", "tickets@dlq", lag=1), HistoryRow("orders", "billing", lag=2)]
    assignments = [HistoryRow("orders", "tickets@dlq", 0, "shop:ticket", lag=1)]
    history.append(
        store, FLEET, Interval("", "web-1", 1, 60.0, rows, assignments=assignments), 86_400
    )
    [entry] = entries(store)
    assert entry.bad is None
    assert {row.group for row in entry.rows} == {"tickets@dlq", "billing"}
    assert list(entry.assignments) == assignments


def test_history_entry_keeps_the_busiest_assignments(store: Store) -> None:
    assignments = [HistoryRow("orders", "billing", number, lag=number) for number in range(1_200)]
    history.append(store, FLEET, Interval("", "web-1", 1, 60.0, assignments=assignments), 86_400)
    [entry] = entries(store)
    assert len(entry.assignments) == history.ASSIGNMENTS_MAX
    assert min(each.lag for each in entry.assignments) == 200


def test_history_row_takes_about_110_bytes(store: Store) -> None:
    """A row takes about 110 bytes, as the reference of `daemon.history` states.

    Its runs and delays fill five buckets.
    """
    counts = dict.fromkeys(history.COUNTS, 0) | {"added": 6_000, "acked": 6_000, "failed": 12}
    handled = {10: 400, 11: 3_000, 12: 2_000, 13: 590, 17: 10}
    delays = {0: 90, 1: 4_000, 2: 1_800, 3: 100, 7: 10}
    assignments = [
        HistoryRow("orders", "billing", number, "shop:bill", counts, 120, 1_500, handled, delays)
        for number in range(64)
    ]
    history.append(store, FLEET, Interval("", "web-1", 1, 60.0, assignments=assignments), 86_400)
    [[_, fields]] = store.execute("XRANGE", store.keys.history(FLEET), "-", "+")
    written = dict(zip(fields[::2], fields[1::2], strict=True))
    assert 90 < (len(written[b"units"]) + len(written[b"delays"])) / len(assignments) < 120
    [entry] = entries(store)
    assert list(entry.assignments) == assignments


def test_history_entry_of_an_older_version_has_no_delays(store: Store) -> None:
    assignments = '[["orders","billing","shop:bill",[[0,1,1,1,1,1,1,1,1,3,4]]]]'
    fields = ("instance", "web-1", "until", 1, "seconds", "60", "rows", "[]", "units", assignments)
    store.execute("XADD", store.keys.history(FLEET), "*", *fields)
    [entry] = entries(store)
    assert (entry.assignments[0].handled, entry.assignments[0].delays) == ({3: 4}, None)


def test_history_entry_is_written_after_each_server_minute(store: Store, view: MetricsView) -> None:
    writer = make_writer(store, view)
    assert writer.run() == COUNT_INTERVAL_SECONDS
    set_time(view, NOW + 29_000)
    assert 0 < writer.run() <= 1
    assert entries(store) == []
    set_time(view, NOW + 30_500)
    assert writer.run() == COUNT_INTERVAL_SECONDS
    [entry] = entries(store)
    assert entry.instance == "web-1"
    assert entry.until_unix_ms // 60_000 == NOW // 60_000 + 1
    set_time(view, NOW + 31_000)
    writer.run()
    assert len(entries(store)) == 1


def test_history_counts_from_the_first_measurement(store: Store, view: MetricsView) -> None:
    """The history counts only from the first measurement.

    The housekeeper is new, and loses one partition within a minute.
    """
    writer = make_writer(store, view)
    writer.run()  # nothing has been measured yet
    for added in (500, 512):
        set_figures(view, added)
        writer.run()
    view.board.slots()[1].owned = 0
    set_figures(view, added=530)
    writer.run()
    writer.write()
    [entry] = entries(store)
    assert [(each.partition, each.counts["added"]) for each in entry.assignments] == [
        (0, 30),
        (1, 12),
    ]
    assert entry.measured == {("orders", "billing"): 1}


def test_history_skips_a_group_without_a_local_partition(store: Store, view: MetricsView) -> None:
    set_figures(view, added=3)
    writer = make_writer(store, view)
    add_counts(view.board.slots()[0], acked=3)
    for slot in view.board.slots()[:2]:
        slot.owned = 0
    writer.write()
    [entry] = entries(store)
    assert entry.rows[0].counts["acked"] == 3
    assert entry.measured == {}


def test_history_entry_includes_unwritten_figures(store: Store, view: MetricsView) -> None:
    writer = make_writer(store, view)
    add_counts(view.board.slots()[0], acked=3)
    store.execute("SET", store.keys.history(FLEET), "not a stream")
    with pytest.raises(Exception, match="WRONGTYPE"):
        writer.write()
    store.execute("DEL", store.keys.history(FLEET))
    add_counts(view.board.slots()[0], acked=4)
    writer.write()
    [entry] = entries(store)
    assert entry.rows[0].counts["acked"] == 7


def test_history_deletes_old_entries(store: Store) -> None:
    rows = [HistoryRow("orders", "billing", lag=1)]
    now = int(store.execute("TIME")[0]) * 1000
    for minute in range(500):
        # An entry's ID is the server's time, so the test writes past entries with explicit IDs.
        until = now - (500 - minute) * 60_000
        fields = ("instance", "web-1", "until", until, "seconds", "60", "rows", "[]")
        store.execute("XADD", store.keys.history(FLEET), f"{until}-0", *fields)
    history.append(store, FLEET, Interval("", "web-1", now, 60.0, rows), 100 * 60.0)
    kept = entries(store)
    assert kept[-1].rows[0].lag == 1
    assert 100 <= len(kept) < 250  # the server removes only whole nodes of a hundred entries
    assert len(entries(store, since=now - 10 * 60_000 - 1)) == 11


def test_history_is_read_in_pages_and_after_an_id(store: Store) -> None:
    count = history.ENTRIES_AT_ONCE * 2 + 1
    for number in range(count):
        history.append(store, FLEET, Interval("", "web-1", number, 60.0), 86_400)
    found = entries(store)
    assert [each.until_unix_ms for each in found] == list(range(count))
    later = list(history.read(store, FLEET, 0, after=found[-3].id))
    assert [each.id for each in later] == [each.id for each in found[-2:]]


def test_history_keeps_the_busiest_rows(store: Store) -> None:
    rows = [HistoryRow(f"topic-{number}", "g", lag=number) for number in range(1, 1_200)]
    history.append(store, FLEET, Interval("", "web-1", 1, 60.0, rows), 86_400)
    [entry] = entries(store)
    assert len(entry.rows) == history.ROWS_MAX
    assert min(row.lag for row in entry.rows) == 200


@pytest.mark.parametrize(
    "changed",
    [
        {"instance": "a b"},
        {"until": "-1"},
        {"seconds": "nan"},
        {"rows": "{}"},
        {"rows": "[" * 100_000},
        {"rows": '[["orders","billing",1]]'},
        {"rows": '[["orders","billing",1,1,1,1,1,1,1,1.5]]'},
        {"rows": '[["orders","billing",1,1,1,1,1,1,1,true]]'},
        {"rows": '[["orders","<b>",1,1,1,1,1,1,1,1]]'},
        {"rows": '[["orders","billing",1,1,1,1,1,1,1,1,64,1]]'},
        {"rows": '[["orders","billing",1,1,1,1,1,1,1,1,3]]'},
        {"rows": b"\xff"},
        {"measured": '[["orders","billing"]]'},
        {"measured": '[["orders","billing",-1]]'},
        {"measured": '[["orders","<b>",1]]'},
        {"measured": '{"orders":1}'},
        {"delays": "{}"},
        {"delays": '[["orders","billing"]]'},
        {"delays": '[["orders","billing",1]]'},
        {"delays": '[["orders","<b>",[[0,1,1]]]]'},
        {"delays": '[["orders","billing",[[]]]]'},
        {"delays": '[["orders","billing",[[0,1]]]]'},
        {"delays": '[["orders","billing",[[0,64,1]]]]'},
        {"delays": '[["orders","billing",[[0,1,-1]]]]'},
        {"delays": json.dumps([["orders", "billing", [[0]] * 1_001]])},
        {"units": "{}"},
        {"units": "[[1]]"},
        {"units": '[["orders","billing","h",[[0,1]]]]'},
        {"units": '[["orders","billing","h",[[-1,1,1,1,1,1,1,1,1]]]]'},
        {"units": '[["orders","billing",1,[[0,1,1,1,1,1,1,1,1]]]]'},
        {"units": '[["orders","b@x","h",[[0,1,1,1,1,1,1,1,1]]]]'},
        {"units": r'[["orders","billing","\ud800",[[0,1,1,1,1,1,1,1,1]]]]'},
        {"units": json.dumps([["orders", "billing", "h", [[0] * 9] * 1_001]])},
    ],
)
def test_history_names_an_unreadable_entry(store: Store, changed: dict[str, str | bytes]) -> None:
    good = Interval("", "web-1", 1, 60.0, [HistoryRow("orders", "billing", lag=1)])
    history.append(store, FLEET, good, 86_400)
    fields = {"instance": "web-1", "until": "1", "seconds": "60", "rows": "[]"} | changed
    flat = [each for pair in fields.items() for each in pair]
    store.execute("XADD", store.keys.history(FLEET), "*", *flat)
    history.append(store, FLEET, good, 86_400)
    first, bad, last = entries(store)
    assert bad.bad is not None
    assert next(iter(changed)) in str(bad.bad)
    assert not bad.rows
    assert first.rows == last.rows == good.rows
