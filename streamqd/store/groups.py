"""A group's place on a partition: setting its position, removing it.

Called by the administration. Each function builds a call for one partition; nothing here spans two.
What a group has in hand goes in several calls when it is much: MORE asks for the next one, with the
same token.
"""

from __future__ import annotations

from typing import NamedTuple

from streamqd.model import Unit
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

AT_ONCE_MAX = 1_000  # pending entries that go with a group: dropping it frees them quickest
PART_MAX = 250  # that one call forgets while there are more
KEPT_SECONDS = 15.0  # from one call to the next others are kept out


def reset(
    keys: Keys,
    unit: Unit,
    after: str,
    *,
    drop_retries: bool,
    force: bool,
    keeper: str,
    token: str,
    at_once: int = AT_ONCE_MAX,
    part: int = PART_MAX,
) -> Call:
    """Let the group read what comes after an id; '' = what comes after the last one issued.

    With `force` an owner loses the partition, unless it is the `keeper`. `token` is new.
    """
    return scripts.on(
        "group_reset",
        keys,
        unit,
        after=after,
        drop=drop_retries,
        force=force,
        keeper=keeper,
        token=token,
        ttl_ms=round(KEPT_SECONDS * 1000),
        at_once=at_once,
        part=part,
    )


class ResetResult(NamedTuple):
    """What a reset has done. `retried` counts entries of the retry stream, settled ones too."""

    before: str
    after: str
    pending: int
    delayed: int = 0
    retried: int = 0

    @classmethod
    def parse(cls, reply: Reply) -> ResetResult:
        """Read OK, or MORE."""
        before, after, *counts = reply.rest
        return cls(before.decode(), after.decode(), *map(int, counts))

    def following(self, part: ResetResult) -> ResetResult:
        """What was done by this call and the part before it."""
        return self._replace(before=part.before, pending=part.pending + self.pending)


def delete(
    keys: Keys,
    unit: Unit,
    *,
    force: bool,
    token: str,
    at_once: int = AT_ONCE_MAX,
    part: int = PART_MAX,
) -> Call:
    """Remove the group and what is its own; with `force` also when it is owned or not settled.

    `token` is new.
    """
    return scripts.on(
        "group_delete",
        keys,
        unit,
        force=force,
        token=token,
        ttl_ms=round(KEPT_SECONDS * 1000),
        at_once=at_once,
        part=part,
    )
