"""group_reset: one position -> another; group_delete: present -> absent."""

from __future__ import annotations

import pytest

from streamqd.store import groups, leases, messages
from streamqd.store.scripts import Call
from tests.contract.harness import TTL, Harness, Stream

TOKEN = "of-the-administration"


def reset(
    harness: Harness,
    after: str,
    *,
    drop: bool = False,
    force: bool = False,
    limit: int = 1000,
    part: int = 0,
) -> Call:
    return groups.reset(
        harness.keys,
        harness.assignment,
        after,
        drop_retries=drop,
        force=force,
        keeper="topic-grow",
        token=TOKEN,
        at_once=limit,
        part=part or limit,
    )


def delete(harness: Harness, *, force: bool = False, limit: int = 1000, part: int = 0) -> Call:
    return groups.delete(
        harness.keys,
        harness.assignment,
        force=force,
        token=TOKEN,
        at_once=limit,
        part=part or limit,
    )


def positions(harness: Harness, key: str) -> dict[str, tuple[str, dict[str, str]]]:
    stream = harness.state()[key]
    assert isinstance(stream, Stream)
    return stream.groups


@pytest.fixture
def busy_group(harness: Harness) -> Harness:
    """Create three entries, of which two are delivered, a retry in each place, and counters."""
    harness.pending("1-0", "2-0")
    harness.add("3-0")
    harness.pending_retry("7-0")
    harness.do("ZADD", harness.delayed, 9e12, "m:0-5")
    harness.do("HSET", harness.items, "m:0-5", b"\x92\xa7payload\xa1x")
    harness.do("HSET", harness.attempts, b"m:1-0:c", "1", b"r:7-0:c", "1")
    harness.do("HSET", harness.trim, "first", "1-0", "floor:hits", "1-0", "archived", "0-3")
    return harness


def test_group_reset_to_earliest_delivers_all_again(busy_group: Harness) -> None:
    before = busy_group.state()

    rest = busy_group.expect("group_reset", "OK", reset(busy_group, "0-0"))

    assert rest == [b"2-0", b"0-0", 2, 0, 0]
    assert positions(busy_group, "stream") == {"hits": ("0-0", {})}
    changes = busy_group.changes(before)
    assert set(changes) == {"stream", "attempts", "trim"}
    assert changes["attempts"] is None
    assert changes["trim"] == {"first": b"1-0", "floor:hits": b"0-1", "archived": b"0-3"}
    assert busy_group.fetch() == [b"1-0", b"2-0", b"3-0"]


def test_group_reset_to_latest_skips_all_messages(busy_group: Harness) -> None:
    rest = busy_group.expect("group_reset", "OK", reset(busy_group, ""))

    assert rest[:3] == [b"2-0", b"3-0", 2]
    assert positions(busy_group, "stream") == {"hits": ("3-0", {})}


def test_group_reset_beyond_the_end_stops_at_the_end(busy_group: Harness) -> None:
    """A reset beyond the end stops at the end, because new entries must not be skipped."""
    assert busy_group.expect("group_reset", "OK", reset(busy_group, "99-0"))[1] == b"3-0"
    busy_group.add("4-0")
    assert busy_group.fetch() == [b"4-0"]


def test_group_reset_keeps_retries_unless_dropped(busy_group: Harness) -> None:
    busy_group.expect("group_reset", "OK", reset(busy_group, "0-0"))
    assert positions(busy_group, "retry") == {"hits": ("7-0", {"7-0": "w"})}
    assert "delayed" in busy_group.state()

    rest = busy_group.expect("group_reset", "OK", reset(busy_group, "0-0", drop=True))

    assert rest == [b"0-0", b"0-0", 0, 1, 1]
    assert positions(busy_group, "retry") == {"hits": ("7-0", {})}
    assert {"delayed", "items"}.isdisjoint(busy_group.state())


@pytest.mark.fault("F26")
def test_group_reset_refuses_an_owned_partition(busy_group: Harness) -> None:
    epoch = busy_group.own("t1")

    rest = busy_group.expect("group_reset", "OWNED", reset(busy_group, "0-0"))

    assert rest == [b"west-1", str(epoch).encode()]


def test_group_reset_refuses_a_growing_topic_even_with_force(busy_group: Harness) -> None:
    busy_group.own("t1", owner="topic-grow")
    before = busy_group.state()

    assert (
        busy_group.expect("group_reset", "OWNED", reset(busy_group, "0-0", force=True))[0]
        == b"topic-grow"
    )
    assert busy_group.state() == before

    busy_group.do("DEL", busy_group.lease)  # the growth has finished and keeps no lease
    busy_group.expect("group_reset", "OK", reset(busy_group, "0-0", force=True))


def test_group_reset_with_force_fences_the_owner(busy_group: Harness) -> None:
    epoch = busy_group.own("t1")
    busy_group.do(
        "HSET", busy_group.fence, "session", "s1", "quarantine", "1", "accused", "m:1-0 m:2-0"
    )

    busy_group.expect("group_reset", "OK", reset(busy_group, "0-0", force=True))

    assert busy_group.state()["fence"].keys() == {"epoch", "since"}
    assert "lease" not in busy_group.state()
    busy_group.expect(
        "settle_ack", "FENCED", messages.ack(busy_group.keys, busy_group.leased("t1"), [b"m:1-0"])
    )
    busy_group.expect(
        "lease_renew", "FENCED", leases.renew(busy_group.keys, busy_group.leased("t1"), TTL)
    )
    # A late copy of its earlier `lease_acquire` does not make it the owner again.
    late = leases.acquire(busy_group.keys, busy_group.leased("t1", 0), TTL, "west-1")
    busy_group.expect("lease_acquire", "MOVED", late)
    assert busy_group.own("t2", seen_epoch=epoch) > epoch


def test_group_reset_fences_an_owner_with_an_expired_lease(busy_group: Harness) -> None:
    """A reset also fences an owner whose lease has expired.

    If it resumes, it must not settle entries that are read again.
    """
    busy_group.own("t1")
    busy_group.do("DEL", busy_group.lease)

    busy_group.expect("group_reset", "OK", reset(busy_group, "0-0"))

    busy_group.expect(
        "lease_renew", "FENCED", leases.renew(busy_group.keys, busy_group.leased("t1"), TTL)
    )


def test_group_reset_does_not_create_a_group(harness: Harness) -> None:
    harness.add("1-0")
    harness.expect("group_reset", "NOGROUP", reset(harness, "0-0"))


def test_group_lost_after_reset_restarts_at_its_position(busy_group: Harness) -> None:
    busy_group.expect("group_reset", "OK", reset(busy_group, "1-0"))
    busy_group.do("XGROUP", "DESTROY", busy_group.stream, "hits")
    busy_group.groups()
    assert busy_group.fetch() == [b"2-0", b"3-0"]


def test_group_reset_and_delete_keep_other_groups(busy_group: Harness) -> None:
    busy_group.do("XGROUP", "CREATE", busy_group.stream, "agents", "1-0")
    busy_group.expect("group_reset", "OK", reset(busy_group, "0-0", drop=True))
    busy_group.expect("group_delete", "OK", delete(busy_group, force=True))
    assert positions(busy_group, "stream") == {"agents": ("1-0", {})}


# --- many pending entries -------------------------------------------------------------------------


@pytest.fixture
def many_pending(harness: Harness) -> Harness:
    """Create five pending entries, one unread entry and three waiting retries."""
    harness.pending(*(f"{n}-0" for n in range(1, 6)))
    harness.add("6-0")
    harness.pending_retry("7-0", "8-0", "9-0")
    return harness


def test_group_reset_drops_pending_entries_in_parts(many_pending: Harness) -> None:
    many_pending.own("t1")
    call = reset(many_pending, "2-0", force=True, limit=2)

    assert many_pending.expect("group_reset", "MORE", call) == [b"5-0", b"2-0", 2]
    left = {f"{n}-0": "w" for n in (3, 4, 5)}
    assert positions(many_pending, "stream") == {"hits": ("2-0", left)}
    assert many_pending.state()["trim"] == {"floor:hits": b"2-1"}

    again = reset(many_pending, "2-0", limit=2)  # the group is still kept for this token
    assert many_pending.expect("group_reset", "MORE", again) == [b"2-0", b"2-0", 2]
    rest = many_pending.expect("group_reset", "OK", again)
    assert rest == [b"2-0", b"2-0", 1, 0, 0]
    assert positions(many_pending, "stream") == {"hits": ("2-0", {})}
    assert len(positions(many_pending, "retry")["hits"][1]) == 3
    assert many_pending.state()["fence"].keys() == {"epoch", "since"}
    assert "lease" not in many_pending.state()
    assert many_pending.fetch() == [b"3-0", b"4-0", b"5-0", b"6-0"]


def test_group_reset_part_may_be_smaller_than_the_limit(many_pending: Harness) -> None:
    call = reset(many_pending, "0-0", limit=4, part=1)
    assert many_pending.expect("group_reset", "MORE", call)[2] == 1
    assert many_pending.expect("group_reset", "OK", call)[2] == 4
    many_pending.fetch()
    call = delete(many_pending, force=True, limit=8, part=1)
    many_pending.expect("group_delete", "MORE", call)
    assert len(positions(many_pending, "stream")["hits"][1]) == 5
    many_pending.expect("group_delete", "OK", call)


def test_group_reset_keeps_its_ownership_between_parts(many_pending: Harness) -> None:
    epoch = many_pending.own("t1")
    many_pending.do("HSET", many_pending.fence, "session", "s1", "mark", "m:1-0", "quarantine", "1")
    many_pending.do("HSET", many_pending.fence, "accused", "m:1-0 m:2-0")

    many_pending.expect("group_reset", "MORE", reset(many_pending, "0-0", force=True, limit=2))

    fence = many_pending.state()["fence"]
    assert fence.keys() == {"token", "epoch", "owner", "since"}
    assert (fence["token"], fence["owner"]) == (TOKEN.encode(), b"group-reset")
    assert int(fence["epoch"]) > epoch
    assert many_pending.do("GET", many_pending.lease) == TOKEN.encode()
    assert 0 < many_pending.do("PTTL", many_pending.lease) <= groups.KEPT_SECONDS * 1000
    ack = messages.ack(many_pending.keys, many_pending.leased("t1"), [b"m:5-0"])
    many_pending.expect("settle_ack", "FENCED", ack)
    taken = leases.acquire(
        many_pending.keys, many_pending.leased("t2", int(fence["epoch"])), TTL, "west-2"
    )
    many_pending.expect("lease_acquire", "HELD", taken)
    many_pending.expect("group_reset", "MORE", reset(many_pending, "0-0", limit=2))
    assert many_pending.state()["fence"] == fence, "one owner all the time"


def test_interrupted_group_reset_loses_nothing(many_pending: Harness) -> None:
    """The next owner handles the remaining pending entries, and everything after the position."""
    many_pending.expect("group_reset", "MORE", reset(many_pending, "0-0", limit=2))
    many_pending.do("DEL", many_pending.lease)  # as if the lease had expired
    epoch = int(many_pending.do("HGET", many_pending.fence, "epoch"))
    many_pending.own("t2", seen_epoch=epoch)

    late = reset(many_pending, "0-0", limit=2)
    assert many_pending.expect("group_reset", "OWNED", late)[0] == b"west-1"

    assert list(positions(many_pending, "stream")["hits"][1]) == ["3-0", "4-0", "5-0"]
    assert many_pending.fetch() == [f"{n}-0".encode() for n in range(1, 7)]


def test_group_reset_refuses_a_growing_topic_between_parts(many_pending: Harness) -> None:
    many_pending.own("t1", owner="topic-grow")
    many_pending.expect("group_reset", "OWNED", reset(many_pending, "0-0", force=True, limit=2))


def test_group_reset_drops_retries_in_parts(many_pending: Harness) -> None:
    call = reset(many_pending, "0-0", drop=True, limit=3)

    assert many_pending.expect("group_reset", "MORE", call) == [b"5-0", b"0-0", 3]
    assert many_pending.expect("group_reset", "MORE", call) == [b"0-0", b"0-0", 2]
    assert positions(many_pending, "stream") == {"hits": ("0-0", {})}
    assert list(positions(many_pending, "retry")["hits"][1]) == ["8-0", "9-0"]
    many_pending.expect("group_reset", "OK", call)
    assert positions(many_pending, "retry") == {"hits": ("9-0", {})}


def test_group_delete_works_in_parts(many_pending: Harness) -> None:
    many_pending.own("t1")
    many_pending.do("HSET", many_pending.fence, "quarantine", "1", "accused", "m:1-0 m:2-0")
    call = delete(many_pending, force=True, limit=6)

    assert many_pending.expect("group_delete", "MORE", call) == []
    assert many_pending.state()["fence"].keys() == {"token", "epoch", "owner", "since"}

    assert positions(many_pending, "stream") == {"hits": ("5-0", {})}
    assert list(positions(many_pending, "retry")["hits"][1]) == ["8-0", "9-0"]
    fence = many_pending.state()["fence"]
    assert (fence["token"], fence["owner"]) == (TOKEN.encode(), b"group-delete")
    many_pending.expect("group_delete", "OK", call)
    assert set(many_pending.state()) == {"stream"}


def test_group_delete_with_only_retries_works_in_parts(many_pending: Harness) -> None:
    many_pending.do("XGROUP", "DESTROY", many_pending.stream, "hits")
    call = delete(many_pending, force=True, limit=2)
    many_pending.expect("group_delete", "MORE", call)
    many_pending.expect("group_delete", "OK", call)


def test_group_delete_without_force_keeps_pending_entries(many_pending: Harness) -> None:
    before = many_pending.dump()
    many_pending.expect("group_delete", "UNSETTLED", delete(many_pending, limit=2))
    assert many_pending.dump() == before


def test_group_reset_and_delete_work_with_full_memory(many_pending: Harness) -> None:
    with many_pending.full_memory():
        many_pending.expect("group_reset", "MORE", reset(many_pending, "0-0", limit=2))
        many_pending.expect("group_delete", "MORE", delete(many_pending, force=True, limit=2))


# --- delete ---------------------------------------------------------------------------------------


def test_group_delete_removes_all_data_of_the_group(busy_group: Harness) -> None:
    busy_group.own("t1")
    busy_group.add("5-0", stream=busy_group.dlq)

    assert busy_group.expect("group_delete", "OK", delete(busy_group, force=True)) == []

    state = busy_group.state()
    assert set(state) == {"stream", "dlq", "trim"}
    assert state["stream"].groups == {}
    assert state["trim"] == {"first": b"1-0", "archived": b"0-3"}
    busy_group.expect(
        "settle_ack", "FENCED", messages.ack(busy_group.keys, busy_group.leased("t1"), [b"m:1-0"])
    )


@pytest.mark.fault("F26")
def test_group_delete_refuses_an_owned_group(harness: Harness) -> None:
    harness.groups()
    epoch = harness.own("t1")
    rest = harness.expect("group_delete", "OWNED", delete(harness))
    assert rest == [b"west-1", str(epoch).encode()]


@pytest.mark.fault("F26")
@pytest.mark.parametrize("kind", ["pending", "retry pending", "delayed", "retry unread"])
def test_group_delete_refuses_unsettled_entries(harness: Harness, kind: str) -> None:
    harness.groups()
    if kind == "pending":
        harness.pending("1-0")
    elif kind == "delayed":
        harness.do("ZADD", harness.delayed, 1, "m:1-0")
    elif kind == "retry pending":
        harness.pending_retry("1-0")
    else:
        harness.add("1-0", stream=harness.retry)

    rest = harness.expect("group_delete", "UNSETTLED", delete(harness))

    assert rest == [int("pending" in kind), int(kind == "delayed"), int(kind == "retry unread")]


def test_group_delete_accepts_unread_messages(harness: Harness) -> None:
    harness.groups()
    harness.add("1-0")
    harness.expect("group_delete", "OK", delete(harness))


def test_group_delete_repeated_changes_nothing(busy_group: Harness) -> None:
    busy_group.expect("group_delete", "OK", delete(busy_group, force=True))
    before = busy_group.dump()
    busy_group.expect("group_delete", "OK", delete(busy_group))
    assert busy_group.dump() == before
