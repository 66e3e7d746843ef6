"""Topics: their register, their partitions and how full those are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from streamqd import config
from streamqd.admin.pages import ask, measure
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.errors import Refused, TopicMissing
from streamqd.store import statistics, topics
from streamqd.store.client import Link
from streamqd.store.keys import Keys


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One topic of `topic list`. `messages` are the entries kept in its partitions."""

    topic: str
    partitions: int
    messages: int
    scheduled: int
    dead: int
    groups: list[str]
    created_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """One partition of a topic. `added` counts all entries ever; ids are '' when there is none."""

    partition: int
    messages: int
    added: int
    first_id: str
    last_id: str
    scheduled: int
    dead: int


@dataclass(frozen=True, slots=True)
class TopicDetail:
    """A topic as `topic describe` shows it. `settings` are those that it was created with."""

    topic: str
    created_unix_ms: int | None
    settings: dict[str, Any]
    groups: list[str]
    partitions: list[PartitionRow]


@dataclass(frozen=True, slots=True)
class Created:
    """What `topic create` did. `created` is false when it existed with this very count."""

    topic: str
    partitions: int
    created: bool


def partition_count(link: Link, keys: Keys, topic: str) -> int:
    """How many partitions a topic has. Raises TopicMissing, with the nearest name there is."""
    if not NAME.fullmatch(topic):
        raise TopicMissing(f"{topic!r} is not the name of a topic: {NAME_HINT}")
    count = topics.partition_count(link, keys, topic)
    if count is None:
        near = difflib.get_close_matches(topic, topics.registered(link, keys), n=1)
        hint = f"did you mean {near[0]}?" if near else "`streamqd topic list` shows those that do"
        raise TopicMissing(f"the topic {topic} does not exist; {hint}")
    return count


def create(link: Link, keys: Keys, topic: str, wanted: config.Topic) -> Created:
    """Register a topic. Refused when it exists with another number of partitions."""
    if not NAME.fullmatch(topic):
        raise Refused(f"{topic!r} cannot be the name of a topic: {NAME_HINT}")
    before = topics.partition_count(link, keys, topic)
    count = topics.create(link, keys, topic, wanted)
    if count != wanted.partitions:
        raise Refused(
            f"the topic {topic} exists already, with {count} partitions; that number cannot be"
            " changed by creating it again"
        )
    return Created(topic, count, created=before is None)


def listed(link: Link, keys: Keys) -> list[TopicRow]:
    """Every registered topic with its totals."""
    rows = []
    for topic in topics.registered(link, keys):
        meta = topics.meta(link, keys, topic)
        if meta is None:
            continue  # the registry lives in another slot: it may be older than a lost meta
        figures = _figures(link, keys, topic, meta.partitions)
        rows.append(
            TopicRow(
                topic=topic,
                partitions=meta.partitions,
                messages=sum(each.length for each in figures),
                scheduled=sum(each.scheduled for each in figures),
                dead=sum(each.dead for each in figures),
                groups=groups(link, keys, topic, range(meta.partitions)),
                created_unix_ms=meta.created_unix_ms or None,
            )
        )
    return rows


def describe(link: Link, keys: Keys, topic: str) -> TopicDetail:
    """One topic, partition by partition. Raises TopicMissing."""
    count = partition_count(link, keys, topic)
    meta = topics.meta(link, keys, topic)
    figures = _figures(link, keys, topic, count)
    return TopicDetail(
        topic=topic,
        created_unix_ms=meta.created_unix_ms or None if meta else None,
        settings=meta.settings if meta else {},
        groups=groups(link, keys, topic, range(count)),
        partitions=[
            PartitionRow(
                partition=number,
                messages=each.length,
                added=each.added,
                first_id=each.first_id,
                last_id="" if each.last_id == "0-0" else each.last_id,
                scheduled=each.scheduled,
                dead=each.dead,
            )
            for number, each in enumerate(figures)
        ],
    )


def groups(link: Link, keys: Keys, topic: str, partitions: Iterable[int]) -> list[str]:
    """Names of the groups that read any of the partitions, sorted."""
    replies = ask(link, [("XINFO", "GROUPS", keys.stream(topic, each)) for each in partitions])
    found = set()
    for reply in replies:
        for group in reply or ():
            found.add(dict(zip(group[::2], group[1::2], strict=True))[b"name"].decode())
    return sorted(found)


def _figures(link: Link, keys: Keys, topic: str, count: int) -> list[statistics.PartitionFigures]:
    calls = [statistics.measure_partition(keys, topic, number) for number in range(count)]
    return [statistics.partition_figures(reply) for reply in measure(link, calls)]
