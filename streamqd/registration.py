"""Registering what is consumed: topics, and groups on all their partitions.

Done before work begins, after a reload, and when the server turns out to have been emptied.
"""

from __future__ import annotations

import logging

from streamqd import logs
from streamqd.config import Consumer, Settings, Topic
from streamqd.errors import ConfigError, RedisRefused
from streamqd.model import Unit
from streamqd.scoreboard import SLOT_COUNT
from streamqd.store import messages, topics
from streamqd.store.client import Link
from streamqd.store.keys import Keys


def ensure_topics(link: Link, settings: Settings, *, emptied: bool = False) -> dict[str, int]:
    """Register topics and create missing groups. Returns the partition counts.

    Repeating it changes nothing. A group that was never seen begins where its consumer says; one
    that was seen before and is gone begins at what is still there, and so do all groups when the
    server was `emptied` while they were consumed: what was sent since is not to be skipped.
    Raises ConfigError when the configuration names fewer partitions than are registered.
    """
    keys = Keys(settings.keys.control, settings.keys.streams)
    counts: dict[str, int] = {}
    problems: list[str] = []
    for topic in sorted({consumer.topic for consumer in settings.consumers}):
        declared = settings.topics.get(topic)
        wanted = declared.partitions if declared is not None else None
        counts[topic] = count = topics.create(link, keys, topic, declared or Topic())
        if wanted is None or wanted == count:
            continue
        if wanted < count:
            problems.append(
                f"topics.{topic}.partitions: {wanted} is less than the {count} registered ones; "
                f"a topic cannot shrink, write {count}"
            )
        else:
            logs.event(
                "config.warning",
                logging.WARNING,
                about=f"topics.{topic}.partitions is {wanted}, but {count} are registered and "
                "stay; growing a topic comes in a later release",
            )
    units = sum(counts[consumer.topic] for consumer in settings.consumers)
    if units > SLOT_COUNT:
        problems.append(
            f"consumers: they read {units} partitions in all, one instance can take {SLOT_COUNT}; "
            "give some of them to instances of another fleet"
        )
    if problems:
        raise ConfigError(problems)
    for consumer in settings.consumers:
        _ensure_group(link, keys, consumer, counts[consumer.topic], emptied=emptied)
    return counts


def _ensure_group(link: Link, keys: Keys, consumer: Consumer, count: int, *, emptied: bool) -> None:
    meta, field = keys.meta(consumer.topic), f"group:{consumer.group}"
    seen_before = link.execute("HGET", meta, field) is not None
    new = not seen_before and not emptied
    start = "$" if consumer.start == "latest" and new else "0"
    units = [Unit(consumer.topic, number, consumer.group) for number in range(count)]
    for first in range(0, count, 256):
        batch = units[first : first + 256]
        for reply in link.run_many([messages.ensure_group(keys, unit, start) for unit in batch]):
            if isinstance(reply, RedisRefused):
                raise reply
    if not seen_before:
        # Only after every partition has the group: a crash in between repeats the same start.
        link.execute("HSETNX", meta, field, count)
