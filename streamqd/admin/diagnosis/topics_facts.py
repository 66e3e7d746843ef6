"""What is stored of topics, and of those that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd import config
from streamqd.admin.diagnosis.facts import TopicFacts
from streamqd.admin.diagnosis.reading import TolerantReader, named
from streamqd.admin.topics_settings import readable
from streamqd.admin.unreadable import BadValues
from streamqd.config import Settings
from streamqd.store import untrusted
from streamqd.store.keys import Keys
from streamqd.store.topics import count_of

_GROUP = "group:"


def gather(
    reader: TolerantReader, keys: Keys, settings: Settings, offered: Sequence[str]
) -> list[TopicFacts]:
    """Read the registry, and what is stored of its topics and of those that somebody consumes.

    `offered` are the topics that living instances consume.
    """
    (names,) = reader.ask([("SMEMBERS", keys.registry())])
    told = {BadValues().read(untrusted.name, name, keys.registry()) for name in names or ()}
    registered = {name for name in told if name is not None}
    consumed = {each.topic for each in settings.consumers} | set(offered)
    every = sorted(registered | consumed | settings.topics.keys())
    commands = [
        command
        for name in every
        for command in (("HGETALL", keys.meta(name)), ("SMEMBERS", keys.partitions(name)))
    ]
    replies = reader.ask(commands)
    return [
        _topic(keys, settings, name, name in registered, *replies[2 * at : 2 * at + 2])
        for at, name in enumerate(every)
    ]


def _topic(
    keys: Keys,
    settings: Settings,
    name: str,
    registered: bool,
    meta: Sequence[bytes] | None,
    members: Sequence[bytes] | None,
) -> TopicFacts:
    stored = {field: value.decode("utf-8", "replace") for field, value in named(meta or ()).items()}
    count, unreadable = stored.get("partitionCount"), ""
    bad = BadValues()
    number = count and bad.read(count_of, name, count.encode(), keys.meta(name))
    if count is not None and number is None:
        unreadable = f"its partition count is {count[: untrusted.SHOWN_BYTES]!r}"
    text = stored.get("settings", "{}").encode()
    found = readable(text, keys.meta(name), bad)
    if any(row.field == "settings" for row in bad.rows):
        unreadable = unreadable or "its settings are not what `topic create` writes"
    holds = config.effective(settings.topics.get(name, config.Topic()), found)
    return TopicFacts(
        name=name,
        registered=registered,
        partitions=number or None,
        deleting="deleting" in stored,
        members=frozenset(each.decode("utf-8", "replace") for each in members or ()),
        groups=frozenset(
            field.removeprefix(_GROUP) for field in stored if field.startswith(_GROUP)
        ),
        holds=holds,
        unreadable=unreadable,
    )
