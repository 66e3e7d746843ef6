"""Operator commands work on a real server whose data was written by the daemon's scripts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest

from streamqd import config
from streamqd.admin import as_json, dead_letters, fleet, partitions, pending, permissions, tail
from streamqd.admin import topics as admin_topics
from streamqd.admin.messages import MessageFilter
from streamqd.admin.published import Fleet
from streamqd.errors import RedisResponseError, RequestRefusedError, TopicNotFoundError
from streamqd.model import Assignment, Lease
from streamqd.store import items, leases, members, messages, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support.commands import HarnessAt
from tests.support.servers import Server


def write_dead_letter(harness: Harness, entry_id: str, **context: str) -> str:
    """Dead-letter a message. Return the name of its dead letter."""
    harness.groups()
    if not harness.do("EXISTS", harness.lease):
        harness.own("t1")
    harness.add(entry_id, "payload", f"body of {entry_id}", "key", "k1")
    harness.fetch()
    fields = {
        b"originalId": entry_id.encode(),
        b"originalTopic": harness.assignment.topic.encode(),
        b"originalPartition": b"%d" % harness.assignment.partition,
        b"timestamp": entry_id.split("-")[0].encode(),
        b"group": harness.assignment.group.encode(),
        b"instance": b"west-1",
        b"attempts": b"5",
        b"crashes": b"0",
        b"retryCount": b"4",
        b"crashCount": b"0",
        b"reason": b"attempts",
        b"errorClass": b"ValueError",
        b"errorMessage": b"no \x1b[31mcolour",
        b"traceback": b"Traceback:\n  somewhere",
        **{name.encode(): value.encode() for name, value in context.items()},
    }
    call = messages.dead(harness.keys, harness.leased("t1"), [(f"m:{entry_id}".encode(), fields)])
    [letter] = messages.SettledReply.parse(harness.link.run(call)).dead_letters
    assert letter
    return f"{harness.assignment.partition}:{letter.decode()}"


# --- topics ---------------------------------------------------------------------------------------


def test_topic_create_repeated_reports_the_existing_topic(store: Store) -> None:
    made = admin_topics.create(store, "orders", config.Topic(partitions=2))
    again = admin_topics.create(store, "orders", config.Topic(partitions=2))

    assert made == admin_topics.Created("orders", 2, created=True)
    assert again == admin_topics.Created("orders", 2, created=False)
    with pytest.raises(RequestRefusedError, match="already exists, with 2 partitions"):
        admin_topics.create(store, "orders", config.Topic(partitions=3))
    assert topics.partition_count(store, "orders") == 2


@pytest.mark.parametrize("name", ["", "a b", "a{b", "x" * 65])
def test_topic_create_refuses_an_invalid_name(store: Store, name: str) -> None:
    with pytest.raises(RequestRefusedError, match="A-Z"):
        admin_topics.create(store, name, config.Topic())

    assert topics.names(store) == []


def test_missing_topic_suggests_a_similar_name(store: Store, harness_at: HarnessAt) -> None:
    with pytest.raises(TopicNotFoundError, match="did you mean access"):
        admin_topics.partition_count(store, "acces")
    with pytest.raises(TopicNotFoundError, match="topic list"):
        admin_topics.partition_count(store, "zzz")


def test_topics_are_listed_and_described(store: Store, keys: Keys, harness_at: HarnessAt) -> None:
    for group in ("hits", "agents"):
        harness_at(0, group).groups()
    harness_at(1).add("5-0")
    harness_at(1).add("6-0")
    harness_at(1).do("ZADD", keys.delayed_sends("access", 1), 1, "send")
    letter = write_dead_letter(harness_at(2), "7-0")

    [row] = admin_topics.list_topics(store)
    detail = admin_topics.describe(store, "access")

    assert row.topic == "access"
    assert (row.partitions, row.messages, row.delayed_sends, row.dead_letters) == (3, 3, 1, 1)
    assert row.groups == ["agents", "hits"]
    assert row.created_unix_ms == detail.created_unix_ms is not None
    assert [each.messages for each in detail.partitions] == [0, 2, 1]
    assert detail.partitions[1].first_id == "5-0"
    assert detail.partitions[1].last_id == "6-0"
    assert [each.dead_letters for each in detail.partitions] == [0, 0, 1]
    assert letter.startswith("2:")


# --- partitions -----------------------------------------------------------------------------------


def test_partitions_show_owner_lag_and_pending(store: Store, harness_at: HarnessAt) -> None:
    for number in range(3):
        harness_at(number).groups()
    epoch = harness_at(0).own("t1", owner="west-1")
    harness_at(1).own("t2", owner="east-1")
    harness_at(1).do("DEL", harness_at(1).lease)  # as if the owner had not renewed its lease
    for number in (1, 2, 3):
        harness_at(0).add(f"{number}000-0")
    harness_at(0).fetch(1)
    harness_at(0).do("ZADD", harness_at(0).delayed, 1, "m:1-0")

    seen = partitions.view(store)

    first, second, third = seen.assignments
    assert (first.lease, first.owner, first.epoch) == ("owned", "west-1", epoch)
    assert first.since_unix_ms == epoch
    assert (first.lag, first.pending, first.waiting_retries) == (2, 1, 1)
    assert first.oldest_unix_ms == 1000
    assert (second.lease, second.owner) == ("expired", "east-1")
    assert (third.lease, third.owner, third.epoch) == ("free", "", 0)
    assert (third.lag, third.oldest_unix_ms) == (0, None)
    assert seen.idle_topics == []


def test_partitions_can_be_filtered_by_topic_and_group(store: Store, harness_at: HarnessAt) -> None:
    topics.create(store, "other", config.Topic())
    for group in ("hits", "agents"):
        harness_at(0, group).groups()

    assert len(partitions.view(store).assignments) == 6
    assert partitions.view(store).idle_topics == ["other"]
    assert {u.group for u in partitions.view(store, "access", "agents").assignments} == {"agents"}
    with pytest.raises(TopicNotFoundError):
        partitions.view(store, "nope")


def test_unknown_lag_is_counted_despite_the_byte_bound(store: Store, harness_at: HarnessAt) -> None:
    harness_at(0).groups()
    for number in range(1, 41):
        size = items.BYTES_MAX if number < 4 else 40_000
        harness_at(0).add(f"{number}-0", "payload", "x" * size)
        harness_at(0).add(f"{number}-0", "payload", "x" * size, stream=harness_at(0).retry)
    hide_lag(harness_at(0), harness_at(0).stream)
    hide_lag(harness_at(0), harness_at(0).retry)

    [row] = partitions.view(store, "access", "hits", 0).assignments

    assert row.lag == 37 + 37


@pytest.mark.parametrize(("count", "lag"), [(1_000, 1_000), (1_001, None)])
def test_unknown_lag_is_counted_exactly_or_omitted(
    link: Connection, store: Store, harness_at: HarnessAt, count: int, lag: int | None
) -> None:
    harness_at(0).groups()
    link.pipeline(
        [("XADD", harness_at(0).stream, f"{n + 1}-0", "payload", "x") for n in range(count + 3)]
    )
    hide_lag(harness_at(0), harness_at(0).stream)

    [row] = partitions.view(store, "access", "hits", 0).assignments

    assert row.lag == lag


def hide_lag(harness: Harness, stream: str) -> None:
    """Move a group to the second entry, so that the server cannot compute its lag."""
    harness.do("XGROUP", "SETID", stream, "hits", "2-0")
    harness.do("XDEL", stream, "3-0")  # a gap that no client should cause
    [flat] = harness.do("XINFO", "GROUPS", stream)
    assert dict(zip(flat[::2], flat[1::2], strict=True)).get(b"lag") is None


# --- pending --------------------------------------------------------------------------------------


def read_pending_pages(link: Connection, keys: Keys, order: str, limit: int) -> list[str]:
    """Return every place in the pages once.

    An idle time is the difference of two clocks, which tick between two requests. If the rows are
    sorted by it, the last row of a page may therefore appear again as the first row of the next
    page.
    """
    places: list[str] = []
    cursor = ""
    while True:
        listed = pending.messages(Store(link, keys), "access", "hits", order)
        page = listed.page(limit=limit, cursor=cursor)
        found = [f"{row.partition}/{row.place}" for row in page.rows]
        repeats = order == "idle" and places[-1:] == found[:1]
        places += found[1:] if repeats else found
        cursor = page.cursor
        if not cursor:
            return places


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pending_pages_merge_partitions_by_id(
    link: Connection, keys: Keys, harness_at: HarnessAt, limit: int
) -> None:
    harness_at(0).pending("1-0", "4-0", "4-1")
    harness_at(1).pending("2-0", "4-0")
    harness_at(2).pending("3-0")
    harness_at(2).pending_retry("1-0", "9-0")

    assert read_pending_pages(link, keys, "id", limit) == [
        *("0/m:1-0", "2/r:1-0", "1/m:2-0", "2/m:3-0"),
        *("0/m:4-0", "1/m:4-0", "0/m:4-1", "2/r:9-0"),
    ]


def test_pending_is_sorted_by_deliveries_or_idle_time(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    harness_at(0).pending("1-0", "2-0")
    harness_at(1).pending("3-0")
    claims = (
        ("1-0", harness_at(0), 5_000, 2),
        ("2-0", harness_at(0), 90_000, 9),
        ("3-0", harness_at(1), 30_000, 4),
    )
    for entry_id, harness, idle, count in claims:
        harness.do(
            *("XCLAIM", harness.stream, "hits", "other", 0, entry_id),
            *("IDLE", idle, "RETRYCOUNT", count, "JUSTID"),
        )
    harness_at(0).do("HSET", harness_at(0).attempts, "m:2-0:c", 2)

    for limit in (1, 2, 10):
        assert read_pending_pages(link, keys, "deliveries", limit) == [
            "0/m:2-0",
            "1/m:3-0",
            "0/m:1-0",
        ]
        assert read_pending_pages(link, keys, "idle", limit) == ["0/m:2-0", "1/m:3-0", "0/m:1-0"]
    [worst] = pending.messages(store, "access", "hits", "idle").page(limit=1).rows
    assert worst.idle_ms >= 90_000
    assert (worst.deliveries, worst.crashes, worst.consumer) == (9, 2, "other")
    assert pending.messages(store, "access", "hits").page(limit=1).total == 3


def test_pending_lists_many_entries_completely(
    link: Connection, keys: Keys, harness_at: HarnessAt, monkeypatch
) -> None:
    monkeypatch.setattr(pending, "PAGE", 7)
    ids = [f"{number}-0" for number in range(1, 51)]
    harness_at(0).pending(*ids)
    for number, entry_id in enumerate(ids):
        idle = 1000 * (len(ids) - number)
        harness_at(0).do(
            "XCLAIM", harness_at(0).stream, "hits", "w", 0, entry_id, "IDLE", idle, "JUSTID"
        )

    for order in ("id", "idle"):
        assert read_pending_pages(link, keys, order, 9) == [f"0/m:{each}" for each in ids]


def test_bounded_pending_sort_reports_that_it_is_incomplete(
    store: Store, harness_at: HarnessAt, monkeypatch
) -> None:
    harness_at(0).pending(*[f"{number}-0" for number in range(1, 31)])
    monkeypatch.setattr(pending, "PAGE", 5)
    monkeypatch.setattr(pending, "SCAN_MAX", 10)

    seen = pending.messages(store, "access", "hits", "idle").page(limit=100)

    assert not seen.complete
    assert (len(seen.rows), seen.total) == (10, 30)
    assert pending.messages(store, "access", "hits", "id").page(limit=100).complete


def test_pending_refuses_an_unknown_group_or_cursor(store: Store, harness_at: HarnessAt) -> None:
    harness_at(0).groups()
    with pytest.raises(RequestRefusedError, match="no group other"):
        pending.messages(store, "access", "other").page()
    with pytest.raises(RequestRefusedError, match="not a cursor"):
        pending.messages(store, "access", "hits").page(cursor="1:2")


# --- dead letters ---------------------------------------------------------------------------------


def test_dead_letters_are_listed_newest_first(store: Store, harness_at: HarnessAt) -> None:
    names = [write_dead_letter(harness_at(number % 3), f"{number + 1}-0") for number in range(7)]

    whole = dead_letters.messages(store, "access").page()
    pages: list[str] = []
    cursor = ""
    while True:
        page = dead_letters.messages(store, "access").page(limit=2, cursor=cursor)
        pages += [row.id for row in page.rows]
        cursor = page.cursor
        if not cursor:
            break

    assert [row.id for row in whole.rows] == pages
    assert sorted(pages) == sorted(names)
    moments = [tuple(map(int, name.partition(":")[2].split("-"))) for name in pages]
    assert moments == sorted(moments, reverse=True)
    assert whole.total == 7


def test_dead_letters_can_be_filtered_by_group(store: Store, harness_at: HarnessAt) -> None:
    write_dead_letter(harness_at(0, "hits"), "1-0")
    mine = write_dead_letter(harness_at(1, "agents"), "1-0")

    seen = dead_letters.messages(store, "access").page(MessageFilter(group="agents"))

    assert [row.id for row in seen.rows] == [mine]
    assert dead_letters.messages(store, "access").page(MessageFilter(group="nobody")).rows == []


def test_dead_letter_shows_all_fields(store: Store, harness_at: HarnessAt) -> None:
    name = write_dead_letter(
        harness_at(1),
        "1700000000000-3",
        headers='{"traceparent":"00-1"}',
        replayCount="2",
        signal="SIGSEGV",
        rss="1048576",
        handler="weblog:count_hit",
        extra="kept",
    )

    letter = dead_letters.show(store, "access", name)

    assert letter.uid == "access/1/1700000000000-3"
    assert letter.original_unix_ms == 1700000000000
    assert (letter.group, letter.reason) == ("hits", "attempts")
    assert (letter.attempts, letter.crashes, letter.replays) == (5, 0, 2)
    assert letter.key == b"k1"
    assert letter.payload == b"body of 1700000000000-3"
    assert letter.headers == {"traceparent": "00-1"}
    assert (letter.signal, letter.rss, letter.exit_code) == ("SIGSEGV", 1048576, None)
    assert (letter.instance, letter.handler) == ("west-1", "weblog:count_hit")
    assert letter.other == {"extra": "kept"}
    assert letter.failed_unix_ms is not None
    assert as_json(letter)["key"] == "k1"


@pytest.mark.parametrize("name", ["1:9-9", "7:1-0"])
def test_missing_dead_letter_is_refused(store: Store, harness_at: HarnessAt, name: str) -> None:
    write_dead_letter(harness_at(1), "1-0")
    with pytest.raises(RequestRefusedError, match="not found"):
        dead_letters.show(store, "access", name)


@pytest.mark.parametrize("name", ["", "1", "x:1-0", "1:1", "1:a-b", "-1:1-0", f"1:{2**64}-0"])
def test_invalid_dead_letter_name_is_refused(
    store: Store, harness_at: HarnessAt, name: str
) -> None:
    with pytest.raises(RequestRefusedError, match="is not an id"):
        dead_letters.show(store, "access", name)


def test_dead_letters_are_counted_by_cause(store: Store, harness_at: HarnessAt) -> None:
    for number in range(3):
        write_dead_letter(harness_at(number), "1-0")
    last = write_dead_letter(harness_at(0, "agents"), "2-0", reason="crashes", errorClass="")

    found = dead_letters.causes(store, "access")
    [topic] = dead_letters.overview(store)

    assert [(each.count, each.group, each.reason, each.error_class) for each in found.causes] == [
        (3, "hits", "attempts", "ValueError"),
        (1, "agents", "crashes", ""),
    ]
    assert found.causes[1].example == last
    assert (found.total, found.looked_at, found.complete) == (4, 4, True)
    assert (topic.topic, topic.total) == ("access", 4)
    assert topic.oldest_unix_ms is not None
    assert topic.newest_unix_ms is not None
    assert topic.oldest_unix_ms <= topic.newest_unix_ms


def test_replay_returns_dead_letters_to_their_own_group(
    link: Connection, store: Store, harness_at: HarnessAt
) -> None:
    for number in range(3):
        write_dead_letter(harness_at(number), "1-0")
    other = write_dead_letter(harness_at(1, "agents"), "2-0")

    done = dead_letters.replay(store, "access", MessageFilter(group="hits"))

    assert (done.replayed, done.missing, done.refused, done.result) == (3, 0, {}, "done")
    for number in range(3):
        [fields] = harness_at(number).read_stream(harness_at(number).retry).entries.values()
        assert fields["payload"] == b"body of 1-0"
        assert fields["originalId"] == b"1-0"
        assert (fields["retryCount"], fields["crashCount"]) == (b"0", b"0")
        assert fields["replayCount"] == b"1"
        assert "reason" not in fields
    assert [row.id for row in dead_letters.messages(store, "access").page().rows] == [other]
    assert link.execute("XLEN", harness_at(1, "agents").retry) == 0


def test_replay_by_name_replays_one_dead_letter(store: Store, harness_at: HarnessAt) -> None:
    names = [
        write_dead_letter(harness_at(0), "1-0", replayCount="4"),
        write_dead_letter(harness_at(0), "2-0"),
    ]

    done = dead_letters.replay(store, "access", MessageFilter((names[0], names[0])), max_replays=5)

    assert done.replayed == 1
    [fields] = harness_at(0).read_stream(harness_at(0).retry).entries.values()
    assert fields["replayCount"] == b"5"
    assert [row.id for row in dead_letters.messages(store, "access").page().rows] == [names[1]]


def test_replay_with_one_wrong_name_replays_nothing(store: Store, harness_at: HarnessAt) -> None:
    name = write_dead_letter(harness_at(0), "1-0")
    before = harness_at(0).dump()

    with pytest.raises(RequestRefusedError, match="dead letter 0:9-9 not found"):
        dead_letters.replay(store, "access", MessageFilter((name, "0:9-9")))
    with pytest.raises(RequestRefusedError, match="belongs to group hits, not agents"):
        dead_letters.replay(store, "access", MessageFilter((name,), group="agents"))

    assert harness_at(0).dump() == before


def test_replay_keeps_and_reports_refused_dead_letters(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    write_dead_letter(harness_at(0), "1-0")
    write_dead_letter(harness_at(1, "old"), "1-0")
    link.execute("XGROUP", "DESTROY", harness_at(1, "old").retry, "old")
    link.execute("XADD", keys.dlq("access", 2), "*", "payload", "by hand")

    done = dead_letters.replay(store, "access", MessageFilter())

    assert done.replayed == 1
    assert done.refused == {
        "its group no longer exists": 1,
        "the dead letter has no group": 1,
    }
    assert dead_letters.total(store, "access") == 2


def test_replay_works_in_bounded_batches(
    link: Connection, store: Store, harness_at: HarnessAt
) -> None:
    harness = harness_at(0)
    harness.groups()
    for number in range(250):
        harness.add(f"{number + 1}-0", "payload", "x", "group", "hits", stream=harness.dlq)
    steps: list[int] = []

    done = dead_letters.replay(store, "access", MessageFilter(), progress=steps.append)

    assert done.replayed == 250
    assert steps == [64, 64, 64, 58]
    assert link.execute("XLEN", harness.retry) == 250


def test_purge_deletes_the_selected_dead_letters(store: Store, harness_at: HarnessAt) -> None:
    harness = harness_at(0)
    for entry_id, group in (
        *(("1000-0", "hits"), ("2000-0", "hits")),
        *(("2000-1", "agents"), ("3000-0", "hits")),
    ):
        harness.add(entry_id, "payload", "x", "group", group, stream=harness.dlq)
    harness_at(1).add("1500-0", "payload", "x", "group", "hits", stream=harness_at(1).dlq)

    assert dead_letters.count(store, "access", MessageFilter(until_unix_ms=2_000)) == 2
    assert dead_letters.purge(store, "access", MessageFilter(until_unix_ms=2_000)).purged == 2
    assert dead_letters.purge(store, "access", MessageFilter(("0:3000-0",))).purged == 1
    assert dead_letters.purge(store, "access", MessageFilter(group="agents")).purged == 1
    assert [row.id for row in dead_letters.messages(store, "access").page().rows] == ["0:2000-0"]
    assert dead_letters.purge(store, "access", MessageFilter()).purged == 1
    assert dead_letters.overview(store) == []


# --- tail -----------------------------------------------------------------------------------------


def test_tail_shows_the_last_messages_in_order(store: Store, harness_at: HarnessAt) -> None:
    for number in range(1, 31):
        harness_at(number % 3).add(f"{number}-0", "payload", f"{number}", "key", "k")

    seen = tail.Tail(store, "access").last(10)

    assert [each.payload for each in seen] == [b"%d" % n for n in range(21, 31)]
    assert seen[-1].key == b"k"
    assert tail.Tail(store, "access").last(0) == []
    one = tail.Tail(store, "access", 1).last(2)
    assert [(each.partition, each.id) for each in one] == [(1, "25-0"), (1, "28-0")]


def test_tail_follow_misses_nothing_between_two_reads(store: Store, harness_at: HarnessAt) -> None:
    harness_at(0).add("1-0")
    watched = tail.Tail(store, "access")
    harness_at(0).add("2-0")
    harness_at(1).add("3-0")
    coming = watched.follow()

    assert [each.id for each in next(coming)] == ["2-0", "3-0"]
    harness_at(2).add("4-0")
    harness_at(0).add("5-0")
    assert [each.id for each in next(coming)] == ["4-0", "5-0"]


def test_tail_follow_does_not_repeat_messages(store: Store, harness_at: HarnessAt) -> None:
    watched = tail.Tail(store, "access")
    harness_at(0).add("1-0")
    shown = watched.last(5)
    harness_at(0).add("2-0")

    assert [each.id for each in shown] == ["1-0"]
    assert [each.id for each in next(watched.follow())] == ["2-0"]


def test_tail_refuses_a_missing_partition(store: Store, harness_at: HarnessAt) -> None:
    with pytest.raises(RequestRefusedError, match="partition 3 of topic access not found"):
        tail.Tail(store, "access", 3)


# --- the fleet ------------------------------------------------------------------------------------


def heartbeat(link: Connection, keys: Keys, instance: str, **info: object) -> None:
    told = {"host": "h1", "pid": 42, "started": time.time(), **info}
    link.run(members.heartbeat(keys, "default", instance, "n1", told, 15.0))


def count_calls(link: Connection, command: str) -> int:
    """Return how often the server has run a command so far."""
    found = re.search(
        f"cmdstat_{command}:calls=([0-9]+)", str(link.execute("INFO", "commandstats"))
    )
    return int(found[1]) if found else 0


def test_status_of_an_empty_fleet_is_empty(store: Store) -> None:
    seen = fleet.status(Fleet(store, "default", 15))

    assert seen.instances == []
    assert seen.assignments == []
    assert seen.problems == ["no instance of the fleet default is live, so no message is handled"]


def test_status_summarizes_the_fleet(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    for number in range(3):
        harness_at(number).groups()
    harness_at(0).own("t1", owner="west-1")
    harness_at(1).own("t2", owner="west-1")
    heartbeat(link, keys, "west-1", version="1.2", weight=2, offers=[["access", "hits"]])
    heartbeat(link, keys, "east-1")
    link.execute("ZADD", keys.members("default"), 1000, "east-1")
    assignments = [
        {"topic": "access", "partition": 0, "group": "hits", "owned": True, "state": "ready"},
        {"topic": "access", "partition": 1, "group": "hits", "owned": True, "state": "broken"},
    ]
    assignments[0] |= {"in_flight": 7, "longest_run_seconds": 1.5, "rates": {"acked": 12.5}}
    summary = {
        "instance": "west-1",
        "state": "working",
        "redis_up": True,
        "assignments": assignments,
    }
    link.execute("SET", keys.instance("default", "west-1"), json.dumps(summary))
    # The last report of a silent instance is outdated, so its assignments are not shown.
    stale = {"instance": "east-1", "state": "working", "assignments": assignments}
    link.execute("SET", keys.instance("default", "east-1"), json.dumps(stale))
    write_dead_letter(harness_at(2), "1-0")
    link.run(leases.release(keys, Lease(harness_at(2).assignment, "t1")))

    seen = fleet.status(Fleet(store, "default", 15))

    by_name = {each.instance: each for each in seen.instances}
    west = by_name["west-1"]
    assert (west.state, west.host, west.pid, west.version) == ("working", "h1", 42, "1.2")
    assert (west.owned, west.rate, west.weight) == (2, 12.5, 2)
    assert as_json(seen)["instances"][1]["offers"] == ["access/hits"]
    assert (by_name["east-1"].state, by_name["east-1"].owned) == ("silent", 0)
    first, second, third = seen.assignments
    assert (first.worker, first.in_flight, first.acked) == ("ready", 7, 12.5)
    assert first.longest_run_seconds == 1.5
    assert (second.worker, third.worker, third.state) == ("broken", "", "free")
    assert seen.dead_letters == {"access": 1}
    problems = "\n".join(seen.problems)
    for sentence in (
        "instance east-1 has been silent",
        "the worker of access/1/hits crashes in a loop on west-1",
        "no instance owns access/2/hits",
        "access has a dead letter",
    ):
        assert sentence in problems
    assert len(seen.problems) == 4


def test_status_groups_one_problem_of_many_partitions(
    link: Connection, store: Store, keys: Keys
) -> None:
    topics.create(store, "wide", config.Topic(partitions=40))
    for number in range(40):
        Harness(link, keys, Assignment("wide", number, "hits")).groups()
    heartbeat(link, keys, "west-1")
    before = count_calls(link, "zrange")

    problems = fleet.status(Fleet(store, "default", 15)).problems

    assert problems == [
        (
            "no instance owns wide/0/hits: none of 1 live instance has a consumer of wide/hits; the"
            " same in partitions 1-39"
        )
    ]
    # The members are read once. All other commands measure each assignment and each partition's
    # delayed sends.
    assert count_calls(link, "zrange") - before == 40 + 40 + 1


def test_status_reports_the_doctors_instance_problems(
    link: Connection, store: Store, keys: Keys
) -> None:
    """`status` reports the doctor's problems of instances, because both run the same checks.

    It does not count a note as a problem.
    """
    heartbeat(link, keys, "quiet", started=1.0)
    heartbeat(link, keys, "cut-off", capacity=3, capacity_problem="no files left", started=1.0)
    heartbeat(link, keys, "asleep", started=1.0)
    heartbeat(link, keys, "going", started=1.0)
    for name, state, up in (
        ("cut-off", "limited", False),
        ("asleep", "paused", True),
        ("going", "drained", True),
    ):
        summary = {"state": state, "redis_up": up, "at_unix_ms": round(time.time() * 1000)}
        link.execute("SET", keys.instance("default", name), json.dumps(summary))

    assert sorted(fleet.status(Fleet(store, "default", 15)).problems) == [
        (
            "cut-off can run no more than 3 partitions: the operating system refuses another"
            " process (no files left)"
        ),
        "instance asleep is paused",
        (
            "quiet sends heartbeats, but its housekeeper has not reported recently, so retries"
            " wait and nothing is trimmed"
        ),
        "the housekeeper of cut-off cannot reach Redis, so retries wait and nothing is trimmed",
    ]


@pytest.mark.parametrize(
    "raw", ["not json", "[]", '{"assignments": 7, "state": null}', '{"assignments": [3]}']
)
def test_status_accepts_a_summary_of_another_version(
    link: Connection, store: Store, keys: Keys, raw: str
) -> None:
    heartbeat(link, keys, "west-1")
    link.execute("SET", keys.instance("default", "west-1"), raw)

    assert [each.instance for each in fleet.status(Fleet(store, "default", 15)).instances] == [
        "west-1"
    ]


# --- reading commands write nothing ---------------------------------------------------------------


def test_admin_views_write_nothing(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    name = write_dead_letter(harness_at(0), "1-0")
    harness_at(1).pending("2-0")
    harness_at(2).own("t3")
    heartbeat(link, keys, "west-1")
    before = harness_at(0).dump()

    admin_topics.list_topics(store)
    admin_topics.describe(store, "access")
    partitions.view(store)
    for order in pending.ORDERS:
        pending.messages(store, "access", "hits", order).page()
    dead_letters.overview(store)
    dead_letters.messages(store, "access").page()
    dead_letters.show(store, "access", name)
    dead_letters.causes(store, "access")
    dead_letters.count(store, "access", MessageFilter())
    dead_letters.plan(store, "access", MessageFilter(), fleet="default")
    watched = tail.Tail(store, "access")
    watched.last(5)
    fleet.status(Fleet(store, "default", 15))
    permissions.find_missing(store, "default")

    assert harness_at(0).dump() == before


# --- permissions ----------------------------------------------------------------------------------


def test_permission_check_passes_for_a_full_user(store: Store) -> None:
    assert permissions.find_missing(store, "default") == []


def test_missing_permissions_are_named(
    server: Server, link: Connection, new_link: Callable[..., Connection], keys: Keys
) -> None:
    rules = ["+@all", "-xack", "-hset", "~streaming:*", "~stream:topic:*", "&*"]
    if server.version < (6, 2):
        rules.remove("&*")
    link.execute("ACL", "SETUSER", "limited", "reset", "on", ">secret", *rules)
    other = new_link(name="test:limited")
    try:
        other.execute("AUTH", "limited", "secret")
        found = permissions.find_missing(Store(other, keys), "default")
        link.execute("ACL", "SETUSER", "limited", "resetkeys", "~streaming:*")
        without_streams = permissions.find_missing(Store(other, keys), "default")
        link.execute("ACL", "SETUSER", "limited", "-multi")
        with pytest.raises(RedisResponseError, match="NOPERM"):
            permissions.find_missing(Store(other, keys), "default")
    finally:
        link.execute("ACL", "DELUSER", "limited")

    assert {each.command for each in found} == {"XACK", "HSET"}
    assert ("HSET", keys.info("default")) in found
    assert ("XADD", keys.stream("streamqd-check", 0)) in without_streams
    assert link.execute("KEYS", "*") == []
