"""No script reads a whole collection. Each command that lists one has a bound. No server."""

from __future__ import annotations

import dataclasses
import importlib
import random
import re
import socket
from pathlib import Path

import pytest

from streamqd.admin import due, reading, trace
from streamqd.admin import retention as admin_retention
from streamqd.config import Consumer, outboxes
from streamqd.config.setting import section_settings
from streamqd.housekeeper import dead_letter_expirer, promoter, retention_enforcer, trimmer
from streamqd.model import ENTRIES_MAX, Assignment, Lease
from streamqd.policy import silence
from streamqd.process import Child, Exit
from streamqd.scoreboard import DONE, Scoreboard, table_size
from streamqd.store import (
    dead,
    directives,
    items,
    leases,
    messages,
    outbox,
    publishing,
    schedules,
    scripts,
    spark,
    statistics,
    untrusted,
)
from streamqd.store.keys import Keys
from streamqd.store.scripts import Reply
from streamqd.supervisor.partition import AssignmentState
from streamqd.worker import control_channel, dead_letters, recovery, serial, settler
from streamqd.worker.grant import Grant

LUA_UNPACK_MAX = 7_999  # values; the server's LUAI_MAXCSTACK is 8,000
LUA = Path(__file__).parents[2] / "lua"
STORE = LUA.parent / "streamqd" / "store"

_CALL = re.compile(r"redis\.p?call\(")
_TOKEN = re.compile(r"'[^']*'|[(){},]|[^'(){},]+")
_LISTS = {
    *("ZRANGE", "ZREVRANGE", "ZRANGEBYSCORE", "ZREVRANGEBYSCORE", "ZRANGEBYLEX"),
    *("XRANGE", "XREVRANGE", "XPENDING", "LRANGE", "SORT"),
    *("HGETALL", "HKEYS", "HVALS", "SMEMBERS", "SUNION", "SINTER", "SDIFF", "KEYS"),
}
# Commands whose arguments have no bound of their own, and the reasons why they are bounded.
BOUNDED_OTHERWISE = {
    "'HKEYS', attempts": "only of a hash with at most SMALL fields",
    "'HGETALL', control": "the orders of a fleet: a field for each kind and instance",
    "'ZRANGE', members, 0, -1, 'WITHSCORES'": "a member for each instance of a fleet",
    "'ZRANGE', delayed, first, first + count - 1, 'WITHSCORES'": "a page of `count` members",
    "'XPENDING', source, group": "the summary: a row for each consumer",
}


def find_unbounded_calls(code: str) -> list[str]:
    """Return the calls that list a whole collection."""
    without = " ".join(re.sub(r"--[^\n]*", "", code).split())
    calls = [arguments(without[found.end() :]) for found in _CALL.finditer(without)]
    return [", ".join(call) for call in calls if not _is_bounded(call)]


def arguments(code: str) -> list[str]:
    """Return the arguments in front of the closing bracket, split at the commas."""
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
        return rest[-2] == "'COUNT'"  # a variable contains the command's name
    command = name.strip("'")
    if command not in _LISTS:
        return True
    if command == "XPENDING":
        # The arguments are key, group, first, last, count [, consumer]. With IDLE, the server would
        # scan every entry that is not idle.
        return len(rest) in (5, 6) and "'IDLE'" not in rest
    if command in ("XRANGE", "XREVRANGE"):
        return "'COUNT'" in rest or (len(rest) == 3 and rest[1] == rest[2])
    if command == "ZRANGE" and rest[1:3] == ["0", "0"]:
        return True
    return "'LIMIT'" in rest


def test_no_script_calls_an_unbounded_command() -> None:
    found = {
        script.name: find_unbounded_calls(script.source.decode())
        for script in scripts.load().values()
    }
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
def test_unbounded_calls_are_found(call: str) -> None:
    assert len(find_unbounded_calls(f"local rows = {call}\n")) == 1


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
def test_bounded_calls_are_accepted(call: str) -> None:
    assert find_unbounded_calls(f"local rows = {call}\n") == []


def sources() -> dict[str, str]:
    """Return each file of lua/ and each shared block by name, without comments."""
    return {path.stem: re.sub(r"--[^\n]*", "", path.read_text()) for path in LUA.glob("*.lua")}


def constants() -> dict[str, int]:
    """Return each number that has a name in capitals in a script, such as `_lists.SLICE`."""
    found = re.compile(r"^local ([A-Z_]+) = (\d+) *$", re.M)
    return {
        f"{name}.{constant}": int(value)
        for name, code in sources().items()
        for constant, value in found.findall(code)
    }


def find_unpacked_lists() -> set[str]:
    """Return each list that a script unpacks as a whole, such as `settle_note: higher`."""
    found = set()
    for name, code in sources().items():
        for call in re.finditer(r"(?<!\.)\bunpack\(", code):
            given = arguments(code[call.end() :])
            last = (
                rf"local last = math\.min\({re.escape(given[1])} \+ SLICE"
                if len(given) == 3
                else ""
            )
            if len(given) != 3 or not ("SLICE" in given[2] or re.search(last, code)):
                found.add(f"{name}: {', '.join(given)}")
    return found


def bound(name: str) -> int:
    return constants()[name]


# A retry or dead letter as Python sends it: all names and values, together with the added fields.
LETTER_VALUES = dead_letters.BODY_VALUES_MAX + dead_letters.ADDED_VALUES_MAX

# Each list that a script unpacks as a whole, with the maximum number of its values. That is the
# limit in the Python code or in the script that fills the list. A string names a constant of a
# script.
UNPACKED: dict[str, int | str] = {
    "_settle_items: ARGV, at + 1, last": LETTER_VALUES,
    "_settle_items: list": LETTER_VALUES,
    "_outbox: ARGV, first, last": publishing.FIELDS_MAX,
    "control_change: ARGV, 4": 2 * directives.DIRECTIVES_MAX,
    "dead_deliver: fields": dead.DELIVER_MAX,
    "dead_replay: merge_fields(letter[2], changed, DEAD_ONLY)": LETTER_VALUES
    + 8,  # failedAt and three counts
    "group_restore: part": "_lists.SLICE",
    "member_heartbeat: silent": silence.FORGET_MAX,
    "message_promote: fields": "message_promote.WIDEST",
    "message_promote: gone": messages.ITEMS_MAX,
    "_write: values, at + 1, last": publishing.FIELDS_MAX,
    "message_reclaim: filter": 1,
    "message_reclaim: ids": messages.ITEMS_MAX + 1,
    "message_recover: names": 4,
    "outbox_renew: figures": 2 * len(outbox.FIGURES),
    "query_position: position": 5,
    "retry_cancel: fields": LETTER_VALUES,
    "schedule_fire: redis.call('HMGET', last, name .. ':id', name .. ':tick')": 2,
    "schedule_fire: redis.call('HMGET', schedules, name .. ':hash', name .. ':seen')": 2,
    "schedule_fire: step.body": schedules.FIELDS_MAX,
    "schedule_fire: ticks, at, at + 5": 6,
    "schedule_run: fields": schedules.FIELDS_MAX,
    "schedule_run: redis.call('HMGET', last, name .. ':tick', name .. ':ran')": 2,
    "schedule_stamp: redis.call('HMGET', schedules, name .. ':hash', name .. ':origin')": 2,
    "settle_dead: fields": LETTER_VALUES,
    "settle_note: higher": 4 * messages.ITEMS_MAX,
    "settle_retry: dues": 2 * messages.ITEMS_MAX,
    "settle_retry: packed": 2 * messages.ITEMS_MAX,
    "sink_publish: fields": spark.FIELDS_MAX,
}

# Each number that has a name in a script, with the numbers in Python that must be equal, or the
# reason why no caller depends on it.
TIED: dict[str, int | str] = {
    "_byte_limit.BYTES_MAX": items.BYTES_MAX,
    "_owner_changes.CHANGES_MAX": leases.CHANGES_MAX,
    "_counting.PIECE": "entries of one step of a walk",
    "_fields.WIDE": "wider bodies answer MISSING, and the caller sends them: BODY_VALUES_MAX",
    "_lists.SLICE": "values of one command",
    "_nodes.FREED_MAX": "bytes that one trim frees",
    "_nodes.NODE": "entries of a node where the server's setting may not be read",
    "_nodes.STEP": "entries of one step of a trim",
    "_numbers.WHOLE_MAX": untrusted.INTEGER_MAX,
    "_places.SMALL": "fields of a hash that is read as a whole",
    "_unfinished.LOOKED_AT": "retries of a group that one tick looks at",
    "control_change.LAST_MAX": (untrusted.INTEGER_MAX + 1) // 2,
    "dead_letters_measure.AT_ONCE": "letters of one step of a walk",
    "message_find.AT_ONCE": "entries of one step of a walk",
    "message_find.COPIES_MAX": "copies of one message in an answer",
    "message_promote.PUT_OFF_MS": "a wait",
    "message_promote.WIDEST": "wider items are promoted with the known fields only",
    "message_reclaim.LOOKED_MAX": "rows that one page looks at",
    "retry_page.PAGES": "steps of a walk",
    "sink_publish.PIECE": "rows of one step of a walk",
    "stream_page.AT_ONCE": "entries of one step of a walk",
}


def test_every_unpacked_list_fits_the_lua_stack() -> None:
    """Callers pass no more values to a script than one `unpack` takes."""
    assert find_unpacked_lists() == UNPACKED.keys(), "a list without its limit"
    limits = {
        what: bound(limit) if isinstance(limit, str) else limit for what, limit in UNPACKED.items()
    }
    beside = 3  # values of the command itself: '*', failedAt and its time
    assert {what for what, limit in limits.items() if limit + beside > LUA_UNPACK_MAX} == set()
    assert bound("_fields.WIDE") + dead_letters.ADDED_VALUES_MAX + beside <= LUA_UNPACK_MAX


def test_every_script_constant_equals_its_python_constant() -> None:
    """A limit in a script equals the limit in the Python code that calls it."""
    found = constants()
    assert found.keys() == TIED.keys(), "a number that nothing ties"
    tied = {name: value for name, value in TIED.items() if isinstance(value, int)}
    assert {name: found[name] for name in tied} == tied


def checked_limits() -> set[str]:
    """Return each limit that a function in store/ checks before it builds a call."""
    found = set()
    for path in STORE.glob("*.py"):
        code = path.read_text()
        refusal = re.compile(r"if .*?(?:>|<=) (?:2 \* )?([A-Z_]+_MAX)\b.*:\n +raise ContractError")
        found |= {f"{path.stem}.{name}" for name in refusal.findall(code)}
        found |= {f"{path.stem}.{name}" for name in re.findall(r"_page\(.*, ([A-Z_]+_MAX)\)", code)}
    return found


def largest(setting: str) -> int:
    """Return the largest value that a consumer's setting may have."""
    (field,) = [each for each in dataclasses.fields(Consumer) if each.name == setting]
    return int(field.metadata["setting"].max)


# Each limit that store/ checks, with the sizes of the parts and pages that callers make.
FEEDERS: dict[str, list[int]] = {
    "dead.DELIVER_MAX": [],  # the admin command first asks for the number of fields
    "dead.ITEMS_MAX": [dead_letter_expirer.PAGE],
    "dead.PLACES_MAX": [reading.PAGE_MAX],
    "directives.DIRECTIVES_MAX": [],
    "leases.ENTRIES_MAX": [ENTRIES_MAX],
    "messages.ITEMS_MAX": [
        settler.BATCH_MAX,
        recovery.RECOVER_PAGE,
        promoter.PAGE,
        largest("prefetch_max"),  # a page of fetch, recover and reclaim, and one read
    ],
    "messages.PLACES_MAX": [settler.BATCH_MAX],
    "outbox.FIELDS_MAX": [],
    "outbox.ROWS_MAX": [section_settings(outboxes.OutboxSettings)["batch"].max],
    "publishing.FIELDS_MAX": [],
    "retention.MISSING_MAX": [retention_enforcer.MISSING],
    "retention.REMOVED_MAX": [trimmer.PAGE, retention_enforcer.PAGE, admin_retention.PAGE],
    "retries.ITEMS_MAX": [due.PAGE, due.BATCH, trace.PAGE],
    "schedules.FIELDS_MAX": [],
    "schedules.STAMPS_MAX": [schedules.STAMPS_MAX],
    "schedules.TICKS_MAX": [schedules.TICKS_MAX],
    "spark.STEP_MAX": [spark.STEP_MAX],
}


def test_every_call_limit_accepts_the_largest_batch() -> None:
    """Callers never make parts that are larger than a call accepts."""
    assert checked_limits() == FEEDERS.keys(), "a limit without its callers"
    for name, sizes in FEEDERS.items():
        module, _, limit = name.partition(".")
        most = getattr(importlib.import_module(f"streamqd.store.{module}"), limit)
        assert max(sizes, default=0) <= most, name


def test_pages_of_admin_commands_are_short() -> None:
    """A call requests at most 64 rows if it reads bodies, and 500 if it counts dead letters."""
    assert max(due.PAGE, due.BATCH, trace.PAGE, reading.PAGE_MAX) <= 64
    assert statistics.DEAD_LETTERS_AT_ONCE <= 500


def test_two_reads_fit_into_the_worker_table() -> None:
    """Two reads fit into a worker's table.

    A read brings up to `prefetch_max` entries of each stream while as many are running.
    """
    lanes = largest("concurrency")
    assert 2 * largest("prefetch_max") + lanes <= table_size(lanes) == ENTRIES_MAX
    # The table holds one read, the unsettled entries of the previous one, and held messages.
    assert 3 * largest("prefetch_max") + serial.DUE_MAX <= table_size(1)


def test_related_limits_of_both_sides_agree() -> None:
    """Each side accepts as much as the other side can hold."""
    slot = Scoreboard(1).allot(Assignment("orders", 0, "bill"))
    slot.open_table(largest("concurrency"))
    assert slot.in_flight == ENTRIES_MAX, "the table of a worker"
    partition = AssignmentState(
        slot.assignment, Consumer(topic="orders", group="bill", handler="m:f"), slot
    )
    partition.acquire(1)
    partition.apply_reply(Reply("OK", [b"2", 0, b""]), 0.0)
    slot.open_table(largest("concurrency"))
    slot.put(0, *[b"m:%d-0" % number for number in range(ENTRIES_MAX)])
    slot.states[:] = bytes([DONE]) * ENTRIES_MAX
    child = Child(4711, -1, None, "", -1)  # type: ignore[arg-type]
    partition.record_start(child, 1.0)
    partition.on_exit(Exit(None, 9))
    call = partition.intent(Keys("streaming:mq", "stream:topic"), 10.0, "one")
    assert call is not None, "a refence takes a full table"


def test_start_with_all_suspects_fits_into_one_datagram() -> None:
    """All suspects of a start fit into one datagram.

    A standby gets them over its socket, and waits for them before it starts.
    """
    chance = random.Random(1)
    places = [
        b"%c:%d-%d" % (chance.choice(b"mr"), chance.getrandbits(64), chance.getrandbits(64))
        for _ in range(ENTRIES_MAX)
    ]
    suspects = {place: chance.randrange(1, ENTRIES_MAX) for place in places}
    lease = Lease(Assignment("orders", 0, "bill"), "0" * 32, 2**63)
    packed = Grant(lease, cautious=True, suspects=suspects).pack()
    assert len(packed) <= control_channel.MESSAGE_BYTES_MAX
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert ours.send(packed, socket.MSG_DONTWAIT) == len(packed)
        found = Grant(lease, cautious=False).unpack(theirs.recv(control_channel.MESSAGE_BYTES_MAX))
    assert found.suspects == suspects
