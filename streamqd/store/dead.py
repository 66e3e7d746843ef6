"""Dead letters of a partition: putting them back, and deleting them.

Called by the administration and by the housekeeper's retention. The stream of dead letters is
deleted from and never trimmed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamqd.errors import ContractError
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.messages import ITEMS_MAX, PLACES_MAX
from streamqd.store.scripts import Call


def replay(
    keys: Keys,
    topic: str,
    partition: int,
    letter_id: str,
    group: str | None,
    changed: Mapping[bytes, bytes],
) -> Call:
    """Put a letter back for its own group, or with None into the partition for every group.

    `changed` are fields to set: retryCount 0, crashCount 0, replayCount one more.
    """
    if group == "":
        raise ContractError("dead_replay: an empty group")
    if group is None:
        target = keys.stream(topic, partition)
    else:
        target = keys.retry_stream(topic, partition, group)
    return scripts.get("dead_replay").call(
        {"dlq": keys.dlq(topic, partition), "target": target},
        letter_id=letter_id,
        group=group or "",
        changed=[part for pair in changed.items() for part in pair],
    )


def purge(keys: Keys, topic: str, partition: int, letter_ids: Sequence[str]) -> Call:
    """Delete the letters named."""
    if len(letter_ids) > PLACES_MAX:
        raise ContractError(f"dead_purge: {len(letter_ids)} ids, at most {PLACES_MAX} are allowed")
    return scripts.get("dead_purge").call(
        {"dlq": keys.dlq(topic, partition)}, before="", count=0, ids=letter_ids
    )


def purge_before(keys: Keys, topic: str, partition: int, before: str, count: int) -> Call:
    """Delete the oldest letters, at most `count`, that are older than the id `before`."""
    if not before or not 1 <= count <= ITEMS_MAX:
        raise ContractError(f"dead_purge: {count} letters before {before!r}")
    return scripts.get("dead_purge").call(
        {"dlq": keys.dlq(topic, partition)}, before=before, count=count, ids=[]
    )
