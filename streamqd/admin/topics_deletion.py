"""Delete a topic with all its keys.

The order of the steps makes it safe to interrupt and repeat the deletion:

1. Remove the partition count. From then on, the topic does not exist for producers and daemons, and
   it cannot be created. The old count is stored for the following steps.
2. Delete the keys of the partitions in bounded batches: first the keys with known names, then those
   that a scan finds by their hash tags.
3. Remove the names of its schedules from the index of schedules.
4. Remove its name from the registry, and then delete the key that records the deletion.

To finish a deletion that was interrupted after the first step, repeat the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streamqd.admin import topics as admin
from streamqd.admin.reading import ViewReader, ask, lease_views
from streamqd.errors import RequestRefusedError
from streamqd.model import Assignment
from streamqd.store import schedules, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store

UNLINK_MAX = 256  # maximum number of keys that one command deletes
SCAN_COUNT = 1000  # number of keys that one command examines

Progress = Callable[[int], None]

# Kinds of control keys with the hash tag of a partition.
_OF_PARTITIONS = (
    *("lease", "fence", "retry", "retry:item", "delayed", "delayed:item"),
    *("attempts", "epochs", "stack", "dedup", "trim", "sink", "moving"),
    *("schedule", "schedule:due", "schedule:last", "outbox"),
)


@dataclass(frozen=True, slots=True)
class DeletionExtent:
    """The data that a deletion would remove.

    `owned` lists the owned assignments, each with its owner. `partly_deleted` is True if an earlier
    deletion was interrupted.
    """

    topic: str
    partitions: int
    messages: int
    dead_letters: int
    groups: list[str]
    owned: list[str]
    partly_deleted: bool


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of `topic delete`. `keys` is the number of removed keys."""

    topic: str
    partitions: int
    keys: int


def measure_extent(store: Store, topic: str) -> DeletionExtent:
    """Return the extent of a deletion without deleting anything. Raises TopicNotFoundError."""
    raw = store.execute("HGET", store.keys.meta(topic), "deleting")
    count = int(raw) if raw is not None else admin.partition_count(store, topic)
    names = sorted({*admin.groups(store, topic, range(count)), *topics.known_groups(store, topic)})
    assignments = [Assignment(topic, number, name) for number in range(count) for name in names]
    views = lease_views(ViewReader(store), assignments)
    lengths = ask(
        store,
        [
            command
            for number in range(count)
            for command in (
                ("XLEN", store.keys.stream(topic, number)),
                ("XLEN", store.keys.dlq(topic, number)),
            )
        ],
    )
    return DeletionExtent(
        topic=topic,
        partitions=count,
        messages=sum(lengths[::2]),
        dead_letters=sum(lengths[1::2]),
        groups=names,
        owned=[
            f"{assignment} by {view.owner}"
            for assignment, view in zip(assignments, views, strict=True)
            if view.ttl is not None
        ],
        partly_deleted=raw is not None,
    )


def delete(
    store: Store,
    topic: str,
    *,
    force: bool,
    progress: Progress = lambda _removed: None,
) -> Deleted:
    """Delete a topic, or continue its deletion.

    `progress` is called with the number of keys that were removed so far. Raises
    TopicNotFoundError. Raises RequestRefusedError if a group on the topic is owned, unless `force`
    is True.
    """
    found = measure_extent(store, topic)
    if found.owned and not force:
        more = f" and {len(found.owned) - 1} more" if len(found.owned) > 1 else ""
        raise RequestRefusedError(
            f"the topic is in use ({found.owned[0]}{more}); stop its consumers first, or pass"
            " --force"
        )
    reply = store.run(topics.retire_call(store.keys, topic))
    if reply.word == "MISSING":
        raise RequestRefusedError(f"topic {topic} was deleted by another client")
    removed = 0
    for batch in _batches(store, topic, found):
        slots = store.connection.group_by_node(batch)
        removed += sum(map(int, ask(store, [("UNLINK", *names) for names in slots])))
        progress(removed)
    schedules.forget_topic(store, topic, found.partitions)
    store.execute("SREM", store.keys.registry(), topic)
    removed += int(store.execute("UNLINK", store.keys.partitions(topic), store.keys.meta(topic)))
    return Deleted(topic, found.partitions, removed)


def _batches(store: Store, topic: str, found: DeletionExtent) -> Iterator[list[str | bytes]]:
    """Yield the keys to remove: first the known names, then the keys that a scan finds."""
    keys, numbers = store.keys, range(found.partitions)
    assignments = [(topic, number, group) for number in numbers for group in found.groups]
    of_assignments = (
        *(keys.lease, keys.retry, keys.retry_items, keys.retry_stream, keys.attempts),
        *(keys.epochs, keys.stack),
    )
    of_partitions = (
        *(keys.stream, keys.dlq, keys.trim, keys.delayed_sends, keys.delayed_send_items),
        keys.moving,
        *(keys.schedules, keys.schedules_due, keys.schedules_last),
    )
    # The fences are deleted first, so that every later call of an owner is rejected.
    names: list[str | bytes] = [keys.fence(*assignment) for assignment in assignments]
    names += [kind(*assignment) for assignment in assignments for kind in of_assignments]
    names += [kind(topic, number) for number in numbers for kind in of_partitions]
    for start in range(0, len(names), UNLINK_MAX):
        yield names[start : start + UNLINK_MAX]
    for node in store.connection.masters():
        yield from _scan_keys(node, store.keys, topic)


def _scan_keys(node: Connection, keys: Keys, topic: str) -> Iterator[list[str | bytes]]:
    """Yield the keys of the topic on one node."""
    own = pattern(keys, topic)
    cursor = b"0"
    while True:
        # The braces of a hash tag have no special meaning in a glob.
        cursor, page = node.execute("SCAN", cursor, "MATCH", f"*{{{topic}*}}*", "COUNT", SCAN_COUNT)
        hit: list[str | bytes] = [key for key in page if own.fullmatch(key)]
        for start in range(0, len(hit), UNLINK_MAX):
            yield hit[start : start + UNLINK_MAX]
        if cursor == b"0":
            return


def pattern(keys: Keys, topic: str) -> re.Pattern[bytes]:
    """Return a pattern for all keys of a topic, except the two that its deletion still needs."""
    tag = rf"\{{{re.escape(topic)}:p:[0-9]+\}}"
    control, streams = re.escape(keys.control), re.escape(keys.streams)
    kinds = "|".join(_OF_PARTITIONS)
    whole = (
        rf"{control}:(?:{kinds}):{tag}(?::.*)?"
        rf"|{streams}:{tag}(?::dlq|:retry:.*)?"
        rf"|{control}:pipeline:\{{{re.escape(topic)}\}}:.*"
        rf"|{control}:topic:\{{{re.escape(topic)}\}}:audit"
    )
    return re.compile(whole.encode(), re.DOTALL)
