"""Taking over a group that other clients have read until now."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamqd.admin import backlog, groups, topics
from streamqd.admin.reading import BadValues, Unreadable, ask, lease_views, pairs
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
    """What was taken over, or would be: `consumers` as they were, `entries` that were pending.

    `unreadable` are values in Redis that cannot be read: they count as missing.
    """

    topic: str
    group: str
    dry_run: bool
    consumers: list[ConsumerRow]
    entries: int
    unreadable: list[Unreadable]


def survey(store: Store, topic: str, group: str) -> AdoptedGroup:
    """Look at the foreign consumers of a group. Refused while streamqd owns a part of it."""
    count = groups.known(store, topic, group)
    units = [Unit(topic, number, group) for number in range(count)]
    bad = BadValues()
    views = lease_views(store, units, bad)
    for unit, held in zip(units, views, strict=True):
        if held.token:
            raise _owned(unit, held.owner)
    found = []
    for kind in ("m", "r"):
        streams = [_stream(store.keys, unit, kind) for unit in units]
        replies = ask(store, [("XINFO", "CONSUMERS", stream, group) for stream in streams])
        for unit, reply in zip(units, replies, strict=True):
            for flat in reply or ():
                each = pairs(flat)
                name = each[b"name"].decode("utf-8", "replace")
                if name != CONSUMER and each[b"pending"]:
                    pending, idle = int(each[b"pending"]), int(each[b"idle"])
                    found.append(ConsumerRow(unit.partition, name, pending, idle))
    entries = sum(row.pending for row in found)
    return AdoptedGroup(topic, group, True, found, entries, bad.rows)


def adopt(store: Store, topic: str, group: str) -> AdoptedGroup:
    """Make everything that is pending streamqd's: its first owner handles it before all else.

    Refused while streamqd owns a part of it; what was taken until then stays taken.
    """
    seen, bad = survey(store, topic, group), BadValues()
    for unread in seen.unreadable:
        bad.keep(unread)
    units = [Unit(topic, each, group) for each in range(topics.partition_count(store, topic))]
    streams = {_stream(store.keys, unit, kind): (unit, kind) for unit in units for kind in "mr"}
    there = backlog.positions(store, list(streams), bad)
    for stream, (unit, kind) in streams.items():
        if group in there[stream]:
            _drain(store, unit, kind)
    return replace(seen, dry_run=False, unreadable=bad.rows)


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


def _owned(unit: Unit, owner: str) -> Refused:
    return Refused(
        f"{owner} owns {unit}: stop it or take the consumer out of its configuration first;"
        " while it runs it takes over by itself what others leave idle (reclaim_idle)"
    )
