"""Script calls that set the position of a group on a partition, or remove the group.

The administration uses these calls. Each is for one partition and releases a limited number of
pending entries. After the reply MORE, repeat the call with the same token.
"""

from __future__ import annotations

from typing import NamedTuple

from streamqd.model import Assignment
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

AT_ONCE_MAX = 1_000  # number of pending entries up to which one call removes the whole group
PART_MAX = 250  # pending entries that one call releases if there are more
KEPT_SECONDS = 15.0  # time for which the partition stays reserved between two calls


def reset(
    keys: Keys,
    assignment: Assignment,
    after: str,
    *,
    drop_retries: bool,
    force: bool,
    keeper: str,
    token: str,
    at_once: int = AT_ONCE_MAX,
    part: int = PART_MAX,
) -> Call:
    """Move the group to the entries after an ID. With '', move it to the end of the partition.

    With `force`, the owner loses the partition, unless it is the `keeper`. `token` must be new.
    """
    return scripts.build_call(
        "group_reset",
        keys,
        assignment,
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
    """The effect of a reset.

    `retried` counts the entries of the retry stream, even settled ones.
    """

    before: str
    after: str
    pending: int
    waiting_retries: int = 0
    retried: int = 0

    @classmethod
    def parse(cls, reply: Reply) -> ResetResult:
        """Parse the reply OK or MORE."""
        before, after, *counts = reply.values
        return cls(before.decode(), after.decode(), *map(int, counts))

    def following(self, part: ResetResult) -> ResetResult:
        """Return the total of this result and the result of the previous call."""
        return self._replace(before=part.before, pending=part.pending + self.pending)


def delete(
    keys: Keys,
    assignment: Assignment,
    *,
    force: bool,
    token: str,
    at_once: int = AT_ONCE_MAX,
    part: int = PART_MAX,
) -> Call:
    """Remove the group and its state. `force`: even if it is owned or has unsettled entries.

    `token` must be new.
    """
    return scripts.build_call(
        "group_delete",
        keys,
        assignment,
        force=force,
        token=token,
        ttl_ms=round(KEPT_SECONDS * 1000),
        at_once=at_once,
        part=part,
    )
