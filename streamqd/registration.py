"""Register the consumed topics, and their groups on all partitions.

This is done before the first fork, after a reload, and after the server has lost its data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from streamqd import logs
from streamqd.config import Consumer, Settings, Topic
from streamqd.errors import (
    ConfigError,
    ContractError,
    InvalidValueError,
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
)
from streamqd.model import Assignment
from streamqd.scoreboard import SLOT_COUNT
from streamqd.store import key_types, messages, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.scripts import Reply
from streamqd.store.store import Store


def ensure_topics(
    link: Connection,
    settings: Settings,
    known: Mapping[str, int] = MappingProxyType({}),
    *,
    emptied: bool = False,
    restored: list[Assignment] | None = None,
) -> dict[str, int]:
    """Register topics and create missing groups. Return the partition counts. May be repeated.

    A new group starts at its consumer's `start` setting. A group that existed before but is missing
    now starts at the oldest remaining entry, and is added to `restored`. Pass `emptied=True` if the
    server has lost its data while the groups were consumed. All groups then start at the oldest
    entry, so that messages sent since then are not skipped. A missing topic gets its previous
    number of partitions, from `known` or from the set of its streams.

    If a topic cannot be read, this is logged, and the topic is left out of the result. If a group
    cannot be read on one partition, this is only logged. Raises ConfigError if the configuration
    has fewer partitions than are registered.
    """
    store = Store(link, Keys(settings.keys.control, settings.keys.streams))
    counts: dict[str, int] = {}
    problems: list[str] = []
    for topic in sorted({consumer.topic for consumer in settings.consumers}):
        try:
            count = _create_topic(store, settings, topic, known.get(topic, 0))
        except InvalidValueError as error:
            logs.bad_value(error, topic=topic)
        except RedisResponseError as error:
            mistyped = _find_mistyped(store, topic) if key_types.is_of_type(error) else []
            for bad in mistyped:
                logs.bad_value(bad, topic=topic, fix=key_types.remedy(bad.key))
            if not mistyped:
                _log_or_raise(error, topic=topic)
                continue
            # The topic is registered anyway, so that views list it and report its keys that cannot
            # be read.
            try:
                topics.register(store, topic)
            except RedisResponseError as refused:
                _log_or_raise(refused, topic=topic)
        else:
            problems += _count_problems(settings, topic, count)
            counts[topic] = count or 0
    problems += _size_problems(settings, counts)
    if problems:
        raise ConfigError(problems)
    for consumer in settings.consumers:
        if consumer.topic in counts:
            found = _ensure_group(store, consumer, counts[consumer.topic], emptied=emptied)
            if restored is not None:
                restored += found
    return counts


def _count_problems(settings: Settings, topic: str, count: int | None) -> list[str]:
    """Return the problems with a topic's partition count, which is None if the topic is missing."""
    if count is None:
        return [
            (
                f"consumers: a consumer reads the dead letters of {topic}, which does not exist"
                f" yet; correct the name, write [topics.{topic}] with its partitions, or start"
                " its producer or consumer first"
            )
        ]
    wanted = _required_count(settings.topics.get(topic))
    if wanted is not None and wanted < count:
        return [
            (
                f"topics.{topic}.partitions: {wanted} is less than the {count} registered"
                f" partitions; a topic cannot shrink, so write {count}"
            )
        ]
    if wanted is not None and wanted > count:
        logs.event(
            "config.warning",
            logging.WARNING,
            about=f"topics.{topic}.partitions is {wanted}, but {count} are registered; run"
            f" `streamqd topic grow {topic} {wanted}` to add partitions",
        )
    return []


def _size_problems(settings: Settings, counts: Mapping[str, int]) -> list[str]:
    assignments = sum(counts.get(consumer.topic, 0) for consumer in settings.consumers)
    if assignments <= SLOT_COUNT:
        return []
    return [
        (
            f"consumers: together they have {assignments} partitions, but one instance can own at"
            f" most {SLOT_COUNT}; move some of them to another fleet"
        )
    ]


def _create_topic(store: Store, settings: Settings, topic: str, known: int) -> int | None:
    """Create a topic unless it exists, and return its partition count.

    `known` is the previous partition count, or 0 if it is unknown. If a missing topic is named only
    by consumers of its dead letters, it is not created, and the result is None. Raises
    InvalidValueError if the stored count is invalid.
    """
    if not known and _is_unknown(store, settings, topic):
        return None
    wanted = settings.topics.get(topic) or Topic()
    lost = known > 0 and topics.partition_count(store, topic) is None
    if lost:
        # The topic may have grown since `known` was read, so there may be streams for more
        # partitions.
        wanted = replace(wanted, partitions=max(known, topics.count_streams(store, topic)))
    count = topics.create(store, topic, wanted)
    if lost:
        logs.event("topic.restored", logging.WARNING, topic=topic, partitions=count)
    return count


def _find_mistyped(store: Store, topic: str) -> list[InvalidValueError]:
    """Return the keys of a topic whose type is wrong."""
    meta, partitions = store.keys.meta(topic), store.keys.partitions(topic)
    wanted = {meta: key_types.HASH, partitions: key_types.SET}
    return key_types.find_mistyped(store.connection, wanted)


def _log_or_raise(
    error: RedisResponseError, topic: str | None = None, assignment: Assignment | None = None
) -> None:
    """Log an error that affects only one key.

    Raise any other error, because it affects the whole server.
    """
    if error.kind is not RefusalKind.BAD_KEY_OR_COMMAND:
        raise error
    logs.event(
        "redis.bad_value", logging.WARNING, error=str(error), topic=topic, assignment=assignment
    )


def _required_count(declared: Topic | None) -> int | None:
    """Return the partition count that the settings require, or None if they accept any count."""
    if declared is None:
        return None
    # Settings that were built in code have no `explicit` names. In these, a value counts as set if
    # it differs from the default.
    stated = "partitions" in declared.explicit or declared.partitions != Topic().partitions
    return declared.partitions if stated else None


def _is_unknown(store: Store, settings: Settings, topic: str) -> bool:
    """Return True if the topic is missing, and only consumers of its dead letters name it.

    Such a topic is not created.
    """
    declared = settings.topics.get(topic)
    named = declared is not None and declared.explicit
    readers = [each for each in settings.consumers if each.topic == topic]
    if named or not all(each.reads_dead_letters for each in readers):
        return False
    return topics.partition_count(store, topic) is None


def log_restored(assignment: Assignment, reply: Reply) -> bool:
    """Return True if a group that should exist had to be created again, and log this.

    `reply` is the reply of group_ensure.
    """
    created = reply.word == "CREATED"
    if created:
        logs.event(
            "group.restored", logging.WARNING, assignment=assignment, after=reply.values[0].decode()
        )
    return created


def _ensure_group(
    store: Store, consumer: Consumer, count: int, *, emptied: bool
) -> list[Assignment]:
    """Create the group on all partitions where it is missing.

    Return the assignments that had lost it.
    """
    meta, field = store.keys.meta(consumer.topic), f"group:{consumer.assignment_group}"
    seen_before = store.execute("HGET", meta, field) is not None
    new = not seen_before and not emptied
    start = "$" if consumer.start == "latest" and new else "0"
    assignments = [
        Assignment(consumer.topic, number, consumer.assignment_group) for number in range(count)
    ]
    restored: list[Assignment] = []
    whole = True
    for first in range(0, count, 256):
        batch = assignments[first : first + 256]
        calls = [messages.ensure_group(store.keys, assignment, start) for assignment in batch]
        for assignment, reply in zip(batch, store.run_each(calls), strict=True):
            if isinstance(reply, RedisUnavailableError):
                raise reply
            if isinstance(reply, ContractError):
                # The supervisor tries again when it owns the assignment. If that fails as well, it
                # gives up only this assignment.
                logs.event(
                    "redis.refused",
                    logging.ERROR,
                    request="group",
                    error=str(reply),
                    assignment=assignment,
                )
                whole = False
            elif isinstance(reply, RedisResponseError):
                _log_or_raise(reply, assignment=assignment)
                whole = False
            elif not new and log_restored(assignment, reply):
                restored.append(assignment)
    if whole and not seen_before:
        # Record the group only after every partition has it. If the process crashes before, the
        # next call then still treats the group as a new one.
        store.execute("HSETNX", meta, field, count)
    return restored
