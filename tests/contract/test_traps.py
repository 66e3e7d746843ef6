"""The traps of the protocol, each as a trace that shows it.

Each goes wrong if one line of one script is removed. T1 is in test_message_recover,
T14 and T18 in test_every_script, T5 in test_message_reclaim, T7 in test_message_promote.
"""

from __future__ import annotations

from streamqd.store import dead, leases, messages
from streamqd.store.messages import Recovered
from streamqd.store.scripts import Reply
from tests.contract.desk import TTL, Desk
from tests.contract.scenarios import trim_all


def pending_now(desk: Desk, token: str) -> list[messages.PendingEntry]:
    call = messages.recover(desk.keys, desk.leased(token), f"of {token}", True, "", "", 100)
    page = Recovered.parse(Reply("OK", desk.expect("message_recover", "OK", call)))
    return [*page.main, *page.retry]


def test_t2_a_late_acquire_does_not_put_an_old_token_back(desk: Desk) -> None:
    places = desk.pending("1-0", "2-0")
    late = leases.acquire(desk.keys, desk.leased("a", 0), TTL, "A")
    desk.expect("lease_acquire", "OK", late)
    desk.expect("lease_acquire", "MINE", late)
    # A stands still; its lease expires; B takes over, handles the first entry and releases.
    desk.do("DEL", desk.lease)
    epoch = int(desk.state()["fence"]["epoch"])
    desk.expect("lease_acquire", "OK", leases.acquire(desk.keys, desk.leased("b", epoch), TTL, "B"))
    desk.expect("settle_ack", "OK", messages.ack(desk.keys, desk.leased("b"), places[:1]))
    desk.expect("lease_acquire", "HELD", late)
    desk.expect("lease_release", "OK", leases.release(desk.keys, desk.leased("b")))
    # A copy of A's call arrives from a socket that was closed long ago.
    desk.expect("lease_acquire", "MOVED", late)
    desk.expect("settle_ack", "FENCED", messages.ack(desk.keys, desk.leased("a"), places[1:]))


def test_t4_repeated_report_of_a_death_charges_once(desk: Desk) -> None:
    places = desk.pending("1-0", "2-0")
    desk.own("t1")
    told = leases.refence(
        desk.keys, desk.leased("t1"), "t2", TTL, places[1], b"signal 11", places[:1]
    )
    for _ in range(3):
        assert desk.expect("lease_refence", "OK", told)[1] == 1
    # The next child dies of the same entry. Then the first call arrives once more.
    again = leases.refence(desk.keys, desk.leased("t2"), "t3", TTL, places[1], b"signal 11", [])
    assert desk.expect("lease_refence", "OK", again)[1] == 2
    desk.expect("lease_refence", "FENCED", told)
    assert [entry.crashes for entry in pending_now(desk, "t3")] == [2]


def test_t6_equal_ids_in_the_two_streams_are_two_messages_to_the_end(desk: Desk) -> None:
    desk.groups()
    desk.add("1-0", "payload", "main")
    desk.add("1-0", "payload", "retried", stream=desk.retry)
    desk.fetch()
    desk.fetch(stream=desk.retry)
    desk.own("t1")
    items = [(place, 0.0, {b"originalId": b"1-0"}) for place in (b"m:1-0", b"r:1-0")]
    call = messages.retry(desk.keys, desk.leased("t1"), items)
    desk.expect_entries("settle_retry", ["MOVED", "MOVED"], call)
    desk.expect("message_promote", "OK", messages.promote_retries(desk.keys, desk.unit, 10))
    desk.fetch(stream=desk.retry)
    assert sorted(entry.fields[1] for entry in pending_now(desk, "t1") if entry.fields) == [
        b"main",
        b"retried",
    ]


def test_t8_the_crash_count_survives_retry_death_and_replay(desk: Desk) -> None:
    place = desk.pending("1-0")[0]
    desk.own("t1")
    desk.expect(
        "lease_refence",
        "OK",
        leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, place, b"signal 9", []),
    )
    found = pending_now(desk, "t2")[0]
    changed = {b"originalId": b"1-0", b"crashCount": b"%d" % found.crashes}
    call = messages.retry(desk.keys, desk.leased("t2"), [(place, 0.0, changed)])
    desk.expect_entries("settle_retry", ["MOVED"], call)
    desk.expect("message_promote", "OK", messages.promote_retries(desk.keys, desk.unit, 10))
    desk.fetch(stream=desk.retry)
    found = pending_now(desk, "t2")[0]
    assert found.fields is not None
    assert found.fields[2:] == [b"originalId", b"1-0", b"crashCount", b"1"]
    assert found.crashes == 0
    why = {b"group": b"hits", b"reason": b"crashes"}
    call = messages.dead(desk.keys, desk.leased("t2"), [(b"r:" + found.id, why)])
    letter = desk.expect_entries("settle_dead", ["MOVED"], call).letters[0].decode()
    assert desk.state()["dlq"].entries[letter]["crashCount"] == b"1"
    replay = dead.replay(desk.keys, "access", 0, letter, "hits", {b"crashCount": b"0"})
    desk.expect("dead_replay", "OK", replay)
    desk.fetch(stream=desk.retry)
    fields = pending_now(desk, "t2")[0].fields
    assert fields is not None
    assert dict(zip(fields[::2], fields[1::2], strict=True)) == {
        b"payload": b"body of 1-0",
        b"originalId": b"1-0",
        b"crashCount": b"0",
    }


def test_t13_a_late_release_does_not_free_the_next_owners_unit(desk: Desk) -> None:
    epoch = desk.own("t1")
    late = leases.release(desk.keys, desk.leased("t1"))
    desk.expect("lease_release", "OK", late)
    desk.own("t2", seen_epoch=epoch)
    desk.expect("lease_release", "FENCED", late)
    assert desk.state()["lease"] == b"t2"


def test_t15_a_mark_is_charged_once(desk: Desk) -> None:
    place = desk.pending("1-0")[0]
    desk.own("old")
    desk.do("DEL", desk.lease)
    epoch = int(desk.state()["fence"]["epoch"])
    desk.own("t1", seen_epoch=epoch)
    pending_now(desk, "t1")
    mark = messages.quarantine_mark(desk.keys, desk.leased("t1"), "of t1", place, [])
    desk.expect("quarantine_mark", "OK", mark)
    # The child dies while it runs it: charged by the refence. Then the whole host is lost.
    desk.expect(
        "lease_refence",
        "OK",
        leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, place, b"signal 9", []),
    )
    desk.expect("quarantine_mark", "FENCED", mark)
    desk.do("DEL", desk.lease)
    epoch = int(desk.state()["fence"]["epoch"])
    taken = leases.acquire(desk.keys, desk.leased("t3", epoch), TTL, "B")
    assert desk.expect("lease_acquire", "OK", taken)[2] == b""
    assert [entry.crashes for entry in pending_now(desk, "t3")] == [1]
    # A mark that its owner did not clear is charged once, by the takeover.
    call = messages.quarantine_mark(desk.keys, desk.leased("t3"), "of t3", place, [])
    desk.expect("quarantine_mark", "OK", call)
    desk.do("DEL", desk.lease)
    epoch = int(desk.state()["fence"]["epoch"])
    taken = leases.acquire(desk.keys, desk.leased("t4", epoch), TTL, "C")
    assert desk.expect("lease_acquire", "OK", taken)[2] == place
    desk.expect("lease_acquire", "MINE", taken)
    assert [entry.crashes for entry in pending_now(desk, "t4")] == [2]


def test_t16_a_partition_is_empty_when_all_is_acknowledged(desk: Desk) -> None:
    desk.groups()
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "0")
    entry_id = desk.do("XADD", desk.stream, "*", "payload", "x")
    desk.fetch()
    desk.do("XACK", desk.stream, "hits", entry_id)
    # The other group has not read it; then it is pending there; then it is done.
    assert desk.expect("stream_trim", "OK", trim_all(desk))[0] == 0
    desk.do("XREADGROUP", "GROUP", "audit", "w", "STREAMS", desk.stream, ">")
    assert desk.expect("stream_trim", "OK", trim_all(desk))[:3:2] == [0, b"audit"]
    desk.do("XACK", desk.stream, "audit", entry_id)
    assert desk.expect("stream_trim", "OK", trim_all(desk))[0] == 1
    assert desk.do("XLEN", desk.stream) == 0
