"""No script reads a whole collection: whatever lists, lists so many at most. No server."""

from __future__ import annotations

import re

import pytest

from streamqd.config import Consumer
from streamqd.model import ENTRIES_MAX, Unit
from streamqd.process import Exit
from streamqd.scoreboard import DONE, Scoreboard
from streamqd.store import messages, scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Reply
from streamqd.supervisor.partition import PartitionState
from streamqd.worker import settler

LUA_UNPACK_MAX = 7_999

_CALL = re.compile(r"redis\.p?call\(")
_TOKEN = re.compile(r"'[^']*'|[(){},]|[^'(){},]+")
_LISTS = {
    *("ZRANGE", "ZREVRANGE", "ZRANGEBYSCORE", "ZREVRANGEBYSCORE", "ZRANGEBYLEX"),
    *("XRANGE", "XREVRANGE", "XPENDING", "LRANGE", "SORT"),
    *("HGETALL", "HKEYS", "HVALS", "SMEMBERS", "SUNION", "SINTER", "SDIFF", "KEYS"),
}
# Commands without a bound of their own, and what bounds them.
BOUNDED_OTHERWISE = {
    "'HKEYS', attempts": "only of a hash with as many fields as SMALL says, or fewer",
    "'HGETALL', trim": "the record of a partition: some fields for each group",
    "'HGETALL', control": "the orders of a fleet: a field for each kind and instance",
    "'ZRANGE', members, 0, -1, 'WITHSCORES'": "a member for each instance of a fleet",
    "'ZRANGE', delayed, first, first + count - 1, 'WITHSCORES'": "a page of `count` members",
    "'XPENDING', source, group": "the summary: a row for each consumer",
}


def unbounded(code: str) -> list[str]:
    """The calls that list as much as there is."""
    without = " ".join(re.sub(r"--[^\n]*", "", code).split())
    calls = [arguments(without[found.end() :]) for found in _CALL.finditer(without)]
    return [", ".join(call) for call in calls if not _is_bounded(call)]


def arguments(code: str) -> list[str]:
    """What stands before the bracket that closes, by the commas between."""
    depth, parts = 0, [""]
    for token in _TOKEN.findall(code):
        if token in "({":
            depth += 1
        elif token in ")}":
            depth -= 1
        if depth < 0:
            break
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _is_bounded(call: list[str]) -> bool:
    name, *rest = call
    if not name.startswith("'"):
        return rest[-2:] == ["'COUNT'", "1"]  # the name in a variable
    command = name.strip("'")
    if command not in _LISTS:
        return True
    if command == "XPENDING":
        # key, group, first, last, count [, consumer]. IDLE goes through all that is not idle.
        return len(rest) in (5, 6) and "'IDLE'" not in rest
    if command in ("XRANGE", "XREVRANGE"):
        return "'COUNT'" in rest or (len(rest) == 3 and rest[1] == rest[2])
    if command == "ZRANGE" and rest[1:3] == ["0", "0"]:
        return True
    return "'LIMIT'" in rest


def test_no_script_lists_without_a_bound() -> None:
    found = {script.name: unbounded(script.source.decode()) for script in scripts.load().values()}
    seen = {call for calls in found.values() for call in calls}
    assert seen <= BOUNDED_OTHERWISE.keys(), found
    assert seen == BOUNDED_OTHERWISE.keys(), "an exception that no script needs any more"


@pytest.mark.parametrize(
    "call",
    [
        "redis.call('XPENDING', stream, group, 'IDLE', 5, '-', '+', 10, name)",
        "redis.call('XRANGE', stream, '-', '+')",
        "redis.pcall('XRANGE', stream, first(a, b), '+')",
        "redis.call('ZRANGEBYSCORE', delayed,\n  '-inf', text(now))",
        "redis.call('ZRANGE', delayed, 0, -1)",
        "redis.call('HGETALL', key)",
        "redis.call('XRANGE', stream, '(' .. after, '+')",
        "redis.call(command, stream, '-', '+')",
    ],
)
def test_what_has_no_bound_is_found(call: str) -> None:
    assert len(unbounded(f"local rows = {call}\n")) == 1


@pytest.mark.parametrize(
    "call",
    [
        "redis.call('XPENDING', stream, group, '-', '+', 10)",
        "redis.call('XPENDING', stream, group, '(' .. after, '+', math.min(128, left), name)",
        "redis.call('XRANGE', stream, id, id)",
        "redis.call('XRANGE', stream, '-', '+', 'COUNT', wanted)",
        "redis.call('ZRANGEBYSCORE', delayed, '-inf', text(now), 'LIMIT', 0, count)",
        "redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')",
        "redis.call('HGET', key, field)",
    ],
)
def test_what_has_a_bound_is_left_alone(call: str) -> None:
    assert unbounded(f"local rows = {call}\n") == []


def test_limits_that_belong_together_agree() -> None:
    """B1, B2: what one side can hold, the other side takes."""
    slot = Scoreboard(1).allot(Unit("orders", 0, "bill"))
    slot.open_table()
    assert slot.in_hand == ENTRIES_MAX, "the table of a worker"
    partition = PartitionState(
        slot.unit, Consumer(topic="orders", group="bill", handler="m:f"), slot
    )
    partition.take(1)
    partition.answered(Reply("OK", [b"2", 0, b""]), 0.0)
    slot.open_table()
    slot.put(0, *[b"m:%d-0" % number for number in range(ENTRIES_MAX)])
    slot.states[:] = bytes([DONE]) * ENTRIES_MAX
    partition.ended(Exit(None, 9))
    call = partition.intent(Keys("streaming:mq", "stream:topic"), 10.0, "one")
    assert call is not None, "a refence takes a full table"
    assert settler.BATCH_MAX <= messages.PLACES_MAX
    assert settler.BATCH_MAX <= messages.ITEMS_MAX
    source = scripts.get("settle_ack").source.decode()
    in_a_slice = int(re.findall(r"local SLICE = (\d+)", source)[0])
    assert in_a_slice < LUA_UNPACK_MAX, "values that one unpack takes"
