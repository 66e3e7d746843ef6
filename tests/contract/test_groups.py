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
def busy(harness: Harness) -> Harness:
    """Create three entries, two of them delivered, one retry in each place, and counters."""
    harness.pending("1-0", "2-0")
    harness.add("3-0")
    harness.pending_retry("7-0")
    harness.do("ZADD", harness.delayed, 9e12, "m:0-5")
    harness.do("HSET", harness.items, "m:0-5", b"\x92\xa7payload\xa1x")
    harness.do("HSET", harness.attempts, b"m:1-0:c", "1", b"r:7-0:c", "1")
    harness.do("HSET", harness.trim, "first", "1-0", "floor:hits", "1-0", "archived", "0-3")
    return harness


def test_group_reset_to_earliest_delivers_all_again(busy: Harness) -> None:
    before = busy.state()

    rest = busy.expect("group_reset", "OK", reset(busy, "0-0"))

    assert rest == [b"2-0", b"0-0", 2, 0, 0]
    assert positions(busy, "stream") == {"hits": ("0-0", {})}
    changes = busy.changes(before)
    assert set(changes) == {"stream", "attempts", "trim"}
    assert changes["attempts"] is None
    assert changes["trim"] == {"first": b"1-0", "floor:hits": b"0-1", "archived": b"0-3"}
    assert busy.fetch() == [b"1-0", b"2-0", b"3-0"]


def test_group_reset_to_latest_skips_all_messages(busy: Harness) -> None:
    rest = busy.expect("group_reset", "OK", reset(busy, ""))

    assert rest[:3] == [b"2-0", b"3-0", 2]
    assert positions(busy, "stream") == {"hits": ("3-0", {})}


def test_group_reset_beyond_the_end_stops_at_the_end(busy: Harness) -> None:
    """New entries must not be skipped."""
    assert busy.expect("group_reset", "OK", reset(busy, "99-0"))[1] == b"3-0"
    busy.add("4-0")
    assert busy.fetch() == [b"4-0"]


def test_group_reset_keeps_retries_unless_dropped(busy: Harness) -> None:
    busy.expect("group_reset", "OK", reset(busy, "0-0"))
    assert positions(busy, "retry") == {"hits": ("7-0", {"7-0": "w"})}
    assert "delayed" in busy.state()

    rest = busy.expect("group_reset", "OK", reset(busy, "0-0", drop=True))

    assert rest == [b"0-0", b"0-0", 0, 1, 1]
    assert positions(busy, "retry") == {"hits": ("7-0", {})}
    assert {"delayed", "items"}.isdisjoint(busy.state())


@pytest.mark.fault("F26")
def test_group_reset_refuses_an_owned_partition(busy: Harness) -> None:
    epoch = busy.own("t1")

    rest = busy.expect("group_reset", "OWNED", reset(busy, "0-0"))

    assert rest == [b"west-1", str(epoch).encode()]


def test_group_reset_refuses_a_growing_topic_even_with_force(busy: Harness) -> None:
    busy.own("t1", owner="topic-grow")
    before = busy.state()

    assert busy.expect("group_reset", "OWNED", reset(busy, "0-0", force=True))[0] == b"topic-grow"
    assert busy.state() == before

    busy.do("DEL", busy.lease)  # the growth is finished and keeps no lease
    busy.expect("group_reset", "OK", reset(busy, "0-0", force=True))


def test_group_reset_with_force_fences_the_owner(busy: Harness) -> None:
    epoch = busy.own("t1")
    busy.do("HSET", busy.fence, "session", "s1", "quarantine", "1", "accused", "m:1-0 m:2-0")

    busy.expect("group_reset", "OK", reset(busy, "0-0", force=True))

    assert busy.state()["fence"].keys() == {"epoch", "since"}
    assert "lease" not in busy.state()
    busy.expect("settle_ack", "FENCED", messages.ack(busy.keys, busy.leased("t1"), [b"m:1-0"]))
    busy.expect("lease_renew", "FENCED", leases.renew(busy.keys, busy.leased("t1"), TTL))
    # A late copy of its earlier `lease_acquire` does not make it the owner again.
    late = leases.acquire(busy.keys, busy.leased("t1", 0), TTL, "west-1")
    busy.expect("lease_acquire", "MOVED", late)
    assert busy.own("t2", seen_epoch=epoch) > epoch


def test_group_reset_fences_an_owner_with_an_expired_lease(busy: Harness) -> None:
    """A paused owner that resumes must not settle entries that are read again."""
    busy.own("t1")
    busy.do("DEL", busy.lease)

    busy.expect("group_reset", "OK", reset(busy, "0-0"))

    busy.expect("lease_renew", "FENCED", leases.renew(busy.keys, busy.leased("t1"), TTL))


def test_group_reset_does_not_create_a_group(harness: Harness) -> None:
    harness.add("1-0")
    harness.expect("group_reset", "NOGROUP", reset(harness, "0-0"))


def test_group_lost_after_reset_restarts_at_its_position(busy: Harness) -> None:
    busy.expect("group_reset", "OK", reset(busy, "1-0"))
    busy.do("XGROUP", "DESTROY", busy.stream, "hits")
    busy.groups()
    assert busy.fetch() == [b"2-0", b"3-0"]


def test_group_reset_and_delete_keep_other_groups(busy: Harness) -> None:
    busy.do("XGROUP", "CREATE", busy.stream, "agents", "1-0")
    busy.expect("group_reset", "OK", reset(busy, "0-0", drop=True))
    busy.expect("group_delete", "OK", delete(busy, force=True))
    assert positions(busy, "stream") == {"agents": ("1-0", {})}


# --- many pending entries -------------------------------------------------------------------------


@pytest.fixture
def full_hands(harness: Harness) -> Harness:
    """Create five pending entries, one unread entry and three pending retries."""
    harness.pending(*(f"{n}-0" for n in range(1, 6)))
    harness.add("6-0")
    harness.pending_retry("7-0", "8-0", "9-0")
    return harness


def test_group_reset_drops_pending_entries_in_parts(full_hands: Harness) -> None:
    full_hands.own("t1")
    call = reset(full_hands, "2-0", force=True, limit=2)

    assert full_hands.expect("group_reset", "MORE", call) == [b"5-0", b"2-0", 2]
    left = {f"{n}-0": "w" for n in (3, 4, 5)}
    assert positions(full_hands, "stream") == {"hits": ("2-0", left)}
    assert full_hands.state()["trim"] == {"floor:hits": b"2-1"}

    again = reset(full_hands, "2-0", limit=2)  # the group is kept for this token
    assert full_hands.expect("group_reset", "MORE", again) == [b"2-0", b"2-0", 2]
    rest = full_hands.expect("group_reset", "OK", again)
    assert rest == [b"2-0", b"2-0", 1, 0, 0]
    assert positions(full_hands, "stream") == {"hits": ("2-0", {})}
    assert len(positions(full_hands, "retry")["hits"][1]) == 3
    assert full_hands.state()["fence"].keys() == {"epoch", "since"}
    assert "lease" not in full_hands.state()
    assert full_hands.fetch() == [b"3-0", b"4-0", b"5-0", b"6-0"]


def test_group_reset_part_may_be_smaller_than_the_limit(full_hands: Harness) -> None:
    call = reset(full_hands, "0-0", limit=4, part=1)
    assert full_hands.expect("group_reset", "MORE", call)[2] == 1
    assert full_hands.expect("group_reset", "OK", call)[2] == 4
    full_hands.fetch()
    call = delete(full_hands, force=True, limit=8, part=1)
    full_hands.expect("group_delete", "MORE", call)
    assert len(positions(full_hands, "stream")["hits"][1]) == 5
    full_hands.expect("group_delete", "OK", call)


def test_group_reset_keeps_its_ownership_between_parts(full_hands: Harness) -> None:
    epoch = full_hands.own("t1")
    full_hands.do("HSET", full_hands.fence, "session", "s1", "mark", "m:1-0", "quarantine", "1")
    full_hands.do("HSET", full_hands.fence, "accused", "m:1-0 m:2-0")

    full_hands.expect("group_reset", "MORE", reset(full_hands, "0-0", force=True, limit=2))

    fence = full_hands.state()["fence"]
    assert fence.keys() == {"token", "epoch", "owner", "since"}
    assert (fence["token"], fence["owner"]) == (TOKEN.encode(), b"group-reset")
    assert int(fence["epoch"]) > epoch
    assert full_hands.do("GET", full_hands.lease) == TOKEN.encode()
    assert 0 < full_hands.do("PTTL", full_hands.lease) <= groups.KEPT_SECONDS * 1000
    ack = messages.ack(full_hands.keys, full_hands.leased("t1"), [b"m:5-0"])
    full_hands.expect("settle_ack", "FENCED", ack)
    taken = leases.acquire(
        full_hands.keys, full_hands.leased("t2", int(fence["epoch"])), TTL, "west-2"
    )
    full_hands.expect("lease_acquire", "HELD", taken)
    full_hands.expect("group_reset", "MORE", reset(full_hands, "0-0", limit=2))
    assert full_hands.state()["fence"] == fence, "one owner all the time"


def test_interrupted_group_reset_loses_nothing(full_hands: Harness) -> None:
    """The next owner handles the remaining entries, and all after the position."""
    full_hands.expect("group_reset", "MORE", reset(full_hands, "0-0", limit=2))
    full_hands.do("DEL", full_hands.lease)  # it has expired
    epoch = int(full_hands.do("HGET", full_hands.fence, "epoch"))
    full_hands.own("t2", seen_epoch=epoch)

    late = reset(full_hands, "0-0", limit=2)
    assert full_hands.expect("group_reset", "OWNED", late)[0] == b"west-1"

    assert list(positions(full_hands, "stream")["hits"][1]) == ["3-0", "4-0", "5-0"]
    assert full_hands.fetch() == [f"{n}-0".encode() for n in range(1, 7)]


def test_group_reset_refuses_a_growing_topic_between_parts(full_hands: Harness) -> None:
    full_hands.own("t1", owner="topic-grow")
    full_hands.expect("group_reset", "OWNED", reset(full_hands, "0-0", force=True, limit=2))


def test_group_reset_drops_retries_in_parts(full_hands: Harness) -> None:
    call = reset(full_hands, "0-0", drop=True, limit=3)

    assert full_hands.expect("group_reset", "MORE", call) == [b"5-0", b"0-0", 3]
    assert full_hands.expect("group_reset", "MORE", call) == [b"0-0", b"0-0", 2]
    assert positions(full_hands, "stream") == {"hits": ("0-0", {})}
    assert list(positions(full_hands, "retry")["hits"][1]) == ["8-0", "9-0"]
    full_hands.expect("group_reset", "OK", call)
    assert positions(full_hands, "retry") == {"hits": ("9-0", {})}


def test_group_delete_works_in_parts(full_hands: Harness) -> None:
    full_hands.own("t1")
    full_hands.do("HSET", full_hands.fence, "quarantine", "1", "accused", "m:1-0 m:2-0")
    call = delete(full_hands, force=True, limit=6)

    assert full_hands.expect("group_delete", "MORE", call) == []
    assert full_hands.state()["fence"].keys() == {"token", "epoch", "owner", "since"}

    assert positions(full_hands, "stream") == {"hits": ("5-0", {})}
    assert list(positions(full_hands, "retry")["hits"][1]) == ["8-0", "9-0"]
    fence = full_hands.state()["fence"]
    assert (fence["token"], fence["owner"]) == (TOKEN.encode(), b"group-delete")
    full_hands.expect("group_delete", "OK", call)
    assert set(full_hands.state()) == {"stream"}


def test_group_delete_with_only_retries_works_in_parts(full_hands: Harness) -> None:
    full_hands.do("XGROUP", "DESTROY", full_hands.stream, "hits")
    call = delete(full_hands, force=True, limit=2)
    full_hands.expect("group_delete", "MORE", call)
    full_hands.expect("group_delete", "OK", call)


def test_group_delete_without_force_keeps_pending_entries(full_hands: Harness) -> None:
    before = full_hands.dump()
    full_hands.expect("group_delete", "UNSETTLED", delete(full_hands, limit=2))
    assert full_hands.dump() == before


def test_group_reset_and_delete_work_with_full_memory(full_hands: Harness) -> None:
    with full_hands.full_memory():
        full_hands.expect("group_reset", "MORE", reset(full_hands, "0-0", limit=2))
        full_hands.expect("group_delete", "MORE", delete(full_hands, force=True, limit=2))


# --- delete ---------------------------------------------------------------------------------------


def test_group_delete_removes_all_data_of_the_group(busy: Harness) -> None:
    busy.own("t1")
    busy.add("5-0", stream=busy.dlq)

    assert busy.expect("group_delete", "OK", delete(busy, force=True)) == []

    state = busy.state()
    assert set(state) == {"stream", "dlq", "trim"}
    assert state["stream"].groups == {}
    assert state["trim"] == {"first": b"1-0", "archived": b"0-3"}
    busy.expect("settle_ack", "FENCED", messages.ack(busy.keys, busy.leased("t1"), [b"m:1-0"]))


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


def test_group_delete_repeated_changes_nothing(busy: Harness) -> None:
    busy.expect("group_delete", "OK", delete(busy, force=True))
    before = busy.dump()
    busy.expect("group_delete", "OK", delete(busy))
    assert busy.dump() == before
