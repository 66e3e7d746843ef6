"""Taking over a group that other clients have read until now."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.admin import topics
from streamqd.admin.reading import BadValues, ask, lease_views, pairs
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.store import adoption
from streamqd.store.adoption import Adopted
from streamqd.store.fetch import CONSUMER
from streamqd.store.keys import Keys
from streamqd.store.store import Store


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """A foreign consumer of one partition's stream: what it has pending, when it last called."""

    partition: int
    consumer: str
    pending: int
    idle_ms: int


@dataclass(frozen=True, slots=True)
class AdoptedGroup:
    """What was taken over, or would be: `consumers` as they were, `entries` that were pending."""

    topic: str
    group: str
    dry_run: bool
    consumers: list[ConsumerRow]
    entries: int


def survey(store: Store, topic: str, group: str) -> AdoptedGroup:
    """Look at the foreign consumers of a group. Refused while streamqd owns a part of it."""
    count = topics.partition_count(store, topic)
    units = [Unit(topic, number, group) for number in range(count)]
    if group not in topics.groups(store, topic, range(count)):
        raise Refused(f"no group {group} reads the topic {topic}")
    views = lease_views(store, units, BadValues())
    for unit, held in zip(units, views, strict=True):
        if held.token:
            raise _owned(unit, held.owner)
    found = []
    for kind in ("m", "r"):
        streams = [_stream(store.keys, unit, kind) for unit in units]
        told = ask(store, [("XINFO", "CONSUMERS", stream, group) for stream in streams])
        for unit, reply in zip(units, told, strict=True):
            for flat in reply or ():
                each = pairs(flat)
                name = each[b"name"].decode("utf-8", "replace")
                if name != CONSUMER and each[b"pending"]:
                    pending, idle = int(each[b"pending"]), int(each[b"idle"])
                    found.append(ConsumerRow(unit.partition, name, pending, idle))
    return AdoptedGroup(topic, group, True, found, sum(row.pending for row in found))


def adopt(store: Store, topic: str, group: str) -> AdoptedGroup:
    """Make everything that is pending streamqd's: its first owner handles it before all else.

    Refused while streamqd owns a part of it; what was taken until then stays taken.
    """
    seen = survey(store, topic, group)
    for number in range(topics.partition_count(store, topic)):
        unit = Unit(topic, number, group)
        for kind in ("m", "r"):
            if group in _groups(store, _stream(store.keys, unit, kind)):
                _drain(store, unit, kind)
    return AdoptedGroup(topic, group, False, seen.consumers, seen.entries)


def _drain(store: Store, unit: Unit, kind: str) -> None:
    cursor = adoption.BEGIN
    while True:
        reply = store.run(adoption.adopt(store.keys, unit, kind, cursor))
        if reply.word == "HELD":
            raise _owned(unit, reply.rest[1].decode("utf-8", "replace"))
        cursor = Adopted.parse(reply).cursor
        if cursor == adoption.BEGIN:
            return


def _stream(keys: Keys, unit: Unit, kind: str) -> str:
    return keys.source(*unit) if kind == "m" else keys.retry_stream(*unit)


def _groups(store: Store, stream: str) -> set[str]:
    [reply] = ask(store, [("XINFO", "GROUPS", stream)])
    return {pairs(flat)[b"name"].decode() for flat in reply or ()}


def _owned(unit: Unit, owner: str) -> Refused:
    return Refused(
        f"{owner} owns {unit}: stop it or take the consumer out of its configuration first;"
        " while it runs it takes over by itself what others leave idle (reclaim_idle)"
    )
