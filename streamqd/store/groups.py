"""A group's place on a partition: setting its position, removing it.

Called by the administration. Each function builds a call for one partition; nothing here spans two.
"""

from __future__ import annotations

from typing import NamedTuple

from streamqd.model import Unit
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply


def reset(
    keys: Keys, unit: Unit, after: str, *, drop_retries: bool, force: bool, keeper: str
) -> Call:
    """Let the group read what comes after an id; '' = what comes after the last one issued.

    With `force` an owner loses the partition, unless it is the `keeper`.
    """
    return scripts.get("group_reset").call(
        _keys(keys, unit),
        group=unit.group,
        after=after,
        drop=drop_retries,
        force=force,
        keeper=keeper,
    )


class Reset(NamedTuple):
    """What a reset has done. `retried` counts entries of the retry stream, settled ones too."""

    before: str
    after: str
    pending: int
    delayed: int
    retried: int

    @classmethod
    def parse(cls, reply: Reply) -> Reset:
        """Read OK."""
        before, after, *counts = reply.rest
        return cls(before.decode(), after.decode(), *map(int, counts))


def delete(keys: Keys, unit: Unit, *, force: bool) -> Call:
    """Remove the group and what is its own; with `force` also when it is owned or not settled."""
    return scripts.get("group_delete").call(_keys(keys, unit), group=unit.group, force=force)


def _keys(keys: Keys, unit: Unit) -> dict[str, str]:
    return {
        "stream": keys.source(*unit),
        "retry": keys.retry_stream(*unit),
        "delayed": keys.retry(*unit),
        "items": keys.retry_items(*unit),
        "attempts": keys.attempts(*unit),
        "fence": keys.fence(*unit),
        "lease": keys.lease(*unit),
        "trim": keys.trim(unit.topic, unit.partition),
    }
