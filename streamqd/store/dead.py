"""Script calls for dead letters: replay within a slot, move to another slot, delete.

The administration and the housekeeper's retention use these calls. Entries of a dead-letter stream
are deleted one by one (XDEL). The stream is never trimmed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streamqd.errors import ContractError
from streamqd.model import Assignment
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.messages import ITEMS_MAX, PLACES_MAX
from streamqd.store.scripts import Call, Reply

DELIVER_MAX = 4_000  # names and values of a dead letter that may leave its slot


def replay(
    keys: Keys,
    topic: str,
    partition: int,
    dead_letter_id: str,
    group: str | None,
    changed: Mapping[bytes, bytes],
) -> Call:
    """Replay a dead letter within its slot.

    With `group`, the message goes to the group's retry stream. With None, it goes to the partition,
    and every group gets it. `changed` are the fields to set, such as retryCount and replayCount.
    """
    if group == "":
        raise ContractError("dead_replay: an empty group")
    place = (topic, partition) if group is None else Assignment(topic, partition, group)
    return scripts.build_call(
        "dead_replay",
        keys,
        place,
        dead_letter_id=dead_letter_id,
        group=group or "",
        changed=[part for pair in changed.items() for part in pair],
    )


def mark(keys: Keys, topic: str, partition: int, dead_letter_id: str, target: str) -> Call:
    """Record that a dead letter is moving to `target`. This is the first of three steps.

    The other steps are `deliver` in the target's slot and `purge` in this one.
    """
    place = topic, partition
    return scripts.build_call(
        "dead_mark", keys, place, dead_letter_id=dead_letter_id, target=target
    )


class Marked(NamedTuple):
    """The destination of a moving dead letter, and the age of the mark in seconds (at least 0)."""

    target: str
    age: float

    @classmethod
    def parse(cls, reply: Reply) -> Marked:
        """Parse the reply OK of `mark`. If the clock was set back, the age is 0."""
        target, age = reply.values
        age_ms = untrusted.integer(age, "a mark of a move", low=-untrusted.INTEGER_MAX)
        return cls(untrusted.label(target), max(0, age_ms) / 1000)


def deliver(
    keys: Keys,
    topic: str,
    partition: int,
    group: str | None,
    fields: Mapping[bytes, bytes],
    name: str,
    window: float,
) -> Call:
    """Write a dead letter from another slot, for one group or, with None, for all groups.

    `name` is its dedup ID: a second call within `window` seconds writes nothing.
    """
    if group == "" or not fields or 2 * len(fields) > DELIVER_MAX:
        raise ContractError(f"dead_deliver: group {group!r}, {len(fields)} fields")
    if group is None:
        target = keys.stream(topic, partition)
    else:
        target = keys.retry_stream(topic, partition, group)
    return scripts.get("dead_deliver").call(
        {"target": target, "dedup": keys.dedup(topic, partition, name)},
        group=group or "",
        window_ms=round(window * 1000),
        fields=[part for pair in fields.items() for part in pair],
    )


class PurgeReply(NamedTuple):
    """The result of a purge: the number of `removed` dead letters and of `unarchived` ones left.

    If `more` is True, `purge_before` reached its count, and older dead letters may be left.
    """

    removed: int
    more: bool
    unarchived: int

    @classmethod
    def parse(cls, reply: Reply) -> PurgeReply:
        """Parse the reply OK of `purge` or `purge_before`."""
        removed, more, unarchived = reply.values
        return cls(int(removed), bool(more), int(unarchived))


def purge(
    keys: Keys,
    topic: str,
    partition: int,
    dead_letter_ids: Sequence[str],
    *,
    archived_only: bool = False,
) -> Call:
    """Delete dead letters by ID. With `archived_only`, unarchived dead letters stay."""
    if len(dead_letter_ids) > PLACES_MAX:
        raise ContractError(
            f"dead_purge: {len(dead_letter_ids)} ids, at most {PLACES_MAX} are allowed"
        )
    place = topic, partition
    return scripts.build_call(
        "dead_purge", keys, place, before="", count=0, archive=archived_only, ids=dead_letter_ids
    )


def purge_before(
    keys: Keys,
    topic: str,
    partition: int,
    before: str,
    count: int,
    *,
    archived_only: bool = False,
) -> Call:
    """Delete the oldest dead letters with IDs below `before`, at most `count`.

    With `archived_only`, unarchived dead letters stay.
    """
    if not before or not 1 <= count <= ITEMS_MAX:
        raise ContractError(f"dead_purge: {count} dead letters before {before!r}")
    place = topic, partition
    return scripts.build_call(
        "dead_purge", keys, place, before=before, count=count, archive=archived_only, ids=[]
    )
