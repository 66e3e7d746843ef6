"""Script calls that set the position of a group on a partition, or remove the group.

The administration uses these calls. Each call applies to one partition and removes only a limited
number of entries from the group's pending list, so that the server is not blocked for long. If the
reply is MORE, repeat the call with the same token.
"""

from __future__ import annotations

from typing import NamedTuple

from streamqd.model import Assignment
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

AT_ONCE_MAX = 1_000  # largest number of pending entries that a single call removes together
PART_MAX = 250  # number of pending entries that each call removes if there are more than that
KEPT_SECONDS = 15.0  # how long the lease keeps other owners away until the next call


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
    """Move the group to the position after the entry `after`.

    If `after` is '', the group moves to the end of the partition.

    If `force` is True, the group is reset even if it has an owner. The owner then loses the
    assignment, unless it is the instance `keeper`. `token` must be new, except when the call is
    repeated.
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
    """The positions before and after a reset, and the numbers of removed entries.

    `retried` is the number of entries removed from the retry stream, including settled ones.
    """

    before: str
    after: str
    pending: int
    waiting_retries: int = 0
    retried: int = 0

    @classmethod
    def parse(cls, reply: Reply) -> ResetResult:
        """Parse an OK or MORE reply."""
        before, after, *counts = reply.values
        return cls(before.decode(), after.decode(), *map(int, counts))

    def following(self, part: ResetResult) -> ResetResult:
        """Return the combined result of this call and the previous one, `part`."""
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
    """Remove the group and all its state from the partition.

    Unless `force` is True, the call is refused if the group has an owner or unsettled entries.
    `token` must be new, except when the call is repeated.
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
