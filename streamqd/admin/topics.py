"""Create topics, and read the registry, the partitions and their contents."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamqd import config
from streamqd.admin import backlog, topics_settings
from streamqd.admin.assignments import measure_assignments
from streamqd.admin.reading import Unreadable, ViewReader, group_names, measure_memory
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.errors import InvalidRequestError, RequestRefusedError, TopicNotFoundError
from streamqd.model import DLQ_SUFFIX, QUERY_PREFIX, Assignment
from streamqd.store import growth, statistics, topics, untrusted
from streamqd.store.scripts import Reply
from streamqd.store.store import Store
from streamqd.words import known_sum

SAMPLES = 20  # stream nodes that the server samples to estimate the memory of a stream


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic in `topic list`.

    `messages` is the number of entries in its partitions. `groups` contains the names of its
    groups. `created_unix_ms` is the time at which it was registered, or null if that is unknown.
    `unreadable` lists invalid values in its keys, which are treated as missing. If the registry
    contains a name that is not valid for a topic, this name has a row of its own.
    """

    topic: str
    partitions: int
    messages: int
    delayed_sends: int
    dead_letters: int
    groups: list[str]
    created_unix_ms: int | None
    unreadable: list[Unreadable]


@dataclass(frozen=True, slots=True)
class GroupLag:
    """A group on one partition, or on a whole topic.

    The fields have the same meaning as in `group describe`.
    """

    group: str
    lag: int
    lag_exact: bool
    pending: int
    waiting_retries: int


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """A partition of a topic.

    `added` is the number of entries ever added. `first_id` is '' if the partition is empty.
    `last_id` is the last ID that was issued, or '' if there is none. `bytes` is the approximate
    memory of the stream, or null without the permission to read it.
    """

    partition: int
    messages: int
    added: int
    first_id: str
    last_id: str
    bytes: int | None
    delayed_sends: int
    dead_letters: int
    groups: list[GroupLag]


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over all partitions of a topic."""

    messages: int
    added: int
    bytes: int | None
    delayed_sends: int
    dead_letters: int
    groups: list[GroupLag]


@dataclass(frozen=True, slots=True)
class TopicDetail:
    """A topic as `topic describe` shows it.

    `settings` contains the settings that are registered with the topic, and `configured` those in
    this configuration. `effective` contains the settings that a daemon with this configuration
    uses: configured settings override registered ones, which override the defaults. `growing_to` is
    the partition count to which the topic is growing, or null if it is not growing. `unreadable`
    lists invalid values in the topic's keys, which are treated as missing.
    """

    topic: str
    created_unix_ms: int | None
    settings: dict[str, Any]
    configured: dict[str, Any]
    effective: dict[str, Any]
    growing_to: int | None
    groups: list[str]
    totals: Totals
    partitions: list[PartitionRow]
    unreadable: list[Unreadable]


@dataclass(frozen=True, slots=True)
class Created:
    """The result of `topic create`.

    `created` is False if the topic already existed with the same partition count.
    """

    topic: str
    partitions: int
    created: bool


def partition_count(store: Store, topic: str) -> int:
    """Return the partition count of a topic.

    Raises TopicNotFoundError, which suggests a similar name if there is one. Raises
    InvalidRequestError if the name is not valid.
    """
    if not NAME.fullmatch(topic):
        raise InvalidRequestError(f"{topic!r} is not a valid topic name ({NAME_HINT})")
    count = topics.partition_count(store, topic)
    if count is None:
        near = difflib.get_close_matches(topic, topics.read_registry(store)[0], n=1)
        hint = f"did you mean {near[0]}?" if near else "`streamqd topic list` shows those that do"
        raise TopicNotFoundError(f"topic {topic} does not exist; {hint}")
    return count


def check_partition(topic: str, partition: int, count: int) -> None:
    """Raise RequestRefusedError if a topic does not have this partition."""
    if partition not in range(count):
        raise RequestRefusedError(topics.no_partition_text(topic, partition, count))


def create(store: Store, topic: str, wanted: config.Topic) -> Created:
    """Register a topic.

    Raises InvalidRequestError if the name is not valid, and RequestRefusedError if the topic
    already exists with a different partition count.
    """
    if not NAME.fullmatch(topic):
        raise InvalidRequestError(f"{topic!r} is not a valid topic name ({NAME_HINT})")
    before = topics.partition_count(store, topic)
    count = topics.create(store, topic, wanted)
    if count != wanted.partitions:
        raise RequestRefusedError(
            f"topic {topic} already exists, with {count} partitions; to change the number, run"
            f" `streamqd topic grow {topic}`"
        )
    return Created(topic, count, created=before is None)


def list_topics(store: Store) -> list[TopicRow]:
    """Return every registered topic with its totals."""
    names, invalid = topics.read_registry(store)
    found = ((topic, _row(store, topic)) for topic in names)
    # The registry and the topics' meta keys are in different slots, so one may survive without the
    # other. A topic without its meta key is left out.
    rows = [row for _, row in found if row is not None]
    for error in invalid:
        reader = ViewReader(store)
        reader.add(error)
        rows.append(TopicRow(error.found, 0, 0, 0, 0, [], None, reader.rows))
    return rows


def _row(store: Store, topic: str) -> TopicRow | None:
    reader = ViewReader(store)
    meta = known_meta(reader, topic)
    if meta is None and not reader.rows:
        return None
    count = meta.partitions if meta else 0
    figures = read_figures(reader, {topic: count}).values()
    names = read_groups(reader, {topic: count})[topic]
    return TopicRow(
        topic=topic,
        partitions=count,
        messages=sum(each.length for each in figures),
        delayed_sends=sum(each.delayed_sends for each in figures),
        dead_letters=sum(each.dead for each in figures),
        groups=names,
        created_unix_ms=meta.created_unix_ms or None if meta else None,
        unreadable=reader.rows,
    )


def known_meta(reader: ViewReader, topic: str) -> topics.TopicMeta | None:
    """Return the registered metadata of a topic, without any invalid values.

    Return None if the topic is unknown or its partition count is invalid.
    """
    count = known_count(reader, topic)
    if count is None:
        return None
    key = reader.keys.meta(topic)
    (reply,) = reader.ask([("HMGET", key, "created", "settings")])
    created, settings = reply or (None, None)
    return topics.TopicMeta(
        count,
        reader.read(untrusted.integer, created, key, "created", default=0) or 0,
        topics_settings.valid_settings(reader, settings, key),
    )


def known_count(reader: ViewReader, topic: str) -> int | None:
    """Return the partition count of a topic, or None if it is missing or unreadable."""
    return read_counts(reader, [topic])[topic]


def read_counts(reader: ViewReader, names: Sequence[str]) -> dict[str, int | None]:
    """Return the partition count of each topic, or None if it is missing or unreadable."""
    keys = [reader.keys.meta(name) for name in names]
    replies = reader.ask([("HGET", key, "partitionCount") for key in keys])
    return {
        name: None if raw is None else reader.read(topics.parse_partition_count, name, raw, key)
        for name, key, raw in zip(names, keys, replies, strict=True)
    }


def known_counts(reader: ViewReader) -> dict[str, int]:
    """Return the partition counts of all registered topics. Invalid ones are left out."""
    names, invalid = topics.read_registry(reader.store)
    for error in invalid:
        reader.add(error)
    found = read_counts(reader, names)
    _keep_missing(reader, [name for name, count in found.items() if count is None])
    return {name: count for name, count in found.items() if count is not None}


def _keep_missing(reader: ViewReader, names: Sequence[str]) -> None:
    """Record each of these topics that has no partition count, unless it is being deleted."""
    replies = reader.ask([topics.partition_count_command(reader.keys, name) for name in names])
    unreadable = {row.key for row in reader.rows}
    for name, reply in zip(names, replies, strict=True):
        key = reader.keys.meta(name)
        if reply == [None, None] and key not in unreadable:
            reader.add(topics.missing_count_error(key))


def read_partition_counts(reader: ViewReader, topic: str | None) -> dict[str, int]:
    """Return the partition count of one topic, or of all topics if `topic` is None.

    Topics whose count is invalid are left out. Raises TopicNotFoundError.
    """
    if topic is None:
        return known_counts(reader)
    return {topic: partition_count(reader.store, topic)}


def describe(store: Store, topic: str, configured: config.Topic | None = None) -> TopicDetail:
    """Describe a topic and each of its partitions.

    `configured` contains the settings of the topic in the configuration file. Raises
    TopicNotFoundError.
    """
    count, reader = partition_count(store, topic), ViewReader(store)
    meta = known_meta(reader, topic)
    names = read_groups(reader, {topic: count})[topic]
    rows = _partition_rows(reader, topic, count, names)
    registered = meta.settings if meta else {}
    stated = configured or config.Topic()
    under_way = reader.read(growth.in_progress, store, topic)
    return TopicDetail(
        topic=topic,
        created_unix_ms=meta.created_unix_ms or None if meta else None,
        settings=registered,
        configured=topics_settings.settings_in_file(stated),
        effective=topics_settings.plain(config.effective(stated, registered)),
        growing_to=under_way.to if under_way else None,
        groups=names,
        totals=Totals(
            messages=sum(row.messages for row in rows),
            added=sum(row.added for row in rows),
            bytes=known_sum(row.bytes for row in rows),
            delayed_sends=sum(row.delayed_sends for row in rows),
            dead_letters=sum(row.dead_letters for row in rows),
            groups=[_sum_group(name, rows) for name in names],
        ),
        partitions=rows,
        unreadable=reader.rows,
    )


def _partition_rows(
    reader: ViewReader, topic: str, count: int, names: list[str]
) -> list[PartitionRow]:
    figures = read_figures(reader, {topic: count}).values()
    assignments = [Assignment(topic, number, name) for number in range(count) for name in names]
    rows = measure_assignments(reader, assignments, 0, count_max=backlog.COUNT_MAX)
    sizes = measure_memory(
        reader.store, [reader.keys.stream(topic, number) for number in range(count)], SAMPLES
    )
    return [
        PartitionRow(
            partition=number,
            messages=each.length,
            added=each.added,
            first_id=each.first_id,
            last_id="" if each.last_id == "0-0" else each.last_id,
            bytes=size,
            delayed_sends=each.delayed_sends,
            dead_letters=each.dead,
            groups=[
                GroupLag(
                    *(row.group, row.lag_at_least, row.lag is not None),
                    *(row.pending or 0, row.waiting_retries or 0),
                )
                for row in rows
                if row.partition == number and row.exists
            ],
        )
        for number, (each, size) in enumerate(zip(figures, sizes, strict=True))
    ]


def _sum_group(name: str, rows: list[PartitionRow]) -> GroupLag:
    parts = [part for row in rows for part in row.groups if part.group == name]
    return GroupLag(
        group=name,
        lag=sum(part.lag for part in parts),
        lag_exact=all(part.lag_exact for part in parts),
        pending=sum(part.pending for part in parts),
        waiting_retries=sum(part.waiting_retries for part in parts),
    )


def groups(
    store: Store,
    topic: str,
    partitions: Iterable[int],
    *,
    only_messages: bool = False,
) -> list[str]:
    """Return the sorted names of the groups that read any of these partitions.

    If `only_messages` is True, groups that read dead letters and groups that only show the position
    of a Spark query are left out. Names that are not UTF-8 are skipped, because streamqd cannot
    have created them.
    """
    places = [(topic, each) for each in partitions]
    found = groups_on(ViewReader(store), places, dead_letters=not only_messages)
    names: frozenset[str] = frozenset().union(*found)
    return sorted(name for name in names if not (only_messages and name.startswith(QUERY_PREFIX)))


def read_groups(reader: ViewReader, counts: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the sorted names of the groups of each topic, given the partition counts."""
    places = [(topic, number) for topic, count in counts.items() for number in range(count)]
    found: dict[str, set[str]] = {topic: set() for topic in counts}
    for (topic, _), names in zip(places, groups_on(reader, places), strict=True):
        found[topic] |= names
    return {topic: sorted(names) for topic, names in found.items()}


def groups_on(
    reader: ViewReader, places: Sequence[tuple[str, int]], *, dead_letters: bool = True
) -> list[frozenset[str]]:
    """Return the names of the groups that read each partition.

    By default, groups that read the dead letters of the partition are included.
    """
    kinds = (reader.keys.stream, reader.keys.dlq) if dead_letters else (reader.keys.stream,)
    streams = [kind(*place) for kind in kinds for place in places]
    replies = reader.ask([("XINFO", "GROUPS", stream) for stream in streams])
    found: list[set[str]] = [set() for _ in places]
    for at, (stream, reply) in enumerate(zip(streams, replies, strict=True)):
        for group in group_names(reader, reply, stream):
            # These groups were created by another client, because streamqd has no such group on
            # such a stream.
            if group["name"].endswith(DLQ_SUFFIX) == (at >= len(places)):
                found[at % len(places)].add(group["name"])
    return [frozenset(names) for names in found]


def read_figures(
    reader: ViewReader, counts: Mapping[str, int]
) -> dict[tuple[str, int], statistics.PartitionFigures]:
    """Measure each partition. The figures are zero if it cannot be measured."""
    places = [(topic, number) for topic, count in counts.items() for number in range(count)]
    calls = [statistics.measure_partition(reader.keys, *place) for place in places]
    return {
        place: parse_partition_figures(reader, place, reply)
        for place, reply in zip(places, reader.measure(calls), strict=True)
    }


def parse_partition_figures(
    reader: ViewReader, place: tuple[str, int], reply: Reply | None
) -> statistics.PartitionFigures:
    """Parse a reply to `statistics.measure_partition`. If it is None or invalid, return zeros."""
    found = reader.figures(statistics.partition_figures, reply, reader.keys.trim(*place))
    if found is None:
        return statistics.PartitionFigures(0, 0, "", "", 0, 0, "")
    reader.add(found.bad)
    return found
