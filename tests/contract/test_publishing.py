"""message_append, message_publish: nothing -> ready; message_schedule: nothing -> delayed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from streamqd.errors import ContractError, RedisResponseError
from streamqd.store import publishing, topics
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract.harness import Harness, Stream

FIELDS = [b"payload", b"\x00\xff\r\n", b"key", b"k"]
BODY = {"payload": b"\x00\xff\r\n", "key": b"k"}


def publish(harness: Harness, dedup_id: str = "order-1", max_backlog: int | None = None) -> Call:
    return publishing.publish(harness.keys, "access", 0, FIELDS, dedup_id, 60.0, max_backlog)


def fill(harness: Harness, count: int) -> None:
    for number in range(count):
        harness.add(f"{number + 1}-0")


def schedule(harness: Harness, send_id: str = "send-1", dedup_id: str = "") -> Call:
    return publishing.schedule(harness.keys, "access", 0, 30.0, send_id, FIELDS, dedup_id, 60.0)


def test_publish_writes_and_stores_the_dedup_id(harness: Harness) -> None:
    entry_id = harness.expect("message_publish", "OK", publish(harness))[0][0]
    dedup = harness.keys.dedup("access", 0, "order-1")
    assert harness.state() == {"stream": Stream({entry_id.decode(): BODY}, {}), dedup: entry_id}
    assert 59_000 < harness.do("PTTL", dedup) <= 60_000


def test_publish_writes_a_dedup_id_once(harness: Harness) -> None:
    entry_id = harness.expect("message_publish", "OK", publish(harness))[0][0]
    assert harness.expect("message_publish", "DUPLICATE", publish(harness)) == [entry_id]
    harness.expect("message_publish", "OK", publish(harness, "order-2"))


def test_publish_forgets_a_dedup_id_after_its_window(harness: Harness) -> None:
    harness.expect("message_publish", "OK", publish(harness))
    harness.do("DEL", harness.keys.dedup("access", 0, "order-1"))
    harness.expect("message_publish", "OK", publish(harness))
    assert len(harness.state()["stream"].entries) == 2


def test_publish_refuses_above_max_backlog(harness: Harness) -> None:
    harness.groups()
    fill(harness, 10)
    assert harness.expect("message_publish", "FULL", publish(harness, max_backlog=10)) == [10]
    harness.expect("message_publish", "OK", publish(harness, max_backlog=11))
    harness.expect("message_publish", "DUPLICATE", publish(harness, max_backlog=10))


def test_publish_counts_pending_but_not_retained_messages(harness: Harness) -> None:
    harness.groups()
    fill(harness, 10)
    read = harness.fetch(10)
    assert harness.expect("message_publish", "FULL", publish(harness, "", 5)) == [10]
    harness.do("XACK", harness.stream, harness.assignment.group, *read[:6])
    assert harness.expect("message_publish", "FULL", publish(harness, "", 4)) == [4]
    harness.expect("message_publish", "OK", publish(harness, "", 5))


@pytest.mark.parametrize("slow", ["a", "z"])
def test_publish_counts_the_backlog_of_the_slowest_group(harness: Harness, slow: str) -> None:
    harness.groups()
    harness.do("XGROUP", "CREATE", harness.stream, slow, 0)
    fill(harness, 4)
    harness.do("XACK", harness.stream, harness.assignment.group, *harness.fetch(4))
    assert harness.expect("message_publish", "FULL", publish(harness, "", 4)) == [4]
    harness.do("XGROUP", "DESTROY", harness.stream, slow)
    harness.expect("message_publish", "OK", publish(harness, "", 4))


def test_publish_without_a_group_counts_all_entries(harness: Harness) -> None:
    harness.expect("message_publish", "OK", publish(harness, "", max_backlog=1))
    assert harness.expect("message_publish", "FULL", publish(harness, "", max_backlog=1)) == [1]


def test_publish_ignores_a_wrong_entries_read_counter(harness: Harness) -> None:
    fill(harness, 10)
    harness.do("XGROUP", "CREATE", harness.stream, "hits", "10-0")
    with contextlib.suppress(RedisResponseError):  # Redis 6.2 does not have this figure
        harness.do("XGROUP", "SETID", harness.stream, "hits", "10-0", "ENTRIESREAD", 3)
    harness.expect("message_publish", "OK", publish(harness, "", 5))


def test_publish_estimates_an_unknown_lag(harness: Harness) -> None:
    """If a group starts in the middle of a stream, no server version knows its lag."""
    fill(harness, 100)
    harness.do("XGROUP", "CREATE", harness.stream, "hits", "75-0")
    [waiting] = harness.expect("message_publish", "FULL", publish(harness, "", 20))
    assert 25 <= waiting <= 27
    harness.expect("message_publish", "OK", publish(harness, "", 30))
    # Once a group has read everything, its lag is known again.
    harness.do("XACK", harness.stream, "hits", *harness.fetch(1000))
    harness.expect("message_publish", "OK", publish(harness, "", 1))


@pytest.mark.parametrize("read", ["0-0", "99-0", "100-0"])
def test_publish_counts_unread_entries_of_equal_time(harness: Harness, read: str) -> None:
    harness.add("100-0")
    harness.add("100-1")
    harness.do("XGROUP", "CREATE", harness.stream, "hits", read)
    assert harness.expect("message_publish", "FULL", publish(harness, "", 1))[0] in (1, 2)


def test_publish_without_a_dedup_id_writes_each_message(harness: Harness) -> None:
    for _ in range(2):
        harness.expect("message_publish", "OK", publish(harness, ""))
    state = harness.state()
    assert list(state) == ["stream"]
    assert list(state["stream"].entries.values()) == [BODY, BODY]


def test_publish_names_only_the_keys_it_needs(harness: Harness) -> None:
    assert publish(harness, "").argv[:3] == (harness.stream,) * 3
    dedup = harness.keys.dedup("access", 0, "order-1")
    assert publish(harness).argv[:3] == (harness.stream, harness.stream, dedup)
    assert publish(harness, "", 5).argv[:3] == (harness.stream,) * 3


# --- sends that were routed for an earlier partition count ----------------------------------------

NEVER = "18446744073709551615"


def append(harness: Harness, *messages: bytes | list[bytes], partitions: int = 2) -> Call:
    alone = all(isinstance(each, bytes) for each in messages)
    meta = harness.keys.meta("access")
    call = publishing.append(harness.keys, "access", 0, partitions, meta, alone=alone)
    fields = [each if isinstance(each, list) else [b"payload", each] for each in messages]
    return call._replace(
        argv=(*call.argv, *(messages if alone else publishing.flatten_messages(fields)))
    )


def register(harness: Harness, count: object = 2) -> None:
    harness.do("HSET", harness.keys.meta("access"), "partitionCount", count)


def stream_entries(harness: Harness) -> list[dict[str, bytes]]:
    state = harness.state()
    return list(state["stream"].entries.values()) if "stream" in state else []


def test_append_writes_payloads_in_order(harness: Harness) -> None:
    register(harness)
    ids = harness.expect("message_append", "OK", append(harness, b"a", b"", b"\r\n"))
    assert [each.decode() for each in ids] == list(harness.state()["stream"].entries)
    assert [each["payload"] for each in stream_entries(harness)] == [b"a", b"", b"\r\n"]


def test_append_writes_messages_of_any_width_in_order(harness: Harness) -> None:
    register(harness)
    harness.expect("message_append", "OK", append(harness, b"a", FIELDS, b"3"))
    assert stream_entries(harness) == [{"payload": b"a"}, BODY, {"payload": b"3"}]


def test_append_of_more_values_than_lua_unpacks_writes_all(harness: Harness) -> None:
    register(harness)
    ids = harness.expect("message_append", "OK", append(harness, *[FIELDS] * 4000))
    assert len(ids) == harness.do("XLEN", harness.stream) == 4000


@pytest.mark.parametrize(("present", "said"), [(4, b"4"), (1, b"1"), ("x", b"x"), (None, b"")])
def test_append_refuses_a_changed_partition_count(
    harness: Harness, present: object, said: bytes
) -> None:
    """The script compares the partition count itself, so that a send needs no WATCH."""
    if present is not None:
        register(harness, present)
    routed: Any = {"partitions": 2, "meta": harness.keys.meta("access")}
    place = (harness.keys, "access", 0)

    assert harness.expect("message_append", "MOVED", append(harness, b"a")) == [said]
    call = publishing.publish(*place, FIELDS, "order-1", 60.0, 5, **routed)
    assert harness.expect("message_publish", "MOVED", call) == [said]
    call = publishing.schedule(*place, 1.0, "send-1", FIELDS, **routed)
    assert harness.expect("message_schedule", "MOVED", call) == [said]


def test_append_refuses_a_retired_topic(harness: Harness) -> None:
    register(harness)
    harness.link.run(topics.retire_call(harness.keys, "access"))
    assert harness.expect("message_append", "MOVED", append(harness, b"a")) == [b""]


def test_append_skips_the_count_check_on_a_cluster(harness: Harness) -> None:
    call = publishing.append(harness.keys, "access", 0, 2, None, alone=True)
    harness.expect("message_append", "OK", call._replace(argv=(*call.argv, b"a")))
    assert [each["payload"] for each in stream_entries(harness)] == [b"a"]


def test_append_to_a_full_stream_returns_the_written_ids(harness: Harness) -> None:
    register(harness)
    harness.add(f"{NEVER}-{int(NEVER) - 1}")
    [ids] = harness.expect("message_append", "OK", append(harness, b"a", b"b", b"c"))
    assert [type(each) for each in ids] == [bytes, RedisResponseError]
    assert [each["payload"] for each in stream_entries(harness)][1:] == [b"a"]


def test_append_writes_the_messages_that_fit(harness: Harness) -> None:
    fill(harness, 3)
    messages = [[b"payload", b"%d" % number] for number in range(4)]
    call = publishing.append(harness.keys, "access", 0, 0, None, max_backlog=5, alone=False)
    call = call._replace(argv=(*call.argv, *publishing.flatten_messages(messages)))
    ids, backlog = harness.expect("message_publish", "OK", call)
    assert (len(ids), backlog) == (2, 3)
    assert [each["payload"] for each in stream_entries(harness)][3:] == [b"0", b"1"]
    assert harness.expect("message_publish", "FULL", call) == [5]


# --- delayed --------------------------------------------------------------------------------------


def test_schedule_writes_a_delayed_send(harness: Harness) -> None:
    with harness.instant() as now:
        due = int(harness.expect("message_schedule", "OK", schedule(harness))[0])
    assert now + 30_000 == due
    state = harness.state()
    assert now == state["delayed_send_items"]["send-1"].pop("sentAt")
    named = BODY | {"sendId": b"send-1"}
    assert state == {"delayed_sends": {"send-1": due}, "delayed_send_items": {"send-1": named}}


@pytest.mark.parametrize("at_unix_ms", [0, 1_000, 4_000_000_000_123])
def test_schedule_accepts_an_instant(harness: Harness, at_unix_ms: int) -> None:
    call = publishing.schedule(
        harness.keys, "access", 0, None, "send-1", FIELDS, at_unix_ms=at_unix_ms
    )
    assert harness.expect("message_schedule", "OK", call) == [b"%d" % at_unix_ms]
    assert harness.state()["delayed_sends"] == {"send-1": at_unix_ms}


def test_schedule_repeated_schedules_once(harness: Harness) -> None:
    due = harness.expect("message_schedule", "OK", schedule(harness))
    before = harness.dump()
    assert harness.expect("message_schedule", "OK", schedule(harness)) == due
    assert harness.dump() == before


def test_schedule_without_a_dedup_id_stores_each_message(harness: Harness) -> None:
    for send_id in ("send-1", "send-2"):
        harness.expect("message_schedule", "OK", schedule(harness, send_id))
    state = harness.state()
    assert sorted(state) == ["delayed_send_items", "delayed_sends"]
    assert (
        sorted(state["delayed_sends"])
        == sorted(state["delayed_send_items"])
        == ["send-1", "send-2"]
    )


def test_schedule_writes_a_dedup_id_once(harness: Harness) -> None:
    due = harness.expect("message_schedule", "OK", schedule(harness, "send-1", "order-1"))
    dedup = harness.keys.dedup("access", 0, "order-1")
    assert harness.state()[dedup] == b"send-1"
    assert 59_000 < harness.do("PTTL", dedup) <= 60_000
    assert harness.expect(
        "message_schedule", "DUPLICATE", schedule(harness, "send-2", "order-1")
    ) == [b"send-1"]
    # If the same send is repeated, it gets its due time, not DUPLICATE.
    assert harness.expect("message_schedule", "OK", schedule(harness, "send-1", "order-1")) == due


def test_dedup_id_is_shared_by_publish_and_schedule(harness: Harness) -> None:
    entry_id = harness.expect("message_publish", "OK", publish(harness))[0][0]
    assert harness.expect("message_schedule", "DUPLICATE", schedule(harness, "s", "order-1")) == [
        entry_id
    ]


def test_publishing_rejects_invalid_calls() -> None:
    keys = Keys()
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, [b"payload"])
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, [])
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, FIELDS, "order-1", 0.0)
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, FIELDS, max_backlog=0)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, 1.0, "", FIELDS)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, -1.0, "send-1", FIELDS)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, 1.0, "send-1", FIELDS, at_unix_ms=1)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, None, "send-1", FIELDS)
