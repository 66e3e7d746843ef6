"""For each script, a state in which it has all of its effects and uses all of its keys.

`test_every_script` breaks each of them: a key of a wrong type, a server with full memory.
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
from tests.contract.desk import OWNER, TTL, Desk

Scenario = Callable[[Desk], Call]
LAST_ID = "18446744073709551615-18446744073709551615"
CHANGED = {b"originalId": b"1-0", b"retryCount": b"1"}


def lease_acquire(desk: Desk) -> Call:
    """An owner was lost while it handled an entry: the next one charges it."""
    place = desk.pending("1-0")[0]
    epoch = desk.own("old")
    desk.do("HSET", desk.fence, "mark", place)
    desk.do("HSET", desk.attempts, b"m:9-0:c", "1")
    return leases.acquire(desk.keys, desk.leased("new", epoch), TTL, OWNER, "old")


def lease_acquire_retried(desk: Desk) -> Call:
    """The same, with an entry of the retry stream."""
    desk.pending("1-0")
    place = desk.pending_retry("1-0")[0]
    epoch = desk.own("old")
    desk.do("HSET", desk.fence, "mark", place)
    desk.do("HSET", desk.attempts, b"m:9-0:c", "1")
    return leases.acquire(desk.keys, desk.leased("new", epoch), TTL, OWNER, "old")


def lease_acquire_mine(desk: Desk) -> Call:
    """The reply was lost and the lease has expired."""
    epoch = desk.own("new")
    desk.do("DEL", desk.lease)
    return leases.acquire(desk.keys, desk.leased("new", epoch - 1), TTL, OWNER)


def lease_renew(desk: Desk) -> Call:
    desk.own("t1")
    return leases.renew(desk.keys, desk.leased("t1"), TTL)


def lease_renew_late(desk: Desk) -> Call:
    desk.own("t1")
    desk.do("DEL", desk.lease)
    return leases.renew(desk.keys, desk.leased("t1"), TTL)


def lease_refence(desk: Desk) -> Call:
    main = desk.pending("1-0", "2-0")
    retried = desk.pending_retry("1-0")
    desk.own("old")
    desk.do("HSET", desk.attempts, b"m:1-0:c", "1", b"m:2-0:c", "1")
    done = [main[1], *retried]
    return leases.refence(desk.keys, desk.leased("old"), "new", TTL, main[0], b"signal 9", done)


def lease_refence_uncharged(desk: Desk) -> Call:
    """A child was dismissed, and no message is charged."""
    main = desk.pending("1-0")
    retried = desk.pending_retry("1-0")
    desk.own("old")
    desk.do("HSET", desk.attempts, b"m:1-0:c", "1")
    done = [*main, *retried]
    return leases.refence(desk.keys, desk.leased("old"), "new", TTL, None, b"", done)


def lease_release(desk: Desk) -> Call:
    desk.own("t1")
    return leases.release(desk.keys, desk.leased("t1"))


def group_ensure(desk: Desk) -> Call:
    desk.add("1-0")
    desk.add("1-0", stream=desk.retry)
    desk.do("HSET", desk.trim, "floor:hits", "1-0")
    return messages.ensure_group(desk.keys, desk.unit, "0")


def group_ensure_there(desk: Desk) -> Call:
    desk.groups()
    return messages.ensure_group(desk.keys, desk.unit, "0")


def group_restore(desk: Desk) -> Call:
    place = desk.pending("1-0", "2-0")[1]
    retried = desk.pending_retry("1-0")[0]
    desk.own("t1")
    for stream in (desk.stream, desk.retry):
        desk.do("XGROUP", "DESTROY", stream, desk.unit.group)
    return messages.restore_group(desk.keys, desk.leased("t1"), b"2-0", b"1-0", [place, retried])


def message_recover(desk: Desk) -> Call:
    place = desk.pending("1-0")[0]
    desk.pending_retry("1-0")
    desk.own("t1")
    desk.do("HSET", desk.attempts, place + b":c", "1")
    return messages.recover(desk.keys, desk.leased("t1"), "s1", True, "", "", 10)


def message_fetch(desk: Desk) -> Call:
    desk.groups()
    desk.add("1-0")
    desk.add("1-0", stream=desk.retry)
    desk.own("t1")
    desk.do("HSET", desk.fence, "session", "s1")
    return messages.fetch(desk.keys, desk.leased("t1"), "s1", 10)


def message_reclaim(desk: Desk) -> Call:
    desk.groups()
    desk.add("1-0")
    desk.fetch(consumer="foreign")
    desk.own("t1")
    desk.do("HSET", desk.fence, "session", "s1")
    return messages.reclaim(desk.keys, desk.leased("t1"), "s1", "m", 0.0, 10)


def settle_ack(desk: Desk) -> Call:
    main = desk.pending("1-0", "2-0")
    retried = desk.pending_retry("1-0")
    desk.own("t1")
    desk.do("HSET", desk.attempts, b"m:1-0:c", "1")
    return messages.ack(desk.keys, desk.leased("t1"), [main[1], *retried], charged=[main[0]])


def settle_note(desk: Desk) -> Call:
    main = desk.pending("1-0")
    retried = desk.pending_retry("1-0")
    desk.own("t1")
    desk.do("HSET", desk.attempts, "m:1-0:f", "1")
    return messages.note(desk.keys, desk.leased("t1"), [(main[0], 2, 5.0), (retried[0], 1, 5.0)])


def settle_retry(desk: Desk) -> Call:
    main, retried = _failing(desk)
    desk.do("ZADD", desk.delayed, 1, "m:0-1")
    desk.do("HSET", desk.items, "m:0-1", b"\x92\xa7payload\xa1x")
    items = [(main, 5.0, CHANGED), (retried, 5.0, CHANGED)]
    return messages.retry(desk.keys, desk.leased("t1"), items)


def settle_dead(desk: Desk) -> Call:
    main, retried = _failing(desk)
    desk.add("1-0", "payload", "old letter", stream=desk.dlq)
    return messages.dead(desk.keys, desk.leased("t1"), [(main, CHANGED), (retried, CHANGED)])


def quarantine_mark(desk: Desk) -> Call:
    main = desk.pending("1-0", "2-0")
    retried = desk.pending_retry("1-0")
    desk.own("t1")
    desk.do("HSET", desk.fence, "session", "s1", "quarantine", "1")
    done = [main[0], *retried]
    return messages.quarantine_mark(desk.keys, desk.leased("t1"), "s1", main[1], done)


def quarantine_mark_first(desk: Desk) -> Call:
    """Nothing to acknowledge yet."""
    place = desk.pending("1-0")[0]
    desk.own("t1")
    desk.do("HSET", desk.fence, "session", "s1", "quarantine", "1")
    return messages.quarantine_mark(desk.keys, desk.leased("t1"), "s1", place, [])


def message_promote(desk: Desk) -> Call:
    desk.groups()
    desk.do("HSET", desk.items, "m:9-0", b"\x92\xa7payload\xa1x")
    desk.do("ZADD", desk.delayed, 1, "m:1-0")
    desk.do("HSET", desk.items, "m:1-0", b"\x92\xa7payload\xa1x")
    return messages.promote_retries(desk.keys, desk.unit, 10)


def message_promote_orphan(desk: Desk) -> Call:
    """The first due entry has lost its item, and is removed before anything is written."""
    call = message_promote(desk)
    desk.do("ZADD", desk.delayed, 0, "m:0-1")
    return call


def message_promote_scheduled(desk: Desk) -> Call:
    desk.add("1-0")
    desk.do("ZADD", desk.scheduled, 1, "send")
    desk.do("HSET", desk.scheduled_items, "send", b"\x92\xa7payload\xa1x")
    return messages.promote_scheduled(desk.keys, desk.unit.topic, desk.unit.partition, 10)


def stream_trim(desk: Desk) -> Call:
    desk.groups()
    desk.add("1-0")
    desk.fetch()
    desk.do("XACK", desk.stream, desk.unit.group, "1-0")
    desk.do("HSET", desk.trim, "first", "1-0")
    return trim_all(desk)


def stream_trim_retry(desk: Desk) -> Call:
    desk.groups()
    desk.pending_retry("1-0")
    desk.do("XACK", desk.retry, desk.unit.group, "1-0")
    return retention.trim_retry(desk.keys, desk.unit, 1000)


def stream_drop(desk: Desk) -> Call:
    desk.groups()
    desk.add("1-0")
    desk.do("HSET", desk.trim, "first", "1-0")
    return drop_all(desk)


def missing_settle(desk: Desk) -> Call:
    desk.pending("1-0", "2-0")
    desk.do("XTRIM", desk.stream, "MINID", "2-0")
    desk.do("HSET", desk.trim, "first", "2-0")
    desk.do("HSET", desk.attempts, "m:1-0:c", "1")
    return retention.settle_missing(desk.keys, desk.unit, 10)


def dead_replay(desk: Desk) -> Call:
    desk.groups()
    desk.add("7-0", "payload", "x", "group", "hits", "reason", "attempts", stream=desk.dlq)
    topic, partition, group = desk.unit
    return dead.replay(desk.keys, topic, partition, "7-0", group, {b"retryCount": b"0"})


def dead_replay_everyone(desk: Desk) -> Call:
    desk.groups()
    desk.add("7-0", "payload", "x", "group", "hits", stream=desk.dlq)
    return dead.replay(desk.keys, desk.unit.topic, desk.unit.partition, "7-0", None, {})


def dead_purge(desk: Desk) -> Call:
    desk.add("7-0", stream=desk.dlq)
    return dead.purge_before(desk.keys, desk.unit.topic, desk.unit.partition, "8", 10)


def dead_mark(desk: Desk) -> Call:
    desk.add("7-0", stream=desk.dlq)
    return dead.mark(desk.keys, desk.unit.topic, desk.unit.partition, "7-0", "other/1")


def dead_mark_back(desk: Desk) -> Call:
    desk.link.run(dead_mark(desk))
    return dead.mark(desk.keys, desk.unit.topic, desk.unit.partition, "7-0", "")


def dead_deliver(desk: Desk) -> Call:
    desk.groups()
    return dead.deliver(desk.keys, *desk.unit, {b"payload": b"x"}, "dlq:other:0:1-0", 60.0)


def known(desk: Desk) -> str:
    """Register the topic with two partitions; return its meta key."""
    meta = desk.keys.meta(desk.unit.topic)
    desk.do("HSET", meta, "partitionCount", 2)
    return meta


def message_append(desk: Desk) -> Call:
    desk.groups()
    desk.add("1-0")
    topic, partition, _ = desk.unit
    call = publishing.append(desk.keys, topic, partition, 2, known(desk), alone=True)
    return call._replace(argv=(*call.argv, b"x", b"y"))


def message_publish(desk: Desk) -> Call:
    desk.groups()
    for entry_id in ("1-0", "2-0"):
        desk.add(entry_id)
    desk.do("XACK", desk.stream, desk.unit.group, *desk.fetch(1))
    topic, partition, _ = desk.unit
    return publishing.publish(
        *(desk.keys, topic, partition, [[b"payload", b"x"]], "order-1", 60.0, 2),
        partitions=2,
        meta=known(desk),
    )


def message_schedule(desk: Desk) -> Call:
    desk.do("ZADD", desk.scheduled, 9e12, "other")
    desk.do("HSET", desk.scheduled_items, "other", b"\x92\xa7payload\xa1x")
    topic, partition, _ = desk.unit
    fields = [b"payload", b"x"]
    return publishing.schedule(
        *(desk.keys, topic, partition, 5.0, "send-1", fields, "order-1", 60.0),
        partitions=2,
        meta=known(desk),
    )


def topic_create(desk: Desk) -> Call:
    return topics.creation(desk.keys, "access", Topic(partitions=3))


def topic_configure(desk: Desk) -> Call:
    desk.link.run(topic_create(desk))
    seen = topics.stored(desk.store, "access")
    return topics.configuration(desk.keys, "access", seen, {"archive": "required"})


def topic_retire(desk: Desk) -> Call:
    desk.link.run(topic_create(desk))
    return topics.retirement(desk.keys, "access")


def growth_start(desk: Desk) -> Call:
    desk.link.run(topic_create(desk))
    return growth.begin(desk.keys, "access", 3, 6, "t1")


def growth_switch(desk: Desk) -> Call:
    desk.link.run(growth_start(desk))
    return growth.switch(desk.keys, "access", "t1", range(3, 6))


def growth_mark(desk: Desk) -> Call:
    desk.link.run(growth_switch(desk))
    return growth.mark(desk.keys, "access", "t1", ["1-0", "2-0", "0-0"])


def growth_finish(desk: Desk) -> Call:
    desk.link.run(growth_mark(desk))
    return growth.end(desk.keys, "access", "t1")


def group_reset(desk: Desk) -> Call:
    """A group with all kinds of data is taken from its owner."""
    _with_everything(desk)
    return groups.reset(
        desk.keys, desk.unit, "0-0", drop_retries=True, force=True, keeper="grow", token="t9"
    )


def group_delete(desk: Desk) -> Call:
    _with_everything(desk)
    return groups.delete(desk.keys, desk.unit, force=True, token="t9")


def message_find(desk: Desk) -> Call:
    """A dead letter of the message, and one of another."""
    desk.groups()
    for original in ("1-0", "2-0"):
        desk.do("XADD", desk.dlq, "*", "payload", "x", "originalId", original, "group", "g")
    return tracing.find(desk.dlq, "1-0", "0-1")


def stream_page(desk: Desk) -> Call:
    desk.groups()
    desk.add("1-0", "payload", "x")
    return tracing.page(desk.stream, "-", "+", 10, newest=False)


def retry_page(desk: Desk) -> Call:
    _set_aside(desk)
    return retries.page(desk.keys, desk.unit, (0, ""), 10)


def retry_hasten(desk: Desk) -> Call:
    _set_aside(desk)
    return retries.hasten(desk.keys, desk.unit, ["m:1-0"])


def retry_cancel(desk: Desk) -> Call:
    _set_aside(desk)
    desk.add("1-0", "payload", "old letter", stream=desk.dlq)
    return retries.cancel(desk.keys, desk.unit, [("m:1-0", {b"reason": b"cancelled"})], drop=False)


def retry_cancel_drop(desk: Desk) -> Call:
    _set_aside(desk)
    desk.add("1-0", "payload", "old letter", stream=desk.dlq)
    return retries.cancel(desk.keys, desk.unit, [("m:1-0", {})], drop=True)


def _with_everything(desk: Desk) -> None:
    _failing(desk)
    _set_aside(desk)
    desk.do("HSET", desk.trim, "first", "1-0", "floor:hits", "1-0")


def _set_aside(desk: Desk) -> None:
    desk.do("ZADD", desk.delayed, 9e12, "m:1-0")
    desk.do("HSET", desk.items, "m:1-0", b"\x92\xa7payload\xa1x")


def member_heartbeat(desk: Desk) -> Call:
    desk.do("ZADD", desk.keys.members("default"), 1, "silent")
    desk.do("HSET", desk.keys.info("default"), "silent", '{"nonce":"n0"}')
    desk.do("HSET", desk.keys.orders("default"), "rebalance", "{}")
    return members.heartbeat(desk.keys, "default", "west-1", "n1", {"weight": 1}, 9.0, ["silent"])


def control_change(desk: Desk) -> Call:
    desk.do("HSET", desk.keys.orders("default"), "drain:west-1", "{}")
    return directives.change(
        desk.keys, "default", "pause:access/*/*", by="ops@west", remove=["drain:west-1"]
    )


def message_adopt(desk: Desk) -> Call:
    """A foreign client has read an entry, and streamqd has owned the unit before."""
    desk.groups()
    desk.add("1-0")
    desk.fetch(1, "foreign")
    desk.do("HSET", desk.fence, "epoch", "7")
    return adoption.adopt(desk.keys, desk.unit, "m")


def member_leave(desk: Desk) -> Call:
    desk.link.run(member_heartbeat(desk))
    return members.leave(desk.keys, "default", "west-1", "n1")


def partition_snapshot(desk: Desk) -> Call:
    settle_retry(desk)
    desk.add("1-0", stream=desk.dlq)
    desk.do("ZADD", desk.scheduled, 1, "send")
    return messages.snapshot(desk.keys, desk.unit)


def archive_advance(desk: Desk) -> Call:
    desk.do("HSET", desk.trim, "archived", "1-0")
    return archives.advance(desk.keys, *desk.unit[:2], "2-0")


def query_position(desk: Desk) -> Call:
    desk.add("1-0")
    desk.do("XGROUP", "CREATE", desk.stream, "spark:q", "0")
    desk.do("HSET", desk.trim, "holds:spark:q", "1")
    return spark.query_position(desk.keys, *desk.unit[:2], "q", "1-0", 1, hold=True)


def query_position_new(desk: Desk) -> Call:
    desk.do("HSET", desk.trim, "first", "1-0")
    desk.add("1-0")
    return spark.query_position(desk.keys, *desk.unit[:2], "q", "1-0", 1, hold=False)


def outbox_take(desk: Desk) -> Call:
    desk.do("HSET", desk.keys.outbox("shop"), "epoch", 1)
    desk.do("SET", desk.keys.outbox_lease("shop"), "t0")
    return outbox.take(desk.keys, "shop", "t1", TTL, "west-1", 0, "t0")


def outbox_keep(desk: Desk) -> Call:
    desk.link.run(outbox_take(desk))
    return outbox.keep(desk.keys, "shop", "t1", TTL, {"rows": 1})


def outbox_keep_late(desk: Desk) -> Call:
    call = outbox_keep(desk)
    desk.do("DEL", desk.keys.outbox_lease("shop"))
    return call


def outbox_drop(desk: Desk) -> Call:
    desk.link.run(outbox_take(desk))
    return outbox.drop(desk.keys, "shop", "t1")


def outbox_fence(desk: Desk) -> Call:
    desk.do("HSET", desk.keys.outbox_record(*desk.unit[:2], "shop"), "epoch", 4, "rows", "0" * 48)
    return outbox.fence(desk.keys, "shop", *desk.unit[:2], 5, 2, known(desk))


def outbox_publish(desk: Desk) -> Call:
    """One row is in the record, one is due later, and one is ready."""
    desk.link.run(outbox_fence(desk))
    desk.groups()
    desk.add("1-0")
    desk.do("ZADD", desk.scheduled, 9e12, "other")
    desk.do("HSET", desk.scheduled_items, "other", b"\x92\xa7payload\xa1x")
    rows = [
        outbox.OutgoingRow(number, f"{number:032x}", due, [b"payload", b"x"])
        for number, due in enumerate((None, 9_000_000_000_000, None))
    ]
    meta = desk.keys.meta(desk.unit.topic)
    return outbox.publish(desk.keys, "shop", *desk.unit[:2], rows, 5, 2, meta, max_backlog=9)


def outbox_publish_late(desk: Desk) -> Call:
    """The first row to write is due later."""
    outbox_publish(desk)
    desk.do("HDEL", desk.keys.outbox_record(*desk.unit[:2], "shop"), "rows")
    rows = [outbox.OutgoingRow(1, "f" * 32, 9_000_000_000_000, [b"payload", b"x"])]
    meta = desk.keys.meta(desk.unit.topic)
    return outbox.publish(desk.keys, "shop", *desk.unit[:2], rows, 5, 2, meta)


def pipeline_lease_take(desk: Desk) -> Call:
    """The key could also be extended, but without a lease there is nothing to break."""
    desk.link.run(archives.take_lease(desk.keys, desk.unit.topic, "archive", "t1", TTL))
    desk.do("PERSIST", desk.keys.pipeline(desk.unit.topic, "archive"))
    return archives.take_lease(desk.keys, desk.unit.topic, "archive", "t1", TTL)


def pipeline_lease_take_free(desk: Desk) -> Call:
    return archives.take_lease(desk.keys, desk.unit.topic, "archive", "t1", TTL)


def pipeline_lease_keep(desk: Desk) -> Call:
    pipeline_lease_take(desk)
    return archives.keep_lease(desk.keys, desk.unit.topic, "archive", "t1", TTL)


def pipeline_lease_drop(desk: Desk) -> Call:
    pipeline_lease_take(desk)
    return archives.drop_lease(desk.keys, desk.unit.topic, "archive", "t1")


def trim_all(desk: Desk, **changed: object) -> Call:
    """Trim all entries that every group has acknowledged."""
    arguments = {
        "keep_from": "",
        "max_length": None,
        "archive": False,
        "limit": 1000,
        "expected": [desk.unit.group],
    }
    topic, partition, _ = desk.unit
    return retention.trim(desk.keys, topic, partition, **{**arguments, **changed})  # type: ignore[arg-type]


def drop_all(desk: Desk, **changed: object) -> Call:
    """Drop everything, acknowledged or not."""
    arguments = {
        "drop_before": "999999999999-0",
        "max_length": None,
        "archive": False,
        "limit": 1000,
        "expected": [desk.unit.group],
    }
    topic, partition, _ = desk.unit
    return retention.drop(desk.keys, topic, partition, **{**arguments, **changed})  # type: ignore[arg-type]


def stream_step(desk: Desk) -> Call:
    desk.add("1-0")
    return spark.step(desk.stream, "0-0", "9-0", 10)


def staged(desk: Desk) -> None:
    """Two rows of a task."""
    key = desk.keys.staged(*desk.unit[:2], "q", "a")
    desk.do("XADD", key, "0-1", "payload", "1")
    desk.do("XADD", key, "0-2", "payload", "2")


def sink_start(desk: Desk) -> Call:
    """The previous batch is published."""
    desk.do("HSET", desk.keys.sink("q"), "batch", "3", "attempt:a:access", "4")
    return spark.begin(desk.keys, "q", 4, {"a": {"access": [0]}}, 60, 2)


def sink_publish(desk: Desk) -> Call:
    """A row is already in the partition."""
    staged(desk)
    desk.add("1-0")
    return spark.publish(desk.keys, *desk.unit[:2], "q", "a", 60)


def sink_finish(desk: Desk) -> Call:
    desk.link.run(sink_start(desk))
    return spark.end(desk.keys, "q", 4, 60)


def _failing(desk: Desk) -> tuple[bytes, bytes]:
    main = desk.pending("1-0")[0]
    retried = desk.pending_retry("1-0")[0]
    desk.own("t1")
    desk.do("HSET", desk.attempts, main + b":c", "1")
    return main, retried


TICK = 1_700_000_000_000


def kept_schedule(desk: Desk, due: int = TICK, origin: str = timed.FILE) -> tuple[str, int]:
    """Store a schedule that is due. Return its place."""
    place = desk.unit.topic, desk.unit.partition
    call = timed.declare(
        desk.keys, place, "tick", "h1", "{}", origin=origin, since_unix_ms=1, next_unix_ms=due
    )
    desk.link.run(call)
    return place


def tick(due: int = TICK, following: int | None = TICK + 1_000, **more: Any) -> timed.DueTick:
    """Return a due tick of a schedule."""
    plain = timed.DueTick("tick", "h1", due, due, following, 0, ["payload", "x"])
    return plain._replace(**more)


def schedule_page(desk: Desk) -> Call:
    return timed.page(desk.keys, kept_schedule(desk), 10)


def schedule_fire(desk: Desk) -> Call:
    """The last message was handled, and others of the group wait for their retries."""
    place = kept_schedule(desk)
    desk.pending("1-0")
    desk.do("XACK", desk.stream, "hits", "1-0")
    desk.pending_retry("1-0")
    desk.do("ZADD", desk.delayed, 9e12, "m:9-0")
    desk.do("HSET", desk.items, "m:9-0", b"\x92\xa7payload\xa1x")
    desk.do("HSET", desk.keys.schedules_last(*place), "tick:id", "1-0")
    desk.do("HSET", desk.keys.meta("access"), "partitionCount", "3")
    return timed.fire(desk.keys, place, [tick()], group="hits", partitions=3)


def schedule_run(desk: Desk) -> Call:
    place = kept_schedule(desk)
    desk.do("HSET", desk.keys.meta("access"), "partitionCount", "3")
    return timed.run(desk.keys, place, "tick", "h1", TICK + 1, ["payload", "x"], 3)


def schedule_declare(desk: Desk) -> Call:
    desk.do("ZADD", desk.keys.schedules_due("access", 0), 9e12, "other")
    desk.do("HSET", desk.keys.schedules("access", 0), "other:hash", "h")
    return timed.declare(
        desk.keys, ("access", 0), "tick", "h1", "{}", origin="file", since_unix_ms=1, next_unix_ms=9
    )


def schedule_stamp(desk: Desk) -> Call:
    place = kept_schedule(desk)
    kept_schedule(desk)
    desk.link.run(timed.hold(desk.keys, place, "tick", timed.ORPHANED))
    desk.do("ZADD", desk.keys.schedules_due(*place), 9e12, "other")
    return timed.stamp(desk.keys, place, [("tick", "h1")])


def schedule_hold(desk: Desk) -> Call:
    return timed.hold(desk.keys, kept_schedule(desk), "tick", timed.PAUSED)


def schedule_release(desk: Desk) -> Call:
    desk.link.run(schedule_hold(desk))
    desk.do("ZADD", desk.keys.schedules_due("access", 0), 9e12, "other")
    return timed.release(desk.keys, ("access", 0), "tick")


def schedule_drop(desk: Desk) -> Call:
    place = kept_schedule(desk)
    desk.do("HSET", desk.keys.schedules_last(*place), "tick:id", "1-0")
    return timed.drop(desk.keys, place, "tick")


# The outcome of each with full memory: scripts that must not wait for memory are accepted.
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
    message_promote_scheduled: "OOM",
    stream_trim: "OK",
    stream_trim_retry: "OK",
    stream_drop: "OK",
    missing_settle: "OK",
    dead_replay: "OOM",
    dead_replay_everyone: "OOM",
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
    retry_hasten: "OOM",
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
    pipeline_lease_take: "OK",
    pipeline_lease_take_free: "OK",
    pipeline_lease_keep: "OK",
    pipeline_lease_drop: "OK",
    outbox_take: "OK",
    outbox_keep: "OK",
    outbox_keep_late: "OK",
    outbox_drop: "OK",
    outbox_fence: "OOM",
    outbox_publish: "OOM",
    outbox_publish_late: "OOM",
}
# Keys that a scenario names but does not change, or does not need.
UNTOUCHED: set[tuple[Scenario, str]] = {
    (stream_trim_retry, "trim"),
    (lease_acquire, "retry"),
    (lease_acquire_retried, "stream"),
    (lease_acquire_mine, "attempts"),
    (lease_acquire_mine, "stream"),
    (lease_acquire_mine, "retry"),
}
