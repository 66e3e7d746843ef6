"""renewal_copy, renewal_group, renewal_swap: a partition without room for ids -> a fresh stream."""

from __future__ import annotations

import pytest

from streamqd.admin import renewal as admin
from streamqd.config import Topic
from streamqd.errors import RedisRefused
from streamqd.store import leases, renewal, scripts, topics
from streamqd.store.client import connect
from streamqd.store.scripts import Call
from streamqd.store.store import Store
from tests.contract.desk import TTL, Desk, Stream
from tests.support.proxy import Fault, FaultProxy

LAST = "18446744073709551615-18446744073709551615"
TOKEN = "of-the-administration"


def copy(desk: Desk) -> Call:
    return renewal.copy(desk.keys, desk.unit.topic, desk.unit.partition)


def group(desk: Desk, *, force: bool = False) -> Call:
    return renewal.group(desk.keys, desk.unit, force=force, token=TOKEN)


def swap(desk: Desk) -> Call:
    return renewal.swap(desk.keys, desk.unit.topic, desk.unit.partition)


@pytest.fixture
def full(desk: Desk) -> Desk:
    """Three entries handed out, one of them settled; an unread one; one with the last id of all."""
    topics.create(desk.store, desk.unit.topic, Topic())
    desk.pending("1-0", "2-0", "3-0")
    desk.do("XACK", desk.stream, "hits", "2-0")
    desk.add("4-0")
    desk.add(LAST)
    desk.do("HSET", desk.attempts, "m:1-0:c", "2")
    desk.do("HSET", desk.trim, "archived", "2-0", "floor:hits", "1-0", "first", "1-0")
    return desk


def entries(desk: Desk) -> list[tuple[str, bytes]]:
    return [(row[0].decode(), row[1][1]) for row in desk.do("XRANGE", desk.stream, "-", "+")]


def renewed(desk: Desk) -> str:
    """Renew it; the id that the entry with the last id has now."""
    done = admin.renew(desk.store, desk.unit.topic, desk.unit.partition, force=False)
    assert done.messages == len(entries(desk))
    return done.last_id


def test_the_partition_takes_messages_again(full: Desk) -> None:
    """S3: in their order, with their ids and their fields; groups go on where they were."""
    with pytest.raises(RedisRefused):
        full.do("XADD", full.stream, "*", "payload", "x")
    before = full.now_unix_ms()
    last = renewed(full)
    assert [each for each, _ in entries(full)] == ["1-0", "2-0", "3-0", "4-0", last]
    assert before <= int(last.partition("-")[0]) <= full.now_unix_ms()
    assert entries(full)[-1][1] == f"body of {LAST}".encode()
    stream = full.state()["stream"]
    assert isinstance(stream, Stream)
    assert stream.groups == {"hits": ("3-0", {"1-0": "w", "3-0": "w"})}
    assert full.do("HGET", full.attempts, "m:1-0:c") == b"2"
    assert full.do("HGET", full.trim, "archived") == b"2-0"
    assert not full.do("EXISTS", full.fence, full.lease) or not full.do("HGET", full.fence, "token")
    assert not full.do("EXISTS", full.keys.fresh("access", 0), full.keys.renewal("access", 0))
    full.do("XADD", full.stream, "*", "payload", "x")
    assert len(full.fetch(9)) == 3


def test_what_is_handed_out_of_the_end_goes_along(full: Desk) -> None:
    """S3: consumer, deliveries and counters too; a position at the last id is the new last id."""
    full.fetch(2, "somebody")
    full.do("HSET", full.attempts, f"m:{LAST}:c", "1")
    full.do("HSET", full.trim, "archived", LAST, "floor:gone", LAST)
    last = renewed(full)
    stream = full.state()["stream"]
    assert isinstance(stream, Stream)
    assert stream.groups["hits"] == (
        last,
        {"1-0": "w", "3-0": "w", "4-0": "somebody", last: "somebody"},
    )
    assert full.do("HGET", full.attempts, f"m:{last}:c") == b"1"
    assert full.do("HMGET", full.trim, "archived", "floor:gone") == [last.encode(), None]
    rows = full.do("XPENDING", full.stream, "hits", "-", "+", 9)
    assert [row[3] for row in rows] == [1, 1, 1, 1]


def test_a_group_behind_what_is_trimmed_reads_nothing_again(full: Desk) -> None:
    """S3: entries that go between two steps are not read once more."""
    full.expect("renewal_copy", "OK", copy(full))
    full.do("XACK", full.stream, "hits", "1-0", "3-0")
    full.fetch(9)
    full.do("XACK", full.stream, "hits", "4-0", LAST)
    full.do("XTRIM", full.stream, "MAXLEN", 0)
    renewed(full)
    assert full.fetch(9) == []


def test_one_that_has_room_is_left_alone(desk: Desk) -> None:
    desk.pending("1-0")
    assert desk.expect("renewal_copy", "ROOM", copy(desk)) == [b"1-0"]
    desk.do("DEL", desk.stream)
    desk.expect("renewal_copy", "MISSING", copy(desk))


def test_an_entry_of_too_many_fields(full: Desk) -> None:
    fields = [part for n in range(3_600) for part in (f"f{n}", "x")]
    full.do("DEL", full.stream)
    full.do("XADD", full.stream, LAST, *fields)
    assert full.expect("renewal_copy", "LARGE", copy(full)) == [LAST.encode()]


def test_owned_gone_and_too_much_in_hand(full: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    full.expect("renewal_group", "GONE", group(full))
    full.expect("renewal_swap", "GONE", swap(full))
    full.expect("renewal_copy", "OK", copy(full))
    full.own("t1")
    assert full.expect("renewal_group", "OWNED", group(full))[0] == b"west-1"
    monkeypatch.setattr(renewal, "PENDING_MAX", 1)
    assert full.expect("renewal_group", "MANY", group(full, force=True)) == [2]
    monkeypatch.undo()
    full.expect("renewal_group", "OK", group(full, force=True))
    assert full.link.run(leases.renew(full.keys, full.leased("t1"), TTL)).word == "FENCED"
    full.do("XGROUP", "DESTROY", full.stream, "hits")
    full.expect("renewal_group", "NOGROUP", group(full, force=True))


def test_what_came_meanwhile_is_copied_first(desk: Desk) -> None:
    """An id that is only ahead of the clock does not stop those who write."""
    ahead = f"{desk.now_unix_ms() + 10**9}-0"
    desk.pending("1-0", ahead)
    desk.expect("renewal_copy", "OK", copy(desk))
    desk.do("XADD", desk.stream, "*", "payload", "late")
    desk.expect("renewal_group", "MORE", group(desk))
    desk.expect("renewal_copy", "OK", copy(desk))
    desk.expect("renewal_group", "OK", group(desk))
    desk.do("XADD", desk.stream, "*", "payload", "later")
    assert desk.expect("renewal_swap", "OK", swap(desk))[0] == 4
    assert [body for _, body in entries(desk)][2:] == [b"late", b"later"]
    assert len(desk.fetch(9)) == 2


def test_much_that_came_meanwhile_is_no_part_of_the_swap(desk: Desk) -> None:
    desk.pending("1-0", f"{desk.now_unix_ms() + 10**9}-0")
    desk.expect("renewal_copy", "OK", copy(desk))
    desk.expect("renewal_group", "OK", group(desk))
    desk.link.pipeline([("XADD", desk.stream, "*", "payload", "x")] * 300)
    desk.expect("renewal_swap", "MORE", swap(desk))


def test_a_group_that_has_moved_is_placed_anew(full: Desk) -> None:
    full.expect("renewal_copy", "OK", copy(full))
    assert full.expect("renewal_swap", "CHANGED", swap(full)) == [b"hits"]
    full.expect("renewal_group", "OK", group(full))
    full.do("XACK", full.stream, "hits", "1-0")
    assert full.expect("renewal_swap", "CHANGED", swap(full)) == [b"hits"]
    full.expect("renewal_group", "OK", group(full))
    full.do("XGROUP", "CREATE", full.stream, "other", "0")
    assert full.expect("renewal_swap", "CHANGED", swap(full)) == [b"other"]
    full.do("XGROUP", "DESTROY", full.stream, "other")
    full.expect("renewal_swap", "OK", swap(full))
    full.expect("renewal_swap", "GONE", swap(full))


def test_a_stream_that_nobody_reads(desk: Desk) -> None:
    desk.do("XADD", desk.stream, LAST, "payload", "x")
    desk.do("XTRIM", desk.stream, "MAXLEN", 0)
    desk.expect("renewal_copy", "OK", copy(desk))
    assert desk.expect("renewal_swap", "OK", swap(desk)) == [0, b"0-0"]
    assert desk.dump() == {}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_left_at_any_step_the_same_goes_on(full: Desk, steps: int) -> None:
    """S3: and until then the partition is what it was."""
    before = entries(full)
    for step in (copy, group, group)[:steps]:
        full.link.run(step(full))
    assert entries(full) == before
    # Nobody renews the lease of who has left: it ends by itself.
    full.do("DEL", full.lease)
    renewed(full)
    assert len(entries(full)) == len(before)
    assert len(full.fetch(9)) == 2


@pytest.mark.fault("F12")
@pytest.mark.parametrize("fault", [Fault.DROP_REPLY, Fault.CUT_BEFORE])
@pytest.mark.parametrize("step", ["renewal_swap", "lease_release"])
def test_who_has_renewed_it_is_told_so(
    full: Desk, proxy: FaultProxy, step: str, fault: Fault
) -> None:
    """Repeated, the swap answers GONE: of a swap of its own this is no refusal."""
    sha = scripts.get(step).sha.encode()
    for each in scripts.load().values():
        full.do("SCRIPT", "LOAD", each.source)
    shaky = connect(proxy.settings, timeout=5.0, name="test:shaky")
    lost = proxy.arm(fault, wanted=lambda command: sha in command)
    done = admin.renew(Store(shaky, full.keys), full.unit.topic, full.unit.partition, force=False)
    shaky.close()
    assert lost.hit
    found = entries(full)
    assert (done.messages, done.last_id, done.pending) == (5, found[-1][0], 2)
    assert len(found) == 5
    assert not full.do("EXISTS", full.lease)


def test_an_empty_stream_is_renewed_though_the_reply_was_lost(
    desk: Desk, proxy: FaultProxy
) -> None:
    topics.create(desk.store, desk.unit.topic, Topic())
    desk.add(LAST)
    desk.do("XTRIM", desk.stream, "MAXLEN", 0)
    swap_script = scripts.get("renewal_swap")
    desk.do("SCRIPT", "LOAD", swap_script.source)
    shaky = connect(proxy.settings, timeout=5.0, name="test:shaky")
    proxy.arm(Fault.DROP_REPLY, wanted=lambda command: swap_script.sha.encode() in command)
    done = admin.renew(Store(shaky, desk.keys), desk.unit.topic, desk.unit.partition, force=False)
    shaky.close()
    assert (done.messages, done.last_id, done.groups) == (0, "0-0", [])
