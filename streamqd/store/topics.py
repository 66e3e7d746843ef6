"""Topics: their number of partitions, fixed once, and the registry of their names.

Called by producers (which create what they write to), the supervisor and the administration. These
functions do their I/O themselves: meta and registry live in different slots, and no caller has
anything to send along.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from streamqd.config import Topic
from streamqd.errors import ContractError
from streamqd.store import scripts
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call


class TopicMeta(NamedTuple):
    """What is registered of a topic. `settings` are those of its creation."""

    partitions: int
    created_unix_ms: int
    settings: dict[str, Any]


def create(link: Link, keys: Keys, name: str, topic: Topic) -> int:
    """Create a topic unless it exists, put its name into the registry; return its partition count.

    The first creation wins: the count returned may be another than the one asked for.
    """
    reply = link.run(creation(keys, name, topic))
    register(link, keys, name)
    return topic.partitions if reply.word == "OK" else _count(name, reply.rest[0])


def creation(keys: Keys, name: str, topic: Topic) -> Call:
    """Build the call that creates a topic: OK, or EXISTS with its count and settings."""
    retention = topic.retention
    settings = {
        "archive": topic.archive,
        "retention": {"max_age": retention.max_age, "max_length": retention.max_length},
    }
    return scripts.get("topic_create").call(
        {"meta": keys.meta(name), "partitions": keys.partitions(name)},
        count=topic.partitions,
        settings=json.dumps(settings, separators=(",", ":"), sort_keys=True),
        streams=[keys.stream(name, number) for number in range(topic.partitions)],
    )


def register(link: Link, keys: Keys, name: str) -> None:
    """Put the name into the registry, where views find it. Repeated by every producer's start."""
    link.execute("SADD", keys.registry(), name)


def registered(link: Link, keys: Keys) -> list[str]:
    """Return the names of all topics, sorted."""
    return sorted(name.decode() for name in link.execute("SMEMBERS", keys.registry()))


def partition_count(link: Link, keys: Keys, name: str) -> int | None:
    """Return the number of partitions, None when there is no such topic."""
    raw = link.execute("HGET", keys.meta(name), "partitionCount")
    return None if raw is None else _count(name, raw)


def meta(link: Link, keys: Keys, name: str) -> TopicMeta | None:
    """Return what is registered of a topic, None when there is no such topic."""
    count, created, settings = link.execute(
        "HMGET", keys.meta(name), "partitionCount", "created", "settings"
    )
    if count is None:
        return None
    return TopicMeta(_count(name, count), int(created or 0), json.loads(settings or b"{}"))


def _count(name: str, raw: bytes) -> int:
    # A wrong count would send messages to partitions that nobody reads.
    if not raw.isdigit() or int(raw) < 1:
        raise ContractError(f"the topic {name} has {raw!r} partitions in Redis")
    return int(raw)
