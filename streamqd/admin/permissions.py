"""Check that the Redis user has the permissions that a daemon needs, without running commands.

Commands of operators need more permissions. See the users in etc/acl/.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from streamqd.errors import RedisResponseError, RefusalKind
from streamqd.model import Assignment
from streamqd.store.keys import Keys
from streamqd.store.store import Store

# To check a permission, a command is queued in a transaction, which is then discarded. The server
# checks permissions when it queues a command, and a discarded transaction executes nothing. The
# keys belong to a topic that does not exist.
_ASSIGNMENT = Assignment("streamqd-check", 0, "streamqd-check")

# The commands used on each kind of key. `@` stands for the key.
_LEASE = "GET @, SET @ v, DEL @, STRLEN @, PTTL @, PEXPIRE @ 1"
_FENCE = (
    "EVAL return-1 1 @, EVALSHA sha 1 @, HGET @ f, HMGET @ f, HEXISTS @ f, HSET @ f v, HDEL @ f"
)
_ATTEMPTS = "HMGET @ f, HGET @ f, HKEYS @, HSET @ f v, HINCRBY @ f 1, HDEL @ f"
_ORDERED = "ZADD @ 1 m, ZREM @ m, ZCARD @, ZSCORE @ m, ZRANGE @ 0 0, ZRANGEBYSCORE @ 0 1"
_MAPPED = "HGET @ f, HSET @ f v, HDEL @ f, HLEN @"
_STREAM = (
    "EXISTS @, XADD @ * f v, XLEN @, XTRIM @ MAXLEN 1, XRANGE @ - +,"
    " XREVRANGE @ + -, XREAD STREAMS @ 0, XREADGROUP GROUP g w STREAMS @ >, XACK @ g 1-1,"
    " XPENDING @ g,"
    " XCLAIM @ g w 0 1-1, XINFO GROUPS @, XINFO STREAM @,"
    " XINFO CONSUMERS @ g, XGROUP CREATE @ g $,"
    " MEMORY USAGE @"
)
_DLQ = "XADD @ * f v, XLEN @, XDEL @ 1-1, XRANGE @ - +, XINFO STREAM @"
_TRIM = "HGET @ f, HMGET @ f, HSET @ f v, HINCRBY @ f 1, HLEN @"
_DEDUP = "GET @, SET @ v"
_META = "HGET @ f, HMGET @ f, HSET @ f v, HSETNX @ f v"
_NAMES = "SADD @ m, SCARD @, SMEMBERS @"
_MEMBERS = "ZADD @ 1 m, ZREM @ m, ZSCORE @ m, ZRANGE @ 0 0, ZRANGEBYSCORE @ 0 1"
_INFO = "HGET @ f, HSET @ f v, HDEL @ f, HGETALL @"
_DIRECTIVES = "HGET @ f, HGETALL @, HSET @ f v, HDEL @ f, HLEN @, HEXISTS @ f"
_SUMMARY = "GET @, SET @ v"
_EPOCHS = "RPUSH @ v, LTRIM @ 0 1"
_STACK = "SET @ v"
_WAKE = "PUBLISH @ m, SUBSCRIBE @"
_KEYLESS = "TIME, INFO, WAIT 0 1, SCRIPT EXISTS sha, SCRIPT LOAD return-1"


# Commands whose subcommands have separate permissions.
_WORDED = frozenset({"MEMORY", "SCRIPT", "XGROUP", "XINFO"})


class MissingPermission(NamedTuple):
    """A missing permission for a command, such as `HGET` or `XINFO STREAM`.

    `key` is the key that the command may not access, or '' if it takes no key.
    """

    command: str
    key: str


def find_missing(store: Store, fleet: str) -> list[MissingPermission]:
    """Return the missing permissions, or [] if the user has all of them.

    Raises RedisResponseError if the user may not use transactions, which workers need as well.
    """
    fence = store.keys.fence(*_ASSIGNMENT)
    # This EXEC always fails, because no transaction is open. If the user may not use EXEC, it fails
    # with another error.
    transaction = (("WATCH", fence), ("MULTI",), ("DISCARD",), ("EXEC",))
    watched, *others = store.pipeline(transaction)
    for reply in others:
        if isinstance(reply, RedisResponseError) and reply.code != "ERR":
            raise reply
    lacking = [MissingPermission("WATCH", fence)] if _is_forbidden(watched) else []
    # Each slot gets its own transaction, because a cluster refuses a transaction with keys of
    # several slots.
    for needed in (
        _partition_rules(store.keys),
        {
            store.keys.meta(_ASSIGNMENT.topic): _META,
            store.keys.partitions(_ASSIGNMENT.topic): _NAMES,
        },
        {store.keys.registry(): _NAMES, "": _KEYLESS},
        _fleet_rules(store.keys, fleet),
    ):
        commands = [
            (key, [key if part == "@" else part for part in command.split()])
            for key, listed in needed.items()
            for command in listed.split(", ")
        ]
        # Everything is sent in one write, so that MULTI and the commands use the same connection.
        replies = store.pipeline((("MULTI",), *(parts for _, parts in commands), ("DISCARD",)))
        lacking += [
            MissingPermission(_command_name(parts), key)
            for (key, parts), reply in zip(commands, replies[1:-1], strict=True)
            if _is_forbidden(reply)
        ]
    return lacking


def by_command(lacking: Iterable[MissingPermission]) -> dict[str, list[str]]:
    """Map each forbidden command to its keys. A command without keys is mapped to []."""
    found: dict[str, list[str]] = {}
    for command, key in lacking:
        found.setdefault(command, []).extend([key] if key else [])
    return found


def _is_forbidden(reply: object) -> bool:
    return isinstance(reply, RedisResponseError) and reply.kind is RefusalKind.FORBIDDEN


def _command_name(parts: list[str]) -> str:
    return " ".join(parts[:2]) if parts[0] in _WORDED else parts[0]


def _partition_rules(keys: Keys) -> dict[str, str]:
    place = _ASSIGNMENT[:2]
    return {
        keys.lease(*_ASSIGNMENT): _LEASE,
        keys.fence(*_ASSIGNMENT): _FENCE,
        keys.attempts(*_ASSIGNMENT): _ATTEMPTS,
        keys.epochs(*_ASSIGNMENT): _EPOCHS,
        keys.stack(*_ASSIGNMENT): _STACK,
        keys.retry(*_ASSIGNMENT): _ORDERED,
        keys.retry_items(*_ASSIGNMENT): _MAPPED,
        keys.stream(*place): _STREAM,
        keys.retry_stream(*_ASSIGNMENT): _STREAM,
        keys.dlq(*place): _DLQ,
        keys.moving(*place): _MAPPED,
        keys.delayed_sends(*place): _ORDERED,
        keys.delayed_send_items(*place): _MAPPED,
        keys.trim(*place): _TRIM,
        keys.dedup(*place, "d"): _DEDUP,
    }


def _fleet_rules(keys: Keys, fleet: str) -> dict[str, str]:
    return {
        keys.members(fleet): _MEMBERS,
        keys.info(fleet): _INFO,
        keys.directives(fleet): _DIRECTIVES,
        keys.instance(fleet, "streamqd-check"): _SUMMARY,
        keys.wake(fleet): _WAKE,
    }
