"""Take over a consumer group that was created and read by other clients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamqd.admin import backlog, groups, topics
from streamqd.admin.reading import Unreadable, ViewReader, ask, lease_views, pairs
from streamqd.errors import RequestRefusedError
from streamqd.model import Assignment
from streamqd.store import adoption
from streamqd.store.adoption import Adopted
from streamqd.store.fetch import CONSUMER
from streamqd.store.keys import Keys
from streamqd.store.store import Store


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """A consumer of another client on one partition.

    `pending` is the number of its pending entries, and `idle_ms` is the time since it last called
    the server.
    """

    partition: int
    consumer: str
    pending: int
    idle_ms: int


@dataclass(frozen=True, slots=True)
class AdoptedGroup:
    """The result of an adoption, or of its dry run.

    `consumers` lists the other clients' consumers before the adoption, and `entries` is the total
    number of their pending entries. `unreadable` lists values in Redis that cannot be read, and
    were therefore treated as missing.
    """

    topic: str
    group: str
    dry_run: bool
    consumers: list[ConsumerRow]
    entries: int
    unreadable: list[Unreadable]


def survey(store: Store, topic: str, group: str) -> AdoptedGroup:
    """Return the consumers of other clients in a group that have pending entries.

    This is the dry run of `adopt`. Raises RequestRefusedError if streamqd owns a partition of the
    group.
    """
    count = groups.partition_count(store, topic, group)
    assignments = [Assignment(topic, number, group) for number in range(count)]
    reader = ViewReader(store)
    views = lease_views(reader, assignments)
    for assignment, held in zip(assignments, views, strict=True):
        if held.token:
            raise _in_use_error(assignment, held.owner)
    found = []
    for kind in ("m", "r"):
        streams = [_stream(store.keys, assignment, kind) for assignment in assignments]
        replies = ask(store, [("XINFO", "CONSUMERS", stream, group) for stream in streams])
        for assignment, reply in zip(assignments, replies, strict=True):
            for flat in reply or ():
                each = pairs(flat)
                name = each[b"name"].decode("utf-8", "replace")
                if name != CONSUMER and each[b"pending"]:
                    pending, idle = int(each[b"pending"]), int(each[b"idle"])
                    found.append(ConsumerRow(assignment.partition, name, pending, idle))
    entries = sum(row.pending for row in found)
    return AdoptedGroup(topic, group, True, found, entries, reader.rows)


def adopt(store: Store, topic: str, group: str) -> AdoptedGroup:
    """Hand all pending entries of other clients to streamqd. The next owner handles them first.

    Raises RequestRefusedError if an instance of streamqd owns a partition of the group. If an
    instance acquires a partition during the call, the call stops with this error, but entries that
    were already adopted stay adopted.
    """
    seen, reader = survey(store, topic, group), ViewReader(store)
    for unread in seen.unreadable:
        reader.add_row(unread)
    assignments = [
        Assignment(topic, each, group) for each in range(topics.partition_count(store, topic))
    ]
    streams = {
        _stream(store.keys, assignment, kind): (assignment, kind)
        for assignment in assignments
        for kind in "mr"
    }
    known_groups = backlog.read_positions(reader, list(streams))
    for stream, (assignment, kind) in streams.items():
        if group in known_groups[stream]:
            _drain(store, assignment, kind)
    return replace(seen, dry_run=False, unreadable=reader.rows)


def _drain(store: Store, assignment: Assignment, kind: str) -> None:
    cursor = adoption.BEGIN
    while True:
        reply = store.run(adoption.adopt(store.keys, assignment, kind, cursor))
        if reply.word == "HELD":
            raise _in_use_error(assignment, reply.values[1].decode("utf-8", "replace"))
        cursor = Adopted.parse(reply).cursor
        if cursor == adoption.BEGIN:
            return


def _stream(keys: Keys, assignment: Assignment, kind: str) -> str:
    return keys.source(*assignment) if kind == "m" else keys.retry_stream(*assignment)


def _in_use_error(assignment: Assignment, owner: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"{owner} owns {assignment}; stop it, or remove the consumer from its configuration."
        " While it runs, it takes over idle entries of other clients after reclaim_idle"
    )
