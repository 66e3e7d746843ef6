"""Scripts with values that another client wrote: they work without them, or name key and field."""

from __future__ import annotations

import pytest

from streamqd.store import (
    archives,
    dead,
    directives,
    groups,
    leases,
    messages,
    retention,
    retries,
    spark,
    statistics,
)
from streamqd.store.messages import Promoted, Recovered, SettledReply
from streamqd.store.scripts import Reply
from tests.contract.desk import OWNER, TTL, Desk

LAST = "18446744073709551615-18446744073709551615"
NO_NUMBER = ["abc", "", "1e308", "inf", "-1", "0x10", "9" * 26, "7.5"]
NO_ID = ["abc", "", "5", "1-", LAST + "1"]


@pytest.mark.parametrize("epoch", NO_NUMBER)
def test_invalid_epoch_is_reported_with_key_and_field(desk: Desk, epoch: str) -> None:
    """C1, S6: by key and field. Nothing is written, and after its removal the unit works again."""
    desk.groups()
    desk.do("HSET", desk.fence, "epoch", epoch)
    call = leases.acquire(desk.keys, desk.leased("t1", 0), TTL, OWNER)
    error = desk.expect_error("BADVALUE", call)
    assert f"epoch of {desk.fence}" in str(error)
    desk.do("HDEL", desk.fence, "epoch")
    desk.expect("lease_acquire", "OK", call)
    desk.do("HSET", desk.fence, "epoch", epoch)
    call = leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, None, b"", [])
    desk.expect_error("BADVALUE", call)
    desk.expect("lease_renew", "OK", leases.renew(desk.keys, desk.leased("t1"), TTL))
    desk.expect("lease_release", "OK", leases.release(desk.keys, desk.leased("t1")))


def test_group_reset_repairs_an_invalid_epoch(desk: Desk) -> None:
    """C1: it writes a new epoch if it takes several calls."""
    desk.pending("1-0", "2-0")
    desk.do("HSET", desk.fence, "epoch", "zzz")
    call = groups.reset(
        desk.keys, desk.unit, "0-0", drop_retries=False, force=False, keeper="",
        token="t1", at_once=1, part=1,
    )  # fmt: skip
    desk.expect("group_reset", "MORE", call)
    assert desk.do("HGET", desk.fence, "epoch").isdigit()


@pytest.mark.parametrize("count", NO_NUMBER)
def test_invalid_counters_count_as_zero(desk: Desk, count: str) -> None:
    """S6: attempts `:c=abc` made the worker crash in a loop."""
    (place,) = desk.pending("1-0")
    desk.own("t1")
    name = place.decode()
    for field in ("c", "f", "due"):
        desk.do("HSET", desk.attempts, f"{name}:{field}", count)
    call = messages.recover(desk.keys, desk.leased("t1"), "s1", True, "", "", 10)
    page = Recovered.parse(Reply("OK", desk.expect("message_recover", "OK", call)), desk.attempts)
    (entry,) = page.main
    assert (entry.crashes, entry.failures, entry.wait_ms) == (0, 0, 0)
    assert [(bad.key, bad.field) for bad in page.bad] == [
        (desk.attempts, f"{name}:{field}") for field in ("c", "f", "due")
    ]
    desk.expect("settle_note", "OK", messages.note(desk.keys, desk.leased("t1"), [(place, 2, 0.0)]))
    call = leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, place, b"", [])
    assert desk.expect("lease_refence", "OK", call)[1] == 1
    counted = desk.do("HMGET", desk.attempts, f"{name}:c", f"{name}:f")
    assert counted == [b"1", b"2"]


def test_charge_of_a_lost_host_increments_an_invalid_count(desk: Desk) -> None:
    """S6: also if the count is not a number."""
    (place,) = desk.pending("1-0")
    epoch = desk.own("t1")
    desk.do("HSET", desk.fence, "mark", place, "accused", place)
    desk.do("HSET", desk.attempts, place.decode() + ":c", "abc")
    call = leases.acquire(desk.keys, desk.leased("t2", epoch), TTL, OWNER, "t1")
    assert desk.expect("lease_acquire", "OK", call)[2] == place
    assert desk.do("HGET", desk.attempts, place.decode() + ":c") == b"3", "the losses so far"


@pytest.mark.parametrize("last", [*NO_NUMBER, 2**53 - 1, 2**53, 2**63])
def test_directives_apply_despite_an_invalid_last_time(desk: Desk, last: object) -> None:
    """S6: with `last` = 2^53, `pause` printed "is paused" and no member read the directive."""
    key = desk.keys.orders("default")
    desk.do("HSET", key, "last", last)
    for _ in range(2):
        desk.expect("control_change", "OK", directives.change(desk.keys, "default", "pause:a/0/b"))
        found = directives.read(desk.do("HGETALL", key))
        assert found.pauses
        assert not found.unreadable


@pytest.mark.parametrize("floor", NO_ID)
def test_invalid_floor_is_reported_when_it_is_needed(desk: Desk, floor: str) -> None:
    """S6: it is not needed while the group exists."""
    desk.do("HSET", desk.trim, f"floor:{desk.unit.group}", floor)
    call = messages.ensure_group(desk.keys, desk.unit, "0")
    error = desk.expect_error("BADVALUE", call)
    assert f"floor:{desk.unit.group} of {desk.trim}" in str(error)
    desk.do("HDEL", desk.trim, f"floor:{desk.unit.group}")
    desk.expect("group_ensure", "CREATED", call)
    desk.do("HSET", desk.trim, f"floor:{desk.unit.group}", floor)
    desk.expect("group_ensure", "OK", call)


def trim(desk: Desk, *, archive: bool = False, shrink: float | None = None) -> object:
    topic, partition, group = desk.unit
    return retention.trim(
        desk.keys, topic, partition, keep_from="0-0", max_length=None, max_bytes=None,
        shrink_every=shrink, archive=archive, without_groups=False, limit=100, expected=[group],
    )  # fmt: skip


@pytest.mark.parametrize("junk", NO_ID)
def test_trimming_continues_with_a_junk_record(desk: Desk, junk: str) -> None:
    """S6: counts start again at 0. Only a bad archive mark stops it, and is named."""
    desk.pending("1-0")
    record = ("removed", "first", "size", "shrunk", "shrink_from", "shrink_next", "floor:hits")
    for field in record:
        desk.do("HSET", desk.trim, field, junk)
    for _ in range(2):
        desk.expect("stream_trim", "OK", trim(desk, shrink=60.0))
    topic, partition, _ = desk.unit
    figures = statistics.partition_figures(
        desk.link.run(statistics.measure_partition(desk.keys, topic, partition))
    )
    assert figures.bad is None
    desk.do("HSET", desk.trim, "archived", junk)
    error = desk.expect_error("BADVALUE", trim(desk, archive=True))
    assert f"archived of {desk.trim}" in str(error)
    desk.expect("retention_measure", "OK", retention.measure(desk.keys, topic, partition))
    call = archives.advance(desk.keys, topic, partition, "1-0")
    desk.expect("archive_advance", "OK", call)
    desk.expect("stream_trim", "OK", trim(desk, archive=True))


def test_junk_marks_of_a_move_and_a_sink_are_handled(desk: Desk) -> None:
    """S6: the mark of a move counts as new, and a bad batch number is named."""
    topic, partition, _ = desk.unit
    desk.add("1-0", stream=desk.dlq)
    for mark in ("junk", "9" * 400 + " there"):
        desk.do("HSET", desk.keys.moving(topic, partition), "1-0", mark)
        rest = desk.expect("dead_mark", "OK", dead.mark(desk.keys, topic, partition, "1-0", "x"))
        assert dead.Marked.parse(Reply("OK", rest)).age >= 0
    desk.do("HSET", desk.keys.sink("q"), "batch", "junk")
    call = spark.begin(desk.keys, "q", 1, {}, 60, 0)
    assert "batch of " in str(desk.expect_error("BADVALUE", call))


@pytest.mark.parametrize("score", ["inf", "-inf", "1e300"])
def test_infinite_scores_are_handled(desk: Desk, score: str) -> None:
    """S6: of a delayed retry, of a member."""
    desk.groups()
    desk.do("ZADD", desk.delayed, score, "m:1-0")
    call = messages.promote_retries(desk.keys, desk.unit, 1)
    Promoted.parse(Reply("OK", desk.expect("message_promote", "OK", call)))
    call = statistics.measure_unit(desk.keys, desk.unit)
    measured = desk.expect("assignment_measure", "OK", call)
    assert statistics.unit_figures(Reply("OK", measured)) is not None
    rest = desk.expect("retry_page", "OK", retries.page(desk.keys, desk.unit, (0, ""), 10))
    retries.rows(Reply("OK", rest))
    desk.own("t1")
    desk.add("1-0")
    desk.fetch()
    call = messages.retry(desk.keys, desk.leased("t1"), [(b"m:1-0", 5.0, {})])
    SettledReply.parse(Reply("OK", desk.expect("settle_retry", "OK", call)))


def test_junk_item_does_not_hide_other_retries(desk: Desk) -> None:
    """S6: a page of delayed retries shows the other items."""
    code = "redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack({'payload', 5, 7, 8}))"
    desk.do("EVAL", code, 1, desk.items, "m:1-0")
    code = "redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack({'payload', {1}, {2}, 8}))"
    desk.do("EVAL", code, 1, desk.items, "m:2-0")
    desk.do("ZADD", desk.delayed, 5, "m:1-0", 6, "m:2-0")
    rest = desk.expect("retry_page", "OK", retries.page(desk.keys, desk.unit, (0, ""), 10))
    found, _ = retries.rows(Reply("OK", rest))
    assert [(each.payload_bytes, each.fields) for each in found] == [(1, {b"7": b"8"}), (-1, {})]


def test_stream_with_exhausted_ids_can_be_measured_and_read(desk: Desk) -> None:
    """S3: a partition and a retry stream whose ids are exhausted can be measured and read."""
    desk.groups()
    topic, partition, group = desk.unit
    desk.add("5-0")
    for stream in (desk.stream, desk.retry):
        desk.add(LAST, stream=stream)
        desk.fetch(stream=stream)
    desk.own("t1")
    call = statistics.measure_unit(desk.keys, desk.unit)
    found = statistics.unit_figures(Reply("OK", desk.expect("assignment_measure", "OK", call)))
    assert found is not None
    assert (found.pending, found.lag) == (3, 0)
    desk.expect("partition_snapshot", "OK", messages.snapshot(desk.keys, desk.unit))
    desk.expect("retention_measure", "OK", retention.measure(desk.keys, topic, partition))
    call = messages.recover(desk.keys, desk.leased("t1"), "s1", True, "5-0", LAST, 1)
    page = Recovered.parse(Reply("OK", desk.expect("message_recover", "OK", call)))
    assert [entry.id.decode() for entry in page.main] == [LAST]
    call = messages.recover(desk.keys, desk.leased("t1"), "s1", False, LAST, LAST, 1)
    page = Recovered.parse(Reply("OK", desk.expect("message_recover", "OK", call)))
    assert page[3:7] == ([], [], False, False)
    desk.do("XACK", desk.stream, group, "5-0", LAST)
    desk.expect("stream_trim", "OK", trim(desk))
    desk.do("XPENDING", desk.stream, group)
    call = groups.delete(desk.keys, desk.unit, force=True, token="t2")
    desk.expect("group_delete", "OK", call)


def test_reclaim_reaches_the_end_of_a_full_stream(desk: Desk) -> None:
    """S3: its pages come to an end."""
    desk.groups()
    desk.add(LAST)
    desk.fetch(consumer="stranger")
    desk.own("t1")
    desk.do("HSET", desk.fence, "session", "s1")
    call = messages.reclaim(
        desk.keys, desk.leased("t1"), "s1", "m", 1000.0, 10, (b"stranger", LAST.encode())
    )
    assert desk.expect("message_reclaim", "OK", call)[0] == []
