"""Scripts ignore bad values of other clients, or report their key and field."""

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
from tests.contract.harness import OWNER, TTL, Harness

LAST = "18446744073709551615-18446744073709551615"
NO_NUMBER = ["abc", "", "1e308", "inf", "-1", "0x10", "9" * 26, "7.5"]
NO_ID = ["abc", "", "5", "1-", LAST + "1"]


@pytest.mark.parametrize("epoch", NO_NUMBER)
def test_invalid_epoch_is_reported_with_key_and_field(harness: Harness, epoch: str) -> None:
    """The call writes nothing, and the assignment works again once the epoch has been removed."""
    harness.groups()
    harness.do("HSET", harness.fence, "epoch", epoch)
    call = leases.acquire(harness.keys, harness.leased("t1", 0), TTL, OWNER)
    error = harness.expect_error("BADVALUE", call)
    assert f"epoch of {harness.fence}" in str(error)
    harness.do("HDEL", harness.fence, "epoch")
    harness.expect("lease_acquire", "OK", call)
    harness.do("HSET", harness.fence, "epoch", epoch)
    call = leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", [])
    harness.expect_error("BADVALUE", call)
    harness.expect("lease_renew", "OK", leases.renew(harness.keys, harness.leased("t1"), TTL))
    harness.expect("lease_release", "OK", leases.release(harness.keys, harness.leased("t1")))


def test_group_reset_repairs_an_invalid_epoch(harness: Harness) -> None:
    """A reset that takes several calls writes a new epoch, so it repairs an invalid one."""
    harness.pending("1-0", "2-0")
    harness.do("HSET", harness.fence, "epoch", "zzz")
    call = groups.reset(
        harness.keys, harness.assignment, "0-0", drop_retries=False, force=False, keeper="",
        token="t1", at_once=1, part=1,
    )  # fmt: skip
    harness.expect("group_reset", "MORE", call)
    assert harness.do("HGET", harness.fence, "epoch").isdigit()


@pytest.mark.parametrize("count", NO_NUMBER)
def test_invalid_counters_are_read_as_zero(harness: Harness, count: str) -> None:
    """Invalid counters count as zero.

    A count such as `:c=abc` once made the worker crash in a loop.
    """
    (place,) = harness.pending("1-0")
    harness.own("t1")
    name = place.decode()
    for field in ("c", "f", "due"):
        harness.do("HSET", harness.attempts, f"{name}:{field}", count)
    call = messages.recover(harness.keys, harness.leased("t1"), "s1", True, "", "", 10)
    page = Recovered.parse(
        Reply("OK", harness.expect("message_recover", "OK", call)), harness.attempts
    )
    (entry,) = page.main
    assert (entry.crashes, entry.failures, entry.wait_ms) == (0, 0, 0)
    assert [(bad.key, bad.field) for bad in page.bad] == [
        (harness.attempts, f"{name}:{field}") for field in ("c", "f", "due")
    ]
    harness.expect(
        "settle_note", "OK", messages.note(harness.keys, harness.leased("t1"), [(place, 2, 0.0)])
    )
    call = leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, place, b"", [])
    assert harness.expect("lease_refence", "OK", call)[1] == 1
    counted = harness.do("HMGET", harness.attempts, f"{name}:c", f"{name}:f")
    assert counted == [b"1", b"2"]


def test_lease_acquire_charges_despite_an_invalid_count(harness: Harness) -> None:
    """The entry is charged even if its count is not a number."""
    (place,) = harness.pending("1-0")
    epoch = harness.own("t1")
    harness.do("HSET", harness.fence, "mark", place, "accused", place)
    harness.do("HSET", harness.attempts, place.decode() + ":c", "abc")
    call = leases.acquire(harness.keys, harness.leased("t2", epoch), TTL, OWNER, "t1")
    assert harness.expect("lease_acquire", "OK", call)[2] == place
    assert harness.do("HGET", harness.attempts, place.decode() + ":c") == b"3", "the losses so far"


@pytest.mark.parametrize("last", [*NO_NUMBER, 2**53 - 1, 2**53, 2**63])
def test_control_change_ignores_an_invalid_last_time(harness: Harness, last: object) -> None:
    """Members read the directive of `pause`, even if `last` is 2^53."""
    key = harness.keys.directives("default")
    harness.do("HSET", key, "last", last)
    for _ in range(2):
        harness.expect(
            "control_change", "OK", directives.change(harness.keys, "default", "pause:a/0/b")
        )
        found = directives.read(harness.do("HGETALL", key))
        assert found.pauses
        assert not found.unreadable


@pytest.mark.parametrize("floor", NO_ID)
def test_invalid_floor_is_reported_without_its_group(harness: Harness, floor: str) -> None:
    """An invalid floor is reported only if the group is missing. It is not needed otherwise."""
    harness.do("HSET", harness.trim, f"floor:{harness.assignment.group}", floor)
    call = messages.ensure_group(harness.keys, harness.assignment, "0")
    error = harness.expect_error("BADVALUE", call)
    assert f"floor:{harness.assignment.group} of {harness.trim}" in str(error)
    harness.do("HDEL", harness.trim, f"floor:{harness.assignment.group}")
    harness.expect("group_ensure", "CREATED", call)
    harness.do("HSET", harness.trim, f"floor:{harness.assignment.group}", floor)
    harness.expect("group_ensure", "OK", call)


def trim(harness: Harness, *, archive: bool = False, shrink: float | None = None) -> object:
    topic, partition, group = harness.assignment
    return retention.trim(
        harness.keys, topic, partition, keep_from="0-0", max_length=None, max_bytes=None,
        shrink_every=shrink, archive=archive, without_groups=False, limit=100, expected=[group],
    )  # fmt: skip


@pytest.mark.parametrize("junk", NO_ID)
def test_stream_trim_ignores_a_junk_record(harness: Harness, junk: str) -> None:
    """A junk record makes counts restart at 0.

    Only a bad archive mark stops the trim, with an error that names it.
    """
    harness.pending("1-0")
    record = ("removed", "first", "size", "shrunk", "shrink_from", "shrink_next", "floor:hits")
    for field in record:
        harness.do("HSET", harness.trim, field, junk)
    for _ in range(2):
        harness.expect("stream_trim", "OK", trim(harness, shrink=60.0))
    topic, partition, _ = harness.assignment
    figures = statistics.partition_figures(
        harness.link.run(statistics.measure_partition(harness.keys, topic, partition))
    )
    assert figures.bad is None
    harness.do("HSET", harness.trim, "archived", junk)
    error = harness.expect_error("BADVALUE", trim(harness, archive=True))
    assert f"archived of {harness.trim}" in str(error)
    harness.expect("retention_measure", "OK", retention.measure(harness.keys, topic, partition))
    call = archives.advance(harness.keys, topic, partition, "1-0")
    harness.expect("archive_advance", "OK", call)
    harness.expect("stream_trim", "OK", trim(harness, archive=True))


def test_junk_marks_of_moves_and_sinks_are_ignored(harness: Harness) -> None:
    """A junk mark of a move counts as a new move. A bad batch number is an error that names it."""
    topic, partition, _ = harness.assignment
    harness.add("1-0", stream=harness.dlq)
    for mark in ("junk", "9" * 400 + " there"):
        harness.do("HSET", harness.keys.moving(topic, partition), "1-0", mark)
        rest = harness.expect(
            "dead_mark", "OK", dead.mark(harness.keys, topic, partition, "1-0", "x")
        )
        assert dead.Marked.parse(Reply("OK", rest)).age >= 0
    harness.do("HSET", harness.keys.sink("q"), "batch", "junk")
    call = spark.begin(harness.keys, "q", 1, {}, 60, 0)
    assert "batch of " in str(harness.expect_error("BADVALUE", call))


@pytest.mark.parametrize("score", ["inf", "-inf", "1e300"])
def test_infinite_scores_are_accepted(harness: Harness, score: str) -> None:
    """A waiting retry and a member may have an infinite score."""
    harness.groups()
    harness.do("ZADD", harness.delayed, score, "m:1-0")
    call = messages.promote_retries(harness.keys, harness.assignment, 1)
    Promoted.parse(Reply("OK", harness.expect("message_promote", "OK", call)))
    call = statistics.measure_assignment(harness.keys, harness.assignment)
    measured = harness.expect("assignment_measure", "OK", call)
    assert statistics.assignment_figures(Reply("OK", measured)) is not None
    rest = harness.expect(
        "retry_page", "OK", retries.page(harness.keys, harness.assignment, (0, ""), 10)
    )
    retries.rows(Reply("OK", rest))
    harness.own("t1")
    harness.add("1-0")
    harness.fetch()
    call = messages.retry(harness.keys, harness.leased("t1"), [(b"m:1-0", 5.0, {})])
    SettledReply.parse(Reply("OK", harness.expect("settle_retry", "OK", call)))


def test_retry_page_lists_retries_next_to_a_junk_item(harness: Harness) -> None:
    """If one item of a page is junk, the page still lists the other waiting retries."""
    code = "redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack({'payload', 5, 7, 8}))"
    harness.do("EVAL", code, 1, harness.items, "m:1-0")
    code = "redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack({'payload', {1}, {2}, 8}))"
    harness.do("EVAL", code, 1, harness.items, "m:2-0")
    harness.do("ZADD", harness.delayed, 5, "m:1-0", 6, "m:2-0")
    rest = harness.expect(
        "retry_page", "OK", retries.page(harness.keys, harness.assignment, (0, ""), 10)
    )
    found, _ = retries.rows(Reply("OK", rest))
    assert [(each.payload_bytes, each.fields) for each in found] == [(1, {b"7": b"8"}), (-1, {})]


def test_stream_with_exhausted_ids_is_measured_and_read(harness: Harness) -> None:
    """A partition or retry stream whose IDs are exhausted can still be measured and read."""
    harness.groups()
    topic, partition, group = harness.assignment
    harness.add("5-0")
    for stream in (harness.stream, harness.retry):
        harness.add(LAST, stream=stream)
        harness.fetch(stream=stream)
    harness.own("t1")
    call = statistics.measure_assignment(harness.keys, harness.assignment)
    found = statistics.assignment_figures(
        Reply("OK", harness.expect("assignment_measure", "OK", call))
    )
    assert found is not None
    assert (found.pending, found.lag) == (3, 0)
    harness.expect("partition_snapshot", "OK", messages.snapshot(harness.keys, harness.assignment))
    harness.expect("retention_measure", "OK", retention.measure(harness.keys, topic, partition))
    call = messages.recover(harness.keys, harness.leased("t1"), "s1", True, "5-0", LAST, 1)
    page = Recovered.parse(Reply("OK", harness.expect("message_recover", "OK", call)))
    assert [entry.id.decode() for entry in page.main] == [LAST]
    call = messages.recover(harness.keys, harness.leased("t1"), "s1", False, LAST, LAST, 1)
    page = Recovered.parse(Reply("OK", harness.expect("message_recover", "OK", call)))
    assert page[3:7] == ([], [], False, False)
    harness.do("XACK", harness.stream, group, "5-0", LAST)
    harness.expect("stream_trim", "OK", trim(harness))
    harness.do("XPENDING", harness.stream, group)
    call = groups.delete(harness.keys, harness.assignment, force=True, token="t2")
    harness.expect("group_delete", "OK", call)


def test_message_reclaim_reaches_the_greatest_id(harness: Harness) -> None:
    """A page that starts at the greatest possible ID is empty."""
    harness.groups()
    harness.add(LAST)
    harness.fetch(consumer="stranger")
    harness.own("t1")
    harness.do("HSET", harness.fence, "session", "s1")
    call = messages.reclaim(
        harness.keys, harness.leased("t1"), "s1", "m", 1000.0, 10, (b"stranger", LAST.encode())
    )
    assert harness.expect("message_reclaim", "OK", call)[0] == []
