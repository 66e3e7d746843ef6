"""For each script, a state in which the script has all of its effects and uses all of its keys.

`test_every_script` breaks each of them with a key of a wrong type, or a server whose memory is
full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamqd.config import Topic
from streamqd.store import (
    adoption,
    archives,
    dead,
    directives,
    groups,
    growth,
    leases,
    members,
    messages,
    outbox,
    publishing,
    retention,
    retries,
    spark,
    topics,
    tracing,
)
from streamqd.store import schedules as timed
from streamqd.store.scripts import Call
from tests.contract.harness import OWNER, TTL, Harness

Scenario = Callable[[Harness], Call]
LAST_ID = "18446744073709551615-18446744073709551615"
CHANGED = {b"originalId": b"1-0", b"retryCount": b"1"}


def lease_acquire(harness: Harness) -> Call:
    """An owner was lost while it handled an entry, so the next owner charges the entry."""
    place = harness.pending("1-0")[0]
    epoch = harness.own("old")
    harness.do("HSET", harness.fence, "mark", place)
    harness.do("HSET", harness.attempts, b"m:9-0:c", "1")
    return leases.acquire(harness.keys, harness.leased("new", epoch), TTL, OWNER, "old")


def lease_acquire_retried(harness: Harness) -> Call:
    """An owner was lost while it handled an entry of the retry stream."""
    harness.pending("1-0")
    place = harness.pending_retry("1-0")[0]
    epoch = harness.own("old")
    harness.do("HSET", harness.fence, "mark", place)
    harness.do("HSET", harness.attempts, b"m:9-0:c", "1")
    return leases.acquire(harness.keys, harness.leased("new", epoch), TTL, OWNER, "old")


def lease_acquire_mine(harness: Harness) -> Call:
    """The reply was lost, and the lease has expired since."""
    epoch = harness.own("new")
    harness.do("DEL", harness.lease)
    return leases.acquire(harness.keys, harness.leased("new", epoch - 1), TTL, OWNER)


def lease_renew(harness: Harness) -> Call:
    harness.own("t1")
    return leases.renew(harness.keys, harness.leased("t1"), TTL)


def lease_renew_late(harness: Harness) -> Call:
    harness.own("t1")
    harness.do("DEL", harness.lease)
    return leases.renew(harness.keys, harness.leased("t1"), TTL)


def lease_refence(harness: Harness) -> Call:
    main = harness.pending("1-0", "2-0")
    retried = harness.pending_retry("1-0")
    harness.own("old")
    harness.do("HSET", harness.attempts, b"m:1-0:c", "1", b"m:2-0:c", "1")
    done = [main[1], *retried]
    return leases.refence(
        harness.keys, harness.leased("old"), "new", TTL, main[0], b"signal 9", done
    )


def lease_refence_uncharged(harness: Harness) -> Call:
    """A child was dismissed on purpose, so no message is charged."""
    main = harness.pending("1-0")
    retried = harness.pending_retry("1-0")
    harness.own("old")
    harness.do("HSET", harness.attempts, b"m:1-0:c", "1")
    done = [*main, *retried]
    return leases.refence(harness.keys, harness.leased("old"), "new", TTL, None, b"", done)


def lease_release(harness: Harness) -> Call:
    harness.own("t1")
    return leases.release(harness.keys, harness.leased("t1"))


def group_ensure(harness: Harness) -> Call:
    harness.add("1-0")
    harness.add("1-0", stream=harness.retry)
    harness.do("HSET", harness.trim, "floor:hits", "1-0")
    return messages.ensure_group(harness.keys, harness.assignment, "0")


def group_ensure_there(harness: Harness) -> Call:
    harness.groups()
    return messages.ensure_group(harness.keys, harness.assignment, "0")


def group_restore(harness: Harness) -> Call:
    place = harness.pending("1-0", "2-0")[1]
    retried = harness.pending_retry("1-0")[0]
    harness.own("t1")
    for stream in (harness.stream, harness.retry):
        harness.do("XGROUP", "DESTROY", stream, harness.assignment.group)
    return messages.restore_group(
        harness.keys, harness.leased("t1"), b"2-0", b"1-0", [place, retried]
    )


def message_recover(harness: Harness) -> Call:
    place = harness.pending("1-0")[0]
    harness.pending_retry("1-0")
    harness.own("t1")
    harness.do("HSET", harness.attempts, place + b":c", "1")
    return messages.recover(harness.keys, harness.leased("t1"), "s1", True, "", "", 10)


def message_fetch(harness: Harness) -> Call:
    harness.groups()
    harness.add("1-0")
    harness.add("1-0", stream=harness.retry)
    harness.own("t1")
    harness.do("HSET", harness.fence, "session", "s1")
    return messages.fetch(harness.keys, harness.leased("t1"), "s1", 10)


def message_reclaim(harness: Harness) -> Call:
    harness.groups()
    harness.add("1-0")
    harness.fetch(consumer="foreign")
    harness.own("t1")
    harness.do("HSET", harness.fence, "session", "s1")
    return messages.reclaim(harness.keys, harness.leased("t1"), "s1", "m", 0.0, 10)


def settle_ack(harness: Harness) -> Call:
    main = harness.pending("1-0", "2-0")
    retried = harness.pending_retry("1-0")
    harness.own("t1")
    harness.do("HSET", harness.attempts, b"m:1-0:c", "1")
    return messages.ack(harness.keys, harness.leased("t1"), [main[1], *retried], charged=[main[0]])


def settle_note(harness: Harness) -> Call:
    main = harness.pending("1-0")
    retried = harness.pending_retry("1-0")
    harness.own("t1")
    harness.do("HSET", harness.attempts, "m:1-0:f", "1")
    return messages.note(
        harness.keys, harness.leased("t1"), [(main[0], 2, 5.0), (retried[0], 1, 5.0)]
    )


def settle_retry(harness: Harness) -> Call:
    main, retried = _count_failure(harness)
    harness.do("ZADD", harness.delayed, 1, "m:0-1")
    harness.do("HSET", harness.items, "m:0-1", b"\x92\xa7payload\xa1x")
    items = [(main, 5.0, CHANGED), (retried, 5.0, CHANGED)]
    return messages.retry(harness.keys, harness.leased("t1"), items)


def settle_dead(harness: Harness) -> Call:
    main, retried = _count_failure(harness)
    harness.add("1-0", "payload", "old letter", stream=harness.dlq)
    return messages.dead(harness.keys, harness.leased("t1"), [(main, CHANGED), (retried, CHANGED)])


def quarantine_mark(harness: Harness) -> Call:
    main = harness.pending("1-0", "2-0")
    retried = harness.pending_retry("1-0")
    harness.own("t1")
    harness.do("HSET", harness.fence, "session", "s1", "quarantine", "1")
    done = [main[0], *retried]
    return messages.quarantine_mark(harness.keys, harness.leased("t1"), "s1", main[1], done)


def quarantine_mark_first(harness: Harness) -> Call:
    """The worker has nothing to acknowledge yet."""
    place = harness.pending("1-0")[0]
    harness.own("t1")
    harness.do("HSET", harness.fence, "session", "s1", "quarantine", "1")
    return messages.quarantine_mark(harness.keys, harness.leased("t1"), "s1", place, [])


def message_promote(harness: Harness) -> Call:
    harness.groups()
    harness.do("HSET", harness.items, "m:9-0", b"\x92\xa7payload\xa1x")
    harness.do("ZADD", harness.delayed, 1, "m:1-0")
    harness.do("HSET", harness.items, "m:1-0", b"\x92\xa7payload\xa1x")
    return messages.promote_retries(harness.keys, harness.assignment, 10)


def message_promote_orphan(harness: Harness) -> Call:
    """The first due entry has lost its item, so it is removed before anything is written."""
    call = message_promote(harness)
    harness.do("ZADD", harness.delayed, 0, "m:0-1")
    return call


def message_promote_delayed(harness: Harness) -> Call:
    harness.add("1-0")
    harness.do("ZADD", harness.delayed_sends, 1, "send")
    harness.do("HSET", harness.delayed_send_items, "send", b"\x92\xa7payload\xa1x")
    return messages.promote_delayed(
        harness.keys, harness.assignment.topic, harness.assignment.partition, 10
    )


def stream_trim(harness: Harness) -> Call:
    harness.groups()
    harness.add("1-0")
    harness.fetch()
    harness.do("XACK", harness.stream, harness.assignment.group, "1-0")
    harness.do("HSET", harness.trim, "first", "1-0")
    return trim_all(harness)


def stream_trim_retry(harness: Harness) -> Call:
    harness.groups()
    harness.pending_retry("1-0")
    harness.do("XACK", harness.retry, harness.assignment.group, "1-0")
    return retention.trim_retry(harness.keys, harness.assignment, 1000)


def stream_drop(harness: Harness) -> Call:
    harness.groups()
    harness.add("1-0")
    harness.do("HSET", harness.trim, "first", "1-0")
    return drop_all(harness)


def missing_settle(harness: Harness) -> Call:
    harness.pending("1-0", "2-0")
    harness.do("XTRIM", harness.stream, "MINID", "2-0")
    harness.do("HSET", harness.trim, "first", "2-0")
    harness.do("HSET", harness.attempts, "m:1-0:c", "1")
    return retention.settle_missing(harness.keys, harness.assignment, 10)


def dead_replay(harness: Harness) -> Call:
    harness.groups()
    harness.add("7-0", "payload", "x", "group", "hits", "reason", "attempts", stream=harness.dlq)
    topic, partition, group = harness.assignment
    return dead.replay(harness.keys, topic, partition, "7-0", group, {b"retryCount": b"0"})


def dead_replay_all_groups(harness: Harness) -> Call:
    harness.groups()
    harness.add("7-0", "payload", "x", "group", "hits", stream=harness.dlq)
    return dead.replay(
        harness.keys, harness.assignment.topic, harness.assignment.partition, "7-0", None, {}
    )


def dead_purge(harness: Harness) -> Call:
    harness.add("7-0", stream=harness.dlq)
    harness.do("HSET", harness.trim, "dead_archived", "9-0")
    place = harness.assignment.topic, harness.assignment.partition
    return dead.purge_before(harness.keys, *place, "8", 10, archived_only=True)


def dead_mark(harness: Harness) -> Call:
    harness.add("7-0", stream=harness.dlq)
    return dead.mark(
        harness.keys, harness.assignment.topic, harness.assignment.partition, "7-0", "other/1"
    )


def dead_mark_back(harness: Harness) -> Call:
    harness.link.run(dead_mark(harness))
    return dead.mark(
        harness.keys, harness.assignment.topic, harness.assignment.partition, "7-0", ""
    )


def dead_deliver(harness: Harness) -> Call:
    harness.groups()
    return dead.deliver(
        harness.keys, *harness.assignment, {b"payload": b"x"}, "dlq:other:0:1-0", 60.0
    )


def register_topic(harness: Harness) -> str:
    """Register the topic with two partitions. Return its meta key."""
    meta = harness.keys.meta(harness.assignment.topic)
    harness.do("HSET", meta, "partitionCount", 2)
    return meta


def message_append(harness: Harness) -> Call:
    harness.groups()
    harness.add("1-0")
    topic, partition, _ = harness.assignment
    call = publishing.append(harness.keys, topic, partition, 2, register_topic(harness), alone=True)
    return call._replace(argv=(*call.argv, b"x", b"y"))


def message_publish(harness: Harness) -> Call:
    harness.groups()
    for entry_id in ("1-0", "2-0"):
        harness.add(entry_id)
    harness.do("XACK", harness.stream, harness.assignment.group, *harness.fetch(1))
    topic, partition, _ = harness.assignment
    return publishing.publish(
        *(harness.keys, topic, partition, [b"payload", b"x"], "order-1", 60.0, 2),
        partitions=2,
        meta=register_topic(harness),
    )


def message_schedule(harness: Harness) -> Call:
    harness.do("ZADD", harness.delayed_sends, 9e12, "other")
    harness.do("HSET", harness.delayed_send_items, "other", b"\x92\xa7payload\xa1x")
    topic, partition, _ = harness.assignment
    fields = [b"payload", b"x"]
    return publishing.schedule(
        *(harness.keys, topic, partition, 5.0, "send-1", fields, "order-1", 60.0),
        partitions=2,
        meta=register_topic(harness),
    )


def topic_create(harness: Harness) -> Call:
    return topics.create_call(harness.keys, "access", Topic(partitions=3))


def topic_configure(harness: Harness) -> Call:
    harness.link.run(topic_create(harness))
    seen = topics.read_settings(harness.store, "access")
    return topics.configure_call(harness.keys, "access", seen, {"archive": "required"})


def topic_retire(harness: Harness) -> Call:
    harness.link.run(topic_create(harness))
    return topics.retire_call(harness.keys, "access")


def growth_start(harness: Harness) -> Call:
    harness.link.run(topic_create(harness))
    return growth.begin(harness.keys, "access", 3, 6, "t1")


def growth_switch(harness: Harness) -> Call:
    harness.link.run(growth_start(harness))
    return growth.switch(harness.keys, "access", "t1", range(3, 6))


def growth_mark(harness: Harness) -> Call:
    harness.link.run(growth_switch(harness))
    return growth.mark(harness.keys, "access", "t1", ["1-0", "2-0", "0-0"])


def growth_finish(harness: Harness) -> Call:
    harness.link.run(growth_mark(harness))
    return growth.end(harness.keys, "access", "t1")


def group_reset(harness: Harness) -> Call:
    """A group that has all kinds of data is taken from its owner."""
    _write_group_data(harness)
    return groups.reset(
        harness.keys,
        harness.assignment,
        "0-0",
        drop_retries=True,
        force=True,
        keeper="grow",
        token="t9",
    )


def group_delete(harness: Harness) -> Call:
    _write_group_data(harness)
    return groups.delete(harness.keys, harness.assignment, force=True, token="t9")


def message_find(harness: Harness) -> Call:
    """The message has a dead letter next to a dead letter of another message."""
    harness.groups()
    for original in ("1-0", "2-0"):
        harness.do("XADD", harness.dlq, "*", "payload", "x", "originalId", original, "group", "g")
    return tracing.find(harness.dlq, "1-0", "0-1")


def stream_page(harness: Harness) -> Call:
    harness.groups()
    harness.add("1-0", "payload", "x")
    return tracing.page(harness.stream, "-", "+", 10, newest=False)


def retry_page(harness: Harness) -> Call:
    _delay_retry(harness)
    return retries.page(harness.keys, harness.assignment, (0, ""), 10)


def retry_make_due(harness: Harness) -> Call:
    _delay_retry(harness)
    return retries.make_due(harness.keys, harness.assignment, ["m:1-0"])


def retry_cancel(harness: Harness) -> Call:
    _delay_retry(harness)
    harness.add("1-0", "payload", "old letter", stream=harness.dlq)
    return retries.cancel(
        harness.keys, harness.assignment, [("m:1-0", {b"reason": b"canceled"})], drop=False
    )


def retry_cancel_drop(harness: Harness) -> Call:
    _delay_retry(harness)
    harness.add("1-0", "payload", "old letter", stream=harness.dlq)
    return retries.cancel(harness.keys, harness.assignment, [("m:1-0", {})], drop=True)


def _write_group_data(harness: Harness) -> None:
    _count_failure(harness)
    _delay_retry(harness)
    harness.do("HSET", harness.trim, "first", "1-0", "floor:hits", "1-0")


def _delay_retry(harness: Harness) -> None:
    harness.do("ZADD", harness.delayed, 9e12, "m:1-0")
    harness.do("HSET", harness.items, "m:1-0", b"\x92\xa7payload\xa1x")


def member_heartbeat(harness: Harness) -> Call:
    harness.do("ZADD", harness.keys.members("default"), 1, "silent")
    harness.do("HSET", harness.keys.info("default"), "silent", '{"nonce":"n0"}')
    harness.do("HSET", harness.keys.directives("default"), "rebalance", "{}")
    return members.heartbeat(
        harness.keys, "default", "west-1", "n1", {"weight": 1}, 9.0, ["silent"]
    )


def control_change(harness: Harness) -> Call:
    harness.do("HSET", harness.keys.directives("default"), "drain:west-1", "{}")
    return directives.change(
        harness.keys, "default", "pause:access/*/*", by="ops@west", remove=["drain:west-1"]
    )


def message_adopt(harness: Harness) -> Call:
    """A foreign client has read an entry of an assignment that streamqd has owned before."""
    harness.groups()
    harness.add("1-0")
    harness.fetch(1, "foreign")
    harness.do("HSET", harness.fence, "epoch", "7")
    return adoption.adopt(harness.keys, harness.assignment, "m")


def member_leave(harness: Harness) -> Call:
    harness.link.run(member_heartbeat(harness))
    return members.leave(harness.keys, "default", "west-1", "n1")


def partition_snapshot(harness: Harness) -> Call:
    settle_retry(harness)
    harness.add("1-0", stream=harness.dlq)
    harness.do("ZADD", harness.delayed_sends, 1, "send")
    return messages.snapshot(harness.keys, harness.assignment)


def archive_advance(harness: Harness) -> Call:
    harness.do("HSET", harness.trim, "archived", "1-0")
    return archives.advance(harness.keys, *harness.assignment[:2], "2-0")


def query_position(harness: Harness) -> Call:
    harness.add("1-0")
    harness.do("XGROUP", "CREATE", harness.stream, "spark:q", "0")
    harness.do("HSET", harness.trim, "holds:spark:q", "1")
    return spark.query_position(harness.keys, *harness.assignment[:2], "q", "1-0", 1, hold=True)


def query_position_new(harness: Harness) -> Call:
    harness.do("HSET", harness.trim, "first", "1-0")
    harness.add("1-0")
    return spark.query_position(harness.keys, *harness.assignment[:2], "q", "1-0", 1, hold=False)


def outbox_acquire(harness: Harness) -> Call:
    harness.do("HSET", harness.keys.outbox("shop"), "epoch", 1)
    harness.do("SET", harness.keys.outbox_lease("shop"), "t0")
    return outbox.acquire(harness.keys, "shop", "t1", TTL, "west-1", 0, "t0")


def outbox_renew(harness: Harness) -> Call:
    harness.link.run(outbox_acquire(harness))
    return outbox.renew(harness.keys, "shop", "t1", TTL, {"rows": 1})


def outbox_renew_late(harness: Harness) -> Call:
    call = outbox_renew(harness)
    harness.do("DEL", harness.keys.outbox_lease("shop"))
    return call


def outbox_release(harness: Harness) -> Call:
    harness.link.run(outbox_acquire(harness))
    return outbox.release(harness.keys, "shop", "t1")


def outbox_fence(harness: Harness) -> Call:
    harness.do(
        "HSET",
        harness.keys.outbox_record(*harness.assignment[:2], "shop"),
        "epoch",
        4,
        "rows",
        "0" * 48,
    )
    return outbox.fence(
        harness.keys, "shop", *harness.assignment[:2], 5, 2, register_topic(harness)
    )


def outbox_publish(harness: Harness) -> Call:
    """One row is already recorded, one is due later, and one is ready."""
    harness.link.run(outbox_fence(harness))
    harness.groups()
    harness.add("1-0")
    harness.do("ZADD", harness.delayed_sends, 9e12, "other")
    harness.do("HSET", harness.delayed_send_items, "other", b"\x92\xa7payload\xa1x")
    rows = [
        outbox.OutgoingRow(number, f"{number:032x}", due, [b"payload", b"x"])
        for number, due in enumerate((None, 9_000_000_000_000, None))
    ]
    meta = harness.keys.meta(harness.assignment.topic)
    return outbox.publish(
        harness.keys, "shop", *harness.assignment[:2], rows, 5, 2, meta, max_backlog=9
    )


def outbox_publish_late(harness: Harness) -> Call:
    """The first row that has to be written is due later."""
    outbox_publish(harness)
    harness.do("HDEL", harness.keys.outbox_record(*harness.assignment[:2], "shop"), "rows")
    rows = [outbox.OutgoingRow(1, "f" * 32, 9_000_000_000_000, [b"payload", b"x"])]
    meta = harness.keys.meta(harness.assignment.topic)
    return outbox.publish(harness.keys, "shop", *harness.assignment[:2], rows, 5, 2, meta)


def pipeline_lease_acquire(harness: Harness) -> Call:
    """The lease is held and extended, because a free one has no key that a test could break."""
    harness.link.run(
        archives.acquire_lease(harness.keys, harness.assignment.topic, "archive", "t1", TTL)
    )
    harness.do("PERSIST", harness.keys.pipeline(harness.assignment.topic, "archive"))
    return archives.acquire_lease(harness.keys, harness.assignment.topic, "archive", "t1", TTL)


def pipeline_lease_acquire_free(harness: Harness) -> Call:
    return archives.acquire_lease(harness.keys, harness.assignment.topic, "archive", "t1", TTL)


def pipeline_lease_renew(harness: Harness) -> Call:
    pipeline_lease_acquire(harness)
    return archives.renew_lease(harness.keys, harness.assignment.topic, "archive", "t1", TTL)


def pipeline_lease_release(harness: Harness) -> Call:
    pipeline_lease_acquire(harness)
    return archives.release_lease(harness.keys, harness.assignment.topic, "archive", "t1")


def trim_all(harness: Harness, **changed: object) -> Call:
    """Trim all entries that every group has acknowledged."""
    arguments = {
        "keep_from": "",
        "max_length": None,
        "archive": False,
        "limit": 1000,
        "expected": [harness.assignment.group],
    }
    topic, partition, _ = harness.assignment
    return retention.trim(harness.keys, topic, partition, **{**arguments, **changed})  # type: ignore[arg-type]


def drop_all(harness: Harness, **changed: object) -> Call:
    """Drop all entries, even those that are not acknowledged."""
    arguments = {
        "drop_before": "999999999999-0",
        "max_length": None,
        "archive": False,
        "limit": 1000,
        "expected": [harness.assignment.group],
    }
    topic, partition, _ = harness.assignment
    return retention.drop(harness.keys, topic, partition, **{**arguments, **changed})  # type: ignore[arg-type]


def stream_step(harness: Harness) -> Call:
    harness.add("1-0")
    return spark.step(harness.stream, "0-0", "9-0", 10)


def stage_rows(harness: Harness) -> None:
    """Stage two rows of a task."""
    key = harness.keys.staged_rows(*harness.assignment[:2], "q", "a")
    harness.do("XADD", key, "0-1", "payload", "1")
    harness.do("XADD", key, "0-2", "payload", "2")


def sink_start(harness: Harness) -> Call:
    """The previous batch has been published."""
    harness.do("HSET", harness.keys.sink("q"), "batch", "3", "attempt:a:access", "4")
    return spark.begin(harness.keys, "q", 4, {"a": {"access": [0]}}, 60, 2)


def sink_publish(harness: Harness) -> Call:
    """One row is already in the partition."""
    stage_rows(harness)
    harness.add("1-0")
    return spark.publish(harness.keys, *harness.assignment[:2], "q", "a", 60)


def sink_finish(harness: Harness) -> Call:
    harness.link.run(sink_start(harness))
    return spark.end(harness.keys, "q", 4, 60)


def _count_failure(harness: Harness) -> tuple[bytes, bytes]:
    main = harness.pending("1-0")[0]
    retried = harness.pending_retry("1-0")[0]
    harness.own("t1")
    harness.do("HSET", harness.attempts, main + b":c", "1")
    return main, retried


TICK = 1_700_000_000_000


def store_schedule(harness: Harness, due: int = TICK, origin: str = timed.FILE) -> tuple[str, int]:
    """Store a schedule that is due. Return its place."""
    place = harness.assignment.topic, harness.assignment.partition
    call = timed.declare(
        harness.keys, place, "tick", "h1", "{}", origin=origin, since_unix_ms=1, next_unix_ms=due
    )
    harness.link.run(call)
    return place


def tick(due: int = TICK, following: int | None = TICK + 1_000, **more: Any) -> timed.DueTick:
    """Return a due tick of a schedule."""
    plain = timed.DueTick("tick", "h1", due, due, following, 0, ["payload", "x"])
    return plain._replace(**more)


def schedule_page(harness: Harness) -> Call:
    return timed.page(harness.keys, store_schedule(harness), 10)


def schedule_fire(harness: Harness) -> Call:
    """The last message was handled, and others of the group are waiting for their retries."""
    place = store_schedule(harness)
    harness.pending("1-0")
    harness.do("XACK", harness.stream, "hits", "1-0")
    harness.pending_retry("1-0")
    harness.do("ZADD", harness.delayed, 9e12, "m:9-0")
    harness.do("HSET", harness.items, "m:9-0", b"\x92\xa7payload\xa1x")
    harness.do("HSET", harness.keys.schedules_last(*place), "tick:id", "1-0")
    harness.do("HSET", harness.keys.meta("access"), "partitionCount", "3")
    return timed.fire(harness.keys, place, [tick()], group="hits", partitions=3)


def schedule_run(harness: Harness) -> Call:
    place = store_schedule(harness)
    harness.do("HSET", harness.keys.meta("access"), "partitionCount", "3")
    return timed.run(harness.keys, place, "tick", "h1", TICK + 1, ["payload", "x"], 3)


def schedule_declare(harness: Harness) -> Call:
    harness.do("ZADD", harness.keys.schedules_due("access", 0), 9e12, "other")
    harness.do("HSET", harness.keys.schedules("access", 0), "other:hash", "h")
    return timed.declare(
        harness.keys,
        ("access", 0),
        "tick",
        "h1",
        "{}",
        origin="file",
        since_unix_ms=1,
        next_unix_ms=9,
    )


def schedule_stamp(harness: Harness) -> Call:
    place = store_schedule(harness)
    store_schedule(harness)
    harness.link.run(timed.hold(harness.keys, place, "tick", timed.ORPHANED))
    harness.do("ZADD", harness.keys.schedules_due(*place), 9e12, "other")
    return timed.stamp(harness.keys, place, [("tick", "h1")])


def schedule_hold(harness: Harness) -> Call:
    return timed.hold(harness.keys, store_schedule(harness), "tick", timed.PAUSED)


def schedule_release(harness: Harness) -> Call:
    harness.link.run(schedule_hold(harness))
    harness.do("ZADD", harness.keys.schedules_due("access", 0), 9e12, "other")
    return timed.release(harness.keys, ("access", 0), "tick")


def schedule_drop(harness: Harness) -> Call:
    place = store_schedule(harness)
    harness.do("HSET", harness.keys.schedules_last(*place), "tick:id", "1-0")
    return timed.drop(harness.keys, place, "tick")


# The outcome of each script with full memory. Scripts that must not wait for memory are accepted.
WHEN_FULL: dict[Scenario, str] = {
    message_fetch: "OK",
    lease_acquire: "OK",
    lease_acquire_retried: "OK",
    lease_acquire_mine: "MINE",
    lease_renew: "OK",
    lease_renew_late: "LATE",
    lease_refence: "OK",
    lease_refence_uncharged: "OK",
    lease_release: "OK",
    group_ensure: "OOM",
    group_ensure_there: "OK",
    group_restore: "OOM",
    message_recover: "OK",
    message_reclaim: "OK",
    settle_ack: "OK",
    settle_note: "OOM",
    settle_retry: "OOM",
    settle_dead: "OOM",
    quarantine_mark: "OK",
    quarantine_mark_first: "OK",
    message_promote: "OOM",
    message_promote_orphan: "OK",
    message_promote_delayed: "OOM",
    stream_trim: "OK",
    stream_trim_retry: "OK",
    stream_drop: "OK",
    missing_settle: "OK",
    dead_replay: "OOM",
    dead_replay_all_groups: "OOM",
    dead_purge: "OK",
    dead_mark: "OOM",
    dead_mark_back: "OK",
    dead_deliver: "OOM",
    message_append: "OOM",
    message_publish: "OOM",
    message_schedule: "OOM",
    topic_create: "OOM",
    topic_configure: "OOM",
    topic_retire: "OK",
    growth_start: "OOM",
    growth_switch: "OOM",
    growth_mark: "OOM",
    growth_finish: "OK",
    group_reset: "OK",
    group_delete: "OK",
    retry_page: "OK",
    stream_page: "OK",
    schedule_page: "OK",
    schedule_fire: "OOM",
    schedule_run: "OOM",
    schedule_declare: "OOM",
    schedule_stamp: "OOM",
    schedule_hold: "OOM",
    schedule_release: "OOM",
    schedule_drop: "OK",
    message_find: "OK",
    retry_make_due: "OOM",
    retry_cancel: "OOM",
    retry_cancel_drop: "OK",
    member_heartbeat: "OK",
    control_change: "OK",
    message_adopt: "OK",
    member_leave: "OK",
    partition_snapshot: "OK",
    stream_step: "OK",
    sink_start: "OK",
    sink_publish: "OK",
    sink_finish: "OK",
    archive_advance: "OK",
    query_position: "OK",
    query_position_new: "OK",
    pipeline_lease_acquire: "OK",
    pipeline_lease_acquire_free: "OK",
    pipeline_lease_renew: "OK",
    pipeline_lease_release: "OK",
    outbox_acquire: "OK",
    outbox_renew: "OK",
    outbox_renew_late: "OK",
    outbox_release: "OK",
    outbox_fence: "OOM",
    outbox_publish: "OOM",
    outbox_publish_late: "OOM",
}
# Keys that a scenario names, but does not change or does not need.
UNTOUCHED: set[tuple[Scenario, str]] = {
    (stream_trim_retry, "trim"),
    (lease_acquire, "retry"),
    (lease_acquire_retried, "stream"),
    (lease_acquire_mine, "attempts"),
    (lease_acquire_mine, "stream"),
    (lease_acquire_mine, "retry"),
    # If the history has another type, only the history is lost.
    (lease_acquire, "epochs"),
    (lease_acquire_retried, "epochs"),
    (lease_acquire_mine, "epochs"),
    (lease_release, "epochs"),
    (group_reset, "epochs"),
    (group_delete, "epochs"),
}
