"""message_promote: delayed, due -> ready."""

from __future__ import annotations

import pytest

from streamqd.model import Unit
from streamqd.store import messages, publishing
from streamqd.store.messages import Promoted
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import Desk, Stream

PACKED = b"\x92\xa7payload\xa3\x00\xff\n"
FAR = 9_000_000_000_123


def promote(desk: Desk, count: int = 10) -> Call:
    return messages.promote_retries(desk.keys, desk.unit, count)


def delay(desk: Desk, *members: tuple[str, int]) -> None:
    for member, due in members:
        desk.do("ZADD", desk.delayed, due, member)
        desk.do("HSET", desk.items, member, PACKED)


def run(desk: Desk, call: Call) -> Promoted:
    return Promoted.parse(Reply("OK", desk.expect("message_promote", "OK", call)))


def test_message_promote_moves_due_items(desk: Desk) -> None:
    desk.groups()
    delay(desk, ("m:2-0", 2), ("r:1-0", 1), ("m:3-0", FAR))
    before = desk.state()
    assert run(desk, promote(desk)) == (2, 0, FAR, 0, False)
    changed = desk.changes(before)
    entries = changed["retry"].entries
    assert list(entries.values()) == [{"payload": b"\x00\xff\n"}] * 2
    assert changed == {
        "delayed": {"m:3-0": FAR},
        "items": {"m:3-0": {"payload": b"\x00\xff\n"}},
        "retry": Stream(entries, {"hits": ("0-0", {})}),
    }


def test_message_promote_deletes_its_empty_keys(desk: Desk) -> None:
    desk.groups()
    delay(desk, ("m:1-0", 1))
    assert run(desk, promote(desk)) == (1, 0, None, 0, False)
    assert sorted(desk.state()) == ["retry", "stream"]
    before = desk.dump()
    assert run(desk, promote(desk)) == (0, 0, None, 0, False)
    assert desk.dump() == before


def test_message_promote_moves_batches_in_due_order(desk: Desk) -> None:
    desk.groups()
    delay(desk, ("m:3-0", 3), ("m:1-0", 1), ("m:2-0", 2))
    assert run(desk, promote(desk, 2)) == (2, 0, 3, 0, True)
    assert list(desk.state()["delayed"]) == ["m:3-0"]


def test_message_promote_failing_midway_keeps_each_message_once(
    desk: Desk,
) -> None:
    """A retry stream at the last possible id takes one more entry, not two."""
    desk.groups()
    delay(desk, ("m:1-0", 1), ("m:2-0", 2), ("m:3-0", 3))
    desk.add("18446744073709551615-18446744073709551614", stream=desk.retry)
    with pytest.raises(Exception, match="exhausted"):
        desk.link.run(promote(desk))
    state = desk.state()
    assert len(state["retry"].entries) == 2
    assert list(state["delayed"]) == list(state["items"]) == ["m:2-0", "m:3-0"]


def test_message_promote_removes_a_member_without_an_item(desk: Desk) -> None:
    desk.groups()
    desk.do("ZADD", desk.delayed, 1, "m:1-0")
    delay(desk, ("m:2-0", 2))
    assert run(desk, promote(desk)) == (1, 1, None, 0, False)
    assert "delayed" not in desk.state()


def test_reaches_only_the_group_that_failed(desk: Desk) -> None:
    """A retry is written to the stream of its group. Other groups never see it."""
    other = Desk(desk.link, desk.keys, Unit("access", 0, "audit"))
    desk.groups()
    other.groups()
    delay(desk, ("m:1-0", 1))
    run(desk, promote(desk))
    assert len(desk.fetch(stream=desk.retry)) == 1
    assert other.fetch(stream=other.retry) == []
    assert desk.fetch() == []


def test_scheduled_sends_reach_every_group(desk: Desk) -> None:
    """T7."""
    other = Desk(desk.link, desk.keys, Unit("access", 0, "audit"))
    desk.groups()
    other.groups()
    fields = [b"payload", b"x"]
    desk.link.run(publishing.schedule(desk.keys, "access", 0, 0.0, "send-1", fields))
    due = messages.promote_scheduled(desk.keys, "access", 0, 10)
    assert run(desk, due) == (1, 0, None, 0, False)
    assert len(desk.fetch()) == len(other.fetch()) == 1
    entry = next(iter(desk.state()["stream"].entries.values()))
    assert entry["payload"] == b"x"
    assert sorted(entry) == ["payload", "sendId", "sentAt"]


def test_wakes_a_reader_of_the_retry_stream(desk: Desk) -> None:
    desk.groups()
    delay(desk, ("m:1-0", 1))
    run(desk, promote(desk))
    assert desk.do("XREAD", "COUNT", 1, "BLOCK", 1, "STREAMS", desk.retry, "0-0")


def test_message_promote_moves_a_too_wide_item_in_part(desk: Desk) -> None:
    desk.groups()
    delay(desk, ("m:1-0", 1), ("m:2-0", 2))
    # More than a script can pass to one command.
    script = """
      local fields = {'payload', 'wide', 'retryCount', '1'}
      for n = 1, 4500 do
        fields[#fields + 1] = 'f' .. n
        fields[#fields + 1] = 'v'
      end
      redis.call('HSET', KEYS[1], 'm:1-0', cmsgpack.pack(fields))
    """
    desk.do("EVAL", script, 1, desk.items)
    assert run(desk, promote(desk)) == (2, 0, None, 0, False)
    first, second = desk.state()["retry"].entries.values()
    assert first == {"payload": b"wide", "retryCount": b"1"}
    assert second == {"payload": b"\x00\xff\n"}


@pytest.mark.parametrize(
    "packed",
    [
        b"\xc1",
        b"\x93\xa7payload",
        b"\x91\xa7payload",
        b"\x90",
        b"\xa7payload",
        b"\x92\xa7payload\x90",
        b"\x81\xa7payload\xa1x",
    ],
)
def test_message_promote_postpones_an_unreadable_item(desk: Desk, packed: bytes) -> None:
    desk.groups()
    delay(desk, ("m:1-0", 1), ("m:2-0", 2))
    desk.do("HSET", desk.items, "m:1-0", packed)
    with desk.instant() as now:
        moved, orphans, due, unreadable, more = run(desk, promote(desk))
    assert (moved, orphans, unreadable, more) == (1, 0, 1, False)
    assert due is not None
    assert now == str(due - 60_000).encode()
    ((_, fields),) = desk.do("XRANGE", desk.retry, "-", "+")
    assert fields == [b"payload", b"\x00\xff\n"]
    assert desk.do("HGET", desk.items, "m:1-0") == packed
    assert run(desk, promote(desk)) == (0, 0, due, 0, False)
