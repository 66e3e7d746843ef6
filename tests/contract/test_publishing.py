"""message_append, message_publish: nothing -> ready; message_schedule: nothing -> delayed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from streamqd.errors import ContractError, RedisRefused
from streamqd.store import publishing, topics
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract.desk import Desk, Stream

FIELDS = [b"payload", b"\x00\xff\r\n", b"key", b"k"]
BODY = {"payload": b"\x00\xff\r\n", "key": b"k"}


def publish(desk: Desk, dedup_id: str = "order-1", max_backlog: int | None = None) -> Call:
    return publishing.publish(desk.keys, "access", 0, [FIELDS], dedup_id, 60.0, max_backlog)


def fill(desk: Desk, count: int) -> None:
    for number in range(count):
        desk.add(f"{number + 1}-0")


def schedule(desk: Desk, send_id: str = "send-1", dedup_id: str = "") -> Call:
    return publishing.schedule(desk.keys, "access", 0, 30.0, send_id, FIELDS, dedup_id, 60.0)


def test_publish_writes_and_stores_the_dedup_id(desk: Desk) -> None:
    entry_id = desk.expect("message_publish", "OK", publish(desk))[0][0]
    dedup = desk.keys.dedup("access", 0, "order-1")
    assert desk.state() == {"stream": Stream({entry_id.decode(): BODY}, {}), dedup: entry_id}
    assert 59_000 < desk.do("PTTL", dedup) <= 60_000


def test_publish_writes_a_dedup_id_once(desk: Desk) -> None:
    entry_id = desk.expect("message_publish", "OK", publish(desk))[0][0]
    assert desk.expect("message_publish", "DUP", publish(desk)) == [entry_id]
    desk.expect("message_publish", "OK", publish(desk, "order-2"))


def test_publish_forgets_a_dedup_id_after_its_window(desk: Desk) -> None:
    desk.expect("message_publish", "OK", publish(desk))
    desk.do("DEL", desk.keys.dedup("access", 0, "order-1"))
    desk.expect("message_publish", "OK", publish(desk))
    assert len(desk.state()["stream"].entries) == 2


def test_refuses_when_too_many_wait(desk: Desk) -> None:
    desk.groups()
    fill(desk, 10)
    assert desk.expect("message_publish", "FULL", publish(desk, max_backlog=10)) == [10]
    desk.expect("message_publish", "OK", publish(desk, max_backlog=11))
    desk.expect("message_publish", "DUP", publish(desk, max_backlog=10))


def test_publish_counts_pending_but_not_retained_messages(desk: Desk) -> None:
    desk.groups()
    fill(desk, 10)
    read = desk.fetch(10)
    assert desk.expect("message_publish", "FULL", publish(desk, "", 5)) == [10]
    desk.do("XACK", desk.stream, desk.unit.group, *read[:6])
    assert desk.expect("message_publish", "FULL", publish(desk, "", 4)) == [4]
    desk.expect("message_publish", "OK", publish(desk, "", 5))


@pytest.mark.parametrize("slow", ["a", "z"])
def test_publish_counts_the_backlog_of_the_slowest_group(desk: Desk, slow: str) -> None:
    desk.groups()
    desk.do("XGROUP", "CREATE", desk.stream, slow, 0)
    fill(desk, 4)
    desk.do("XACK", desk.stream, desk.unit.group, *desk.fetch(4))
    assert desk.expect("message_publish", "FULL", publish(desk, "", 4)) == [4]
    desk.do("XGROUP", "DESTROY", desk.stream, slow)
    desk.expect("message_publish", "OK", publish(desk, "", 4))


def test_without_a_group_everything_waits(desk: Desk) -> None:
    desk.expect("message_publish", "OK", publish(desk, "", max_backlog=1))
    assert desk.expect("message_publish", "FULL", publish(desk, "", max_backlog=1)) == [1]


def test_publish_survives_a_wrong_server_figure(desk: Desk) -> None:
    fill(desk, 10)
    desk.do("XGROUP", "CREATE", desk.stream, "hits", "10-0")
    with contextlib.suppress(RedisRefused):  # Redis 6.2 has no such figure
        desk.do("XGROUP", "SETID", desk.stream, "hits", "10-0", "ENTRIESREAD", 3)
    desk.expect("message_publish", "OK", publish(desk, "", 5))


def test_publish_estimates_an_unknown_lag(desk: Desk) -> None:
    """A group that starts in the middle: no server version knows how much it has unread."""
    fill(desk, 100)
    desk.do("XGROUP", "CREATE", desk.stream, "hits", "75-0")
    [waiting] = desk.expect("message_publish", "FULL", publish(desk, "", 20))
    assert 25 <= waiting <= 27
    desk.expect("message_publish", "OK", publish(desk, "", 30))
    # The new entry makes the others old. A group that has read everything is known again.
    desk.do("XACK", desk.stream, "hits", *desk.fetch(1000))
    desk.expect("message_publish", "OK", publish(desk, "", 1))


@pytest.mark.parametrize("read", ["0-0", "99-0", "100-0"])
def test_publish_counts_unread_entries_of_one_millisecond(desk: Desk, read: str) -> None:
    desk.add("100-0")
    desk.add("100-1")
    desk.do("XGROUP", "CREATE", desk.stream, "hits", read)
    assert desk.expect("message_publish", "FULL", publish(desk, "", 1))[0] in (1, 2)


def test_without_a_dedup_id_each_is_written(desk: Desk) -> None:
    for _ in range(2):
        desk.expect("message_publish", "OK", publish(desk, ""))
    state = desk.state()
    assert list(state) == ["stream"]
    assert list(state["stream"].entries.values()) == [BODY, BODY]


def test_publish_names_only_the_keys_it_needs(desk: Desk) -> None:
    assert publish(desk, "").argv[:3] == (desk.stream,) * 3
    dedup = desk.keys.dedup("access", 0, "order-1")
    assert publish(desk).argv[:3] == (desk.stream, desk.stream, dedup)
    assert publish(desk, "", 5).argv[:3] == (desk.stream,) * 3


# --- while the topic is as they were routed -------------------------------------------------------

NEVER = "18446744073709551615"


def append(desk: Desk, *messages: bytes | list[bytes], partitions: int = 2) -> Call:
    alone = all(isinstance(each, bytes) for each in messages)
    meta = desk.keys.meta("access")
    call = publishing.append(desk.keys, "access", 0, partitions, meta, alone=alone)
    fields = [each if isinstance(each, list) else [b"payload", each] for each in messages]
    return call._replace(argv=(*call.argv, *(messages if alone else publishing.flat(fields))))


def register(desk: Desk, count: object = 2) -> None:
    desk.do("HSET", desk.keys.meta("access"), "partitionCount", count)


def written(desk: Desk) -> list[dict[str, bytes]]:
    state = desk.state()
    return list(state["stream"].entries.values()) if "stream" in state else []


def test_append_writes_payloads_in_their_order(desk: Desk) -> None:
    register(desk)
    ids = desk.expect("message_append", "OK", append(desk, b"a", b"", b"\r\n"))
    assert [each.decode() for each in ids] == list(desk.state()["stream"].entries)
    assert [each["payload"] for each in written(desk)] == [b"a", b"", b"\r\n"]


def test_append_writes_messages_of_any_width_in_their_order(desk: Desk) -> None:
    register(desk)
    desk.expect("message_append", "OK", append(desk, b"a", FIELDS, b"3"))
    assert written(desk) == [{"payload": b"a"}, BODY, {"payload": b"3"}]


def test_append_of_more_values_than_lua_unpacks_writes_all(desk: Desk) -> None:
    register(desk)
    ids = desk.expect("message_append", "OK", append(desk, *[FIELDS] * 4000))
    assert len(ids) == desk.do("XLEN", desk.stream) == 4000


@pytest.mark.parametrize(("present", "said"), [(4, b"4"), (1, b"1"), ("x", b"x"), (None, b"")])
def test_append_refuses_a_changed_partition_count(desk: Desk, present: object, said: bytes) -> None:
    """B10: the script compares the count. Before, each send needed a WATCH."""
    if present is not None:
        register(desk, present)
    routed: Any = {"partitions": 2, "meta": desk.keys.meta("access")}
    place = (desk.keys, "access", 0)

    assert desk.expect("message_append", "MOVED", append(desk, b"a")) == [said]
    call = publishing.publish(*place, [FIELDS], "order-1", 60.0, 5, **routed)
    assert desk.expect("message_publish", "MOVED", call) == [said]
    call = publishing.schedule(*place, 1.0, "send-1", FIELDS, **routed)
    assert desk.expect("message_schedule", "MOVED", call) == [said]


def test_append_refuses_a_retired_topic(desk: Desk) -> None:
    register(desk)
    desk.link.run(topics.retirement(desk.keys, "access"))
    assert desk.expect("message_append", "MOVED", append(desk, b"a")) == [b""]


def test_on_a_cluster_the_count_is_not_compared(desk: Desk) -> None:
    call = publishing.append(desk.keys, "access", 0, 2, None, alone=True)
    desk.expect("message_append", "OK", call._replace(argv=(*call.argv, b"a")))
    assert [each["payload"] for each in written(desk)] == [b"a"]


def test_append_to_a_full_stream_returns_the_written_ids(desk: Desk) -> None:
    register(desk)
    desk.add(f"{NEVER}-{int(NEVER) - 1}")
    [ids] = desk.expect("message_append", "OK", append(desk, b"a", b"b", b"c"))
    assert [type(each) for each in ids] == [bytes, RedisRefused]
    assert [each["payload"] for each in written(desk)][1:] == [b"a"]


def test_publish_of_many_writes_as_many_as_fit(desk: Desk) -> None:
    fill(desk, 3)
    messages = [[b"payload", b"%d" % number] for number in range(4)]
    call = publishing.publish(desk.keys, "access", 0, messages, max_backlog=5)
    ids, backlog = desk.expect("message_publish", "OK", call)
    assert (len(ids), backlog) == (2, 3)
    assert [each["payload"] for each in written(desk)][3:] == [b"0", b"1"]
    assert desk.expect("message_publish", "FULL", call) == [5]


# --- delayed --------------------------------------------------------------------------------------


def test_schedule_writes_a_delayed_send(desk: Desk) -> None:
    with desk.instant() as now:
        due = int(desk.expect("message_schedule", "OK", schedule(desk))[0])
    assert now + 30_000 == due
    state = desk.state()
    assert now == state["scheduled_items"]["send-1"].pop("sentAt")
    named = BODY | {"sendId": b"send-1"}
    assert state == {"scheduled": {"send-1": due}, "scheduled_items": {"send-1": named}}


@pytest.mark.parametrize("at_unix_ms", [0, 1_000, 4_000_000_000_123])
def test_schedules_for_an_instant(desk: Desk, at_unix_ms: int) -> None:
    call = publishing.schedule(
        desk.keys, "access", 0, None, "send-1", FIELDS, at_unix_ms=at_unix_ms
    )
    assert desk.expect("message_schedule", "OK", call) == [b"%d" % at_unix_ms]
    assert desk.state()["scheduled"] == {"send-1": at_unix_ms}


def test_schedule_repeated_schedules_once(desk: Desk) -> None:
    due = desk.expect("message_schedule", "OK", schedule(desk))
    before = desk.dump()
    assert desk.expect("message_schedule", "OK", schedule(desk)) == due
    assert desk.dump() == before


def test_without_a_dedup_id_each_is_scheduled(desk: Desk) -> None:
    for send_id in ("send-1", "send-2"):
        desk.expect("message_schedule", "OK", schedule(desk, send_id))
    state = desk.state()
    assert sorted(state) == ["scheduled", "scheduled_items"]
    assert sorted(state["scheduled"]) == sorted(state["scheduled_items"]) == ["send-1", "send-2"]


def test_schedule_writes_a_dedup_id_once(desk: Desk) -> None:
    due = desk.expect("message_schedule", "OK", schedule(desk, "send-1", "order-1"))
    dedup = desk.keys.dedup("access", 0, "order-1")
    assert desk.state()[dedup] == b"send-1"
    assert 59_000 < desk.do("PTTL", dedup) <= 60_000
    assert desk.expect("message_schedule", "DUP", schedule(desk, "send-2", "order-1")) == [
        b"send-1"
    ]
    # A repetition of the same send gets its due time, not the answer that it was late.
    assert desk.expect("message_schedule", "OK", schedule(desk, "send-1", "order-1")) == due


def test_dedup_id_covers_sends_and_scheduled_sends(desk: Desk) -> None:
    entry_id = desk.expect("message_publish", "OK", publish(desk))[0][0]
    assert desk.expect("message_schedule", "DUP", schedule(desk, "s", "order-1")) == [entry_id]


def test_publishing_rejects_invalid_calls() -> None:
    keys = Keys()
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, [[b"payload"]])
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, [[]])
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, [FIELDS], "order-1", 0.0)
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, [FIELDS], max_backlog=0)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, 1.0, "", FIELDS)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, -1.0, "send-1", FIELDS)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, 1.0, "send-1", FIELDS, at_unix_ms=1)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, None, "send-1", FIELDS)
