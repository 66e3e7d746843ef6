"""Where replayed letters go, and what they take with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from streamqd.admin import topics
from streamqd.admin.dead_letters_reading import (
    DEAD_ONLY,
    REPLAYS_HEADER,
    Fields,
    origin_of,
    replays_of,
)
from streamqd.admin.pages import Entry
from streamqd.errors import Refused
from streamqd.policy.partitioning import crc32_partition
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

_FRESH = {b"retryCount": b"0", b"crashCount": b"0"}  # what a replayed letter starts with


@dataclass(frozen=True, slots=True)
class Target:
    """Where letters go: as it stands, back to the group that each died in, on its partition.

    `everyone` is every group of the topic; `partition` another partition of the topic; `topic`
    another topic, for all its groups. Letters for another topic go to `partition` there, else to
    that of their key, else to the one with their own number, counted round.
    """

    everyone: bool = False
    partition: int | None = None
    topic: str | None = None

    def __str__(self) -> str:
        if self.topic is not None:
            where = f"the topic {self.topic}"
        else:
            where = "every group" if self.everyone else "their own group"
        return where if self.partition is None else f"{where}, on partition {self.partition}"


HOME = Target()


class Destination(NamedTuple):
    """A stream: a partition, or with a group its retry stream there."""

    topic: str
    partition: int
    group: str | None

    def __str__(self) -> str:
        text = f"{self.topic}/{self.partition}"
        return text if self.group is None else f"{text}/{self.group}"


def read_destination(text: str) -> Destination | None:
    """Read the text of a destination; None when it is not one."""
    topic, _, rest = text.partition("/")
    number, slash, group = rest.partition("/")
    if not (topic and number.isascii() and number.isdigit()):
        return None
    return Destination(topic, int(number), group if slash else None)


class Route:
    """Knows the destination of each letter of a topic. Raises TopicMissing, Refused."""

    def __init__(self, link: Connection, keys: Keys, topic: str, target: Target) -> None:
        if target.topic == topic:
            raise Refused(
                f"{topic} is the topic of the letters: leave --to-topic out, or say --everyone"
            )
        self.topic = topic
        self.target = target
        self.count = topics.partition_count(link, keys, target.topic or topic)
        if target.partition is not None and not 0 <= target.partition < self.count:
            raise Refused(
                f"there is no partition {target.partition} in {target.topic or topic}: partitions"
                f" are numbered 0 to {self.count - 1}"
            )

    def of(self, entry: Entry) -> Destination | None:
        """Where a letter goes; None when it does not say which group it is of."""
        target = self.target
        partition = entry.partition if target.partition is None else target.partition
        if target.topic is not None:
            if target.partition is None:
                key = entry.fields.get(b"key")
                many = self.count
                partition = partition % many if key is None else crc32_partition(key, many)
            return Destination(target.topic, partition, None)
        if target.everyone:
            return Destination(self.topic, partition, None)
        group = Fields(entry.fields).text(b"group")
        return Destination(self.topic, partition, group) if group else None

    def stays(self, entry: Entry, to: Destination) -> bool:
        """Whether the letter stays in its slot, so that it moves in one step."""
        return (to.topic, to.partition) == (self.topic, entry.partition)

    def matches(self, mark: Destination, to: Destination) -> bool:
        """Whether a letter marked for one destination may go on there, instead of to the other."""
        same = (mark.topic, mark.group) == (to.topic, to.group)
        return same and (self.target.partition is None or mark.partition == to.partition)


def changed(topic: str, entry: Entry, to: Destination) -> dict[bytes, bytes]:
    """The fields that a letter gets as it becomes a message again."""
    replays = replays_of(entry) + 1
    fields = {**_FRESH, b"replayCount": b"%d" % replays}
    origin_topic, origin_partition, original_id = origin_of(topic, entry)
    origin = (origin_topic, origin_partition)
    if original_id and origin != (to.topic, str(to.partition)):
        # The message keeps its uid wherever it goes.
        fields[b"originalTopic"], fields[b"originalPartition"] = (part.encode() for part in origin)
    if to.group is None and entry.headers is not None:
        headers = {**entry.headers, REPLAYS_HEADER: str(replays)}
        fields[b"headers"] = json.dumps(headers, separators=(",", ":")).encode()
    return fields


def moved(topic: str, entry: Entry, to: Destination) -> dict[bytes, bytes]:
    """All fields of a letter as it becomes a message in another slot."""
    kept = {name: value for name, value in entry.fields.items() if name not in DEAD_ONLY}
    return kept | changed(topic, entry, to)
