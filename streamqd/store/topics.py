"""Create and read topics, and maintain the registry of their names.

Producers use these functions to create the topics to which they write. The supervisor and the
administration use them too. Most functions in this package return calls, so that the caller can
send several together. Most functions here run their commands themselves, because the metadata of a
topic and the registry are in different slots, and no caller has other commands to send with them.
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

PARTITIONS_MAX = 65_536  # a larger count must be a mistake, or another program has written it


class TopicMeta(NamedTuple):
    """The metadata of a topic that is registered in Redis."""

    partitions: int
    created_unix_ms: int
    settings: dict[str, Any]


def create(store: Store, name: str, topic: Topic) -> int:
    """Create a topic unless it exists, and register its name. Return its partition count.

    If the topic already exists, its settings are not changed, so its count may differ from the
    requested one. Raises RedisResponseError with the code DELETING while the topic is being
    deleted, and InvalidValueError if the stored count is invalid.
    """
    reply = store.run(create_call(store.keys, name, topic))
    if reply.word == "DELETING":
        raise RedisResponseError(
            "DELETING",
            f"topic {name} is being deleted; if that was interrupted, finish it with"
            f" `streamqd topic delete {name}`",
        )
    register(store, name)
    if reply.word == "OK":
        return topic.partitions
    return parse_partition_count(name, reply.values[0], store.keys.meta(name))


def create_call(keys: Keys, name: str, topic: Topic) -> Call:
    """Build a call that creates a topic.

    The reply is OK if the topic was created. If it already exists, the reply is EXISTS with its
    count and settings, or DELETING while it is being deleted.
    """
    return scripts.build_call(
        "topic_create",
        keys,
        (name,),
        count=topic.partitions,
        settings=_to_json(config.registered_settings(topic)),
        streams=[keys.stream(name, number) for number in range(topic.partitions)],
    )


def configure_call(keys: Keys, name: str, seen: str, settings: Mapping[str, Any]) -> Call:
    """Build a call that replaces the registered settings of a topic.

    `seen` is the result of `read_settings` on which the new settings are based. If the settings
    have changed since then, the call changes nothing.
    """
    return scripts.build_call(
        "topic_configure", keys, (name,), seen=seen, settings=_to_json(settings)
    )


def retire_call(keys: Keys, name: str) -> Call:
    """Build a call that starts the deletion of a topic.

    The reply is OK with the partition count, even if the deletion has already been started. It is
    MISSING if the topic does not exist.
    """
    return scripts.build_call("topic_retire", keys, (name,))


def read_settings(store: Store, name: str) -> str:
    """Return the registered settings in the form in which they are stored, or '' if none are."""
    key = store.keys.meta(name)
    return untrusted.text(store.execute("HGET", key, "settings"), key, "settings", default="")


def known_groups(store: Store, name: str) -> list[str]:
    """Return the sorted names of all groups that daemons have created on the topic so far."""
    fields = [untrusted.label(field) for field in store.execute("HKEYS", store.keys.meta(name))]
    return sorted(each.removeprefix("group:") for each in fields if each.startswith("group:"))


def register(store: Store, name: str) -> None:
    """Add a topic's name to the registry. Every producer does this when it starts."""
    store.execute("SADD", store.keys.registry(), name)


def names(store: Store) -> list[str]:
    """Return the sorted names of all topics. Invalid entries of the registry are skipped.

    Raises InvalidValueError if the key of the registry has the wrong type.
    """
    return _names(store)[0]


def read_registry(store: Store) -> tuple[list[str], list[InvalidValueError]]:
    """Return the sorted names of all topics, and an error for each invalid entry."""
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
    return None if raw is None else parse_partition_count(name, raw, store.keys.meta(name))


def partition_count_command(keys: Keys, name: str) -> tuple[Any, ...]:
    """Return the command whose reply `parse_partition_count_reply` parses."""
    return ("HMGET", keys.meta(name), "partitionCount", "deleting")


def parse_partition_count_reply(keys: Keys, name: str, reply: Sequence[bytes | None]) -> int | None:
    """Parse the reply to the command of `partition_count_command`.

    Return the partition count, 0 if the topic is being deleted, or None if it does not exist.
    Raises InvalidValueError.
    """
    count, deleting = reply
    if count is not None:
        return parse_partition_count(name, count, keys.meta(name))
    return None if deleting is None else 0


def count_streams(store: Store, name: str) -> int:
    """Return the number of consecutive partitions, from 0, in the topic's set of streams."""
    streams = set(store.execute("SMEMBERS", store.keys.partitions(name)))
    count = 0
    while count < PARTITIONS_MAX and store.keys.stream(name, count).encode() in streams:
        count += 1
    return count


def meta(store: Store, name: str) -> TopicMeta | None:
    """Return the metadata of a topic, or None if the topic does not exist.

    Raises InvalidValueError.
    """
    return _meta(
        store.keys, name, _read(store.connection, "a hash", "HMGET", store.keys.meta(name), *_META)
    )


def _read(link: Connection, wanted: str, command: str, key: str, *fields: str) -> Any:
    """Run a command that reads a key.

    Raises InvalidValueError if the type of the key is not `wanted`.
    """
    try:
        return link.execute(command, key, *fields)
    except RedisResponseError as error:
        if error.code != "WRONGTYPE":
            raise
        raise InvalidValueError(key, "", "of another type", wanted) from error


def metas(store: Store, names: Sequence[str]) -> list[TopicMeta | StreamqdError | None]:
    """Return the metadata of each topic, in the same order, in one round trip.

    The element is None for a topic that does not exist, or an error if the metadata cannot be read.
    """
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
        parse_partition_count(name, count, key),
        untrusted.integer(created or None, key, "created", default=0),
        untrusted.json_object(settings or None, key, "settings", default={}),
    )


def missing_count_error(key: str) -> InvalidValueError:
    """Return the error for a topic whose meta key contains no partition count."""
    return InvalidValueError(
        key, "partitionCount", "missing", f"an integer from 1 to {PARTITIONS_MAX}"
    )


def parse_partition_count(name: str, raw: bytes, key: str = "") -> int:
    """Parse the partition count of the topic `name`.

    Raises InvalidValueError if the count is invalid. There is no default, because a wrong count
    could send messages to partitions that no group reads.
    """
    key = key or f"the meta of topic {name}"
    return untrusted.integer(raw, key, "partitionCount", low=1, high=PARTITIONS_MAX)
