"""Script calls that set the position of a group on a partition, or remove the group.

The administration uses these calls. To avoid blocking the server for long, each call removes only a
limited number of entries from the group's pending list. If the reply is MORE, repeat the call with
the same token.
"""

from __future__ import annotations

from typing import NamedTuple

from streamqd.model import Assignment
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

AT_ONCE_MAX = 1_000  # maximum number of pending entries that are all removed by a single call
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

    If `after` is '', the group moves to the end of the partition. If `drop_retries` is True, the
    group's retries are removed too.

    If the group has an owner, the call is refused unless `force` is True. The owner then loses the
    assignment, unless its name is `keeper`. Pass a new random `token`, and the same one when you
    repeat the call.
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

    `retried` is the number of entries removed from the group's retry stream. It includes entries
    that were already settled but not trimmed yet.
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
        """Return the total of this result and `part`, the result of the calls before it."""
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

    If the group has an owner or unsettled entries, the call is refused unless `force` is True. Pass
    a new random `token`, and the same one when you repeat the call.
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
