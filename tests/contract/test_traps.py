"""Traces of protocol errors. Each test fails if a certain line of one script is removed.

Similar traces are in test_message_recover, test_every_script, test_message_reclaim and
test_message_promote.
"""

from __future__ import annotations

from streamqd.store import dead, leases, messages
from streamqd.store.messages import Recovered
from streamqd.store.scripts import Reply
from tests.contract.harness import TTL, Harness
from tests.contract.scenarios import trim_all


def pending_now(harness: Harness, token: str) -> list[messages.PendingEntry]:
    call = messages.recover(harness.keys, harness.leased(token), f"of {token}", True, "", "", 100)
    page = Recovered.parse(Reply("OK", harness.expect("message_recover", "OK", call)))
    return [*page.main, *page.retry]


def test_late_acquire_does_not_restore_an_old_token(harness: Harness) -> None:
    places = harness.pending("1-0", "2-0")
    late = leases.acquire(harness.keys, harness.leased("a", 0), TTL, "A")
    harness.expect("lease_acquire", "OK", late)
    harness.expect("lease_acquire", "MINE", late)
    # A is stopped, and its lease expires. B takes over, handles the first entry and releases the
    # lease.
    harness.do("DEL", harness.lease)
    epoch = int(harness.state()["fence"]["epoch"])
    harness.expect(
        "lease_acquire", "OK", leases.acquire(harness.keys, harness.leased("b", epoch), TTL, "B")
    )
    harness.expect("settle_ack", "OK", messages.ack(harness.keys, harness.leased("b"), places[:1]))
    harness.expect("lease_acquire", "HELD", late)
    harness.expect("lease_release", "OK", leases.release(harness.keys, harness.leased("b")))
    # A copy of A's call arrives from a socket that was closed a long time ago.
    harness.expect("lease_acquire", "MOVED", late)
    harness.expect(
        "settle_ack", "FENCED", messages.ack(harness.keys, harness.leased("a"), places[1:])
    )


def test_repeated_report_of_a_crash_charges_once(harness: Harness) -> None:
    places = harness.pending("1-0", "2-0")
    harness.own("t1")
    told = leases.refence(
        harness.keys, harness.leased("t1"), "t2", TTL, places[1], b"signal 11", places[:1]
    )
    for _ in range(3):
        assert harness.expect("lease_refence", "OK", told)[1] == 1
    # The next child dies of the same entry. Then the first call arrives a second time.
    again = leases.refence(
        harness.keys, harness.leased("t2"), "t3", TTL, places[1], b"signal 11", []
    )
    assert harness.expect("lease_refence", "OK", again)[1] == 2
    harness.expect("lease_refence", "FENCED", told)
    assert [entry.crashes for entry in pending_now(harness, "t3")] == [2]


def test_equal_ids_in_both_streams_stay_two_messages(harness: Harness) -> None:
    harness.groups()
    harness.add("1-0", "payload", "main")
    harness.add("1-0", "payload", "retried", stream=harness.retry)
    harness.fetch()
    harness.fetch(stream=harness.retry)
    harness.own("t1")
    items = [(place, 0.0, {b"originalId": b"1-0"}) for place in (b"m:1-0", b"r:1-0")]
    call = messages.retry(harness.keys, harness.leased("t1"), items)
    harness.expect_entries("settle_retry", ["MOVED", "MOVED"], call)
    harness.expect(
        "message_promote", "OK", messages.promote_retries(harness.keys, harness.assignment, 10)
    )
    harness.fetch(stream=harness.retry)
    assert sorted(entry.fields[1] for entry in pending_now(harness, "t1") if entry.fields) == [
        b"main",
        b"retried",
    ]


def test_crash_count_survives_retry_dead_letter_and_replay(harness: Harness) -> None:
    place = harness.pending("1-0")[0]
    harness.own("t1")
    harness.expect(
        "lease_refence",
        "OK",
        leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, place, b"signal 9", []),
    )
    found = pending_now(harness, "t2")[0]
    changed = {b"originalId": b"1-0", b"crashCount": b"%d" % found.crashes}
    call = messages.retry(harness.keys, harness.leased("t2"), [(place, 0.0, changed)])
    harness.expect_entries("settle_retry", ["MOVED"], call)
    harness.expect(
        "message_promote", "OK", messages.promote_retries(harness.keys, harness.assignment, 10)
    )
    harness.fetch(stream=harness.retry)
    found = pending_now(harness, "t2")[0]
    assert found.fields is not None
    assert found.fields[2:] == [b"originalId", b"1-0", b"crashCount", b"1"]
    assert found.crashes == 0
    why = {b"group": b"hits", b"reason": b"crashes"}
    call = messages.dead(harness.keys, harness.leased("t2"), [(b"r:" + found.id, why)])
    letter = harness.expect_entries("settle_dead", ["MOVED"], call).dead_letters[0].decode()
    assert harness.state()["dlq"].entries[letter]["crashCount"] == b"1"
    replay = dead.replay(harness.keys, "access", 0, letter, "hits", {b"crashCount": b"0"})
    harness.expect("dead_replay", "OK", replay)
    harness.fetch(stream=harness.retry)
    fields = pending_now(harness, "t2")[0].fields
    assert fields is not None
    assert dict(zip(fields[::2], fields[1::2], strict=True)) == {
        b"payload": b"body of 1-0",
        b"originalId": b"1-0",
        b"crashCount": b"0",
    }


def test_late_release_does_not_free_the_next_owners_assignment(harness: Harness) -> None:
    epoch = harness.own("t1")
    late = leases.release(harness.keys, harness.leased("t1"))
    harness.expect("lease_release", "OK", late)
    harness.own("t2", seen_epoch=epoch)
    harness.expect("lease_release", "FENCED", late)
    assert harness.state()["lease"] == b"t2"


def test_mark_is_charged_once(harness: Harness) -> None:
    place = harness.pending("1-0")[0]
    harness.own("old")
    harness.do("DEL", harness.lease)
    epoch = int(harness.state()["fence"]["epoch"])
    harness.own("t1", seen_epoch=epoch)
    pending_now(harness, "t1")
    mark = messages.quarantine_mark(harness.keys, harness.leased("t1"), "of t1", place, [])
    harness.expect("quarantine_mark", "OK", mark)
    # The child dies while it runs the entry, so the refence charges it. Then the whole host is
    # lost.
    harness.expect(
        "lease_refence",
        "OK",
        leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, place, b"signal 9", []),
    )
    harness.expect("quarantine_mark", "FENCED", mark)
    harness.do("DEL", harness.lease)
    epoch = int(harness.state()["fence"]["epoch"])
    taken = leases.acquire(harness.keys, harness.leased("t3", epoch), TTL, "B")
    assert harness.expect("lease_acquire", "OK", taken)[2] == b""
    assert [entry.crashes for entry in pending_now(harness, "t3")] == [1]
    # The takeover charges a mark once if its owner did not clear it.
    call = messages.quarantine_mark(harness.keys, harness.leased("t3"), "of t3", place, [])
    harness.expect("quarantine_mark", "OK", call)
    harness.do("DEL", harness.lease)
    epoch = int(harness.state()["fence"]["epoch"])
    taken = leases.acquire(harness.keys, harness.leased("t4", epoch), TTL, "C")
    assert harness.expect("lease_acquire", "OK", taken)[2] == place
    harness.expect("lease_acquire", "MINE", taken)
    assert [entry.crashes for entry in pending_now(harness, "t4")] == [2]


def test_partition_is_empty_if_all_is_acknowledged(harness: Harness) -> None:
    harness.groups()
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "0")
    entry_id = harness.do("XADD", harness.stream, "*", "payload", "x")
    harness.fetch()
    harness.do("XACK", harness.stream, "hits", entry_id)
    # At first, the other group has not read the entry. Then the entry is pending there, and finally
    # it is handled.
    assert harness.expect("stream_trim", "OK", trim_all(harness))[0] == 0
    harness.do("XREADGROUP", "GROUP", "audit", "w", "STREAMS", harness.stream, ">")
    assert harness.expect("stream_trim", "OK", trim_all(harness))[:3:2] == [0, b"audit"]
    harness.do("XACK", harness.stream, "audit", entry_id)
    assert harness.expect("stream_trim", "OK", trim_all(harness))[0] == 1
    assert harness.do("XLEN", harness.stream) == 0
