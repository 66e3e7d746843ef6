"""What is stored of topics, and of those that the configuration names."""

from __future__ import annotations

import json
from collections.abc import Sequence

from streamqd import config
from streamqd.admin.diagnosis.facts import TopicFacts
from streamqd.admin.diagnosis.reading import Reader, named
from streamqd.config import Settings
from streamqd.store.keys import Keys

_GROUP = "group:"


def gather(
    reader: Reader, keys: Keys, settings: Settings, offered: Sequence[str]
) -> list[TopicFacts]:
    """Read the registry, and what is stored of its topics and of those that somebody consumes.

    `offered` are the topics that living instances consume.
    """
    (names,) = reader.ask([("SMEMBERS", keys.registry())])
    registered = {name.decode("utf-8", "replace") for name in names or ()}
    consumed = {each.topic for each in settings.consumers} | set(offered)
    every = sorted(registered | consumed | settings.topics.keys())
    commands = [
        command
        for name in every
        for command in (("HGETALL", keys.meta(name)), ("SMEMBERS", keys.partitions(name)))
    ]
    replies = reader.ask(commands)
    return [
        _topic(settings, name, name in registered, *replies[2 * at : 2 * at + 2])
        for at, name in enumerate(every)
    ]


def _topic(
    settings: Settings,
    name: str,
    registered: bool,
    meta: Sequence[bytes] | None,
    members: Sequence[bytes] | None,
) -> TopicFacts:
    stored = {field: value.decode("utf-8", "replace") for field, value in named(meta or ()).items()}
    count, unreadable = stored.get("partitionCount"), ""
    if count is not None and not (count.isascii() and count.isdigit() and int(count) > 0):
        unreadable = f"its partition count is {count!r}"
    text = stored.get("settings", "{}")
    try:
        holds = config.effective(settings.topics.get(name, config.Topic()), json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError):
        unreadable = unreadable or "its settings are not what `topic create` writes"
        holds = settings.topics.get(name, config.Topic())
    return TopicFacts(
        name=name,
        registered=registered,
        partitions=int(count) if count is not None and not unreadable else None,
        deleting="deleting" in stored,
        members=frozenset(each.decode("utf-8", "replace") for each in members or ()),
        groups=frozenset(
            field.removeprefix(_GROUP) for field in stored if field.startswith(_GROUP)
        ),
        holds=holds,
        unreadable=unreadable,
    )
