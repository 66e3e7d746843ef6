"""Topics: their number of partitions, fixed once, and the registry of their names.

Called by producers (which create what they write to), the supervisor and the administration. These
functions do their I/O themselves: meta and registry live in different slots, and no caller has
anything to send along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamqd import config
from streamqd.config import Topic
from streamqd.errors import ContractError, RedisRefused, StreamqdError
from streamqd.store import scripts
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call

PARTITIONS_MAX = 65_536  # a larger number is a mistake, or a key of somebody else


class TopicMeta(NamedTuple):
    """What is registered of a topic. `settings` are those of its creation."""

    partitions: int
    created_unix_ms: int
    settings: dict[str, Any]


def create(link: Link, keys: Keys, name: str, topic: Topic) -> int:
    """Create a topic unless it exists, put its name into the registry; return its partition count.

    The first creation wins: the count returned may be another than the one asked for. Raises
    RedisRefused with the code DELETING while the topic is being deleted.
    """
    reply = link.run(creation(keys, name, topic))
    if reply.word == "DELETING":
        raise RedisRefused(
            "DELETING",
            f"the topic {name} is being deleted; if that was interrupted, finish it with"
            f" `streamqd topic delete {name}`",
        )
    register(link, keys, name)
    return topic.partitions if reply.word == "OK" else count_of(name, reply.rest[0])


def creation(keys: Keys, name: str, topic: Topic) -> Call:
    """Build the call that creates a topic: OK, EXISTS with its count and settings, or DELETING."""
    return scripts.get("topic_create").call(
        {"meta": keys.meta(name), "partitions": keys.partitions(name)},
        count=topic.partitions,
        settings=_packed(config.registered(topic)),
        streams=[keys.stream(name, number) for number in range(topic.partitions)],
    )


def configuration(keys: Keys, name: str, seen: str, settings: Mapping[str, Any]) -> Call:
    """Build the call that replaces the settings, if they are still `seen`, the text of `stored`."""
    return scripts.get("topic_configure").call(
        {"meta": keys.meta(name)}, seen=seen, settings=_packed(settings)
    )


def retirement(keys: Keys, name: str) -> Call:
    """Build the call that begins a deletion: OK with the count (also when repeated), or MISSING."""
    return scripts.get("topic_retire").call({"meta": keys.meta(name)})


def stored(link: Link, keys: Keys, name: str) -> str:
    """Return the registered settings as they are stored, '' when there are none."""
    return (link.execute("HGET", keys.meta(name), "settings") or b"").decode()


def groups_seen(link: Link, keys: Keys, name: str) -> list[str]:
    """Return the groups that daemons have ever made on the topic, sorted."""
    fields = [field.decode() for field in link.execute("HKEYS", keys.meta(name))]
    return sorted(each.removeprefix("group:") for each in fields if each.startswith("group:"))


def register(link: Link, keys: Keys, name: str) -> None:
    """Put the name into the registry, where views find it. Repeated by every producer's start."""
    link.execute("SADD", keys.registry(), name)


def registered(link: Link, keys: Keys) -> list[str]:
    """Return the names of all topics, sorted."""
    return sorted(name.decode() for name in link.execute("SMEMBERS", keys.registry()))


def partition_count(link: Link, keys: Keys, name: str) -> int | None:
    """Return the number of partitions, None when there is no such topic."""
    raw = link.execute("HGET", keys.meta(name), "partitionCount")
    return None if raw is None else count_of(name, raw)


def meta(link: Link, keys: Keys, name: str) -> TopicMeta | None:
    """Return what is registered of a topic, None when there is no such topic."""
    count, created, settings = link.execute(
        "HMGET", keys.meta(name), "partitionCount", "created", "settings"
    )
    if count is None:
        return None
    return TopicMeta(count_of(name, count), int(created or 0), json.loads(settings or b"{}"))


def metas(link: Link, keys: Keys, names: Sequence[str]) -> list[TopicMeta | StreamqdError | None]:
    """Return what is registered of topics, in one exchange; an error in place of a bad one."""
    fields = ("partitionCount", "created", "settings")
    replies = link.pipeline([("HMGET", keys.meta(name), *fields) for name in names])
    found: list[TopicMeta | StreamqdError | None] = []
    for name, reply in zip(names, replies, strict=True):
        try:
            found.append(reply if isinstance(reply, RedisRefused) else _meta(name, reply))
        except ContractError as error:
            found.append(error)
    return found


def _packed(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, separators=(",", ":"), sort_keys=True)


def _meta(name: str, reply: Sequence[bytes | None]) -> TopicMeta | None:
    count, created, settings = reply
    if count is None:
        return None
    try:
        stored = json.loads(settings or b"{}")
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise ContractError(f"the settings of the topic {name} in Redis are not a JSON object")
    return TopicMeta(count_of(name, count), int(created or 0), stored)


def count_of(name: str, raw: bytes) -> int:
    """Read a partition count. ContractError when it is none: it is never guessed."""
    # A wrong count would send messages to partitions that nobody reads.
    count = int(raw) if raw.isdigit() and len(raw) < 10 else 0
    if not 1 <= count <= PARTITIONS_MAX:
        raise ContractError(f"the topic {name} has {raw[:20]!r} partitions in Redis")
    return count
