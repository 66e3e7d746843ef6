"""Script calls that replay dead letters, move them to another slot, and delete them.

The administration and the housekeeper's retention use these calls. Dead letters are deleted one by
one with XDEL, and the stream is never trimmed with XTRIM, because some servers cannot load a
snapshot of a stream that both commands have changed.
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

# A dead letter with more names and values than this cannot be moved to another slot.
DELIVER_MAX = 4_000


def replay(
    keys: Keys,
    topic: str,
    partition: int,
    dead_letter_id: str,
    group: str | None,
    changed: Mapping[bytes, bytes],
) -> Call:
    """Replay a dead letter to a stream in the same slot.

    If `group` is given, the message is written to the retry stream of that group. If it is None,
    the message is written to the partition, so every group receives it. `changed` maps the fields
    to change to their new values, for example retryCount and replayCount.
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
    """Record that a dead letter is moving to `target`, which is in another slot.

    A move takes three calls, because one script cannot use the keys of two slots: `mark` records
    the target, `deliver` writes the message there, and `purge` deletes the dead letter. To undo an
    earlier `mark`, pass '' as `target`.
    """
    place = topic, partition
    return scripts.build_call(
        "dead_mark", keys, place, dead_letter_id=dead_letter_id, target=target
    )


class Marked(NamedTuple):
    """The destination of a dead letter that is moving, and the seconds since it was marked."""

    target: str
    age: float

    @classmethod
    def parse(cls, reply: Reply) -> Marked:
        """Parse an OK reply to `mark`. The age is 0 if the clock was set back since the mark."""
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
    """Write a message that was a dead letter in another slot.

    If `group` is given, only that group receives the message. If it is None, all groups receive it.
    `name` is used as a deduplication ID, so that a repeated call within `window` seconds does not
    write the message again.
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
    """The result of deleting dead letters.

    `removed` is the number of deleted dead letters. `unarchived` is the number of dead letters that
    `purge` was asked to delete, but kept because they are not archived yet. If `more` is True,
    `purge_before` has reached its limit, and may find further dead letters when it is called again.
    """

    removed: int
    more: bool
    unarchived: int

    @classmethod
    def parse(cls, reply: Reply) -> PurgeReply:
        """Parse an OK reply to `purge` or `purge_before`."""
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
    """Delete the dead letters with these IDs.

    If `archived_only` is True, dead letters that are not archived yet are kept.
    """
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
    """Delete up to `count` dead letters with IDs below `before`, oldest first.

    If `archived_only` is True, dead letters that are not archived yet are kept.
    """
    if not before or not 1 <= count <= ITEMS_MAX:
        raise ContractError(f"dead_purge: {count} dead letters before {before!r}")
    place = topic, partition
    return scripts.build_call(
        "dead_purge", keys, place, before=before, count=count, archive=archived_only, ids=[]
    )
