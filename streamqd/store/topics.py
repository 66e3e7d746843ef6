"""Topics: their partition count, set once, and the registry of their names.

The callers are producers (which create the topics to which they write), the supervisor and the
administration. These functions do their own I/O, because meta and registry are in different slots,
and no caller has other commands to send with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamqd import config
from streamqd.config import Topic
from streamqd.errors import InvalidValueError, RedisResponseError, StreamqdError
from streamqd.store import scripts, untrusted
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from streamqd.store.store import Store

PARTITIONS_MAX = 65_536  # a larger number is a mistake or from another program


class TopicMeta(NamedTuple):
    """The registered data of a topic. `settings` are the registered settings."""

    partitions: int
    created_unix_ms: int
    settings: dict[str, Any]


def create(store: Store, name: str, topic: Topic) -> int:
    """Create a topic unless it exists, and register its name. Return its partition count.

    If the topic exists, its count may differ from the requested count. Raises RedisResponseError
    with the code DELETING while the topic is being deleted, and InvalidValueError if the count is
    invalid.
    """
    reply = store.run(creation(store.keys, name, topic))
    if reply.word == "DELETING":
        raise RedisResponseError(
            "DELETING",
            f"topic {name} is being deleted; if that was interrupted, finish it with"
            f" `streamqd topic delete {name}`",
        )
    register(store, name)
    if reply.word == "OK":
        return topic.partitions
    return count_of(name, reply.values[0], store.keys.meta(name))


def creation(keys: Keys, name: str, topic: Topic) -> Call:
    """Build the call that creates a topic. Replies OK, EXISTS (count, settings) or DELETING."""
    return scripts.build_call(
        "topic_create",
        keys,
        (name,),
        count=topic.partitions,
        settings=_to_json(config.registered_settings(topic)),
        streams=[keys.stream(name, number) for number in range(topic.partitions)],
    )


def configuration(keys: Keys, name: str, seen: str, settings: Mapping[str, Any]) -> Call:
    """Build the call that replaces the settings, if they still equal `seen`.

    `seen` is the reply of `read_settings`.
    """
    return scripts.build_call(
        "topic_configure", keys, (name,), seen=seen, settings=_to_json(settings)
    )


def retirement(keys: Keys, name: str) -> Call:
    """Build the call that starts a deletion. Replies OK (count), even if repeated, or MISSING."""
    return scripts.build_call("topic_retire", keys, (name,))


def read_settings(store: Store, name: str) -> str:
    """Return the registered settings as stored, '' if there are none."""
    key = store.keys.meta(name)
    return untrusted.text(store.execute("HGET", key, "settings"), key, "settings", default="")


def groups_seen(store: Store, name: str) -> list[str]:
    """Return all groups that daemons have created on the topic so far, sorted."""
    fields = [untrusted.label(field) for field in store.execute("HKEYS", store.keys.meta(name))]
    return sorted(each.removeprefix("group:") for each in fields if each.startswith("group:"))


def register(store: Store, name: str) -> None:
    """Add the name to the registry. Every producer does this at its start."""
    store.execute("SADD", store.keys.registry(), name)


def names(store: Store) -> list[str]:
    """Return the names of all topics, sorted, without the invalid names that `registry` returns.

    Raises InvalidValueError if the registry's key has another type.
    """
    return _names(store)[0]


def registry(store: Store) -> tuple[list[str], list[InvalidValueError]]:
    """Return the names of all topics, sorted, and the registry's invalid entries."""
    try:
        return _names(store)
    except InvalidValueError as error:
        return [], [error]


def _names(store: Store) -> tuple[list[str], list[InvalidValueError]]:
    key, names, bad = store.keys.registry(), list[str](), list[InvalidValueError]()
    for raw in sorted(_read(store.connection, "a set", "SMEMBERS", key)):
        try:
            names.append(untrusted.name(raw, key))
        except InvalidValueError as error:
            bad.append(error)
    return names, bad


def no_partition_text(topic: str, partition: int, count: int) -> str:
    """Return the error text for a partition that a topic of `count` partitions does not have."""
    return (
        f"partition {partition} of topic {topic} not found; partitions are numbered 0 to"
        f" {count - 1}"
    )


def partition_count(store: Store, name: str) -> int | None:
    """Return the partition count, or None if the topic does not exist. Raises InvalidValueError."""
    raw = _read(store.connection, "a hash", "HGET", store.keys.meta(name), "partitionCount")
    return None if raw is None else count_of(name, raw, store.keys.meta(name))


def presence(keys: Keys, name: str) -> tuple[Any, ...]:
    """Build the command whose reply `present` parses."""
    return ("HMGET", keys.meta(name), "partitionCount", "deleting")


def present(keys: Keys, name: str, reply: Sequence[bytes | None]) -> int | None:
    """Return the partition count, 0 while the topic is being deleted, None if it is gone.

    Raises InvalidValueError.
    """
    count, deleting = reply
    if count is not None:
        return count_of(name, count, keys.meta(name))
    return None if deleting is None else 0


def count_streams(store: Store, name: str) -> int:
    """Return the number of consecutive partitions from 0 in the set of partition streams."""
    streams = set(store.execute("SMEMBERS", store.keys.partitions(name)))
    count = 0
    while count < PARTITIONS_MAX and store.keys.stream(name, count).encode() in streams:
        count += 1
    return count


def meta(store: Store, name: str) -> TopicMeta | None:
    """Return the registered data of a topic, or None if it does not exist.

    Raises InvalidValueError.
    """
    return _meta(
        store.keys, name, _read(store.connection, "a hash", "HMGET", store.keys.meta(name), *_META)
    )


def _read(link: Connection, wanted: str, command: str, key: str, *fields: str) -> Any:
    """Run a reading command. Raises InvalidValueError if the key has a type other than `wanted`."""
    try:
        return link.execute(command, key, *fields)
    except RedisResponseError as error:
        if error.code != "WRONGTYPE":
            raise
        raise InvalidValueError(key, "", "of another type", wanted) from error


def metas(store: Store, names: Sequence[str]) -> list[TopicMeta | StreamqdError | None]:
    """Return the registered data of each topic, or its error. One round trip."""
    replies = store.pipeline([("HMGET", store.keys.meta(name), *_META) for name in names])
    found: list[TopicMeta | StreamqdError | None] = []
    for name, reply in zip(names, replies, strict=True):
        try:
            found.append(
                reply if isinstance(reply, RedisResponseError) else _meta(store.keys, name, reply)
            )
        except InvalidValueError as error:
            found.append(error)
    return found


def _to_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, separators=(",", ":"), sort_keys=True)


_META = ("partitionCount", "created", "settings")


def _meta(keys: Keys, name: str, reply: Sequence[bytes | None]) -> TopicMeta | None:
    count, created, settings = reply
    if count is None:
        return None
    key = keys.meta(name)
    return TopicMeta(
        count_of(name, count, key),
        untrusted.integer(created or None, key, "created", default=0),
        untrusted.json_object(settings or None, key, "settings", default={}),
    )


def missing_count_error(key: str) -> InvalidValueError:
    """Return the error for the meta `key` of a topic without a partition count."""
    return InvalidValueError(
        key, "partitionCount", "missing", f"an integer from 1 to {PARTITIONS_MAX}"
    )


def count_of(name: str, raw: bytes, key: str = "") -> int:
    """Parse a partition count.

    Raises InvalidValueError if it is invalid, because a count is never guessed.
    """
    # A wrong count would send messages to partitions that no group reads.
    key = key or f"the meta of topic {name}"
    return untrusted.integer(raw, key, "partitionCount", low=1, high=PARTITIONS_MAX)
