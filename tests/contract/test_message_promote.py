"""message_promote: delayed, due -> ready."""

from __future__ import annotations

import pytest

from streamqd.model import Assignment
from streamqd.store import messages, publishing
from streamqd.store.messages import Promoted
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import Harness, Stream

PACKED = b"\x92\xa7payload\xa3\x00\xff\n"
FAR = 9_000_000_000_123


def promote(harness: Harness, count: int = 10) -> Call:
    return messages.promote_retries(harness.keys, harness.assignment, count)


def delay(harness: Harness, *members: tuple[str, int]) -> None:
    for member, due in members:
        harness.do("ZADD", harness.delayed, due, member)
        harness.do("HSET", harness.items, member, PACKED)


def run(harness: Harness, call: Call) -> Promoted:
    return Promoted.parse(Reply("OK", harness.expect("message_promote", "OK", call)))


def test_message_promote_moves_due_items(harness: Harness) -> None:
    harness.groups()
    delay(harness, ("m:2-0", 2), ("r:1-0", 1), ("m:3-0", FAR))
    before = harness.state()
    assert run(harness, promote(harness)) == (2, 0, FAR, 0, False)
    changed = harness.changes(before)
    entries = changed["retry"].entries
    assert list(entries.values()) == [{"payload": b"\x00\xff\n"}] * 2
    assert changed == {
        "delayed": {"m:3-0": FAR},
        "items": {"m:3-0": {"payload": b"\x00\xff\n"}},
        "retry": Stream(entries, {"hits": ("0-0", {})}),
    }


def test_message_promote_deletes_its_empty_keys(harness: Harness) -> None:
    harness.groups()
    delay(harness, ("m:1-0", 1))
    assert run(harness, promote(harness)) == (1, 0, None, 0, False)
    assert sorted(harness.state()) == ["retry", "stream"]
    before = harness.dump()
    assert run(harness, promote(harness)) == (0, 0, None, 0, False)
    assert harness.dump() == before


def test_message_promote_moves_batches_in_due_order(harness: Harness) -> None:
    harness.groups()
    delay(harness, ("m:3-0", 3), ("m:1-0", 1), ("m:2-0", 2))
    assert run(harness, promote(harness, 2)) == (2, 0, 3, 0, True)
    assert list(harness.state()["delayed"]) == ["m:3-0"]


def test_message_promote_failing_midway_keeps_each_message_once(
    harness: Harness,
) -> None:
    """A retry stream at the last possible ID takes one more entry instead of two.

    Each message is still there once.
    """
    harness.groups()
    delay(harness, ("m:1-0", 1), ("m:2-0", 2), ("m:3-0", 3))
    harness.add("18446744073709551615-18446744073709551614", stream=harness.retry)
    with pytest.raises(Exception, match="exhausted"):
        harness.link.run(promote(harness))
    state = harness.state()
    assert len(state["retry"].entries) == 2
    assert list(state["delayed"]) == list(state["items"]) == ["m:2-0", "m:3-0"]


def test_message_promote_removes_a_member_without_an_item(harness: Harness) -> None:
    harness.groups()
    harness.do("ZADD", harness.delayed, 1, "m:1-0")
    delay(harness, ("m:2-0", 2))
    assert run(harness, promote(harness)) == (1, 1, None, 0, False)
    assert "delayed" not in harness.state()


def test_message_promote_writes_a_retry_to_its_group(harness: Harness) -> None:
    """A retry is written to its group's stream, so that no other group sees it."""
    other = Harness(harness.link, harness.keys, Assignment("access", 0, "audit"))
    harness.groups()
    other.groups()
    delay(harness, ("m:1-0", 1))
    run(harness, promote(harness))
    assert len(harness.fetch(stream=harness.retry)) == 1
    assert other.fetch(stream=other.retry) == []
    assert harness.fetch() == []


def test_message_promote_writes_a_send_for_every_group(harness: Harness) -> None:
    other = Harness(harness.link, harness.keys, Assignment("access", 0, "audit"))
    harness.groups()
    other.groups()
    fields = [b"payload", b"x"]
    harness.link.run(publishing.schedule(harness.keys, "access", 0, 0.0, "send-1", fields))
    due = messages.promote_delayed(harness.keys, "access", 0, 10)
    assert run(harness, due) == (1, 0, None, 0, False)
    assert len(harness.fetch()) == len(other.fetch()) == 1
    entry = next(iter(harness.state()["stream"].entries.values()))
    assert entry["payload"] == b"x"
    assert sorted(entry) == ["payload", "sendId", "sentAt"]


def test_message_promote_wakes_a_retry_stream_reader(harness: Harness) -> None:
    harness.groups()
    delay(harness, ("m:1-0", 1))
    run(harness, promote(harness))
    assert harness.do("XREAD", "COUNT", 1, "BLOCK", 1, "STREAMS", harness.retry, "0-0")


def test_message_promote_moves_a_too_wide_item_in_part(harness: Harness) -> None:
    harness.groups()
    delay(harness, ("m:1-0", 1), ("m:2-0", 2))
    # These are more entries than a script can pass to one command.
    script = """
      local fields = {'payload', 'wide', 'retryCount', '1'}
      for n = 1, 4500 do
        fields[#fields + 1] = 'f' .. n
        fields[#fields + 1] = 'v'
      end
      redis.call('HSET', KEYS[1], 'm:1-0', cmsgpack.pack(fields))
    """
    harness.do("EVAL", script, 1, harness.items)
    assert run(harness, promote(harness)) == (2, 0, None, 0, False)
    first, second = harness.state()["retry"].entries.values()
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
def test_message_promote_postpones_an_unreadable_item(harness: Harness, packed: bytes) -> None:
    harness.groups()
    delay(harness, ("m:1-0", 1), ("m:2-0", 2))
    harness.do("HSET", harness.items, "m:1-0", packed)
    with harness.instant() as now:
        moved, orphans, due, unreadable, more = run(harness, promote(harness))
    assert (moved, orphans, unreadable, more) == (1, 0, 1, False)
    assert due is not None
    assert now == str(due - 60_000).encode()
    ((_, fields),) = harness.do("XRANGE", harness.retry, "-", "+")
    assert fields == [b"payload", b"\x00\xff\n"]
    assert harness.do("HGET", harness.items, "m:1-0") == packed
    assert run(harness, promote(harness)) == (0, 0, due, 0, False)
