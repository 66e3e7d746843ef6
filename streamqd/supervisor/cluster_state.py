"""The supervisor's view of the fleet: its live members, and the owners of other assignments.

The fence of an assignment names its owner and epoch, but reading the lease is cheaper and usually
enough. A token belongs to one owner and one epoch, and the scripts write it to the fence before
they write it to the lease. So as long as the lease contains the token that was last read from the
fence, the fence has not changed. The fence is read again, together with the remaining time of the
lease, if the lease is gone, if it has a different token, or if the owner may have exited.

An outdated view does no harm, because the script that acquires an assignment compares epochs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd import logs
from streamqd.errors import InvalidValueError, RedisUnavailableError, StreamqdError
from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment
from streamqd.policy.rebalance import MemberView, PartitionView
from streamqd.store import leases, topics
from streamqd.store.keys import Keys
from streamqd.store.leases import LeaseView

TOPICS_INTERVAL_SECONDS = 2.0  # least number of seconds between two reads of the topics' entries

# A function that runs commands and returns their replies in the same order. It takes a list of
# assignments and a list of commands. The commands are in the order of the assignments, and each
# assignment has the same number of commands. If a node does not answer, its replies are errors.
Ask = Callable[[Sequence[Assignment], list[tuple[Any, ...]]], list[Any]]


@dataclass(frozen=True)
class ClusterState:
    """A snapshot of the fleet: its live members, and the owners of other assignments."""

    live: Sequence[MemberView] = ()
    views: Mapping[Assignment, PartitionView] = field(default_factory=dict)
    # The tokens of owners that no longer run: earlier runs of this instance, and owners whose
    # leases have expired.
    dead_tokens: Mapping[Assignment, str] = field(default_factory=dict)


class OwnershipCache:
    """Remembers who owned each assignment, so that unchanged fences need not be read again."""

    def __init__(self, keys: Keys, isolate: Isolate[Assignment] = run_directly) -> None:
        self._keys = keys
        self._isolate = isolate
        self._held: dict[Assignment, LeaseView] = {}
        self.bad: list[InvalidValueError] = []  # invalid fences that the last read found

    def read(
        self, assignments: Sequence[Assignment], live: Collection[str], ask: Ask
    ) -> dict[Assignment, LeaseView]:
        """Return the owner, epoch and remaining lease time of each assignment.

        Assignments are left out if their node does not answer or their fence is invalid. Invalid
        fences are listed in `bad`. `live` contains the instances that are known to be alive. If one
        of them still holds an assignment, its lease time (`ttl`) is that of an earlier read. Raises
        the errors of `ask`.
        """
        held = {assignment: view for assignment, view in self._held.items() if view.owner in live}
        found: dict[Assignment, LeaseView] = {}
        silent: set[Assignment] = set()
        glance = {
            assignment: self._isolate(assignment, leases.token_command, self._keys, assignment)
            for assignment in held
        }
        known = [assignment for assignment in assignments if glance.get(assignment)]
        glances = ask(known, [command for assignment in known if (command := glance[assignment])])
        for assignment, token in zip(known, glances, strict=True):
            if isinstance(token, RedisUnavailableError):
                silent.add(assignment)
            elif token == held[assignment].token.encode():
                found[assignment] = held[assignment]
        self.bad = []
        left = [
            assignment
            for assignment in assignments
            if assignment not in found and assignment not in silent
        ]
        views = {
            assignment: self._isolate(assignment, leases.view_commands, self._keys, assignment)
            for assignment in left
        }
        rest = [assignment for assignment in left if views[assignment]]
        replies = ask(rest, [each for assignment in rest for each in views[assignment] or ()])
        for assignment, fence, ttl in zip(rest, replies[::2], replies[1::2], strict=True):
            if not (isinstance(fence, StreamqdError) or isinstance(ttl, StreamqdError)):
                view = self._isolate(assignment, self._read_assignment, assignment, fence, ttl)
                if view is not None:
                    found[assignment] = view
        self._held = {
            assignment: view
            for assignment, view in found.items()
            if view.token and view.ttl is not None
        }
        return found

    def _read_assignment(self, assignment: Assignment, fence: Any, ttl: Any) -> LeaseView | None:
        try:
            return LeaseView.parse(fence, ttl, self._keys.fence(*assignment))
        except InvalidValueError as error:
            self.bad.append(error)
            return None


class TopicPresence:
    """Checks whether the consumed topics are still registered, each time the fleet is read.

    If an operator deletes only the metadata of a topic, Redis rejects its producers. Without this
    check, the instance would not notice, because all fences still exist. The check also finds
    topics whose invalid partition count was repaired after the instance started.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._looked_at = -TOPICS_INTERVAL_SECONDS
        self._lost = logs.Once("topic.lost", logging.WARNING)
        self._bad = logs.bad_values()

    def check(
        self,
        names: Sequence[str],
        served: Collection[str],
        ask: Callable[[list[tuple[Any, ...]]], list[Any]],
    ) -> bool:
        """Return True if the consumed topics should be registered again.

        That is the case if one of the topics in `names` is no longer registered, or if one that is
        not in `served` can now be read. `served` contains the topics whose partitions this instance
        already knows. Redis is read no more than once per `TOPICS_INTERVAL_SECONDS`, and the result
        is False in between. Raises the errors of `ask`.
        """
        now = time.monotonic()
        if now - self._looked_at < TOPICS_INTERVAL_SECONDS:
            return False
        self._looked_at = now
        lost: list[str] = []
        found: list[str] = []
        bad: list[InvalidValueError] = []
        replies = ask([topics.partition_count_command(self._keys, name) for name in names])
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, StreamqdError):
                # Either the node does not answer, or the key has the wrong type. A wrong type is
                # reported when the topic is registered.
                continue
            try:
                count = topics.parse_partition_count_reply(self._keys, name, reply)
            except InvalidValueError as error:
                bad.append(error)
                continue
            if count is None:
                lost.append(name)
            elif name not in served and count:
                found.append(name)
        self._lost.report({name: {"topic": name} for name in lost})
        self._bad.report_values(bad)
        return bool(lost or found)
